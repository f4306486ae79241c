"""Two ranks as processes of a test module: each runs its ``main``, and the test reads what both found."""

import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["free_port", "joined", "run_ranks"]


def free_port() -> int:
    """Free now, and one that the system gives to nobody who asks for any: it is still free seconds later."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # Ray's own workers take 10002 to 19999
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def joined(rank: str, port: str) -> None:
    """In a rank's process, first of all: one of two ranks that talk by gloo."""
    from skirl.runtime.env import declare_rank, prepare_environment
    from skirl.runtime.process_groups import join

    prepare_environment()
    declare_rank(int(rank), 2)
    torch.set_num_threads(1)
    join(address="127.0.0.1", port=int(port), rank=int(rank), num_ranks=2, backend="gloo", timeout_s=120)


def run_ranks(module: str, arguments: Sequence[str], directory: Path, *, timeout_s: float) -> list[dict[Any, Any]]:
    """Runs ``python -m MODULE RANK PORT ARGUMENTS...`` twice; returns what each saved as directory/rank-RANK.pt."""
    port, started = str(free_port()), []
    for rank in ("0", "1"):
        with (directory / rank).open("w") as log:
            command = [sys.executable, "-m", module, rank, port, *arguments]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=timeout_s) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join((directory / rank).read_text()[-3000:] for rank in ("0", "1"))
    return [torch.load(directory / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
