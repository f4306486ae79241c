"""Scores of rollouts and groups: services and models first, then the user's file, beside them the library's terms.

    rollout -> services, models (background loop) -> sample.scores -> Python function (process) -> parts -\\
            \\-> terms of the library (process) ----------------------------------------------------------> total
"""

import asyncio
import difflib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from skirl.config.rewards import CodeTerm, MathTerm, RewardConfig
from skirl.errors import ConfigError, RewardError
from skirl.protocols import RewardModels
from skirl.records import Group, Prompt, Ratio, RewardSample, Rollout, Sampling, Score, ScoredGroup, ScoreFailure
from skirl.rewards.background import BackgroundLoop
from skirl.rewards.combine import Combined, Parts, combine
from skirl.rewards.math_answer import require_math_verify
from skirl.rewards.processes import Limits, Results, WorkerProcesses
from skirl.rewards.python_file import read
from skirl.rewards.sources import Sources, with_scores
from skirl.rewards.terms import Term
from skirl.rewards.worker import Loaded, Setup

__all__ = ["RewardPool"]

logger = logging.getLogger(__name__)

SAMPLES_BEFORE_UNSEEN = 256  # scored samples after which a weight whose part never came is reported

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Scored:
    """What is known of one sample.

    Attributes:
        sample: as the function sees it, with the scores of services and models.
        others: parts of services, models and terms. own: of the Python function; empty where it was not called yet.
    """

    sample: RewardSample
    others: Parts | ScoreFailure
    own: Parts | ScoreFailure

    @property
    def failure(self) -> ScoreFailure | None:
        """Why it cannot have a score."""
        return next((each for each in (self.others, self.own) if isinstance(each, ScoreFailure)), None)


