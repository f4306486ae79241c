"""Every objective through the whole chain, against the objective of its paper written as sums over tokens.

random batch -> corrections -> make_plan (ranks, caps, mini-batches) -> choices among tokens -> rows -> token losses
-> weighted sums, gradients added up over micro-batches and ranks; the oracle sees the optimizer step's responses alone.
Gradients are by each token's outputs of the model (log-probs and entropies, values, divergences), float32.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skirl.config import combinations
from skirl.config.algorithms import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    TIS,
    ClipCov,
    IcePop,
    KLCov,
    PPOClip,
    SequenceIS,
    SequenceMask,
)
from skirl.config.offline import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, RMConfig, SimPOLoss
from skirl.planning.schedule import make_plan
from skirl.records import OptimizerStep, Plan, Preference, Sampling, TrainingSequence
from skirl.step.corrections import corrected, with_selection
from skirl.training.objective import (
    DistillationObjective,
    Objective,
    PolicyObjective,
    SupervisedObjective,
    micro_batch_loss,
)
from skirl.training.preference_objective import PreferenceObjective, RewardModelObjective
from skirl.training.rows import make_row
from skirl.training.value_objective import StepRewardObjective, ValueObjective
from tests.oracles import losses as loss_oracle
from tests.oracles import objectives as oracle
from tests.oracles.autodiff import Number, gradient, numbers, watch
from tests.oracles.tally import Tally

TOLERANCE = 1e-6
KINK = 1e-5
"""A step with a decision nearer than this to its border is left out: float32 may decide otherwise."""
ROUNDS = 2
"""Batches for every combination; raise it for a longer search."""
LENGTH = 7
"""Of the constant normaliser."""
CPU = torch.device("cpu")


# -------------------------------------------------------------------------------------------------------------- batches
@dataclass
class Batch:
    """Sequences, the model's outputs for each, and how they are grouped into units and rows."""

    sequences: list[TrainingSequence]
    first: list[np.ndarray]
    second: list[np.ndarray]
    auxiliary: np.ndarray | None
    units: list[str]
    random: np.random.Generator

    def plan(self, **settings: Any) -> Plan:
        """A random split."""
        sizes: dict[str, int] = {}
        for name, sequence in zip(self.units, self.sequences, strict=True):
            sizes[name] = sizes.get(name, 0) + sequence.num_tokens
        return make_plan(
            self.sequences,
            num_ranks=int(self.random.integers(1, 4)),
            max_tokens=int(self.random.integers(max(sizes.values()), sum(sizes.values()) + 1)),
            mini_batches=int(self.random.integers(1, 3)),
            unit_of=self.units,
            **settings,
        )


