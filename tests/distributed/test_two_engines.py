"""Policy and critic, each with a DeepSpeed engine of its own in the same two processes, against plain PyTorch.

Run as a program for one rank: ``python -m tests.distributed.test_two_engines RANK PORT CHECKPOINT DIRECTORY``.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from skirl.config.schema import DeepSpeedBackendConfig, EMAConfig, MuonConfig, OptimConfig
from skirl.models.attention import PACKED_ATTENTION, register_packed_attention
from skirl.models.value import ValueModel, load_value_model
from skirl.planning.schedule import make_plan
from skirl.records import Plan
from skirl.training.backends.single import SingleBackend
from skirl.training.gradient_sums import GradientSums
from skirl.training.objective import PolicyObjective
from skirl.training.value_objective import ValueObjective
from tests import tiny
from tests.distributed.two_ranks import joined, run_ranks

LENGTHS = (4, 1, 9, 6, 2)
ROLES = ("policy", "critic")
OPTIMS = {
    "adamw": OptimConfig(lr=1e-3, weight_decay=1.0),  # so large that a step too many would show
    "muon": OptimConfig(lr=1e-3, muon=MuonConfig(lr=1e-2)),
}
Dtype = Literal["float32", "bfloat16"]
SHARDS_GRADIENTS = 2  # ZeRO stage
CASES: tuple[tuple[int, Dtype, str], ...] = (
    *((stage, "float32", "adamw") for stage in (0, 1, 2, 3)),
    *((stage, "bfloat16", "adamw") for stage in (0, 1, 2, 3)),
    (0, "float32", "muon"),
    (0, "bfloat16", "muon"),
)


def plan_of(checkpoint: Path) -> Plan:
    made = tiny.sequences(tiny.make_kit(checkpoint), LENGTHS)
    made = [
        replace(s, values=np.zeros(s.num_actions, np.float32), returns=np.linspace(0, 1, s.num_actions)) for s in made
    ]
    return make_plan(made, num_ranks=2, max_tokens=100, normalizer="token", mini_batches=2, kl_coef=0.1)


def built(checkpoint: Path, dtype: Dtype, make: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """A backend for each role; the critic's head is new."""
    register_packed_attention()
    kit = tiny.make_kit(checkpoint, dtype=dtype)
    loaded = load_value_model(checkpoint, kind="token", dtype=dtype, attn_implementation=PACKED_ATTENTION)
    return {
        "policy": make(kit.policy, PolicyObjective(kit.sampling())),
        "critic": make(ValueModel(loaded, None, "before"), ValueObjective(0.2)),
    }


def trained(backends: Mapping[str, Any], plan: Plan, steps: int) -> dict[str, list[float]]:
    """Losses by role; the engines take turns."""
    losses: dict[str, list[float]] = {role: [] for role in backends}
    for number in range(steps):
        for role, backend in backends.items():
            losses[role] += backend.update(plan, 5 * number + 5).losses
    return losses


def course(backends: Mapping[str, Any], plan: Plan, directory: Path) -> dict[str, Any]:
    """Loss before, losses of three updates, weights and averages after them, and whether a resume goes on the same."""
    found: dict[str, Any] = {"before": {role: b.evaluate(plan) for role, b in backends.items()}}
    found["losses"] = trained(backends, plan, 3)
    for what in ("parameters", "ema_parameters"):
        found[what] = {r: {n: t.clone() for n, t in getattr(b, what)()} for r, b in backends.items()}
    for role, backend in backends.items():
        backend.save(directory / role)
    wanted = trained(backends, plan, 1)
    averages = {role: [a.clone() for a in b._average.averages] for role, b in backends.items()}
    for role, backend in backends.items():
        backend.load(directory / role)
    found["resumed"] = trained(backends, plan, 1) == wanted and all(
        torch.equal(a, b)
        for role in backends
        for a, b in zip(averages[role], backends[role]._average.averages, strict=True)
    )
    return found


