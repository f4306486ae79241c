"""How buffers of weights cross from the trainer's processes to the engines'."""

import torch

from skirl.errors import WeightSyncError
from skirl.weights.endpoints import Place
from skirl.weights.manifest import TransportName
from skirl.weights.transports.base import ReceivingEnd, SendingEnd

__all__ = ["receiving_end", "sending_end"]


def sending_end(transport: TransportName, setup: bytes, place: Place) -> SendingEnd:
    """The end of a training rank that sends.

    Args:
        setup: for nccl and gloo a ``BroadcastSetup``; without meaning for the others. place: of this rank.
    """
    if transport == "shared_memory":
        from skirl.weights.transports.shared_memory import SharedMemorySendingEnd

        return SharedMemorySendingEnd()
    if transport == "cuda_ipc":
        from skirl.weights.transports.cuda_ipc import CudaIpcSendingEnd

        return CudaIpcSendingEnd(_gpu(place))
    from skirl.weights.transports.broadcast import BroadcastSendingEnd, BroadcastSetup

    return BroadcastSendingEnd(BroadcastSetup.from_bytes(setup))


def receiving_end(
    transport: TransportName, setup: bytes, *, device: torch.device, place: Place, worker_rank: int
) -> ReceivingEnd:
    """The end of an engine worker.

    Args:
        device: that the weights are needed on. place: of this worker. worker_rank: its number in its engine.
    """
    if transport == "shared_memory":
        from skirl.weights.transports.shared_memory import SharedMemoryReceivingEnd

        return SharedMemoryReceivingEnd(device)
    if transport == "cuda_ipc":
        from skirl.weights.transports.cuda_ipc import CudaIpcReceivingEnd

        return CudaIpcReceivingEnd(device, _gpu(place))
    from skirl.weights.transports.broadcast import BroadcastReceivingEnd, BroadcastSetup

    return BroadcastReceivingEnd(BroadcastSetup.from_bytes(setup), device, worker_rank)


def _gpu(place: Place) -> str:
    if place.gpu is None:
        raise WeightSyncError(f"the transport cuda_ipc needs a GPU; this process on {place.node} computes on the CPU")
    return place.gpu
