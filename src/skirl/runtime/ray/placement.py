"""A placement reserved on a Ray cluster: one Ray placement group a part, waited for with a deadline, given back once.

Placement -> reserve -> Reservation -> options(process) -> actor.options(**...).remote(...)

Places of one bundle are one GPU each, so all processes of a bundle see the same GPU and no other process does.
"""

import logging
import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skirl.errors import ConfigError, WorkerError
from skirl.runtime.placement import Placement, Process
from skirl.runtime.ray.cluster import node_ids

__all__ = ["Reservation", "gpu_ids_of", "reserve"]

log = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"
RESOURCES = ("GPU", "CPU")
GPU_IDS_WITHIN_S = 60.0
AS_PLANNED_WITHIN_S = 5.0
"""How long the nodes of the plan are waited for; after that any nodes of equal worth will do."""


class Reservation:
    """Places that a run holds until ``release``; made by ``reserve``."""

    def __init__(self, placement: Placement, name: str) -> None:
        self._placement, self._name = placement, name
        self._held: dict[tuple[int, int], PlacementGroup] = {}

    def options(self, process: Process) -> dict[str, Any]:
        """What ``actor.options`` takes to start a process in its place."""
        group, index = self._place(process, process.bundles[0])
        return {
            "num_cpus": process.cpus,
            "num_gpus": process.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }

    def node_of(self, process: Process) -> str:
        """Ray's id of the node that a process's first place is on."""
        group, index = self._place(process, process.bundles[0])
        return placement_group_table(group)["bundles_to_node_id"][index]

    def release(self) -> None:
        """Gives every place back; whatever still runs in them ends. Harmless to repeat."""
        held, self._held = list(self._held.values()), {}
        if ray.is_initialized():
            for group in held:
                remove_placement_group(group)

    def places(self, process: Process) -> list[dict[str, Any]]:
        """Options for a task in each place of a process."""
        found = [self._place(process, bundle) for bundle in process.bundles]
        return [
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}
            for group, index in found
        ]

    def _place(self, process: Process, bundle: int) -> tuple[PlacementGroup, int]:
        parts = self._placement.groups[process.group].parts
        number = next(i for i, part in enumerate(parts) if bundle in part)
        return self._held[process.group, number], parts[number].index(bundle)

    def take(self, timeout_s: float) -> None:
        """Reserves everything: where it was planned if that is free, else where Ray finds room.

        Raises:
            WorkerError: there is no room within ``timeout_s``.
        """
        start, ids = time.monotonic(), node_ids()
        if all(name in ids for group in self._placement.groups for name in group.nodes):
            try:
                self._take_all(start + min(AS_PLANNED_WITHIN_S, timeout_s / 2), timeout_s, ids)
                return
            except WorkerError:
                log.info("the nodes that were planned are busy; looking for others")
                self.release()
        self._take_all(start + timeout_s, timeout_s, None)

    def _take_all(self, deadline: float, timeout_s: float, ids: Mapping[str, str] | None) -> None:
        groups = self._placement.groups
        order = [(g, p) for g, group in enumerate(groups) for p in range(len(group.parts))]
        order.sort(key=lambda one: (groups[one[0]].strategy == "PACK", -len(groups[one[0]].parts[one[1]])))
        for group, part in order:
            taken = self._take_part(group, part, deadline, ids)
            if taken is not None:
                raise WorkerError(self._timeout_message(group, part, taken, timeout_s))

    def _take_part(self, group: int, part: int, deadline: float, ids: Mapping[str, str] | None) -> list[str] | None:
        """Reserves a part on its planned nodes (``ids`` of them), or anywhere; None, or nodes that were ruled out."""
        plan = self._placement.groups[group]
        bundles = [dict(plan.bundles[bundle]) for bundle in plan.parts[part]]
        taken = self._nodes_of_group(group) if plan.strategy == "STRICT_SPREAD" and ids is None else []
        where = [{NODE_LABEL: f"!in({','.join(taken)})"} if taken else {}] * len(bundles)
        if ids is not None:
            where = [{NODE_LABEL: ids[plan.nodes[bundle]]} for bundle in plan.parts[part]]
        strategy = "PACK" if plan.strategy == "PACK" else "STRICT_PACK"
        name = f"{self._name}: {'+'.join(plan.roles)} ({uuid.uuid4().hex[:8]})"  # Ray wants names that are unique
        held = placement_group(bundles, strategy=strategy, bundle_label_selector=where, name=name)
        self._held[group, part] = held
        seconds = max(1, math.ceil(deadline - time.monotonic()))  # Ray cuts fractions off
        return None if held.wait(seconds) else taken

    def _nodes_of_group(self, group: int) -> list[str]:
        held = [one for (number, _), one in self._held.items() if number == group]
        return sorted({node for one in held for node in placement_group_table(one)["bundles_to_node_id"].values()})

    def _timeout_message(self, group: int, part: int, taken: list[str], timeout_s: float) -> str:
        plan = self._placement.groups[group]
        want, free = _total([plan.bundles[bundle] for bundle in plan.parts[part]]), ray.available_resources()
        apart = f", on another node than {', '.join(taken)}" if taken else ""
        where = " on one node" if plan.strategy != "PACK" else ""
        return (
            f"no place for {', '.join(plan.roles)} within {timeout_s:.0f} s (runtime.start_timeout_s): it needs "
            f"{_text(want)}{where}{apart}; the whole run needs {_text(_demand(self._placement))}, the cluster has "
            f"{_text(ray.cluster_resources())} of which {_text(free)} are free, over all nodes. Something else holds "
            "the rest: see `ray status`, wait for it or end it"
        )


