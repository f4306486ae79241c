"""Between GPUs (NCCL) or machines without them (gloo): training rank 0 broadcasts to every engine worker.

The group is made by hand beside any default group of either side: ``torch.distributed.new_group`` makes parts of a
default group only, and trainer and engine have one each. All names used are public ones.
"""

import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from skirl.errors import WeightSyncError
from skirl.runtime.process_groups import open_store

__all__ = ["BroadcastReceivingEnd", "BroadcastSendingEnd", "BroadcastSetup", "listen", "plan_broadcast"]

_logger = logging.getLogger(__name__)

_POLL_S = 0.0005
_JOIN_S = 60.0
"""All join at the same moment, so who waits longer than this waits for somebody who is gone."""


@dataclass(frozen=True, slots=True)
class BroadcastSetup:
    """How one side joins.

    Attributes:
        address, port: of the store, in training rank 0's process: what ``listen`` gave, or a port that is free there.
        world_size: the sender and every worker of every engine.
        first_rank: of this engine's worker 0; 0 for the sender.
        timeout_s: for each message; joining takes at most a minute of it. A process that waits for a dead one cannot do
            anything else for so long.
    """

    address: str
    port: int
    world_size: int
    first_rank: int
    backend: Literal["nccl", "gloo"]
    timeout_s: float

    def to_bytes(self) -> bytes:
        """For the way through the driver."""
        return pickle.dumps(self)

    @classmethod
    def from_bytes(cls, setup: bytes) -> Self:
        """Back again."""
        loaded = pickle.loads(setup) if setup else None
        if not isinstance(loaded, cls):
            raise WeightSyncError("a broadcast of weights needs the bytes of a BroadcastSetup")
        return loaded


_listening: dict[int, Any] = {}
"""The store of ``listen`` by its port, until the sending end takes it over."""


def listen(address: str) -> int:
    """Port of the store that this process, rank 0, serves from now on; one at a time waits for its sending end."""
    _listening.clear()
    store = open_store(address, 0, _JOIN_S, serve=True)
    _listening[store.port] = store
    return store.port


def plan_broadcast(
    num_workers: Sequence[int], *, address: str, port: int, backend: Literal["nccl", "gloo"], timeout_s: float
) -> list[bytes]:
    """Setups of the sender and then of each engine, as ``send_weights`` takes them.

    Args:
        num_workers: worker processes of each engine.
    """
    setup = BroadcastSetup(address, port, 1 + sum(num_workers), 0, backend, timeout_s)
    setups = [setup]
    next_rank = 1
    for count in num_workers:
        setups.append(replace(setup, first_rank=next_rank))
        next_rank += count
    return [setup.to_bytes() for setup in setups]


class _Group:
    """One process's place among the ranks; joined at the first message, when all others join too."""

    def __init__(self, setup: BroadcastSetup, rank: int) -> None:
        if not 0 <= rank < setup.world_size:
            raise WeightSyncError(f"rank {rank} of a weight broadcast that has {setup.world_size} ranks")
        self.setup = setup
        self.rank = rank
        self.device = torch.device("cpu")
        if setup.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._timeout = timedelta(seconds=setup.timeout_s)
        join_s = min(setup.timeout_s, _JOIN_S)
        self._join_timeout = timedelta(seconds=join_s)
        # NCCL's own watchdog ends the whole process at its timeout; ours raises first.
        self._work_timeout = self._timeout if setup.backend == "gloo" else 10 * self._timeout
        self._joined: Any = None  # a dist.ProcessGroup: its two classes are typed apart, and not in every build
        try:
            store = _listening.pop(setup.port, None) if rank == 0 else None
            if store is None:
                store = open_store(setup.address, setup.port, join_s, serve=rank == 0)
            store.set_timeout(self._join_timeout)
            self._store = store
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(f"weight broadcast, {self._me}: cannot reach the store: {error}") from error

    @property
    def _me(self) -> str:
        s = self.setup
        return f"rank {self.rank} of {s.world_size} ({s.backend}, {s.address}:{s.port})"

    def broadcast(self, buffer: Tensor) -> None:
        """From rank 0 to all; returns when the bytes are there, or raises after ``timeout_s``."""
        try:
            if self._joined is None:
                self._joined = self._join()
            options = dist.BroadcastOptions()  # pyright: ignore[reportPrivateImportUsage]
            options.rootRank, options.rootTensor, options.timeout = 0, 0, self._work_timeout
            work = self._joined.broadcast([buffer], options)
            if buffer.device.type == "cpu":
                work.wait(self._timeout)
            else:
                self._wait_on_gpu(work)
        except RuntimeError as error:
            raise WeightSyncError(f"weight broadcast, {self._me}: {error}") from error

    def close(self) -> None:
        """Leaves; the others' unfinished messages fail at once."""
        if self._joined is not None:
            try:
                self._joined.abort()
            except RuntimeError as error:  # others left first, which is no reason to stay
                _logger.debug("weight broadcast, %s: left after the others: %s", self._me, error)
            self._joined = None
        del self._store

    def _join(self) -> Any:
        size = self.setup.world_size
        if self.setup.backend == "gloo":
            return dist.ProcessGroupGloo(  # pyright: ignore[reportPrivateImportUsage]
                self._store, self.rank, size, self._join_timeout
            )
        return dist.ProcessGroupNCCL(  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
            self._store,
            self.rank,
            size,
            self._work_timeout,  # pyright: ignore[reportArgumentType]
        )

    def _wait_on_gpu(self, work: Any) -> None:
        """NCCL's wait orders streams and has no deadline of its own, so the GPU is asked."""
        work.wait()
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + self.setup.timeout_s
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError(f"the message did not arrive within {self.setup.timeout_s:g} s")
            time.sleep(_POLL_S)


class BroadcastSendingEnd:
    """Rank 0. The store listens from now on; the group forms at the first message."""

    def __init__(self, setup: BroadcastSetup) -> None:
        self._group: _Group | None = _Group(setup, 0)
        self._device = self._group.device
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, slot: int, num_bytes: int) -> Tensor:
        """[>= num_bytes] uint8, on the GPU for NCCL and on the host for gloo."""
        if slot not in self._buffers or self._buffers[slot].numel() < num_bytes:
            self._buffers.pop(slot, None)
            self._buffers[slot] = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self._device)
        return self._buffers[slot]

    def payload(self, slot: int, num_bytes: int) -> dict[str, bytes]:
        """Nothing: the bytes come by themselves."""
        return {"": b""}

    def transmit(self, slot: int, num_bytes: int) -> None:
        """Returns when every byte has left."""
        if self._group is None:
            raise WeightSyncError("the weight broadcast was closed")
        self._group.broadcast(self._buffers[slot][:num_bytes])

    def close(self) -> None:
        """Leaves the group and ends the store."""
        self._buffers.clear()
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastReceivingEnd:
    """One engine worker: rank ``setup.first_rank + worker_rank``."""

    def __init__(self, setup: BroadcastSetup, device: torch.device, worker_rank: int) -> None:
        self._group: _Group | None = _Group(setup, setup.first_rank + worker_rank)
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._group.device)

    def open(self, payload: dict[str, bytes], num_bytes: int) -> Tensor:
        """Receives; the buffer is this process's own."""
        if self._group is None:
            raise WeightSyncError("the weight broadcast was closed")
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._group.device)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(self._buffer[:num_bytes])
        return self._buffer[:num_bytes].to(self._device)

    def release(self) -> None:
        """Nothing to do: the next message is ordered behind what reads this one."""

    def close(self) -> None:
        """Leaves the group."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._group is not None:
            self._group.close()
            self._group = None
