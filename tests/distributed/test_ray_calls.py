"""Calls on real Ray processes: deadlines, first failures, deaths, and streams that are given up."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import ray

from skirl.config.schema import VLLMEngineConfig
from skirl.errors import EngineDied, TrainingDiverged, WorkerError
from skirl.records import Prompt, Request, Rollout, Sampling
from skirl.runtime.ray.calls import DiedError, Identity, wait
from skirl.runtime.ray.engines import RayEngine
from skirl.runtime.ray.ranks import identify
from skirl.runtime.stacks import answer_stack_requests

_killed: set[int] = set()


class Worker:
    """A process that can be made to hang, fail and die."""

    def __init__(self, name: str) -> None:
        answer_stack_requests()
        self._name = name

    def identify(self) -> Identity:
        return identify(self._name, None)

    def stuck_here(self, seconds: float) -> str:
        time.sleep(seconds)
        return "late"

    def fail(self, error: Exception) -> None:
        raise error

    def say(self, word: str) -> str:
        return word


class Streamer:
    """An engine's process that serves one response, and then no other until it is let go."""

    def __init__(self) -> None:
        self._under_way = 0

    async def under_way(self) -> int:
        return self._under_way

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[list[Rollout]]:
        self._under_way += 1
        ids, logprobs = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
        try:
            for request in requests:
                if request.prompt.id == "dies":
                    raise EngineDied("the vLLM engine died: exit code -9")
                yield [Rollout(request.prompt.id, request.sample_index, ids, ids, logprobs, ids, "stop", "")]
                await asyncio.sleep(60)
        finally:
            self._under_way -= 1


@pytest.fixture(scope="module")
def _made(start_cluster: Callable[[], None]) -> Iterator[dict[str, tuple[Any, Identity]]]:
    start_cluster()
    made: dict[str, tuple[Any, Identity]] = {}
    yield made
    for actor, _ in made.values():
        ray.kill(actor)


@pytest.fixture
def workers(_made: dict[str, tuple[Any, Identity]]) -> list[tuple[Any, Identity]]:
    """Two; one that a test before has ended is replaced."""
    for name in ("policy rank 0 of 2", "policy rank 1 of 2"):
        if name in _made and _made[name][1].pid in _killed:
            del _made[name]
        if name not in _made:
            actor = ray.remote(Worker).options(num_cpus=0.5).remote(name)
            _made[name] = (actor, ray.get(actor.identify.remote(), timeout=30))
    return list(_made.values())


def kill(identity: Identity) -> None:
    os.kill(identity.pid, signal.SIGKILL)
    _killed.add(identity.pid)


def test_answers_come_in_the_order_of_the_calls(workers: list[tuple[Any, Identity]]) -> None:
    (one, first), (other, second) = workers
    references = [one.stuck_here.remote(0.3), other.say.remote("soon")]
    assert wait(references, "the update", [first, second], 20.0, setting="x") == ["late", "soon"]


def test_a_call_that_hangs_shows_where(workers: list[tuple[Any, Identity]]) -> None:
    (one, first), (other, second) = workers
    references = [one.say.remote("soon"), other.stuck_here.remote(60.0)]
    with pytest.raises(WorkerError) as caught:
        wait(references, "the update", [first, second], 2.0, setting="runtime.call_timeout_s")
    text = str(caught.value)
    assert text.startswith(f"the update: policy rank 1 of 2 (process {second.pid} on {second.address}) did not answer")
    assert "within 2 s" in text
    assert "runtime.call_timeout_s" in text
    assert "in stuck_here" in text
    assert "rank 0" not in text
    kill(second)


def test_the_first_failure_ends_the_wait(workers: list[tuple[Any, Identity]]) -> None:
    """And skirl's own error comes as it was raised."""
    (one, first), (other, second) = workers
    start = time.monotonic()
    references = [one.stuck_here.remote(5.0), other.fail.remote(TrainingDiverged("loss is nan at step 3"))]
    with pytest.raises(TrainingDiverged, match=r"^loss is nan at step 3$"):
        wait(references, "the update", [first, second], 60.0, setting="x")
    assert time.monotonic() - start < 4


