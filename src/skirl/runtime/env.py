"""Environment variables: read and set here only."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "declare_rank",
    "missing_ray_token",
    "prepare_engine_environment",
    "prepare_environment",
    "secret",
    "show_gpus",
]


def prepare_environment() -> None:
    """Defaults for this process and the workers it starts; a value that the user set is left alone.

    On a machine without GPUs torch's compiler is switched off: DeepSpeed imports compiled optimizers that a CPU run
    never uses, at 2 s a process.
    """
    defaults = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # models are local directories; nothing is fetched behind the user's back
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "1",
        "DS_SKIP_CUDA_CHECK": "1",
    }
    if shutil.which("nvidia-smi") is None:
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    has_token = _ray_token_file().exists() or "RAY_AUTH_TOKEN" in os.environ
    if has_token and "ray" not in sys.modules:  # it reads its mode as it is imported: a head would ask, we not show it
        # A head that finds a token asks every node and driver for it; those would not show theirs without this.
        defaults["RAY_AUTH_MODE"] = "token"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def missing_ray_token() -> Path | None:
    """Where a new Ray cluster's token belongs; None where there is one, or the user chose RAY_AUTH_MODE."""
    if "RAY_AUTH_MODE" in os.environ or "RAY_AUTH_TOKEN" in os.environ or _ray_token_file().exists():
        return None
    return _ray_token_file()


def _ray_token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))


def secret(name: str) -> str | None:
    """A token that the user exported under this name; None where it is not set. Whoever reads it never shows it."""
    return os.environ.get(name)


def declare_rank(rank: int, num_ranks: int) -> None:
    """What DeepSpeed reads of a launcher. LOCAL_RANK is a device index: each worker sees its own GPUs only, so 0."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"})


def show_gpus(gpu_ids: Sequence[str]) -> None:
    """The GPUs of this node that this process and its children see; before anything touches one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)


def prepare_engine_environment(cpu: bool) -> None:
    """What vLLM reads, for this process and the engine's own; before vLLM is imported. The user's values stay.

    On the CPU: one engine process without compiled samplers (6 to 9 s at the first log-probs) and without pinned
    cores. On GPUs: log-probs of the sampling distribution rule FlashInfer's sampler out, which takes 70 s to build.
    """
    prepare_environment()
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if cpu:
        defaults |= {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM makes a worker process of its own even for one rank
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    else:
        defaults |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
