"""JSON lines (and JSON arrays): Qwen3-ASR, NeMo, FunASR and whatever else has one clip a record; and text prompts."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from skirl.errors import DataError
from skirl.prompts.manifests.columns import ALIASES, PROMPTS, Source, Unread, audio_row, first_column, text_of
from skirl.records import Row

__all__ = ["open_text", "read_audio_jsonl", "read_records", "read_text_jsonl", "text_row", "turns_of"]

_ROLES = {"human": "user", "gpt": "assistant"}


def open_text(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1.

    Raises:
        DataError: the file is not UTF-8, or cannot be opened.
    """
    return ((number, line) for number, line in _lines(path) if line.strip())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number + 1}: is not UTF-8 text ({error.reason}). Convert the file.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}).") from error


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """ "file:line" and record of each JSON object, one a line or all in one array ("file:[index]", from 0).

    Raises:
        DataError: a line is not a JSON object.
    """
    if path.suffix == ".json":
        whole = "\n".join(line for _, line in _lines(path))
        if whole.lstrip().startswith("["):
            for index, element in enumerate(_parse(whole, str(path))):
                where = f"{path}:[{index}]"
                yield where, _record(element, where)
            return
    for number, line in open_text(path):
        where = f"{path}:{number}"
        yield where, _record(_parse(line, where), where)


def read_audio_jsonl(source: Source) -> Iterator[Unread]:
    """One clip a line, columns by the table of aliases."""
    for where, record in read_records(source.path):
        yield where, partial(audio_row, source, record, where=where, folder=source.path.parent)


def read_text_jsonl(source: Source) -> Iterator[Unread]:
    """One text prompt a line; see ``text_row``."""
    for where, record in read_records(source.path):
        yield where, partial(text_row, source, record, where=where)


def text_row(source: Source, record: Mapping[str, Any], *, where: str) -> Row:
    """The row of a text prompt: ``prompt`` (text or turns) or ``messages``, and an answer.

    Without a column for the answer, a last turn of the assistant is the answer.

    Raises:
        DataError: the record has no prompt, or one that is empty.
    """
    column = first_column(record, ("messages", "conversations", "prompt"))
    if column is None:
        raise DataError(
            f"{where}: the row has no prompt: looked for {', '.join(sorted(PROMPTS))}; "
            f"it has {', '.join(record) or 'no column'}."
        )
    value = record[column]
    if not isinstance(value, str | list | Mapping):
        raise DataError(
            f"{where}: column {column!r} holds {value!r:.80}; it must hold a text, or a list of turns "
            "{role, content}."
        )
    at = f"{where}: column {column!r}"
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else turns_of(value, at)
    answer_column = source.config.text_key or first_column(record, ALIASES["text"])
    answer = text_of(record.get(answer_column), answer_column, where) if answer_column else None
    if answer is None and turns and turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"]
    if not any(turn["content"].strip() for turn in turns):
        raise DataError(f"{where}: the prompt in column {column!r} is empty. Fill it in, or leave the row out.")
    return Row(
        id=text_of(record.get("id"), "id", where) or "",
        source=source.name,
        text=answer,
        messages=tuple(turns),
        extra={name: cell for name, cell in record.items() if name not in {"id", column, answer_column}},
        where=where,
    )


def turns_of(value: Any, where: str) -> list[dict[str, str]]:
    """Chat turns as role and content, from {"role", "content"} or {"from", "value"} with human and gpt.

    Raises:
        DataError: the value is not a list of such turns.
    """
    turns: list[dict[str, str]] = []
    for turn in value if isinstance(value, list) else [value]:
        role, content = _turn(turn)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f'{where}: a turn is {turn!r:.80}; it must be {{"role": ..., "content": text}}.')
        turns.append({"role": _ROLES.get(role, role), "content": content})
    return turns


def _turn(turn: Any) -> tuple[Any, Any]:
    if not isinstance(turn, Mapping):
        return None, None
    return turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20].strip()
        raise DataError(
            f"{where}: is not JSON ({error.msg}, line {error.lineno} column {error.colno}, near {near!r}). Each "
            "row must be a JSON object on a line of its own; or name a file of another form."
        ) from None


def _record(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where}: holds {value!r:.80}; each row must be a JSON object {{"column": value}}.')
    return value
