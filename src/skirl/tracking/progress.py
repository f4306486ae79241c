"""Progress bars on a terminal: one for the run, one for each phase that is under way. Log lines scroll above them."""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from skirl.tracking.sinks.console import highlights

__all__ = ["PhaseBar", "ProgressDisplay"]


class PhaseBar:
    """What a phase reports to. Without a display it only counts."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress, self._task = progress, task
        self._tokens = 0
        self.done = 0

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        """``n`` more items are done, with so many tokens."""
        self.done += n
        self._tokens += tokens
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=n, tokens=self._tokens)


class ProgressDisplay:
    """The bars of one run. Off, it does nothing, so callers need no switch.

    While it is on, log handlers that write to the terminal write through rich, which puts their lines above the bars.

    Args:
        console: where the bars go; None is off.
        error_name: what the run's error rate is called: CER, WER, MER.
    """

    def __init__(self, console: Console | None, error_name: str = "CER") -> None:
        self._console = console
        self._error_name = error_name
        self._progress: _Bars | None = None
        self._run: TaskID | None = None
        self._redirected: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    @classmethod
    def on_terminal(cls, wanted: bool, error_name: str = "CER", console: Console | None = None) -> "ProgressDisplay":
        """On if ``wanted`` (``run.progress``) and stderr is a terminal that can redraw; stdout is for results.

        Args:
            wanted: ``run.progress``. error_name: what the run's error rate is called.
            console: of stderr. Whatever writes log lines through rich must share it: another console would write
                into the bars.
        """
        console = console or Console(stderr=True)
        # A real terminal: FORCE_COLOR, which build servers set, makes rich believe in one.
        usable = wanted and sys.stderr.isatty() and not console.is_dumb_terminal
        return cls(console if usable else None, error_name)

    @property
    def enabled(self) -> bool:
        """Whether anything is drawn."""
        return self._console is not None

    def start(self, total_steps: int, done: int = 0) -> None:
        """Draws the run's bar; a resumed run has steps done already."""
        if self._console is None or self._progress is not None:
            return
        terminal, output = sys.stderr, sys.stdout
        both = output.isatty()  # prints to a file must not land on the terminal
        self._progress = _Bars(self._console, redirect_stdout=both)
        self._run = self._progress.add_task(
            "run", total=total_steps, completed=done, first=done, unit="steps", tokens=0
        )
        self._progress.start()
        self._redirect(terminal, sys.stderr)
        if both:
            self._redirect(output, sys.stdout)

    @contextmanager
    def phase(self, label: str, total: int | None = None, unit: str = "") -> Iterator[PhaseBar]:
        """A bar while the phase is under way; phases may overlap. Without a total it only shows that it moves."""
        if self._progress is None:
            yield PhaseBar(None, None)
            return
        progress = self._progress
        task = progress.add_task(label, total=total, unit=unit, tokens=0)
        try:
            yield PhaseBar(progress, task)
        finally:
            progress.remove_task(task)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step is done; reward, loss and error rates are shown until newer ones come."""
        if self._progress is not None and self._run is not None:
            self._progress.highlights |= highlights(values, self._error_name)
            self._progress.update(self._run, completed=step)

    def refresh(self) -> None:
        """Draws now rather than at the next of four times a second."""
        if self._progress is not None:
            self._progress.refresh()

    def close(self) -> None:
        """Takes the bars away and gives the log handlers their streams back."""
        if self._progress is None:
            return
        self._progress.stop()
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        self._progress = None

    def _redirect(self, before: TextIO, now: TextIO) -> None:
        """rich replaces sys.stderr, but a log handler keeps the stream that it was made with."""
        loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
        handlers = {id(handler): handler for each in loggers for handler in each.handlers}
        for handler in handlers.values():
            if isinstance(handler, logging.StreamHandler) and handler.stream is before and now is not before:
                handler.setStream(now)
                self._redirected.append((handler, before))


class _Bars(Progress):
    """The bars under one line with the newest reward, loss and error rates."""

    def __init__(self, console: Console, *, redirect_stdout: bool) -> None:
        self.highlights: dict[str, str] = {}  # first: rich draws in its constructor
        # Widths are set so that 80 columns are enough and nothing jumps from phase to phase.
        super().__init__(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=10)),
            BarColumn(bar_width=16),
            _Count(table_column=Column(no_wrap=True, min_width=18)),
            _Clock(table_column=Column(no_wrap=True, min_width=16)),
            _Rate(table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=redirect_stdout,
            expand=True,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """rich's documented place to add to a progress display."""
        if self.highlights:
            yield Text("   ".join(self.highlights.values()), style="bold", no_wrap=True, overflow="ellipsis")
        yield from super().get_renderables()


class _Count(ProgressColumn):
    """ "96/128 rollouts"; a plain count where the total is unknown."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f"/{task.total:,.0f}"
        return Text(f"{task.completed:,.0f}{total} {task.fields['unit']}".rstrip())


class _Clock(ProgressColumn):
    """Time since the start; for the run also what is left, by the mean of the steps of this process."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        text = _clock(elapsed)
        if "first" in task.fields and task.completed > task.fields["first"] and task.total is not None:
            per_step = elapsed / (task.completed - task.fields["first"])
            text += f", {_clock((task.total - task.completed) * per_step)} left"
        return Text(text, style="cyan")


class _Rate(ProgressColumn):
    """Tokens a second of a phase."""

    def render(self, task: Task) -> Text:
        rate = task.fields["tokens"] / task.elapsed if task.fields["tokens"] and task.elapsed else 0.0
        return Text(f"{rate:,.0f} tok/s" if rate else "")


def _clock(seconds: float) -> str:
    text = str(timedelta(seconds=int(seconds)))
    return text.removeprefix("0:")
