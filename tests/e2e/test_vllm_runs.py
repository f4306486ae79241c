"""Whole runs with the production parts: Ray, DeepSpeed on two ranks, a vLLM engine in a process of its own."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skirl.runtime.stacks import child_pids
from skirl.testing import tiny_models, tiny_task
from tests.e2e.recipes import GRPO, execute, write_recipe

ROOT = Path(__file__).parents[2]
VLLM = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 64, "max_num_batched_tokens": 1024}


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_text_reward_rises(cluster, tmp_path, record_property):
    """The recipe of the documentation, as it is: from under 0.3 to over 0.8."""
    tiny_task.tiny_task(tmp_path / "tiny-text")
    began = time.monotonic()
    run = tmp_path / "run"
    steps = execute(
        "train",
        ROOT / "recipes" / "text-grpo-vllm.yaml",
        [
            "--model.path", str(tmp_path / "tiny-text" / "model"),
            "--data.train.echo.path", str(tmp_path / "tiny-text" / "prompts.jsonl"),
            "--run.dir", str(run),
            "--run.progress", "false",
        ],
    )  # fmt: skip
    rewards = [s["reward/mean"] for s in steps if "reward/mean" in s]
    record_property("seconds", time.monotonic() - began)
    record_property("rewards", rewards)
    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8
    assert max(s["probe/max_logprob_difference"] for s in steps if "probe/max_logprob_difference" in s) < 1e-4
    assert all(s["commit/version"] == s["step"] for s in steps)


@pytest.fixture(scope="module")
def speech_run(start_cluster: Callable[[], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO of a tiny Qwen3-ASR, two ranks, one engine whose process is killed while it samples."""
    start_cluster()
    directory = tmp_path_factory.mktemp("speech-vllm")
    model = tiny_models.tiny_qwen3_asr(directory / "model", hidden=128)  # vLLM's CPU kernels want heads of 32
    recipe = write_recipe(directory, model, **GRPO, runtime="ray")
    flags = [
        "--trainer.backend",
        "deepspeed",
        "--trainer.ranks",
        "2",
        "--rollout.engine",
        "vllm",
        "--rollout.probe.every",
        "2",
    ]
    flags += [f"--rollout.vllm.{name}={value}" for name, value in VLLM.items()]
    flags += ["--rollout.sampling.temperature=0.7", "--rollout.sampling.top_p=0.9", "--rollout.sampling.top_k=20"]
    flags += ["--rollout.commit.transport=gloo"]  # the connection is made anew with the engine that takes its place
    flags += ["--method.mini_batches=1"]  # so that every update is the first on its rollouts
    killer = threading.Thread(target=_kill_engine_core_after, args=(directory / "run", 2), daemon=True)
    killer.start()
    execute("train", recipe, flags)
    return directory / "run"


def _kill_engine_core_after(run: Path, step: int) -> None:
    """Kills the engine's own process once ``step`` steps are logged: the next batch is then under way."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step}' not in metrics.read_text(encoding="utf-8"):
        time.sleep(0.02)
    for pid in child_pids(os.getpid()):
        if "EngineActor" in _command(pid) and "EngineActor" in _command(_parent(pid)):
            os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_speech_log_probs_agree(speech_run: Path, record_property: Any) -> None:
    """Features are made once a side, and are equal: so are the log-probs, filtered distribution and all."""
    steps = lines(speech_run, "metrics.jsonl")
    found = [s["probe/max_logprob_difference"] for s in steps if "probe/max_logprob_difference" in s]
    ratios = [s["policy/ratio_rollout_mean"] for s in steps if "policy/ratio_rollout_mean" in s]
    record_property("largest difference of a log-prob, nats", max(found))
    record_property("mean ratio of trainer and engine", ratios)
    assert len(found) == 3
    assert max(found) < 1e-4
    assert len(ratios) == 5
    assert all(abs(ratio - 1) < 1e-5 for ratio in ratios)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_engine_costs_no_rollout(speech_run: Path) -> None:
    steps = lines(speech_run, "metrics.jsonl")
    last = steps[-1]
    assert last["step"] == 5
    assert last["engine/restarts"] == 1
    assert last["engine/reissued"] >= 1
    assert last["ledger/issued"] == last["ledger/trained"] == 5 * 4 * 4
    assert last["ledger/in_flight"] == last["ledger/dropped"] == 0
