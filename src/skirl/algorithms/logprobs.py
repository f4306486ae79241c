"""The sampling distribution: the one place where logits become log-probs, for the sampler and for the trainer."""

import math
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

__all__ = [
    "Distribution",
    "ScoreChunk",
    "in_chunks",
    "sampling_logits",
    "sampling_support",
    "score_chunk",
    "token_logprobs",
]

Distribution: TypeAlias = tuple[float, int, float, float]
"""Temperature, top-k, top-p, min-p."""

ScoreChunk: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Distribution], tuple[Tensor, Tensor]]
"""``score_chunk``, or a compiled form of it."""


def sampling_support(logits: Float[Tensor, "A V"], *, top_k: int, top_p: float, min_p: float) -> Bool[Tensor, "A V"]:
    """Tokens that min-p, then top-k, then top-p leave in, in vLLM's order.

    min-p keeps tokens at least ``min_p`` times as likely as the likeliest; top-k the k likeliest of the rest (equal
    logits at the border all stay); top-p the smallest set of what is left, renormalised, that reaches ``top_p``.

    Args: logits: after bans and temperature; -inf is out already.
    """
    keep = logits > -math.inf
    if min_p > 0:
        keep &= logits >= logits.max(-1, keepdim=True).values + math.log(min_p)
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.masked_fill(~keep, -math.inf).topk(top_k, -1).values[..., -1:]
        keep &= logits >= smallest
    if top_p < 1:
        ordered, index = logits.masked_fill(~keep, -math.inf).sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        inside = before < top_p
        inside[..., 0] = True
        keep &= torch.zeros_like(keep).scatter(-1, index, inside)
    return keep


def sampling_logits(
    logits: Float[Tensor, "A V"],
    *,
    temperature: float,
    banned_ids: Int64[Tensor, "B"],
    top_k: int,
    top_p: float,
    min_p: float,
    always: Int64[Tensor, "A"] | None = None,
) -> Float[Tensor, "A V"]:
    """Logits of the sampling distribution, float32: banned ids and dropped tokens are -inf.

    Args:
        logits: raw output of the model's head.
        temperature: divisor; 0 (greedy) counts as 1.
        banned_ids: never sampled.
        top_k, top_p, min_p: filters; 0, 1, 0 are off.
        always: one token a row that stays in the support though a filter would drop it. The trainer passes the
            sampled token: after an update it may have left the nucleus that it was sampled from.
    """
    logits = logits.float().index_fill(-1, banned_ids, -math.inf)
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    if top_k == 0 and top_p == 1 and min_p == 0:
        return logits
    keep = sampling_support(logits.detach(), top_k=top_k, top_p=top_p, min_p=min_p)
    if always is not None:
        keep = keep.scatter(-1, always[:, None], True)
    return logits.masked_fill(~keep, -math.inf)


def score_chunk(
    hidden: Float[Tensor, "C D"],
    head_weight: Float[Tensor, "V D"],
    targets: Int64[Tensor, "C"],
    banned_ids: Int64[Tensor, "B"],
    distribution: Distribution,
) -> tuple[Float[Tensor, "C"], Float[Tensor, "C"]]:
    """(log-probs, entropies) of a few tokens at once; arguments as in ``token_logprobs``."""
    temperature, top_k, top_p, min_p = distribution
    logits = sampling_logits(
        hidden @ head_weight.T,
        temperature=temperature,
        banned_ids=banned_ids,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        always=targets,
    )
    logprobs = logits.log_softmax(-1)
    finite = torch.where(logprobs > -math.inf, logprobs, 0.0)  # 0 log 0 = 0, and its gradient too
    entropy = -(logprobs.exp() * finite).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def token_logprobs(
    hidden: Float[Tensor, "A D"],
    head_weight: Float[Tensor, "V D"],
    targets: Int64[Tensor, "A"],
    *,
    temperature: float,
    banned_ids: Int64[Tensor, "B"],
    top_k: int,
    top_p: float,
    min_p: float,
    chunk: int,
    score_chunk: ScoreChunk = score_chunk,
) -> tuple[Float[Tensor, "A"], Float[Tensor, "A"]]:
    """Log-probs of given tokens and entropies under the sampling distribution, without ever holding [A, V] whole.

    Chunks of ``chunk`` tokens are computed one after another and recomputed in the backward pass.

    Args:
        hidden: last hidden states at the positions that predict the targets.
        head_weight: of the language-model head.
        targets: token ids; a banned target has log-prob -inf.
        temperature, banned_ids, top_k, top_p, min_p: see ``sampling_logits``.
        chunk: tokens held at once; changes memory only.
        score_chunk: what computes a chunk; a compiled form needs a third of the memory traffic.

    Returns: (log-probs, entropies), float32, both with gradient. The support is a constant of the gradient.
    """
    distribution = (temperature, top_k, top_p, min_p)
    if hidden.shape[0] == 0:
        nothing = hidden.sum() * 0.0 + head_weight.sum() * 0.0  # keeps both in the graph
        return nothing.float().expand(0), nothing.float().expand(0)

    def piece(part: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
        return score_chunk(part, head_weight, want, banned_ids, distribution)

    return in_chunks(piece, (hidden, targets), chunk=chunk)


def in_chunks(
    compute: Callable[..., tuple[Tensor, Tensor]], rows: tuple[Tensor, ...], *, chunk: int
) -> tuple[Float[Tensor, "A"], Float[Tensor, "A"]]:
    """``compute`` over ``chunk`` rows at a time, recomputed in the backward pass, and its two results joined.

    Args:
        compute: takes a piece of each of ``rows``; what else it needs it holds itself, with gradient.
        rows: tensors of equal, positive length.
        chunk: rows held at once; changes memory only.
    """
    pieces: list[tuple[Tensor, Tensor]] = []
    for start in range(0, rows[0].shape[0], chunk):
        part = [row[start : start + chunk] for row in rows]
        if torch.is_grad_enabled():
            recomputed = checkpoint(compute, *part, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]
            pieces.append(cast(tuple[Tensor, Tensor], recomputed))
        else:
            pieces.append(compute(*part))
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])
