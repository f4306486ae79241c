"""Whole runs of the commands: reproducible, resumable, exported, with every file in place."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from skirl.errors import ConfigError, RewardError, WorkerError
from tests.e2e.recipes import GRPO, SFT, execute, metrics, write_recipe


def test_two_runs_with_one_seed_are_equal_and_another_seed_is_not(tiny_speech: Path, tmp_path: Path) -> None:
    runs = [
        execute("train", write_recipe(tmp_path / name, tiny_speech, **GRPO), ["--run.seed", seed])
        for name, seed in (("a", "3"), ("b", "3"), ("c", "4"))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("command", ["sft", "train"])
def test_resume_is_exact(tiny_speech: Path, tmp_path: Path, command: str) -> None:
    """Five steps at once, and five steps of which the last two are lost and done again, bit for bit."""
    sections = SFT if command == "sft" else GRPO
    recipe = write_recipe(tmp_path / "whole", tiny_speech, **sections)
    whole = execute(command, recipe, ["--run.checkpoint_every", "3", "--run.keep_checkpoints", "5"])
    run = tmp_path / "whole" / "run"
    shutil.rmtree(run / "checkpoints" / "step-000005")
    again = execute(command, recipe, ["--run.checkpoint_every", "3", "--run.keep_checkpoints", "5", "--run.resume"])
    assert again == whole
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "resumed" in kinds


TERMINATES = """
import os, pathlib, signal


def reward(sample):
    calls = pathlib.Path("CALLS")
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size == 20:  # of the second step's 16 samples
        os.kill(os.getppid(), signal.SIGTERM)
    return len(sample.text)
