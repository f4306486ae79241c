"""Prompts to groups: calls go to the least loaded engine, and each rollout is handed on as it ends.

    prompts -> requests (keyed seeds) -> calls of whole groups, longest prompts first -> engines
            -> rollouts as they end: the scoring of each begins -> groups -> scored groups

Results are keyed by prompt and sample index, so neither engines nor order change them.
"""

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from skirl.errors import RolloutError, SkirlError
from skirl.protocols import RolloutEngine, Scorer
from skirl.records import Group, Prompt, Request, Rollout, Sampling, ScoredGroup

__all__ = ["Router", "request_seed"]

OnRollout = Callable[[Rollout], None]
OnGroup = Callable[[Group], None]
Call = Sequence[Request]
"""Requests of whole groups that one engine is given together."""


def request_seed(seed: int, key: str, prompt_id: str, sample_index: int) -> int:
    """64-bit seed of one response: a hash of (run seed, step or purpose, prompt id, sample index)."""
    text = f"{seed}\0{key}\0{prompt_id}\0{sample_index}"
    key_bytes = text.encode("utf-8", "surrogatepass")  # the id may hold a file name that is not UTF-8
    return int.from_bytes(hashlib.blake2b(key_bytes, digest_size=8).digest(), "little")


class Router:
    """Hands requests to engines and rollouts to the scorer.

    An engine is never given more responses than its ``max_in_flight``, unless one call alone is larger; the rest wait
    here. The first error, of an engine, the scorer or a callback, ends everything: calls that are under way are
    cancelled and waited for, and the error is raised itself.

    Args:
        engines: all hold the same weights.
        scorer: None where nothing is scored (evaluation).
        seed: of the run.
        timeout_s: deadline of one call from its hand-over, seconds; None where the engine has deadlines of its own.
    """

    def __init__(
        self, engines: Sequence[RolloutEngine], scorer: Scorer | None, seed: int, *, timeout_s: float | None = None
    ) -> None:
        assert engines, "a router needs an engine"
        self._engines, self._scorer, self._seed, self._timeout_s = list(engines), scorer, seed, timeout_s

    def collect(
        self, key: str, prompts: Sequence[Prompt], sampling: Sampling, group_size: int, on_rollout: OnRollout
    ) -> list[ScoredGroup]:
        """Samples and scores one group a prompt, in the order of the prompts; scoring overlaps sampling.

        Args:
            key: step or purpose; part of each response's seed.
            on_rollout: called as each response ends, for progress.

        Raises:
            RolloutError: an engine failed, missed the deadline, or did not answer each request exactly once.
            RewardError: the scorer cannot go on.
        """
        scorer = self._scorer
        assert scorer is not None, "a router without a scorer can only sample"

        scoring: dict[str, asyncio.Task[ScoredGroup]] = {}

        def ended(request: Request, rollout: Rollout) -> None:
            on_rollout(rollout)
            scorer.begin(request.prompt, rollout, request.sampling)

        def complete(group: Group, tasks: asyncio.TaskGroup) -> None:
            scoring[group.prompt.id] = tasks.create_task(scorer.score(group))

        # What a coroutine returns, asyncio.run formats as text at its end, which took a third of the time here.
        asyncio.run(self._run(self._requests(key, prompts, sampling, group_size), ended, complete))
        return [scoring[p.id].result() for p in prompts]

    def sample(
        self, key: str, prompts: Sequence[Prompt], sampling: Sampling, group_size: int, on_group: OnGroup
    ) -> list[Group]:
        """Samples one group a prompt without scoring; ``on_group`` is called as each is whole. Raises RolloutError."""
        found: dict[str, Group] = {}

        def complete(group: Group, _: asyncio.TaskGroup) -> None:
            on_group(group)
            found[group.prompt.id] = group

        asyncio.run(self._run(self._requests(key, prompts, sampling, group_size), lambda *_: None, complete))
        return [found[p.id] for p in prompts]

    def _requests(
        self, key: str, prompts: Sequence[Prompt], sampling: Sampling, group_size: int
    ) -> list[list[Request]]:
        assert len({p.id for p in prompts}) == len(prompts), "results are keyed by the prompt's id"
        return [
            [Request(p, i, request_seed(self._seed, key, p.id, i), sampling) for i in range(group_size)]
            for p in prompts
        ]

    async def _run(
        self,
        groups: list[list[Request]],
        ended: Callable[[Request, Rollout], None],
        complete: Callable[[Group, asyncio.TaskGroup], None],
    ) -> None:
        """Returns when every group was given to ``complete`` and the tasks that it made have ended."""
        sizes = {requests[0].prompt.id: len(requests) for requests in groups}
        found: dict[str, dict[int, Rollout]] = {}

        def deliver(request: Request, rollout: Rollout) -> None:
            ended(request, rollout)
            prompt = request.prompt
            siblings = found.setdefault(prompt.id, {})
            siblings[request.sample_index] = rollout
            if len(siblings) == sizes[prompt.id]:
                rollouts = tuple(rollout for _, rollout in sorted(found.pop(prompt.id).items()))
                del sizes[prompt.id]
                complete(Group(prompt, rollouts, request.sampling), tasks)

        try:
            async with asyncio.TaskGroup() as tasks:
                _Dispatch(self._engines, _calls(groups, self._engines), self._timeout_s, deliver, tasks).fill()
        except ExceptionGroup as errors:
            raise _cause(errors) from None
        if sizes:  # a task group takes a cancelled task for one that ended
            lost = sum(sizes[name] - len(found.get(name, ())) for name in sizes)
            raise RolloutError(
                f"a call to an engine was cancelled from outside: {lost} responses of {_listed(sizes)} never came"
            )


