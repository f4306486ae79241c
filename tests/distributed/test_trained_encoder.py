"""DeepSpeed trains an audio encoder on two ranks that hear unequally much, one of them nothing in a pass.

Run as a program for one rank: ``python -m tests.distributed.test_trained_encoder RANK PORT DIRECTORY CHECKPOINT...``.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from skirl.config.schema import DeepSpeedBackendConfig, OptimConfig
from skirl.models import windowed
from skirl.records import Plan
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import PolicyObjective
from tests import tiny
from tests.distributed.two_ranks import joined, run_ranks

NAMES = ("native", "qwen2_audio")
STAGES = (2, 3)
OPTIM = OptimConfig(lr=1e-3)


def kit_and_plan(checkpoint: Path) -> tuple[tiny.Kit, Plan]:
    """Two clips beside one in the first pass, one beside none (a dummy) in the second."""
    kit = tiny.make_kit(checkpoint, freeze=())
    return kit, tiny.cut(tiny.whole(tiny.sequences(kit, (4, 1, 9, 6))), [[[0, 1], [2]], [[3], []]])


def trained(backend: Any, plan: Plan) -> dict[str, torch.Tensor]:
    for number in range(2):
        backend.logprobs(plan)
        backend.update(plan, 4 * number + 4)
    return {name: tensor.clone() for name, tensor in backend.parameters()}


def main(rank: str, port: str, directory: str, *checkpoints: str) -> None:
    from skirl.runtime.process_groups import leave
    from skirl.training.backends.deepspeed import DeepSpeedBackend

    joined(rank, port)
    vars(windowed)["_WINDOWS_A_PASS"] = 1  # so that few clips are many
    found = {}
    for name, checkpoint in zip(NAMES, checkpoints, strict=True):
        for stage in STAGES:
            kit, plan = kit_and_plan(Path(checkpoint))
            config = DeepSpeedBackendConfig(kind="deepspeed", zero_stage=stage)
            objective = PolicyObjective(kit.sampling())
            backend = DeepSpeedBackend(kit.policy, objective, OPTIM, config, dtype="float32", total_prompts=100)
            found[name, stage] = trained(backend, plan)
    torch.save(found, Path(directory) / f"rank-{rank}.pt")
    leave()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_encoder_is_trained_as_in_one_process(checkpoints, tmp_path, record_property):
    paths = [str(checkpoints[name]) for name in NAMES]
    ranks = run_ranks("tests.distributed.test_trained_encoder", [str(tmp_path), *paths], tmp_path, timeout_s=300)
    for name in NAMES:
        kit, plan = kit_and_plan(checkpoints[name])
        start = {n: p.detach().clone() for n, p in kit.policy.named_model_parameters()}
        wanted = trained(SingleBackend(kit.policy, PolicyObjective(kit.sampling()), OPTIM, 100), plan)
        encoder = [n for n in wanted if n.startswith("model.audio_tower.layers")]
        assert encoder
        assert all((wanted[n] - start[n]).abs().max() > 1e-4 for n in encoder if not n.endswith("k_proj.bias"))
        for stage in STAGES:
            for rank in ranks:
                got = rank[name, stage]
                assert got.keys() == wanted.keys()
                difference = max(float((got[n] - wanted[n]).abs().max()) for n in wanted)
                record_property(f"trained_encoder/{name}/zero{stage}", difference)
                assert difference < 1e-4


if __name__ == "__main__":
    main(*sys.argv[1:])
