"""Frozen records between the stages. Nothing here computes beyond adding sums; nothing here imports a heavy package.

Shapes in comments: T action tokens of a rollout, P prompt tokens, S sequences, N packed tokens of a micro-batch.
Arrays are numpy, so that records cross process borders without torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "CommitReport",
    "FinishReason",
    "Group",
    "Media",
    "MicroBatch",
    "OptimizerStep",
    "Plan",
    "Preference",
    "Prompt",
    "Ratio",
    "Request",
    "RewardSample",
    "RewardText",
    "Role",
    "Rollout",
    "Row",
    "Sampling",
    "Score",
    "ScoreFailure",
    "ScoredGroup",
    "TensorSpec",
    "TrainingSequence",
    "UpdateReport",
    "sum_ratios",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

FinishReason = Literal["stop", "length", "abort"]
Role = Literal["policy", "reference", "critic"]


@dataclass(frozen=True, slots=True)
class Media:
    """A reference to one audio clip; samples are decoded where they are needed, never carried.

    Attributes:
        path: absolute file path; for clips that live in a table, a name used in messages only.
        start_s: start of the segment inside the file, seconds.
        duration_s: length of the segment, seconds; None is the rest of the file.
        data: the encoded file (wav, flac, ogg, ...) when there is none on disk.
    """

    path: str
    start_s: float = 0.0
    duration_s: float | None = None
    data: bytes | None = field(default=None, repr=False)

    @property
    def key(self) -> str:
        """Equal keys are equal clips; used by feature caches."""
        end = "" if self.duration_s is None else f"{self.duration_s:.6f}"
        return f"{self.path}@{self.start_s:.6f}+{end}"


@dataclass(frozen=True, slots=True)
class Row:
    """The canonical row that every manifest format becomes, audio or text.

    Attributes:
        id: unique in its source.
        source: name of the data source in the recipe (``data.train.<source>``).
        media: the clips, in order; empty for text rows.
        seconds: total length of the clips before padding; read from the headers.
        text: reference without any tag; empty only for rows marked as no speech; None where there is none.
        messages: for text rows the chat turns {"role", "content"} before the answer.
        language: full English name ("English", "Chinese", ...) or None if unknown.
        context: free text or hot words for the system turn.
        keywords: words the transcript should get right.
        no_speech: the row is marked as holding no speech, so an empty reference is right.
        extra: every other column of the row, untouched; it reaches the reward function.
        where: "file:line" for messages.
    """

    id: str
    source: str
    media: tuple[Media, ...] = ()
    seconds: float = 0.0
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    language: str | None = None
    context: str = ""
    keywords: tuple[str, ...] = ()
    no_speech: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    where: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, rendered to token ids.

    Attributes:
        id: unique in the run: "source/row id".
        source: name of the data source.
        input_ids: [P] with every clip already expanded to its run of placeholder ids.
        compact_ids: the same prompt with ONE placeholder a clip, as vLLM wants it.
        media: clips in the order of their placeholder runs.
        reference: reference text, None where there is none.
        language: language of the reference, if known.
        answer: the text a perfect policy would write (supervised target), without the end token.
        row: every column of the data row, canonical names first; reaches the reward function.
        seconds: total audio length, seconds.
    """

    id: str
    source: str
    input_ids: tuple[int, ...]
    compact_ids: tuple[int, ...]
    media: tuple[Media, ...]
    reference: str | None
    language: str | None
    answer: str | None
    row: Mapping[str, Any]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling distribution: one frozen object used by the engine and by the trainer's log-probs.

    Order of operations, as in vLLM: banned ids, temperature, min-p, top-k, top-p, renormalise.

    Attributes:
        temperature: > 0 samples, 0 is greedy (log-probs are then those of temperature 1).
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 keeps all.
        max_new_tokens: budget of action tokens.
        stop_ids: token ids that end a response; the stop token is the last action token.
        banned_ids: token ids that are never sampled (audio placeholders).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample. ``seed`` is keyed by (run seed, step, prompt id, sample index), not by order."""

    prompt: Prompt
    sample_index: int
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response: token ids and log-probs as the engine made them, which are the truth.

    Attributes:
        prompt_id, sample_index: the key; a lost sibling changes the group's size and nothing else.
        prompt_ids: [P] with expanded placeholders.
        response_ids: [T] action tokens, the stop token included when there is one.
        logprobs: [T] float32, under the sampling distribution.
        versions: [T] policy version that sampled each token.
        finish_reason: "stop", "length" (budget used up) or "abort".
        text: the raw response text, tags and repetitions kept, stop token left out.
        turn_ends: number of action tokens after each turn, rising, the last is T; empty is one turn.
    """

    prompt_id: str
    sample_index: int
    prompt_ids: Ints
    response_ids: Ints
    logprobs: Floats
    versions: Ints
    finish_reason: FinishReason
    text: str
    turn_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a reward function sees of one rollout. Everything is plain Python; nothing needs torch.

    Attributes:
        id: prompt id. index: sample index in the group.
        text: raw response, tags and repetitions kept.
        transcript: the answer parsed out of it; language: the tag the policy wrote, None if it wrote none.
        response_ids: the action tokens. finish_reason: "stop" or "length".
        reference: the reference text. reference_language: its language, None if unknown.
        seconds: audio length. row: every column of the data row.
        messages: chat turns {"role", "content"} before the response; empty for audio rows.
        num_turns: turns of the response, 1 where it has one.
        scores: what services and reward models gave, by name; for the Python function.
    """

    id: str
    index: int
    text: str
    transcript: str
    language: str | None
    response_ids: tuple[int, ...]
    finish_reason: FinishReason
    reference: str | None
    reference_language: str | None
    seconds: float
    row: Mapping[str, Any]
    messages: tuple[Mapping[str, str], ...] = ()
    num_turns: int = 1
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RewardText:
    """What a local reward model reads: chat turns before the response, and the response's text."""

    messages: tuple[Mapping[str, str], ...]
    response: str


