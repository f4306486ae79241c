"""Functions of a benchmark that run in processes of their own, so that each finds the GPUs empty.

A module that takes part ends its ``main`` with ``answer(CHILDREN)`` where its first argument is "child".
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["NO_MULTICAST", "answer", "apart", "begin", "end"]

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
"""NVLink multicast stays off in NCCL, PyTorch, NVSHMEM and vLLM: not every host lends it to its guests."""

ENDS_WITHIN_S = 40.0


def apart(
    module: str,
    child: str,
    arguments: Mapping[str, Any],
    *,
    limit_s: float,
    log: Any,
    more: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Result of a child, or {"failed": the end of its output}."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        process = begin(module, child, arguments, result, log=log, more=more or {})
        try:
            code: object = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"still running after {limit_s:g} s"
        finally:
            end(process)
        if result.exists():
            return json.loads(result.read_text(encoding="utf-8"))
    log.flush()
    return {"failed": f"{child}: {code}", "output": Path(log.name).read_text(errors="replace")[-3000:]}


def begin(
    module: str, child: str, arguments: Mapping[str, Any], result: Path, *, log: Any, more: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts it, in a process group of its own."""
    command = [sys.executable, "-m", module, "child", child, json.dumps(arguments), str(result)]
    return subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **NO_MULTICAST, **more}, process_group=0
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """An interrupt first: whoever started Ray or an engine ends them. Then its group, should it still be there."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answer(children: Mapping[str, Callable[..., dict[str, Any]]]) -> bool:
    """In the child: runs what it was started for; False where this process is no child."""
    if sys.argv[1:2] != ["child"]:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore interrupts
    child, arguments, result = sys.argv[2:]
    Path(result).write_text(json.dumps(children[child](**json.loads(arguments))), encoding="utf-8")
    return True
