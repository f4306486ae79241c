"""The two ends of a weight commit, as the driver and each process see them.

driver: send_weights(sender, receivers) -> every rank packs -> every engine loads -> version raised, caches dropped
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from skirl.records import TensorSpec
from skirl.weights.manifest import Bucket, Manifest, TransportName

__all__ = ["Place", "Receiver", "Sender", "Weights"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process computes. ``gpu`` is the GPU's UUID, None on the CPU; ``node`` the machine's name."""

    node: str
    gpu: str | None


class Weights(Protocol):
    """A training rank's weights under Hugging Face names; hides how they are sharded."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Parameters, tied ones once, and persistent buffers; the same on every rank, nothing is gathered."""
        ...

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """These tensors whole, on this rank's device, while the context is open; collective where they are sharded."""
        ...


class Sender(Protocol):
    """All training ranks together, as the driver calls them."""

    async def open(self, transport: TransportName, setup: bytes, *, version: int, whole: bool) -> Manifest:
        """Connects (kept for later commits while ``setup`` stays the same) and lists what is going to be sent."""
        ...

    async def pack(self, index: int) -> Bucket:
        """Fills buffer ``index % 2`` on every rank that sends; the receivers are done with bucket ``index - 2``."""
        ...

    async def transmit(self, index: int) -> None:
        """Broadcast transports: sends the buffer while the receivers receive it. Others: nothing to do."""
        ...

    async def abort(self) -> None:
        """Ends a commit that failed; the connection is dropped."""
        ...


class Receiver(Protocol):
    """All workers of one engine together, as the driver calls them."""

    name: str
    """For messages: "engine 0 on node-1"."""

    async def begin(self, manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        """Compares the manifest with what the engine holds. Raises WeightSyncError before anything is touched."""
        ...

    async def receive(self, bucket: Bucket) -> None:
        """Loads one message; returns when its buffer may be filled again."""
        ...

    async def finish(self, version: int) -> None:
        """Checks that every tensor came, drops every cache, and serves ``version`` from now on."""
        ...

    async def abort(self) -> None:
        """Ends a commit that failed: the old version is served on if nothing was touched, else nothing is served until
        a whole commit succeeds.
        """
        ...
