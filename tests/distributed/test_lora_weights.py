"""LoRA under DeepSpeed, two ranks: the same weights as in one process, whole under ZeRO-3; resumed bit for bit.

Run as a program for one rank: ``python -m tests.distributed.test_lora_weights RANK PORT CHECKPOINT DIRECTORY``.
"""

import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from skirl.config.models import LoRAConfig
from skirl.config.schema import DeepSpeedBackendConfig, OptimConfig
from skirl.models.adapters import adapters_off, add_adapters
from skirl.models.loading import set_trainable
from skirl.planning.schedule import make_plan
from skirl.testing import tiny_models
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import SupervisedObjective
from tests import tiny
from tests.distributed.two_ranks import joined, run_ranks

LENGTHS = (4, 1, 9, 6, 2)
OPTIM = OptimConfig(lr=1e-2, max_grad_norm=0.5)
LORA = LoRAConfig(rank=4, alpha=8.0)
Case = tuple[int, Literal["float32", "bfloat16"], Literal["nf4"] | None]
CASES: tuple[Case, ...] = (
    (0, "float32", None),
    (2, "float32", None),
    (3, "float32", None),
    (3, "bfloat16", None),
    (2, "bfloat16", "nf4"),
    (3, "float32", "nf4"),
)


def adapted(checkpoint: Path, dtype: Any = "float32", quantize: Any = None) -> Any:
    kit = tiny.make_kit(checkpoint, dtype=dtype)
    add_adapters(kit.loaded, LORA.model_copy(update={"quantize": quantize}))
    set_trainable(kit.loaded.model, kit.loaded.family, ("encoder",))
    return kit


def plan_of(kit: tiny.Kit) -> Any:
    made = tiny.sequences(kit, LENGTHS, streams=False)
    return make_plan(made, num_ranks=2, max_tokens=100, normalizer="token", mini_batches=2)


def taken(backend: Any) -> dict[str, torch.Tensor]:
    """All committed weights: gathered at once, and again one by one as an export is."""
    names = [s.name for s in backend.specs()]
    with backend.gathered(names) as tensors:
        whole = {n: t.clone() for n, t in tensors.items()}
    for name, tensor in backend.parameters():
        assert torch.equal(tensor, whole[name]), name
    return whole


# ------------------------------------------------------------------------------------------------------------- one rank
def train(checkpoint: Path, case: Case, directory: Path) -> dict[str, Any]:
    from skirl.training.backends.deepspeed import DeepSpeedBackend

    stage, dtype, quantize = case
    kit = adapted(checkpoint, dtype, quantize)
    config = DeepSpeedBackendConfig(kind="deepspeed", zero_stage=stage)
    backend = DeepSpeedBackend(kit.policy, SupervisedObjective(), OPTIM, config, dtype=dtype, total_prompts=100)
    plan = plan_of(kit)
    found: dict[str, Any] = {"specs": backend.specs(), "start": taken(backend), "base": backend.logprobs(plan)}
    reports = [backend.update(plan, 5 * n + 5) for n in range(3)]
    found["losses"] = [x for r in reports for x in r.losses]
    found["norms"] = [x for r in reports for x in r.grad_norms]
    found["end"], found["adapters"] = taken(backend), {n: t.clone() for n, t in backend.adapter_parameters()}
    with adapters_off(kit.policy):
        found["off"] = backend.logprobs(plan)
    found["on"] = backend.logprobs(plan)
    directory.mkdir(exist_ok=True)
    backend.save(directory)
    found["next"] = [backend.update(plan, 20).losses, backend.update(plan, 25).losses]
    found["last"] = taken(backend)
    fresh = adapted(checkpoint, dtype, quantize)
    other = DeepSpeedBackend(fresh.policy, SupervisedObjective(), OPTIM, config, dtype=dtype, total_prompts=100)
    other.load(directory)
    found["resumed"] = [other.update(plan, 20).losses, other.update(plan, 25).losses]
    found["resumed last"] = taken(other)
    return found


def main(rank: str, port: str, checkpoint: str, directory: str) -> None:
    from skirl.runtime.process_groups import leave

    joined(rank, port)
    found = {case: train(Path(checkpoint), case, Path(directory) / "-".join(map(str, case))) for case in CASES}
    torch.save(found, Path(directory) / f"rank-{rank}.pt")
    leave()


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """With rows of whole blocks of 4 bits."""
    directory = tiny_models.tiny_qwen3(tmp_path_factory.mktemp("wide") / "model", hidden=64, tied=False)
    tiny.sharpen(directory)
    return directory


@pytest.fixture(scope="module")
def ranks(checkpoint, tmp_path_factory) -> list[dict[Case, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    arguments = [str(checkpoint), str(directory)]
    return run_ranks("tests.distributed.test_lora_weights", arguments, directory, timeout_s=300)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_merged_weights_are_whole_and_those_of_one_process(ranks, checkpoint, case, record_property):
    _, dtype, quantize = case
    kit = adapted(checkpoint, dtype, quantize)
    backend = SingleBackend(kit.policy, SupervisedObjective(), OPTIM, 100)
    start, plan = taken(backend), plan_of(kit)
    reports = [backend.update(plan, 5 * n + 5) for n in range(3)]
    losses, norms = ([x for r in reports for x in getattr(r, name)] for name in ("losses", "grad_norms"))
    end, mine = taken(backend), dict(backend.adapter_parameters())
    assert max(norms) > OPTIM.max_grad_norm
    limits = {"float32": 1e-5, "bfloat16": 0.02}
    for rank in (rank[case] for rank in ranks):
        assert rank["specs"] == backend.specs()
        assert all(torch.equal(rank["start"][n], t) for n, t in start.items())
        assert rank["norms"] == pytest.approx(norms, rel=limits[dtype])
        moved = {n for n, t in rank["end"].items() if not torch.equal(t, rank["start"][n])}
        assert moved == {s.name for s in backend.specs() if s.trained}
        difference = max(float((rank["end"][n] - t).abs().max()) for n, t in end.items())
        record_property(f"{case}_vs_single_weights", difference)
        assert difference < limits[dtype]
        assert rank["adapters"].keys() == mine.keys()
        assert all(rank["adapters"][n].shape == t.shape for n, t in mine.items())
    one, other = (rank[case] for rank in ranks)
    assert all(torch.equal(t, other["end"][n]) for n, t in one["end"].items())
    assert [a + b for a, b in zip(one["losses"], other["losses"], strict=True)] == pytest.approx(
        losses, rel=limits[dtype]
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_off_is_the_start_exactly_and_on_again_is_not(ranks, case):
    for rank in (rank[case] for rank in ranks):
        assert all(torch.equal(rank["off"][i], x) for i, x in rank["base"].items())
        assert max(float((rank["on"][i] - x).abs().max()) for i, x in rank["base"].items()) > 0.1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_run_goes_on_bit_for_bit(ranks, case):
    for rank in (rank[case] for rank in ranks):
        assert rank["resumed"] == rank["next"]
        assert all(torch.equal(rank["resumed last"][n], t) for n, t in rank["last"].items())
        assert any(not torch.equal(rank["end"][n], t) for n, t in rank["last"].items())


if __name__ == "__main__":
    main(*sys.argv[1:])
