"""Policy, critic, reference and reward model on Ray and DeepSpeed, together and apart, against one process.

Each run brings its own processes up and down.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skirl.assemble_worker import build_worker
from skirl.config.offline import RMConfig
from skirl.config.schema import Config
from skirl.planning.schedule import make_plan
from skirl.records import Plan, RewardText, TrainingSequence, UpdateReport
from skirl.runtime.local import LocalWorkers
from skirl.runtime.worker import WorkerSpec
from skirl.runtime.workers import Workers
from skirl.tracking.metrics import depends_on_machine
from skirl.training.objective import PolicyObjective
from skirl.training.preference_objective import RewardModelObjective
from skirl.training.value_objective import ValueObjective
from tests import tiny

# float32: what is left is the order of summation, as in test_equal_runs.py.
TOLERANCE = 5e-5
LENGTHS = (4, 1, 6, 3, 2)
BOTH = ("policy", "critic")
GROUPS = {
    "one group": {"policy reference critic": 2},
    "two groups": {"policy reference": 2, "critic": 2},
    "with a reward model": {"policy": 2, "critic reference": 2, "reward": 1},
}
RUNS = [(2, "one group"), (2, "two groups"), (3, "with a reward model")]


def recipe(path: Path, reward: Path | None, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"path": path},
        "data": {},
        "run": {"dir": "unused"},
        "method": {"preset": "ppo"},
        "critic": {"optim": {"lr": 2e-3}},
        "reward": {"models": {"taste": {"path": reward}}} if reward else None,
        "trainer": {"ranks": 2, "optim": {"lr": 1e-3}},
    }
    return Config.model_validate(base | sections)


def spec_of(config: Config) -> WorkerSpec:
    return WorkerSpec(
        config,
        PolicyObjective(tiny.Sampling()),
        100,
        with_reference=True,
        critic_objective=ValueObjective(clip=0.2),
        reward_models=("taste",) if config.reward else (),
    )


@contextmanager
def on_ray(path: Path, reward: Path, zero_stage: int, groups: str) -> Iterator[Workers]:
    from skirl.runtime.ray.launch import launch

    placed = [{"roles": roles.split(), "gpus": places} for roles, places in GROUPS[groups].items()]
    trainer = {
        "ranks": 2,
        "optim": {"lr": 1e-3},
        "backend": {"kind": "deepspeed", "zero_stage": zero_stage},
    }
    # Places of a hundredth of a core: more processes than the cluster has cores.
    runtime = {"kind": "ray", "cpus_per_rank": 0.01, "placement": placed}
    scorer = reward if "reward" in GROUPS[groups] else None
    workers = launch(spec_of(recipe(path, scorer, trainer=trainer, runtime=runtime)), "train", None)
    try:
        yield workers
    finally:
        workers.shutdown()


@pytest.fixture(scope="module")
def models(checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy, and a reward model whose head is not zero."""
    path, directory = checkpoints["small"], tmp_path_factory.mktemp("reward") / "model"
    config = Config.model_validate({"model": {"path": path}, "data": {}, "run": {"dir": "unused"}})
    spec = WorkerSpec(config, RewardModelObjective(RMConfig()), 1, with_reference=False, trains="value", samples=False)
    build_worker(spec).export(directory, "policy", write=True)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"] = torch.randn(tensors["score.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, file, metadata={"format": "pt"})
    return path, directory


@pytest.fixture(scope="module")
def batch(checkpoints: Any) -> list[TrainingSequence]:
    return [replace(s, old_logprobs=None) for s in tiny.sequences(tiny.make_kit(checkpoints["small"]), LENGTHS)]


TEXTS = [RewardText(({"role": "user", "content": "number"},), f"answer {n}") for n in range(9)]


def plan_of(batch: list[TrainingSequence]) -> Plan:
    """Two optimizer steps of several micro-batches a rank."""
    return make_plan(batch, num_ranks=2, max_tokens=40, normalizer="sequence", mini_batches=2)


def ppo_steps(workers: Workers, batch: list[TrainingSequence], steps: range) -> dict[str, Any]:
    """What a loop would ask for: values, reference, updates; the critic alone in step 0."""
    found: dict[str, Any] = {}
    for step in steps:
        plan = plan_of(batch)
        values, reference = workers.values(plan), workers.logprobs(plan, "reference")
        streams = [
            replace(s, values=v, reference_logprobs=r, returns=np.linspace(0.5, 1.0, s.num_actions))
            for s, v, r in zip(batch, values, reference, strict=True)
        ]
        report = workers.update(plan_of(streams), 10 * step + 10, ("critic",) if step == 0 else BOTH)
        found |= {f"{step}/values": np.concatenate(values), f"{step}/reference": np.concatenate(reference)}
        found |= {f"{step}/{name}": value for name, value in numbers(report).items()}
    found["policy"] = np.concatenate(workers.logprobs(plan_of(batch), "policy"))
    return found


def numbers(report: UpdateReport) -> dict[str, Any]:
    return {
        "version": report.policy_version,
        "losses": np.asarray(report.losses),
        "grad_norms": np.asarray(report.grad_norms),
        **{name: ratio.value for name, ratio in report.metrics.items() if not depends_on_machine(name)},
    }


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, str]:
    """Largest |x - y| / max(1, |x|), and where."""
    assert one.keys() == other.keys()
    differences = {
        name: np.abs(np.subtract(one[name], other[name])) / np.maximum(1.0, np.abs(one[name])) for name in one
    }
    return max((float(difference.max(initial=0.0)), name) for name, difference in differences.items())


@pytest.fixture(scope="module")
def local_run(models: tuple[Path, Path], batch: list[TrainingSequence]) -> tuple[dict[str, Any], list[Any]]:
    """The same in one process with plain PyTorch."""
    workers = LocalWorkers(build_worker(spec_of(recipe(*models))), num_ranks=2, batch_size=8)
    before = np.concatenate(workers.logprobs(plan_of(batch), "policy"))
    found = ppo_steps(workers, batch, range(3))
    assert [found[f"{n}/version"] for n in range(3)] == [0, 1, 2]
    assert np.abs(found["policy"] - before).max() > 1e-3
    assert np.abs(found["2/values"]).max() > 1e-3
    return found, workers.reward_scores("taste", TEXTS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("zero_stage", "groups"), RUNS)
def test_ranks_and_places_do_not_change_ppo(
    cluster, models, batch, local_run, zero_stage, groups, tmp_path, record_property
) -> None:
    wanted, scores = local_run
    with on_ray(*models, zero_stage, groups) as workers:
        start = np.concatenate(workers.logprobs(plan_of(batch), "policy"))
        got = ppo_steps(workers, batch, range(1))
        np.testing.assert_array_equal(got["policy"], start)  # the critic alone was trained
        workers.save(tmp_path)
        got |= ppo_steps(workers, batch, range(1, 3))
        difference, where = largest_difference(wanted, got)
        record_property(f"ppo, ray, ZeRO-{zero_stage}, {groups}", difference)
        assert difference < TOLERANCE, where
        if "reward" in GROUPS[groups]:
            np.testing.assert_allclose(workers.reward_scores("taste", TEXTS), scores, rtol=0, atol=TOLERANCE)
        workers.load(tmp_path)  # the steps after it are the same, bit for bit
        again = ppo_steps(workers, batch, range(1, 3))
    for name, value in again.items():
        np.testing.assert_array_equal(value, got[name], err_msg=name)
