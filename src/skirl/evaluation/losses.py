"""Held-out losses of a run as a table: where they began, where they ended."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["loss_table"]

_NAME = re.compile(r"eval/(.+)/(loss|accuracy)")


def loss_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """One row a source and figure: at the first evaluation of the run, the best, and the last.

    Args:
        records: lines of metrics.jsonl.
    """
    table = Table(title="held-out losses", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "first", "best", "last"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name in record:
            if _NAME.fullmatch(name) and record[name] is not None:
                found.setdefault(name, []).append((int(record["step"]), float(record[name])))
    for name, values in sorted(found.items(), key=_place):
        match = _NAME.fullmatch(name)
        assert match is not None
        choose = max if match[2] == "accuracy" else min
        best = choose(values, key=lambda value: value[1])
        cells = (f"{value:.4f} (step {step})" for step, value in (values[0], best, values[-1]))
        table.add_row(f"{match[1]}, {match[2]}", *cells)
    return table


def _place(item: tuple[str, list[tuple[int, float]]]) -> tuple[str, bool]:
    """By source, losses first."""
    source, _, what = item[0].rpartition("/")
    return source, what != "loss"
