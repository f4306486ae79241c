"""Commits between processes: a gloo broadcast to engines of one and of two workers, and shared memory; on GPUs the same
over IPC and NCCL. Each process also has a default process group of its own, as trainers and engines do.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from skirl.errors import WeightSyncError
from skirl.records import CommitReport
from skirl.weights.commit import send_weights
from skirl.weights.endpoints import Place
from skirl.weights.manifest import Bucket, Manifest, TransportName
from skirl.weights.transports.broadcast import plan_broadcast
from tests.distributed.two_ranks import free_port
from tests.weight_ends import LocalReceiver, ModuleWeights, TrainerModel, make_sender


def use(device: str) -> torch.device:
    if device != "cpu":
        torch.cuda.set_device(device)
    return torch.device(device)


def place_on(device: str) -> Place:
    return Place("node-1", None if device == "cpu" else f"GPU of {device}")


class SenderProcess:
    """Runs in the training rank's process."""

    def __init__(self, device: str = "cpu") -> None:
        self.model = TrainerModel().to(use(device))
        self.sender = make_sender(ModuleWeights(self.model), place=place_on(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)

    def seed(self, seed: int) -> None:
        self.model.load_state_dict(TrainerModel(seed).state_dict())


class WorkerProcess:
    """Runs in an engine worker's process."""

    def __init__(self, worker_rank: int, device: str = "cpu") -> None:
        self.local = LocalReceiver(
            "",
            ModuleWeights(TrainerModel()).specs(),
            worker_rank=worker_rank,
            device=use(device),
            place=place_on(device),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local.worker, name)

    def state(self, seed: int) -> tuple[int | None, bool]:
        """Version, and whether the weights are those of a trainer's seed."""
        return self.local.version, self.local.model.holds(TrainerModel(seed))


def serve(connection: Connection, kind: type, arguments: tuple[Any, ...]) -> None:
    """Answers calls one after another, as an actor does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    part = kind(*arguments)
    while True:
        method, args, named = connection.recv()
        if method == "stop":
            return
        try:
            connection.send((True, getattr(part, method)(*args, **named)))
        except WeightSyncError as error:
            connection.send((False, error))


class Actor:
    """A process that holds one object."""

    def __init__(self, kind: type, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.lock = threading.Lock()

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        with self.lock:  # one call at a time; one that nobody waits for any more ends first
            try:
                self.connection.send((method, args, named))
                good, answer = self.connection.recv()
            except (EOFError, OSError):
                raise ConnectionError("the process is gone") from None
        if not good:
            raise answer
        return answer

    async def later(self, method: str, *args: Any, **named: Any) -> Any:
        return await asyncio.to_thread(self.call, method, *args, **named)

    def stop(self) -> None:
        if self.process.is_alive():
            self.connection.send(("stop", (), {}))
        self.process.join()


class RemoteSender:
    """``Sender`` of one rank."""

    def __init__(self, device: str = "cpu") -> None:
        self.actor = Actor(SenderProcess, device)

    async def open(self, transport: TransportName, setup: bytes, *, version: int, whole: bool) -> Manifest:
        return await self.actor.later("open", transport, setup, version=version, whole=whole)

    async def pack(self, index: int) -> Bucket:
        return await self.actor.later("pack", index)

    async def transmit(self, index: int) -> None:
        await self.actor.later("transmit", index)

    async def abort(self) -> None:
        await self.actor.later("abort")


class RemoteReceiver:
    """``Receiver`` over the workers of one engine."""

    def __init__(self, name: str, devices: Sequence[str]) -> None:
        self.name = name
        self.actors = [Actor(WorkerProcess, rank, device) for rank, device in enumerate(devices)]

    async def _all(self, method: str, *args: Any) -> None:
        await asyncio.gather(*(actor.later(method, *args) for actor in self.actors))

    async def begin(self, manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        await self._all("begin", manifest, transport, setup)

    async def receive(self, bucket: Bucket) -> None:
        await self._all("receive", bucket)

    async def finish(self, version: int) -> None:
        await self._all("finish", version)

    async def abort(self) -> None:
        await self._all("abort")

    def states(self, seed: int) -> list[tuple[int | None, bool]]:
        return [actor.call("state", seed) for actor in self.actors]


class Cluster:
    """One training rank, and engines with the devices of their workers."""

    def __init__(self, trainer: str, engines: Sequence[Sequence[str]]) -> None:
        self.sender = RemoteSender(trainer)
        self.engines = [RemoteReceiver(f"engine {i}", devices) for i, devices in enumerate(engines)]
        self.broadcast: Literal["gloo", "nccl"] = "gloo" if trainer == "cpu" else "nccl"
        self.direct: TransportName = "shared_memory" if trainer == "cpu" else "cuda_ipc"

    def setups(self, timeout_s: float = 20.0) -> list[bytes]:
        workers = [len(engine.actors) for engine in self.engines]
        return plan_broadcast(
            workers, address="127.0.0.1", port=free_port(), backend=self.broadcast, timeout_s=timeout_s
        )

    def commit(self, version: int, seed: int, setup: bytes | list[bytes], *, whole: bool = True) -> CommitReport:
        transport = self.direct if isinstance(setup, bytes) else self.broadcast
        self.sender.actor.call("seed", seed)
        return asyncio.run(
            send_weights(
                self.sender,
                self.engines,
                version=version,
                whole=whole,
                transport=transport,
                setup=setup,
                timeout_s=40,
            )
        )

    def states(self, seed: int) -> list[tuple[int | None, bool]]:
        return [state for engine in self.engines for state in engine.states(seed)]

    def stop(self) -> None:
        for actor in [self.sender.actor, *(actor for engine in self.engines for actor in engine.actors)]:
            actor.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("cpu", [["cpu", "cpu"], ["cpu"]])
    yield made
    made.stop()


def test_broadcasts_reuse_their_group(cluster: Cluster) -> None:
    setups = cluster.setups()
    assert cluster.commit(1, 1, setups).num_buckets == 3
    assert cluster.states(1) == [(1, True)] * 3
    cluster.commit(2, 1, setups, whole=False)
    assert cluster.states(1) == [(2, True)] * 3
    cluster.commit(3, 2, setups)
    assert cluster.states(2) == [(3, True)] * 3


def test_another_transport_and_back(cluster: Cluster) -> None:
    cluster.commit(4, 3, cluster.setups())
    cluster.commit(5, 4, b"")
    assert cluster.states(4) == [(5, True)] * 3
    cluster.commit(6, 5, cluster.setups())
    assert cluster.states(5) == [(6, True)] * 3


def test_a_refusal_leaves_all_as_they_were(cluster: Cluster) -> None:
    cluster.commit(7, 6, b"")
    cluster.engines[0].actors[1].call("forget")
    with pytest.raises(WeightSyncError, match=r"engine 0: engine worker 1 on node-1, commit 8: brings only"):
        cluster.commit(8, 7, cluster.setups(), whole=False)
    assert cluster.states(6) == [(7, True), (None, True), (7, True)]
    cluster.commit(9, 8, cluster.setups())
    assert cluster.states(8) == [(9, True)] * 3


def test_a_dead_worker_ends_the_commit(cluster: Cluster) -> None:
    """Last in this module: one engine is gone afterwards."""
    cluster.commit(10, 9, b"")
    victim = cluster.engines[1]
    begin = victim.begin

    async def begin_and_die(manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        await begin(manifest, transport, setup)
        process = victim.actors[0].process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    victim.begin = begin_and_die
    start = time.monotonic()
    with pytest.raises(
        WeightSyncError, match=r"weight commit 11 \(gloo, bucket 0\) failed: .*engine 1: ConnectionError"
    ):
        cluster.commit(11, 10, cluster.setups(timeout_s=3))
    assert time.monotonic() - start < 20
    assert cluster.engines[0].states(9) == [(10, True)] * 2, "nothing had arrived"
    cluster.engines.pop()
    cluster.commit(12, 11, cluster.setups())
    assert cluster.states(11) == [(12, True)] * 2


def commits_arrive(cluster: Cluster, setup: bytes | list[bytes]) -> None:
    """A whole set, what is trained, and a whole set again."""
    for version, whole in enumerate((True, False, True), start=1):
        cluster.commit(version, version if whole else version - 1, setup, whole=whole)
        assert cluster.states(version if whole else version - 1) == [
            (version, True) for engine in cluster.engines for _ in engine.actors
        ]


@pytest.mark.gpu
def test_cuda_ipc() -> None:
    cluster = Cluster("cuda:0", [["cuda:0"], ["cuda:0"]])
    try:
        commits_arrive(cluster, b"")
        cluster.engines[1].actors[0].call("forget")
        with pytest.raises(WeightSyncError, match=r"engine 1: .*brings only what is trained"):
            cluster.commit(4, 4, b"", whole=False)
        assert cluster.engines[0].states(3) == [(3, True)]
        cluster.commit(5, 5, b"")
        assert cluster.states(5) == [(5, True)] * 2
    finally:
        cluster.stop()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl() -> None:
    cluster = Cluster("cuda:0", [["cuda:1"]])
    try:
        commits_arrive(cluster, cluster.setups(timeout_s=60))
    finally:
        cluster.stop()
