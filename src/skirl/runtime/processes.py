"""Processes that must not be left behind; Linux."""

import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "end_with_owner", "identify", "kill", "resident_mb"]

LOOKS_EVERY_S = 0.5
MAIN = "MainProcess"
"""What ``multiprocessing`` calls a process that it did not make."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process; ``started`` tells it from a later one of the same id (clock ticks since the machine started)."""

    pid: int
    started: int


def identify(pids: Iterable[int]) -> frozenset[Process]:
    """Those that are alive."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                found.add(Process(pid, int(fields[18])))
    return frozenset(found)


def kill(processes: Iterable[Process]) -> None:
    """Ends what is left of them, at once."""
    known = frozenset(processes)
    for process in identify(process.pid for process in known) & known:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def end_with_owner() -> None:
    """From now on this process, which ``multiprocessing`` made, ends when the one that made it has died, and where that
    was made in the same way, when its own maker has: a process that is killed tells no one, and its children's children
    wait for its children.

    A thread looks for it: the kernel's parent-death signal follows the parent's *thread*.
    """
    made_by = multiprocessing.parent_process()
    if made_by is None:
        return
    parent = os.getppid()
    above = None if made_by.name == MAIN else _parent_of(parent)

    def watch() -> None:
        while os.getppid() == parent and (above is None or _parent_of(parent) == above):
            time.sleep(LOOKS_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def resident_mb() -> float | None:
    """Resident memory of this process; None where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except FileNotFoundError:
        return None
    return pages * resource.getpagesize() / 1e6
