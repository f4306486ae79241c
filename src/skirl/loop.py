"""READ FIRST. One step: prompts -> rollouts -> scores -> advantages -> plan -> update -> weight commit.

Two short loops over the same parts: ``run`` learns from scored samples, ``run_supervised`` from references (ADR 0003).
"""

from collections.abc import Callable
from dataclasses import dataclass

from skirl.measure import measure, measure_supervised
from skirl.planning.schedule import make_plan
from skirl.protocols import Collector, PromptSource, Record, StepEnd, Trainer, WeightCommit
from skirl.records import Prompt, Ratio, TrainingSequence
from skirl.step import Method
from skirl.tracking.ledger import Ledger
from skirl.tracking.tracker import Tracker

__all__ = ["Parts", "SupervisedParts", "run", "run_supervised"]


@dataclass(frozen=True)
class Parts:
    """What a reinforcement-learning run is made of; wired by ``assemble``.

    Attributes:
        collect: samples and scores one group a prompt, and settles in the ledger what gets no score.
        max_tokens: hard cap of a micro-batch. prompts_per_step: prompts a step.
        record: keeps the step's rollouts, before the update, so that they are there if it fails.
        end_of_step: evaluation, checkpoint and export where they are due; returns metrics.
    """

    prompts: PromptSource
    collect: Collector
    method: Method
    trainer: Trainer
    weights: WeightCommit
    ledger: Ledger
    tracker: Tracker
    record: Record
    end_of_step: StepEnd
    max_tokens: int
    prompts_per_step: int


def run(parts: Parts, steps: range) -> None:
    """Trains on sampled, scored responses; a step that cannot be trained on raises with the reason."""
    for step in steps:
        prompts = parts.prompts.take(parts.prompts_per_step)
        collected = parts.collect(step, prompts)  # engines and rewards overlap; keyed, not ordered
        with parts.tracker.phase("prepare"):
            batch = parts.method.prepare(collected.kept, parts.trainer)  # log-probs, advantages
            plan = parts.method.plan(batch, num_ranks=parts.trainer.num_ranks, max_tokens=parts.max_tokens)
        parts.record(step + 1, collected.scored, batch.sequences)
        with parts.tracker.phase("update"):
            report = parts.trainer.update(plan, (step + 1) * parts.prompts_per_step)  # raises if not finite
        with parts.tracker.phase("commit"):
            committed = parts.weights.commit(report.policy_version)
        parts.ledger.trained(collected.key(s.id) for s in batch.sequences)
        parts.ledger.check(idle=True)
        metrics = {**measure(collected, batch, report), **committed, **parts.ledger.metrics()}
        metrics["data/consumed_prompts"] = Ratio((step + 1) * parts.prompts_per_step, 1)
        metrics |= parts.end_of_step(step + 1)
        parts.tracker.log(step + 1, metrics)


@dataclass(frozen=True)
class SupervisedParts:
    """What a supervised run is made of. ``sequence`` makes a prompt's answer into a training sequence."""

    prompts: PromptSource
    sequence: Callable[[Prompt], TrainingSequence]
    trainer: Trainer
    weights: WeightCommit
    tracker: Tracker
    end_of_step: StepEnd
    max_tokens: int
    batch_size: int


def run_supervised(parts: SupervisedParts, steps: range) -> None:
    """Trains on reference answers, token mean."""
    for step in steps:
        sequences = [parts.sequence(prompt) for prompt in parts.prompts.take(parts.batch_size)]
        plan = make_plan(sequences, num_ranks=parts.trainer.num_ranks, max_tokens=parts.max_tokens, normalizer="token")
        with parts.tracker.phase("update"):
            report = parts.trainer.update(plan, (step + 1) * parts.batch_size)
        committed = parts.weights.commit(report.policy_version)
        metrics = {**measure_supervised(report), **committed}
        metrics["data/consumed_prompts"] = Ratio((step + 1) * parts.batch_size, 1)
        metrics |= parts.end_of_step(step + 1)
        parts.tracker.log(step + 1, metrics)
