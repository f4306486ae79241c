"""DeepSpeed at every ZeRO stage, two ranks: weights lent for commits, and state that leaves the device and returns.

Run as a program for one rank: ``python -m tests.distributed.test_backend_weights RANK PORT CHECKPOINT DIRECTORY``.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from skirl.config.schema import DeepSpeedBackendConfig, OptimConfig
from skirl.planning.schedule import make_plan
from skirl.records import Sampling
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import PolicyObjective, SupervisedObjective
from tests import tiny
from tests.distributed.two_ranks import joined, run_ranks

STAGES = (0, 1, 2, 3)
CASES: tuple[tuple[int, Literal["float32", "bfloat16"]], ...] = (
    *((stage, "float32") for stage in STAGES),
    *((stage, "bfloat16") for stage in STAGES),
)
LENGTHS = (4, 1, 9, 6, 2)
OPTIM = OptimConfig(lr=1e-3)


def objective(kit: tiny.Kit) -> PolicyObjective:
    return PolicyObjective(kit.sampling())


def plan_of(kit: tiny.Kit) -> Any:
    how: dict[str, Any] = {"num_ranks": 2, "max_tokens": 100, "normalizer": "token", "mini_batches": 2}
    return make_plan(tiny.sequences(kit, LENGTHS), kl_coef=0.1, **how)


# ------------------------------------------------------------------------------------------------------------- one rank
def lent(backend: Any, stage: int) -> dict[str, Any]:
    """Specs, and all tensors gathered at once and in two parts."""
    import deepspeed

    specs, gathers = backend.specs(), []
    plain = deepspeed.zero.GatheredParameters
    deepspeed.zero.GatheredParameters = lambda parameters: gathers.append(len(parameters)) or plain(parameters)
    names = [s.name for s in specs]
    with backend.gathered(names) as tensors:
        whole = {n: t.clone() for n, t in tensors.items()}
        assert not any(t.requires_grad for t in tensors.values())
    assert len(gathers) == (stage == 3)
    halves: dict[str, torch.Tensor] = {}
    for part in (names[::2], names[1::2]):
        with backend.gathered(part) as tensors:
            halves |= {n: t.clone() for n, t in tensors.items()}
    deepspeed.zero.GatheredParameters = plain
    assert all(torch.equal(whole[n], halves[n]) for n in names)
    iterated = dict(backend.parameters())
    assert all(torch.equal(whole[n], t) for n, t in iterated.items())
    return {"specs": specs, "tensors": whole, "parameters": list(iterated)}


def train(checkpoint: Path, stage: int, dtype: Any, directory: Path, *, leaves: bool) -> dict[str, Any]:
    from skirl.training.backends.deepspeed import DeepSpeedBackend

    kit = tiny.make_kit(checkpoint, dtype=dtype)
    config = DeepSpeedBackendConfig(kind="deepspeed", zero_stage=stage)
    backend = DeepSpeedBackend(kit.policy, objective(kit), OPTIM, config, dtype=dtype, total_prompts=100)
    plan = plan_of(kit)
    found: dict[str, Any] = {"start": lent(backend, stage), "losses": [], "norms": [], "held": [], "away": []}
    for number in range(3):
        if leaves:
            found["moved"] = backend.give_back()
            found["away"].append(backend.state_bytes())
            backend.logprobs(plan)
            assert backend.take_back() == found["moved"]
        report = backend.update(plan, 5 * number + 5)
        found["held"].append(backend.state_bytes())
        found["losses"] += report.losses
        found["norms"] += report.grad_norms
    found["end"] = lent(backend, stage)
    cooler = Sampling(temperature=0.5, banned_ids=kit.banned_ids)
    found["logprobs"], found["cooler"] = backend.logprobs(plan), backend.logprobs(plan, cooler)
    directory.mkdir(exist_ok=True)
    backend.save(directory)
    backend.load(directory)
    if leaves:
        backend.give_back()
        backend.take_back()
    found["losses"] += backend.update(plan, 20).losses
    return found


def summed(checkpoint: Path, stage: int) -> list[float]:
    """Gradient norms of a step with one micro-batch a rank, and with 320 that are alike: the loss is their mean."""
    from skirl.training.backends.deepspeed import DeepSpeedBackend

    kit = tiny.make_kit(checkpoint, dtype="bfloat16")
    one, norms = tiny.sequences(kit, (4,), streams=False)[0], []
    config = DeepSpeedBackendConfig(kind="deepspeed", zero_stage=stage)
    still = OptimConfig(lr=1e-12)
    backend = DeepSpeedBackend(kit.policy, SupervisedObjective(), still, config, dtype="bfloat16", total_prompts=100)
    for count in (1, 320):
        copies = [replace(one, id=f"{one.id}{n}") for n in range(2 * count)]
        plan = make_plan(copies, num_ranks=2, max_tokens=one.num_tokens, normalizer="token")
        assert [len(rank) for rank in plan.steps[0].ranks] == [count, count]
        norms += backend.update(plan, 1).grad_norms
    return norms


def main(rank: str, port: str, checkpoint: str, directory: str) -> None:
    from skirl.runtime.process_groups import leave

    joined(rank, port)
    found = {}
    for stage, dtype in CASES:
        for leaves in (False, True):
            aside = Path(directory) / f"{stage}-{dtype}-{leaves}"
            found[stage, dtype, leaves] = train(Path(checkpoint), stage, dtype, aside, leaves=leaves)
    found["summed"] = {stage: summed(Path(checkpoint), stage) for stage in STAGES}
    torch.save(found, Path(directory) / f"rank-{rank}.pt")
    leave()


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def ranks(checkpoints, tmp_path_factory) -> list[dict[Any, Any]]:
    """What each of two ranks saw, by (stage, dtype, whether its state left the device between updates)."""
    directory = tmp_path_factory.mktemp("ranks")
    arguments = [str(checkpoints["native"]), str(directory)]
    return run_ranks("tests.distributed.test_backend_weights", arguments, directory, timeout_s=500)


@pytest.fixture(scope="module")
def single(checkpoints) -> Any:
    """The same updates by plain PyTorch in one process, float32."""
    kit = tiny.make_kit(checkpoints["native"])
    backend = SingleBackend(kit.policy, objective(kit), OPTIM, 100)
    with backend.gathered([s.name for s in backend.specs()]) as tensors:
        start = {n: t.clone() for n, t in tensors.items()}
    losses = [x for n in range(3) for x in backend.update(plan_of(kit), 5 * n + 5).losses]
    with backend.gathered([s.name for s in backend.specs()]) as tensors:
        return backend.specs(), start, {n: t.clone() for n, t in tensors.items()}, losses


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_for_commits_are_whole_and_the_same_on_every_rank(ranks, single, stage, record_property):
    specs, start, end, losses = single
    frozen = [s.name for s in specs if not s.trained]
    assert frozen
    for rank in ranks:
        found = rank[stage, "float32", False]
        assert found["start"]["specs"] == found["end"]["specs"] == specs
        assert all(torch.equal(found["start"]["tensors"][n], t) for n, t in start.items())
        moved = {n: float((found["end"]["tensors"][n] - t).abs().max()) for n, t in start.items()}
        assert all((moved[s.name] > 0) == s.trained for s in specs)
        difference = max(float((found["end"]["tensors"][n] - t).abs().max()) for n, t in end.items())
        record_property(f"zero_{stage}_vs_single_weights", difference)
        assert difference < 1e-4
        assert set(found["end"]["parameters"]) == {s.name for s in specs} - set(frozen)
    shares = [rank[stage, "float32", False]["losses"][: len(losses)] for rank in ranks]
    assert [a + b for a, b in zip(*shares, strict=True)] == pytest.approx(losses, rel=1e-4, abs=1e-5)
    one, other = (rank[stage, "float32", False]["end"]["tensors"] for rank in ranks)
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_state_that_left_the_device_comes_back_bit_for_bit(ranks, stage, dtype):
    for rank in ranks:
        stayed, left = rank[stage, dtype, False], rank[stage, dtype, True]
        assert left["losses"] == stayed["losses"]
        assert left["norms"] == stayed["norms"]
        assert all(torch.equal(left["end"]["tensors"][n], t) for n, t in stayed["end"]["tensors"].items())
        assert all(torch.equal(x, stayed["logprobs"][i]) for i, x in left["logprobs"].items())
        held, away = left["held"][1], left["away"][2]
        assert held == stayed["held"][1]
        assert left["moved"] == held["optimizer"] + held["masters"] > 0
        assert away == {"weights": held["weights"], "gradients": 0, "optimizer": 0, "masters": 0}
        separate = stage > 0 or dtype == "bfloat16"
        assert (held["masters"] > 0) == separate
        assert not separate or 2 * held["masters"] <= held["optimizer"] < 2.5 * held["masters"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_many_micro_batches_of_bfloat16_weights_add_up(ranks, stage, record_property):
    """A sum in bfloat16 stands still once what is added is below 1/256 of it."""
    (one, many), other = (rank["summed"][stage] for rank in ranks)
    record_property(f"zero_{stage}_norm_of_many", many / one)
    assert other == [one, many]
    assert many == pytest.approx(one, rel=2e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_log_probs_under_another_distribution(ranks):
    found = {
        (stage, i): x for rank in ranks for stage in STAGES for i, x in rank[stage, "float32", False]["cooler"].items()
    }
    plain = {
        (stage, i): x
        for rank in ranks
        for stage in STAGES
        for i, x in rank[stage, "float32", False]["logprobs"].items()
    }
    assert found.keys() == plain.keys()
    for stage, i in found:
        assert (found[stage, i] - found[0, i]).abs().max() < 1e-4
    assert max(float((found[key] - plain[key]).abs().max()) for key in found) > 0.5


if __name__ == "__main__":
    main(*sys.argv[1:])
