"""What is learned from data sets: rows as training sequences, with the streams that their loss needs; then plans.

rows -> examples, rendered once before anything starts -> the sequences of a step (+ reference log-probs, + KTO's
baseline; on-policy: sampled now) -> plan. The offline counterpart of ``step/``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from skirl.errors import ConfigError
from skirl.planning.schedule import make_plan, scoring_plan
from skirl.prompts.conversation import Conversation, Turns
from skirl.prompts.preference import Labelled, Pair
from skirl.prompts.steps import Steps
from skirl.prompts.validate import TooManyTokens
from skirl.protocols import Trainer
from skirl.records import Plan, Preference, Prompt, Ratio, TrainingSequence
from skirl.rollouts.render import Rendered, Renderer

__all__ = ["Example", "ExampleMaker", "Form", "Learned", "Lesson", "check_mismatched", "score_statistics"]

MAX_SCORED_PAIRS = 2048
"""Pairs whose scores make up a reward model's mean and standard deviation."""


@dataclass(frozen=True, slots=True)
class Example:
    """A row to learn from: of a pair, the chosen sequence and then the rejected one."""

    prompt: Prompt
    sequences: tuple[TrainingSequence, ...]


class ExampleMaker:
    """Makes examples of parsed rows; each raises DataError for a row that cannot be used.

    Args:
        end_ids: ids that may end a response.
        max_tokens: what a micro-batch holds; the two sequences of a pair share one.
    """

    def __init__(self, renderer: Renderer, *, end_ids: Sequence[int], max_tokens: int) -> None:
        self._renderer, self._end_ids, self._max_tokens = renderer, tuple(end_ids), max_tokens

    def conversation(self, row: Conversation, turns: Literal["all", "last"]) -> Example:
        """Every answer of a conversation, or the last one."""
        learned = row.turns
        first = 0
        if turns == "last":
            first = max(i for i, turn in enumerate(learned) if turn["role"] == "assistant")
            learned = learned[: first + 1]
        prompt = self._renderer.prompt(row.row)
        return self._example(prompt, [self._sequence(prompt.id, learned, first, row.row.where)])

    def prompt(self, row: Conversation, budget: int) -> Example:
        """A prompt alone; the policy will answer it with up to so many tokens."""
        return self._example(self._renderer.prompt(row.row), [], budget)

    def pair(self, row: Pair, *, at: Literal["all", "last"]) -> Example:
        """Both responses of a pair: all that the assistant wrote, or the last token alone, where a score is read."""
        prompt = self._renderer.prompt(row.row)
        made = []
        for name, turns in (("chosen", row.chosen), ("rejected", row.rejected)):
            sequence = self._response(f"{prompt.id}#{name}", row.row.messages, turns, row.row.where)
            if at == "last":
                sequence = replace(sequence, action_positions=sequence.action_positions[-1:])
            made.append(replace(sequence, preference=Preference(chosen=name == "chosen", margin=row.margin)))
        return self._example(prompt, made)

    def labelled(self, row: Labelled) -> Example:
        """A response that is desirable or not."""
        prompt = self._renderer.prompt(row.row)
        sequence = self._response(prompt.id, row.row.messages, row.response, row.row.where)
        return self._example(prompt, [replace(sequence, preference=Preference(chosen=row.label))])

    def steps(self, row: Steps, separator: str) -> Example:
        """A solution, with the last token of each step."""
        prompt = self._renderer.prompt(row.row)
        rendered = self._renderer.steps(row.row.messages, [step + separator for step in row.steps], row.row.where)
        sequence = _sequence(prompt.id, rendered)
        return self._example(prompt, [replace(sequence, labels=np.asarray(row.labels, dtype=np.float32))])

    def _response(self, name: str, prompt: Turns, response: Turns, where: str) -> TrainingSequence:
        return self._sequence(name, (*prompt, *response), len(prompt), where)

    def _sequence(self, name: str, turns: Turns, learn_from: int, where: str) -> TrainingSequence:
        rendered = self._renderer.conversation(turns, learn_from=learn_from, end_ids=self._end_ids, where=where)
        return _sequence(name, rendered)

    def _example(self, prompt: Prompt, sequences: Sequence[TrainingSequence], budget: int = 0) -> Example:
        size = sum(s.num_tokens for s in sequences) or len(prompt.input_ids) + budget
        if size > self._max_tokens:
            what = "chosen and rejected together have" if len(sequences) > 1 else "it has"
            what = what if sequences else "with rollout.sampling.max_new_tokens for its answer it has"
            raise TooManyTokens(f"{what} {size} tokens, and trainer.max_tokens_per_micro_batch is {self._max_tokens}")
        return Example(prompt, tuple(sequences))


def _sequence(name: str, rendered: Rendered) -> TrainingSequence:
    ids, positions = (np.asarray(part, dtype=np.int64) for part in (rendered.ids, rendered.positions))
    return TrainingSequence(id=name, input_ids=ids, action_positions=positions)


# -------------------------------------------------------------------------------------------------------------- lessons
@dataclass(frozen=True)
class Learned:
    """What a step trains on, and what was measured while it was made."""

    sequences: tuple[TrainingSequence, ...]
    metrics: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])


SequencesOf = Callable[[str, Sequence[Prompt]], list[TrainingSequence]]
"""(key of a step, prompts) -> their sequences, in order; the key is part of the seed where they are sampled."""


