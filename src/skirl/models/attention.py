"""Attention over packed rows, registered with transformers under one name.

A packed row is a batch of one: [1, H, N, D] queries, with ``cu_seqlens`` saying where each sequence begins. The same
name serves sampling, where a padded batch comes with a mask and a key/value cache.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["PACKED_ATTENTION", "keep_loop_out_of_graphs", "packed_attention", "register_packed_attention"]

PACKED_ATTENTION = "skirl_packed"
"""Name to give as ``attn_implementation``."""


def packed_attention(  # noqa: PLR0917  transformers' own signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row; with a mask, ordinary masked attention.

    Args:
        query: [1, H, N, D]. key, value: [1, H_kv, N, D].
        attention_mask: set while sampling (padded batch, cache); None in packed rows.
        scaling: factor of the scores.
        kwargs: ``cu_seq_lens_q`` [S+1] int32 and ``max_length_q`` for packed rows; ``sliding_window``, tokens.

    Returns: ([1, N, H, D], None)
    """
    if attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    cu_seqlens: Tensor | None = kwargs.get("cu_seq_lens_q")
    assert cu_seqlens is not None, "a packed row came without cu_seq_lens_q: it would be read as one long sequence"
    window: int | None = kwargs.get("sliding_window")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        longest: int = kwargs["max_length_q"]
        return _varlen(query, key, value, cu_seqlens, longest=longest, scaling=scaling, window=window), None
    return _loop(query, key, value, cu_seqlens, scaling, window), None


def _by_sequence(  # noqa: PLR0917  wrapped by torch.compiler.disable
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """One sequence after another: on the CPU, and in float32 on GPUs, where no fused function takes packed rows."""
    lengths: list[int] = cu_seqlens.diff().tolist()
    # split, for the gradient of a slice is as long as the row
    parts = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    pieces = [_one_sequence(q, k, v, scaling, window) for q, k, v in parts]
    return torch.cat(pieces, dim=2).transpose(1, 2)


_loop: Callable[..., Tensor] = _by_sequence


def keep_loop_out_of_graphs() -> None:
    """The compiler must not see a loop over the sequences of a row: it would compile anew for each number of them."""
    global _loop
    _loop = cast(Callable[..., Tensor], torch.compiler.disable(_by_sequence))


def _one_sequence(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    shared = query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    band = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(query, key, value, attn_mask=band, scale=scaling, enable_gqa=shared)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    repeats = query.shape[1] // key.shape[1]  # torch 2.11 has no enable_gqa
    q, k, v = (
        t[0].transpose(0, 1).contiguous()
        for t in (query, key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1))
    )
    left = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scaling, window_size=(left, 0))
    assert isinstance(out, Tensor)
    return out[None]


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows; the usual one for a padded batch."""
    if attention_mask is None:
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def register_packed_attention() -> None:
    """Makes ``attn_implementation=PACKED_ATTENTION`` known to transformers; harmless to repeat."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _mask)
