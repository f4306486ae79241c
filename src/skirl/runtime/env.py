"""Environment variables: read and set here only."""

import os
import shutil

__all__ = ["declare_rank", "prepare_environment"]


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
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def declare_rank(rank: int, num_ranks: int) -> None:
    """What DeepSpeed reads of a launcher. LOCAL_RANK is a device index: each worker sees its own GPUs only, so 0."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"})
