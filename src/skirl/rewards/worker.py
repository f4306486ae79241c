"""The process that runs rewards: loads the user's file once, then scores one call after another until it is killed.

It is started as a plain Python program, not through multiprocessing, so the driver's main module is not run again in
it. Messages are length-prefixed pickles on a socket of its own; standard output and error belong to the user's code.
Light: no torch, no settings.
"""

import faulthandler
import os
import pickle
import random
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.errors import ConfigError
from skirl.records import RewardSample, ScoreFailure
from skirl.rewards import speech
from skirl.rewards.python_file import Parts, RewardFunction, call_fenced, load_source

__all__ = ["BOOTSTRAP", "HEADER", "Setup", "Term", "decode", "encode", "main"]

HEADER = struct.Struct(">Q")
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from skirl.rewards.worker import main; main(*map(int, sys.argv[2:]))"
)
"""Program of ``python -c``; arguments: sys.path as JSON, descriptors of the socket and the trace file, parent's pid."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the library: the name it is logged under, its kind, and its other settings."""

    name: str
    kind: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker runs.

    Attributes:
        path, source, function: the user's file, its text, the function's name; None without one.
        terms: of the library.
        timeout_s: after this long in one call the stack is written to the trace file.
    """

    path: str | None
    source: str | None
    function: str
    terms: tuple[Term, ...]
    timeout_s: float


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
    """Serves calls: list[RewardSample] in, ("done", list of parts or failures) out; first says ("ready", by_group).

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
    own_pid = os.getpid()
    with socket.socket(fileno=connection) as sock:
        buffer = bytearray()
        function: RewardFunction | None = None
        setup: Setup | None = None
        while data := sock.recv(1 << 20):
            buffer += data
            for message in decode(buffer):
                if setup is None:
                    setup = message
                    reply, function = _load(message)
                else:
                    faulthandler.dump_traceback_later(setup.timeout_s, file=trace)
                    reply = ("done", _score(setup, function, message))
                    if os.getpid() != own_pid:
                        os._exit(0)  # a copy that the user's code forked and did not end: it must not answer too
                    faulthandler.cancel_dump_traceback_later()
                sock.sendall(encode(reply))


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the driver's thread that started it ends, even amid a hang."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _load(setup: Setup) -> tuple[tuple[str, Any], RewardFunction | None]:
    if setup.path is None or setup.source is None:
        return ("ready", False), None
    try:
        function = load_source(setup.source, setup.path, setup.function)
    except ConfigError as error:
        return ("refused", str(error)), None
    return ("ready", function.by_group), function


def _score(setup: Setup, function: RewardFunction | None, samples: list[RewardSample]) -> list[Parts | ScoreFailure]:
    """Parts of the user's function and of the library, for each sample of a call."""
    key = zlib.crc32(f"{samples[0].id}#{samples[0].index}".encode())
    random.seed(key)  # chance in user code goes by the sample, not by which process gets it when
    np.random.seed(key)
    own = function.score(samples) if function else [{} for _ in samples]
    return [_with_terms(setup, parts, sample) for parts, sample in zip(own, samples, strict=True)]


def _with_terms(setup: Setup, parts: Parts | ScoreFailure, sample: RewardSample) -> Parts | ScoreFailure:
    if isinstance(parts, ScoreFailure):
        return parts
    result: Parts = dict(parts)
    for term in setup.terms:
        if term.name in parts:
            message = (
                f"{setup.function} returned a part named {term.name!r}, which is also a term of the recipe; "
                f"rename it there or in reward.terms"
            )
            return ScoreFailure("bad_type", message)
        value = call_fenced(lambda term=term: speech.TERMS[term.kind](sample, **term.settings), speech.__file__)
        if isinstance(value, ScoreFailure):
            return value
        result[term.name] = value
    return result