def test_any_other_failure_names_the_process_and_its_cause(workers: list[tuple[Any, Identity]]) -> None:
    (_, first), (other, _) = workers
    with pytest.raises(WorkerError, match=r"the update: policy rank 0 of 2 .*failed:(.|\n)*KeyError: 'lr'"):
        wait([other.fail.remote(KeyError("lr"))], "the update", [first], 60.0, setting="x")


def test_a_killed_process_is_what_is_reported(workers: list[tuple[Any, Identity]]) -> None:
    """Its peer's broken connection comes first, and is a consequence."""
    (one, first), (other, second) = workers
    references = [one.fail.remote(RuntimeError("connection closed by peer")), other.stuck_here.remote(60.0)]
    ray.wait(references[:1], timeout=20)
    kill(second)
    with pytest.raises(DiedError, match=f"the update: policy rank 1 of 2 \\(process {second.pid}"):
        wait(references, "the update", [first, second], 60.0, setting="x")


# ------------------------------------------------------------------------------------------------------------- streams
@pytest.fixture(scope="module")
def engine(start_cluster: Callable[[], None]) -> Iterator[RayEngine]:
    start_cluster()
    made = RayEngine(0, {}, (), VLLMEngineConfig(kind="vllm"))
    made.actor = ray.remote(Streamer).options(num_cpus=0.5, max_concurrency=100).remote()
    assert ray.get(made.actor.under_way.remote(), timeout=30) == 0
    yield made
    ray.kill(made.actor)


def requests(name: str, size: int) -> list[Request]:
    prompt = Prompt(name, "s", (1,), (1,), (), None, None, None, {})
    return [Request(prompt, index, index, Sampling(max_new_tokens=1)) for index in range(size)]


def under_way(engine: RayEngine) -> int:
    return ray.get(engine.actor.under_way.remote(), timeout=20)


def ended(engine: RayEngine) -> bool:
    end = time.monotonic() + 5
    while under_way(engine) and time.monotonic() < end:
        time.sleep(0.05)
    return under_way(engine) == 0


def test_a_stream_that_is_closed_ends_in_the_engine_at_once(engine: RayEngine) -> None:
    """Not when the garbage is collected: a closed call has told the engine before its caller goes on."""

    async def take_one() -> bool:
        stream = engine.generate(requests("a", 3))
        assert (await anext(stream)).sample_index == 0
        assert await engine.actor.under_way.remote() == 1
        await stream.aclose()  # type: ignore[attr-defined]
        end = time.monotonic() + 5
        while await engine.actor.under_way.remote() and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return await engine.actor.under_way.remote() == 0

    assert asyncio.run(take_one())


def test_a_call_that_is_cancelled_ends_in_the_engine(engine: RayEngine) -> None:
    async def give_up() -> None:
        async def take() -> None:
            async for _ in engine.generate(requests("a", 3)):
                pass

        call = asyncio.create_task(take())
        while await engine.actor.under_way.remote() == 0:
            await asyncio.sleep(0.02)
        call.cancel()

    asyncio.run(give_up())
    assert ended(engine)


def test_the_death_of_an_engine_reaches_its_owner_as_what_it_is(engine: RayEngine) -> None:
    seen: list[Exception] = []

    async def revive(engine: RayEngine, generation: int, death: Exception, held: int) -> None:
        seen.append(death)
        raise death

    engine.revive = revive

    async def take() -> None:
        async for _ in engine.generate(requests("dies", 2)):
            pass

    with pytest.raises(EngineDied, match=r"^the vLLM engine died: exit code -9$"):
        asyncio.run(take())
    assert [type(error) for error in seen] == [EngineDied]