@dataclass(slots=True, eq=False)
class _Load:
    """What one engine has in hand: calls that have not ended, responses that have not come, their tokens at most."""

    index: int
    engine: RolloutEngine
    calls: int = 0
    responses: int = 0
    tokens: int = 0

    def has_room(self, num_responses: int) -> bool:
        limit = self.engine.max_in_flight
        if limit is None:
            return self.calls == 0
        return self.responses == 0 or self.responses + num_responses <= limit

    def take(self, call: Call) -> None:
        self.calls += 1
        self.responses += len(call)
        self.tokens += sum(map(_num_tokens, call))

    def give_back(self, request: Request) -> None:
        self.responses -= 1
        self.tokens -= _num_tokens(request)


class _Dispatch:
    """Calls on their way through the engines; all of it runs in one event loop, so the counts need no lock.

    ``fill`` consumes the calls in order, waits for room on any engine, and is unblocked by each response or call that
    ends. One task serves one call.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        calls: Iterable[Call],
        timeout_s: float | None,
        deliver: Callable[[Request, Rollout], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._loads = [_Load(index, engine) for index, engine in enumerate(engines)]
        self._waiting = deque(calls)
        self._timeout_s, self._deliver, self._tasks = timeout_s, deliver, tasks

    def fill(self) -> None:
        """Hands over the next calls, as far as there is room."""
        while self._waiting:
            size = len(self._waiting[0])
            free = [load for load in self._loads if load.has_room(size)]
            if not free:
                return
            load = min(free, key=lambda load: (load.responses, load.tokens, load.index))
            call = self._waiting.popleft()
            load.take(call)
            self._tasks.create_task(self._serve(load, call))

    async def _serve(self, load: _Load, call: Call) -> None:
        missing = {(request.prompt.id, request.sample_index): request for request in call}
        stream = load.engine.generate(call)
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                async for rollout in stream:
                    request = missing.pop((rollout.prompt_id, rollout.sample_index), None)
                    if request is None:
                        raise RolloutError(self._unasked(load, call, rollout))
                    load.give_back(request)
                    self._deliver(request, rollout)
                    self.fill()
        except TimeoutError:
            if not deadline.expired():  # the engine's own
                raise
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        if deadline.expired():
            raise RolloutError(self._late(load, call, missing.values()))
        if missing:
            raise RolloutError(
                f"{self._name(load)} ended a call of {len(call)} responses without {len(missing)} of them: "
                f"{_listed(f'{name}#{index}' for name, index in missing)}"
            )
        load.calls -= 1
        self.fill()

    def _name(self, load: _Load) -> str:
        return f"rollout engine {load.index} of {len(self._loads)}"

    def _unasked(self, load: _Load, call: Call, rollout: Rollout) -> str:
        known = any((r.prompt.id, r.sample_index) == (rollout.prompt_id, rollout.sample_index) for r in call)
        what = "twice" if known else f"in a call that did not ask for it, but for {_listed(r.prompt.id for r in call)}"
        return f"{self._name(load)} returned response {rollout.prompt_id}#{rollout.sample_index} {what}"

    def _late(self, load: _Load, call: Call, missing: Iterable[Request]) -> str:
        late, asked = (Counter(request.prompt.id for request in requests) for requests in (missing, call))
        said = [f"{asked[name] - late[name]} of {asked[name]} responses of prompt {name}" for name in late]
        return (
            f"{self._name(load)} did not finish a call within {self._timeout_s:g} s "
            f"(rollout.engine.request_timeout_s): {_listed(said) or 'all its responses'} had come, and it had "
            f"{load.responses} responses in hand in all. It hangs (its log says where), or has more in hand than it "
            "can finish in that time: lower rollout.engine.max_in_flight, or raise the deadline"
        )


def _calls(groups: list[list[Request]], engines: Sequence[RolloutEngine]) -> Sequence[Call]:
    """Whole groups, longest prompts first; about as many responses as an engine wants in one call.

    The calls depend on the requests and the engines' settings alone, so that a run repeats bit for bit.
    """
    ordered = sorted(groups, key=lambda g: (-len(g[0].prompt.input_ids), g[0].prompt.id))
    total = sum(len(g) for g in groups)
    wanted = min(*(engine.batch_size for engine in engines), -(-total // len(engines)))
    calls: list[list[Request]] = []
    for group in ordered:
        if not calls or len(calls[-1]) + len(group) > wanted:
            calls.append([])
        calls[-1] += group
    return calls


def _num_tokens(request: Request) -> int:
    return len(request.prompt.input_ids) + request.sampling.max_new_tokens


def _cause(errors: ExceptionGroup) -> Exception:
    """The error to report: one that names what the user can do, if there is any, else the first."""
    leaves = list(_leaves(errors))
    return next((error for error in leaves if isinstance(error, SkirlError)), leaves[0])


def _leaves(errors: ExceptionGroup) -> Iterator[Exception]:
    for error in errors.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _listed(names: Iterable[str]) -> str:
    """The first few, without repetitions."""
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")
