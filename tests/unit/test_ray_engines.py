"""Engines that die: replaced once, their requests issued again. Ray's actors are stood in for; nothing of Ray runs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from skirl.config.schema import CommitConfig, VLLMEngineConfig
from skirl.errors import EngineDied, RolloutError, SkirlError, WeightSyncError, WorkerError
from skirl.records import CommitReport, Prompt, Request, Rollout, Sampling
from skirl.runtime.phases import Phases
from skirl.runtime.ray import commits as commits_module
from skirl.runtime.ray.calls import DiedError, Identity
from skirl.runtime.ray.commits import Commits, RankSender
from skirl.runtime.ray.engines import Engines, RayEngine
from skirl.runtime.ray.memory import RayPhaseActions
from skirl.runtime.ray.workers import RayWorkers
from skirl.runtime.threads import in_thread
from skirl.weights.endpoints import Place


class Method:
    """``actor.method``: makes a call of what it is given."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def options(self, **_: Any) -> "Method":
        return self

    def remote(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Process:
    """A process of an engine: serves, and dies after so many responses of all its calls."""

    def __init__(self, lives_for: int | None) -> None:
        self.lives_for, self.asked, self.dead = lives_for, [], False
        self.generate = Method(self._generate)

    async def _generate(self, requests: Sequence[Request]) -> AsyncIterator[Any]:
        self.asked.append([(r.prompt.id, r.sample_index) for r in requests])
        for request in requests:
            await asyncio.sleep(0.001)
            if self.lives_for == 0 or self.dead:
                self.dead = True
                raise ActorDiedError
            self.lives_for = None if self.lives_for is None else self.lives_for - 1
            yield self._answer(request)

    async def _answer(self, request: Request) -> list[Rollout]:
        ids, logprobs = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
        return [Rollout(request.prompt.id, request.sample_index, ids, ids, logprobs, ids, "stop", "")]


class Engine(RayEngine):
    """Its processes are those given, one after another; one that is an error fails while it starts."""

    def __init__(self, processes: Sequence[Process | SkirlError], config: VLLMEngineConfig, index: int = 0) -> None:
        super().__init__(index, {}, (), config)
        self.coming, self.killed, self.slow = list(processes), 0, threading.Event()
        self.slow.set()
        self.places = (Place("here", None),)
        self.create()

    def create(self) -> None:
        self.actor = self.coming.pop(0)

    def begin_start(self, spec: Any, expected: Any) -> Callable[[], None]:
        return self._come_up

    def _come_up(self) -> None:
        self.slow.wait(10)
        if isinstance(self.actor, SkirlError):
            raise self.actor

    def death(self) -> SkirlError | None:
        return DiedError("it is dead") if self.actor.dead else None

    def last_words(self) -> str:
        return "\nOutOfMemoryError: 80 GB"

    def kill(self) -> None:
        self.killed += 1
        self.actor = None


def config(**values: Any) -> VLLMEngineConfig:
    return VLLMEngineConfig(kind="vllm", **values)


def started(
    engines: Sequence[Engine], sent: Callable[[RayEngine], Any] | None = None, settings: VLLMEngineConfig | None = None
) -> Engines:
    async def send(engine: RayEngine) -> None:
        await asyncio.sleep(0.01)
        if sent is not None:
            sent(engine)

    return Engines(None, (), engines, settings or config(), send_weights=send)  # type: ignore[arg-type]


def group(name: str, size: int) -> list[Request]:
    prompt = Prompt(name, "s", (1,), (1,), (), None, None, None, {})
    return [Request(prompt, index, index, Sampling(max_new_tokens=1)) for index in range(size)]


async def ask(engine: RayEngine, requests: Sequence[Request]) -> list[tuple[str, int]]:
    return [(rollout.prompt_id, rollout.sample_index) async for rollout in engine.generate(requests)]


async def ask_all(engine: RayEngine, groups: Sequence[Sequence[Request]]) -> list[list[tuple[str, int]]]:
    return await asyncio.gather(*(ask(engine, requests) for requests in groups))


# --------------------------------------------------------------------------------------------------- death in a batch
def test_a_death_costs_no_response_and_repeats_none() -> None:
    processes = [Process(lives_for=5), Process(None)]
    engine = Engine(processes, config())
    sent: list[int] = []
    engines = started([engine], lambda engine: sent.append(engine.generation))
    groups = [group(name, 4) for name in "abc"]
    got = asyncio.run(ask_all(engine, groups))
    assert [sorted(one) for one in got] == [[(name, index) for index in range(4)] for name in "abc"]
    assert (engines.restarts, engine.killed, engine.generation, sent) == (1, 1, 1, [1])
    assert engines.reissued == 12 - 5
    assert sum(map(len, processes[1].asked)) == 7, "only what was not delivered"
    assert engine.reviving is None


def test_a_call_that_begins_while_the_engine_is_replaced_waits_for_it() -> None:
    engine = Engine([Process(lives_for=0), Process(None)], config())
    engine.slow.clear()
    started([engine])

    async def both() -> list[list[tuple[str, int]]]:
        first = asyncio.create_task(ask(engine, group("a", 1)))
        while engine.reviving is None:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ask(engine, group("b", 1)))
        await asyncio.sleep(0.05)
        assert not second.done()
        engine.slow.set()
        return [await first, await second]

    assert asyncio.run(both()) == [[("a", 0)], [("b", 0)]]


