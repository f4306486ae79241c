"""Training sequences to a plan: who runs what, when, and with which weight a token. Pure; ranks agree on its hash.

sequences -> units (pairs) -> optimizer steps (whole groups) -> micro-batches (hard cap) -> ranks (equal counts)
          -> weights -> hash
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

__all__ = ["make_plan", "scoring_plan"]

Unit = list[int]
"""Indices of sequences that stay together, in order."""


def make_plan(
    sequences: Sequence[TrainingSequence],
    *,
    num_ranks: int,
    max_tokens: int,
    normalizer: Literal["token", "sequence", "constant"],
    constant_length: int | None = None,
    mini_batches: int = 1,
    group_of: Sequence[str] | None = None,
    unit_of: Sequence[str] | None = None,
    epochs: int = 1,
    kl_coef: float = 0.0,
) -> Plan:
    """The complete schedule of one batch.

    Args:
        sequences: each is trained on exactly once.
        num_ranks: data-parallel ranks; all get the same number of micro-batches, empty ones where short.
        max_tokens: hard cap of a micro-batch, tokens.
        normalizer, constant_length: how token losses are weighted, over each optimizer step.
        mini_batches: optimizer steps; sequences are dealt out by whole groups, in order.
        group_of: group of each sequence; None makes each unit its own group.
        unit_of: unit of each sequence: those of one unit stay adjacent, in order, in one micro-batch (the two of a
            pair); None makes each sequence its own unit.
        epochs: passes over the batch; each repeats the same optimizer steps.
        kl_coef: factor of the KL to the reference in the loss.

    Raises: ConfigError: a unit is longer than the cap.
    """
    units = _together(unit_of, len(sequences), "units")
    groups = _groups_of_units(units, units if group_of is None else _together(group_of, len(sequences), "groups"))
    for unit in units:
        _check_cap([sequences[i] for i in unit], max_tokens)
    weights: list[np.ndarray] = [np.empty(0)] * len(sequences)
    shares = [0.0] * len(sequences)
    steps: list[OptimizerStep] = []
    for members in _deal(groups, mini_batches):
        inside = [i for unit in members for i in unit]
        actions = [sequences[i].num_actions for i in inside]
        for i, weight in zip(inside, token_weights(actions, normalizer, constant_length), strict=True):
            weights[i] = weight
            shares[i] = float(sequences[i].num_actions > 0) / max(1, sum(n > 0 for n in actions))
        lengths = [sum(sequences[i].num_tokens for i in unit) for unit in members]
        packed = pack(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
        steps.append(
            OptimizerStep(
                tuple(tuple(MicroBatch(tuple(i for u in row for i in members[u])) for row in rank) for rank in packed)
            )
        )
    steps = steps * epochs
    digest = _digest(sequences, weights, steps, kl_coef)
    return Plan(tuple(sequences), tuple(weights), tuple(shares), tuple(steps), max_tokens, digest, kl_coef)


def scoring_plan(sequences: Sequence[TrainingSequence], *, num_ranks: int, max_tokens: int) -> Plan:
    """The schedule of a pass that scores sequences and weighs nothing; arguments as in ``make_plan``."""
    return make_plan(sequences, num_ranks=num_ranks, max_tokens=max_tokens, normalizer="token")


def _together(names: Sequence[str] | None, count: int, what: str) -> list[list[int]]:
    """Indices of equal names, in order of appearance; without names each alone."""
    if names is None:
        return [[i] for i in range(count)]
    if len(names) != count:
        raise ValueError(f"{len(names)} {what} for {count} sequences: one for each is needed")
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    return list(members.values())


def _groups_of_units(units: Sequence[Unit], groups: Sequence[Sequence[int]]) -> list[list[Unit]]:
    """The units of each group, in the order of their first sequences."""
    group_of = {i: number for number, group in enumerate(groups) for i in group}
    result: list[list[Unit]] = [[] for _ in groups]
    for unit in units:
        if len({group_of[i] for i in unit}) > 1:
            raise ValueError(f"the unit of sequences {unit} is spread over several groups")
        result[group_of[unit[0]]].append(unit)
    return result


def _check_cap(unit: Sequence[TrainingSequence], max_tokens: int) -> None:
    size = sum(s.num_tokens for s in unit)
    if size <= max_tokens:
        return
    names = " + ".join(f"{s.id} ({s.num_tokens})" for s in unit)
    what = f"sequence {unit[0].id} has" if len(unit) == 1 else f"sequences {names}, which must share a row, have"
    raise ConfigError(
        f"{what} {size} tokens, more than the cap of {max_tokens} (trainer.max_tokens_per_micro_batch); raise the cap, "
        "or shorten data.max_seconds or rollout.sampling.max_new_tokens"
    )


def _deal(groups: Sequence[list[Unit]], mini_batches: int) -> list[list[Unit]]:
    """Units of each optimizer step: groups in order, as evenly as whole groups allow."""
    borders = [round(len(groups) * k / mini_batches) for k in range(mini_batches + 1)]
    return [[unit for group in groups[a:b] for unit in group] for a, b in pairwise(borders)]


def _digest(
    sequences: Sequence[TrainingSequence],
    weights: Sequence[np.ndarray],
    steps: Sequence[OptimizerStep],
    kl_coef: float,
) -> str:
    digest = hashlib.sha256(f"{float(kl_coef)!r}\0".encode())
    for sequence, weight in zip(sequences, weights, strict=True):
        name = f"{sequence.id}\0{sequence.num_tokens}\0{sequence.num_actions}\0"
        digest.update(name.encode("utf-8", "surrogatepass"))  # it may hold a file name that is not UTF-8
        digest.update(np.ascontiguousarray(weight, dtype=np.float64).tobytes())
    for step in steps:
        digest.update(repr([[m.sequences for m in rank] for rank in step.ranks]).encode())
    return digest.hexdigest()
