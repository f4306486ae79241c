"""The data-parallel process group of the training ranks."""

import datetime
from typing import Any

import torch.distributed as dist

__all__ = ["join", "join_alone", "leave", "listen"]


def listen(address: str, timeout_s: float) -> Any:
    """Rank 0's store, which others reach at ``address`` and ``.port``: the port is taken from now on, by it alone."""
    return _store(address, 0, timeout_s, serve=True)


def join(
    *, address: str, port: int, rank: int, num_ranks: int, backend: str, timeout_s: float, store: Any = None
) -> None:
    """Joins the training ranks; returns when all have arrived or raises after ``timeout_s``.

    Args:
        backend: "gloo" on CPUs, "nccl" on GPUs.
        store: what rank 0 listens with; None lets it listen at ``port``, where that is free.
    """
    if store is None:
        store = _store(address, port, timeout_s, serve=rank == 0)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _store(address: str, port: int, timeout_s: float, *, serve: bool) -> Any:
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, is_master=serve, timeout=timeout, wait_for_workers=False
    )


def leave() -> None:
    """Leaves, if joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join_alone(backend: str) -> None:
    """A group of this process only, for backends that want one; harmless to repeat."""
    if dist.is_initialized():
        return
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
