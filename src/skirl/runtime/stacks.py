"""Where a process is stuck: each of ours can be asked for the Python stacks of its threads, even while it hangs.

process: ``answer_stack_requests()`` once -> another process of the machine: ``ask_for_stacks([pid, ...])`` -> text

The answer is written by a signal handler in C, so it comes while the interpreter waits inside a collective.
"""

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["answer_stack_requests", "ask_for_stacks", "child_pids"]

SIGNAL = signal.SIGUSR2
ANSWER_WITHIN_S = 1.0

_open_files: list[object] = []
"""The handler writes to a file descriptor: its file must not be closed."""


def answer_stack_requests() -> None:
    """From now on this process writes its stacks when it is asked; to be called again in a forked child."""
    _remove_leftovers()
    path = _stack_file(os.getpid())
    hidden = path.with_suffix(".new")
    file = hidden.open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    hidden.rename(path)  # only who listens is found, for the signal ends a process that does not
    _open_files.append(file)


def ask_for_stacks(pids: Iterable[int]) -> str:
    """The stacks of these processes and of their children; of one that cannot answer, what the kernel knows."""
    parts = []
    for pid in pids:
        for process in (pid, *child_pids(pid)):
            parts.append(f"process {process} ({_command(process)}):\n{_stacks(process)}")
    return "\n".join(parts)


def child_pids(pid: int) -> list[int]:
    """Descendants of a process, oldest first."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(task).split()):
            found += [child, *child_pids(child)]
    return sorted(found)


def _stacks(pid: int) -> str:
    file = _stack_file(pid)
    if not _listens(pid, file):
        return f"  {_state(pid)}; it cannot show its stack (py-spy dump --pid {pid} can, where py-spy is installed)"
    try:
        before = file.stat().st_size
        os.kill(pid, SIGNAL)
        end = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < end:
            time.sleep(0.05)
            if file.stat().st_size > before:
                time.sleep(0.1)  # the handler writes line by line
                return file.read_text()[before:].rstrip()
    except (ProcessLookupError, FileNotFoundError):  # the next process to start removes its file
        return "  it is gone"
    return f"  no answer; {_state(pid)}"


def _stack_file(pid: int) -> Path:
    directory = Path(tempfile.gettempdir()) / f"skirl-stacks-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / f"{pid}.txt"


def _remove_leftovers() -> None:
    """Files of processes that are gone."""
    for file in _stack_file(0).parent.glob("*.*"):
        if not Path(f"/proc/{file.stem}").exists():
            file.unlink(missing_ok=True)


def _listens(pid: int, file: Path) -> bool:
    """The process holds the file open; else the signal would end it."""
    try:
        wanted, descriptors = file.stat(), list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it never listened, is gone, or belongs to someone else
        return False
    return any(_is(descriptor, wanted) for descriptor in descriptors)


def _is(descriptor: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), wanted)
    except OSError:  # closed meanwhile by a thread that goes on
        return False


def _command(pid: int) -> str:
    words = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
    return words[:120] or "gone"


def _state(pid: int) -> str:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    state = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("State:")), "it is gone")
    waits_in = _read(Path(f"/proc/{pid}/wchan")).strip("\0 \n")
    return f"state {state}" + (f", waits in the kernel's {waits_in}" if waits_in not in ("", "0") else "")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process ended meanwhile, or belongs to someone else
        return ""
