"""vLLM engines as Ray actors, and what keeps them alive.

router -> RayEngine.generate -> EngineActor (vLLM's frontend; its core is a child process) -> rollouts as they end
a dead engine: new process -> current weights -> its requests issued again; the router sees nothing but a delay
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from skirl.config.schema import VLLMEngineConfig
from skirl.errors import EngineDied, RolloutError, SkirlError, WeightSyncError
from skirl.prompts.decode import load_clip
from skirl.records import Request, Rollout, TensorSpec
from skirl.rollouts.engines.vllm import EngineSpec, VLLMEngine
from skirl.runtime import processes
from skirl.runtime.env import prepare_environment, show_gpus
from skirl.runtime.ray.calls import DiedError, Identity, as_skirl_error, wait
from skirl.runtime.ray.ranks import identify
from skirl.runtime.stacks import answer_stack_requests
from skirl.runtime.threads import in_thread
from skirl.weights.endpoints import Place
from skirl.weights.engine_client import EngineReceiver
from skirl.weights.manifest import Bucket, Manifest, TransportName

__all__ = ["EngineActor", "Engines", "RayEngine"]

log = logging.getLogger(__name__)

CONCURRENT_CALLS = 10_000
HANDED_ON_EVERY_S = 0.02
"""Rollouts that end within this time travel in one message."""

LAST_WORDS_WITHIN_S = 5.0
ANSWERS_WITHIN_S = 60.0
"""An engine that does not even say that it lives for so long hangs."""

SHUTDOWN_WITHIN_S = 5.0
LOG_TAIL = 100_000
ERROR = re.compile(r"(\S+\s)?\w*(Error|Exception): ")


class EngineActor:
    """One vLLM engine inside its Ray process; an asyncio actor, so that calls overlap."""

    def __init__(self, index: int) -> None:
        answer_stack_requests()
        self._index = index
        self._engine: VLLMEngine | None = None
        self._receiver: EngineReceiver | None = None
        self._serves = False
        self._paused = False

    async def identify(self) -> Identity:
        """Which process this is."""
        return identify(f"engine {self._index}", None)  # its workers compute, in processes of their own

    async def start(
        self, spec: EngineSpec, expected: tuple[TensorSpec, ...], gpu_ids: Sequence[str]
    ) -> tuple[Place, ...]:
        """Brings the engine up; returns where its workers compute.

        Args:
            expected: what a whole commit must bring, as the checkpoint has it.
            gpu_ids: GPUs of this node that its workers use; empty leaves what Ray gave to this process.
        """
        if gpu_ids:
            show_gpus(gpu_ids)
        prepare_environment()
        engine = self._engine = VLLMEngine(spec, load_clip)
        try:
            await engine.start()
        except RolloutError as error:
            raise type(error)(f"{error}{last_words()}") from None
        self._receiver = EngineReceiver(
            f"engine {self._index}", engine.call_workers, engine.invalidate_caches, self._set_version
        )
        places = await self._receiver.places()
        if spec.load_format == "dummy":
            await self._receiver.expect(expected)
        else:
            self._serves = True
        return tuple(worker.place for worker in places)

    async def last_words(self) -> str:
        """The last error in its log."""
        return last_words()

    async def ping(self) -> None:
        """Raises EngineDied where only this process is left of the engine."""
        self._started().check_alive()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[list[Rollout]]:
        """Rollouts as they end, several in one message where they end together."""
        if not self._serves:
            raise RolloutError(
                f"engine {self._index} holds no whole set of weights, so it serves nothing; commit all of them first"
            )
        ended: list[Rollout] = []
        sent = time.monotonic()
        left = len(requests)
        async for rollout in self._started().generate(requests):
            if rollout.finish_reason == "abort":
                raise RolloutError(f"engine {self._index}: a response was given up when its weights were lost")
            ended.append(rollout)
            left -= 1
            if left == 0 or time.monotonic() - sent > HANDED_ON_EVERY_S:
                yield ended
                ended, sent = [], time.monotonic()
        if ended:
            yield ended

    # -------------------------------------------------------------------------------------------------- weights, memory
    async def begin(self, manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        """See ``endpoints.Receiver``; so are the next three. Responses under way wait, and go on with new weights."""
        if self._started().num_unfinished:
            await self._started().pause()
            self._paused = True
        await self._receiving().begin(manifest, transport, setup)

    async def receive(self, bucket: Bucket) -> None:
        """One message."""
        await self._receiving().receive(bucket)

    async def finish(self, version: int) -> None:
        """Raises the version."""
        await self._receiving().finish(version)
        await self._go_on()

    async def abort(self) -> None:
        """Ends a commit that failed."""
        try:
            await self._receiving().abort()
        finally:
            if self._paused and not self._serves:
                await self._started().abort_all()  # they would go on with weights of no version
            await self._go_on()

    def _set_version(self, version: int | None) -> None:
        self._serves = version is not None
        if version is not None:
            self._started().policy_version = version

    async def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            await self._started().resume()

    async def invalidate_caches(self) -> None:
        """Prefix, encoder and multimodal cache."""
        await self._started().invalidate_caches()

    async def sleep(self, level: int) -> None:
        """Gives GPU memory back; level 2 forgets the weights."""
        if level == 2:
            await self._receiving().forget()
        await self._started().sleep(level)

    async def wake(self, tags: list[str]) -> None:
        """Takes memory again: "weights", "kv_cache"."""
        await self._started().wake(tags)

    async def shutdown(self) -> None:
        """Ends the engine's own processes, also those of one that is still starting."""
        if self._engine is not None:
            await self._engine.shutdown()
            processes.kill(processes.identify(self._engine.child_pids()))

    def _started(self) -> VLLMEngine:
        assert self._engine is not None
        return self._engine

    def _receiving(self) -> EngineReceiver:
        assert self._receiver is not None
        return self._receiver


