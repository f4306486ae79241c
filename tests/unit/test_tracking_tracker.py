"""What the loop sees: phases are timed, steps reach every sink, memory stays flat."""

import contextlib
import gc
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skirl.errors import CheckpointError, RewardError
from skirl.protocols import Sink
from skirl.records import Ratio
from skirl.tracking.json_lines import read_records
from skirl.tracking.progress import ProgressDisplay
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.sinks.console import ConsoleSink
from skirl.tracking.sinks.jsonl import JsonlSink
from skirl.tracking.sinks.tensorboard import TensorBoardSink
from skirl.tracking.tracker import Tracker, open_tracker

METRICS = {"reward/mean": Ratio(3, 4), "reward/part/accuracy": Ratio(0, 0), "rollout/tokens": Ratio(40, 2)}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory.open(tmp_path / "run", resume=False, config={})
    yield run
    run.close()


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_a_step_reaches_every_sink(run: RunDirectory, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="skirl")
    with open_tracker(run, 100, tensorboard=True, progress=False) as tracker:
        with tracker.phase("sampling", total=4, unit="rollouts") as bar:
            bar.advance(4, tokens=40)
        values = tracker.log(1, METRICS)
        tracker.log(2, METRICS | {"eval/noisy/error_rate": Ratio(1, 8)})
        tracker.event("probe", agreed=True)
    assert values["reward/mean"] == 0.75
    assert math.isnan(values["reward/part/accuracy"])
    assert values["rollout/tokens"] == 40
    assert 1 < values["memory/rss_mb"] < 100_000

    first, second = read_records(run.metrics_file)
    assert (first["step"], first["reward/mean"], first["reward/part/accuracy"]) == (1, 0.75, None)
    assert list(first)[:2] == ["step", "time"]
    assert set(values) == set(first) - {"step", "time"}
    assert second["eval/noisy/error_rate"] == 0.125

    board = scalars(run.tensorboard)
    assert board["reward/mean"] == [(1, 0.75), (2, 0.75)]
    assert board["eval/noisy/error_rate"] == [(2, 0.125)]
    assert "reward/part/accuracy" not in board

    lines = [record.getMessage() for record in caplog.records if record.name.startswith("skirl")]
    assert len(lines) == 2
    assert lines[0].startswith("step 1/100 | reward 0.750 | ")
    assert lines[1].startswith("step 2/100 | reward 0.750 | CER noisy 12.5% | ")

    kinds = [event["kind"] for event in read_records(run.events_file)]
    assert kinds == ["created", "probe", "closed"]


def test_phases_are_timed_and_added_within_a_step(run: RunDirectory):
    # Bounded by what was slept and by the clock around it, so that a busy machine does not matter.
    tracker = Tracker(run, [], ProgressDisplay(None), total_steps=2)
    time.sleep(0.05)  # set-up: no part of the first step
    began = time.perf_counter()
    for _ in range(2):
        with tracker.phase("sampling"):
            time.sleep(0.02)
    with contextlib.suppress(KeyError), tracker.phase("training"):
        time.sleep(0.01)
        raise KeyError
    time.sleep(0.01)
    before_log = time.perf_counter()
    first = tracker.log(1, {})
    after_log = time.perf_counter()
    assert first["time/sampling_s"] >= 0.04
    assert first["time/training_s"] >= 0.01
    assert first["time/sampling_s"] + first["time/training_s"] + 0.01 <= first["time/step_s"] <= after_log - began

    with tracker.phase("sampling"):
        time.sleep(0.001)
    second = tracker.log(2, {})
    assert 0.001 <= second["time/sampling_s"] <= second["time/step_s"] <= time.perf_counter() - before_log
    assert "time/training_s" not in second
    assert tracker.seconds["sampling"] == first["time/sampling_s"] + second["time/sampling_s"]
    tracker.close()
    assert read_records(run.events_file)[-1]["seconds"] == dict(tracker.seconds)


def test_wrong_calls_are_our_faults(run: RunDirectory):
    sink = JsonlSink(run.metrics_file)
    tracker = Tracker(run, [sink], ProgressDisplay(None), total_steps=9)
    with pytest.raises(AssertionError, match="reward/maen"):
        tracker.log(1, {"reward/maen": Ratio(1, 1)})
    assert not run.metrics_file.exists()
    tracker.log(2, {})
    tracker.log(2, {"eval/noisy/error_rate": Ratio(1, 8)})
    with pytest.raises(AssertionError, match="step 1 is logged after step 2"):
        tracker.log(1, {})
    with pytest.raises(AssertionError, match="time/step_s"), tracker.phase("step"):
        pass


