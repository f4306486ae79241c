"""What a rank packs, and how the messages of ranks become one."""

import dataclasses

import pytest

from skirl.errors import WeightSyncError
from skirl.weights.sender import merge_buckets
from tests.weight_ends import ModuleWeights, TrainerModel, make_sender


def test_payloads_of_ranks_are_united() -> None:
    weights = ModuleWeights(TrainerModel())
    sender = make_sender(weights)
    sender.open("shared_memory", b"", version=1, whole=True)
    bucket = sender.pack(0)
    sender.abort()
    first = dataclasses.replace(bucket, payload={"GPU-0": b"x"})
    second = dataclasses.replace(bucket, payload={"GPU-1": b"y"})
    silent = dataclasses.replace(bucket, payload={}, checksum=None)
    assert merge_buckets([silent, first, second]) == dataclasses.replace(bucket, payload={"GPU-0": b"x", "GPU-1": b"y"})
    with pytest.raises(WeightSyncError, match="none of the 2 training ranks sends"):
        merge_buckets([silent, silent])
    with pytest.raises(
        WeightSyncError, match=r"different weights: checksum of bucket 0 \(embed to embed\) is 1 on rank 1"
    ):
        merge_buckets([first, dataclasses.replace(second, checksum=1)])
    with pytest.raises(WeightSyncError, match="rank 0 packed bucket 1 of 1 tensors"):
        merge_buckets([dataclasses.replace(silent, index=1), first])
    with pytest.raises(WeightSyncError, match="same place: GPU-0"):
        merge_buckets([first, first])


def test_a_rank_that_does_not_send_takes_part_in_gathering() -> None:
    weights = ModuleWeights(TrainerModel())
    asked: list[list[str]] = []
    weights.values = lambda tensors: asked.append(sorted(tensors)) or tensors
    sender = make_sender(weights, sends=False)
    manifest = sender.open("shared_memory", b"", version=1, whole=True)
    buckets = [sender.pack(index) for index in range(3)]
    sender.transmit(2)
    assert [name for names in asked for name in names] == ["embed", "q", "frozen", "k", "mean"]
    assert all(bucket.payload == {} and bucket.checksum is None for bucket in buckets)
    assert sum((bucket.tensors for bucket in buckets), ()) == manifest.tensors
