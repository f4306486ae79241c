"""The end of a run in a few lines: sampled reward or loss at its start and end, seconds by phase."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["run_table"]

_EDGE = 5  # steps averaged at either end
_CURVES = {
    "reward/mean": "sampled reward",
    "reward/std": "spread of rewards in a group",
    "rollout/truncation_rate": "responses cut off",
    "policy/kl_reference": "KL to the reference, nat a token",
    "policy/entropy": "entropy, nat a token",
    "sft/loss": "loss, nat a token",
    "rm/loss": "loss, nat a pair",
    "rm/accuracy": "pairs judged right",
    "prm/loss": "loss, nat a step",
    "dpo/loss": "loss",
    "dpo/accuracy": "pairs judged right",
    "kd/loss": "loss, nat a token",
}


def run_table(records: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> Table:
    """One row a curve (means over the first and last steps), then the seconds of each phase.

    Args:
        records: lines of metrics.jsonl. seconds: of each phase, by this process.
    """
    table = Table(title="the run", title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", f"first {_EDGE} steps", f"last {_EDGE} steps"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, label in _CURVES.items():
        values = [float(r[name]) for r in records if r.get(name) is not None]
        if values:
            table.add_row(label, *(f"{sum(part) / len(part):.4f}" for part in (values[:_EDGE], values[-_EDGE:])))
    for name, value in seconds.items():
        table.add_row(f"seconds, {name}", "", f"{value:.1f}")
    return table