def test_resume_continues_every_sink(run: RunDirectory):
    with open_tracker(run, 9, tensorboard=True, progress=False) as tracker:
        for step in range(6):
            tracker.log(step, {"reward/mean": Ratio(step, 1)})
    run.close()
    again = RunDirectory.open(run.path, resume=True, config={})
    again.rewind(3)
    with open_tracker(again, 9, tensorboard=True, progress=False) as tracker:
        with pytest.raises(AssertionError, match="logged after step 3"):
            tracker.log(2, {})
        tracker.log(4, {"reward/mean": Ratio(40, 1)})
    again.close()
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [(record["step"], record["reward/mean"]) for record in read_records(run.metrics_file)] == expected
    assert scalars(run.tensorboard)["reward/mean"] == expected


def test_what_ended_the_run_is_told_though_the_end_cannot_be_noted(run: RunDirectory, caplog: pytest.LogCaptureFixture):
    """On a full disk the last event cannot be written either: that is not what the user has to know."""

    class Full:
        def log(self, step: int, values: object) -> None:
            """Never called."""

        def close(self) -> None:
            raise CheckpointError("metrics.jsonl cannot be written: no space")

    with (
        pytest.raises(RewardError, match="too many failed"),
        Tracker(run, [Full()], ProgressDisplay(None), total_steps=2),
    ):
        raise RewardError("too many failed")
    assert "metrics.jsonl cannot be written: no space" in caplog.text
    with (
        pytest.raises(CheckpointError, match="no space"),
        Tracker(run, [Full()], ProgressDisplay(None), total_steps=2),
    ):
        pass


def test_every_sink_is_one(tmp_path: Path):
    for sink in (JsonlSink(tmp_path / "x"), ConsoleSink(3), TensorBoardSink(tmp_path)):
        assert isinstance(sink, Sink)
        sink.close()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"sft/loss": 1.25, "sft/token_accuracy": 0.5, "optim/lr": 1e-4}, "loss 1.2500 | accuracy 50.0% | lr 0.0001"),
        (
            {
                "time/step_s": 21.44,
                "rollout/tokens_per_s": 1840.4,
                "policy/kl_reference": 0.00123,
                "rollout/truncation_rate": 0.25,
                "reward/failure_rate": 0.0,
                "reward/mean": 0.8123,
                "eval/clean/error_rate": 0.03,
                "eval/noisy/error_rate": 0.123,
                "eval/noisy/expected_error_rate": 0.2,
            },
            "reward 0.812 | WER clean 3.0% | WER noisy 12.3% | KL 0.0012 | cut off 25% | 1,840 tok/s | 21.4 s",
        ),
    ],
)
def test_the_console_line(values: dict[str, float], line: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="skirl")
    ConsoleSink(300, error_name="WER").log(7, values)
    assert [record.getMessage() for record in caplog.records] == [f"step 7/300 | {line}"]


def test_memory_does_not_grow_with_the_steps(run: RunDirectory):
    logger = logging.getLogger("skirl")
    quiet = logging.StreamHandler(Path(os.devnull).open("w"))  # noqa: SIM115
    logger.addHandler(quiet)
    logger.propagate, level = False, logger.level  # pytest keeps every record that it sees
    logger.setLevel(logging.INFO)
    blocks = {}
    try:
        with open_tracker(run, 2000, tensorboard=True, progress=False) as tracker:
            for step in range(1, 2001):
                with tracker.phase("sampling", 8) as bar:
                    bar.advance(8, tokens=100)
                tracker.log(step, METRICS | {"eval/noisy/error_rate": Ratio(step, 2000)})
                if step in (200, 2000):
                    gc.collect()
                    blocks[step] = sys.getallocatedblocks()
    finally:
        logger.removeHandler(quiet)
        quiet.stream.close()
        logger.propagate = True
        logger.setLevel(level)
    assert blocks[2000] - blocks[200] < 900, blocks  # one object kept a step would be 1,800


def test_a_missing_tensorboard_names_the_remedy(tmp_path: Path):
    source = Path(__file__).parents[2] / "src"
    script = (
        "from pathlib import Path\n"
        "from skirl.tracking.sinks.tensorboard import TensorBoardSink\n"
        "TensorBoardSink(Path('x'))\n"
    )
    # -S: a Python without any installed package.
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(source)},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "skirl.errors.MissingExtra: run.tensorboard needs the package tensorboard (No module named 'tensorboard'): "
        "run `pip install tensorboard`, or set run.tensorboard to false"
    )


def test_tracking_loads_nothing_heavy():
    script = (
        "import sys, skirl.tracking.tracker, skirl.tracking.ledger, skirl.tracking.rollout_store\n"
        "print(sorted({'torch', 'pyarrow', 'tensorboard', 'pandas', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
