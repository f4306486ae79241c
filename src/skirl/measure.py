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
    sampled_by = report.policy_version - (1 if report.losses else 0)  # without a policy update the version stays
    metrics = {
        **_sampled(rollouts, collected.seconds),
        **_scored(in_group_spread(collected.scored)),
        **_prepared(batch),
        **_updated(report),
        "policy/version_lag": _lag([r for g in collected.kept for r in g.group.rollouts], sampled_by),
        **collected.metrics,
        "collect/rounds": Ratio(collected.rounds, 1),
        "collect/groups_without_signal": Ratio(collected.without_signal, 1),
    }
    if report.losses:
        metrics["policy/loss"] = Ratio(sum(report.losses), len(report.losses))
    return metrics


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


def _prepared(batch: Batch) -> dict[str, Ratio]:
    """What the host made of the scores: advantages over action tokens, the critic's fit, the KL's factor."""
    metrics = dict(batch.metrics)
    advantages = _tokens([s.advantages for s in batch.sequences])
    if len(advantages):
        metrics["advantage/mean"] = Ratio(float(advantages.sum()), len(advantages))
        metrics["advantage/std"] = Ratio(float(advantages.std()), 1)
    if batch.kl is not None:
        metrics |= {"kl/coef": Ratio(batch.kl_coef, 1), "kl/reference_per_response": batch.kl}
    returns, values = (_tokens([getattr(s, name) for s in batch.sequences]) for name in ("returns", "values"))
    if len(returns):
        metrics["critic/return_mean"] = Ratio(float(returns.sum()), len(returns))
    if len(returns) and returns.var() > 0:
        metrics["critic/explained_variance"] = Ratio(float(1 - (returns - values).var() / returns.var()), 1)
    return metrics


def _tokens(streams: Sequence[np.ndarray | None]) -> np.ndarray:
    """One stream of the whole batch, float64; empty where the method has none."""
    return np.concatenate([s.astype(np.float64) for s in streams if s is not None] or [np.empty(0)])


def _updated(report: UpdateReport) -> dict[str, Ratio]:
    metrics = dict(report.metrics)
    if report.losses:
        metrics["optim/lr"] = Ratio(report.learning_rates[-1], 1)
        metrics["optim/grad_norm"] = Ratio(max(report.grad_norms), 1)
    return metrics


def _lag(rollouts: Iterable[Rollout], version: int) -> Ratio:
    versions = np.concatenate([r.versions for r in rollouts] or [np.empty(0)])
    return Ratio(float((version - versions).sum()), float(len(versions)))
