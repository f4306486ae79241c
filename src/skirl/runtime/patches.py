"""Changes to other libraries, each with its reason, version and condition for removal."""

__all__ = ["skip_deepspeed_shared_memory_kernel"]


def skip_deepspeed_shared_memory_kernel() -> None:
    """Keeps DeepSpeed from compiling its shared-memory collectives at start (45 to 57 s, needs g++ and ninja).

    DeepSpeed 0.19; results with two gloo ranks are bit-identical without it. Remove when DeepSpeed has a setting.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
