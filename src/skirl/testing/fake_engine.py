"""A rollout engine without a model, for tests of rewards and of whatever consumes rollouts."""

import asyncio
from collections.abc import Callable, Sequence

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
        delay_s: Callable[[Sequence[Request]], float] | None = None,
    ) -> None:
        """Starts at version 0.

        Args:
            write: the response to a request; without it, some letters drawn from the request's seed. What it raises
                is raised by ``generate``.
            batch_size: responses it wants at once.
            delay_s: how long a batch takes, seconds; without it, no time at all.
        """
        self._write = write or random_letters
        self._batch_size, self._delay_s = batch_size, delay_s
        self.policy_version = 0
        """Stamped on every token."""
        self.calls: list[tuple[Request, ...]] = []
        """What it was asked for, batch by batch."""

    @property
    def batch_size(self) -> int:
        """Responses it wants at once."""
        return self._batch_size

    async def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request, in order."""
        self.calls.append(tuple(requests))
        await asyncio.sleep(0.0 if self._delay_s is None else self._delay_s(requests))
        return [self._rollout(request) for request in requests]

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