@dataclass(frozen=True, slots=True)
class ScoreFailure:
    """Why a rollout has no score.

    Attributes:
        kind: "raised", "timeout", "not_finite", "bad_type", "crashed" (the worker process died), "service" (an HTTP
            service gave no score), "too_long" (more tokens than a reward model takes at once).
        message: one line for the user; detail: traceback, may be empty.
    """

    kind: Literal["raised", "timeout", "not_finite", "bad_type", "crashed", "service", "too_long"]
    message: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """A value or a typed failure, never both.

    Attributes:
        total: what the sample is worth. parts: unweighted; they may differ between samples.
        turns: what each turn is worth, where the reward function scored turns; they sum to ``total``. Empty: the total
            belongs to the last action token.
    """

    total: float | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: ScoreFailure | None = None
    turns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group and one score for each of its rollouts, in the same order."""

    group: Group
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Preference:
    """A sequence's place in a comparison of whole responses.

    Of a pair, the chosen sequence comes first and the rejected one right after it, in one micro-batch
    (``make_plan(unit_of=...)``). Single labelled responses (KTO) stand alone.

    Attributes:
        chosen: the preferred one of a pair; a desirable response.
        margin: by how much, for losses with a margin.
        baseline: KTO's estimate of KL(policy, reference), the same for all responses of an optimizer step, nats.
    """

    chosen: bool
    margin: float = 0.0
    baseline: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One token sequence to train on: a rollout with its streams, or a supervised example.

    Attributes:
        id: "prompt id#sample index".
        input_ids: [L] prompt and response, placeholders expanded.
        action_positions: [T] positions in ``input_ids`` of the tokens that carry loss, rising, each >= 1.
        media: clips in the order of their placeholder runs. media_spans: [(start, length)] of the runs.
        advantages: [T] float64, or None for supervised rows.
        rollout_logprobs, old_logprobs, reference_logprobs: [T] float32 or None where the method has no use for them.
        corrections: [T] float64 factors of the policy loss for the gap between engine and trainer.
        selected: [T] bool, tokens that clip-cov or kl-cov treats apart.
        values, returns: [T] the critic's when the batch was made (float32), and what it is trained towards (float64).
        labels: [T] float32 targets in [0, 1] of a process reward model.
        preference: for losses that compare responses.
    """

    id: str
    input_ids: Ints
    action_positions: Ints
    media: tuple[Media, ...] = ()
    media_spans: tuple[tuple[int, int], ...] = ()
    advantages: Doubles | None = None
    rollout_logprobs: Floats | None = None
    old_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    corrections: Doubles | None = None
    selected: npt.NDArray[np.bool_] | None = None
    values: Floats | None = None
    returns: Doubles | None = None
    labels: Floats | None = None
    preference: Preference | None = None

    @property
    def num_tokens(self) -> int:
        """L, the tokens this sequence takes of a micro-batch."""
        return len(self.input_ids)

    @property
    def num_actions(self) -> int:
        """T, the tokens that carry loss."""
        return len(self.action_positions)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed into one row, as indices into ``Plan.sequences``; an empty one is a zero-weight dummy."""

    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """``ranks[r][m]``: micro-batch m of rank r; every rank has the same number of micro-batches."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def is_empty(self) -> bool:
        """No rank has a sequence."""
        return not any(micro_batch.sequences for rank in self.ranks for micro_batch in rank)


