"""READ FIRST. One step: prompts -> rollouts -> scores -> advantages -> plan -> update -> weight commit.

Two short loops over the same parts: ``run`` learns from scored samples, ``run_supervised`` from data sets (ADR 3, 12).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skirl.lessons import Lesson
from skirl.measure import measure, measure_supervised
from skirl.protocols import Collector, PromptSource, Record, StepEnd, Trainer, WeightCommit
from skirl.records import Ratio
from skirl.step import Method
from skirl.tracking.ledger import Ledger
from skirl.tracking.tracker import Tracker

__all__ = ["Parts", "SupervisedParts", "run", "run_supervised"]


@dataclass(frozen=True)
class Parts:
    """What a reinforcement-learning run is made of; wired by ``assemble``.

    Attributes:
        collect: takes prompts, samples and scores a group of each, and settles in the ledger what is not trained on.
        max_tokens: hard cap of a micro-batch. prompts_per_step: groups that a step trains on.
        record: keeps the step's rollouts, before the update, so that they are there if it fails.
        end_of_step: evaluation where it is due; returns metrics.
        keep: checkpoint and export where they are due; last, for a run that goes on does not log the step again.
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
    keep: Callable[[int], None]
    max_tokens: int
    prompts_per_step: int


def run(parts: Parts, steps: range) -> None:
    """Trains on sampled, scored responses; a step that cannot be trained on raises with the reason."""
    for step in steps:
        collected = parts.collect(step, parts.prompts, parts.prompts_per_step)  # engines and rewards overlap
        with parts.tracker.phase("prepare"):
            batch = parts.method.prepare(collected.kept, parts.trainer)  # log-probs, values, advantages
            plan = parts.method.plan(batch, num_ranks=parts.trainer.num_ranks, max_tokens=parts.max_tokens)
        parts.record(step + 1, collected.scored, batch.sequences)
        roles = parts.method.roles(step)  # the policy, the critic beside it, or the critic alone
        with parts.tracker.phase("update"):
            report = parts.trainer.update(plan, (step + 1) * parts.prompts_per_step, roles)  # raises if not finite
        committed: Mapping[str, Ratio] = {}
        if "policy" in roles:
            parts.method.adapt(batch)
            with parts.tracker.phase("commit"):
                committed = parts.weights.commit(report.policy_version)
        parts.ledger.trained(collected.key(s.id) for s in batch.sequences)
        parts.ledger.check(idle=True)
        metrics = {**measure(collected, batch, report), **committed, **parts.ledger.metrics()}
        metrics["data/consumed_prompts"] = Ratio(parts.prompts.num_taken, 1)
        metrics |= parts.end_of_step(step + 1)
        parts.tracker.log(step + 1, metrics)
        parts.keep(step + 1)


@dataclass(frozen=True)
class SupervisedParts:
    """What a run that learns from a data set is made of.

    Attributes:
        lesson: makes rows into training sequences and these into a plan: references, pairs, labels, a teacher's words.
        batch_size: rows a step.
    """

    prompts: PromptSource
    lesson: Lesson
    trainer: Trainer
    weights: WeightCommit
    tracker: Tracker
    end_of_step: StepEnd
    keep: Callable[[int], None]
    max_tokens: int
    batch_size: int


def run_supervised(parts: SupervisedParts, steps: range) -> None:
    """Trains on what rows say; an optimizer step a step."""
    for step in steps:
        with parts.tracker.phase("prepare"):
            learned = parts.lesson.prepare(f"step {step}", parts.prompts.take(parts.batch_size), parts.trainer)
            plan = parts.lesson.plan(learned.sequences, num_ranks=parts.trainer.num_ranks, max_tokens=parts.max_tokens)
        with parts.tracker.phase("update"):
            report = parts.trainer.update(plan, (step + 1) * parts.batch_size)
        committed = parts.weights.commit(report.policy_version)
        metrics = {**measure_supervised(report), **learned.metrics, **committed}
        metrics["data/consumed_prompts"] = Ratio(parts.prompts.num_taken, 1)
        metrics |= parts.end_of_step(step + 1)
        parts.tracker.log(step + 1, metrics)
        parts.keep(step + 1)