@dataclass(frozen=True)
class Form:
    """What a loss needs of its sequences.

    Attributes:
        normalizer: how token losses are weighted; "sequence" for losses of whole responses.
        paired: the two sequences of a row stay together.
        with_reference: they carry log-probs under the reference.
        with_baseline: they carry KTO's estimate of KL(policy, reference).
    """

    normalizer: Literal["token", "sequence"] = "token"
    paired: bool = False
    with_reference: bool = False
    with_baseline: bool = False


class Lesson:
    """How a command's rows become the plan of a step.

    Args:
        sequences_of: what is learned from each row.
        max_scoring_tokens: cap of a micro-batch in passes without gradient.
    """

    def __init__(self, sequences_of: SequencesOf, form: Form, *, max_scoring_tokens: int) -> None:
        self._sequences_of: SequencesOf = sequences_of
        self._form, self._max_scoring_tokens = form, max_scoring_tokens

    def prepare(self, key: str, prompts: Sequence[Prompt], trainer: Trainer) -> Learned:
        """The sequences of these rows, complete."""
        sequences = self._sequences_of(key, prompts)
        if self._form.with_reference:
            found = self._logprobs(sequences, trainer, "reference")
            sequences = [replace(s, reference_logprobs=r) for s, r in zip(sequences, found, strict=True)]
        if not self._form.with_baseline:
            return Learned(tuple(sequences))
        baseline = self._baseline(sequences, trainer)
        done = [
            replace(s, preference=replace(s.preference, baseline=baseline))
            for s in sequences
            if s.preference is not None
        ]
        return Learned(tuple(done), {"dpo/kl_baseline": Ratio(baseline, 1)})

    def plan(self, sequences: Sequence[TrainingSequence], *, num_ranks: int, max_tokens: int) -> Plan:
        """One optimizer step over these sequences."""
        return make_plan(
            sequences,
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            normalizer=self._form.normalizer,
            unit_of=[s.id.rpartition("#")[0] for s in sequences] if self._form.paired else None,
        )

    def evaluate(self, key: str, prompts: Sequence[Prompt], trainer: Trainer) -> dict[str, Ratio]:
        """The loss of held-out rows by the current weights, all of them as one batch; and the share judged right,
        where there is such a thing.
        """
        learned = self.prepare(key, prompts, trainer)
        plan = self.plan(learned.sequences, num_ranks=trainer.num_ranks, max_tokens=self._max_scoring_tokens)
        found = trainer.evaluate(plan)
        right = [ratio for name, ratio in found.items() if name.endswith("/accuracy")]
        return {"loss": found["loss"], **({"accuracy": right[0]} if right else {})}

    def _logprobs(
        self, sequences: Sequence[TrainingSequence], trainer: Trainer, role: Literal["policy", "reference"]
    ) -> list[np.ndarray]:
        plan = scoring_plan(sequences, num_ranks=trainer.num_ranks, max_tokens=self._max_scoring_tokens)
        return trainer.logprobs(plan, role)

    def _baseline(self, sequences: Sequence[TrainingSequence], trainer: Trainer) -> float:
        """max(0, mean of log pi(y') - log pi_ref(y')), y' the next row's response to each row's prompt; float64.

        Source: arXiv:2402.01306, section 4.1: the KL is estimated from mismatched pairs of the batch, without gradient.
        """
        mismatched = [_mismatched(s, t) for s, t in zip(sequences, [*sequences[1:], sequences[0]], strict=True)]
        policy, reference = (self._logprobs(mismatched, trainer, role) for role in ("policy", "reference"))
        sums = [p.astype(np.float64).sum() - r.astype(np.float64).sum() for p, r in zip(policy, reference, strict=True)]
        return max(0.0, float(np.mean(sums)))


def _mismatched(prompt: TrainingSequence, response: TrainingSequence) -> TrainingSequence:
    """The prompt of the one with the response of the other."""
    own, start = int(prompt.action_positions[0]), int(response.action_positions[0])
    return TrainingSequence(
        id=f"{prompt.id}~{response.id}",
        input_ids=np.concatenate([prompt.input_ids[:own], response.input_ids[start:]]),
        action_positions=response.action_positions - start + own,
    )


def check_mismatched(examples: Sequence[Example], max_tokens: int) -> None:
    """Raises ConfigError where the longest prompt with the longest response is more than a micro-batch holds."""
    sequences = [s for example in examples for s in example.sequences]
    if not sequences:
        return
    longest = max(sequences, key=lambda s: int(s.action_positions[0]))
    widest = max(sequences, key=lambda s: s.num_tokens - int(s.action_positions[0]))
    prompt, response = int(longest.action_positions[0]), widest.num_tokens - int(widest.action_positions[0])
    if prompt + response > max_tokens:
        raise ConfigError(
            f"kto scores each prompt with the response of another row: the prompt of {longest.id} ({prompt} tokens) "
            f"and the response of {widest.id} ({response}) need {prompt + response}, and a micro-batch holds "
            f"{max_tokens}: raise trainer.max_tokens_per_micro_batch (or max_tokens_per_scoring_batch), or leave "
            "such rows out"
        )


def score_statistics(examples: Sequence[Example], trainer: Trainer, max_tokens: int) -> tuple[float, float]:
    """(mean, standard deviation) of the reward model's scores of both responses, over evenly spaced pairs; float64."""
    step = -(-len(examples) // MAX_SCORED_PAIRS)
    sequences = [s for example in examples[::step] for s in example.sequences]
    plan = scoring_plan(sequences, num_ranks=trainer.num_ranks, max_tokens=max_tokens)
    scores = np.concatenate(trainer.logprobs(plan, "policy")).astype(np.float64)
    return float(scores.mean()), float(scores.std())
