"""Scores of rollouts and groups: the user's file and the library's terms, run in killable processes."""

import asyncio
import difflib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from skirl.config.schema import RewardConfig
from skirl.errors import ConfigError
from skirl.records import Group, Prompt, RewardSample, Rollout, Sampling, ScoredGroup
from skirl.rewards.combine import Combined, combine
from skirl.rewards.processes import Limits, Results, WorkerProcesses
from skirl.rewards.python_file import read
from skirl.rewards.worker import Setup, Term

__all__ = ["RewardPool"]

logger = logging.getLogger(__name__)

SAMPLES_BEFORE_UNSEEN = 256  # scored samples after which a weight whose part never came is reported


class RewardPool:
    """A ``Scorer``: scores groups by a user's Python file, library terms, or both.

    Each process loads the file once. A call that hangs or kills its process costs that call alone: the process is
    killed and replaced, and what it had not begun goes elsewhere. A sample-wise function is called once a sample, each
    with its own deadline, by whichever process is free, as soon as the sample is there; a group-wise one once a group.
    """

    def __init__(
        self, config: RewardConfig, to_samples: Callable[[Group], list[RewardSample]], *, output: Path | None = None
    ) -> None:
        """Reads the file; starts nothing.

        Args:
            config: the recipe's ``reward`` section.
            to_samples: what the reward sees of each rollout of a group, in order (the model family's answer parser).
            output: file that takes what the user's code prints; None is the driver's standard error.

        Raises:
            ConfigError: the file cannot be read, or a weight is set for something that takes none.
        """
        _check_weights(config)
        self._to_samples = to_samples
        self._weights = {**config.weights, **{name: term.weight for name, term in config.terms.items()}}
        self._notes = _Notes(frozenset(config.weights))
        self._by_group: bool | None = None
        """Whether the function takes a whole group; unknown until the file was loaded."""
        self._begun: dict[int, tuple[Rollout, Future[list[Results]]]] = {}
        """By identity of the rollout, which is kept so that no other takes its place."""
        terms = tuple(
            Term(name, term.kind, term.model_dump(exclude={"kind", "weight"})) for name, term in config.terms.items()
        )
        source = None if config.python is None else read(config.python)
        path = None if config.python is None else str(config.python)
        self._processes = WorkerProcesses(
            Setup(path, source, config.function, terms, config.timeout_s),
            Limits(config.num_workers, config.timeout_s, config.retries),
            output,
        )

    def start(self) -> None:
        """Starts the processes and loads the user's file in each; blocks until all are ready. Call it before training.

        Raises:
            ConfigError: the file cannot be loaded or has no fitting function; the message holds the user's traceback.
        """
        self._by_group = self._processes.start()

    def begin(self, prompt: Prompt, rollout: Rollout, sampling: Sampling) -> None:
        """Queues the call for one rollout of a group that is still being sampled; ``score`` awaits its result.

        Does nothing where the function takes whole groups, before the processes were started, and a second time.

        Raises:
            RewardError: the pool is closed, or the row holds what cannot be sent to a process.
        """
        if self._by_group is False and id(rollout) not in self._begun:
            self._begun[id(rollout)] = rollout, self._submit(Group(prompt, (rollout,), sampling))

    async def score(self, group: Group) -> ScoredGroup:
        """One score a rollout, in order: the weighted sum of its parts, or its typed failure.

        Never blocks the event loop, and may be awaited from another loop in every step. Starts the processes if
        ``start`` was not called.

        Raises:
            RewardError: the pool is closed, or a row holds what cannot be sent to a process.
        """
        if self._by_group is None:
            await asyncio.to_thread(self.start)
        indices = range(len(group.rollouts))
        begun = {i: self._begun.pop(id(group.rollouts[i])) for i in indices if id(group.rollouts[i]) in self._begun}
        rest = [i for i in indices if i not in begun]
        futures = [future for _, future in begun.values()]
        if rest:
            futures.append(self._submit(replace(group, rollouts=tuple(group.rollouts[i] for i in rest))))
        answers = await asyncio.gather(*map(asyncio.wrap_future, futures))
        flat = [result for answer in answers for call in answer for result in call]
        results = dict(zip([*begun, *rest], flat, strict=True))
        combined = combine([results[i] for i in indices], self._weights)
        self._notes.see(group.prompt.id, combined)
        return ScoredGroup(group, combined.scores)

    def _submit(self, group: Group) -> "Future[list[Results]]":
        samples = [replace(sample, row=dict(sample.row)) for sample in self._to_samples(group)]
        return self._processes.submit([samples] if self._by_group else [[sample] for sample in samples])

    def close(self) -> None:
        """Kills the processes. May be called twice."""
        self._notes.report_unseen()
        self._processes.close()


class _Notes:
    """Warnings that are given once a run."""

    def __init__(self, weighted: frozenset[str]) -> None:
        self._weighted = weighted
        self._seen: set[str] = set()
        self._num_scored = 0
        self._told_of_partial = False

    def see(self, prompt_id: str, combined: Combined) -> None:
        for score in combined.scores:
            self._seen |= score.parts.keys()
            self._num_scored += score.total is not None
        if combined.partial and not self._told_of_partial:
            self._told_of_partial = True
            logger.warning("%s", _partial_text(prompt_id, combined))
        if self._num_scored >= SAMPLES_BEFORE_UNSEEN:
            self.report_unseen()

    def report_unseen(self) -> None:
        for name in sorted(self._weighted - self._seen) if self._num_scored else ():
            near = difflib.get_close_matches(name, self._seen, n=1)
            logger.warning(
                "reward.weights.%s has had no effect: none of %d scored samples has a part of that name (parts: %s)%s",
                name,
                self._num_scored,
                ", ".join(sorted(self._seen)),
                f"; did you mean {near[0]}?" if near else ".",
            )
        if self._num_scored:
            self._weighted = frozenset()


def _partial_text(prompt_id: str, combined: Combined) -> str:
    scored = [index for index, score in enumerate(combined.scores) if score.parts]
    lines = []
    for name, having in list(combined.partial.items())[:5]:
        lacking = [index for index in scored if index not in having]
        lines.append(f"  {name!r} is in {_samples(having)}, not in {_samples(lacking)}")
    kept = ", ".join(combined.shared)
    counted = f"Totals of this group are made of what all its samples share: {kept}" if kept else "They share no part"
    return (
        f"reward parts differ between the samples of group {prompt_id}:\n" + "\n".join(lines) + f"\n{counted}. "
        "Parts that some lack are logged, and weigh nothing in such a group. Return the same names for each sample, "
        "with None for a part that does not apply. (Said once a run.)"
    )


def _samples(indices: "list[int] | tuple[int, ...]") -> str:
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"{'sample' if len(indices) == 1 else 'samples'} {shown}"


def _check_weights(config: RewardConfig) -> None:
    for name in config.weights:
        if name in config.terms:
            raise ConfigError(
                f"reward.weights.{name} and reward.terms.{name} name the same part: reward.weights is for parts of the "
                f"Python function; set reward.terms.{name}.weight instead, or rename the term."
            )
    if config.weights and config.python is None:
        raise ConfigError(
            "reward.weights is for the parts that a Python function returns, and reward.python is not set; "
            "give each term its own weight (reward.terms.NAME.weight), or remove reward.weights."
        )
