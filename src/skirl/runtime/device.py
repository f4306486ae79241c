"""Which device this process computes on; the only place that asks for GPUs."""

import platform

import torch

__all__ = ["collective_backend", "device_name", "has_gpu", "peak_memory_bytes", "pick_device"]


def has_gpu() -> bool:
    """True where PyTorch sees a GPU."""
    return torch.cuda.is_available()


def pick_device() -> torch.device:
    """The first visible GPU, else the CPU. Ray shows each worker only its own GPUs."""
    if not has_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def collective_backend(device: torch.device) -> str:
    """ "nccl" between GPUs, "gloo" between CPUs."""
    return "gloo" if device.type == "cpu" else "nccl"


def device_name() -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name() if has_gpu() else platform.processor() or platform.machine()


def peak_memory_bytes() -> int:
    """Largest GPU memory held so far; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() if has_gpu() else 0
