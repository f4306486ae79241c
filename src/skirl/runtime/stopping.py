"""SIGTERM to a run, as batch systems send it before they take the machine: it ends after the step under way.

SIGTERM -> StopRequest.asked -> checkpoint after the step, RunStopped    a second SIGTERM -> KeyboardInterrupt
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["StopRequest", "interrupted_by_sigterm", "same_sigterm", "stopping"]

SAID = b"\nSIGTERM: the run ends after this step, with a checkpoint. Once more, or Ctrl-C, ends it at once.\n"


class StopRequest:
    """Whether the run shall end after the step under way."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """As a signal's handler: the first time notes it, the second time interrupts."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with contextlib.suppress(OSError):  # not through logging: what the signal interrupted may hold its lock
            os.write(2, SAID)


@contextlib.contextmanager
def stopping() -> Iterator[StopRequest]:
    """While open, SIGTERM asks for a stop."""
    request = StopRequest()
    with _handled(request.ask):
        yield request


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """While open, SIGTERM interrupts as Ctrl-C does, so that processes are ended; by itself it would kill this one."""
    with _handled(_interrupt):
        yield


@contextlib.contextmanager
def same_sigterm() -> Iterator[None]:
    """SIGTERM means afterwards what it meant before: ``ray.init`` lets it end the process with code 15."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and _in_main_thread():  # None: not Python's to set again
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _handled(handler: "signal._HANDLER") -> Iterator[None]:
    with same_sigterm():
        if _in_main_thread():
            signal.signal(signal.SIGTERM, handler)
        yield


def _in_main_thread() -> bool:
    """Python sets and handles signals there alone."""
    return threading.current_thread() is threading.main_thread()
