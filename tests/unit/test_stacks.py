"""Processes that hang are asked where they are; those that cannot answer are left alone."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skirl.runtime import stacks
from skirl.runtime.stacks import answer_stack_requests, ask_for_stacks, child_pids

Start = Callable[[str], subprocess.Popen[str]]

LISTEN = "from skirl.runtime.stacks import answer_stack_requests; answer_stack_requests()"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code, and returns when it has printed "ready"."""
    running: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        one = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
        running.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        time.sleep(0.1)  # it is in its call by now
        return one

    yield begin
    for one in running:
        one.kill()
        one.communicate()


HANGS_IN_C = f"""
{LISTEN}
import ctypes, os

def stuck_in_a_call_of_c():
    print("ready", flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # holds the interpreter's lock

stuck_in_a_call_of_c()
"""


def test_a_process_that_hangs_in_c_shows_where(start: Start) -> None:
    process = start(HANGS_IN_C)
    for _ in range(2):  # an answer holds nothing of the one before
        text = ask_for_stacks([process.pid])
        assert f"process {process.pid} (" in text
        assert text.count("in stuck_in_a_call_of_c") == 1


def test_a_process_that_does_not_listen_is_not_ended(start: Start) -> None:
    """The signal's default is to end the process."""
    process = start("import time; print('ready', flush=True); time.sleep(60)")
    text = ask_for_stacks([process.pid])
    assert "state S (sleeping)" in text
    assert f"py-spy dump --pid {process.pid}" in text
    assert process.poll() is None


def test_a_child_that_does_not_listen_is_not_ended(start: Start) -> None:
    """Neither one that was forked, with its parent's file open, nor one that runs another program."""
    code = f"""
    {LISTEN}
    import os, subprocess, time
    forked = os.fork()
    if forked:
        other = subprocess.Popen(["sleep", "60"])
        print("ready", flush=True)
    time.sleep(60)
    """
    process = start(code)
    children = child_pids(process.pid)
    assert len(children) == 2
    text = ask_for_stacks([process.pid])
    assert text.count("it cannot show its stack") == 2
    assert all(Path(f"/proc/{child}").exists() for child in children)
    assert text.count("Current thread") == 1
    for child in children:
        os.kill(child, 9)


def test_a_process_is_found_only_once_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening its file and installing the handler the signal would end it."""
    listens: list[bool] = []
    pid = os.getpid()
    stacks._stack_file(pid).unlink(missing_ok=True)
    monkeypatch.setattr(
        stacks.faulthandler, "register", lambda *_, **__: listens.append(stacks._listens(pid, stacks._stack_file(pid)))
    )
    answer_stack_requests()
    assert listens == [False]
    assert stacks._listens(pid, stacks._stack_file(pid))
    stacks._stack_file(pid).unlink()
    stacks._open_files.pop().close()  # type: ignore[attr-defined]


def test_a_process_that_is_gone(start: Start) -> None:
    process = start("print('ready', flush=True)")
    process.wait()
    assert "it is gone" in ask_for_stacks([process.pid])


def test_leftovers_are_removed(start: Start) -> None:
    process = start(f"{LISTEN}\nprint('ready', flush=True)")
    process.wait()
    left = stacks._stack_file(process.pid)
    assert left.exists()
    start(f"{LISTEN}\nimport time\nprint('ready', flush=True)\ntime.sleep(60)")
    assert not left.exists()
