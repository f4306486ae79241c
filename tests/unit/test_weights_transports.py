"""The ends of the shared-memory transport, and what a process leaves behind."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from skirl.errors import WeightSyncError
from skirl.weights.endpoints import Place
from skirl.weights.transports import receiving_end, sending_end
from skirl.weights.transports.broadcast import BroadcastSetup, listen, plan_broadcast
from skirl.weights.transports.shared_memory import SharedMemoryReceivingEnd, SharedMemorySendingEnd

CPU = torch.device("cpu")


def path_of(payload: dict[str, bytes]) -> Path:
    return Path(json.loads(payload[""])["path"])


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_bytes_cross_and_mappings_are_kept(tmp_path: Path) -> None:
    sender, receiver = SharedMemorySendingEnd(tmp_path), SharedMemoryReceivingEnd(CPU)
    seen = set()
    for slot in (0, 1, 0, 1):
        sender.buffer(slot, 100)[:100].random_()
        got = receiver.open(sender.payload(slot, 100), 100)
        assert got.shape == (100,)
        assert got.equal(sender.buffer(slot, 100)[:100])
        receiver.release()
        seen.add(got.data_ptr())
    assert len(seen) == 2, "one mapping a slot"
    assert len(files(tmp_path)) == 2
    sender.close()
    assert files(tmp_path) == []
    assert got.equal(got.clone()), "what is mapped stays mapped"
    receiver.close()


def test_a_larger_buffer_replaces_the_smaller(tmp_path: Path) -> None:
    sender, receiver = SharedMemorySendingEnd(tmp_path), SharedMemoryReceivingEnd(CPU)
    small = sender.buffer(0, 64)
    assert sender.buffer(0, 64).data_ptr() == small.data_ptr()
    receiver.open(sender.payload(0, 64), 64)
    sender.buffer(0, 4096).fill_(3)
    assert len(files(tmp_path)) == 1
    assert (receiver.open(sender.payload(0, 4096), 4096) == 3).all()
    sender.close()
    receiver.close()


def test_two_senders_do_not_take_each_others_files(tmp_path: Path) -> None:
    first = SharedMemorySendingEnd(tmp_path)
    first.buffer(0, 64)
    second = SharedMemorySendingEnd(tmp_path)
    second.buffer(0, 64)
    assert len(files(tmp_path)) == 2
    first.close()
    second.close()


def test_leftovers_of_a_killed_sender_are_removed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from skirl.weights.transports.shared_memory import SharedMemorySendingEnd\n"
        "end = SharedMemorySendingEnd(pathlib.Path(sys.argv[1])); end.buffer(0, 64); print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (name,) = files(tmp_path)
        assert f"-{process.pid}-" in name
        SharedMemorySendingEnd(tmp_path)
        assert files(tmp_path) == [name], "its sender lives"
        process.send_signal(signal.SIGKILL)
    assert files(tmp_path) == [name]
    SharedMemorySendingEnd(tmp_path)
    assert files(tmp_path) == []


def test_no_room_falls_back_to_the_temporary_directory(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sender = SharedMemorySendingEnd(Path("/proc"))  # nothing can be created there
    with caplog.at_level(logging.WARNING):
        sender.buffer(0, 3 << 20)
    assert path_of(sender.payload(0, 64)).parent == tmp_path
    assert "a buffer of 3.0 MiB did not fit (/proc: " in caplog.text
    sender.close()


def test_no_room_anywhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sender = SharedMemorySendingEnd(Path("/dev/shm"))
    with pytest.raises(WeightSyncError, match=r"buffer of 1,099,511,627,776\.0 MiB: /dev/shm: .*MiB free; .*shm-size"):
        sender.buffer(0, 1 << 60)
    assert files(tmp_path) == []
    assert not list(Path("/dev/shm").glob(f"skirl-weights-{os.getpid()}-*"))


def test_a_file_that_is_gone_or_short(tmp_path: Path) -> None:
    receiver = SharedMemoryReceivingEnd(CPU)
    gone = {"": json.dumps({"slot": 0, "path": str(tmp_path / "gone"), "size": 64}).encode()}
    with pytest.raises(WeightSyncError, match=r"cannot reach the shared file .*gone .*same /dev/shm"):
        receiver.open(gone, 64)
    (tmp_path / "short").write_bytes(b"x" * 10)
    short = {"": json.dumps({"slot": 0, "path": str(tmp_path / "short"), "size": 64}).encode()}
    with pytest.raises(WeightSyncError, match="truncated: 10 of 64 bytes"):
        receiver.open(short, 64)
    assert (tmp_path / "short").stat().st_size == 10
    with pytest.raises(WeightSyncError, match="without the path"):
        receiver.open({"GPU-0": b""}, 64)


def test_cuda_ipc_needs_a_gpu() -> None:
    with pytest.raises(WeightSyncError, match="needs a GPU; this process on a computes on the CPU"):
        sending_end("cuda_ipc", b"", Place("a", None))
    with pytest.raises(WeightSyncError, match="needs a GPU"):
        receiving_end("cuda_ipc", b"", device=CPU, place=Place("a", None), worker_rank=0)


def test_ranks_of_a_broadcast() -> None:
    setups = plan_broadcast([2, 1, 4], address="h", port=7, backend="gloo", timeout_s=3)
    read = [BroadcastSetup.from_bytes(setup) for setup in setups]
    assert [setup.first_rank for setup in read] == [0, 1, 3, 4]
    assert {setup.world_size for setup in read} == {8}
    with pytest.raises(WeightSyncError, match="needs the bytes of a BroadcastSetup"):
        sending_end("gloo", b"", Place("a", None))


def test_the_sender_of_a_broadcast_holds_its_port_before_it_sends() -> None:
    """Engines are told of the port seconds before the sending end is made."""
    port = listen("127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    setup, engine = plan_broadcast([1], address="127.0.0.1", port=port, backend="gloo", timeout_s=20)
    sender = sending_end("gloo", setup, Place("a", None))
    sender.buffer(0, 5)[:5] = torch.arange(5)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, engine, 5)
        sender.transmit(0, 5)
        assert received.result(20) == [0, 1, 2, 3, 4]
    sender.close()
    socket.create_server(("127.0.0.1", port)).close()


def receive(setup: bytes, num_bytes: int) -> list[int]:
    end = receiving_end("gloo", setup, device=CPU, place=Place("a", None), worker_rank=0)
    found = end.open({"": b""}, num_bytes).tolist()
    end.close()
    return found
