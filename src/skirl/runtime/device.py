"""Which device this process computes on; the only place that asks for GPUs."""

import platform

import torch

__all__ = [
    "collective_backend",
    "device_name",
    "free_cached_memory",
    "gpu_uuid",
    "has_gpu",
    "memory_bytes",
    "pick_device",
    "reset_peak_memory",
    "synchronize",
]


def has_gpu() -> bool:
    """True where PyTorch sees a GPU."""
    return torch.cuda.is_available()


def pick_device() -> torch.device:
    """The first visible GPU, else the CPU. Ray shows each worker only its own GPUs."""
    if not has_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    # cuDNN builds and keeps a plan for each shape, which sampling changes at every token: 0.1 s and 3 MB of host memory
    # a token were seen on an H200
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def collective_backend(device: torch.device) -> str:
    """ "nccl" between GPUs, "gloo" between CPUs."""
    return "gloo" if device.type == "cpu" else "nccl"


def device_name() -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name() if has_gpu() else platform.processor() or platform.machine()


def memory_bytes() -> tuple[int, int]:
    """GPU memory that this process's tensors hold: (now, most since the start or ``reset_peak_memory``), bytes.

    Memory that PyTorch keeps for later tensors is not counted. (0, 0) on the CPU.
    """
    return (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if has_gpu() else (0, 0)


def reset_peak_memory() -> None:
    """Starts a new peak, at what is held now."""
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()


def free_cached_memory() -> None:
    """Returns memory that PyTorch keeps for later tensors to the GPU, for the other processes on it."""
    if has_gpu():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Waits for all work that was given to the GPU."""
    if has_gpu():
        torch.cuda.synchronize()


def gpu_uuid() -> str | None:
    """Id of this process's GPU as nvidia-smi prints it, equal in all processes that share it; None on the CPU."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}" if has_gpu() else None
