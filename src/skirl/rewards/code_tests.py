"""The code term: runs the program in a response against the row's tests, in processes with limits.

It keeps accidents away: endless loops, memory, forks, floods of output, files in the working directory. It is NOT a
sandbox: code that means harm runs as the user of the run, and can read files and use the network.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skirl.errors import DataError
from skirl.records import RewardSample
from skirl.rewards import code_runner

__all__ = ["code", "last_block"]

FENCE = re.compile(r"^[ \t]*(```+|~~~+)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
GRACE_S = 5.0  # past the budget, in which the supervisor ends what it started


def code(
    sample: RewardSample,
    *,
    tests_column: str = "tests",
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    budget_s: float = 25.0,
) -> float:
    """Share of the row's tests that the program in the last fenced block of the response passes; 0 without a block.

    A test is either a mapping with ``stdin`` and ``stdout``: the program is run with the one, must end without an
    error and have written the other (blanks at line ends and blank lines at the end do not count); or Python
    assertions, which are run after the program, in its namespace.

    Args:
        sample: needs the column of tests.
        tests_column: a list of tests, or that list as JSON text.
        timeout_s: of one test, seconds of wall time.
        memory_mb: address space of each process, MiB.
        all_or_nothing: 1 only where every test passes, else 0.
        budget_s: of all tests together; those that are not reached count as not passed.

    Raises:
        DataError: the column is missing, empty, or holds something else.
    """
    tests = _tests(sample, tests_column)
    program = last_block(sample.text)
    if program is None:
        return 0.0
    job = {
        "program": program,
        "tests": tests,
        "timeout_s": timeout_s,
        "memory_mb": memory_mb,
        "budget_s": budget_s,
        "stop_early": all_or_nothing,
    }
    passed = _run(job, budget_s + GRACE_S)
    return float(passed == len(tests)) if all_or_nothing else passed / len(tests)


def last_block(text: str) -> str | None:
    """What stands in the last closed fenced block of a Markdown text; None where there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1][1] if blocks else None


def _run(job: Mapping[str, Any], timeout_s: float) -> int:
    """Number of tests passed. The supervisor is a process of its own: it ends all that the program starts."""
    command = [sys.executable, "-I", "-S", str(Path(code_runner.__file__))]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},  # no secret of this process reaches the program
        start_new_session=True,  # not killed along with this process, but told of its death: it has to clean up
    ) as supervisor:
        try:
            answer, _ = supervisor.communicate(json.dumps(job).encode(), timeout=timeout_s)
        except BaseException:
            supervisor.terminate()
            raise
    if supervisor.returncode or not answer:
        raise RuntimeError(f"the supervisor of the code term ended with exit code {supervisor.returncode}")
    return int(json.loads(answer))


def _tests(sample: RewardSample, column: str) -> list[dict[str, str] | str]:
    if column not in sample.row:
        raise DataError(
            f"row {sample.id} has no column {column!r} with tests; it has: {', '.join(sorted(map(str, sample.row)))}. "
            "Set tests_column of the code term to the right one"
        )
    value: Any = sample.row[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"row {sample.id}: column {column!r} is text, but not JSON: {error}") from error
    if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
        raise DataError(f"row {sample.id}: column {column!r} must be a list of tests with at least one, got {value!r}")
    return [_test(sample, column, item) for item in value]


def _test(sample: RewardSample, column: str, item: Any) -> dict[str, str] | str:
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in ("stdin", "stdout")):
        return {"stdin": item["stdin"], "stdout": item["stdout"]}
    raise DataError(
        f'row {sample.id}: column {column!r} holds {str(item)[:80]!r}; a test is {{"stdin": text, "stdout": text}}, '
        "or a text of Python assertions"
    )
