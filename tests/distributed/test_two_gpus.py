"""The benchmark of two GPUs: parts in processes of their own. And what of NCCL's commits one GPU can show."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.apart import apart
from benchmarks.two_gpus import idle_shares
from skirl.runtime.device import has_gpu
from skirl.weights.transports.broadcast import BroadcastSendingEnd, BroadcastSetup

MODULE = "tests.distributed.two_parts"


def run(tmp_path: Path, child: str, limit_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
    with (tmp_path / "log").open("w") as log:
        return apart(MODULE, child, arguments, limit_s=limit_s, log=log)


def test_a_part_answers_without_multicast(tmp_path: Path) -> None:
    assert run(tmp_path, "environment", name="NCCL_NVLS_ENABLE") == {"value": "0"}


def test_a_part_that_fails_says_why(tmp_path: Path) -> None:
    found = run(tmp_path, "environment", name="NO_SUCH_VARIABLE")
    assert found["failed"] == "environment: 1"
    assert "KeyError: 'NO_SUCH_VARIABLE'" in found["output"]


def test_a_part_that_hangs_is_interrupted(tmp_path: Path) -> None:
    began = time.monotonic()
    found = run(tmp_path, "sleep", limit_s=3.0)
    assert found["failed"] == "sleep: still running after 3 s"
    assert "KeyboardInterrupt" in found["output"]
    assert time.monotonic() - began < 20


def test_idle_shares() -> None:
    step = {"time/step_s": 10.0, "time/sample_s": 6.0, "time/update_s": 3.0, "time/commit_s": 0.5}
    assert idle_shares(step) == pytest.approx({"policy": 0.65, "rollout": 0.35})


@pytest.mark.gpu
def test_nccl_connects_and_leaves_on_one_gpu() -> None:
    """Two processes of one GPU cannot join, so the sender is alone: that its calls exist and end is what this shows."""
    if not has_gpu():
        pytest.skip("no CUDA device")
    for _ in range(2):  # the second connects anew
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        end = BroadcastSendingEnd(BroadcastSetup("127.0.0.1", port, 1, 0, "nccl", 30.0))
        buffer = end.buffer(0, 1 << 20)
        buffer.fill_(7)
        end.transmit(0, 1 << 20)
        assert int(buffer.sum(dtype=torch.int64)) == 7 << 20
        end.close()