class RewardPool:
    """A ``Scorer``: scores groups by a user's Python file, library terms, HTTP services, local reward models.

    Each process loads the file once. A call that hangs or kills its process costs that call alone: the process is
    killed and replaced, and what it had not begun goes elsewhere. A sample-wise function is called once a sample, each
    with its own deadline, by whichever process is free, as soon as the sample is there; a group-wise one once a group,
    a batch-wise one with the whole groups that wait when a process is free. Terms, services and models never wait for
    the group.
    """

    def __init__(
        self, config: RewardConfig, to_samples: Callable[[Group], list[RewardSample]], *, output: Path | None = None
    ) -> None:
        """Reads the file and the services' tokens; starts nothing.

        Args:
            config: the recipe's ``reward`` section.
            to_samples: what the reward sees of each rollout of a group, in order (the model family's answer parser).
            output: file that takes what the user's code prints; None is the driver's standard error.

        Raises:
            ConfigError: the file cannot be read, two sources share a name, a weight is set for something that takes
                none, a service's address or token is missing. MissingExtra: a term needs a package that is missing.
        """
        _check_names(config)
        if any(isinstance(term, MathTerm) for term in config.terms.values()):
            require_math_verify()
        self._config = config
        self._to_samples = to_samples
        sources = {**config.terms, **config.services, **config.models}
        self._weights = {**config.weights, **{name: source.weight for name, source in sources.items()}}
        self._notes = _Notes(frozenset(config.weights))
        self._begun: dict[int, tuple[Rollout, Future[_Scored]]] = {}
        """By identity of the rollout, which is kept so that no other takes its place."""
        self._starting = threading.Lock()
        self._closed = False
        self._loaded: Loaded | None = None
        """What the function takes; unknown until the file was loaded."""
        self._loop: BackgroundLoop | None = None
        self._sources = Sources(config)
        self._processes = _processes(config, output)

    def start(self) -> None:
        """Starts the processes, loads the user's file in each, finds the services; blocks until all are ready.

        Call it before training. Further calls do nothing.

        Raises:
            ConfigError: the file cannot be loaded or has no fitting function (the message holds the user's traceback),
                or no server of a service answers.
        """
        with self._starting:
            if self._closed:
                raise RewardError("rewards are not running: they were closed")
            if self._loaded is not None:
                return
            self._loop = BackgroundLoop("rewards")
            try:
                loaded = Loaded() if self._processes is None else self._processes.start()
                self._loop.spawn(self._sources.open()).result()
            except BaseException:
                self._end()
                raise
            self._loaded = loaded

    def attach(self, models: RewardModels) -> None:
        """What holds the models of ``reward.models``: they are loaded after the pool was started."""
        self._sources.attach(models)

    def metrics(self) -> dict[str, Ratio]:
        """How the services do since the last call, see docs/metrics.md."""
        return self._sources.metrics()

    def begin(self, prompt: Prompt, rollout: Rollout, sampling: Sampling) -> None:
        """Starts what can be known of one rollout of a group that is still being sampled; ``score`` awaits the result.

        Does nothing before ``start``, for a second time, and where there is only a function of whole groups.

        Raises:
            RewardError: the pool is closed.
        """
        if self._loaded is None or id(rollout) in self._begun:
            return
        if self._calls_samples or self._config.terms or self._config.services or self._config.models:
            [sample] = self._samples(Group(prompt, (rollout,), sampling))
            self._begun[id(rollout)] = rollout, self._spawn(sample)

    async def score(self, group: Group) -> ScoredGroup:
        """One score a rollout, in order: the weighted sum of its parts, or its typed failure.

        Never blocks the event loop, and may be awaited from another loop in every step. Starts the processes if
        ``start`` was not called.

        Raises:
            RewardError: the pool is closed, a row holds what cannot be sent to a process, or models are not attached.
        """
        await self._started()
        begun = [self._begun.pop(id(rollout), None) for rollout in group.rollouts]
        fresh = [rollout for rollout, found in zip(group.rollouts, begun, strict=True) if found is None]
        samples = iter(self._samples(replace(group, rollouts=tuple(fresh))) if fresh else ())
        futures = [self._spawn(next(samples)) if found is None else found[1] for found in begun]
        scored = await self._called_together(await asyncio.gather(*map(self._result, futures)))
        combined = self._combined(scored)
        self._notes.see(group.prompt.id, combined)
        return ScoredGroup(group, combined.scores)

    async def score_samples(self, samples: Sequence[RewardSample]) -> Results:
        """Unweighted parts or a failure of each sample, without a group: a batch-wise function gets all at once.

        Raises:
            RewardError: the pool is closed.
            ConfigError: the function takes whole groups.
        """
        await self._started()
        assert self._loaded is not None
        if self._loaded.form == "group":
            raise ConfigError(
                f"{self._config.function} takes a whole group, but samples come here one by one, as they end: write "
                "it for a sample, reward(sample), or for whatever is there, reward(batch)."
            )
        scored = await asyncio.gather(*(self._result(self._spawn(sample)) for sample in samples))
        return [_merged(one, self._config) for one in await self._called_together(scored)]

    def weight(self, part: str) -> float:
        """Factor of a part in the total; the parts "NAME/..." of a service have that of the service."""
        service = part.partition("/")[0]
        return self._weights.get(service if service in self._config.services else part, 1.0)

    def close(self) -> None:
        """Kills the processes, ends requests. May be called twice."""
        self._notes.report_unseen()
        with self._starting:
            self._end()

    def _end(self) -> None:
        self._closed = True
        if self._processes is not None:
            self._processes.close()
        if self._loop is not None and not self._loop.closed:
            self._loop.spawn(self._sources.close()).result()
            self._loop.close()

    # ----------------------------------------------------------------------------------------------------- one sample
    @property
    def _calls_samples(self) -> bool:
        return self._config.python is not None and self._loaded is not None and self._loaded.form == "sample"

    async def _started(self) -> None:
        if self._loaded is None:
            await asyncio.to_thread(self.start)

    def _samples(self, group: Group) -> list[RewardSample]:
        return [replace(sample, row=dict(sample.row)) for sample in self._to_samples(group)]

    def _spawn(self, sample: RewardSample) -> Future[_Scored]:
        assert self._loop is not None
        return self._loop.spawn(self._score(sample))

    async def _score(self, sample: RewardSample) -> _Scored:
        """In the background loop. Waits for services, models and terms; a sample-wise function follows the first two.

        A sample that has failed already is not shown to the function.
        """
        terms = self._call("terms", [sample]) if self._config.terms else None
        outer = await self._sources.score(sample)
        own: Parts | ScoreFailure = {}
        if not isinstance(outer, ScoreFailure):
            sample = with_scores(sample, outer)
            if self._calls_samples:
                [own] = await asyncio.wrap_future(self._call("function", [sample]))
        if terms is None:
            return _Scored(sample, outer, own)
        [of_terms] = await asyncio.wrap_future(terms)
        if isinstance(outer, ScoreFailure) or isinstance(of_terms, ScoreFailure):
            return _Scored(sample, outer if isinstance(outer, ScoreFailure) else of_terms, own)
        return _Scored(sample, {**outer, **of_terms}, own)

    def _call(self, what: Any, samples: Sequence[RewardSample]) -> Future[Results]:
        assert self._processes is not None
        return self._processes.submit(what, samples)

    async def _result(self, future: Future[T]) -> T:
        """Waits for what runs in the background, from any loop."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise RewardError("rewards were closed while calls were queued") from None
            raise

    # --------------------------------------------------------------------------------------------------- many samples
    async def _called_together(self, scored: Sequence[_Scored]) -> list[_Scored]:
        """A function of whole groups is called with the samples that have not failed; others have been by now."""
        able = [index for index, one in enumerate(scored) if one.failure is None]
        result = list(scored)
        if self._config.python is not None and not self._calls_samples and able:
            own = await self._result(self._call("function", [scored[index].sample for index in able]))
            for index, parts in zip(able, own, strict=True):
                result[index] = replace(scored[index], own=parts)
        return result

    def _combined(self, scored: Sequence[_Scored]) -> Combined:
        merged = [_merged(one, self._config) for one in scored]
        names = {name for parts in merged if not isinstance(parts, ScoreFailure) for name in parts}
        weights = {name: self.weight(name) for name in names}
        if self._config.combine == "sum":
            return combine(merged, weights)
        counted = [
            parts if isinstance(parts, ScoreFailure) else one.own for parts, one in zip(merged, scored, strict=True)
        ]
        logged = combine(merged, weights).scores
        combined = combine(counted, weights)
        scores = [_with_parts(score, more) for score, more in zip(combined.scores, logged, strict=True)]
        return replace(combined, scores=tuple(scores))


def _processes(config: RewardConfig, output: Path | None) -> WorkerProcesses | None:
    if config.python is None and not config.terms:
        return None
    source = None if config.python is None else read(config.python)
    path = None if config.python is None else str(config.python)
    terms = []
    for name, term in config.terms.items():
        settings = term.model_dump(exclude={"kind", "weight"})
        if isinstance(term, CodeTerm):  # what a slow program does not reach is 0, not a failure
            settings["budget_s"] = 0.8 * config.timeout_s
        elif isinstance(term, MathTerm):  # of each of two readings and a comparison
            settings["timeout_s"] = config.timeout_s / 4
        terms.append(Term(name, term.kind, settings))
    return WorkerProcesses(
        Setup(path, source, config.function, tuple(terms), config.timeout_s, config.memory_mb),
        Limits(config.num_workers, config.timeout_s, config.retries, config.concurrency),
        output,
    )


def _merged(scored: _Scored, config: RewardConfig) -> Parts | ScoreFailure:
    """All parts of a sample, or why it has no score."""
    own, others = scored.own, scored.others
    if isinstance(own, ScoreFailure):
        return own
    if isinstance(others, ScoreFailure):
        return others
    for name in own.keys() & others.keys():
        section = _section(config, name)
        message = (
            f"{config.function} returned a part named {name!r}, which is also a {section.removesuffix('s')} of the "
            f"recipe; rename it there or in reward.{section}"
        )
        return ScoreFailure("bad_type", message)
    return {**others, **own}


def _section(config: RewardConfig, part: str) -> str:
    sections = {"terms": config.terms, "models": config.models}
    return next((section for section, names in sections.items() if part in names), "services")


def _with_parts(score: Score, more: Score) -> Score:
    return replace(score, parts=dict(sorted({**more.parts, **score.parts}.items())))


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


def _check_names(config: RewardConfig) -> None:
    """Every part has one source."""
    sections = {"terms": config.terms, "services": config.services, "models": config.models}
    seen: dict[str, str] = {}
    for section, names in sections.items():
        for name in names:
            if name in seen:
                raise ConfigError(
                    f"reward.{seen[name]}.{name} and reward.{section}.{name} name the same part: rename one of them."
                )
            seen[name] = section
    for name in config.weights:
        if name in seen:
            raise ConfigError(
                f"reward.weights.{name} and reward.{seen[name]}.{name} name the same part: reward.weights is for parts "
                f"of the Python function; set reward.{seen[name]}.{name}.weight instead, or rename it."
            )
    if config.weights and config.python is None:
        raise ConfigError(
            "reward.weights is for the parts that a Python function returns, and reward.python is not set; "
            "give each source its own weight (reward.terms.NAME.weight), or remove reward.weights."
        )
