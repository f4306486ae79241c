"""Killable processes that run calls with a deadline; one thread of the driver owns them all.

The thread waits on every worker's socket, on a wake-up socket, and on the nearest deadline. Nothing else touches a
worker, so there are no locks around them, and an event loop only ever awaits a future.

    submit -> queue -> dealt to workers in small shares -> result      -> future of the job
                  ^                                  \\-> hang, crash -> process killed and replaced; the call that ran
                  |                                      has failed, the rest of the share goes back
                  +---- a failed call with tries left <-/

A worker has one run at a time, or up to ``concurrency`` of an async function. A run is one call, or for a batch-wise
function as many as wait. Where several calls were under way in a process that is lost, or in a run that failed as a
whole, each is tried again alone, so that the bad one costs itself only.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import pickle
import queue
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from skirl.errors import ConfigError, RewardError
from skirl.records import RewardSample, ScoreFailure
from skirl.rewards.combine import Parts
from skirl.rewards.worker import BOOTSTRAP, Call, Loaded, Setup, decode, encode

__all__ = ["Limits", "Results", "WorkerProcesses"]

logger = logging.getLogger(__name__)

Results = list[Parts | ScoreFailure]
"""Of one call: parts or a failure for each sample."""

GRACE_S = 0.1  # past the deadline, in which the worker itself writes down where it hangs
ASYNC_GRACE_S = 1.0  # past the deadline, in which a busy event loop cancels a call itself
POLL_S = 0.05  # how often a busy worker is checked for having died while a child of it holds its socket
MAX_SHARE = 16  # calls handed to a worker at once
MAX_BATCH = 32  # groups that a batch-wise function gets in one call
KILLED_WITHIN_S = 5.0
LOSSES_PER_WORKER = 4  # hangs or crashes in a row, without one finished call between, after which the queue is failed
MAX_DETAIL = 4000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the processes.

    Attributes:
        num_workers: processes.
        timeout_s: deadline of one call, seconds.
        retries: further tries of a failed call.
        concurrency: calls of an async function in one process.
        start_timeout_s: deadline of loading the user's file, seconds.
    """

    num_workers: int
    timeout_s: float
    retries: int = 0
    concurrency: int = 1
    start_timeout_s: float = 300.0


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the reward: of which samples, how often it was tried; alone: beside no other call."""

    future: "Future[Results]"
    what: Literal["function", "terms"]
    packed: bytes
    num_samples: int
    alone: bool = False
    tries: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """Calls that a worker was sent as one; ``deadline`` is infinite until it begins."""

    calls: list[_Call]
    deadline: float = math.inf


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, its socket, and the runs that it has not answered, in order, by number."""

    process: "subprocess.Popen[bytes]"
    sock: socket.socket
    trace: IO[bytes]
    deadline: float
    ready: bool = False
    closed: bool = False
    refusal: str = ""
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    runs: dict[int, _Run] = field(default_factory=dict)

    @property
    def next_deadline(self) -> float:
        """When it is late; infinite where it has nothing to do."""
        return min((run.deadline for run in self.runs.values()), default=math.inf) if self.ready else self.deadline


