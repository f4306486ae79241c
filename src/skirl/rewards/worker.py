"""The process that runs rewards: loads the user's file once, then scores one call after another until it is killed.

It is started as a plain Python program, not through multiprocessing, so the driver's main module is not run again in
it. Messages are length-prefixed pickles on a socket of its own; standard output and error belong to the user's code.
Light: no torch, no settings.

An async function runs in an event loop here, as many calls at once as the driver sends. Each has its deadline in this
process; one that blocks the loop itself is for the driver to end.
"""

import asyncio
import contextlib
import faulthandler
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skirl.errors import ConfigError
from skirl.records import RewardSample, ScoreFailure
from skirl.rewards.combine import Parts
from skirl.rewards.python_file import Form, RewardFunction, call_fenced, load_source
from skirl.rewards.terms import TERMS, Term

__all__ = ["BOOTSTRAP", "HEADER", "Call", "Loaded", "Setup", "decode", "encode", "main"]

HEADER = struct.Struct(">Q")
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from skirl.rewards.worker import main; main(*map(int, sys.argv[2:]))"
)
"""Program of ``python -c``; arguments: sys.path as JSON, descriptors of the socket and the trace file, parent's pid."""
PR_SET_PDEATHSIG = 1
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker runs.

    Attributes:
        path, source, function: the user's file, its text, the function's name; None without one.
        terms: of the library.
        timeout_s: after this long in one call the stack is written to the trace file, and an async call is cancelled.
        memory_mb: limit of the process's address space, MiB; None sets none.
    """

    path: str | None
    source: str | None
    function: str
    terms: tuple[Term, ...]
    timeout_s: float
    memory_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker says when it is ready: the form of the user's function; without one, that of the terms."""

    form: Form = "sample"
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the user's function, or of all terms. ``packed``: pickled lists of samples, which belong together."""

    number: int
    what: Literal["function", "terms"]
    packed: tuple[bytes, ...]

    def samples(self) -> list[RewardSample]:
        """All samples; new objects, which the user's code may change."""
        return [sample for part in self.packed for sample in pickle.loads(part)]


