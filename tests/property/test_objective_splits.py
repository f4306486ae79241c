"""Every objective, over random batches and splits: loss and gradient of any plan are those of one big micro-batch.

A plan's ranks each run their micro-batches, dummies included, and gradients add up: as backends do, without one.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from skirl.algorithms import corrections
from skirl.config.algorithms import CISPO, DPPO, GMPO, GSPO, SAPO, TOPR, ClipCov, KLCov, PPOClip
from skirl.config.offline import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, RMConfig, SimPOLoss
from skirl.models.policy import PackedRow
from skirl.planning.schedule import make_plan
from skirl.records import Plan, Preference, Sampling, TrainingSequence, sum_ratios
from skirl.training.objective import (
    DistillationObjective,
    Objective,
    PolicyObjective,
    SupervisedObjective,
    as_ratios,
    micro_batch_loss,
)
from skirl.training.preference_objective import PreferenceObjective, RewardModelObjective
from skirl.training.rows import make_row
from skirl.training.value_objective import StepRewardObjective, ValueObjective

TOLERANCE = 1e-6
ROUNDS = 1
"""Times every combination is tried; raise it for a longer search."""
WIDTH = 8
CPU = torch.device("cpu")

POLICY_LOSSES = {
    "ppo_clip": PPOClip(high=0.28),
    "dual clip": PPOClip(dual=1.5),
    "gspo": GSPO(kind="gspo", low=0.05, high=0.05),
    "gspo token": GSPO(kind="gspo", low=0.05, high=0.05, token_level=True),
    "cispo": CISPO(kind="cispo", low=0.2, high=0.3),
    "sapo": SAPO(kind="sapo"),
    "gmpo": GMPO(kind="gmpo", clip=0.2),
    "topr": TOPR(kind="topr"),
    "clip_cov": ClipCov(kind="clip_cov"),
    "kl_cov": KLCov(kind="kl_cov"),
    "dppo tv": DPPO(kind="dppo", threshold=0.05),
    "dppo kl": DPPO(kind="dppo", divergence="kl", threshold=0.01),
}
CORRECTIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]] | None] = {
    "none": None,
    "tis": lambda gap: corrections.tis(gap, low=0.9, high=1.1),
    "icepop": lambda gap: corrections.icepop(gap, low=0.85, high=1.2),
    "sequence_mask": lambda gap: corrections.sequence_mask(gap, low=0.95, high=1.05, cap=1.1),
    "sequence_is": lambda gap: corrections.sequence_is(gap, cap=1.2),
}
PREFERENCES = {
    "dpo": DPOLoss(kind="dpo"),
    "cdpo": DPOLoss(kind="dpo", label_smoothing=0.2),
    "ipo mean": IPOLoss(kind="ipo"),
    "ipo sum": IPOLoss(kind="ipo", reduction="sum"),
    "kto": KTOLoss(kind="kto", undesirable_weight=1.3),
    "simpo": SimPOLoss(kind="simpo"),
    "orpo": ORPOLoss(kind="orpo"),
}
NORMALIZERS = ("token", "sequence", "constant")


class Tiny(nn.Module):
    """Two numbers for each action token and one for each sequence, linear in float32 weights but for the last step."""

    def __init__(self, num_ids: int, random: np.random.Generator, *, scalar: bool) -> None:
        super().__init__()
        self.features = torch.from_numpy(random.standard_normal((num_ids, WIDTH)).astype(np.float32))
        self.weights = nn.Parameter(torch.from_numpy(random.standard_normal((3, WIDTH)).astype(np.float32)))
        self.scalar = scalar

    def first(self, ids: Tensor) -> Tensor:
        numbers = (self.features[ids] * self.weights[0]).sum(-1)
        return numbers if self.scalar else nn.functional.logsigmoid(numbers)

    def forward(self, row: PackedRow, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        second = nn.functional.softplus((self.features[row.targets] * self.weights[1]).sum(-1))
        starts = row.cu_seqlens[:-1].long()
        auxiliary = (self.features[row.input_ids[starts]] * self.weights[2]).sum(-1).square()
        return self.first(row.targets), second, auxiliary


@dataclass
class Case:
    """A random batch, a model of it, and what make_plan needs beside the split."""

    model: Tiny
    sequences: list[TrainingSequence]
    units: list[str]
    random: np.random.Generator
    settings: dict[str, Any]

    def plan(self, num_ranks: int, max_tokens: int, mini_batches: int) -> Plan:
        return make_plan(
            self.sequences,
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            mini_batches=mini_batches,
            unit_of=self.units,
            **self.settings,
        )

    def splits(self) -> tuple[Plan, Plan]:
        """(one micro-batch a step, a random split of the same)."""
        totals: dict[str, int] = {}
        for name, sequence in zip(self.units, self.sequences, strict=True):
            totals[name] = totals.get(name, 0) + sequence.num_tokens
        mini_batches = int(self.random.integers(1, 3))
        cap = int(self.random.integers(max(totals.values()), max(sum(totals.values()) // 2, max(totals.values())) + 1))
        whole = self.plan(1, sum(totals.values()), mini_batches)
        return whole, self.plan(int(self.random.integers(1, 5)), cap, mini_batches)


def made(random: np.random.Generator, *, pairs: bool = False, num_actions: int | None = None, **settings: Any) -> Case:
    """Sequences of random lengths and ids of their own; those with an even index first in a pair."""
    count = 2 * int(random.integers(1, 5)) if pairs else int(random.integers(1, 9))
    sequences: list[TrainingSequence] = []
    used = 0
    for i in range(count):
        prompt = int(random.integers(1, 5))
        actions = num_actions or int(random.integers(1 if pairs else 0, 9))
        ids = np.arange(used, used + prompt + actions)
        sequences.append(TrainingSequence(f"s{i}", ids, np.arange(prompt, prompt + actions)))
        used += len(ids)
    if not any(s.num_actions for s in sequences):
        return made(random, pairs=pairs, num_actions=num_actions, **settings)
    units = [f"u{i // 2 if pairs else i}" for i in range(count)]
    return Case(Tiny(used, random, scalar=False), sequences, units, random, settings)


def with_logprobs(case: Case) -> Case:
    """Old, engine's and reference log-probs that lie around the model's own, and advantages."""
    sequences = []
    for sequence in case.sequences:
        targets = torch.from_numpy(sequence.input_ids[sequence.action_positions])
        now, noise = case.model.first(targets).detach().numpy(), case.random.standard_normal((3, len(targets)))
        old = (now + 0.25 * noise[0]).astype(np.float32)
        sequences.append(
            replace(
                sequence,
                old_logprobs=old,
                rollout_logprobs=(old + 0.1 * noise[1]).astype(np.float32),
                reference_logprobs=(now + 0.3 * noise[2]).astype(np.float32),
                advantages=np.full(len(targets), case.random.standard_normal()),
                selected=case.random.random(len(targets)) < 0.2,
            )
        )
    case.sequences = sequences
    return case


def corrected(case: Case, correction: Callable[[Tensor], tuple[Tensor, Tensor]] | None) -> Case:
    if correction is not None:
        for i, sequence in enumerate(case.sequences):
            gap = sequence.old_logprobs.astype(np.float64) - sequence.rollout_logprobs.astype(np.float64)
            case.sequences[i] = replace(sequence, corrections=correction(torch.from_numpy(gap))[0].numpy())
    return case


# --------------------------------------------------------------------------------------------------- loss and gradient
def steps(case: Case, objective: Objective, plan: Plan) -> Iterator[tuple[float, Tensor, dict[str, float]]]:
    """(loss, gradient, metrics) of each optimizer step."""
    for step in plan.steps:
        loss, gradient, metrics = 0.0, torch.zeros(3, WIDTH), []
        for rank in step.ranks:
            case.model.zero_grad()
            for micro_batch in rank:
                row, streams = make_row(plan, micro_batch, CPU)
                part, sums = micro_batch_loss(objective, case.model(row, objective.sampling), streams)
                part.backward()
                loss += part.item()
                metrics.append(as_ratios(sums))
                if not micro_batch.sequences:
                    assert part.item() == 0
                    assert all((r.numerator, r.denominator) == (0, 0) for r in metrics[-1].values())
            gradient += case.model.weights.grad
        yield loss, gradient, {n: r.value for n, r in sum_ratios(metrics).items() if r.denominator}


def difference(case: Case, objective: Objective) -> float:
    """Largest relative difference between one micro-batch and a random split of it.

    Losses relative to 1 at least: their terms have sizes of 1 to 10 and both signs, and where those cancel float32
    holds no more digits, whatever the split.
    """
    whole, plan = case.splits()
    worst = 0.0
    for one, other in zip(steps(case, objective, whole), steps(case, objective, plan), strict=True):
        assert one[2] == pytest.approx(other[2], rel=1e-5, abs=1e-6)
        worst = max(worst, abs(one[0] - other[0]) / max(abs(one[0]), 1.0))
        worst = max(worst, float((one[1] - other[1]).norm() / one[1].norm().clamp(min=1e-30)))
    return worst


def check(cases: Iterator[tuple[Case, Objective]], name: str, record: Callable[[str, object], None]) -> None:
    found = [difference(case, objective) for case, objective in cases]
    record(f"objective_splits/{name}", f"{len(found)} cases, largest relative difference {max(found):.1e}")
    assert max(found) < TOLERANCE


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses(name, record_property):
    """Each with every correction, KL estimator and normaliser, some with an entropy bonus or no old log-probs."""

    def cases() -> Iterator[tuple[Case, Objective]]:
        every = itertools.product(CORRECTIONS.values(), ("none", "k2", "k3"), NORMALIZERS, range(ROUNDS))
        for seed, (correction, kl, normalizer, _) in enumerate(every):
            random = np.random.default_rng((list(POLICY_LOSSES).index(name), seed))
            kl_coef = 0.0 if kl == "none" else 0.1
            case = made(random, normalizer=normalizer, constant_length=7, kl_coef=kl_coef)
            case = corrected(with_logprobs(case), correction)
            if seed % 5 == 0:
                case.sequences = [replace(s, old_logprobs=None) for s in case.sequences]
            yield (
                case,
                PolicyObjective(
                    Sampling(),
                    POLICY_LOSSES[name],
                    kl_estimator="k3" if kl == "none" else kl,
                    entropy_coef=0.05 * (seed % 3),
                ),
            )

    check(cases(), name, record_property)


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_losses(name, record_property):
    def cases() -> Iterator[tuple[Case, Objective]]:
        for seed in range(30 * ROUNDS):
            random = np.random.default_rng((100 + list(PREFERENCES).index(name), seed))
            case = with_logprobs(made(random, pairs=name != "kto", normalizer="sequence"))
            chosen = [i % 2 == 0 if name != "kto" else bool(random.random() < 0.5) for i in range(len(case.sequences))]
            case.sequences = [
                replace(s, preference=Preference(chosen=c, baseline=0.3))
                for s, c in zip(case.sequences, chosen, strict=True)
            ]
            yield case, PreferenceObjective(PREFERENCES[name])

    check(cases(), name, record_property)


@pytest.mark.parametrize("loss", ["sigmoid", "log_exp"])
@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_reward_models(loss, centering, record_property):
    def cases() -> Iterator[tuple[Case, Objective]]:
        for seed in range(20 * ROUNDS):
            random = np.random.default_rng((200, seed))
            case = made(random, pairs=True, num_actions=1, normalizer="sequence")
            case.model.scalar = True
            margins = random.random(len(case.sequences))
            case.sequences = [
                replace(s, preference=Preference(chosen=i % 2 == 0, margin=float(margins[i])))
                for i, s in enumerate(case.sequences)
            ]
            yield case, RewardModelObjective(RMConfig(loss=loss, centering=centering, use_margin=True))

    check(cases(), f"rm {loss} {centering}", record_property)


def token_cases(number: int, objective: Objective, streams: tuple[str, ...], *, scalar: bool) -> Any:
    for seed in range(30 * ROUNDS):
        random = np.random.default_rng((number, seed))
        case = made(random, normalizer=NORMALIZERS[seed % 3], constant_length=7)
        case.model.scalar = scalar
        case.sequences = [replace(s, **{n: random.random(s.num_actions) for n in streams}) for s in case.sequences]
        yield case, objective


@pytest.mark.parametrize("clip", [None, 0.2])
def test_critics(clip, record_property):
    cases = token_cases(300, ValueObjective(clip), ("values", "returns"), scalar=True)
    check(cases, f"critic clip={clip}", record_property)


def test_step_rewards(record_property):
    check(token_cases(301, StepRewardObjective(), ("labels",), scalar=True), "prm", record_property)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_distillation(share, record_property):
    check(token_cases(302, DistillationObjective(share), (), scalar=False), f"kd {share}", record_property)


def test_supervised(record_property):
    check(token_cases(303, SupervisedObjective(), (), scalar=False), "sft", record_property)
