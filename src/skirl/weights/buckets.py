"""Tensors in buffers of bytes: which go together, how they get in, and how they are seen without a copy.

manifest -> plan_buckets -> pack (trainer) -> the buffer's bytes cross over -> views (engine)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skirl.errors import WeightSyncError
from skirl.records import TensorSpec
from skirl.weights.manifest import Bucket, size_bytes

__all__ = ["ALIGNMENT", "Layout", "pack", "plan_buckets", "views"]

ALIGNMENT = 64
"""Each tensor starts at a multiple of so many bytes: enough for every dtype and for vector loads."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of one message lie in its buffer.

    Attributes:
        index: place in the sending order, from 0.
        offsets: first byte of each tensor. num_bytes: of the buffer, a multiple of ``ALIGNMENT``.
    """

    index: int
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Layout, ...]:
    """Fills one buffer after another in sending order; no tensor is split, a larger one gets a buffer of its own size.

    Args:
        bucket_bytes: size of a buffer, > 0; used from its start, so what is left at its end is not sent.
    """
    layouts: list[Layout] = []
    held: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in tensors:
        size = _aligned(size_bytes(spec))
        if held and end + size > bucket_bytes:
            layouts.append(Layout(len(layouts), tuple(held), tuple(offsets), end))
            held, offsets, end = [], [], 0
        held.append(spec)
        offsets.append(end)
        end += size
    if held:
        layouts.append(Layout(len(layouts), tuple(held), tuple(offsets), end))
    return tuple(layouts)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(layout: Layout, tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Copies the layout's tensors into the buffer, from whatever device; bytes between tensors become 0.

    Args:
        tensors: by name; each whole, with the shape and dtype of its spec.
        buffer: [>= num_bytes] uint8.

    Raises:
        WeightSyncError: a tensor is not there or is not what its spec says.
    """
    for spec in layout.tensors:
        _check(spec, tensors)
    with torch.no_grad():
        for (name, place), spec, offset in zip(views(buffer, layout), layout.tensors, layout.offsets, strict=True):
            place.copy_(tensors[name])
            size = size_bytes(spec)
            if gap := _aligned(size) - size:
                buffer[offset + size : offset + size + gap].zero_()


def _check(spec: TensorSpec, tensors: Mapping[str, Tensor]) -> None:
    if spec.name not in tensors:
        raise WeightSyncError(f"the trainer lists {spec.name} but did not gather it")
    tensor = tensors[spec.name]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != spec.shape or dtype != spec.dtype:
        raise WeightSyncError(
            f"the trainer lists {spec.name} as {list(spec.shape)} {spec.dtype}, "
            f"but gathered {list(tensor.shape)} {dtype}"
        )


def views(buffer: Tensor, bucket: Bucket | Layout) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket as views of its buffer, in order; they live as long as the buffer is not filled again.

    Args:
        buffer: [>= num_bytes] uint8, starting at a multiple of ``ALIGNMENT`` bytes.

    Raises:
        WeightSyncError: the bucket does not describe this buffer: too few bytes, overlapping or unaligned tensors.
    """
    if buffer.numel() < bucket.num_bytes:
        raise WeightSyncError(f"bucket {bucket.index} is truncated: {buffer.numel()} of {bucket.num_bytes} bytes")
    if len(bucket.offsets) != len(bucket.tensors):
        raise WeightSyncError(
            f"bucket {bucket.index} has {len(bucket.offsets)} offsets for {len(bucket.tensors)} tensors"
        )
    result: list[tuple[str, Tensor]] = []
    end = 0
    for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        if offset % ALIGNMENT or offset < end:
            raise WeightSyncError(
                f"bucket {bucket.index}: {spec.name} at byte {offset} overlaps its neighbour or is not aligned to "
                f"{ALIGNMENT} bytes"
            )
        end = offset + size_bytes(spec)
        if end > bucket.num_bytes:
            raise WeightSyncError(
                f"bucket {bucket.index} is truncated: {spec.name} ends at byte {end} of {bucket.num_bytes}"
            )
        dtype: torch.dtype = getattr(torch, spec.dtype)
        result.append((spec.name, buffer[offset:end].view(dtype).view(spec.shape)))
    return result
