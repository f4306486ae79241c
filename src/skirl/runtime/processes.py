"""Processes that must not be left behind; Linux."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "identify", "kill", "resident_mb"]


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


def resident_mb() -> float | None:
    """Resident memory of this process; None where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except FileNotFoundError:
        return None
    return pages * resource.getpagesize() / 1e6