def test_deaths_beyond_max_restarts_end_the_run_with_the_reason() -> None:
    engine = Engine([Process(lives_for=0) for _ in range(3)], config(max_restarts=2))
    engines = started([engine], settings=config(max_restarts=2))
    with pytest.raises(RolloutError, match="third time") as caught:
        asyncio.run(ask(engine, group("a", 2)))
    assert not isinstance(caught.value, EngineDied)
    assert "max_restarts is 2" in str(caught.value)
    assert "OutOfMemoryError: 80 GB" in str(caught.value)
    assert engines.restarts == 2, "those that were replaced"


def test_a_process_that_dies_as_it_starts_is_replaced_too() -> None:
    engine = Engine([Process(lives_for=0), DiedError("killed as it started"), Process(None)], config())
    engines = started([engine])
    assert asyncio.run(ask(engine, group("a", 2))) == [("a", 0), ("a", 1)]
    assert engines.restarts == 2


def test_a_process_that_cannot_start_ends_the_run() -> None:
    engine = Engine([Process(lives_for=0), RolloutError("no such kernel"), Process(None)], config())
    started([engine])
    with pytest.raises(RolloutError, match="no such kernel"):
        asyncio.run(ask(engine, group("a", 2)))


def test_a_process_that_dies_while_its_weights_come_is_replaced_too() -> None:
    processes = [Process(lives_for=0), Process(None), Process(None)]
    engine = Engine(processes, config())

    def send(engine: RayEngine) -> None:
        if engine.actor is processes[1]:
            processes[1].dead = True
            raise WeightSyncError("engine 0: died")

    engines = started([engine], send)
    assert asyncio.run(ask(engine, group("a", 2))) == [("a", 0), ("a", 1)]
    assert engines.restarts == 2


def test_weights_that_do_not_come_to_a_living_process_end_the_run() -> None:
    engine = Engine([Process(lives_for=0), Process(None)], config())

    def send(engine: RayEngine) -> None:
        raise WeightSyncError("a tensor is missing")

    engines = started([engine], send)
    with pytest.raises(WeightSyncError, match="a tensor is missing"):
        asyncio.run(ask(engine, group("a", 2)))
    assert engines.restarts == 1


