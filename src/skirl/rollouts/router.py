"""Prompts to scored groups: whole groups go to the least loaded engine, and each is scored as soon as it is back.

    prompts -> requests (keyed seeds) -> batches of whole groups -> engines -> groups -> scorer -> scored groups

Results are keyed by prompt and sample index, so neither engines nor order change them.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from skirl.errors import SkirlError
from skirl.protocols import RolloutEngine, Scorer
from skirl.records import Group, Prompt, Request, Rollout, Sampling, ScoredGroup

__all__ = ["Router", "request_seed"]

T = TypeVar("T")

OnGroup = Callable[[Group], None]


def request_seed(seed: int, key: str, prompt_id: str, sample_index: int) -> int:
    """64-bit seed of one response: a hash of (run seed, step or purpose, prompt id, sample index)."""
    text = f"{seed}\0{key}\0{prompt_id}\0{sample_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Router:
    """Hands requests to engines and rollouts to the scorer.

    Args:
        engines: all hold the same weights.
        scorer: None where nothing is scored (evaluation).
        seed: of the run.
    """

    def __init__(self, engines: Sequence[RolloutEngine], scorer: Scorer | None, seed: int) -> None:
        self._engines, self._scorer, self._seed = list(engines), scorer, seed

    def collect(
        self, key: str, prompts: Sequence[Prompt], sampling: Sampling, group_size: int, on_group: OnGroup
    ) -> list[ScoredGroup]:
        """Samples and scores one group a prompt, in the order of the prompts; scoring overlaps sampling.

        Args:
            key: step or purpose; part of each response's seed.
            on_group: called as each group is back, for progress.
        """
        scorer = self._scorer
        assert scorer is not None, "a router without a scorer can only sample"

        async def handle(group: Group) -> ScoredGroup:
            on_group(group)
            return await scorer.score(group)

        return asyncio.run(self._run(key, prompts, sampling, group_size, handle))

    def sample(
        self, key: str, prompts: Sequence[Prompt], sampling: Sampling, group_size: int, on_group: OnGroup
    ) -> list[Group]:
        """Samples one group a prompt without scoring."""

        async def handle(group: Group) -> Group:
            on_group(group)
            return group

        return asyncio.run(self._run(key, prompts, sampling, group_size, handle))

    async def _run(
        self,
        key: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        group_size: int,
        handle: Callable[[Group], Coroutine[Any, Any, T]],
    ) -> list[T]:
        requests = [
            [Request(p, i, request_seed(self._seed, key, p.id, i), sampling) for i in range(group_size)]
            for p in prompts
        ]
        batches: asyncio.Queue[list[list[Request]]] = asyncio.Queue()
        for batch in self._batches(requests):
            batches.put_nowait(batch)
        results: dict[str, asyncio.Task[T]] = {}

        async def serve(engine: RolloutEngine) -> None:
            while not batches.empty():
                batch = batches.get_nowait()
                rollouts = await engine.generate([r for group in batch for r in group])
                for group in _regroup(batch, rollouts):
                    results[group.prompt.id] = tasks.create_task(handle(group))

        try:
            async with asyncio.TaskGroup() as tasks:  # the first error, of an engine or a scorer, ends all of them
                for engine in self._engines:
                    tasks.create_task(serve(engine))
        except ExceptionGroup as errors:
            raise _cause(errors) from None
        return [results[p.id].result() for p in prompts]

    def _batches(self, groups: list[list[Request]]) -> list[list[list[Request]]]:
        """Whole groups, prompts of like length together; about as many responses as an engine wants at once.

        The batches depend on the requests and the number of engines alone, so that a run repeats bit for bit.
        """
        ordered = sorted(groups, key=lambda g: (-len(g[0].prompt.input_ids), g[0].prompt.id))
        total = sum(len(g) for g in groups)
        wanted = min(self._engines[0].batch_size, -(-total // len(self._engines)))
        batches: list[list[list[Request]]] = []
        size = 0
        for group in ordered:
            if not batches or size + len(group) > max(wanted, len(group)):
                batches.append([])
                size = 0
            batches[-1].append(group)
            size += len(group)
        return batches


def _cause(errors: ExceptionGroup) -> Exception:
    """The error to report: one that names what the user can do, if there is any, else the first."""
    return next((e for e in errors.exceptions if isinstance(e, SkirlError)), errors.exceptions[0])


def _regroup(batch: list[list[Request]], rollouts: list[Rollout]) -> list[Group]:
    found = {(r.prompt_id, r.sample_index): r for r in rollouts}
    return [
        Group(
            prompt=requests[0].prompt,
            rollouts=tuple(found[r.prompt.id, r.sample_index] for r in requests),
            sampling=requests[0].sampling,
        )
        for requests in batch
    ]
