"""A mixture of experts under ZeRO-3 and ZeRO-2, two ranks that visit different experts: no hang, and what one process
computes; experts gathered one by one.

Run as a program for one rank: ``python -m tests.distributed.test_moe RANK PORT CHECKPOINT DIRECTORY``.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skirl.config.schema import DeepSpeedBackendConfig, OptimConfig
from skirl.models.checkpoints import checkpoint_specs
from skirl.records import Plan, TrainingSequence
from skirl.testing import tiny_models
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import SupervisedObjective
from tests import tiny
from tests.distributed.two_ranks import joined, run_ranks

STAGES = (2, 3)
OPTIM = OptimConfig(lr=1e-3)
COEF = 0.5
"""So large that a wrong auxiliary loss shows."""


def plans(kit: tiny.Kit) -> list[Plan]:
    """A sequence of one repeated token for each rank, so that each visits few experts; then unequal shares; then one
    sequence, which leaves the second rank a dummy.
    """
    apart = [TrainingSequence(str(n), np.full(4, n), np.arange(1, 4)) for n in (62, 85)]
    made = [*apart, *tiny.sequences(kit, (3, 2), streams=False)]
    unequal = tiny.cut(tiny.whole(made), [[[0, 1], [3]], [[2], []]])
    return [tiny.cut(tiny.whole(apart), [[[0]], [[1]]]), unequal, tiny.cut(tiny.whole(apart[:1]), [[[0]], [[]]])]


def train(kit: tiny.Kit, backend: Any) -> dict[str, Any]:
    """Three updates; the experts of each layer that this process visited in the first of them."""
    gates = [layer.mlp.gate for layer in kit.policy.language_model.layers]
    visited: list[set[int]] = [set() for _ in gates]
    hooks = [
        gate.register_forward_hook(lambda _, __, out, seen=seen: seen.update(out[2].flatten().tolist()))
        for gate, seen in zip(gates, visited, strict=True)
    ]
    first = plans(kit)[0]
    found: dict[str, Any] = {"losses": list(backend.update(first, 1).losses), "visited": visited}
    for hook in hooks:
        hook.remove()
    for plan in plans(kit)[1:]:
        report = backend.update(plan, 2)
        found["losses"] += report.losses
        found["norm"] = report.grad_norms[-1]
    found["balance"] = report.metrics["policy/router_balance"].value
    names = [spec.name for spec in backend.specs()]
    found["tensors"] = {}
    for part in (names[::2], names[1::2]):
        with backend.gathered(part) as tensors:
            found["tensors"] |= {n: t.clone() for n, t in tensors.items()}
    found["exported"] = [name for name, _ in backend.parameters()]
    return found


def main(rank: str, port: str, checkpoint: str, directory: str) -> None:
    from skirl.runtime.process_groups import leave

    joined(rank, port)
    import deepspeed

    from skirl.training.backends.deepspeed import DeepSpeedBackend

    found = {}
    for stage in STAGES:
        for recomputed in (False, True):
            kit = made_kit(Path(checkpoint), recomputed)
            config = DeepSpeedBackendConfig(kind="deepspeed", zero_stage=stage)
            backend = DeepSpeedBackend(
                kit.policy, SupervisedObjective(), OPTIM, config, dtype="float32", total_prompts=100
            )
            found[stage, recomputed] = train(kit, backend)
            found[stage, recomputed]["leaves"] = [
                type(m).__name__ for m in kit.policy.modules() if deepspeed.utils.z3_leaf_module(m)
            ]
    torch.save(found, Path(directory) / f"rank-{rank}.pt")
    leave()


def made_kit(checkpoint: Path, recomputed: bool) -> tiny.Kit:
    kit = tiny.make_kit(checkpoint)
    kit.policy.set_router_aux(COEF)
    if recomputed:
        kit.loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kit.policy.language_model.train()
    return kit


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tiny_models.tiny_qwen3_moe(tmp_path_factory.mktemp("moe") / "model", experts=8, hidden=32)
    tiny.sharpen(directory)
    return directory


@pytest.fixture(scope="module")
def ranks(checkpoint, tmp_path_factory) -> list[dict[Any, Any]]:
    """What each of two ranks saw, by (stage, whether layers are recomputed in the backward pass)."""
    directory = tmp_path_factory.mktemp("ranks")
    arguments = [str(checkpoint), str(directory)]
    return run_ranks("tests.distributed.test_moe", arguments, directory, timeout_s=240)


@pytest.fixture(scope="module")
def alone(checkpoint) -> dict[str, Any]:
    kit = made_kit(checkpoint, recomputed=False)
    return train(kit, SingleBackend(kit.policy, SupervisedObjective(), OPTIM, 100))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_visit_other_experts_compute_what_one_process_does(ranks, alone, checkpoint, stage, recomputed):
    first, second = (rank[stage, recomputed] for rank in ranks)
    assert all(
        one and other and not one & other for one, other in zip(first["visited"], second["visited"], strict=True)
    )
    sums = [a + b for a, b in zip(first["losses"], second["losses"], strict=True)]
    np.testing.assert_allclose(sums, alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(first["norm"], alone["norm"], rtol=1e-4)
    assert {n: tuple(t.shape) for n, t in first["tensors"].items()} == {
        n: shape for n, (shape, _) in checkpoint_specs(checkpoint).items()
    }
    for name, tensor in alone["tensors"].items():
        assert torch.equal(first["tensors"][name], second["tensors"][name])
        # Adam moves by the sign of a gradient near 0, whose last bits depend on the order of sums: whole tensors.
        assert float((first["tensors"][name] - tensor).norm() / tensor.norm()) < 1e-3
    assert stage < 3 or first["leaves"] == ["Qwen3MoeSparseMoeBlock"] * 2
    assert first["exported"] == alone["exported"]
    assert any(name.endswith("experts.gate_up_proj") for name in first["exported"])


if __name__ == "__main__":
    main(*sys.argv[1:])
