"""Sampling by a vLLM engine in this process and its children; whoever owns it gives it a process of its own.

requests -> checked, clips decoded -> AsyncLLM (this process) -> EngineCore (child) -> token ids, log-probs -> rollouts
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from skirl.errors import ConfigError, EngineDied, RolloutError, SkirlError, WeightSyncError
from skirl.models.adapters import ENGINE_ADAPTER_ID
from skirl.models.family import SAMPLE_RATE
from skirl.records import FinishReason, Media, Request, Rollout, Sampling
from skirl.rollouts.engines.arguments import EngineSpec, engine_arguments, explain_refusal
from skirl.rollouts.engines.decoded_clips import DecodedClips, Samples
from skirl.rollouts.engines.vllm_records import logprobs_of, sampling_params
from skirl.runtime.device import has_gpu
from skirl.runtime.env import prepare_engine_environment
from skirl.runtime.patches import prepare_vllm
from skirl.runtime.processes import Process, identify, kill
from skirl.runtime.stacks import child_pids

__all__ = ["EngineSpec", "VLLMEngine"]

T = TypeVar("T")
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this in silence, 0 apart."""

logger = logging.getLogger(__name__)


@dataclass
class _Flight:
    """A response that is being sampled.

    Attributes:
        spans: (first response token, policy version) in rising order.
        queue: vLLM's queue of the response; None until vLLM has the request.
        logprobs: of its tokens so far; empty where vLLM returns them its own way.
    """

    spans: list[tuple[int, int]]
    queue: Any = None
    logprobs: list[float] = field(default_factory=list[float])