def reserve(placement: Placement, timeout_s: float, *, name: str) -> Reservation:
    """Reserves every place of a run on the cluster that this process is connected to.

    Args:
        timeout_s: how long to wait for places that others still hold.
        name: of the run, as ``skirl cluster status`` shows it.

    Raises:
        ConfigError: the cluster has less than the placement needs, free or not; nothing was reserved.
        WorkerError: the places did not become free in time; what was reserved so far is given back.
    """
    demand, supply = _demand(placement), ray.cluster_resources()
    if any(amount > supply.get(name, 0.0) + 1e-6 for name, amount in demand.items()):
        raise ConfigError(
            f"the placement needs {_text(demand)}, but the Ray cluster has {_text(supply)}: lower gpus in "
            "runtime.placement and trainer.ranks, lower runtime.cpus_per_rank, or add nodes"
        )
    reservation = Reservation(placement, name)
    try:
        reservation.take(timeout_s)
    except BaseException:  # fence: what was reserved so far is given back, then the error goes on
        reservation.release()
        raise
    return reservation


def gpu_ids_of(reservation: Reservation, process: Process) -> tuple[str, ...]:
    """GPUs of a process of several places, as their node counts them; () on CPUs.

    Ray shows an actor the GPU of its first place only; an engine of several GPUs must be shown all of them. Asked by a
    short task in each place with the share that the process will take, so before it is started.
    """
    if not process.gpus:
        return ()
    ask = ray.remote(_own_gpu_ids)
    tasks = [ask.options(num_cpus=0, num_gpus=process.gpus, **place).remote() for place in reservation.places(process)]
    ready, late = ray.wait(tasks, num_returns=len(tasks), timeout=GPU_IDS_WITHIN_S)
    if late:
        raise WorkerError(
            f"{process.role} {process.index}: {len(late)} of its {len(tasks)} GPUs did not answer within "
            f"{GPU_IDS_WITHIN_S:.0f} s; their shares are taken, or their node is overloaded"
        )
    found = dict(zip(ready, ray.get(ready), strict=True))
    return tuple(gpu for task in tasks for gpu in found[task])


def _own_gpu_ids() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _demand(placement: Placement) -> dict[str, float]:
    return _total([bundle for group in placement.groups for bundle in group.bundles])


def _total(bundles: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in RESOURCES}


def _text(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amounts.get(name, 0.0):g} {name}" for name in RESOURCES)
