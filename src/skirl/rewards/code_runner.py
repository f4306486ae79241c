"""Supervisor of programs under test: a plain script, standard library only, started by ``code_tests``.

Reads a job as JSON from standard input, writes the number of tests passed to standard output. Each test runs in a
process of its own: own session, limits on address space, CPU time, file size and open files, a bare environment, an
empty directory of its own. Orphans of a test come to this process (it is their subreaper), so at the end of a test, or
when whoever started it dies, everything that the test left behind is found and killed, whatever session it moved to.
"""

import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NoReturn

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_OUTPUT = 1 << 20  # bytes that a test may write to standard output
MAX_FILE = 16 << 20  # bytes of a file that it may write
MAX_PROCESSES = 32  # of one test
SPARE_TASKS = 512  # RLIMIT_NPROC above what the user has now: it counts all of the user's, and does not bind root
POLL_S = 0.05  # how often the processes of a test are counted
HARNESS = """
import json, os, sys
with os.fdopen(int(sys.argv[1])) as file:
    job = json.load(file)
report, token = int(sys.argv[2]), job["token"].encode()
names = {"__name__": job["name"], "__builtins__": __builtins__}
sys.argv[:] = ["program.py"]
exec(compile(job["program"], "program.py", "exec"), names)
if job["assertions"] is not None:
    exec(compile(job["assertions"], "test.py", "exec"), names)
    os.write(report, token)
"""
"""What runs a test. Assertions have passed when the token comes back: a program that just exits has not passed them."""

_groups: "list[int]" = []
"""The process that leads the test under way, not collected yet."""
_folders: "list[str]" = []
"""The directory of the test under way."""


def main() -> None:
    """Runs the job; killed children and all, nothing is left when this returns."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: _stop())
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        _stop()
    job = json.load(sys.stdin)
    end = time.monotonic() + job["budget_s"]
    passed = 0
    for test in job["tests"]:
        left = min(job["timeout_s"], end - time.monotonic())
        good = left > 0 and _passes(job["program"], test, left, job["memory_mb"] << 20)
        passed += good
        if job["stop_early"] and not good:
            break
    sys.stdout.write(json.dumps(passed))


def _stop() -> NoReturn:
    _clean_up()
    os._exit(1)


def _clean_up() -> None:
    _kill_all()
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def _passes(program: str, test: "dict[str, str] | str", timeout_s: float, memory: int) -> bool:
    """Whether one test passes; everything it started is gone afterwards, and its directory."""
    token = secrets.token_hex(16)
    by_text = isinstance(test, dict)
    task = {"program": program, "token": token, "assertions": None if by_text else test}
    task["name"] = "__main__" if by_text else "program"
    folder = tempfile.mkdtemp(prefix="skirl-code-")
    _folders.append(folder)
    try:
        output, report, status = _run(task, test["stdin"] if by_text else "", folder, timeout_s, memory)
    finally:
        _clean_up()
    if by_text:
        return status == 0 and _lines(output) == _lines(test["stdout"].encode())
    return status is not None and report == token.encode()


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run(
    task: "dict[str, Any]", stdin: str, folder: str, timeout_s: float, memory: int
) -> "tuple[bytes, bytes, int | None]":
    """Standard output, what came on the report pipe, and the exit code; None where it was ended by force."""
    with contextlib.ExitStack() as files:
        task_file = files.enter_context(_filled(json.dumps(task)))
        stdin_file = files.enter_context(_filled(stdin))
        out, out_end = os.pipe()
        report, report_end = os.pipe()
        files.callback(os.close, out)
        files.callback(os.close, report)
        child = os.fork()
        if child == 0:
            _become_program([stdin_file.fileno(), out_end, task_file.fileno(), report_end], folder, timeout_s, memory)
        _groups.append(child)
        os.close(out_end)
        os.close(report_end)
        output, status = _watch(child, out, time.monotonic() + timeout_s)
        _kill_all()  # what it left behind may hold the pipe
        os.set_blocking(report, False)
        told = b""
        with contextlib.suppress(BlockingIOError):
            told = os.read(report, 64)
        return output, told, status


def _filled(text: str) -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by whoever asked for it
    file.write(text.encode())
    file.seek(0)
    return file


def _watch(child: int, out: int, deadline: float) -> "tuple[bytes, int | None]":
    """Reads the output until the child has ended, writes too much, has too many children, or its time is up."""
    output = bytearray()
    open_, ended, next_count = True, None, time.monotonic() + POLL_S
    while ended is None:
        now = time.monotonic()
        too_many = now > next_count and len(_descendants()) > MAX_PROCESSES
        if now > deadline or len(output) > MAX_OUTPUT or too_many:
            return bytes(output), None
        next_count = now + POLL_S if now > next_count else next_count
        if open_ and select.select([out], [], [], POLL_S)[0]:
            data = os.read(out, 1 << 16)
            output += data
            open_ = bool(data)
        elif not open_:
            time.sleep(0.005)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # its group keeps its number
    os.set_blocking(out, False)
    with contextlib.suppress(BlockingIOError):
        while len(output) <= MAX_OUTPUT and (data := os.read(out, 1 << 16)):
            output += data
    forced = ended.si_code != os.CLD_EXITED or len(output) > MAX_OUTPUT
    return bytes(output), None if forced else ended.si_status


def _become_program(descriptors: "list[int]", folder: str, timeout_s: float, memory: int) -> NoReturn:
    """In the child: never returns. Descriptors: standard input, standard output, the task, the report."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        high = [os.dup(number) for number in descriptors]  # out of the way of 0 to 4
        nothing = os.open(os.devnull, os.O_WRONLY)
        for target, source in zip((0, 1, 3, 4), high, strict=True):
            os.dup2(source, target)
            os.set_inheritable(target, True)
        os.dup2(nothing, 2)
        os.closerange(5, 256)
        os.chdir(folder)
        for name, limit in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CPU, int(timeout_s) + 1),
            (resource.RLIMIT_FSIZE, MAX_FILE),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_NPROC, _num_tasks(os.getuid()) + SPARE_TASKS),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(name)[1]
            least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(name, (least, least))
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        arguments = [sys.executable, "-I", "-B", "-c", HARNESS, "3", "4"]
        os.execve(sys.executable, arguments, environment)
    finally:
        os._exit(127)


def _processes() -> "Iterator[tuple[int, list[bytes]]]":
    """Process id and the fields of /proc/.../stat from the state on, of all processes."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                yield int(name), file.read().rpartition(b")")[2].split()


def _num_tasks(user: int) -> int:
    total = 0
    for pid, fields in _processes():
        with contextlib.suppress(OSError):
            total += int(fields[17]) if os.stat(f"/proc/{pid}").st_uid == user else 0
    return total


def _descendants() -> "list[int]":
    """Every process below this one, at any depth and in any session."""
    children: dict[int, list[int]] = {}
    for pid, (state, parent, *_) in _processes():
        if state != b"Z":
            children.setdefault(int(parent), []).append(pid)
    found: list[int] = []
    frontier = [os.getpid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _kill_all() -> None:
    """Kills all descendants.

    First the test's process group, which the kernel does as one, forks included: what forks on and on is faster than
    any list of processes. Then whatever moved to another group, until nothing is left.
    """
    while _groups:
        group = _groups.pop()
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGKILL)  # it may not lead its group yet
            os.killpg(group, signal.SIGKILL)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # the usual case: nothing was left, and /proc need not be read
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in _descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
