"""What a user is told who asks vLLM or the placement for what cannot be: value, origin, remedy; exit code 2."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from skirl.cli.main import main

RECIPE = Path(__file__).parents[2] / "recipes" / "text-grpo-vllm.yaml"
EIGHT = ["--nodes", "1", "--gpus-per-node", "8"]
NO_GPU = ["--nodes", "1", "--gpus-per-node", "0"]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="names are those of an installed vLLM")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            [*EIGHT, "--trainer.ranks", "9"],
            "trainer.ranks = 9 (--trainer.ranks) needs 9 GPUs (policy, rollout: 9), but the cluster has 8 on 1 node: "
            "lower trainer.ranks, or add nodes",
        ),
        (
            [*EIGHT, "--trainer.ranks", "8", "--rollout.engine.engines", "3"],
            "rollout.engine.engines = 3 (--rollout.engine.engines) x rollout.engine.tensor_parallel_size = 1 (default) "
            "need 3 GPUs, but the group of rollout (policy, rollout) has 8, and engines must fill it: set "
            "rollout.engine.engines to 8 or null, or trainer.ranks to 3",
        ),
        (
            [*EIGHT, "--trainer.ranks", "8", "--rollout.engine.tensor_parallel_size", "3"],
            "need 6 GPUs, but the group of rollout (policy, rollout) has 8, and engines must fill it: set "
            "rollout.engine.tensor_parallel_size to one of 1, 2, 4, 8, or trainer.ranks to a multiple of it",
        ),
        (
            [*EIGHT, "--trainer.ranks", "4", "--rollout.engine.engines", "8"],
            "trainer.ranks = 4 (--trainer.ranks), one group for policy and rollout, gives 4 GPUs to rollout, but "
            "rollout.engine.engines = 8 (--rollout.engine.engines) x rollout.engine.tensor_parallel_size = 1 (default) "
            "need 8: set trainer.ranks to 8, or lower",
        ),
        (
            [*EIGHT, "--runtime.placement", "[{roles: [policy, rollout], gpu: 2}]"],
            "--runtime.placement: there is no setting runtime.placement[0].gpu; did you mean gpus?",
        ),
        (
            [*EIGHT, "--runtime.placement", "[{roles: [policy, rollout], gpus: 2, colour: red}]"],
            "there is no setting runtime.placement[0].colour; runtime.placement[0] has: roles, gpus, nodes.",
        ),
        (
            [*NO_GPU, "--rollout.vllm.enable_chunked_prefill", "true"],
            "rollout.vllm.enable_chunked_prefill = true (--rollout.vllm.enable_chunked_prefill): on the CPU",
        ),
        (
            [*NO_GPU, "--runtime.device", "gpu"],
            "runtime.device = gpu (--runtime.device), but the cluster has 0 GPUs on 1 node with",
        ),
        (
            [*EIGHT, "--rollout.engine", "policy"],
            f"rollout.vllm.max_model_len = 64 ({RECIPE}:16) is an argument of vLLM, but rollout.engine.kind = policy",
        ),
        pytest.param(
            [*EIGHT, "--rollout.vllm.max_num_seq", "12"],
            "rollout.vllm.max_num_seq = 12 (--rollout.vllm.max_num_seq): ",
            marks=needs_vllm,
        ),
        pytest.param(
            [*EIGHT, "--rollout.vllm.seed", "3"],
            "rollout.vllm.seed = 3 (--rollout.vllm.seed): cannot be set here: set run.seed; each response has a seed "
            "of its own.",
            marks=needs_vllm,
        ),
    ],
)
def test_value_origin_and_remedy(flags: list[str], told: str, capsys: Any) -> None:
    assert main(["show-placement", str(RECIPE), *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("error:") == 1


def test_only_the_unknown_name_is_told_of_not_what_follows_from_it(capsys: Any) -> None:
    assert main(["show", str(RECIPE), "--runtime.placement", "[{roles: [policy], gpu: 2}]"]) == 2
    assert "missing" not in capsys.readouterr().err