def float32(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def made(random: np.random.Generator, *, pairs: bool = False, scalar: bool = False, one: bool = False) -> Batch:
    """2 to 6 sequences of 0 to 6 action tokens (of pairs 1 to 6); log-probs below 0, or any value."""
    count = 2 * int(random.integers(1, 4)) if pairs else int(random.integers(1, 7))
    lengths = [1 if one else int(n) for n in random.integers(1 if pairs else 0, 7, size=count)]
    lengths[0] = max(lengths[0], 1)
    prompts = [int(n) for n in random.integers(1, 4, size=count)]
    sequences = [
        TrainingSequence(f"s{i}", np.arange(p + n), np.arange(p, p + n))
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    first = [float32(random.standard_normal(n) if scalar else random.uniform(-4, -0.3, size=n)) for n in lengths]
    second = [float32(random.uniform(0, 3, size=n)) for n in lengths]
    auxiliary = float32(random.standard_normal(count)) if random.random() < 0.2 else None
    units = [f"u{i // 2 if pairs else i}" for i in range(count)]
    return Batch(sequences, first, second, auxiliary, units, random)


def with_streams(batch: Batch, *, constant: bool, old: bool) -> Batch:
    """Old, engine's and reference log-probs around the model's, and advantages."""
    random, sequences = batch.random, []
    spread = random.choice([0.05, 0.3])
    for sequence, now in zip(batch.sequences, batch.first, strict=True):
        noise = random.standard_normal((3, len(now)))
        before = np.minimum(now + spread * noise[0], -0.05) if old else now
        advantages = 1.5 * random.standard_normal(1 if constant else len(now))
        if random.random() < 0.1:
            advantages = 0 * advantages
        sequences.append(
            replace(
                sequence,
                old_logprobs=float32(before),
                rollout_logprobs=float32(before + 0.1 * noise[1]),
                reference_logprobs=float32(now + np.sign(noise[2]) * (0.1 + 0.3 * np.abs(noise[2]))),
                advantages=np.broadcast_to(advantages, now.shape).copy(),
            )
        )
    batch.sequences = sequences
    return batch


# ----------------------------------------------------------------------------------------------------- code and oracle
def by_code(
    batch: Batch, objective: Objective, plan: Plan, step: OptimizerStep
) -> tuple[float, dict[int, list[Tensor]]]:
    """(loss, leaves with gradients of each sequence), as backends run a step."""
    loss, leaves = 0.0, dict[int, list[Tensor]]()
    for rank in step.ranks:
        for micro_batch in rank:
            row, streams = make_row(plan, micro_batch, CPU)
            outputs = [torch.zeros(len(row.targets)), torch.zeros(len(row.targets)), torch.zeros(streams.num_segments)]
            for i in micro_batch.sequences:
                values = [
                    batch.first[i],
                    batch.second[i],
                    [] if batch.auxiliary is None else batch.auxiliary[i : i + 1],
                ]
                leaves[i] = [torch.tensor(v, dtype=torch.float32, requires_grad=True) for v in values]
            if micro_batch.sequences:
                outputs = [torch.cat([leaves[i][k] for i in micro_batch.sequences]) for k in range(3)]
            part, _ = micro_batch_loss(objective, (outputs[0], outputs[1], outputs[2]), streams)
            loss += part.item()
            if micro_batch.sequences:
                part.backward()
            else:
                assert part.item() == 0
    return loss, leaves


def response_of(batch: Batch, plan: Plan, i: int) -> oracle.Response:
    """What the oracle sees of sequence i; streams at their own precision."""
    s = plan.sequences[i]

    def floats(values: Any) -> list[float]:
        return [] if values is None else [float(x) for x in values]

    preference = s.preference or Preference(chosen=True)
    return oracle.Response(
        first=numbers(floats(batch.first[i])),
        second=numbers(floats(batch.second[i])),
        auxiliary=None if batch.auxiliary is None else Number(batch.auxiliary[i]),
        old=None if s.old_logprobs is None else floats(s.old_logprobs),
        rollout=floats(s.rollout_logprobs),
        reference=floats(s.reference_logprobs),
        advantages=floats(s.advantages),
        selected=None if s.selected is None else [bool(x) for x in s.selected],
        values=floats(s.values),
        returns=floats(s.returns),
        labels=floats(s.labels),
        chosen=preference.chosen,
        margin=preference.margin,
        baseline=preference.baseline,
    )


def compare(
    found: Tally,
    batch: Batch,
    plan: Plan,
    objective: Objective,
    loss_of: Callable[[Sequence[oracle.Response]], Number],
    floor: float = 0.0,
) -> None:
    """Loss and gradient of every optimizer step of the plan.

    Args: floor: of a loss of one response, by one token of it, where terms of about this size cancel.
    """
    for step in plan.steps:
        members = sorted(i for rank in step.ranks for m in rank for i in m.sequences)
        if not any(plan.sequences[i].num_actions for i in members):
            continue
        responses = [response_of(batch, plan, i) for i in members]
        with watch() as distances:
            expected = loss_of(responses)
        if min(distances, default=1.0) < KINK:
            found.skipped += 1
            continue
        loss, leaves = by_code(batch, objective, plan, step)
        inputs = [x for r in responses for x in (*r.first, *r.second, *([] if r.auxiliary is None else [r.auxiliary]))]
        by_oracle = gradient(expected, inputs)
        got: list[float] = []
        for i in members:
            for leaf in leaves[i]:
                got += [0.0] * leaf.numel() if leaf.grad is None else leaf.grad.tolist()
        found.cases += 1
        found.add(got, by_oracle, f"gradient of case {found.cases}", floor=floor * len(by_oracle) ** 0.5 / len(members))
        # of the loss terms of both signs, of size 1, cancel
        found.add([loss], [expected.value], f"loss of case {found.cases}", floor=1.0)


# -------------------------------------------------------------------------------------------------------------- methods
NARROW = [
    PPOClip(high=0.28, dual=1.5),
    GSPO(kind="gspo", low=0.05, high=0.05),
    GSPO(kind="gspo", low=0.05, high=0.05, token_level=True),
    CISPO(kind="cispo", low=0.2, high=0.3),
    GMPO(kind="gmpo", clip=0.2),
    ClipCov(kind="clip_cov", low=0.2, high=0.28, share=0.3, cov_low=0.05, cov_high=2.0),
    KLCov(kind="kl_cov", share=0.3),
    DPPO(kind="dppo", threshold=0.02),
    DPPO(kind="dppo", divergence="kl", threshold=0.01),
]
"""Beside the published settings, which clip few of these tokens."""
LOSSES = [*combinations.losses(), *NARROW]
CORRECTIONS = [
    None,
    TIS(kind="tis", low=0.9, high=1.1),
    IcePop(kind="icepop", low=0.85, high=1.2),
    SequenceMask(kind="sequence_mask", low=0.95, high=1.05, cap=1.1),
    SequenceIS(kind="sequence_is", cap=1.2),
]
ADVANTAGE = next(a for a in combinations.advantages() if a.kind == "group_norm")
CONSTANT = ("gspo", "gmpo", "topr")


def name_of(loss: Any) -> str:
    settings = "-".join(f"{value:g}" if isinstance(value, float) else str(value) for _, value in list(loss)[1:])
    return f"{loss.kind}-{settings}"


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_policy_objectives(loss, record_property):
    """Each loss with every legal normaliser, correction, KL estimator, with and without entropy and old log-probs."""
    found = Tally(name_of(loss))
    normalizers = [n.kind for n in combinations.normalizers() if combinations.legal(loss, ADVANTAGE, n) is None]
    assert normalizers
    every = itertools.product(normalizers, CORRECTIONS, ("none", "k2", "k3"), range(ROUNDS))
    for seed, (normalizer, correction, kl, _) in enumerate(every):
        random = np.random.default_rng((LOSSES.index(loss), seed))
        whole = loss.kind in CONSTANT and not (loss.kind == "gspo" and loss.token_level)
        batch = with_streams(made(random), constant=whole or random.random() < 0.5, old=seed % 4 != 3)
        if correction is not None:
            batch.sequences, _ = corrected(batch.sequences, correction)
        kl_coef, entropy_coef = 0.0 if kl == "none" else 0.1, float(random.choice([0.0, 0.05]))
        plan = batch.plan(normalizer=normalizer, constant_length=LENGTH, kl_coef=kl_coef)
        plan = with_selection(plan, loss, seed=seed)
        check_selection(plan, loss)
        if seed % 4 == 3:  # one optimizer step a batch: the ratio is 1 and old log-probs are the policy's own
            plan = replace(plan, sequences=tuple(replace(s, old_logprobs=None) for s in plan.sequences))
        estimator = "k3" if kl == "none" else kl
        objective = PolicyObjective(Sampling(), loss, kl_estimator=estimator, entropy_coef=entropy_coef)
        method = SimpleNamespace(
            policy_loss=loss, correction=correction, kl_estimator=estimator, entropy_coef=entropy_coef
        )
        losses_of = oracle.policy(method, kl_coef)
        compare(
            found,
            batch,
            plan,
            objective,
            lambda step, f=losses_of, n=normalizer: oracle.by_token(step, f, n, LENGTH),
            floor=0.1 if loss.kind == "kl_cov" else 0.0,  # -r A and r - 1
        )
    found.finish(record_property, TOLERANCE, at_least=len(normalizers) * 15 * ROUNDS)


def check_selection(plan: Plan, loss: Any) -> None:
    """Tokens that are treated apart, over each optimizer step."""
    if loss.kind not in ("clip_cov", "kl_cov"):
        assert all(s.selected is None for s in plan.sequences)
        return
    for step in plan.steps:
        members = sorted(i for rank in step.ranks for m in rank for i in m.sequences)
        picks = [plan.sequences[i].selected for i in members]
        chosen = [bool(x) for stream in picks if stream is not None for x in stream]
        streams = [
            [float(x) for i in members for x in getattr(plan.sequences[i], n)] for n in ("old_logprobs", "advantages")
        ]
        cov = loss_oracle.covariance(*streams)
        inside = [loss.kind == "kl_cov" or loss.cov_low < c < loss.cov_high for c in cov]
        assert sum(chosen) == loss_oracle.num_selected(loss.share, len(cov), sum(inside))
        assert all(ok for ok, picked in zip(inside, chosen, strict=True) if picked)
        if loss.kind == "kl_cov" and chosen:
            rest = [c for c, picked in zip(cov, chosen, strict=True) if not picked]
            assert min(c for c, picked in zip(cov, chosen, strict=True) if picked) >= max(rest, default=-np.inf) - 1e-12


# ------------------------------------------------------------------------------------------ critics, PRMs, distillation
def token_cases(number: int, *, scalar: bool, rounds: int = 50) -> Iterator[tuple[Batch, str, Plan]]:
    for seed in range(rounds * ROUNDS):
        random = np.random.default_rng((100 + number, seed))
        batch = made(random, scalar=scalar)
        soft = random.random() < 0.5
        batch.sequences = [
            replace(
                s,
                values=float32(now + 0.3 * random.standard_normal(len(now))),
                returns=random.standard_normal(len(now)),
                labels=float32(random.random(len(now)) if soft else random.integers(0, 2, size=len(now))),
            )
            for s, now in zip(batch.sequences, batch.first, strict=True)
        ]
        normalizer = ("token", "sequence", "constant")[seed % 3]
        yield batch, normalizer, batch.plan(normalizer=normalizer, constant_length=LENGTH)


TOKENS: dict[str, tuple[Objective, Callable[[oracle.Response], list[Number]], bool]] = {
    "critic": (ValueObjective(None), oracle.critic(None), True),
    "critic clipped": (ValueObjective(0.2), oracle.critic(0.2), True),
    "prm": (StepRewardObjective(), oracle.step_rewards, True),
    "sft": (SupervisedObjective(), oracle.distilled(0.0), False),
    "kd 0": (DistillationObjective(0.0), oracle.distilled(0.0), False),
    "kd 0.4": (DistillationObjective(0.4), oracle.distilled(0.4), False),
    "kd 1": (DistillationObjective(1.0), oracle.distilled(1.0), False),
}


@pytest.mark.parametrize("name", TOKENS)
def test_objectives_of_tokens(name, record_property):
    found = Tally(name)
    objective, losses_of, scalar = TOKENS[name]
    for batch, normalizer, plan in token_cases(list(TOKENS).index(name), scalar=scalar):
        compare(found, batch, plan, objective, lambda step, n=normalizer: oracle.by_token(step, losses_of, n, LENGTH))
    found.finish(record_property, TOLERANCE, at_least=50 * ROUNDS)


# ---------------------------------------------------------------------------------------------------------- comparisons
PREFERENCES = {
    "dpo": DPOLoss(kind="dpo"),
    "cdpo": DPOLoss(kind="dpo", beta=0.5, label_smoothing=0.2),
    "ipo mean": IPOLoss(kind="ipo"),
    "ipo sum": IPOLoss(kind="ipo", beta=0.5, reduction="sum"),
    "kto": KTOLoss(kind="kto", undesirable_weight=1.3),
    "simpo": SimPOLoss(kind="simpo"),
    "orpo": ORPOLoss(kind="orpo"),
}


def without_auxiliary(batch: Batch) -> Batch:
    batch.auxiliary = None
    return batch


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_objectives(name, record_property):
    found, loss = Tally(name), PREFERENCES[name]
    for seed in range(40 * ROUNDS):
        random = np.random.default_rng((200 + list(PREFERENCES).index(name), seed))
        batch = without_auxiliary(with_streams(made(random, pairs=True), constant=True, old=True))
        kto = loss.kind == "kto"
        if kto:
            batch.units = [f"u{i}" for i in range(len(batch.units))]
        labels = [bool(random.random() < 0.5) if kto else i % 2 == 0 for i in range(len(batch.sequences))]
        baseline = float(np.float32(random.uniform(0, 1)))
        batch.sequences = [
            replace(s, preference=Preference(chosen, baseline=baseline))
            for s, chosen in zip(batch.sequences, labels, strict=True)
        ]
        plan = batch.plan(normalizer="sequence")
        if kto:
            compare(found, batch, plan, PreferenceObjective(loss), lambda step: oracle.labelled(loss, step))
        else:
            formula = oracle.pair_preference(loss)
            floor = {"cdpo": 0.1, "ipo sum": 2.0}.get(name, 0.0)  # sigmoid(h) and 0.8, h and 1
            compare(found, batch, plan, PreferenceObjective(loss), lambda s, f=formula: oracle.pairs(s, f), floor)
    found.finish(record_property, TOLERANCE, at_least=40 * ROUNDS)


@pytest.mark.parametrize("loss", ["sigmoid", "log_exp"])
@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_reward_model_objectives(loss, centering, record_property):
    found = Tally(f"rm {loss} {centering}")
    config = RMConfig(loss=loss, centering=centering, use_margin=True)
    for seed in range(25 * ROUNDS):
        random = np.random.default_rng((300, seed))
        batch = without_auxiliary(made(random, pairs=True, scalar=True, one=True))
        margins = [float(np.float32(x)) for x in random.random(len(batch.sequences))]
        batch.sequences = [
            replace(s, preference=Preference(i % 2 == 0, margin=margins[i])) for i, s in enumerate(batch.sequences)
        ]
        plan = batch.plan(normalizer="sequence")
        formula = oracle.reward_model(config)
        compare(found, batch, plan, RewardModelObjective(config), lambda step, f=formula: oracle.pairs(step, f))
    found.finish(record_property, TOLERANCE, at_least=25 * ROUNDS)
