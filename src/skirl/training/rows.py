"""Plan + micro-batch -> tensors on a device: one packed row and its per-token streams."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from skirl.models.policy import PackedRow
from skirl.records import MicroBatch, Plan, TrainingSequence

__all__ = ["Streams", "make_row"]


@dataclass(frozen=True)
class Streams:
    """What the objective sees beside the policy's log-probs; all [A] float32, None where the method has no use for it.

    ``weights`` sum over the optimizer step as the normaliser says; the loss is sum(weights * token losses).
    """

    weights: Tensor
    advantages: Tensor | None
    old_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    reference_logprobs: Tensor | None


DUMMY = TrainingSequence("dummy", np.zeros(2, dtype=np.int64), np.ones(1, dtype=np.int64))
"""Stands in for an empty micro-batch: two tokens, one action token of weight 0."""


def _dummy(plan: Plan) -> TrainingSequence:
    """The dummy with zeros for every stream that the plan's sequences have: objectives see the same streams."""
    if not plan.sequences:
        return DUMMY
    like, zeros = plan.sequences[0], np.zeros(1, dtype=np.float32)
    return replace(
        DUMMY,
        advantages=None if like.advantages is None else np.zeros(1),
        old_logprobs=None if like.old_logprobs is None else zeros,
        rollout_logprobs=None if like.rollout_logprobs is None else zeros,
        reference_logprobs=None if like.reference_logprobs is None else zeros,
    )


def make_row(plan: Plan, micro_batch: MicroBatch, device: torch.device) -> tuple[PackedRow, Streams]:
    """The packed row of a micro-batch, and its streams in the same order.

    An empty micro-batch becomes a dummy whose streams are zeros of weight 0, so that every rank runs the same passes.
    """
    members = [plan.sequences[i] for i in micro_batch.sequences] or [_dummy(plan)]
    weights = [plan.weights[i] for i in micro_batch.sequences] or [np.zeros(1)]
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
    streams = Streams(
        weights=_stream(weights, device),
        advantages=_optional(plan, [s.advantages for s in members], device),
        old_logprobs=_optional(plan, [s.old_logprobs for s in members], device),
        rollout_logprobs=_optional(plan, [s.rollout_logprobs for s in members], device),
        reference_logprobs=_optional(plan, [s.reference_logprobs for s in members], device),
    )
    return row, streams


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
