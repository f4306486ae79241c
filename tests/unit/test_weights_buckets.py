"""Layouts, packing and views; the checksum of a buffer."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.errors import WeightSyncError
from skirl.records import TensorSpec
from skirl.weights.buckets import ALIGNMENT, pack, plan_buckets, views
from skirl.weights.checksum import checksum
from skirl.weights.manifest import DTYPE_BYTES, size_bytes

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), min_size=1, max_size=12).map(
    lambda drawn: tuple(TensorSpec(f"t{i}", shape, dtype, True) for i, (shape, dtype) in enumerate(drawn))
)


def values(spec: TensorSpec) -> torch.Tensor:
    """Any bytes; a bool holds 0 or 1."""
    raw = torch.randint(0, 2 if spec.dtype == "bool" else 256, (size_bytes(spec),), dtype=torch.uint8)
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)


@given(SPECS, st.integers(1, 2000))
@settings(max_examples=100, deadline=None)
def test_every_tensor_arrives_bit_for_bit(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> None:
    layouts = plan_buckets(specs, bucket_bytes)
    assert tuple(spec for layout in layouts for spec in layout.tensors) == specs
    assert [layout.index for layout in layouts] == list(range(len(layouts)))
    sent = {spec.name: values(spec) for spec in specs}
    for layout in layouts:
        assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
        assert layout.num_bytes <= bucket_bytes or len(layout.tensors) == 1
        buffer = torch.full((layout.num_bytes + 5,), 255, dtype=torch.uint8)
        pack(layout, sent, buffer)
        got = views(buffer, layout)
        assert [name for name, _ in got] == [spec.name for spec in layout.tensors]
        for name, tensor in got:
            assert tensor.dtype == sent[name].dtype
            assert tensor.shape == sent[name].shape
            assert tensor.contiguous().view(-1).view(torch.uint8).equal(sent[name].reshape(-1).view(torch.uint8))
        held = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
            held[offset : offset + size_bytes(spec)] = buffer[offset : offset + size_bytes(spec)]
        assert buffer[: layout.num_bytes].equal(held), "padding is zero"


def test_a_large_tensor_gets_its_own_bucket() -> None:
    specs = [TensorSpec(f"t{i}", (size,), "uint8", True) for i, size in enumerate([64, 64, 1000, 64])]
    layouts = plan_buckets(specs, 128)
    assert [len(layout.tensors) for layout in layouts] == [2, 1, 1]
    assert [layout.num_bytes for layout in layouts] == [128, 1024, 64]


def test_views_share_the_buffers_memory() -> None:
    (layout,) = plan_buckets([TensorSpec("a", (4,), "float32", True)], 64)
    buffer = torch.zeros(64, dtype=torch.uint8)
    views(buffer, layout)[0][1].fill_(1.0)
    assert buffer.view(torch.float32)[:4].tolist() == [1.0] * 4


def test_transposed_weights_are_packed_by_value() -> None:
    spec = TensorSpec("a", (3, 5), "float32", True)
    (layout,) = plan_buckets([spec], 64)
    buffer = torch.empty(64, dtype=torch.uint8)
    weight = torch.randn(5, 3).t()
    pack(layout, {"a": weight}, buffer)
    assert views(buffer, layout)[0][1].equal(weight)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "did not gather it"),
        ({"a": torch.zeros(5)}, r"\[4\] float32, but gathered \[5\] float32"),
        ({"a": torch.zeros(4, dtype=torch.float64)}, r"but gathered \[4\] float64"),
    ],
)
def test_what_was_gathered_is_checked(tensors: dict[str, torch.Tensor], message: str) -> None:
    (layout,) = plan_buckets([TensorSpec("a", (4,), "float32", True)], 64)
    buffer = torch.full((64,), 7, dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match=message):
        pack(layout, tensors, buffer)
    assert (buffer == 7).all()


def test_bad_descriptions_of_a_buffer() -> None:
    specs = [TensorSpec(name, (16,), "float32", True) for name in "ab"]
    (layout,) = plan_buckets(specs, 1024)
    buffer = torch.zeros(128, dtype=torch.uint8)
    cases = {
        "is truncated: 127 of 128": (buffer[:127], layout),
        "b ends at byte 128 of 100": (buffer, dataclasses.replace(layout, num_bytes=100)),
        "b at byte 0 overlaps": (buffer, dataclasses.replace(layout, offsets=(0, 0))),
        "b at byte 72 overlaps its neighbour or is not aligned": (buffer, dataclasses.replace(layout, offsets=(0, 72))),
        "1 offsets for 2 tensors": (buffer, dataclasses.replace(layout, offsets=(0,))),
    }
    for message, (held, described) in cases.items():
        with pytest.raises(WeightSyncError, match=message):
            views(held, described)


ROW = 4096 * 8
SIZES = (0, 1, 63, ROW - 1, ROW, 3 * ROW, 3 * ROW + 64, 5 * ROW + 8 * 100)


def buffer_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.sampled_from([s for s in SIZES if s]), st.data())
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_is_seen(size: int, data: st.DataObject) -> None:
    buffer = buffer_of(size)
    before = checksum(buffer)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    buffer[place] ^= 1 << bit
    assert checksum(buffer) != before
    buffer[place] ^= 1 << bit
    assert checksum(buffer) == before


@given(st.sampled_from([8, 64, 4096, ROW]), st.data())
@settings(max_examples=100, deadline=None)
def test_swapped_blocks_are_seen(block: int, data: st.DataObject) -> None:
    buffer = buffer_of(5 * ROW + 8 * 100)
    before = checksum(buffer)
    blocks = buffer[: buffer.numel() // block * block].view(-1, block)
    first, second = data.draw(st.lists(st.integers(0, len(blocks) - 1), min_size=2, max_size=2, unique=True))
    blocks[[first, second]] = blocks[[second, first]]
    assert checksum(buffer) != before


def test_top_bits_of_two_words_do_not_cancel() -> None:
    buffer = buffer_of(4 * ROW)
    before = checksum(buffer)
    for word in (5, 4096 + 9):  # the sign bits: 2^63 + 2^63 = 0 mod 2^64
        buffer[8 * word + 7] ^= 128
    assert checksum(buffer) != before


@pytest.mark.parametrize("size", SIZES)
def test_checksum_is_a_number_of_63_bits_that_knows_the_length(size: int) -> None:
    zeros = torch.zeros(size, dtype=torch.uint8)
    assert 0 <= checksum(zeros) < 2**63
    assert checksum(zeros) != checksum(torch.zeros(size + 8, dtype=torch.uint8))


def test_checksum_is_the_same_in_every_build() -> None:
    words = torch.arange(3 * 4096 + 11, dtype=torch.int64) * 0x123456789ABCDEF
    assert checksum(words.view(torch.uint8)) == 1510592027509600084