def test_a_batch_given_up_while_the_engine_is_replaced_leaves_nothing_to_the_next() -> None:
    """Ctrl-C ends the event loop at once; the next loop's calls do not wait for a task of the last one."""
    processes = [Process(lives_for=0), Process(None), Process(None)]
    engine = Engine(processes, config())
    engine.slow.clear()
    started([engine])

    async def give_up() -> None:
        call = asyncio.create_task(ask(engine, group("a", 1)))
        while engine.reviving is None or len(engine.coming) == 2:
            await asyncio.sleep(0.001)
        call.cancel()

    ended = threading.Event()
    runner = threading.Thread(target=lambda: (asyncio.run(give_up()), ended.set()), daemon=True)
    runner.start()
    gave_up = ended.wait(3)
    engine.slow.set()
    assert gave_up, "the event loop waited for the engine that was starting"
    assert asyncio.run(ask(engine, group("b", 1))) == [("b", 0)]


def test_no_engine_is_replaced_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([Process(lives_for=0), Process(None)], config())
    engine.actor.shutdown = Method(lambda: None)
    engines = started([engine])
    monkeypatch.setattr("ray.wait", lambda *_, **__: ([], []))
    engines.kill()
    engine.actor = Process(lives_for=0)
    with pytest.raises(RolloutError, match="while the run ended"):
        asyncio.run(ask(engine, group("a", 1)))
    assert len(engine.coming) == 1, "nothing was started"
    assert engines.restarts == 0


# ------------------------------------------------------------------------------------------------- death in a commit
class SentTo(Commits):
    """Notes what is sent to whom, and fails as it is told."""

    def __init__(self, failures: Sequence[Callable[[], None]]) -> None:
        self.failures, self.sent = list(failures), []

    async def send(self, engines: Sequence[RayEngine], *, version: int, whole: bool) -> CommitReport:
        self.sent.append(([engine.index for engine in engines], version, whole))
        if self.failures:
            self.failures.pop(0)()
            raise WeightSyncError("weight commit 3: engine 1: it died")
        return CommitReport(version=version, whole=whole)


def workers_with(commits: Commits, engines: Engines) -> RayWorkers:
    workers = RayWorkers.__new__(RayWorkers)
    workers._commits, workers._engines = commits, engines
    return workers


def test_a_death_in_a_commit_leads_to_a_whole_one_to_all() -> None:
    engines = started([Engine([Process(None), Process(None)], config(), index) for index in range(2)])
    victim = engines.all[1]
    commits = SentTo([lambda: setattr(victim.actor, "dead", True)])
    report = workers_with(commits, engines)._send(3, False)
    assert commits.sent == [([0, 1], 3, False), ([0, 1], 3, True)]
    assert report.whole
    assert (engines.restarts, [engine.generation for engine in engines.all]) == (1, [0, 1])


def test_a_commit_that_fails_without_a_death_is_an_error() -> None:
    engines = started([Engine([Process(None)], config())])
    commits = SentTo([lambda: None])
    with pytest.raises(WeightSyncError, match="weight commit 3"):
        workers_with(commits, engines)._send(3, False)
    assert len(commits.sent) == 1


# ------------------------------------------------------------------------------------------------------------ commits
class TheRanks:
    """One training rank, which answers what it is told."""

    def __init__(self, answers: Sequence[Callable[[], Any]] = ()) -> None:
        self.identities = [Identity(f"policy rank {n} of 2", 100 + n, "node", "10.0.0.1", (), None) for n in range(2)]
        self.actors = [type("Actor", (), {"abort_weights": Method(answer)}) for answer in answers]
        self.ports = iter(range(1000, 2000))

    def call_one(self, rank: int, what: str, of: Callable[[Any], Any]) -> tuple[str, int]:
        return "10.0.0.1", next(self.ports)


def commits_over(ranks: TheRanks, sent: list[list[bytes]], monkeypatch: pytest.MonkeyPatch, seconds: float) -> Commits:
    async def send(sender: Any, receivers: Any, *, setup: list[bytes], **_: Any) -> CommitReport:
        sent.append(setup)
        running.append(len(receivers))
        assert len(running) == 1, "one commit at a time"
        await asyncio.sleep(seconds)
        running.clear()
        return CommitReport(version=0)

    running: list[int] = []
    monkeypatch.setattr(commits_module, "send_weights", send)
    commits = Commits(ranks, CommitConfig())  # type: ignore[arg-type]
    commits._transport = "gloo"
    return commits


