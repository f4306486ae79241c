"""Every metric there is: its name, unit, weight and meaning. docs/metrics.md is generated from here.

A metric travels as two sums and is divided once, by ``finish``. A new metric is one line in ``REGISTRY``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from skirl.records import Ratio

__all__ = ["REGISTRY", "MetricSpec", "Weight", "depends_on_machine", "finish", "render", "spec_of"]

Weight = Literal["tokens", "samples", "groups", "units", "steps", "seconds", "ranks", "requests", "last", "max", "sum"]
"""What the denominator counts: action tokens, samples (rollouts, utterances, rows), groups, reference units (characters
or words), optimizer steps, seconds, processes, requests. Or how one number stands for the step: ``last`` and ``max``
are taken by whoever measures and have denominator 1; of a ``sum`` only the numerator counts."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric, or an open family where the name holds a part in angle brackets.

    Attributes:
        name: "section/name"; a part such as "<source>" stands for any text.
        unit: of the finished value; "1" for plain numbers and shares.
        weight: what the mean is taken over, or how the number was chosen.
        meaning: one sentence for docs/metrics.md.
    """

    name: str
    unit: str
    weight: Weight
    meaning: str


def _registry(specs: Iterable[MetricSpec]) -> dict[str, MetricSpec]:
    return {spec.name: spec for spec in specs}


REGISTRY: dict[str, MetricSpec] = _registry([
    MetricSpec("reward/mean", "score", "samples", "Mean score of the rollouts that have one."),
    MetricSpec("reward/std", "score", "groups", "Mean over groups of the standard deviation in a group."),
    MetricSpec("reward/failure_rate", "1", "samples", "Share of rollouts whose reward failed."),
    MetricSpec("reward/groups_without_spread", "1", "groups", "Share of groups whose scores are all equal."),
    MetricSpec("reward/part/<name>", "score", "samples", "Mean of one part of the score, where it is present."),
    MetricSpec("reward/spread/<name>", "score", "groups", "Mean over groups of the part's deviation in a group."),
    MetricSpec("reward/request_s/<service>", "s", "requests", "Mean time of the step's answered requests."),
    MetricSpec("reward/retries/<service>", "samples", "last", "Samples that a service got again since the start."),
    MetricSpec("reward/resting/<service>", "servers", "last", "Servers of a service that rest after a failure."),
    MetricSpec("reward/shaping", "score", "samples", "Mean change of a score by method.shaping."),
    MetricSpec("collect/rounds", "rounds", "last", "Rounds of sampling in the step; above 1 with dynamic sampling."),
    MetricSpec("collect/groups_without_signal", "groups", "last", "Groups that dynamic sampling dropped in the step."),
    MetricSpec("advantage/mean", "1", "tokens", "Mean advantage of an action token."),
    MetricSpec("advantage/std", "1", "last", "Standard deviation of the same over the step's action tokens."),
    MetricSpec("critic/loss", "1", "tokens", "Value loss of an action token, over the optimizer steps."),
    MetricSpec("critic/value_mean", "score", "tokens", "Mean value by the critic while it is updated."),
    MetricSpec("critic/clip_fraction", "1", "tokens", "Share of action tokens whose value was clipped."),
    MetricSpec("critic/grad_norm", "1", "max", "Largest gradient norm of the critic in the step, before clipping."),
    MetricSpec("critic/lr", "1", "last", "Learning rate of the critic's last optimizer step."),
    MetricSpec("policy/correction_mean", "1", "tokens", "Mean factor that the correction gives a token's loss."),
    MetricSpec("policy/router_balance", "1", "samples", "Load-balancing loss of a mixture of experts, a sequence."),
    MetricSpec("critic/return_mean", "score", "tokens", "Mean of what the critic is trained towards."),
    MetricSpec("critic/explained_variance", "1", "last", "1 - var(returns - values) / var(returns) before the update."),
    MetricSpec("kl/coef", "1", "last", "Factor of the KL to the reference in the step."),
    MetricSpec("kl/reference_per_response", "nat", "samples", "KL(policy, reference) by k1, sum over a response."),
    MetricSpec("correction/weight_mean", "1", "tokens", "Mean ratio of the trainer's old policy to the engine."),
    MetricSpec("correction/cut_fraction", "1", "tokens", "Share of action tokens whose weight was cut or masked."),
    MetricSpec("rollout/response_length", "tokens", "samples", "Mean number of action tokens of a response."),
    MetricSpec("rollout/truncation_rate", "1", "samples", "Share of responses that the token budget ended."),
    MetricSpec("rollout/tokens", "tokens", "sum", "Action tokens sampled in the step."),
    MetricSpec("rollout/tokens_per_s", "tokens/s", "seconds", "Action tokens sampled a second of sampling."),
    MetricSpec("policy/loss", "1", "steps", "Loss as the plan weighs it, mean over the optimizer steps."),
    MetricSpec("policy/clip_fraction", "1", "tokens", "Share of action tokens whose ratio was clipped."),
    MetricSpec("policy/ratio_mean", "1", "tokens", "Mean ratio of the policy to the policy that is being improved."),
    MetricSpec("policy/ratio_rollout_mean", "1", "tokens", "Mean ratio of the policy to the engine that sampled."),
    MetricSpec("policy/entropy", "nat", "tokens", "Mean entropy of the sampling distribution."),
    MetricSpec("policy/kl_reference", "nat", "tokens", "KL(policy, reference) by k3, over action tokens."),
    MetricSpec("policy/kl_rollout", "nat", "tokens", "KL(rollout, policy) by k3, over action tokens."),
    MetricSpec("policy/version_lag", "versions", "tokens", "Mean age of the tokens when they are trained on."),
    MetricSpec("commit/bytes", "bytes", "last", "Bytes of the tensors that the step's weight commit sent."),
    MetricSpec("commit/gb_per_s", "GB/s", "seconds", "Those bytes by the time of the commit, caches dropped."),
    MetricSpec("commit/version", "versions", "last", "Policy version that every engine holds after the commit."),
    MetricSpec("probe/max_logprob_difference", "nat", "max", "Largest |engine - trainer| log-prob of a probe token."),
    MetricSpec("probe/mean_logprob_difference", "nat", "tokens", "Mean of the same."),
    MetricSpec("engine/restarts", "engines", "last", "Engines that died and were replaced since the run began."),
    MetricSpec("engine/reissued", "rollouts", "last", "Requests issued again to another engine since the run began."),
    MetricSpec("memory/<phase>/<process>_peak_gb", "GB", "max", "Largest GPU memory of a kind of process in a phase."),
    MetricSpec("optim/lr", "1", "last", "Learning rate of the step's last optimizer step."),
    MetricSpec("optim/grad_norm", "1", "max", "Largest gradient norm of the step's optimizer steps, before clipping."),
    MetricSpec("sft/loss", "nat", "tokens", "Mean negative log-likelihood of a target token."),
    MetricSpec("sft/token_accuracy", "1", "tokens", "Share of target tokens that were the likeliest token."),
    MetricSpec("time/<phase>_s", "s", "sum", "Wall time of a phase in the step; phases may overlap."),
    MetricSpec("time/reward_wait_s", "s", "sum", "Wall time of the step in which scores alone were waited for."),
    MetricSpec("time/step_s", "s", "last", "Wall time since the metrics of the step before."),
    MetricSpec("data/epoch", "epochs", "last", "Passes over the training data so far, with the fraction of this one."),
    MetricSpec("data/consumed_prompts", "prompts", "last", "Prompts (rows, for sft) taken since the run began."),
    MetricSpec("ledger/issued", "rollouts", "last", "Rollouts asked for since the run began."),
    MetricSpec("ledger/trained", "rollouts", "last", "Rollouts trained on since the run began."),
    MetricSpec("ledger/dropped", "rollouts", "last", "Rollouts dropped since the run began."),
    MetricSpec("ledger/dropped/<reason>", "rollouts", "last", "The same, by reason."),
    MetricSpec("ledger/in_flight", "rollouts", "last", "Rollouts asked for and neither trained on nor dropped."),
    MetricSpec("memory/rss_mb", "MB", "last", "Resident memory of the driver's process."),
    MetricSpec("memory/rank_rss_mb", "MB", "ranks", "Resident memory of a training process on Ray."),
    MetricSpec("eval/<source>/loss", "1", "last", "Loss of the held-out rows, as one batch (offline commands)."),
    MetricSpec("eval/<source>/accuracy", "1", "samples", "Share of held-out pairs or steps that are judged right."),
    MetricSpec("rm/loss", "nat", "samples", "Loss of a pair, with the centering term."),
    MetricSpec("rm/accuracy", "1", "samples", "Share of pairs whose chosen response scores higher."),
    MetricSpec("rm/margin", "score", "samples", "Mean score of the chosen less the rejected response of a pair."),
    MetricSpec("prm/loss", "nat", "tokens", "Binary cross-entropy at the token that ends a step."),
    MetricSpec("prm/accuracy", "1", "tokens", "Share of steps that are judged right."),
    MetricSpec("kd/loss", "nat", "tokens", "Mixture of the two below at an action token."),
    MetricSpec("kd/divergence", "nat", "tokens", "Divergence between teacher and policy, times temperature squared."),
    MetricSpec("kd/cross_entropy", "nat", "tokens", "Negative log-likelihood of the answer's own token."),
    MetricSpec("dpo/loss", "1", "samples", "Preference loss of a pair (kto: of a response)."),
    MetricSpec("dpo/accuracy", "1", "samples", "Share of pairs whose chosen response has the higher implicit reward."),
    MetricSpec("dpo/margin", "1", "samples", "Implicit reward of the chosen less that of the rejected response."),
    MetricSpec("dpo/chosen_reward", "1", "samples", "Implicit reward of the chosen (kto: desirable) responses."),
    MetricSpec("dpo/rejected_reward", "1", "samples", "Implicit reward of the rejected (kto: undesirable) responses."),
    MetricSpec("dpo/kl_baseline", "nat", "last", "KTO's estimate of KL(policy, reference), a response, at least 0."),
    MetricSpec("sample/rows", "rows", "last", "Rows written by skirl sample."),
    MetricSpec("eval/<source>/error_rate", "1", "units", "Corpus error rate of the greedy transcripts."),
    MetricSpec("eval/<source>/expected_error_rate", "1", "units", "Corpus error rate over sampled transcripts."),
    MetricSpec("eval/<source>/insertions", "1", "units", "Inserted units a reference unit."),
    MetricSpec("eval/<source>/deletions", "1", "units", "Deleted units a reference unit."),
    MetricSpec("eval/<source>/substitutions", "1", "units", "Substituted units a reference unit."),
    MetricSpec("eval/<source>/truncation_rate", "1", "samples", "Share of greedy responses that the budget ended."),
])  # fmt: skip

_MACHINE_UNITS = frozenset({"s", "tokens/s", "MB", "GB", "GB/s"})


def spec_of(name: str) -> MetricSpec | None:
    """The metric of this name, or the family that it belongs to; None if it is not registered."""
    if name in REGISTRY:
        return REGISTRY[name]
    return next((spec for spec in REGISTRY.values() if "<" in spec.name and _pattern(spec).fullmatch(name)), None)


def finish(metrics: Mapping[str, Ratio]) -> dict[str, float]:
    """The values: numerator by denominator, divided here and nowhere else; NaN where nothing was counted.

    Raises:
        AssertionError: a name that is not registered, or a ``last`` or ``max`` that was added up on its way.
    """
    values: dict[str, float] = {}
    for name, ratio in metrics.items():
        spec = spec_of(name)
        if spec is None:
            raise AssertionError(f"metric {name!r} is not registered: add a line to REGISTRY in {__name__}")
        if spec.weight in ("last", "max") and ratio.denominator != 1:
            raise AssertionError(
                f"metric {name!r} is a {spec.weight!r}, so its denominator must be 1, not {ratio.denominator}"
            )
        values[name] = float(ratio.numerator) if spec.weight == "sum" else float(ratio.value)
    return values


def depends_on_machine(name: str) -> bool:
    """Whether two equal runs may differ in this metric: times, rates a second, memory."""
    spec = spec_of(name)
    return spec is not None and spec.unit in _MACHINE_UNITS


def render() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made from `skirl.tracking.metrics.REGISTRY`. The weight says what a mean is taken over (its denominator), or",
        "how one number stands for the step: the `last`, the `max`, the `sum`. A part in angle brackets is any text.",
        "",
        "| metric | unit | weight | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{spec.name}` | {spec.unit} | {spec.weight} | {spec.meaning} |" for spec in REGISTRY.values()]
    return "\n".join(lines) + "\n"


@cache
def _pattern(spec: MetricSpec) -> re.Pattern[str]:
    return re.compile(".+".join(re.escape(part) for part in re.split(r"<\w+>", spec.name)), re.DOTALL)