def encode(message: Any) -> bytes:
    """A message as it stands on the wire."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def decode(buffer: bytearray) -> list[Any]:
    """Takes the complete messages out of a buffer."""
    messages = []
    while len(buffer) >= HEADER.size:
        end = HEADER.size + HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            break
        messages.append(pickle.loads(bytes(buffer[HEADER.size : end])))
        del buffer[:end]
    return messages


def main(connection: int, trace: int, parent: int) -> None:
    """Serves calls: ``Call`` in, ("done", (number, parts or failures)) out; first says ("ready", ``Loaded``).

    Args:
        connection: descriptor of the socket.
        trace: descriptor of the file that takes Python stacks when a call hangs or the interpreter dies.
        parent: process id of the driver; the worker does not outlive it.
    """
    _die_with(parent)
    for descriptor in (connection, trace):
        os.set_inheritable(descriptor, False)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - a killed process loses no line
    faulthandler.enable(file=trace)
    with socket.socket(fileno=connection) as sock:
        buffer = bytearray()
        waiting: list[Any] = []
        while not waiting and (data := sock.recv(1 << 20)):
            buffer += data
            waiting = decode(buffer)
        if not waiting:
            return
        setup: Setup = waiting.pop(0)
        reply, function = _load(setup)
        sock.sendall(encode(reply))
        scorer = _Scorer(setup, function, trace)
        if function is not None and function.is_async:
            asyncio.run(_serve_async(sock, buffer, waiting, scorer))
        else:
            _serve(sock, buffer, waiting, scorer)


def _serve(sock: socket.socket, buffer: bytearray, waiting: list[Call], scorer: "_Scorer") -> None:
    """One call after another."""
    while True:
        for call in waiting:
            sock.sendall(encode(("done", (call.number, scorer.score(call)))))
        data = sock.recv(1 << 20)
        if not data:
            return
        buffer += data
        waiting = decode(buffer)


async def _serve_async(sock: socket.socket, buffer: bytearray, waiting: list[Call], scorer: "_Scorer") -> None:
    """Calls side by side.

    Consumes calls from the socket; waits for none of them; each answers when it ends, its deadline at the latest.
    """
    loop, order = asyncio.get_running_loop(), asyncio.Lock()
    sock.setblocking(False)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(call: Call) -> None:
        results = await scorer.score_async(call)
        async with order:  # one message at a time on the wire
            await loop.sock_sendall(sock, encode(("done", (call.number, results))))

    while True:
        for call in waiting:
            task = loop.create_task(answer(call))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        data = await loop.sock_recv(sock, 1 << 20)
        if not data:
            os._exit(0)  # a call that cannot be cancelled would hold the loop up
        buffer += data
        waiting = decode(buffer)


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the driver's thread that started it ends, even amid a hang."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _load(setup: Setup) -> tuple[tuple[str, Any], RewardFunction | None]:
    refusal = _limit_memory(setup.memory_mb)
    if refusal:
        return ("refused", refusal), None
    if any(term.kind == "math" for term in setup.terms):
        import math_verify  # noqa: F401 - takes longer than a short deadline
    if setup.path is None or setup.source is None:
        return ("ready", Loaded()), None
    try:
        function = load_source(setup.source, setup.path, setup.function)
    except ConfigError as error:
        return ("refused", str(error)), None
    return ("ready", Loaded(function.form, function.is_async)), function


def _limit_memory(limit_mb: int | None) -> str:
    """Sets the limit for this process; the reason where it cannot work."""
    if limit_mb is None:
        return ""
    with contextlib.suppress(OSError):  # no /proc: the limit is set unseen
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() // MIB
        if used >= limit_mb:
            return (
                f"reward.memory_mb = {limit_mb} is not above the {used} MiB of address space that a reward process "
                "takes before it loads anything of yours: raise it, or set it to null."
            )
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = limit_mb * MIB
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    return ""


class _Scorer:
    """Runs calls, and writes stacks of those that hang."""

    def __init__(self, setup: Setup, function: RewardFunction | None, trace: int) -> None:
        self._setup, self._function, self._trace = setup, function, trace
        self._pid = os.getpid()
        self._running = 0

    def score(self, call: Call) -> list[Parts | ScoreFailure]:
        """Parts or a failure for each sample of a call."""
        samples = call.samples()
        name = f"{samples[0].id}#{samples[0].index}"
        key = zlib.crc32(name.encode("utf-8", "surrogatepass"))  # it may hold a file name that is not UTF-8
        random.seed(key)  # chance in user code goes by the sample, not by which process gets it when
        np.random.seed(key)
        self._begin()
        if call.what == "terms":
            results = [_terms(self._setup.terms, sample) for sample in samples]
        else:
            assert self._function is not None
            results = self._function.score(samples)
        self._end()
        return results

    async def score_async(self, call: Call) -> list[Parts | ScoreFailure]:
        """As ``score``; a call that awaits beyond its deadline is cancelled and given up."""
        if call.what == "terms":  # the driver sends nothing beside them: they may hold the loop
            return self.score(call)
        assert self._function is not None
        samples = call.samples()
        task = asyncio.get_running_loop().create_task(self._function.score_async(samples))
        self._begin()
        done, _ = await asyncio.wait({task}, timeout=self._setup.timeout_s)
        self._end()
        if done:
            return task.result()
        places = _awaiting(task.get_coro(), self._function.path)
        task.cancel()  # it may refuse; nobody waits for it
        where = f" (at {places[-1]})" if places else ""
        limit = f"reward.timeout_s = {self._setup.timeout_s:g} s"
        message = f"{self._function.name} took longer than {limit}; the call was cancelled{where}"
        return [ScoreFailure("timeout", message, "\n".join(places))] * len(samples)

    def _begin(self) -> None:
        self._running += 1
        if self._running == 1:
            faulthandler.dump_traceback_later(self._setup.timeout_s, file=self._trace)

    def _end(self) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that the user's code forked and did not end: it must not answer too
        self._running -= 1
        if not self._running:
            faulthandler.cancel_dump_traceback_later()


def _terms(terms: tuple[Term, ...], sample: RewardSample) -> Parts | ScoreFailure:
    parts: Parts = {}
    for term in terms:
        function: Callable[..., float | None] = TERMS[term.kind]
        path = function.__code__.co_filename
        value = call_fenced(lambda term=term, function=function: function(sample, **term.settings), path)
        if isinstance(value, ScoreFailure):
            return value
        parts[term.name] = value
    return parts


def _awaiting(coroutine: Coroutine[Any, Any, Any] | Any, path: str) -> list[str]:
    """Lines of the user's file in which a suspended coroutine waits, outermost first."""
    places = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)  # getattr: the innermost awaited object is no coroutine
        if frame is not None and frame.f_code.co_filename == path:
            places.append(f"{Path(path).name} line {frame.f_lineno} in {frame.f_code.co_name}")
        coroutine = getattr(coroutine, "cr_await", None)  # getattr: as above
    return places
