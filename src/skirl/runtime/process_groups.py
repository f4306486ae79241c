"""The data-parallel process group of the training ranks."""

import datetime

import torch.distributed as dist

__all__ = ["join", "join_alone", "leave"]


def join(*, address: str, port: int, rank: int, num_ranks: int, backend: str, timeout_s: float) -> None:
    """Joins the training ranks; returns when all have arrived or raises after ``timeout_s``.

    Args: backend: "gloo" on CPUs, "nccl" on GPUs.
    """
    dist.init_process_group(
        backend,
        init_method=f"tcp://{address}:{port}",
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
