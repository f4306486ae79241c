"""Parts of a benchmark that a test runs in processes of their own; imports nothing heavy.

``python -m tests.distributed.two_parts child NAME ARGUMENTS RESULT``
"""

import os
import time
from typing import Any

from benchmarks.apart import answer


def environment(name: str) -> dict[str, Any]:
    return {"value": os.environ[name]}


def sleep() -> dict[str, Any]:
    time.sleep(60)
    return {}


if __name__ == "__main__":
    answer({"environment": environment, "sleep": sleep})
