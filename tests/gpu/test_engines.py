"""vLLM engines on the trainer's GPU: CUDA IPC commits, sleep and wake, offload; bfloat16."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skirl.runtime.device import has_gpu
from tests.e2e.recipes import GRPO, execute, write_recipe
from tests.e2e.test_vllm_runs import lines

pytestmark = pytest.mark.gpu

SHARED = [
    "--runtime",
    "ray",
    "--trainer.backend",
    "deepspeed",
    "--model.dtype",
    "bfloat16",
    "--rollout.probe.every",
    "1",
]
SHARED += [
    "--rollout.engine",
    "vllm",
    "--rollout.vllm.enforce_eager",
    "true",
    "--rollout.engine.gpu_memory_utilization=0.3",
]


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not has_gpu():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("flags", [["--trainer.offload", "{}"], ["--rollout.engine.sleep_level", "1"]])
def test_speech_on_one_gpu(
    tiny_speech: Path, tmp_path: Path, flags: list[str], record_property: Callable[[str, object], None]
) -> None:
    """Engine and trainer take turns on one GPU, and their log-probs stay those of one model."""
    steps = execute("train", write_recipe(tmp_path, tiny_speech, **GRPO), [*SHARED, *flags])
    apart = [s["probe/max_logprob_difference"] for s in steps if "probe/max_logprob_difference" in s]
    gaps = [s["policy/kl_rollout"] for s in steps if "policy/kl_rollout" in s]
    record_property("largest difference of a log-prob, bfloat16", apart)
    record_property("KL(rollout, policy)", gaps)
    assert len(apart) == 6
    assert max(apart) < 0.2
    assert max(gaps) < 5e-3  # half the square of a 10 % error; vLLM's kernels round elsewhere than the trainer's
    seconds = [s for s in lines(tmp_path / "run", "metrics.jsonl") if "time/switch_s" in s]
    record_property("switch, s", [s["time/switch_s"] for s in seconds])
    assert seconds