"""


@pytest.mark.slow
def test_sigterm_ends_a_run_after_its_step_and_resume_goes_on(tiny_speech: Path, tmp_path: Path) -> None:
    """As Slurm sends it before the time limit. No checkpoints were asked for."""
    reward, calls = tmp_path / "reward.py", tmp_path / "calls"
    reward.write_text(TERMINATES.replace("CALLS", str(calls)), encoding="utf-8")
    evaluation = {"unit": "char", "before": True, "samples": 2}
    sections = {**GRPO, "reward": {"python": str(reward), "num_workers": 1}, "evaluation": evaluation}
    recipe = write_recipe(tmp_path / "a", tiny_speech, **sections)
    ended = subprocess.run(
        [sys.executable, "-m", "skirl", "train", str(recipe)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 143, ended.stderr
    assert "SIGTERM: the run ends after this step, with a checkpoint" in ended.stderr
    assert "ended after step 2 of 5, as SIGTERM asked. Continue from the newest checkpoint with:" in ended.stderr
    assert f"skirl train {recipe} --run.resume" in ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "a" / "run")] == [0, 1, 2]
    continued = execute("train", recipe, ["--run.resume"])
    assert [line["step"] for line in continued] == [0, 1, 2, 3, 4, 5]
    assert continued == execute("train", write_recipe(tmp_path / "b", tiny_speech, **sections))
    compared = [(tmp_path / name / "run" / "eval" / "comparison.json").read_text() for name in "ab"]
    assert compared[0] == compared[1]
    assert [row["quantity"] for row in json.loads(compared[0])] == ["greedy", "expected"]


def test_a_used_run_directory_is_refused_without_resume(tiny_speech: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_speech, **SFT)
    execute("sft", recipe)
    with pytest.raises(ConfigError, match=r"holds another run .* set run.resume"):
        execute("sft", recipe)


def test_a_run_leaves_its_records(tiny_speech: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_speech, **GRPO)
    flags = ["--run.checkpoint_every", "5", "--run.export_at_end", "true", "--run.tensorboard", "true"]
    steps = execute("train", recipe, [*flags, "--evaluation.samples", "2", "--evaluation.before"])
    run = tmp_path / "run"
    assert [s["step"] for s in steps] == [0, 1, 2, 3, 4, 5]
    assert steps[-1]["ledger/issued"] == steps[-1]["ledger/trained"] == 5 * 4 * 4
    table = pq.read_table(run / "rollouts" / "step-000005.parquet")
    assert table.num_rows == 16
    assert (run / "checkpoints" / "step-000005" / "manifest.json").is_file()
    assert (run / "eval" / "step-000005" / "summary.json").is_file()
    exported = {p.name for p in (run / "hf" / "step-000005").iterdir()}
    assert exported >= {"config.json", "model.safetensors", "tokenizer.json", "processor_config.json"}


def test_text_models_run_by_the_same_path(tiny_text: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(1, 9)))
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(sample):\n    return sample.text.count('7') / max(1, len(sample.text))\n")
    sections = {**GRPO, "reward": {"python": str(reward)}, "data": {"train": {"p": {"path": str(prompts)}}, "eval": {}}}
    steps = execute("train", write_recipe(tmp_path, tiny_text, **sections), ["--run.export_at_end", "true"])
    assert len(steps) == 5
    assert "reward/part/reward" in steps[0]
    assert (tmp_path / "run" / "hf" / "step-000005" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("raise KeyError(sample.row['tekst'])", "raised"),
        ("import time; time.sleep(60)", "timeout"),
        ("return {'wer': float('nan')}", "not_finite"),
        ("return 'good'", "bad_type"),
        ("import os; os._exit(3)", "crashed"),
    ],
)
def test_a_failing_reward_ends_the_run_with_its_reason(tiny_speech: Path, tmp_path: Path, body: str, kind: str) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(f"def reward(sample):\n    {body}\n")
    # Only what shall run out of time gets little: another call may be late where other tests share the cores.
    sections = {**GRPO, "reward": {"python": str(reward), "timeout_s": 0.5 if kind == "timeout" else 20.0}}
    with pytest.raises(RewardError, match=rf"max_failure_rate = 0\.1(.|\n)*{kind}"):
        execute("train", write_recipe(tmp_path, tiny_speech, **sections))
    run = tmp_path / "run"
    assert not (run / "metrics.jsonl").exists()  # nothing was trained on
    assert pq.read_table(run / "rollouts" / "step-000001.parquet")["failure_kind"].to_pylist() == [kind] * 16


def test_some_failing_samples_are_dropped_and_counted(tiny_speech: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(sample):\n    return 1 / (sample.index - 1) + len(sample.text)\n")
    sections = {**GRPO, "reward": {"python": str(reward), "max_failure_rate": 0.5}}
    steps = execute("train", write_recipe(tmp_path, tiny_speech, **sections))
    assert steps[-1]["ledger/dropped/reward_failed"] == 5 * 4
    assert steps[-1]["ledger/trained"] == 5 * 4 * 3
    assert steps[0]["reward/failure_rate"] == 0.25


KILL_A_RANK = """
import os
import pathlib
import signal


def parent(pid):
    return int((pathlib.Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def descends(pid, ancestor):
    while pid not in (0, ancestor):
        pid = parent(pid)
    return pid == ancestor


def reward(sample):
    for process in pathlib.Path("/proc").iterdir():
        try:
            ours = process.name.isdigit() and (process / "cmdline").read_bytes().startswith(b"ray::RankActor")
            if ours and descends(int(process.name), os.getppid()):
                os.kill(int(process.name), signal.SIGKILL)
                break
        except OSError:
            continue
    return 1.0
"""


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_at_once(no_cluster: None, tiny_speech: Path, tmp_path: Path) -> None:
    """The reward kills rank 1's process while the run goes on; the driver names it and leaves nothing behind."""
    import ray

    from skirl.runtime.ray import workers

    reward = tmp_path / "reward.py"
    reward.write_text(KILL_A_RANK, encoding="utf-8")
    sections = {**GRPO, "reward": {"python": str(reward), "num_workers": 1}}
    flags = ["--runtime", "ray", "--trainer.backend", "deepspeed", "--trainer.ranks", "2"]
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(WorkerError, match=r"policy rank \d of 2 \(process \d+ on .*\) died"):
        execute("train", write_recipe(tmp_path, tiny_speech, **sections), flags)
    assert workers is not None
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler  # Ray sets one of its own