class VLLMEngine:
    """A ``RolloutEngine``. All calls come from one event loop, the one that ``start`` ran in.

    Token ids and log-probs are the engine's own; a log-prob is that of the sampled token under the whole sampling
    distribution (bans, temperature, filters, renormalised). After the engine's process died every call raises
    ``EngineDied``, and nothing of vLLM's types leaves this class.

    Args:
        spec: what to start.
        load_clip: decodes a clip to float32 samples, padded with zeros to at least the given number; the same function
            as the trainer's. None for text models.
    """

    def __init__(self, spec: EngineSpec, load_clip: Callable[[Media, int], Samples] | None = None) -> None:
        self._spec = spec
        self._clips = None if load_clip is None else DecodedClips(load_clip)
        self._on_gpu = has_gpu()
        self._llm: Any = None
        self._tokenizer: Any = None
        self._adapter: Any = None
        self._min_samples = 0
        self._placeholder_id: int | None = None
        self._policy_version = 0
        self._flights: dict[str, _Flight] = {}
        self._numbers = itertools.count()
        self._adding: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._died: asyncio.Future[str] | None = None
        self._others: frozenset[int] = frozenset()
        self._children: frozenset[Process] = frozenset()

    # ------------------------------------------------------------------------------------------------------ life cycle
    async def start(self) -> None:
        """Starts the engine and returns when it can serve; the event loop stays free meanwhile.

        Raises:
            ConfigError: vLLM refuses an argument. MissingExtra: there is no vLLM. ModelError: no such checkpoint.
            RolloutError: the engine's process did not come up.
        """
        assert self._llm is None, "started once"
        began = time.monotonic()
        self._died = asyncio.get_running_loop().create_future()
        self._others = frozenset(p.pid for p in multiprocessing.active_children() if p.pid is not None)
        try:
            await asyncio.to_thread(self._build)
        except asyncio.CancelledError:
            kill(identify(self.child_pids()))
            raise
        self._children = identify(self.child_pids())
        try:
            self._watch()
            await self._first_token()
        except RolloutError:
            await self.shutdown()
            raise
        self._open.set()
        logger.info("vLLM engine of %s: started in %.1f s", self._spec.model_path, time.monotonic() - began)

    async def _first_token(self) -> None:
        """What vLLM finds out about a model only when it computes (a head size without a kernel) is found here."""
        try:
            queue = await self._llm.add_request(
                "first", {"prompt_token_ids": [0]}, sampling_params(Sampling(max_new_tokens=1), 0)
            )
            await self._call(queue.get(), "its first token")
        except EngineDied as error:
            raise RolloutError(
                f"{error}, at its first token: vLLM cannot run this model here; the cause stands above, in the output "
                "of its EngineCore process"
            ) from None

    def _build(self) -> None:
        from skirl.models.loading import load_tokenizer_and_family

        arguments = engine_arguments(self._spec, on_gpu=self._on_gpu)
        prepare_engine_environment(not self._on_gpu)
        files = load_tokenizer_and_family(self._spec.model_path)  # vLLM's import replaces some of transformers' configs
        self._tokenizer, self._min_samples = files.tokenizer, files.family.min_samples
        if self._spec.placeholder is not None:
            self._placeholder_id = files.tokenizer.convert_tokens_to_ids(self._spec.placeholder)
        prepare_vllm(not self._on_gpu)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.async_llm import AsyncLLM

        from skirl.rollouts.engines.vllm_scheduler import collect_numbers, send_numbers

        if self._spec.adapter_rank is not None:  # the worker puts it there: nothing is ever read from the path
            self._adapter = LoRARequest("policy", ENGINE_ADAPTER_ID, "/brought by commits")
        try:
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except (TypeError, ValueError) as error:
            given = ", ".join(sorted(self._spec.arguments)) or "nothing"
            raise ConfigError(
                f"vLLM refuses its arguments (rollout.vllm sets {given}): {explain_refusal(error)}"
            ) from None
        send_numbers(config)
        try:
            self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=arguments["disable_log_stats"])
        except (OSError, RuntimeError, ValueError) as error:
            raise RolloutError(
                f"the vLLM engine of {self._spec.model_path} did not come up: {error} (the cause stands above, in the "
                "output of its EngineCore process)"
            ) from None
        collect_numbers(self._llm.output_processor, self._flights)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._llm.engine_core.resources.engine_manager.processes:
            loop.add_reader(process.sentinel, self._on_death, process)

    def _on_death(self, process: Any) -> None:
        """Tells everyone who waits: vLLM itself leaves calls to the workers waiting for ever."""
        asyncio.get_running_loop().remove_reader(process.sentinel)
        deadline = time.monotonic() + 1
        while process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of vLLM's asks as well, and only one of the two is told
        self._declare_dead(
            f"the vLLM engine of {self._spec.model_path} died: its process {process.name} (pid {process.pid}) ended "
            f"with exit code {process.exitcode}"
        )
        kill(self._children)

    def _declare_dead(self, message: str) -> None:
        assert self._died is not None
        if not self._died.done():
            self._died.set_result(message)
        for flight in self._flights.values():
            if flight.queue is not None:
                flight.queue.put(EngineDied(message))

    def child_pids(self) -> list[int]:
        """Processes of the engine, its EngineCore first; also while it starts."""
        roots = [p.pid for p in multiprocessing.active_children() if p.pid is not None and p.pid not in self._others]
        return [pid for root in roots for pid in (root, *child_pids(root))]

    async def shutdown(self) -> None:
        """Ends the engine and its processes; what waits for it gets EngineDied. May be called twice."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        with contextlib.suppress(OSError, ValueError):
            for process in llm.engine_core.resources.engine_manager.processes:
                asyncio.get_running_loop().remove_reader(process.sentinel)
        self._declare_dead(f"the vLLM engine of {self._spec.model_path} was shut down")
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # or it reports the engine as dead
        await asyncio.to_thread(llm.shutdown)
        await asyncio.sleep(0)  # closes what vLLM left to this loop
        kill(self._children)
        del llm
        gc.collect()  # vLLM's object is part of a cycle, and complains when the interpreter's end finds it

    # -------------------------------------------------------------------------------------------------------- sampling
    @property
    def batch_size(self) -> int:
        """One group a call: vLLM makes up its batches itself."""
        return 1

    @property
    def max_in_flight(self) -> int | None:
        """Responses that it wants in hand at once."""
        return self._spec.max_in_flight

    @property
    def num_unfinished(self) -> int:
        """Responses that are being sampled."""
        return len(self._flights)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Rollout]:
        """One rollout a request, each as soon as it ends, in any order; closing the iterator aborts the rest.

        Raises:
            RolloutError: a request that cannot be served, before any is sampled; EngineDied.
        """
        for request in requests:
            self._check(request)
        media = [one for request in requests for one in request.prompt.media]
        clips = {} if self._clips is None else await self._clips.get(media, self._min_samples)
        tasks = [asyncio.create_task(self._sample(request, clips)) for request in requests]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, request: Request) -> None:
        self.check_alive()
        prompt, budget = request.prompt, request.sampling.max_new_tokens
        limit = self._llm.model_config.max_model_len
        if not prompt.input_ids:
            raise RolloutError(f"prompt {prompt.id} is empty: there is nothing to continue; leave the row out")
        if len(prompt.input_ids) + budget > limit:
            raise RolloutError(
                f"prompt {prompt.id} has {len(prompt.input_ids)} tokens, and rollout.sampling.max_new_tokens is "
                f"{budget}: together more than the engine's max_model_len of {limit}; lower the budget, leave the row "
                "out, or raise rollout.vllm.max_model_len"
            )
        if 0 < request.sampling.temperature < MIN_TEMPERATURE:
            raise RolloutError(
                f"rollout.sampling.temperature {request.sampling.temperature} is too low for vLLM: take 0 (greedy) or "
                f"at least {MIN_TEMPERATURE}"
            )
        if prompt.media and self._clips is None:
            raise RolloutError(f"prompt {prompt.id} holds {len(prompt.media)} clips, but this is an engine for text")
        found = 0 if self._placeholder_id is None else prompt.compact_ids.count(self._placeholder_id)
        if found != len(prompt.media):
            raise RolloutError(
                f"prompt {prompt.id} holds {len(prompt.media)} clips, but {found} placeholders in compact_ids"
            )

    async def _sample(self, request: Request, clips: dict[str, Samples]) -> Rollout:
        prompt = request.prompt
        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt.compact_ids)}
        if prompt.media:
            inputs["multi_modal_data"] = {"audio": [(clips[media.key], SAMPLE_RATE) for media in prompt.media]}
            keys = [media.key.encode("utf-8", "backslashreplace").decode() for media in prompt.media]
            inputs["multi_modal_uuids"] = {"audio": keys}  # features once a clip
        await self._open.wait()
        self.check_alive()
        key = str(next(self._numbers))
        flight = self._flights[key] = _Flight([(0, self._policy_version)])
        adding = self._undisturbed(self._add(key, inputs, request, flight))
        try:
            await asyncio.shield(adding)
            output = await flight.queue.get()
        except asyncio.CancelledError:
            await asyncio.shield(self._undisturbed(self._abort(key, adding)))
            raise
        except Exception as error:  # fence: vLLM's own types stay here
            raise await self._translated(error, f"prompt {prompt.id}", RolloutError) from None
        finally:
            del self._flights[key]
        return self._rollout(request, output, flight)

    def _undisturbed(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A step of a request that is done whole: of one cancelled half way, vLLM would hold its clip for delivered."""
        task = asyncio.create_task(step)
        self._adding.add(task)
        task.add_done_callback(self._adding.discard)
        return task

    async def _add(self, key: str, inputs: dict[str, Any], request: Request, flight: _Flight) -> None:
        params = sampling_params(request.sampling, request.seed)
        flight.queue = await self._llm.add_request(key, inputs, params, lora_request=self._adapter)
        if self._died is not None and self._died.done():
            flight.queue.put(EngineDied(self._died.result()))

    async def _abort(self, key: str, adding: asyncio.Task[None]) -> None:
        with contextlib.suppress(Exception):  # fence: the request is given up, whatever became of it
            await adding
            await self._llm.abort(key)

    def _rollout(self, request: Request, output: Any, flight: _Flight) -> Rollout:
        prompt, completion = request.prompt, output.outputs[0]
        if tuple(output.prompt_token_ids) != prompt.input_ids:
            raise RolloutError(
                f"prompt {prompt.id}: the trainer reads {len(prompt.input_ids)} tokens, vLLM "
                f"{len(output.prompt_token_ids)} other ones: they expand the placeholder of a clip differently, so "
                "training on it would be wrong"
            )
        ids = np.asarray(completion.token_ids, dtype=np.int64)
        logprobs = np.asarray(flight.logprobs, dtype=np.float32) if flight.logprobs else logprobs_of(completion)
        if len(logprobs) != len(ids):
            raise RolloutError(f"prompt {prompt.id}: vLLM returned {len(ids)} tokens, but {len(logprobs)} log-probs")
        versions = np.empty(len(ids), dtype=np.int64)
        for start, version in flight.spans:
            versions[start:] = version
        reason: FinishReason = completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort"
        return Rollout(
            prompt_id=prompt.id,
            sample_index=request.sample_index,
            prompt_ids=np.asarray(prompt.input_ids, dtype=np.int64),
            response_ids=ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason=reason,
            text=self._tokenizer.decode((ids[:-1] if reason == "stop" else ids).tolist(), skip_special_tokens=False),
        )

    async def abort_all(self) -> None:
        """Ends every response now; its rollout holds what was sampled, with finish reason "abort"."""
        await asyncio.gather(*self._adding, return_exceptions=True)
        await self._call(self._live.abort(list(self._flights)), "ending all responses")

    # --------------------------------------------------------------------------------------------------------- weights
    @property
    def policy_version(self) -> int:
        """Stamped on every token from now on, also of responses under way: set it while the engine is paused."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._policy_version = version
        if not self._flights or self._llm is None:
            return
        states = self._llm.output_processor.request_states.values()
        sampled = {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}
        for key, flight in self._flights.items():
            if key in sampled:
                flight.spans.append((sampled[key], version))
            elif flight.queue is None:  # not handed over yet; else it has ended
                flight.spans.append((0, version))

    async def pause(self) -> None:
        """Holds sampling; responses under way stay, new ones wait. All tokens sampled before are counted by then."""
        await self._call(self._live.pause_generation(mode="keep", clear_cache=False), "pausing")
        # tokens and this reply came on one socket, in order; vLLM hands tokens on in slices, one a turn of the loop
        while not self._llm.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        for _ in range(8 + len(self._flights) // 64):
            await asyncio.sleep(0)

    async def resume(self) -> None:
        """Goes on after ``pause``."""
        await self._call(self._live.resume_generation(), "resuming")

    async def call_workers(self, method: str, payload: bytes) -> list[bytes]:
        """Runs a method of the worker extension on all ranks of the engine; one answer a rank, in order.

        Raises:
            WeightSyncError: the method raised on a rank; EngineDied.
        """
        return await self._call(
            self._live.collective_rpc(method, args=(payload,)), f"{method} on its workers", WeightSyncError
        )

    async def invalidate_caches(self) -> None:
        """Drops what was computed with other weights: prefix, multimodal and encoder caches.

        Responses under way are computed anew from their tokens. New requests wait until all is done: a request must
        not find its clip in one cache and miss it in the next.

        Raises:
            WeightSyncError: the engine does not confirm; EngineDied.
        """
        self._open.clear()
        try:
            await asyncio.gather(*self._adding, return_exceptions=True)
            prefix = self._live.reset_prefix_cache(reset_running_requests=True)
            confirmed = await self._call(prefix, "dropping its prefix cache", WeightSyncError)
            if confirmed is not True:
                raise WeightSyncError(
                    f"the vLLM engine of {self._spec.model_path} did not drop its prefix cache (it answered "
                    f"{confirmed!r}): responses would be computed from keys and values of older weights"
                )
            await self._call(self._live.reset_mm_cache(), "dropping its multimodal cache", WeightSyncError)
            await self._call(self._live.reset_encoder_cache(), "dropping its encoder cache", WeightSyncError)
        finally:
            self._open.set()

    async def sleep(self, level: int) -> None:
        """Gives GPU memory back: weights moved to the host (1) or dropped (2), and the KV cache. Nothing on the CPU.

        Raises:
            RolloutError: responses are under way.
        """
        if self._flights:
            raise RolloutError(f"the vLLM engine cannot sleep while {len(self._flights)} responses are sampled")
        if self._on_gpu:
            await self._call(self._live.sleep(level=level), f"sleeping at level {level}")

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory again: "weights", "kv_cache", or all; samples when all is back. Nothing on the CPU."""
        if self._on_gpu:
            await self._call(self._live.wake_up(None if tags is None else list(tags)), "waking")

    # ---------------------------------------------------------------------------------------------------------- deaths
    def check_alive(self) -> None:
        """Raises EngineDied where nothing is left of the engine but this object."""
        if self._died is not None and self._died.done():
            raise EngineDied(self._died.result())
        assert self._llm is not None, "start() first"

    @property
    def _live(self) -> Any:
        self.check_alive()
        return self._llm

    async def _call(self, call: Awaitable[T], doing: str, failure: type[SkirlError] = RolloutError) -> T:
        """The call's result, or EngineDied as soon as the engine is dead."""
        died, task = self._died, asyncio.ensure_future(call)
        assert died is not None
        try:
            await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise EngineDied(died.result())
            return task.result()
        except Exception as error:  # fence: vLLM's own types stay here
            raise await self._translated(error, doing, failure) from None
        finally:
            task.cancel()

    async def _translated(self, error: Exception, doing: str, failure: type[SkirlError]) -> SkirlError:
        """The same in skirl's types, which need no vLLM to be unpickled."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, SkirlError):
            return error
        died = self._died
        if isinstance(error, EngineDeadError) and died is not None:
            await asyncio.wait({died}, timeout=10)  # the end of its process says more; at load it takes seconds
            return EngineDied(died.result() if died.done() else f"the vLLM engine of {self._spec.model_path} failed")
        return failure(f"the vLLM engine of {self._spec.model_path}: {doing}: {error or type(error).__name__}")