@dataclass(frozen=True, slots=True)
class Plan:
    """The complete schedule of one batch: who runs what, when, with which weight a token.

    Attributes:
        sequences: every sequence of the batch; each stands in exactly one micro-batch.
        weights: per sequence [T] float64 loss weights; they sum over an optimizer step as the normaliser says.
        sequence_weights: per sequence 1 / (sequences of its optimizer step that have an action token), else 0.
        steps: the optimizer steps, in order.
        max_tokens: the cap that no micro-batch exceeds.
        hash: of the schedule and the weights; ranks compare it before they start.
        kl_coef: factor of the KL to the reference in this step's loss; a controller may move it between steps.
    """

    sequences: tuple[TrainingSequence, ...]
    weights: tuple[Doubles, ...]
    sequence_weights: tuple[float, ...]
    steps: tuple[OptimizerStep, ...]
    max_tokens: int
    hash: str
    kl_coef: float = 0.0

    @property
    def num_ranks(self) -> int:
        """Ranks the plan was made for."""
        return len(self.steps[0].ranks)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric on the wire: sums that are divided once, at the end."""

    numerator: float
    denominator: float

    def __add__(self, other: "Ratio") -> "Ratio":
        """Sums of sums."""
        return Ratio(self.numerator + other.numerator, self.denominator + other.denominator)

    @property
    def value(self) -> float:
        """The mean; NaN where nothing was counted."""
        return self.numerator / self.denominator if self.denominator else float("nan")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did, summed over ranks and micro-batches.

    Attributes:
        policy_version: version of the new weights.
        losses: loss of each optimizer step, as the plan's weights define it.
        grad_norms: gradient norm of each optimizer step before clipping.
        learning_rates: rate used by each optimizer step.
        metrics: name -> sums.
        seconds: time of the update on the slowest rank.
    """

    policy_version: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    learning_rates: tuple[float, ...]
    metrics: Mapping[str, Ratio]
    seconds: float


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the model without its values.

    Attributes:
        name: as in the Hugging Face model; of tied tensors the first name alone.
        shape: of the whole tensor, however it is sharded.
        dtype: "float32", "bfloat16", ...: PyTorch's name without the prefix.
        trained: it changes between commits; False for frozen parameters and for buffers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a weight commit did.

    Attributes:
        version: what every engine holds now.
        transport: "shared_memory", "cuda_ipc", "nccl", "gloo"; "none" where engine and trainer share the weights.
        num_bytes: bytes of the tensors that were sent, counted once. num_buckets: messages that held them.
        whole: frozen tensors were sent too. seconds: wall time, caches invalidated.
    """

    version: int
    transport: str = "none"
    num_bytes: int = 0
    num_buckets: int = 0
    whole: bool = False
    seconds: float = 0.0


def sum_ratios(metrics: Iterable[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """Adds metrics name by name; a name may be missing anywhere."""
    result: dict[str, Ratio] = {}
    for named in metrics:
        for name, ratio in named.items():
            result[name] = result[name] + ratio if name in result else ratio
    return result
