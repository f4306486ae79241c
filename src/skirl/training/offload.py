"""Trainer state to host memory and back, for GPUs that engines use between updates.

give: contents -> host buffers (page-locked beside a GPU), memory freed    take: memory allocated, contents <- host

What moves is the storage under a tensor, not the tensor: views of it and whatever else refers to it (DeepSpeed's flat
partitions and the fragments cut from them) stay what they are. In between they must not be read or written.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from skirl.runtime.device import free_cached_memory, synchronize

__all__ = ["Offload", "held_bytes"]


class Offload:
    """Contents that are away, and host buffers that are kept for the next time: page-locking memory is slow.

    Args:
        device: whose memory is given back; tensors elsewhere stay where they are.
        buffer_bytes: size of a host buffer; PyTorch page-locks a power of two, which would double a large one.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = 1 << 28) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._away: list[tuple[UntypedStorage, list[Tensor]]] = []
        self._dropped: list[tuple[UntypedStorage, int]] = []

    @property
    def is_away(self) -> bool:
        """Something has been given and not yet taken."""
        return bool(self._away or self._dropped)

    def give(self, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> int:
        """Frees the memory of the tensors; what is away already stays away.

        Args:
            scratch: buffers whose contents nobody needs; they come back with the same size, not filled.

        Returns:
            Bytes copied to the host.
        """
        moved = list(_storages(tensors, self._device))
        for storage in moved:
            parts = _bytes_of(storage).split(self._buffer_bytes)
            hosts = [self._buffer(part.nbytes) for part in parts]
            for part, host in zip(parts, hosts, strict=True):
                host.copy_(part, non_blocking=True)
            self._away.append((storage, hosts))
        dropped = [(storage, storage.nbytes()) for storage in _storages(scratch, self._device)]
        self._dropped += dropped
        synchronize()
        size = sum(storage.nbytes() for storage in moved)
        for storage in (*moved, *(s for s, _ in dropped)):
            storage.resize_(0)
        free_cached_memory()
        return size

    def take(self) -> int:
        """Brings everything back, bit for bit. Returns the bytes copied."""
        size = 0
        for storage, hosts in self._away:
            storage.resize_(sum(host.nbytes for host in hosts))
            for part, host in zip(_bytes_of(storage).split(self._buffer_bytes), hosts, strict=True):
                part.copy_(host, non_blocking=True)
                self._free[host.nbytes].append(host)
            size += storage.nbytes()
        for storage, size_bytes in self._dropped:
            storage.resize_(size_bytes)
        synchronize()
        self._away, self._dropped = [], []
        return size

    def _buffer(self, size: int) -> Tensor:
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type != "cpu")


def held_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the device's memory under the tensors, shared storage once."""
    return sum(storage.nbytes() for storage in _storages(tensors, device, movable=False))


def _storages(tensors: Iterable[Tensor], device: torch.device, *, movable: bool = True) -> Iterator[UntypedStorage]:
    """Distinct storages on the device that hold something. Host memory that was read from a file cannot be freed."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        fixed = movable and device.type == "cpu" and not storage.resizable()
        if tensor.device == device and storage.nbytes() and storage.data_ptr() not in seen and not fixed:
            seen.add(storage.data_ptr())
            yield storage


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
