"""Samples and scores as JSON: what an HTTP reward service is sent, and what it must answer.

    POST {"samples": [{"id", "index", "text", "transcript", "language", "response_ids", "finish_reason", "reference",
                       "reference_language", "seconds", "row", "messages", "num_turns", "scores"}, ...]}
    ->   {"scores": [0.5, {"clarity": 1, "style": null}, {"turns": [0, 1]}, {"error": "why there is none"}, ...]}

One score a sample, in order. A part that is null does not apply; "turns" holds one number for each turn.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from skirl.records import RewardSample, ScoreFailure
from skirl.rewards.combine import Parts
from skirl.rewards.python_file import TURNS

__all__ = ["WireError", "encode_sample", "read_answer", "request_body"]


class WireError(ValueError):
    """What came is not what was agreed; the message names the place."""


def encode_sample(sample: RewardSample) -> bytes:
    """One sample as JSON; arrays become lists, bytes base64 text, paths text, NaN and infinity null.

    Raises:
        WireError: its row holds what JSON cannot carry.
    """
    where = f"sample {sample.id}#{sample.index}: "
    return json.dumps(
        {item.name: _plain(getattr(sample, item.name), where + item.name) for item in fields(sample)}
    ).encode()


def request_body(encoded: Sequence[bytes]) -> bytes:
    """The body of a request with these samples."""
    return b'{"samples": [' + b", ".join(encoded) + b"]}"


def _plain(value: Any, where: str) -> Any:
    """A value as JSON can carry it. Raises WireError naming the place of what it cannot."""
    if value is None or isinstance(value, str | bool | int | float):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # arrays, and numbers of numpy
        return _plain(value.tolist(), where)
    raise WireError(f"{where} is a {type(value).__name__}, which JSON cannot carry")


def read_answer(body: bytes, name: str, num_turns: Sequence[int]) -> list[Parts | ScoreFailure | WireError]:
    """Parts, the service's failure, or what is wrong with its score, of each sample of a request.

    Args:
        body: of the answer.
        name: of the service: a bare number becomes a part of this name, a named one ``name/part``.
        num_turns: of each sample.

    Raises:
        WireError: it is no JSON, or has another form or number of scores.
    """
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise WireError(f"the answer is not JSON ({error}): {body[:80]!r}") from None
    except RecursionError:
        raise WireError(f"the answer is not JSON (it is nested too deeply): {body[:80]!r}") from None
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise WireError(f'the answer has no list "scores": {str(answer)[:80]}')
    if len(scores) != len(num_turns):
        raise WireError(f"the answer has {len(scores)} scores for {len(num_turns)} samples")
    return [
        _parts(score, name, turns, f"scores[{index}]")
        for index, (score, turns) in enumerate(zip(scores, num_turns, strict=True))
    ]


def _parts(score: Any, name: str, num_turns: int, where: str) -> Parts | ScoreFailure | WireError:
    """One score of an answer; one of another form, or not finite, is no matter of its siblings."""
    try:
        return _checked_parts(score, name, num_turns, where)
    except WireError as error:
        return error


def _checked_parts(score: Any, name: str, num_turns: int, where: str) -> Parts | ScoreFailure:
    if not isinstance(score, dict):
        return {name: _number(score, where)}
    if set(score) == {"error"} and isinstance(score["error"], str):
        return ScoreFailure("service", f"it gave no score: {score['error'][:1000]}")
    if not score:
        raise WireError(f"{where} is empty")
    parts: Parts = {}
    for part, value in score.items():
        place = f"{where}.{part}"
        if part == TURNS:
            if not isinstance(value, list) or len(value) != num_turns:
                raise WireError(f"{place} must be a list of {num_turns} numbers, one a turn")
            parts[f"{name}/{part}"] = tuple(_number(item, place) for item in value)
        else:
            parts[f"{name}/{part}"] = None if value is None else _number(value, place)
    return parts


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float):  # bool is one
        raise WireError(f"{where} is {str(value)[:80]!r}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WireError(f"{where} is {number}; a score must be a finite number")
    return number
