"""The comparison of two lists of tensors names every difference."""

import dataclasses

import pytest

from skirl.errors import WeightSyncError
from skirl.records import TensorSpec
from skirl.weights.manifest import compare, size_bytes

SPECS = (
    TensorSpec("model.embed_tokens.weight", (64, 16), "bfloat16", True),
    TensorSpec("model.layers.0.mlp.up_proj.weight", (32, 16), "bfloat16", True),
    TensorSpec("model.layers.0.mlp.down_proj.weight", (16, 32), "bfloat16", True),
    TensorSpec("model.norm.weight", (16,), "bfloat16", False),
)


def refusal(sent: tuple[TensorSpec, ...]) -> str:
    with pytest.raises(WeightSyncError) as caught:
        compare(SPECS, sent, "engine 1")
    return str(caught.value)


def changed(place: int, **fields: object) -> tuple[TensorSpec, ...]:
    return (*SPECS[:place], dataclasses.replace(SPECS[place], **fields), *SPECS[place + 1 :])


def test_equal_lists_pass_in_any_order() -> None:
    compare(SPECS, SPECS[::-1], "engine 1")


def test_missing() -> None:
    text = refusal(SPECS[1:])
    assert "engine 1" in text
    assert "1 missing: model.embed_tokens.weight" in text
    assert "not known" not in text


def test_not_known() -> None:
    assert "1 not known: model.visual.weight." in refusal(
        (*SPECS, TensorSpec("model.visual.weight", (4,), "bfloat16", True))
    )


def test_renamed() -> None:
    text = refusal(changed(1, name="model.layers.0.mlp.up_projection.weight"))
    assert "model.layers.0.mlp.up_projection.weight (renamed? model.layers.0.mlp.up_proj.weight is missing)" in text


def test_transposed() -> None:
    text = refusal(changed(1, shape=(16, 32)))
    assert "1 of another shape: model.layers.0.mlp.up_proj.weight ([16, 32], not [32, 16], transposed)" in text


def test_reshaped() -> None:
    assert "model.norm.weight ([17], not [16])" in refusal(changed(3, shape=(17,)))


def test_other_dtype() -> None:
    assert "1 of another dtype: model.norm.weight (float32, not bfloat16)" in refusal(changed(3, dtype="float32"))


def test_sent_twice() -> None:
    assert "1 sent twice: model.norm.weight" in refusal((*SPECS, SPECS[3]))


def test_long_lists_are_cut() -> None:
    many = tuple(TensorSpec(f"layer.{i}", (1,), "float32", True) for i in range(20))
    with pytest.raises(WeightSyncError, match=r"20 missing: layer\.0, .*layer\.7 and 12 more"):
        compare(many, (), "engine 1")


def test_dtype_that_is_not_carried() -> None:
    with pytest.raises(WeightSyncError, match=r"weight is of dtype complex64.*float32"):
        size_bytes(TensorSpec("weight", (2,), "complex64", True))
