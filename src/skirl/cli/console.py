"""The terminal: one console for log lines, progress bars and errors, so that they do not write over one another."""

import logging
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

__all__ = ["output", "setup_logging", "show_error", "terminal"]

_OURS = "skirl-handler"


@cache
def terminal() -> Console:
    """Standard error: logs, progress bars, messages. Not cut to 80 columns where it goes to a file or a pipe."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=160)


def output() -> Console:
    """Standard output: what was asked for. Not cut to 80 columns where it goes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def setup_logging(run_dir: Path | None = None, level: int = logging.INFO) -> None:
    """Sends log records to the terminal and, with a run directory, to ``skirl.log`` in it. Replaces an earlier call.

    Args:
        run_dir: an existing directory; None logs to the terminal only.
        level: least level that is shown.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.get_name() == _OURS]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [
        RichHandler(console=terminal(), show_path=False, log_time_format="%H:%M:%S", rich_tracebacks=False)
    ]
    if run_dir is not None:
        file = logging.FileHandler(run_dir / "skirl.log", encoding="utf-8", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    for handler in handlers:
        handler.set_name(_OURS)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)  # other packages: their warnings only
    logging.getLogger("skirl").setLevel(level)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns of 4-bit kernels wherever peft imports it


def show_error(message: str) -> None:
    """One error on the terminal, in its own lines, so that paths in it can be copied."""
    terminal().print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)
