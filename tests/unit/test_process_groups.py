"""How training ranks find one another."""

import multiprocessing
import socket

import pytest
import torch.distributed as dist

from skirl.runtime import process_groups


def _joined(address: str, port: int) -> None:
    process_groups.join(address=address, port=port, rank=1, num_ranks=2, backend="gloo", timeout_s=30)
    dist.barrier()
    process_groups.leave()


def test_the_port_is_rank_0s_from_the_moment_it_is_known() -> None:
    """Seconds pass before the ranks join, in which others on the machine open ports."""
    store = process_groups.open_store("127.0.0.1", 0, 30, serve=True)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", store.port))
    rank_1 = multiprocessing.get_context("spawn").Process(target=_joined, args=("127.0.0.1", store.port))
    rank_1.start()
    try:
        process_groups.join(
            address="127.0.0.1", port=store.port, rank=0, num_ranks=2, backend="gloo", timeout_s=30, store=store
        )
        del store
        dist.barrier()
    finally:
        process_groups.leave()
        rank_1.join(30)
    assert rank_1.exitcode == 0
