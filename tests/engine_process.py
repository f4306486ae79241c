"""vLLM engines in a process of their own, as in production: vLLM replaces some of transformers' configs where it is
imported, so it must not come into the tests' process. Calls by name, answers in any order.
"""

import asyncio
import dataclasses
import inspect
import json
import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

import torch

from skirl.models.families import FAMILIES
from skirl.prompts.decode import load_clip
from skirl.protocols import RolloutEngine
from skirl.records import Request, Rollout
from skirl.rollouts.engines.vllm import EngineSpec, VLLMEngine
from skirl.runtime.device import has_gpu
from skirl.runtime.processes import identify
from skirl.testing import tiny_models

BUILDERS = {  # vLLM on the CPU wants heads of 32 at least
    "vllm_tied": partial(tiny_models.tiny_qwen3, hidden=64),
    "vllm_untied": partial(tiny_models.tiny_qwen3, hidden=64, tied=False),
    "vllm_native": partial(tiny_models.tiny_qwen3_asr, hidden=128),
    "vllm_original": partial(tiny_models.tiny_qwen3_asr, hidden=128, original_layout=True),
}
"""Checkpoints that vLLM can run, for ``tiny.BUILDERS``."""


class Extension:
    """Methods for all workers, as vLLM mixes them into its own class."""

    def echo(self, payload: bytes) -> bytes:
        return payload + str(self.rank).encode()  # pyright: ignore[reportAttributeAccessIssue]

    def fail(self, payload: bytes) -> bytes:
        raise ValueError(payload.decode())

    def scale_layers(self, payload: bytes) -> bytes:
        """Multiplies what makes keys and values, in place, as a commit would write it."""
        model = self.model_runner.model  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            names = [name for name, p in model.named_parameters() if "qkv_proj" in name and p.mul_(float(payload)) is p]
        return json.dumps(names).encode()

    def scheduler(self, payload: bytes) -> bytes:
        """Class of the scheduler of the EngineCore that calls this, from further up the stack."""
        callers = (frame.frame.f_locals.get("self") for frame in inspect.stack())
        found = next(one.scheduler for one in callers if type(one).__name__.startswith("EngineCore"))
        return f"{type(found).__module__}.{type(found).__name__}".encode()

    def counts(self, payload: bytes) -> bytes:
        """Tokens that each request in the engine has sampled."""
        requests = self.model_runner.requests.values()  # pyright: ignore[reportAttributeAccessIssue]
        return json.dumps([sum(token >= 0 for token in r.output_token_ids) for r in requests]).encode()


def spec_of(directory: Any, *, audio: bool = False, **changes: Any) -> EngineSpec:
    spec = EngineSpec(
        model_path=str(directory),
        dtype="float32",
        seed=0,
        max_model_len=1024,
        placeholder=FAMILIES["qwen3_asr"].placeholder if audio else None,
        load_format="auto",
        worker_extension="tests.engine_process.Extension",
        arguments={"kv_cache_memory_bytes": 64 << 20},
    )
    return dataclasses.replace(spec, **changes)


def alive(pids: Sequence[int]) -> list[int]:
    return [process.pid for process in identify(pids)]


def new_processes() -> ForkServerContext | SpawnContext:
    """How engines' processes begin: forked from one that has imported vLLM. CUDA does not survive a fork."""
    if has_gpu():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.vllm_imported"])
    return context


class EngineProcess:
    """A process that holds one VLLMEngine at a time."""

    def __init__(self) -> None:
        context = new_processes()
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,))
        self.process.start()
        other.close()
        self._answers: list[queue.Queue[Any]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                number, kind, value = self._pipe.recv()
                self._answers[number].put((kind, value))
        except (EOFError, OSError):
            for answers in self._answers:
                answers.put(("raise", EOFError("the engine's process is gone")))

    def open(self, spec: EngineSpec, *, audio: bool = False) -> None:
        """Another engine, not started yet."""
        self.call("open", spec, audio)

    def begin(self, name: str, *arguments: Any) -> Callable[..., list[Any]]:
        """Starts a call of the engine; the result waits for its end and returns all it yielded, or what it returned."""
        with self._lock:
            answers: queue.Queue[Any] = queue.Queue()
            self._answers.append(answers)
            self._pipe.send((len(self._answers) - 1, name, arguments))

        def result(timeout_s: float = 120) -> list[Any]:
            found = []
            while True:
                kind, value = answers.get(timeout=timeout_s)
                if kind == "raise":
                    raise value
                if kind == "end":
                    return found
                found.append(value)

        return result

    def call(self, name: str, *arguments: Any) -> Any:
        """``get`` and ``set`` reach attributes, ``cancel`` takes the number of a call that was begun."""
        return self.begin(name, *arguments)()[0]

    @property
    def last(self) -> int:
        """Number of the call that was begun last."""
        return len(self._answers) - 1

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """In the order of the requests."""
        rollouts = self.begin("generate", list(requests))()
        found = {(r.prompt_id, r.sample_index): r for r in rollouts}
        assert len(found) == len(rollouts)
        return [found[r.prompt.id, r.sample_index] for r in requests]

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self.process.join(10)
        self.process.kill()
        self.process.join()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    asyncio.run(_Server(pipe).run())


class _Server:
    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._engine: Any = None
        self._running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        calls: asyncio.Queue[Any] = asyncio.Queue()

        def listen() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(calls.put_nowait, self._pipe.recv())
            except EOFError:
                loop.call_soon_threadsafe(calls.put_nowait, None)

        threading.Thread(target=listen, daemon=True).start()
        while (call := await calls.get()) is not None:
            self._running[call[0]] = asyncio.create_task(self._answer(*call))
        if self._engine is not None:
            await self._engine.shutdown()

    async def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            if name == "generate":
                async for rollout in self._engine.generate(*arguments):
                    self._pipe.send((number, "yield", rollout))
            else:
                result = getattr(self, f"_{name}", None) or getattr(self._engine, name)
                value = result(*arguments)
                self._pipe.send((number, "yield", await value if asyncio.iscoroutine(value) else value))
            self._pipe.send((number, "end", None))
        except asyncio.CancelledError:
            self._pipe.send((number, "end", None))
        except Exception as error:  # noqa: BLE001  handed to the caller
            self._pipe.send((number, "raise", error))

    def _open(self, spec: EngineSpec, audio: bool) -> None:
        self._engine = VLLMEngine(spec, load_clip if audio else None)

    def _get(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _set(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)

    def _cancel(self, number: int) -> bool:
        return self._running[number].cancel()

    def _is_engine(self) -> bool:
        return isinstance(self._engine, RolloutEngine)

    def _argument_names(self) -> set[str]:
        from vllm.engine.arg_utils import AsyncEngineArgs

        return {f.name for f in dataclasses.fields(AsyncEngineArgs) if not f.name.startswith("_")}