class RayEngine:
    """One engine for router and weight commit: a ``RolloutEngine`` and an ``endpoints.Receiver``."""

    def __init__(
        self, index: int, options: Mapping[str, Any], gpu_ids: Sequence[str], config: VLLMEngineConfig
    ) -> None:
        self.index, self.name = index, f"engine {index}"
        self._options, self._gpu_ids, self._config = options, tuple(gpu_ids), config
        self.actor: Any = None
        self.starting: Any = None
        """Ray's reference to the start that was begun last."""
        self.identity: Identity | str = self.name
        self.places: tuple[Place, ...] = ()
        self.generation = 0
        """Processes that this engine has had before the one that it has now."""
        self.reviving: asyncio.Task[None] | None = None
        """Its replacement, while one is under way."""
        self.revive: Callable[[RayEngine, int, SkirlError, int], Awaitable[None]] | None = None
        """Called with the generation that died, why, and how many requests it held; set by ``Engines``."""
        self.before_generate: Callable[[], None] | None = None
        """Called before a batch: brings the memory phases to where engines may sample."""

    # ---------------------------------------------------------------------------------------------------- RolloutEngine
    @property
    def batch_size(self) -> int:
        """One group a call: the engine has its own scheduler."""
        return 1

    @property
    def max_in_flight(self) -> int:
        """Responses it wants in hand."""
        return self._config.max_in_flight

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Rollout]:
        """One rollout a request, as they end; survives the engine's death."""
        if self.before_generate is not None:
            await in_thread(self.before_generate)
        waiting = {(r.prompt.id, r.sample_index): r for r in requests}
        while waiting:
            while self.reviving is not None:
                await asyncio.shield(self.reviving)
            generation = self.generation
            try:
                async with aclosing(self._from_actor(list(waiting.values()))) as rollouts:
                    async for rollout in rollouts:
                        waiting.pop((rollout.prompt_id, rollout.sample_index), None)
                        yield rollout
                return
            except (DiedError, EngineDied) as death:
                assert self.revive is not None
                await self.revive(self, generation, death, len(waiting))

    async def _from_actor(self, requests: list[Request]) -> AsyncGenerator[Rollout, None]:
        stream = self.actor.generate.options(num_returns="streaming").remote(requests)
        ended = False
        try:
            async for reference in stream:
                for rollout in await reference:
                    yield rollout
            ended = True
        except RayError as error:
            ended = True
            raise as_skirl_error(error, self.identity, "sampling") from None
        finally:
            if not ended:
                ray.cancel(stream)

    # --------------------------------------------------------------------------------------------------------- Receiver
    async def begin(self, manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        """See ``endpoints.Receiver``."""
        await self._call(self.actor.begin.remote(manifest, transport, setup), "the weight commit")

    async def receive(self, bucket: Bucket) -> None:
        """One message."""
        await self._call(self.actor.receive.remote(bucket), "the weight commit")

    async def finish(self, version: int) -> None:
        """Raises the version."""
        await self._call(self.actor.finish.remote(version), "the weight commit")

    async def abort(self) -> None:
        """Ends a commit that failed."""
        await self._call(self.actor.abort.remote(), "the weight commit")

    async def _call(self, reference: Any, what: str) -> None:
        try:
            await reference
        except RayError as error:
            raise as_skirl_error(error, self.identity, what) from None

    # -------------------------------------------------------------------------------------------------------- processes
    def create(self) -> None:
        """Starts the process; returns at once."""
        actor = ray.remote(EngineActor)
        self.actor = actor.options(**self._options, max_concurrency=CONCURRENT_CALLS).remote(self.index)
        self.identity = self.name

    def begin_start(self, spec: EngineSpec, expected: tuple[TensorSpec, ...]) -> Callable[[], None]:
        """Brings the engine up; the result waits for it."""
        self.identity = self._wait(self.actor.identify.remote(), "starting the process")
        self.starting = self.actor.start.remote(spec, expected, self._gpu_ids)
        return self._finish_start

    def _finish_start(self) -> None:
        self.places = self._wait(self.starting, "starting the engine")

    def _wait(self, reference: Any, what: str) -> Any:
        limit = self._config.start_timeout_s
        return wait([reference], what, [self.identity], limit, setting="rollout.engine.start_timeout_s")[0]

    def death(self) -> SkirlError | None:
        """Why it is dead; None where it lives. Raises WorkerError where it does not answer."""
        try:
            wait([self.actor.ping.remote()], "asking the engine", [self.identity], ANSWERS_WITHIN_S, setting="fixed")
        except (DiedError, EngineDied) as death:
            return death
        return None

    def last_words(self) -> str:
        """The last error in the log of a process that died, where it still has someone to answer."""
        if self.actor is None:
            return ""
        try:
            return ray.get(self.actor.last_words.remote(), timeout=LAST_WORDS_WITHIN_S)
        except RayError:
            return ""

    def kill(self) -> None:
        """Ends the process; harmless to repeat."""
        if self.actor is not None:
            ray.kill(self.actor)
            self.actor = None


class Engines:
    """All engines of a run, and the replacement of those that die.

    Args:
        expected: what a whole commit must bring.
        send_weights: brings the current weights to one engine.
    """

    def __init__(
        self,
        spec: EngineSpec,
        expected: tuple[TensorSpec, ...],
        engines: Sequence[RayEngine],
        config: VLLMEngineConfig,
        *,
        send_weights: Callable[[RayEngine], Awaitable[None]],
    ) -> None:
        self._spec, self._expected, self._config = spec, expected, config
        self.all = list(engines)
        self._send_weights = send_weights
        self.restarts = self.reissued = 0
        """Engines replaced, and requests issued again, since the run began."""
        self._lock = threading.Lock()
        self._ended = False
        for engine in self.all:
            engine.revive = self._revive

    def begin_start(self) -> Callable[[], None]:
        """Starts all engines; the result waits for them."""
        for engine in self.all:
            engine.create()
        finishing = [engine.begin_start(self._spec, self._expected) for engine in self.all]

        def finish() -> None:
            self._wait([engine.starting for engine in self.all], "starting the engines")  # the first failure ends it
            for wait_for in finishing:
                wait_for()

        return finish

    def call(self, what: str, of: Callable[[Any], Any]) -> None:
        """One call on every engine."""
        self._wait([of(engine.actor) for engine in self.all], what)

    def _wait(self, references: Sequence[Any], what: str) -> None:
        names = [engine.identity for engine in self.all]
        wait(references, what, names, self._config.start_timeout_s, setting="rollout.engine.start_timeout_s")

    async def _revive(self, engine: RayEngine, generation: int, death: SkirlError, held: int) -> None:
        """Replaces an engine once, however many calls saw it die; returns when it serves the current weights."""
        self.reissued += held
        if engine.generation == generation and engine.reviving is None:
            engine.reviving = asyncio.ensure_future(self._replace(engine, death))
        if engine.reviving is not None:
            await asyncio.shield(engine.reviving)

    def replace_dead(self) -> int:
        """Looks for engines that died, and replaces them; returns how many. They hold no weights yet."""
        dead = [(engine, death) for engine in self.all if (death := engine.death()) is not None]
        for engine, death in dead:
            self._bring_up(engine, death)
        return len(dead)

    async def _replace(self, engine: RayEngine, death: SkirlError) -> None:
        start = time.monotonic()
        again: SkirlError | None = death
        try:
            while again is not None:
                await in_thread(lambda death=again: self._bring_up(engine, death))
                again = await self._send_or_death(engine)
        finally:  # or who asks next waits for a task of an event loop that has ended
            engine.reviving = None
        log.warning("%s serves again after %.0f s", engine.name, time.monotonic() - start)

    async def _send_or_death(self, engine: RayEngine) -> SkirlError | None:
        """The current weights to a new process; why it died, if it did so while they came."""
        try:
            await self._send_weights(engine)
        except WeightSyncError:
            death = await in_thread(engine.death)
            if death is None:
                raise
            return death
        return None

    def _bring_up(self, engine: RayEngine, death: SkirlError) -> None:
        """A new process that serves nothing yet; one that dies as it starts counts as another death."""
        again: SkirlError | None = death
        while again is not None:
            self._count(engine, again)
            again = self._restart(engine)

    def _count(self, engine: RayEngine, death: SkirlError) -> None:
        death = type(death)(f"{death}{engine.last_words()}")
        with self._lock:
            self._refuse_after_the_end(engine)
            if self.restarts >= self._config.max_restarts:
                raise RolloutError(
                    f"{engine.name} died, the {_nth(self.restarts + 1)} time that an engine did in this run, and "
                    f"rollout.engine.max_restarts is {self._config.max_restarts}: {death}"
                )
            self.restarts += 1
            count = self.restarts
        log.warning("%s; it is being replaced (%d of %d)", death, count, self._config.max_restarts)

    def _refuse_after_the_end(self, engine: RayEngine) -> None:
        """Threads that were given up go on: what they wait for has been killed."""
        if self._ended:
            raise RolloutError(f"{engine.name} died while the run ended")

    def _restart(self, engine: RayEngine) -> SkirlError | None:
        """Why the new process died, if it did so at once."""
        with self._lock:
            self._refuse_after_the_end(engine)
            engine.kill()
            engine.generation += 1  # before anything connects to it: what was set up belongs to the old process
            engine.create()
        try:
            engine.begin_start(self._spec, self._expected)()
        except (DiedError, EngineDied) as death:
            return death
        return None

    def kill(self) -> None:
        """Ends all engines, and lets none be replaced any more; harmless to repeat."""
        with self._lock:
            self._ended = True
        ending = [engine.actor.shutdown.remote() for engine in self.all if engine.actor is not None]
        try:
            if ending:
                ray.wait(ending, num_returns=len(ending), timeout=SHUTDOWN_WITHIN_S)
        finally:
            for engine in self.all:
                engine.kill()


def last_words() -> str:
    """The last error in this process's log, which its children write to as well; Ray keeps it in a file."""
    log_file = Path("/proc/self/fd/2").resolve()
    if not log_file.is_file():
        return ""
    errors = [line for line in log_file.read_text(errors="replace")[-LOG_TAIL:].splitlines() if ERROR.match(line)]
    return f"\n{errors[-1]}\n(from {log_file})" if errors else f"\n(its log: {log_file})"


def _nth(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
