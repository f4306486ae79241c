"""Rows with a solution cut into steps, each right or wrong: data of ``skirl prm``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skirl.errors import DataError
from skirl.prompts.conversation import prompt_row, prompt_turns, shown
from skirl.prompts.manifests.columns import Source
from skirl.records import Row

__all__ = ["Steps", "steps"]


@dataclass(frozen=True, slots=True)
class Steps:
    """A solution's steps and, for each, how right it is, in [0, 1]."""

    row: Row
    steps: tuple[str, ...]
    labels: tuple[float, ...]


def steps(source: Source, record: Mapping[str, Any], where: str) -> Steps:
    """The steps of a row: ``prompt`` (or ``messages``), ``steps`` (texts), ``labels`` (true, false, or in [0, 1]).

    Raises:
        DataError: a column is missing or holds something else, or there is not one label for each step.
    """
    found = prompt_turns(record, where)
    if found is None:
        raise DataError(f"{where}: column 'prompt' is missing; the row has {', '.join(record) or 'no column'}.")
    texts, labels = _list(record, "steps", "texts", where), _list(record, "labels", "true, false or 0 to 1", where)
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: column 'steps', step {number} holds {shown(text)}; expected a text.")
    for number, label in enumerate(labels):
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            raise DataError(
                f"{where}: column 'labels', step {number} holds {shown(label)}; expected true, false, or a number from "
                "0 to 1."
            )
    if len(texts) != len(labels):
        raise DataError(
            f"{where}: column 'steps' has {len(texts)} entries and column 'labels' {len(labels)}; expected one label "
            "for each step."
        )
    row = prompt_row(source, record, found[1], used={found[0], "steps", "labels"}, where=where)
    return Steps(row, tuple(texts), tuple(float(label) for label in labels))


def _list(record: Mapping[str, Any], column: str, of_what: str, where: str) -> list[Any]:
    value = record.get(column)
    if not isinstance(value, list) or not value:
        what = "is missing" if value is None else f"holds {shown(value)}"
        raise DataError(f"{where}: column {column!r} {what}; expected a list of {of_what}.")
    return value
