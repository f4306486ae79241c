"""What is due around steps, and what a failure in it costs: never the training before it."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from skirl.config.schema import EvaluationConfig, RunConfig
from skirl.duties import StepDuties
from skirl.errors import CheckpointError, RunStopped
from skirl.evaluation.error_rates import evaluate, score_utterance
from skirl.evaluation.report import write_evaluation
from skirl.runtime.stopping import StopRequest
from skirl.tracking.json_lines import read_records
from skirl.tracking.progress import ProgressDisplay
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.tracker import Tracker


class Exports:
    """Directories with nothing in them; fails as long as it is told to."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.fails = directory, False

    def write(self, step: int, trainer: Any) -> Path:
        if self.fails:
            raise CheckpointError("the exported model did not load in a fresh process within 600 s")
        path = self.directory / f"step-{step:06d}"
        path.mkdir()
        return path

    def has(self, step: int) -> bool:
        return (self.directory / f"step-{step:06d}").is_dir()


class Trainer:
    def save(self, directory: Path) -> None:
        (directory / "weights").write_text("1")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory.open(tmp_path / "run", resume=False, config={})
    yield run
    run.close()


def duties_of(
    run: RunDirectory, exports: Exports, stop: StopRequest | None = None, held_out: Any = (), **settings: Any
) -> StepDuties:
    return StepDuties(
        run,
        Tracker(run, [], ProgressDisplay(None), 4),
        Trainer(),  # type: ignore[arg-type]
        run_config=RunConfig(dir=run.path, **settings),
        evaluation=EvaluationConfig(before=bool(held_out)),
        evaluator=None,
        exports=exports,  # type: ignore[arg-type]
        held_out=held_out,
        state=lambda: {"prompts": {}},
        last_step=4,
        stop=stop or StopRequest(),
    )


def found(run: RunDirectory, name: str) -> list[str]:
    return sorted(path.name for path in (run.path / name).iterdir())


def test_an_export_that_fails_costs_no_training_and_is_made_when_the_run_goes_on(run: RunDirectory) -> None:
    exports = Exports(run.exports)
    duties = duties_of(run, exports, checkpoint_every=3)
    exports.fails = True
    duties(4)
    with pytest.raises(CheckpointError, match="within 600 s"):
        duties.keep(4)
    assert found(run, "checkpoints") == ["step-000004"]
    exports.fails = False
    duties_of(run, exports, checkpoint_every=3).go_on(4)
    assert found(run, "hf") == ["step-000004"]
    assert [e["kind"] for e in read_records(run.events_file)] == ["created", "checkpoint", "exported"]


def test_what_is_there_or_not_due_is_not_made_again(run: RunDirectory) -> None:
    exports = Exports(run.exports)
    duties = duties_of(run, exports, checkpoint_every=1, export_every=2)
    for done in range(1, 5):
        duties(done)
        duties.keep(done)
    assert found(run, "checkpoints") == ["step-000003", "step-000004"]
    assert found(run, "hf") == ["step-000002", "step-000004"]
    for done in (2, 3, 4):
        duties.go_on(done)
    assert found(run, "hf") == ["step-000002", "step-000004"]
    assert sum(e["kind"] == "exported" for e in read_records(run.events_file)) == 2


def test_a_stop_that_is_asked_for_ends_the_run_after_its_step_with_a_checkpoint(run: RunDirectory) -> None:
    exports, stop = Exports(run.exports), StopRequest()
    duties = duties_of(run, exports, stop, export_every=2)  # no checkpoints were wanted
    duties.keep(1)
    stop.ask()
    with pytest.raises(RunStopped, match="ended after step 2 of 4, as SIGTERM asked"):
        duties.keep(2)
    assert found(run, "checkpoints") == ["step-000002"]
    assert not run.exports.exists() or not found(run, "hf")
    assert [e["kind"] for e in read_records(run.events_file)][-2:] == ["checkpoint", "stopped"]
    duties_of(run, exports, export_every=2).go_on(2)
    assert found(run, "hf") == ["step-000002"]


def test_a_stop_during_the_last_step_changes_nothing(run: RunDirectory) -> None:
    stop = StopRequest()
    stop.ask()
    duties_of(run, Exports(run.exports), stop).keep(4)
    assert found(run, "hf") == ["step-000004"]
    assert not run.checkpoints.exists() or not found(run, "checkpoints")


def heard(run: RunDirectory, step: int, hypothesis: str, reference: str = "one two") -> None:
    one = score_utterance(id="1", source="hard", language="English", reference=reference, hypothesis=hypothesis)
    write_evaluation(run.path / "eval" / f"step-{step:06d}", evaluate([one]))


def shown(duties: StepDuties) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    duties.show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_that_goes_on_knows_what_was_evaluated_before(run: RunDirectory) -> None:
    heard(run, 0, "one")
    heard(run, 4, "one two")
    duties = duties_of(run, Exports(run.exports), held_out=["a clip"])
    assert "-50.00" in shown(duties)
    comparison = run.path / "eval" / "comparison.json"
    assert comparison.exists()
    heard(run, 4, "one three", reference="one three")
    text = shown(duties)
    assert not comparison.exists(), "of an evaluation that was written over"
    assert "the first evaluation and the newest cannot be compared" in text
    assert "held-out error rates" in text


def test_what_was_not_sampled_before_is_compared_greedily(run: RunDirectory) -> None:
    """evaluation.samples was 0 when the run began."""
    heard(run, 0, "one")
    heard(run, 4, "one two")
    duties = duties_of(run, Exports(run.exports), held_out=["a clip"])
    duties._evaluation = EvaluationConfig(before=True, samples=2)
    assert "-50.00" in shown(duties)
