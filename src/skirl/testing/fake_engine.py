"""A rollout engine without a model, for tests of rewards and of whatever consumes rollouts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np

from skirl.records import Request, Rollout

__all__ = ["FakeEngine"]


class FakeEngine:
    """A ``RolloutEngine`` that writes what a function says. Token ids are the bytes of the text in UTF-8.

    A text that needs more tokens than the budget is cut, as a model would be; one that fits ends with the first stop
    id, where there is one.
    """

    def __init__(
        self,
        write: Callable[[Request], str] | None = None,
        *,
        batch_size: int = 8,
        max_in_flight: int | None = None,
        order: Callable[[Sequence[Request]], Sequence[Request]] | None = None,
        before: Callable[[Request], Awaitable[object]] | None = None,
    ) -> None:
        """Starts at version 0.

        Args:
            write: the response to a request; without it, some letters drawn from the request's seed. What it raises
                is raised by ``generate``.
            batch_size: responses it wants in one call.
            max_in_flight: responses it wants in hand at once; None: one call at a time.
            order: in which the responses of a call end; without it, that of the requests. What it leaves out never
                comes, what it repeats comes again.
            before: awaited before a response ends, after the one before it in its call: ``lambda r:
                asyncio.sleep(0.1)`` makes it slow, an event holds it back, what it raises is raised by ``generate``.
        """
        self._write = write or random_letters
        self._batch_size, self._max_in_flight = batch_size, max_in_flight
        self._order, self._before = order, before
        self.policy_version = 0
        """Stamped on every token."""
        self.calls: list[tuple[Request, ...]] = []
        """What it was asked for, call by call."""
        self.in_hand = 0
        """Responses that it was asked for and that have not ended, over all open calls."""
        self.most_in_hand = 0
        """The largest number of these so far."""
        self.open_calls = 0
        """Calls that have not ended; one that is cancelled or closed ends then."""
        self.most_open_calls = 0
        """The largest number of these so far."""

    @property
    def batch_size(self) -> int:
        """Responses it wants in one call."""
        return self._batch_size

    @property
    def max_in_flight(self) -> int | None:
        """Responses it wants in hand at once; None: one call at a time."""
        return self._max_in_flight

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Rollout]:
        """One rollout a request, each after a turn of the event loop."""
        self.calls.append(tuple(requests))
        ending = requests if self._order is None else self._order(requests)
        self.open_calls += 1
        self.in_hand += len(ending)
        self.most_open_calls = max(self.most_open_calls, self.open_calls)
        self.most_in_hand = max(self.most_in_hand, self.in_hand)
        remaining = len(ending)
        try:
            for request in ending:
                await (asyncio.sleep(0) if self._before is None else self._before(request))
                rollout = self._rollout(request)
                remaining -= 1
                self.in_hand -= 1
                yield rollout
        finally:
            self.in_hand -= remaining
            self.open_calls -= 1

    def _rollout(self, request: Request) -> Rollout:
        sampling = request.sampling
        never = {*sampling.stop_ids, *sampling.banned_ids}
        tokens = [byte for byte in self._write(request).encode() if byte not in never]
        ending = list(sampling.stop_ids[:1])
        whole = len(tokens) + len(ending) <= sampling.max_new_tokens and len(tokens) + len(ending) > 0
        written = tokens if whole else tokens[: sampling.max_new_tokens]
        ids = written + ending if whole else written
        return Rollout(
            prompt_id=request.prompt.id,
            sample_index=request.sample_index,
            prompt_ids=np.asarray(request.prompt.input_ids, dtype=np.int64),
            response_ids=np.asarray(ids, dtype=np.int64),
            logprobs=np.full(len(ids), -np.log(256.0), dtype=np.float32),
            versions=np.full(len(ids), self.policy_version, dtype=np.int64),
            finish_reason="stop" if whole else "length",
            text=bytes(written).decode(errors="replace"),
        )


def random_letters(request: Request) -> str:
    """0 to 31 letters, a function of the request's seed alone."""
    random = np.random.Generator(np.random.Philox(key=request.seed))
    return "".join(chr(ord("a") + n) for n in random.integers(0, 26, size=random.integers(0, 32)))
