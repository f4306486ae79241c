"""Processes that are not left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import skirl
from skirl.runtime.processes import end_with_owner, identify

PROGRAM = """
import multiprocessing, os, sys, time
from skirl.runtime.processes import end_with_owner

def core(deep, pids):
    pids.put(os.getpid())
    if deep:
        multiprocessing.get_context("spawn").Process(target=core, args=(False, pids)).start()
    else:
        end_with_owner()
        pids.put(0)
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pids = context.Queue()
    context.Process(target=core, args=(sys.argv[1] == "deep", pids)).start()
    while pid := pids.get():
        print(pid, flush=True)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("depth", ["flat", "deep"])
def test_what_computes_for_an_owner_that_is_killed_ends(tmp_path: Path, depth: str) -> None:
    """As vLLM's processes on GPUs: owner -> engine core -> workers. What is left behind would keep the GPU's memory."""
    program = tmp_path / "owner.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(skirl.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, str(program), depth], stdout=subprocess.PIPE, text=True, env=environment
    ) as owner:
        assert owner.stdout is not None
        pids = []
        while (line := owner.stdout.readline().strip()) != "ready":
            pids.append(int(line))
        left = identify(pids)
        try:
            assert len(left) == (2 if depth == "deep" else 1)
            time.sleep(0.7)
            assert identify(pids) == left, "while the owner lives"
            owner.send_signal(signal.SIGKILL)
            worker, deadline = pids[-1], time.monotonic() + 10
            while identify([worker]) & left:
                assert time.monotonic() < deadline, f"{depth}: process {worker} outlives its owner"
                time.sleep(0.05)
        finally:
            for process in identify(pids) & left:
                os.kill(process.pid, signal.SIGKILL)


def test_a_process_that_nobody_made_is_left_alone() -> None:
    assert multiprocessing.parent_process() is None
    before = {thread.name for thread in threading.enumerate()}
    end_with_owner()
    assert {thread.name for thread in threading.enumerate()} == before