def main(rank: str, port: str, checkpoint: str, directory: str) -> None:
    from skirl.runtime.process_groups import leave

    joined(rank, port)
    from skirl.training.backends.deepspeed import DeepSpeedBackend

    plan, found = plan_of(Path(checkpoint)), {}
    for stage, dtype, optim in CASES:
        aside = Path(directory) / f"{stage}-{dtype}-{optim}"
        for role in ROLES:
            (aside / role).mkdir(parents=True, exist_ok=True)
        backends = built(
            Path(checkpoint),
            dtype,
            lambda model, objective, stage=stage, dtype=dtype, optim=optim: DeepSpeedBackend(
                model,
                objective,
                OPTIMS[optim],
                DeepSpeedBackendConfig(kind="deepspeed", zero_stage=stage),
                dtype=dtype,
                total_prompts=100,
                ema=EMAConfig(decay=0.9),
            ),
        )
        found[stage, dtype, optim] = course(backends, plan, aside)
    torch.save(found, Path(directory) / f"rank-{rank}.pt")
    leave()


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def ranks(checkpoints, tmp_path_factory) -> list[dict[Any, Any]]:
    """What each of two ranks saw, by case."""
    directory = tmp_path_factory.mktemp("ranks")
    arguments = [str(checkpoints["tied"]), str(directory)]
    return run_ranks("tests.distributed.test_two_engines", arguments, directory, timeout_s=500)


class RoundedSums(GradientSums):
    """As sums end where DeepSpeed does not shard gradients: in the type of the weights."""

    def give(self, to: Sequence[torch.nn.Parameter]) -> None:
        super().give(to)
        for target, parameter in zip(to, self._parameters, strict=True):
            if target.grad is not None:
                target.grad.copy_(target.grad.to(parameter.dtype))


@pytest.fixture(scope="module")
def alone(checkpoints, tmp_path_factory) -> Callable[[Dtype, str, str, bool], dict[str, Any]]:
    """The same course of one role by plain PyTorch, with no other model in between."""
    known: dict[Any, dict[str, Any]] = {}
    plan = plan_of(checkpoints["tied"])

    def backend(model: Any, objective: Any, optim: str, rounded: bool) -> SingleBackend:
        made = SingleBackend(model, objective, OPTIMS[optim], 100, ema=EMAConfig(decay=0.9))
        if rounded:
            made._sums = RoundedSums(made._trained)
        return made

    def found(dtype: Dtype, optim: str, role: str, rounded: bool) -> dict[str, Any]:
        case = dtype, optim, role, rounded
        if case not in known:
            backends = built(checkpoints["tied"], dtype, lambda m, o: backend(m, o, optim, rounded))
            directory = tmp_path_factory.mktemp("alone")
            (directory / role).mkdir()
            known[case] = course({role: backends[role]}, plan, directory)
        return known[case]

    return found


def farthest(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[n].float() - other[n].float()).abs().max()) for n in one)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_each_engine_does_what_it_would_alone(ranks, alone, case, role, record_property):
    stage, dtype, optim = case
    wanted = alone(dtype, optim, role, dtype == "bfloat16" and stage < SHARDS_GRADIENTS)
    found = [rank[case] for rank in ranks]
    before = [rank["before"][role] for rank in found]
    assert set(before[0]) == set(before[1]) == set(wanted["before"][role])
    for name, ratio in wanted["before"][role].items():
        assert (before[0][name] + before[1][name]).value == pytest.approx(ratio.value, rel=1e-5, abs=1e-6), name
    losses = np.sum([rank["losses"][role] for rank in found], axis=0)
    loose = optim == "muon"  # which makes rounding of near-zero gradients, as under a new head, into whole steps
    apart = float(np.abs(losses - wanted["losses"][role]).max())
    record_property(f"two_engines/{case}/{role}", apart)
    assert apart < (1e-4 if loose else 1e-5)
    for what in ("parameters", "ema_parameters"):
        assert farthest(found[0][what][role], found[1][what][role]) == 0
        one_step = 1e-2 if optim == "muon" else 1e-3
        rounding = 8e-3 if dtype == "bfloat16" else 0.0
        assert farthest(found[0][what][role], wanted[what][role]) < 0.5 * one_step + rounding
    assert farthest(found[0]["parameters"][role], found[0]["ema_parameters"][role]) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_engines_side_by_side_resume_bit_for_bit(ranks, case):
    assert all(rank[case]["resumed"] for rank in ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
