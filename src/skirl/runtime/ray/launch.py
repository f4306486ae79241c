"""From a recipe to a run's processes: what the cluster has, who goes where, how much memory each may take.

recipe -> cluster (this machine's, or one that runs) -> placement, memory shares -> RayWorkers
"""

import logging
from dataclasses import replace

import ray

from skirl.config.recipe import Command
from skirl.config.schema import Config, RayRuntimeConfig, VLLMEngineConfig
from skirl.runtime.memory import Shapes, choose_sleep_level, engine_memory_share, read_shapes
from skirl.runtime.placement import Cluster, Placement, plan_placement
from skirl.runtime.ray.cluster import describe_cluster, local_cluster
from skirl.runtime.ray.workers import RayWorkers, connect
from skirl.runtime.worker import WorkerSpec
from skirl.runtime.workers import EngineSetup
from skirl.weights.manifest import size_bytes

__all__ = ["launch"]

log = logging.getLogger(__name__)


def launch(spec: WorkerSpec, command: Command, engine: EngineSetup | None) -> RayWorkers:
    """Brings a run's processes up; a recipe that the cluster cannot hold is refused before any is started.

    Args:
        command: what runs, for the roles in use.
        engine: what vLLM engines are made from; None where the policy samples itself.
    """
    config = spec.config
    assert isinstance(config.runtime, RayRuntimeConfig)
    shapes = read_shapes(config, command)
    heads = (shapes.policy.heads, shapes.policy.kv_heads)
    if config.runtime.address is None and not ray.is_initialized():
        plan_placement(config, local_cluster(), command=command, heads=heads)  # refused before Ray is started
    own_cluster = connect(config.runtime)
    try:
        cluster = describe_cluster()
        placement = plan_placement(config, cluster, command=command, heads=heads)
        if engine is not None and placement.device == "gpu":
            engine = _with_memory(config, command, placement, cluster, engine, shapes=shapes)
        return RayWorkers(spec, placement, engine=engine, own_cluster=own_cluster)
    except BaseException:  # fence: a cluster that was started here ends with the run that it was for
        if own_cluster and ray.is_initialized():
            ray.shutdown()
        raise


def _with_memory(
    config: Config,
    command: Command,
    placement: Placement,
    cluster: Cluster,
    engine: EngineSetup,
    *,
    shapes: Shapes,
) -> EngineSetup:
    """The engines' share of the GPUs' memory, and what they do while the trainer works."""
    assert isinstance(config.rollout.engine, VLLMEngineConfig)
    known = [n.gpu_memory_bytes for n in cluster.nodes if n.gpu_memory_bytes]
    share = config.rollout.engine.gpu_memory_utilization
    if known:
        share = engine_memory_share(config, placement, shapes, command=command, total_bytes=min(known))
    level, why = choose_sleep_level(
        sum(size_bytes(tensor) for tensor in engine.expected if not tensor.trained),
        sum(size_bytes(tensor) for tensor in engine.expected),
    )
    asked = config.rollout.engine.sleep_level
    level = level if asked == "auto" else asked
    if placement.engines_share_with_policy:
        log.info("engines take %.3f of each GPU's memory; sleep level %d (%s)", share or 0.0, level, why)
    return replace(engine, spec=replace(engine.spec, gpu_memory_utilization=share), sleep_level=2 if level == 2 else 1)
