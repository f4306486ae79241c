"""A step's metrics as sums: what was sampled, how it was scored, what the update did."""

from collections.abc import Iterable, Sequence

import numpy as np

from skirl.protocols import Collected
from skirl.records import Ratio, Rollout, UpdateReport
from skirl.rewards.combine import in_group_spread
from skirl.step import Batch

__all__ = ["measure", "measure_supervised"]


def measure(collected: Collected, batch: Batch, report: UpdateReport) -> dict[str, Ratio]:
    """Everything of one step but times and ledger."""
    rollouts = [r for g in collected.scored for r in g.group.rollouts]
    return {
        **_sampled(rollouts, collected.seconds),
        **_scored(in_group_spread(collected.scored)),
        **_updated(report),
        "policy/loss": Ratio(sum(report.losses), len(report.losses)),
        "policy/version_lag": _lag([r for g in collected.kept for r in g.group.rollouts], report.policy_version - 1),
    }


def measure_supervised(report: UpdateReport) -> dict[str, Ratio]:
    """What a supervised update did."""
    return _updated(report)


def _sampled(rollouts: Sequence[Rollout], seconds: float) -> dict[str, Ratio]:
    tokens = sum(len(r.response_ids) for r in rollouts)
    return {
        "rollout/response_length": Ratio(tokens, len(rollouts)),
        "rollout/truncation_rate": Ratio(sum(r.finish_reason == "length" for r in rollouts), len(rollouts)),
        "rollout/tokens": Ratio(tokens, 1),
        "rollout/tokens_per_s": Ratio(tokens, seconds),
    }


def _scored(spread: dict[str, Ratio]) -> dict[str, Ratio]:
    """Names of the reward stage -> names of metrics."""
    named = {
        "reward/mean": spread["total/mean"],
        "reward/std": spread["total/in_group_std"],
        "reward/failure_rate": spread["failed"],
        "reward/groups_without_spread": spread["groups_without_spread"],
    }
    for name, ratio in spread.items():
        kind, _, rest = name.partition("/")
        part, _, what = rest.rpartition("/")
        if kind == "part" and what == "mean":
            named[f"reward/part/{part}"] = ratio
        elif kind == "part" and what == "in_group_std":
            named[f"reward/spread/{part}"] = ratio
    return named


def _updated(report: UpdateReport) -> dict[str, Ratio]:
    return {
        **report.metrics,
        "optim/lr": Ratio(report.learning_rates[-1], 1),
        "optim/grad_norm": Ratio(max(report.grad_norms), 1),
    }


def _lag(rollouts: Iterable[Rollout], version: int) -> Ratio:
    versions = np.concatenate([r.versions for r in rollouts] or [np.empty(0)])
    return Ratio(float((version - versions).sum()), float(len(versions)))
