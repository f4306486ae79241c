"""What is due around a step: rollouts written, held-out scoring, checkpoint, export; and the tables at the end."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from skirl.config.schema import EvaluationConfig, RunConfig
from skirl.errors import DataError, RunStopped
from skirl.evaluation.error_rates import Difference, Evaluation, compare
from skirl.evaluation.losses import loss_table
from skirl.evaluation.report import comparison_table, read_evaluation, summary_table, write_evaluation
from skirl.evaluation.runner import Evaluator, as_metrics
from skirl.protocols import Trainer
from skirl.records import Group, Prompt, Ratio, ScoredGroup, TrainingSequence
from skirl.runtime.stopping import StopRequest
from skirl.tracking.json_lines import read_records, replace_file
from skirl.tracking.on_disk import sync
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.summary import run_table
from skirl.tracking.tracker import Tracker
from skirl.training.checkpoint import Checkpoints
from skirl.training.export import Exports

__all__ = ["StepDuties"]

log = logging.getLogger(__name__)


class StepDuties:
    """Called after each step; knows which steps are due and what was found on the way.

    Args:
        state: JSON-able state of the driver's parts, for checkpoints.
        evaluator, held_out: what transcribes, and the prompts; no transcripts are made without prompts.
        losses: eval/<source>/loss and the like of the current weights, of commands that are judged by their loss.
        last_step: of the run; evaluation, checkpoint and export are due there in any case (a checkpoint if any is).
        stop: where it is asked for, a checkpoint is due after any step, and the run ends there.
    """

    def __init__(
        self,
        run: RunDirectory,
        tracker: Tracker,
        trainer: Trainer,
        *,
        run_config: RunConfig,
        evaluation: EvaluationConfig,
        evaluator: Evaluator | None,
        exports: Exports,
        held_out: Sequence[Prompt],
        state: Callable[[], Mapping[str, Any]],
        last_step: int,
        stop: StopRequest,
        losses: Callable[[], Mapping[str, Ratio]] | None = None,
    ) -> None:
        self._run, self._tracker, self._trainer = run, tracker, trainer
        self._run_config, self._evaluation, self._evaluator = run_config, evaluation, evaluator
        self._exports, self._held_out, self._state, self._last = exports, held_out, state, last_step
        self._losses, self._stop = losses, stop
        self._checkpoints = Checkpoints(run.checkpoints, run_config.keep_checkpoints)

    def begin(self, committed: Mapping[str, Ratio]) -> None:
        """Evaluates before the first step, where asked for; ``committed``: metrics of the first weight commit."""
        metrics = dict(committed)
        if self._evaluation.before:
            metrics |= self._evaluate(0)
        if metrics:
            self._tracker.log(0, metrics)

    def record(self, step: int, scored: Sequence[ScoredGroup], sequences: Sequence[TrainingSequence]) -> None:
        """Writes the rollouts of a step to rollouts/."""
        if self._run_config.save_rollouts:
            with self._tracker.phase("write"):
                self._run.rollouts.write(step, scored, {s.id: s for s in sequences})

    def go_on(self, done: int) -> None:
        """Makes what a run that continues after ``done`` steps lacks: an export that failed or was not reached."""
        if self._export_is_due(done) and not self._exports.has(done):
            self._export(done)

    def __call__(self, done: int) -> Mapping[str, Ratio]:
        """Evaluates where it is due after ``done`` steps."""
        return self._evaluate(done) if self._due(self._evaluation.every, done) else {}

    def keep(self, done: int) -> None:
        """Checkpoint and export, where they are due.

        The checkpoint vouches for what was recorded: that is on the disk by then. The export comes after it: one that
        fails costs no training, and is made when the run goes on.

        Raises: RunStopped: a stop was asked for, and steps are left.
        """
        every, stops = self._run_config.checkpoint_every, self._stop.asked and done < self._last
        if stops or (every is not None and self._due(every, done)):
            with self._tracker.phase("checkpoint"):
                sync(self._run.metrics_file)
                path = self._checkpoints.save(done, self._trainer.save, self._state())
            self._tracker.event("checkpoint", step=done, path=str(path))
        if stops:  # an export that is due here is made when the run goes on
            self._tracker.event("stopped", step=done)
            raise RunStopped(f"ended after step {done} of {self._last}, as SIGTERM asked")
        if self._export_is_due(done):
            self._export(done)

    def _export(self, done: int) -> None:
        with self._tracker.phase("export"):
            path = self._exports.write(done, self._trainer)
        self._tracker.event("exported", step=done, path=str(path))

    def _export_is_due(self, done: int) -> bool:
        if done == self._last:
            return self._run_config.export_at_end
        return self._due(self._run_config.export_every, done)

    def _due(self, every: int | None, done: int) -> bool:
        return done == self._last or (every is not None and done % every == 0)

    def _evaluate(self, done: int) -> Mapping[str, Ratio]:
        metrics: dict[str, Ratio] = {}
        if self._losses is not None:
            with self._tracker.phase("evaluate"):
                metrics |= self._losses()
        if self._held_out:
            metrics |= as_metrics(self._transcribe(done))
        return metrics

    def _transcribe(self, done: int) -> Evaluation:
        assert self._evaluator is not None
        passes = 1 + (self._evaluation.samples > 0)
        with self._tracker.phase("evaluate", total=len(self._held_out) * passes, unit="clips") as bar:

            def advance(group: Group) -> None:
                bar.advance(1, tokens=sum(len(r.response_ids) for r in group.rollouts))

            found = self._evaluator.run(self._held_out, advance)
        write_evaluation(self._evaluated(done), found)
        return found

    def _evaluated(self, done: int) -> Path:
        return self._run.path / "eval" / f"step-{done:06d}"

    def show(self, console: Console) -> None:
        """The run in short, the newest evaluation, and what changed since the first (also eval/comparison.json)."""
        records = read_records(self._run.metrics_file)
        console.print(run_table(records, self._tracker.seconds))
        if self._losses is not None:
            console.print(loss_table(records))
        newest = read_evaluation(self._evaluated(self._last)) if self._held_out else None
        if newest is None:
            return
        console.print(summary_table(newest, "held-out error rates"))
        first = read_evaluation(self._evaluated(0)) if self._evaluation.before else None
        if first is None:
            return
        file = self._run.path / "eval" / "comparison.json"
        try:
            rows = self._compared(first, newest)
        except DataError as error:  # the run went on with other settings of evaluation
            file.unlink(missing_ok=True)
            console.print(
                f"the first evaluation and the newest cannot be compared: {error}", soft_wrap=True, markup=False
            )
            return
        replace_file(
            file,
            (json.dumps([{"label": label, **asdict(row)} for label, row in rows], indent=1) + "\n").encode(),
        )
        console.print(comparison_table(rows, "before the first step and now"))

    def _compared(self, first: Evaluation, newest: Evaluation) -> list[tuple[str, Difference]]:
        rows: list[tuple[str, Difference]] = []
        for source in sorted({u.source for u in first.utterances}):
            before = [u for u in first.utterances if u.source == source]
            after = [u for u in newest.utterances if u.source == source]
            rows.append((f"{source}, greedy", compare(before, after, bootstrap=self._evaluation.bootstrap)))
            if self._evaluation.samples and all(u.samples for u in before):  # a run may go on with other settings
                label = f"{source}, expected over {self._evaluation.samples} samples"
                rows.append((label, compare(before, after, quantity="expected", bootstrap=self._evaluation.bootstrap)))
        return rows
