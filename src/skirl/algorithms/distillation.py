"""Divergence of a policy from its teacher, over the whole vocabulary, without ever holding [A, V] whole."""

from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from skirl.algorithms.logprobs import in_chunks

__all__ = ["token_divergence"]


def token_divergence(
    hidden: Float[Tensor, "A D"],
    head: Float[Tensor, "V D"],
    teacher_hidden: Float[Tensor, "A E"],
    teacher_head: Float[Tensor, "V E"],
    targets: Int64[Tensor, "A"],
    *,
    direction: Literal["forward_kl", "reverse_kl"],
    temperature: float,
    chunk: int,
) -> tuple[Float[Tensor, "A"], Float[Tensor, "A"]]:
    """Log-probs of given tokens and the divergence of the whole distributions at their positions.

    With p the teacher's and q the policy's softmax(logits / tau):
    forward_kl: tau^2 sum_v p_v log(p_v / q_v),    reverse_kl: tau^2 sum_v q_v log(q_v / p_v)

    Chunks of ``chunk`` tokens are computed one after another and recomputed in the backward pass.

    Args:
        hidden, teacher_hidden: last hidden states at the positions that predict the targets; the widths may differ.
        head, teacher_head: weights of the language-model heads, over one vocabulary.
        targets: token ids, for the cross-entropy.
        direction: KL(teacher, policy) or KL(policy, teacher).
        temperature: tau; its square keeps the gradient's size.
        chunk: tokens held at once; changes memory only.

    Returns: (log-probs at temperature 1, divergences in nats times tau^2), float32, with gradient to the policy alone.
    Source: Hinton et al., arXiv:1503.02531, section 2; reverse Gu et al., arXiv:2306.08543, Agarwal et al.,
        arXiv:2306.13649, eq. 4. Oracle: tests/oracles/distillation.py
    """

    def piece(part: Tensor, teacher_part: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
        logits = (part @ head.T).float()
        with torch.no_grad():
            teacher = ((teacher_part @ teacher_head.T).float() / temperature).log_softmax(-1)
        logprobs = logits.log_softmax(-1).gather(-1, want[:, None])[:, 0]
        student = (logits / temperature).log_softmax(-1)
        first, second = (teacher, student) if direction == "forward_kl" else (student, teacher)
        return logprobs, temperature**2 * (first.exp() * (first - second)).sum(-1)

    if hidden.shape[0] == 0:
        nothing = (hidden.sum() * 0.0 + head.sum() * 0.0).float()  # keeps both in the graph
        return nothing.expand(0), nothing.expand(0)
    return in_chunks(piece, (hidden, teacher_hidden, targets), chunk=chunk)
