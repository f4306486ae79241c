"""A policy beside a frozen teacher: log-probs of the policy, and its divergence from the teacher at each action token.

row -> policy's hidden [A, D], with gradient -+-> log-probs [A], divergences [A] over the whole vocabulary
    -> teacher's hidden [A, E], without      -+
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from skirl.algorithms.distillation import token_divergence
from skirl.errors import ModelError
from skirl.models.adapters import NamedWeight
from skirl.models.loading import LoadedModel
from skirl.models.policy import HEAD_CHUNK, PACKING_TOLERANCE, PackedRow, Policy, check_packing
from skirl.records import Sampling

__all__ = ["Distilled"]


class DivergenceHead(nn.Module):
    """The policy's head against the teacher's. Holds the policy's own parameter (ZeRO-3 gathers by module)."""

    def __init__(
        self, weight: nn.Parameter, direction: Literal["forward_kl", "reverse_kl"], temperature: float
    ) -> None:
        super().__init__()
        self.weight = weight
        self._direction: Literal["forward_kl", "reverse_kl"] = direction
        self._temperature = temperature

    def forward(
        self, hidden: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, divergences) [A]; where one vocabulary is padded further, over the ids that both have."""
        shared = min(len(self.weight), len(teacher_weight))
        return token_divergence(
            hidden,
            self.weight[:shared],
            teacher_hidden,
            teacher_weight[:shared],
            targets,
            direction=self._direction,
            temperature=self._temperature,
            chunk=HEAD_CHUNK,
        )


class Distilled(nn.Module):
    """A policy that learns a teacher's distribution; to everything but the objective it is the policy.

    Args:
        policy: what is trained, exported and sampled from.
        teacher: frozen, held whole on every rank; no part of this module, so that no backend shards or saves it.
        direction: KL(teacher, policy) or KL(policy, teacher).
        temperature: of both distributions in the divergence, see ``token_divergence``.

    Raises:
        ModelError: the two do not write with the same tokens, or the teacher cannot be packed.
    """

    def __init__(
        self, policy: Policy, teacher: Policy, *, direction: Literal["forward_kl", "reverse_kl"], temperature: float
    ) -> None:
        super().__init__()
        _check_vocabulary(policy, teacher)
        check_packing(teacher, PACKING_TOLERANCE[str(teacher.head.weight.dtype).removeprefix("torch.")])
        teacher.requires_grad_(False)
        self.policy = policy
        self.divergence_head = DivergenceHead(policy.head.weight, direction, temperature)
        self._teacher = (teacher,)  # in a tuple: not a submodule

    def forward(self, row: PackedRow, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [A], divergences [A], auxiliary losses [S]), float32. Log-probs are those of temperature 1 without
        filters, whatever the sampling distribution.
        """
        (teacher,) = self._teacher
        with torch.no_grad():
            seen = teacher.hidden(row)[row.predictors]
        hidden, auxiliary = self.policy.hidden_with_auxiliary(row)
        logprobs, divergences = self.divergence_head(
            hidden[row.predictors], seen, teacher.head.weight.detach(), row.targets
        )
        return logprobs, divergences, auxiliary

    # ---------------------------------------------------------------------------------------------------- as the policy
    @property
    def loaded(self) -> LoadedModel:
        """The policy's."""
        return self.policy.loaded

    @property
    def device(self) -> torch.device:
        """Where rows must lie."""
        return self.policy.device

    def named_model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's."""
        return self.policy.named_model_tensors()

    def committed_weights(self) -> dict[str, NamedWeight]:
        """The policy's."""
        return self.policy.committed_weights()

    def exported_weights(self) -> dict[str, NamedWeight]:
        """The policy's."""
        return self.policy.exported_weights()

    def adapter_weights(self) -> dict[str, NamedWeight]:
        """The policy's."""
        return self.policy.adapter_weights()


def _check_vocabulary(policy: Policy, teacher: Policy) -> None:
    """One id must be one token to both; embeddings may be padded to different sizes beyond the tokenizer."""
    own, other = policy.loaded, teacher.loaded
    sizes = len(policy.head.weight), len(teacher.head.weight)
    vocabulary, known = own.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    if own.family.model_type != other.family.model_type and (own.family.placeholder or other.family.placeholder):
        raise ModelError(f"kd.teacher: {other.source} is {other.family.name}, the policy {own.family.name}")
    if vocabulary == known:
        if min(sizes) > max(vocabulary.values()):
            return
        raise ModelError(
            f"kd.teacher: a head is smaller than the vocabulary: {sizes[0]} tokens of {own.source}, {sizes[1]} of "
            f"{other.source}, and the tokenizer has ids up to {max(vocabulary.values())}"
        )
    odd = sorted(token for token in vocabulary.keys() | known.keys() if vocabulary.get(token) != known.get(token))
    raise ModelError(
        f"kd.teacher: {other.source} (a vocabulary of {sizes[1]}, {len(known)} of them in its tokenizer) does not "
        f"write with the policy's tokens ({own.source}: {sizes[0]}, {len(vocabulary)}): {len(odd)} tokens have other "
        f"ids, such as {odd[0]!r}. Its distribution means nothing to the policy; use a teacher of the same family"
    )