class WorkerProcesses:
    """Runs calls in processes that are killed when a call takes too long, and replaced when they die."""

    def __init__(self, setup: Setup, limits: Limits, output: Path | None = None) -> None:
        """No process is started yet.

        Args:
            setup: what each worker loads.
            limits: how many, how long.
            output: file that takes what the user's code prints; None is the driver's standard error.
        """
        self._setup = setup
        self._limits = limits
        self._output = output
        self._lock = threading.Lock()  # of starting, and between the last submit and the end
        self._thread: threading.Thread | None = None
        self._ready: Future[Loaded] = Future()
        self._loaded = Loaded()
        self._inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._closing = False
        self._queue: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._left: list[subprocess.Popen[bytes]] = []  # killed, and not gone
        self._losses = 0  # in a row
        self._numbers = itertools.count()

    @property
    def started(self) -> bool:
        """Whether ``start`` has returned."""
        return self._ready.done() and self._ready.exception() is None

    def start(self) -> Loaded:
        """Starts the processes and waits until each has loaded the user's file. Further calls do nothing.

        Returns:
            What the user's function takes, and how it is called.

        Raises:
            ConfigError: the file cannot be loaded; the message holds the user's traceback.
        """
        with self._lock:
            if self._thread is None:
                self._wake_read, self._wake_write = socket.socketpair()
                self._wake_write.setblocking(False)  # one that is full will wake the thread; who asks must not wait
                self._selector = selectors.DefaultSelector()
                self._selector.register(self._wake_read, selectors.EVENT_READ)
                self._thread = threading.Thread(target=self._run, name="reward-processes", daemon=True)
                self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            self.close()
            raise

    def submit(self, what: Literal["function", "terms"], samples: Sequence[RewardSample]) -> "Future[Results]":
        """Queues one call; the future gets one result a sample, in order. It always ends by the deadlines.

        Raises:
            RewardError: the processes were closed, or a row cannot be pickled.
        """
        future: Future[Results] = Future()
        future.set_running_or_notify_cancel()  # a waiter may give up; the call then still ends by itself
        call = _Call(future, what, _pack(samples), len(samples))
        with self._lock:
            if not self.started or self._closing:
                raise RewardError("reward processes are not running: call start() first, and nothing after close()")
            self._inbox.put(call)
            with contextlib.suppress(BlockingIOError):
                self._wake_write.send(b"\0")
        return future

    def close(self) -> None:
        """Kills the processes; calls still queued end with RewardError. May be called twice."""
        self._closing = True
        if self._thread is not None:
            with contextlib.suppress(OSError):  # full, or the thread ended by itself and closed the socket
                self._wake_write.send(b"\0")
            self._thread.join()

    # ------------------------------------------------------------------------------------- in the owning thread only
    def _run(self) -> None:
        error: BaseException = RewardError("the reward processes were closed while calls were queued")
        try:
            while not self._closing:
                self._take_in()
                self._fill()
                self._deal()
                for key, events in self._selector.select(self._patience()):
                    if isinstance(key.data, _Worker):
                        self._serve(key.data, events)
                    else:
                        self._wake_read.recv(4096)
                for worker in list(self._workers):
                    self._check(worker)
        except BaseException as caught:
            error = caught
            raise
        finally:  # whatever happened, nobody waits for ever
            with self._lock:
                self._closing = True
            self._shut_down(error)

    def _shut_down(self, error: BaseException) -> None:
        calls = [call for worker in self._workers for run in worker.runs.values() for call in run.calls]
        calls += self._queue
        for worker in list(self._workers):
            self._end(worker)
        for process in self._left:
            process.poll()
        while not self._inbox.empty():
            calls.append(self._inbox.get())
        for call in calls:
            call.future.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _take_in(self) -> None:
        while not self._inbox.empty():
            if not self._queue and self._broken:
                self._losses = 0  # what failed was answered; new work gets a new chance
            self._queue.append(self._inbox.get())

    @property
    def _broken(self) -> bool:
        return self._losses >= LOSSES_PER_WORKER * self._limits.num_workers

    def _fill(self) -> None:
        while len(self._workers) < self._limits.num_workers and not self._broken:
            self._workers.append(self._spawn())

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        trace = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed in _end
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        numbers = [str(number) for number in (theirs.fileno(), trace.fileno(), os.getpid())]
        with theirs, self._open_output() as output:
            process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, path, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), trace.fileno()),
                start_new_session=True,  # a group to be killed with its children; Ctrl-C goes to the driver alone
            )
        ours.setblocking(False)
        worker = _Worker(process, ours, trace, time.monotonic() + self._limits.start_timeout_s)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._send(worker, encode(self._setup))
        return worker

    def _open_output(self) -> IO[bytes]:
        if self._output is None:
            return os.fdopen(os.dup(2), "wb", 0)
        return self._output.open("ab", 0)

    def _deal(self) -> None:
        while self._queue:
            room = [worker for worker in self._workers if self._has_room(worker, self._queue[0])]
            if not room:
                return
            self._hand_over(min(room, key=lambda worker: len(worker.runs)))

    def _has_room(self, worker: _Worker, call: _Call) -> bool:
        if not worker.ready or not self._loaded.is_async or not worker.runs:
            return worker.ready and not worker.runs
        if self._runs_alone(call) or any(self._runs_alone(run.calls[0]) for run in worker.runs.values()):
            return False
        return len(worker.runs) < self._limits.concurrency

    def _runs_alone(self, call: _Call) -> bool:
        return call.alone or call.what == "terms"  # terms would hold the event loop up

    def _hand_over(self, worker: _Worker) -> None:
        """Gives a worker its next run, or where runs are single calls of a plain function a share of the queue."""
        if not worker.runs:
            os.ftruncate(worker.trace.fileno(), 0)
            os.lseek(worker.trace.fileno(), 0, os.SEEK_SET)  # the offset is shared with the worker
        count = 1
        if not self._loaded.is_async:
            count = max(1, min(len(self._queue) // (2 * self._limits.num_workers), MAX_SHARE))
        messages = []
        while self._queue and count:
            count -= 1
            run, number = self._next_run(), next(self._numbers)
            worker.runs[number] = run
            packed = tuple(call.packed for call in run.calls)
            messages.append(encode(Call(number, run.calls[0].what, packed)))
        self._begin(worker)
        self._send(worker, b"".join(messages))

    def _next_run(self) -> _Run:
        """The head of the queue; for a batch-wise function also this worker's share of the groups that follow it."""
        calls = [self._queue.popleft()]
        if self._loaded.form == "batch" and calls[0].what == "function" and not calls[0].alone:
            most = min(MAX_BATCH, -(-(len(self._queue) + 1) // self._limits.num_workers))
            while self._queue and len(calls) < most and self._queue[0].what == "function" and not self._queue[0].alone:
                calls.append(self._queue.popleft())
        return _Run(calls)

    def _begin(self, worker: _Worker) -> None:
        """Sets the deadline of what the worker does now: its first run, or all of an async function."""
        grace = ASYNC_GRACE_S if self._loaded.is_async else GRACE_S
        for run in worker.runs.values():
            if run.deadline == math.inf:
                run.deadline = time.monotonic() + self._limits.timeout_s + grace
            if not self._loaded.is_async:
                return

    def _patience(self) -> float | None:
        """How long the thread may sleep: until a worker speaks, if none has anything to do."""
        deadline = min((worker.next_deadline for worker in self._workers), default=math.inf)
        return None if deadline == math.inf else max(0.0, min(POLL_S, deadline - time.monotonic()))

    def _send(self, worker: _Worker, data: bytes) -> None:
        worker.unsent += data
        self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        try:
            while worker.unsent:
                del worker.unsent[: worker.sock.send(worker.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            worker.closed = True
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent and not worker.closed else 0)
        self._selector.modify(worker.sock, events, worker)

    def _serve(self, worker: _Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(worker)
        if events & selectors.EVENT_READ:
            self._receive(worker)

    def _receive(self, worker: _Worker) -> bool:
        """Takes in what a worker has sent; False if there was nothing."""
        try:
            data = worker.sock.recv(1 << 20)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        worker.closed = worker.closed or not data
        worker.received += data
        for kind, content in decode(worker.received):
            if kind == "done":
                self._losses = 0
                number, results = content
                self._finish_run(worker.runs.pop(number), results)
                self._begin(worker)
            elif kind == "ready":
                worker.ready = True
                self._loaded = content
                if not self._ready.done() and sum(w.ready for w in self._workers) == self._limits.num_workers:
                    self._ready.set_result(content)
            else:
                worker.refusal = content
        return bool(data)

    def _check(self, worker: _Worker) -> None:
        if worker.refusal:
            self._lose(worker, "crashed", worker.refusal)
        elif worker.closed or worker.process.poll() is not None:
            while not worker.closed and self._receive(worker):
                pass  # results sent before it died
            self._lose(worker, "crashed", self._death(worker))
        elif time.monotonic() > worker.next_deadline:
            if worker.ready:
                who = self._setup.function if self._setup.path else "a term"
                limit = f"reward.timeout_s = {self._limits.timeout_s:g} s"
                self._lose(worker, "timeout", f"{who} took longer than {limit}; its process was killed")
            else:
                self._lose(worker, "timeout", f"loading took longer than {self._limits.start_timeout_s:g} s")

    def _death(self, worker: _Worker) -> str:
        try:
            code = worker.process.wait(0.5)
        except subprocess.TimeoutExpired:
            return (
                "the reward process closed its connection; reward code must leave open files alone that it did not open"
            )
        if code >= 0:
            return f"the reward process ended itself with exit code {code}; reward code must not call os._exit"
        name = signal.Signals(-code).name
        hint = "; often the system is out of memory" if name == "SIGKILL" else ""
        return f"the reward process was ended by signal {-code} ({name}{hint})"

    def _lose(self, worker: _Worker, kind: Literal["timeout", "crashed"], message: str) -> None:
        """A worker is gone: its running call has failed, the rest of its share was never begun."""
        stack = _read_stack(worker.trace)
        runs, loading, refused = list(worker.runs.values()), not worker.ready, bool(worker.refusal)
        self._end(worker)
        self._losses += 1
        where = next((f" (at {place})" for place in _places(stack, self._setup.path)), "")
        failure = ScoreFailure(kind, message + where, stack)
        if loading and not self._ready.done():
            what = f"reward.python: {self._setup.path}" if self._setup.path else "reward processes"
            said = message if refused else f"{what}: {message}{where}\n{stack}".rstrip()
            self._ready.set_exception(ConfigError(said))
            self._closing = True
            return
        logger.warning("%s%s", message, where)
        begun = [call for run in runs if run.deadline < math.inf for call in run.calls]
        self._queue.extendleft(call for run in reversed(runs) if run.deadline == math.inf for call in run.calls[::-1])
        self._fail(begun, failure)
        if self._broken:
            skipped = f"not called: the {self._losses} calls before it all hung or crashed, the last because {message}"
            for call in self._queue:
                call.future.set_result([ScoreFailure(kind, skipped + where, stack)] * call.num_samples)
            self._queue.clear()

    def _fail(self, calls: list[_Call], failure: ScoreFailure) -> None:
        """One of these is to blame: it has failed if it was alone, else each gets a try by itself."""
        if len(calls) == 1:
            self._finish(calls[0], [failure] * calls[0].num_samples)
            return
        for call in calls:
            call.alone = True
        self._queue.extendleft(reversed(calls))

    def _finish_run(self, run: _Run, results: Results) -> None:
        if len(run.calls) > 1 and all(isinstance(result, ScoreFailure) for result in results):
            self._fail(run.calls, ScoreFailure("raised", "the whole batch failed"))
            return
        rest = iter(results)
        for call in run.calls:
            self._finish(call, list(itertools.islice(rest, call.num_samples)))

    def _finish(self, call: _Call, results: Results) -> None:
        failed = any(isinstance(result, ScoreFailure) for result in results)
        if failed and call.tries < self._limits.retries:
            call.tries += 1
            self._queue.append(call)
        else:
            call.future.set_result(results)

    def _end(self, worker: _Worker) -> None:
        """Kills a process with its children; returns when it is gone, or hangs in the kernel (a dead file server)."""
        self._workers.remove(worker)
        self._selector.unregister(worker.sock)
        worker.sock.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        try:
            worker.process.wait(KILLED_WITHIN_S)
        except subprocess.TimeoutExpired:
            logger.warning("reward process %d does not end although it was killed: it is left", worker.process.pid)
            self._left.append(worker.process)
        worker.trace.close()


def _pack(samples: Sequence[RewardSample]) -> bytes:
    try:
        return pickle.dumps(list(samples), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # fence: pickling runs the code of whatever stands in a row
        raise RewardError(
            f"row {samples[0].id} cannot be sent to a reward process: {type(error).__name__}: {error}. "
            "Its columns must hold plain values (numbers, strings, lists, dicts, bytes, arrays)."
        ) from error


def _read_stack(trace: IO[bytes]) -> str:
    """The last stack that faulthandler wrote, without lines of the worker itself."""
    size = os.fstat(trace.fileno()).st_size
    lines = os.pread(trace.fileno(), size, 0).decode(errors="replace").splitlines()
    noise = (f'  File "{Path(__file__).parent}{os.sep}', '  File "<string>"', "Extension modules: ")
    return "\n".join(line for line in lines if not line.startswith(noise)).strip()[-MAX_DETAIL:]


def _places(stack: str, path: str | None) -> list[str]:
    """Lines of the user's file in a stack, innermost first."""
    places = []
    for line in stack.splitlines():
        parts = line.strip().split('"')
        if path is not None and len(parts) == 3 and parts[1] == path:
            places.append(f"{Path(path).name}{parts[2].replace(',', '', 1)}")
    return places