def test_a_new_process_is_given_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old process's place in the broadcast group is held by nobody: joining it would wait for ever."""
    engine = Engine([Process(lives_for=0), Process(None)], config())
    sent: list[list[bytes]] = []
    commits = commits_over(TheRanks(), sent, monkeypatch, 0.0)

    async def send(engine: RayEngine) -> None:
        await commits.send([engine], version=0, whole=True)

    Engines(None, (), [engine], config(), send_weights=send)  # type: ignore[arg-type]
    asyncio.run(send(engine))
    asyncio.run(ask(engine, group("a", 1)))  # it dies, and is replaced
    asyncio.run(send(engine))
    assert sent[0] != sent[1]
    assert sent[1] == sent[2], "the connection is kept while the same process takes part"


def test_commits_of_two_threads_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = Engine([Process(None)], config()), []
    commits = commits_over(TheRanks(), sent, monkeypatch, 0.1)

    def other() -> None:
        asyncio.run(commits.send([engine], version=0, whole=True))

    async def two() -> None:
        await asyncio.gather(in_thread(other), commits.send([engine], version=0, whole=True))

    asyncio.run(two())
    assert len(sent) == 2


async def _fails(error: Exception, seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise error


def test_a_rank_that_died_in_a_commit_is_named() -> None:
    """Its peer's broken connection is reported first, and is not what happened."""
    first, second = lambda: _fails(WorkerError("reset"), 0.0), lambda: _fails(ActorDiedError(), 0.05)
    ranks = TheRanks([first, second])
    with pytest.raises(DiedError, match=r"policy rank 1 of 2 \(process 101 on 10.0.0.1\) died"):
        asyncio.run(RankSender(ranks, CommitConfig()).abort())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- phases, dead engines
class Sleeper(Engines):
    """Answers phase calls; the engine is dead at the one that is named."""

    def __init__(self, dies_at: str) -> None:
        self.dies_at, self.calls, self.replaced = dies_at, [], 0

    def call(self, what: str, of: Callable[[Any], Any]) -> None:
        recorder = type("Actor", (), {name: Method(lambda *a, n=name: f"{n} {a}") for name in ("sleep", "wake")})
        done = of(recorder)
        if done == self.dies_at and not self.replaced:
            raise DiedError("engine 0 died")
        self.calls.append(done)

    def replace_dead(self) -> int:
        self.replaced += 1
        return 1


class Trainer:
    def __init__(self) -> None:
        self.actors = [None]

    def call(self, what: str, of: Any) -> list[tuple[int, int]]:
        return [(0, 0)]

    def call_one(self, rank: int, what: str, of: Any) -> int:
        return 7


@pytest.mark.parametrize("dies_at", ["sleep (1,)", "wake (['weights'],)", "wake (['kv_cache'],)"])
def test_an_engine_found_dead_between_phases_holds_the_weights_again(dies_at: str) -> None:
    """On shared GPUs at sleep level 1, where engines keep their weights: the new process has none."""
    engines, sent = Sleeper(dies_at), []

    def send(version: int, whole: bool) -> CommitReport:
        sent.append((version, whole))
        return CommitReport(version=version)

    actions = RayPhaseActions(engines, Trainer, send, weights_lost=lambda: phases.weights_lost())  # type: ignore[arg-type]
    phases = Phases(actions, shared=True, sleep_level=1, offload=True, start="train")
    if dies_at.startswith("sleep"):
        phases.enter("generate")
        assert sent == [(7, True)]
        sent.clear()
    phases.enter("train")
    phases.enter("generate")
    assert engines.replaced == 1
    assert sent[-1] == (7, True)
    assert (phases.engines, phases.held_version) == ("awake", 7)
    before = len(sent)
    phases.enter("generate")
    assert len(sent) == before
