"""Between processes on one GPU: the engine maps the trainer's buffer; nothing crosses a bus.

Every training rank fills a buffer on its own GPU, so that each engine worker finds one on its GPU, by the GPU's UUID.
"""

import inspect
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from skirl.errors import WeightSyncError

__all__ = ["CudaIpcReceivingEnd", "CudaIpcSendingEnd"]


class CudaIpcSendingEnd:
    """Buffers on this process's current GPU, each exported once.

    Args:
        gpu: UUID of that GPU.
    """

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._buffers: dict[int, Tensor] = {}
        self._handles: dict[int, bytes] = {}

    def buffer(self, slot: int, num_bytes: int) -> Tensor:
        """[>= num_bytes] uint8."""
        if slot not in self._buffers or self._buffers[slot].numel() < num_bytes:
            self._handles.pop(slot, None)
            self._buffers.pop(slot, None)  # before the new one is made: both may not fit
            device = torch.device("cuda", torch.cuda.current_device())
            self._buffers[slot] = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)
        return self._buffers[slot]

    def payload(self, slot: int, num_bytes: int) -> dict[str, bytes]:
        """The buffer's IPC handle, the same bytes as long as the buffer is the same; waits for the GPU."""
        buffer = self._buffers[slot]
        if slot not in self._handles:
            _, arguments = reduce_tensor(buffer)
            self._handles[slot] = pickle.dumps((slot, arguments))
        torch.cuda.current_stream(buffer.device).synchronize()
        return {self._gpu: self._handles[slot]}

    def transmit(self, slot: int, num_bytes: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Lets go of the buffers; PyTorch frees each when its last receiver has let go too."""
        self._handles.clear()
        self._buffers.clear()


class CudaIpcReceivingEnd:
    """Opens each exported buffer once and keeps it while the sender goes on using it.

    Args:
        device: the GPU of this worker, as this process numbers it. gpu: its UUID.
    """

    def __init__(self, device: torch.device, gpu: str) -> None:
        self._device = device
        self._gpu = gpu
        self._opened: dict[int, tuple[bytes, Tensor]] = {}

    def open(self, payload: dict[str, bytes], num_bytes: int) -> Tensor:
        """The trainer's memory itself, to be read only."""
        if self._gpu not in payload:
            raise WeightSyncError(
                f"no training rank offers weights on GPU {self._gpu}, only on {', '.join(sorted(payload))}. The "
                "transport cuda_ipc needs every engine worker on the GPU of a training rank"
            )
        handle = payload[self._gpu]
        slot, arguments = pickle.loads(handle)
        if slot not in self._opened or self._opened[slot][0] != handle:
            self._opened.pop(slot, None)
            self._opened[slot] = (handle, _rebuild(arguments, self._device))
        buffer = self._opened[slot][1]
        if buffer.numel() < num_bytes:
            raise WeightSyncError(f"the buffer on GPU {self._gpu} is truncated: {buffer.numel()} of {num_bytes} bytes")
        return buffer[:num_bytes]

    def release(self) -> None:
        """Waits until the GPU has read the buffer."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Unmaps."""
        self._opened.clear()


def _rebuild(arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    """The exported tensor, under the number that this process gives to the GPU."""
    bound = inspect.signature(rebuild_cuda_tensor).bind(*arguments)
    index = torch.cuda.current_device() if device.index is None else device.index
    bound.arguments["storage_device"] = index
    return rebuild_cuda_tensor(*bound.args, **bound.kwargs)
