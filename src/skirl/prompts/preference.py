"""Rows that say which response is better: pairs (``skirl rm``, ``skirl dpo``) and single labelled ones (kto)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skirl.errors import DataError
from skirl.prompts.conversation import Turns, answer_turns, prompt_row, prompt_turns, shown
from skirl.prompts.manifests.columns import Source
from skirl.records import Row

__all__ = ["Labelled", "Pair", "labelled", "pair"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two continuations of one prompt; each begins and ends with a turn of the assistant.

    Attributes:
        row: the prompt's turns, and every other column.
        margin: by how much chosen is better; 0 where the row has no such column.
    """

    row: Row
    chosen: Turns
    rejected: Turns
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Labelled:
    """A response to a prompt, and whether it is desirable."""

    row: Row
    response: Turns
    label: bool


def pair(source: Source, record: Mapping[str, Any], where: str, *, needs_margin: bool = False) -> Pair:
    """The pair of a row: ``prompt`` (or ``messages``), ``chosen``, ``rejected``, and perhaps ``margin``.

    chosen and rejected are texts, turns that continue the prompt, or whole conversations. Without a prompt column they
    are whole conversations, and what both begin with is the prompt.

    Raises:
        DataError: a column is missing or holds something else; the two are equal; no turn of the assistant follows.
    """
    found = prompt_turns(record, where)
    chosen = answer_turns(record, "chosen", where)
    rejected = answer_turns(record, "rejected", where, may_be_empty=True)
    if found is None:
        turns = _common(chosen, rejected)
        if not turns:
            raise DataError(
                f"{where}: the row has no prompt: expected a column prompt or messages, or conversations in 'chosen' "
                f"and 'rejected' that begin with the same turns; it has {', '.join(record)}."
            )
    else:
        turns = found[1]
    continuations = [_after(turns, each) for each in (chosen, rejected)]
    for column, turns_after in zip(("chosen", "rejected"), continuations, strict=True):
        _check_continuation(turns_after, column, where)
    if continuations[0] == continuations[1]:
        raise DataError(f"{where}: columns 'chosen' and 'rejected' are equal; expected two different responses.")
    used = {"chosen", "rejected", "margin", *([] if found is None else [found[0]])}
    row = prompt_row(source, record, turns, used=used, where=where)
    return Pair(row, continuations[0], continuations[1], _margin(record.get("margin"), where, needed=needs_margin))


def labelled(source: Source, record: Mapping[str, Any], where: str) -> Labelled:
    """The labelled response of a row: ``prompt`` (or ``messages``), ``response`` (or ``completion``), ``label``.

    Raises:
        DataError: a column is missing or holds something else.
    """
    found = prompt_turns(record, where)
    if found is None:
        raise DataError(f"{where}: column 'prompt' is missing; the row has {', '.join(record) or 'no column'}.")
    column, turns = found
    name = "completion" if record.get("response") is None and record.get("completion") is not None else "response"
    label = record.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        what = "is missing" if label is None else f"holds {shown(label)}"
        raise DataError(f"{where}: column 'label' {what}; expected true (desirable) or false.")
    response = _after(turns, answer_turns(record, name, where, may_be_empty=not label))
    _check_continuation(response, name, where)
    row = prompt_row(source, record, turns, used={column, name, "label"}, where=where)
    return Labelled(row, response, bool(label))


def _common(one: Turns, other: Turns) -> Turns:
    """The turns that both begin with."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


def _after(prompt: Turns, turns: Turns) -> Turns:
    """What follows the prompt, where the turns repeat it."""
    return turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns


def _check_continuation(turns: Turns, column: str, where: str) -> None:
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise DataError(
            f"{where}: column {column!r} continues the prompt with {' and '.join(roles) or 'nothing'}; expected turns "
            "that begin and end with the assistant's."
        )


def _margin(value: Any, where: str, *, needed: bool) -> float:
    if value is None and not needed:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        what = "is missing" if value is None else f"holds {shown(value)}"
        raise DataError(f"{where}: column 'margin' {what}; expected a number, by how much chosen is better.")
    return float(value)
