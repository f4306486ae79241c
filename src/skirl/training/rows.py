"""Plan + micro-batch -> tensors on a device: one packed row and its per-token streams."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.models.policy import PackedRow
from skirl.records import MicroBatch, Plan, Preference, TrainingSequence

__all__ = ["Streams", "make_row"]


@dataclass(frozen=True)
class Streams:
    """What the objective sees beside the model's output; [A] float32, None where the method has no use for it.

    A sequence never spans micro-batches, so that sums over ``segments`` are whole; of a pair of a comparison both are
    here, chosen first.

    Attributes:
        weights: they sum over the optimizer step as the normaliser says; the loss is sum(weights * token losses).
        segments: [A] int64 sequence of each action token, 0 to S - 1, rising.
        sequence_weights: [S] 1 / (sequences of the optimizer step), 0 for dummies.
        selected: [A] bool. chosen, margins, baselines: [S], of comparisons (bool, float32, float32).
        kl_coef: factor of the KL to the reference in the loss.
        The rest: as in ``records.TrainingSequence``.
    """

    weights: Tensor
    segments: Tensor
    sequence_weights: Tensor
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    corrections: Tensor | None = None
    selected: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    labels: Tensor | None = None
    chosen: Tensor | None = None
    margins: Tensor | None = None
    baselines: Tensor | None = None
    kl_coef: float = 0.0

    @property
    def num_segments(self) -> int:
        """S, the sequences of the row."""
        return len(self.sequence_weights)


DUMMY = TrainingSequence("dummy", np.zeros(2, dtype=np.int64), np.ones(1, dtype=np.int64))
"""Stands in for an empty micro-batch: two tokens, one action token of weight 0."""

FLOAT_STREAMS = (
    "advantages",
    "old_logprobs",
    "rollout_logprobs",
    "reference_logprobs",
    "corrections",
    "values",
    "returns",
    "labels",
)


def _dummies(plan: Plan) -> list[TrainingSequence]:
    """Dummies with zeros for every stream that the plan's sequences have: objectives see the same streams.

    One, or a pair where the plan's sequences are compared.
    """
    if not plan.sequences:
        return [DUMMY]
    like = plan.sequences[0]
    zeros: dict[str, Any] = {n: np.zeros(1, dtype=np.float32) for n in FLOAT_STREAMS if getattr(like, n) is not None}
    if like.selected is not None:
        zeros["selected"] = np.zeros(1, dtype=bool)
    if like.preference is None:
        return [replace(DUMMY, **zeros)]
    pair = [replace(DUMMY, preference=Preference(chosen=chosen), **zeros) for chosen in (True, False)]
    return pair


def make_row(plan: Plan, micro_batch: MicroBatch, device: torch.device) -> tuple[PackedRow, Streams]:
    """The packed row of a micro-batch, and its streams in the same order.

    An empty micro-batch becomes a dummy whose streams are zeros of weight 0, so that every rank runs the same passes.
    """
    members = [plan.sequences[i] for i in micro_batch.sequences] or _dummies(plan)
    weights = [plan.weights[i] for i in micro_batch.sequences] or [np.zeros(1)] * len(members)
    shares = [plan.sequence_weights[i] for i in micro_batch.sequences] or [0.0] * len(members)
    lengths = [s.num_tokens for s in members]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    actions = np.concatenate([s.action_positions + a for s, a in zip(members, starts, strict=False)])
    ids = np.concatenate([s.input_ids for s in members])
    runs = [np.arange(a + x, a + x + n) for s, a in zip(members, starts, strict=False) for x, n in s.media_spans]
    row = PackedRow(
        input_ids=_send(ids, device),
        position_ids=_send(np.concatenate([np.arange(n) for n in lengths]), device),
        cu_seqlens=_send(starts.astype(np.int32), device),
        longest=max(lengths),
        predictors=_send(actions - 1, device),
        targets=_send(ids[actions], device),
        clips=tuple(media for s in members for media in s.media),
        placeholders=_send(np.concatenate(runs) if runs else np.empty(0, dtype=np.int64), device),
    )
    floats = {name: _optional(plan, [getattr(s, name) for s in members], device) for name in FLOAT_STREAMS}
    streams = Streams(
        weights=_stream(weights, device),
        segments=_send(np.repeat(np.arange(len(members)), [s.num_actions for s in members]), device),
        sequence_weights=_stream([np.asarray(shares)], device),
        selected=_selected(members, device),
        kl_coef=plan.kl_coef,
        **floats,
        **_comparisons(members, device),
    )
    return row, streams


def _selected(members: list[TrainingSequence], device: torch.device) -> Tensor | None:
    present = [s.selected for s in members if s.selected is not None]
    return _send(np.concatenate(present), device) if present else None


def _comparisons(members: list[TrainingSequence], device: torch.device) -> dict[str, Tensor]:
    """chosen, margins, baselines [S], where the sequences are compared."""
    found = [s.preference for s in members if s.preference is not None]
    if not found:
        return {}
    assert len(found) == len(members), "a micro-batch holds comparisons or none"
    return {
        "chosen": _send(np.asarray([p.chosen for p in found]), device),
        "margins": _stream([np.asarray([p.margin for p in found])], device),
        "baselines": _stream([np.asarray([p.baseline for p in found])], device),
    }


def _stream(parts: list[np.ndarray], device: torch.device) -> Tensor:
    return _send(np.concatenate(parts).astype(np.float32), device)


def _send(values: np.ndarray, device: torch.device) -> Tensor:
    """On the device; from page-locked memory, so that the host goes on while the device still works on the last row."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _optional(plan: Plan, parts: list[np.ndarray | None], device: torch.device) -> Tensor | None:
    """One stream, if the sequences have it."""
    present = [p for p in parts if p is not None]
    if not present:
        return None
    assert len(present) == len(parts), f"plan {plan.hash[:8]}: a stream is missing in part of a micro-batch"
    return _stream(present, device)
