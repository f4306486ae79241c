"""Chat turns: what a row's ``prompt`` and ``messages`` hold, and whole conversations to learn from.

record -> turns [{"role", "content"}, ...] -> the row of its prompt, and what follows the prompt
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skirl.errors import DataError
from skirl.prompts.manifests.columns import ALIASES, Source, first_column, text_of
from skirl.prompts.manifests.jsonl import text_row, turns_of
from skirl.records import Row

__all__ = ["Conversation", "Turns", "answer_turns", "conversation", "prompt_row", "prompt_turns", "shown"]

Turns = tuple[Mapping[str, str], ...]
"""Chat turns {"role", "content"}, in order."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "ipython", "function"})
"""Roles that chat templates know; any other is taken for a mistake."""

_PROMPT_COLUMNS = ("prompt", "messages", "conversations")
_RESPONSES = ("response", "completion")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns to learn from. ``row`` holds those before the last answer, and the answer as its text."""

    row: Row
    turns: Turns


def conversation(source: Source, record: Mapping[str, Any], where: str, *, needs_answer: bool = True) -> Conversation:
    """A row with ``messages``, or with ``prompt`` and an answer (``answer``, ``text``, ``response``, ...).

    Args:
        needs_answer: a row without a turn of the assistant is refused.

    Raises:
        DataError: there is no prompt, no turn of the assistant to learn from, or an empty one.
    """
    row = text_row(source, record, where=where)
    column = first_column(record, ("messages", "conversations", "prompt")) or "prompt"
    written = first_column(record, _RESPONSES)
    if row.text is None and written is not None:
        row = replace(row, text=text_of(record[written], written, where))
    turns: Turns = row.messages
    if row.text is not None:
        turns = (*turns, {"role": "assistant", "content": row.text})
    _check_turns(turns, column, where)
    if needs_answer and all(turn["role"] != "assistant" for turn in turns):
        raise DataError(
            f"{where}: nothing to learn from: column {column!r} holds no turn of the assistant and the row has no "
            f"answer (looked for {', '.join((*ALIASES['text'], *_RESPONSES))}); it has "
            f"{', '.join(record)}."
        )
    return Conversation(row, turns)


def prompt_turns(record: Mapping[str, Any], where: str) -> tuple[str, Turns] | None:
    """Column and turns of a row's prompt: a text (of the user), or turns. None where no column holds one.

    Raises:
        DataError: the column holds something else, or a turn that the assistant wrote last.
    """
    column = first_column(record, _PROMPT_COLUMNS)
    if column is None:
        return None
    turns = _turns(record[column], "user", column, where)
    if turns[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: column {column!r} ends with a turn of the assistant, so there is nothing to answer; expected "
            "the turns before the responses."
        )
    return column, turns


def answer_turns(record: Mapping[str, Any], column: str, where: str, *, may_be_empty: bool = False) -> Turns:
    """A response: a text (of the assistant), or turns.

    Args:
        may_be_empty: of a response that is not wanted: a policy may say nothing.

    Raises:
        DataError: the column is missing, empty or holds something else.
    """
    if record.get(column) is None:
        raise DataError(
            f"{where}: column {column!r} is missing; expected a text, or turns {{role, content}}; the row has "
            f"{', '.join(name for name in record if record[name] is not None) or 'no column'}."
        )
    if may_be_empty and record[column] == "":
        return ({"role": "assistant", "content": ""},)
    return _turns(record[column], "assistant", column, where)


def prompt_row(source: Source, record: Mapping[str, Any], turns: Turns, *, used: Collection[str], where: str) -> Row:
    """The canonical row of a prompt; columns that are not ``used`` stay in ``extra``."""
    return Row(
        id=text_of(record.get("id"), "id", where) or "",
        source=source.name,
        messages=turns,
        extra={name: cell for name, cell in record.items() if name != "id" and name not in used},
        where=where,
    )


def shown(value: Any) -> str:
    """A value as messages show it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _turns(value: Any, role: str, column: str, where: str) -> Turns:
    if isinstance(value, str):
        turns: Turns = ({"role": role, "content": value},)
    elif isinstance(value, list | Mapping) and value:
        turns = tuple(turns_of(value, f"{where}: column {column!r}"))
    else:
        raise DataError(
            f"{where}: column {column!r} holds {shown(value)}; expected a text, or a list of turns {{role, content}}."
        )
    _check_turns(turns, column, where)
    return turns


def _check_turns(turns: Turns, column: str, where: str) -> None:
    for number, turn in enumerate(turns):
        if turn["role"] not in ROLES:
            raise DataError(
                f"{where}: column {column!r}, turn {number}: role {shown(turn['role'])} is none of "
                f"{', '.join(sorted(ROLES))}."
            )
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise DataError(f"{where}: column {column!r}, turn {number}: the assistant's turn is empty; expected text.")
    if not any(turn["content"].strip() for turn in turns):
        raise DataError(f"{where}: column {column!r} is empty; expected text.")
