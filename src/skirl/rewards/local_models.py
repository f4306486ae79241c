"""Scores from the run's own reward models: whatever waits is scored together, while more comes in."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from skirl.errors import SkirlError
from skirl.protocols import RewardModels
from skirl.records import RewardSample, RewardText, ScoreFailure
from skirl.rewards.combine import Parts

__all__ = ["LocalModel"]

MAX_TEXTS = 256  # handed over at once; the model splits them by its own cap of tokens

Result = Parts | ScoreFailure


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    text: RewardText
    future: "asyncio.Future[Result]"


class LocalModel:
    """One entry of ``reward.models``. Make and use it in one event loop; its calls block a thread of its own."""

    def __init__(self, name: str, models: RewardModels) -> None:
        """Args: name: of the entry, and of the part. models: what holds it."""
        self._name, self._models = name, models
        self._waiting: deque[_Item] = deque()
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-model-{name}")

    async def score(self, sample: RewardSample) -> Result:
        """The part of one sample, or why it has none.

        Raises:
            SkirlError: the workers that hold the model are gone.
        """
        item = _Item(RewardText(sample.messages, sample.text), asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._score_waiting())
        return await item.future

    async def close(self) -> None:
        """Ends the work; a call under way is left to end by itself."""
        self._waiting.clear()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _score_waiting(self) -> None:
        """Consumes what waits, one batch after another; unblocks whoever waits for a sample of it."""
        while self._waiting:
            items = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_TEXTS))]
            try:
                results = await self._call([item.text for item in items])
            except SkirlError as error:
                for item in items:
                    if not item.future.done():
                        item.future.set_exception(error)
                continue
            for item, result in zip(items, results, strict=True):
                if not item.future.done():
                    item.future.set_result(result)

    async def _call(self, texts: Sequence[RewardText]) -> list[Result]:
        call, loop = self._models.reward_scores, asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(self._thread, call, self._name, texts)
        except SkirlError:
            raise
        except Exception as error:  # fence: one batch that does not fit into memory is not the end; counted, bounded
            failure = ScoreFailure("raised", f"reward.models.{self._name}: {type(error).__name__}: {error}")
            return [failure] * len(texts)
        if len(scores) != len(texts):
            message = f"reward.models.{self._name} gave {len(scores)} scores for {len(texts)} texts"
            return [ScoreFailure("bad_type", message)] * len(texts)
        return [self._check(score) for score in scores]

    def _check(self, score: float | ScoreFailure) -> Result:
        if isinstance(score, ScoreFailure):
            return ScoreFailure(score.kind, f"reward.models.{self._name}: {score.message}", score.detail)
        if math.isfinite(score):
            return {self._name: float(score)}
        return ScoreFailure("not_finite", f"reward.models.{self._name} gave {score}; a score must be a finite number")
