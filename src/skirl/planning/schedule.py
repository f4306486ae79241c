"""Training sequences to a plan: who runs what, when, and with which weight a token. Pure; ranks agree on its hash.

sequences -> optimizer steps (whole groups) -> micro-batches (hard cap) -> ranks (equal counts) -> weights -> hash
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from skirl.errors import ConfigError
from skirl.planning.packing import pack
from skirl.planning.weights import token_weights
from skirl.records import MicroBatch, OptimizerStep, Plan, TrainingSequence

__all__ = ["make_plan"]


def make_plan(
    sequences: Sequence[TrainingSequence],
    *,
    num_ranks: int,
    max_tokens: int,
    normalizer: Literal["token", "sequence", "constant"],
    constant_length: int | None = None,
    mini_batches: int = 1,
    group_of: Sequence[str] | None = None,
    epochs: int = 1,
) -> Plan:
    """The complete schedule of one batch.

    Args:
        sequences: each is trained on exactly once.
        num_ranks: data-parallel ranks; all get the same number of micro-batches, empty ones where short.
        max_tokens: hard cap of a micro-batch, tokens.
        normalizer, constant_length: how token losses are weighted, over each optimizer step.
        mini_batches: optimizer steps; sequences are dealt out by whole groups, in order.
        group_of: group of each sequence; None makes each its own group.
        epochs: passes over the batch; each repeats the same optimizer steps.

    Raises: ConfigError: a sequence is longer than the cap.
    """
    if group_of is not None and len(group_of) != len(sequences):
        raise ValueError(f"{len(group_of)} groups for {len(sequences)} sequences: one for each is needed")
    for sequence in sequences:
        if sequence.num_tokens > max_tokens:
            raise ConfigError(
                f"sequence {sequence.id} has {sequence.num_tokens} tokens, more than the cap of {max_tokens} "
                "(trainer.max_tokens_per_micro_batch); raise the cap, or shorten data.max_seconds or "
                "rollout.sampling.max_new_tokens"
            )
    weights: list[np.ndarray] = [np.empty(0)] * len(sequences)
    shares = [0.0] * len(sequences)
    steps: list[OptimizerStep] = []
    for members in _deal(group_of or [s.id for s in sequences], mini_batches):
        lengths = [sequences[i].num_tokens for i in members]
        actions = [sequences[i].num_actions for i in members]
        for i, weight in zip(members, token_weights(actions, normalizer, constant_length), strict=True):
            weights[i] = weight
            shares[i] = float(sequences[i].num_actions > 0) / max(1, sum(n > 0 for n in actions))
        bins = pack(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
        ranks = tuple(
            tuple(MicroBatch(tuple(members[i] for i in bins_of_rank)) for bins_of_rank in rank) for rank in bins
        )
        steps.append(OptimizerStep(ranks))
    steps = steps * epochs
    shares = tuple(shares)
    return Plan(tuple(sequences), tuple(weights), shares, tuple(steps), max_tokens, _digest(sequences, weights, steps))


def _deal(groups: Sequence[str], mini_batches: int) -> list[list[int]]:
    """Indices of each optimizer step: groups in order of appearance, as evenly as whole groups allow."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    ordered = list(members.values())
    borders = [round(len(ordered) * k / mini_batches) for k in range(mini_batches + 1)]
    parts = [ordered[a:b] for a, b in pairwise(borders)]
    return [[i for group in part for i in group] for part in parts]


def _digest(
    sequences: Sequence[TrainingSequence], weights: Sequence[np.ndarray], steps: Sequence[OptimizerStep]
) -> str:
    digest = hashlib.sha256()
    for sequence, weight in zip(sequences, weights, strict=True):
        digest.update(f"{sequence.id}\0{sequence.num_tokens}\0{sequence.num_actions}\0".encode())
        digest.update(np.ascontiguousarray(weight, dtype=np.float64).tobytes())
    for step in steps:
        digest.update(repr([[m.sequences for m in rank] for rank in step.ranks]).encode())
    return digest.hexdigest()
