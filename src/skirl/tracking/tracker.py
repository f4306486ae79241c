"""What the loop calls: phases are timed and shown, a step's metrics are divided once and sent to every sink."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console

from skirl.errors import SkirlError
from skirl.protocols import Sink
from skirl.records import Ratio
from skirl.runtime.processes import resident_mb
from skirl.tracking.metrics import finish
from skirl.tracking.progress import PhaseBar, ProgressDisplay
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.sinks.console import ConsoleSink
from skirl.tracking.sinks.jsonl import JsonlSink

__all__ = ["Tracker", "open_tracker"]

logger = logging.getLogger(__name__)


class Tracker:
    """Times phases, finishes metrics, feeds sinks and the progress display. A context manager: leaving it closes it.

    Memory does not grow with the steps: nothing of a step is kept but its phases' seconds, added to the run's.

    Args:
        run: the run directory; events go there. Closing the tracker leaves it open.
        sinks: where values go.
        progress: the bars; ``ProgressDisplay(None)`` for none.
        total_steps: the run's last step.
    """

    def __init__(self, run: RunDirectory, sinks: Sequence[Sink], progress: ProgressDisplay, total_steps: int) -> None:
        self._run, self._sinks, self._progress = run, tuple(sinks), progress
        self._last_step = run.step
        self._step_began: float | None = None
        self._step_seconds: defaultdict[str, float] = defaultdict(float)
        self._run_seconds: defaultdict[str, float] = defaultdict(float)
        progress.start(total_steps, done=run.step)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall time of each phase over the run so far, this process only."""
        return dict(self._run_seconds)

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "", *, label: str = "") -> Iterator[PhaseBar]:
        """Times what is inside into ``time/<name>_s`` of the step that is logged next, and shows a bar for it.

        Args:
            name: of the metric; "step" is taken.
            total: items to do, None if unknown.
            unit: of the items, for the bar: "rollouts", "clips".
            label: shown instead of the name: "evaluating noisy".
        """
        if name == "step":
            raise AssertionError("time/step_s is the whole step: give the phase another name")
        began = time.perf_counter()
        if self._step_began is None:
            self._step_began = began
        try:
            with self._progress.phase(label or name, total, unit) as bar:
                yield bar
        finally:
            seconds = time.perf_counter() - began
            for table in (self._step_seconds, self._run_seconds):
                table[name] += seconds

    def log(self, step: int, metrics: Mapping[str, Ratio]) -> dict[str, float]:
        """Ends a step: adds ``time/*`` and ``memory/rss_mb``, divides, and sends the values to the sinks.

        A second call for the same step adds to it (an evaluation after the last step).

        Returns:
            Every value, by name.

        Raises:
            AssertionError: the step is behind the last one, or a metric is not registered.
        """
        if step < self._last_step:
            raise AssertionError(f"step {step} is logged after step {self._last_step}")
        values = finish({**metrics, **self._own_metrics()})
        for sink in self._sinks:
            sink.log(step, values)
        self._progress.step(step, values)
        self._last_step = step
        self._step_seconds.clear()
        self._step_began = time.perf_counter()
        return values

    def event(self, kind: str, **fields: Any) -> None:
        """Adds a line to events.jsonl."""
        self._run.event(kind, **fields)

    def close(self) -> None:
        """Flushes the sinks, takes the bars away and records the run's seconds by phase."""
        self._progress.close()
        for sink in self._sinks:
            sink.close()
        self._run.event("closed", step=self._last_step, seconds=self._run_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What ended the run is raised, not what then cannot be noted (on a full disk)."""
        try:
            self.close()
        except (SkirlError, OSError) as failure:
            if error is None:
                raise
            logger.warning("%s", failure)

    def _own_metrics(self) -> dict[str, Ratio]:
        own = {f"time/{name}_s": Ratio(seconds, 1) for name, seconds in self._step_seconds.items()}
        if self._step_began is not None:
            own["time/step_s"] = Ratio(time.perf_counter() - self._step_began, 1)
        resident = resident_mb()
        return own if resident is None else {**own, "memory/rss_mb": Ratio(resident, 1)}


def open_tracker(
    run: RunDirectory,
    total_steps: int,
    *,
    tensorboard: bool,
    progress: bool,
    error_name: str = "CER",
    console: Console | None = None,
) -> Tracker:
    """The tracker of a run with its usual sinks. A resumed run must have been rewound before.

    Args:
        run: the open run directory.
        total_steps: the run's last step.
        tensorboard: ``run.tensorboard``.
        progress: ``run.progress``.
        error_name: what the run's error rate is called: CER, WER, MER.
        console: of stderr, shared with the log lines; None makes one.

    Raises:
        MissingExtra: TensorBoard is asked for and not installed.
    """
    sinks: list[Sink] = [JsonlSink(run.metrics_file), ConsoleSink(total_steps, error_name)]
    if tensorboard:
        from skirl.tracking.sinks.tensorboard import TensorBoardSink

        first_step = None if run.rewound_to is None else run.rewound_to + 1
        sinks.append(TensorBoardSink(run.tensorboard, first_step))
    return Tracker(run, sinks, ProgressDisplay.on_terminal(progress, error_name, console), total_steps)
