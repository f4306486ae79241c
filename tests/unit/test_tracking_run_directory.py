"""Who may use a run directory, and what a resume keeps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skirl.errors import CheckpointError, ConfigError
from skirl.tracking.json_lines import read_records
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.sinks.jsonl import JsonlSink

CONFIG: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "data": {"train": {"noisy": {"path": "noisy.jsonl"}}},
    "run": {"dir": "runs/a", "seed": 0, "resume": False, "progress": True},
    "train": {"steps": 100, "prompts_per_step": 16},
    "method": {"preset": "grpo", "kl": {"coef": 0.04}},
    "trainer": {"optim": {"lr": 1e-6, "betas": (0.9, 0.95)}},
    "runtime": {"kind": "local"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    *parents, last = path.split(".")
    section = config
    for name in parents:
        section = section[name]
    section[last] = value
    return config


def record_steps(directory: Path, *, last: int, **kwargs: Any) -> None:
    run = RunDirectory.open(directory, resume=False, config=CONFIG, **kwargs)
    sink = JsonlSink(run.metrics_file)
    for step in range(last + 1):
        sink.log(step, {"reward/mean": step / 3, "eval/noisy/error_rate": float("nan")})
        run.rollouts.write(step, [])
    run.close()


def test_layout(tmp_path: Path):
    run = RunDirectory.open(tmp_path / "runs" / "a", resume=False, config=CONFIG)
    names = {path.name for path in run.path.iterdir() if not path.name.startswith(".")}
    assert names == {"config.json", "events.jsonl", "rollouts", "checkpoints", "hf", "tensorboard"}
    assert json.loads((run.path / "config.json").read_text()) == json.loads(json.dumps(CONFIG))
    assert (run.resumed, run.step) == (False, 0)
    run.event("probe", cer=0.5, path=Path("x"))
    created, probe = read_records(run.events_file)
    assert (created["kind"], created["command"]) == ("created", "train")
    assert probe == {"time": probe["time"], "kind": "probe", "cer": 0.5, "path": "x"}
    assert probe["time"].endswith("+00:00")
    run.close()


def test_another_run_is_refused_with_what_to_do(tmp_path: Path):
    record_steps(tmp_path, last=12)
    (tmp_path / "checkpoints" / "step-000010").mkdir()
    with pytest.raises(ConfigError) as error:
        RunDirectory.open(tmp_path, resume=False, config=CONFIG)
    assert str(error.value) == (
        f"run.dir: {tmp_path} holds another run (12 steps recorded, newest checkpoint step-000010); "
        "set run.resume to continue it, or choose another run.dir"
    )


@pytest.mark.parametrize("kept", ["checkpoints/step-000001", "hf/step-000001", "rollouts/step-000001.parquet"])
def test_anything_that_could_be_lost_counts_as_a_run(tmp_path: Path, kept: str):
    (tmp_path / kept).mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds another run"):
        RunDirectory.open(tmp_path, resume=False, config=CONFIG)


def test_rows_that_were_sampled_before_a_step_was_recorded_count_too(tmp_path: Path):
    """Killed in its first round: going on with other settings would mix rows of two models in one file."""
    RunDirectory.open(tmp_path, resume=False, config=CONFIG, command="sample").close()
    (tmp_path / "samples.jsonl.done").write_text('{"prompt_id": "a", "rows": 1}\n')
    with pytest.raises(ConfigError, match=r'model.path: "models/tiny" in the run, "models/other" now'):
        RunDirectory.open(tmp_path, resume=True, config=changed("model.path", "models/other"), command="sample")
    run = RunDirectory.open(tmp_path, resume=True, config=CONFIG, command="sample")
    assert run.resumed
    run.close()


def test_a_directory_without_a_recorded_step_is_taken_over(tmp_path: Path):
    RunDirectory.open(tmp_path, resume=False, config=CONFIG).close()
    (tmp_path / "train.log").write_text("not ours")
    other = changed("train.steps", 7)
    run = RunDirectory.open(tmp_path, resume=False, config=other)
    assert json.loads((tmp_path / "config.json").read_text()) == other
    assert not run.resumed
    run.close()


def test_resume_without_a_run_starts_one(tmp_path: Path):
    run = RunDirectory.open(tmp_path / "new", resume=True, config=CONFIG)
    assert not run.resumed
    run.close()


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("model.path", "models/other", 'model.path: "models/tiny" in the run, "models/other" now'),
        ("data.train.noisy.path", "x", 'data.train.noisy.path: "noisy.jsonl" in the run, "x" now'),
        ("data.train.clean", {"path": "c"}, 'data.train.clean: (absent) in the run, {"path": "c"} now'),
        ("train.steps", 200, "train.steps: 100 in the run, 200 now"),
        ("method.kl", None, 'method.kl: {"coef": 0.04} in the run, null now'),
        ("trainer.optim.lr", 2e-6, "trainer.optim.lr: 1e-06 in the run, 2e-06 now"),
        ("run.seed", 1, "run.seed: 0 in the run, 1 now"),
    ],
)
def test_resume_refuses_settings_that_change_training(tmp_path: Path, path: str, value: Any, line: str):
    record_steps(tmp_path, last=1)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="was started with other settings") as error:
        RunDirectory.open(tmp_path, resume=True, config=changed(path, value))
    assert str(error.value).splitlines()[1:] == [f"  {line}"]
    assert (tmp_path / "config.json").read_bytes() == before
    RunDirectory.open(tmp_path, resume=True, config=CONFIG).close()  # the refusal let go of the lock


@pytest.mark.parametrize(
    ("path", "value"),
    [("run.dir", "elsewhere"), ("run.resume", True), ("run.progress", False), ("runtime.kind", "ray")],
)
def test_resume_takes_settings_that_do_not(tmp_path: Path, path: str, value: Any):
    record_steps(tmp_path, last=1)
    run = RunDirectory.open(tmp_path, resume=True, config=changed(path, value))
    assert run.resumed
    event = read_records(run.events_file)[-1]
    assert event["kind"] == "resumed"
    assert [line.split(":")[0] for line in event["changed"]] == [path]
    run.close()


def test_many_differences_are_cut(tmp_path: Path):
    record_steps(tmp_path, last=1)
    other = changed("trainer.optim", {f"field_{index}": index for index in range(20)})
    with pytest.raises(ConfigError) as error:
        RunDirectory.open(tmp_path, resume=True, config=other)
    assert len(str(error.value).splitlines()) == 12
    assert str(error.value).endswith("and 12 more")


def test_a_run_of_another_command_is_another_run(tmp_path: Path):
    record_steps(tmp_path, last=1, command="sft")
    with pytest.raises(ConfigError, match="holds a run of skirl sft, and this is skirl train"):
        RunDirectory.open(tmp_path, resume=True, config=CONFIG, command="train")
    RunDirectory.open(tmp_path, resume=True, config=CONFIG, command="sft").close()


@pytest.mark.parametrize("content", [None, "{"])
def test_resume_needs_the_settings(tmp_path: Path, content: str | None):
    record_steps(tmp_path, last=1)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        RunDirectory.open(tmp_path, resume=True, config=CONFIG)


def test_a_file_is_no_run_directory(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("too long" * 100), Path("/proc/no/run")):
        with pytest.raises(ConfigError, match="cannot be a run directory"):
            RunDirectory.open(path, resume=False, config=CONFIG)


HOLD = """
import sys
from pathlib import Path
from skirl.tracking.run_directory import RunDirectory
run = RunDirectory.open(Path(sys.argv[1]), resume=False, config={})
print("open", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_share_a_directory(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"is in use by process {other.pid} on "):
            RunDirectory.open(tmp_path, resume=True, config={})
        other.kill()
    RunDirectory.open(tmp_path, resume=False, config={}).close()


@pytest.mark.parametrize(("step", "kept"), [(2, [0, 1, 2]), (0, [0]), (None, []), (9, [0, 1, 2, 3, 4])])
def test_rewind(tmp_path: Path, step: int | None, kept: list[int]):
    record_steps(tmp_path, last=4)
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 5, "rew')
    before = [record for record in read_records(tmp_path / "metrics.jsonl") if record["step"] in kept]
    run = RunDirectory.open(tmp_path, resume=True, config=CONFIG)
    run.rewind(step)
    assert read_records(run.metrics_file) == before
    assert run.rollouts.steps() == kept
    assert run.step == (step or 0)
    assert [event["kind"] for event in read_records(run.events_file)] == ["created", "resumed", "rewound"]
    JsonlSink(run.metrics_file).log(5, {"reward/mean": 1.0})
    assert [record["step"] for record in read_records(run.metrics_file)] == [*kept, 5]
    run.close()


def test_a_refusal_lets_go_of_the_directory(tmp_path: Path):
    record_steps(tmp_path, last=1)
    with pytest.raises(ConfigError, match="holds another run"):
        RunDirectory.open(tmp_path, resume=False, config=CONFIG)
    # In another process, as a process never waits for its own lock.
    done = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True)
    assert "holds another run" in done.stderr
    assert "is in use" not in done.stderr
