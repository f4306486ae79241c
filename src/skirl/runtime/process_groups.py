"""The data-parallel process group of the training ranks."""

import datetime
from typing import Any

import torch.distributed as dist

__all__ = ["join", "join_alone", "leave", "open_store"]


def open_store(address: str, port: int, timeout_s: float, *, serve: bool) -> Any:
    """The store in which ranks find one another: rank 0 serves it, the others connect.

    Args:
        port: 0 lets the server choose one, its ``.port``. Whoever tells others of a port has to serve it first: one
            that is only looked up can be taken by another process before it is bound.
        timeout_s: for each wait.

    Raises:
        RuntimeError: the port is taken, or nobody serves it within ``timeout_s``.
    """
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  re-exported from a private module
        address, port, is_master=serve, timeout=datetime.timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join(
    *, address: str, port: int, rank: int, num_ranks: int, backend: str, timeout_s: float, store: Any = None
) -> None:
    """Joins the training ranks; returns when all have arrived or raises after ``timeout_s``.

    Args:
        backend: "gloo" on CPUs, "nccl" on GPUs.
        store: what rank 0 serves; None lets it serve ``port``, where that is free.
    """
    if store is None:
        store = open_store(address, port, timeout_s, serve=rank == 0)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
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
