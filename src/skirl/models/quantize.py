"""Frozen weights in 4 bits: the NF4 type of QLoRA, arXiv:2305.14314, section 3, with doubly quantised scales."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from skirl.errors import MissingExtra, ModelError

__all__ = ["dequantized", "is_quantized", "quantize_linears"]

BLOCK = 64
"""Values that share a scale."""


def quantize_linears(model: nn.Module, inside: str, dtype: torch.dtype) -> None:
    """Turns every linear layer under the module path ``inside`` into one whose weight is held in NF4, in place.

    Args: dtype: of the products; each weight is unpacked to it where it is used.

    Raises:
        MissingExtra: bitsandbytes is not installed.
        ModelError: a layer's rows are no whole number of blocks. bitsandbytes 0.50 unpacks such a layer wrongly on the
            CPU, without a word: it takes each row for a number of blocks of its own.
    """
    bnb = _bitsandbytes()
    layers = [(n, m) for n, m in model.named_modules() if n.startswith(inside + ".") and isinstance(m, nn.Linear)]
    for name, linear in layers:
        if linear.in_features % BLOCK:
            raise ModelError(
                f"model.lora.quantize: {name} has rows of {linear.in_features} values, and 4 bits come in blocks of "
                f"{BLOCK}: this model can be trained without model.lora.quantize only"
            )
    for name, linear in layers:
        made = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
        )
        made.support_avx512bf16_for_cpu = False  # else a forward pass repacks the weight in a layout of its own
        made.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, blocksize=BLOCK, quant_type="nf4", module=made
        ).to(linear.weight.device)
        made.bias = linear.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)


def is_quantized(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a weight in 4 bits."""
    return hasattr(tensor, "quant_state")


@torch.no_grad()
def dequantized(weight: Any) -> Tensor:
    """[out, in], as the layer computes with it."""
    return _bitsandbytes().functional.dequantize_4bit(weight.data, weight.quant_state)


def _bitsandbytes() -> Any:
    """Imported where it is used; it does not say what it exports."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingExtra('model.lora.quantize needs bitsandbytes: run `pip install "skirl[qlora]"`') from error
    return bitsandbytes
