"""Which process computes where: groups of roles -> places on nodes -> one process a role and place. Starts nothing.

recipe + cluster -> plan_placement -> Placement -> runtime/ray/placement.py reserves it
                                   -> cli/show_placement.py prints it

A place is one GPU, or on machines without GPUs ``runtime.cpus_per_rank`` cores; a bundle is what Ray reserves for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Literal

from skirl.config.placing import placement_groups, placement_problems, roles_in_use
from skirl.config.recipe import Command, Recipe
from skirl.config.schema import Config, PlacedRole, PlacementGroupConfig, RayRuntimeConfig, VLLMEngineConfig
from skirl.errors import ConfigError
from skirl.rollouts.engines.arguments import NO_CHUNKS_ON_CPU

__all__ = [
    "Cluster",
    "GroupPlan",
    "Node",
    "Placement",
    "Process",
    "plan_placement",
    "plan_transport",
    "roles_in_use",
]

Strategy = Literal["PACK", "STRICT_PACK", "STRICT_SPREAD"]
Transport = Literal["shared_memory", "cuda_ipc", "nccl", "gloo"]

RAY_RESOLUTION = 10_000
"""Ray counts resources in steps of 1 / this."""
NODES_IN_MESSAGE = 8
RUN_PLANS: tuple[PlacedRole, ...] = ("policy", "critic", "reference")
"""Roles that run plans, rank by rank; of those in one group the first gives the processes their name."""


# -------------------------------------------------------------------------------------------------------------- records
@dataclass(frozen=True, slots=True)
class Node:
    """A machine. ``gpu_memory_bytes``: of one GPU; None where it is not known."""

    name: str
    cpus: float
    gpus: int = 0
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """All that there is, whether free or not."""

    nodes: tuple[Node, ...]

    @property
    def cpus(self) -> float:
        """CPU cores."""
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs."""
        return sum(node.gpus for node in self.nodes)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Roles that share places.

    Attributes:
        roles: those that run, of the recipe's group.
        bundles: what Ray reserves for each place.
        strategy: PACK: all of ``parts[0]`` on as few nodes as can be. STRICT_PACK: each part on one node.
            STRICT_SPREAD: each part on one node, no two on the same.
        parts: bundle indices that are reserved together, in order.
        nodes: name of each bundle's node, were the cluster empty. Ray may choose others of equal worth.
    """

    roles: tuple[PlacedRole, ...]
    bundles: tuple[Mapping[str, float], ...]
    strategy: Strategy
    parts: tuple[tuple[int, ...], ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Process:
    """One Ray actor.

    Attributes:
        role: what it is. index: its number among its role's processes: rank, or number of the engine.
        holds: roles whose models it holds: policy, critic and reference of one group are in one process a place.
        group: index in ``Placement.groups``.
        bundles: places of the group that it computes on; Ray runs it in the first.
        cpus, gpus: what Ray accounts for it, of its first bundle. An engine of several GPUs uses the others beside.
    """

    role: PlacedRole
    index: int
    holds: tuple[PlacedRole, ...]
    group: int
    bundles: tuple[int, ...]
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Every process of a run and its place."""

    device: Literal["cpu", "gpu"]
    groups: tuple[GroupPlan, ...]
    processes: tuple[Process, ...]

    def of(self, role: PlacedRole) -> tuple[Process, ...]:
        """Processes of a role by index; none for a role that another one's processes hold, or that is not used."""
        return tuple(process for process in self.processes if process.role == role)

    def host_of(self, role: PlacedRole) -> PlacedRole | None:
        """The role whose processes hold a role's model; None for a role that is not used."""
        return next((process.role for process in self.processes if role in process.holds), None)

    def group_of(self, role: PlacedRole) -> int | None:
        """Index of the group that a role is in; None for a role that is not used."""
        return next((i for i, group in enumerate(self.groups) if role in group.roles), None)

    def shares(self, role_a: PlacedRole, role_b: PlacedRole) -> bool:
        """Both are used, and on the same GPUs."""
        return self.group_of(role_a) is not None and self.group_of(role_a) == self.group_of(role_b)

    @property
    def engines_share_with_policy(self) -> bool:
        """Engines must sleep while the policy trains."""
        return self.shares("policy", "rollout")

    def nodes_of(self, process: Process) -> tuple[str, ...]:
        """Names of the nodes it was planned on, one a bundle."""
        return tuple(self.groups[process.group].nodes[bundle] for bundle in process.bundles)


# ------------------------------------------------------------------------------------------------------------- planning
def plan_placement(
    config: Config,
    cluster: Cluster,
    *,
    command: Command,
    heads: tuple[int, int] | None,
    asynchronous: bool = False,
    provenance: Mapping[str, str] = MappingProxyType({}),
) -> Placement:
    """Finds a place for every process of a run, or says with numbers why there is none.

    Args:
        config: with a Ray runtime.
        cluster: what there is; that part of it may be busy shows when it is reserved.
        heads: attention heads and key-value heads of the language model; None leaves them unchecked.
        asynchronous: sampling goes on while the policy trains.
        provenance: path -> where its value was written; named in messages where given.

    Raises:
        ConfigError: the recipe contradicts itself, the model or the cluster.
    """
    runtime = config.runtime
    if not isinstance(runtime, RayRuntimeConfig):
        raise ConfigError("runtime.kind = local is one process, which has nothing to place: set it to ray")
    recipe = Recipe(config, provenance)
    problems = placement_problems(config, command, provenance)
    device = _device(recipe, runtime, cluster)
    groups = placement_groups(config, command)
    problems = problems or [*_engine_problems(recipe, groups, device, heads=heads, asynchronous=asynchronous)]
    if problems:
        raise ConfigError("\n".join(problems))
    demands = [_demand(config, group, device) for group in groups]
    nodes = _Supply(recipe, runtime, cluster, device).assign(demands)
    plans, processes = [], []
    for index, (demand, names) in enumerate(zip(demands, nodes, strict=True)):
        plans.append(_group_plan(runtime, demand, names, device))
        processes += _processes(runtime, demand, index, device)
    placement = Placement(device, tuple(plans), tuple(processes))
    plan_transport(config, placement)
    return placement


def _device(recipe: Recipe, runtime: RayRuntimeConfig, cluster: Cluster) -> Literal["cpu", "gpu"]:
    if runtime.device == "gpu" and not cluster.gpus:
        raise ConfigError(
            f"{recipe.at('runtime.device')}, but the cluster has 0 GPUs on {_count(len(cluster.nodes), 'node')} with "
            f"{_count(cluster.cpus, 'CPU core')}: set it to auto or cpu, or start Ray on machines with GPUs"
        )
    return "gpu" if runtime.device == "gpu" or (runtime.device == "auto" and cluster.gpus) else "cpu"


@dataclass(frozen=True, slots=True)
class _Demand:
    """A group and what it asks for. ``unit``: places of it that must lie on one node together."""

    config: PlacementGroupConfig
    unit: int
    engines: int

    @property
    def text(self) -> str:
        return f"{', '.join(self.config.roles)}: {self.config.gpus}"


def _demand(config: Config, group: PlacementGroupConfig, device: str) -> _Demand:
    engine = config.rollout.engine
    if "rollout" not in group.roles or not isinstance(engine, VLLMEngineConfig):
        return _Demand(group, 1, 0)
    fill = group.gpus // engine.tensor_parallel_size if device == "gpu" else 1
    return _Demand(group, engine.tensor_parallel_size, engine.engines or fill)


def _engine_problems(
    recipe: Recipe,
    groups: Sequence[PlacementGroupConfig],
    device: str,
    *,
    heads: tuple[int, int] | None,
    asynchronous: bool,
) -> Iterator[str]:
    """What depends on the device or the model."""
    engine, arguments = recipe.config.rollout.engine, recipe.config.rollout.vllm
    group = next((group for group in groups if "rollout" in group.roles), None)
    if group is None or not isinstance(engine, VLLMEngineConfig):
        return
    parallel, size = engine.tensor_parallel_size, recipe.at("rollout.engine.tensor_parallel_size")
    if device == "cpu" and arguments.get("enable_chunked_prefill"):
        yield f"{recipe.at('rollout.vllm.enable_chunked_prefill')}: {NO_CHUNKS_ON_CPU}"
    if heads is not None and not _divides(parallel, heads):
        yield (
            f"{size} does not divide the model's {heads[0]} attention heads "
            f"({heads[1]} key-value heads): use one of {_good_sizes(heads, group.gpus)}"
        )
    engines = engine.engines or group.gpus // parallel
    if device == "gpu" and engines * parallel != group.gpus:
        count = recipe.at("rollout.engine.engines") if engine.engines else f"{engines} engines (as many as fit)"
        yield (
            f"{count} x {size} need {engines * parallel} GPUs, but the group of rollout ({', '.join(group.roles)}) has "
            f"{group.gpus}, and engines must fill it: {_how_to_fill(recipe.config, engine, group.gpus)}"
        )
    if asynchronous and "policy" in group.roles:
        yield (
            f"Asynchronous training samples while the policy trains, but rollout and policy share {group.gpus} GPUs, "
            "where engines sleep meanwhile (weights by cuda_ipc): give rollout a group of its own, such as "
            f"runtime.placement: [{{roles: [policy], gpus: {group.gpus}}}, {{roles: [rollout], gpus: {parallel}}}]"
        )


def _how_to_fill(config: Config, engine: VLLMEngineConfig, gpus: int) -> str:
    assert isinstance(config.runtime, RayRuntimeConfig)
    parallel, whole = engine.tensor_parallel_size, "the group's gpus" if config.runtime.placement else "trainer.ranks"
    if gpus % parallel:
        sizes = ", ".join(str(size) for size in range(1, gpus + 1) if gpus % size == 0)
        return f"set rollout.engine.tensor_parallel_size to one of {sizes}, or {whole} to a multiple of it"
    return f"set rollout.engine.engines to {gpus // parallel} or null, or {whole} to {(engine.engines or 1) * parallel}"


def _divides(parallel: int, heads: tuple[int, int]) -> bool:
    """vLLM's rule: heads are dealt out evenly; key-value heads too, or each is held by several GPUs."""
    query, key_value = heads
    return query % parallel == 0 and (key_value % parallel == 0 or parallel % key_value == 0)


def _good_sizes(heads: tuple[int, int], gpus: int) -> str:
    return ", ".join(str(size) for size in range(1, max(gpus, 1) + 1) if _divides(size, heads))


def plan_transport(config: Config, placement: Placement) -> Transport | None:
    """How new weights will reach the engines; None where the policy samples itself.

    The rule of ``weights.choose``, which decides when the processes are there, on the nodes as planned.

    Raises:
        ConfigError: ``rollout.commit.transport`` cannot work on this placement.
    """
    if placement.group_of("rollout") is None:
        return None
    asked, on_gpu, shared = (
        config.rollout.commit.transport,
        placement.device == "gpu",
        placement.engines_share_with_policy,
    )
    head = placement.nodes_of(placement.of("policy")[0])[0]
    workers = [name for process in placement.of("rollout") for name in placement.nodes_of(process)]
    remote = sum(name != head for name in workers)
    can: dict[Transport, bool] = {
        "cuda_ipc": on_gpu and shared,
        "nccl": on_gpu and not shared,
        "shared_memory": not remote,
        "gloo": True,
    }
    found: Transport = next(name for name, possible in can.items() if possible)
    if asked != "auto" and not can[asked]:
        where = f"{'the' if shared else 'other than the'} policy's {'GPUs' if on_gpu else 'CPUs'}"
        raise ConfigError(
            f"rollout.commit.transport = {asked} does not reach the engines: their {len(workers)} workers are on "
            f"{where}, {remote} of them on other nodes than training rank 0. Set it to auto ({found})"
        )
    return found if asked == "auto" else asked


# ------------------------------------------------------------------------------------------------------ supply of nodes
class _Supply:
    """Places of a cluster, handed out unit by unit.

    Finding places is bin packing: four orders are tried, of groups (large units first, or those of distinct nodes
    first) and of nodes (the fullest that fits, or the emptiest).
    """

    def __init__(self, recipe: Recipe, runtime: RayRuntimeConfig, cluster: Cluster, device: str) -> None:
        self._recipe, self._cluster, self._device, self._each = recipe, cluster, device, runtime.cpus_per_rank
        self._all = [self._places(node) for node in cluster.nodes]
        self._free, self._prefer = list(self._all), min
        self._noun = "GPU" if device == "gpu" else "place"

    def _places(self, node: Node) -> int:
        by_cpu = int(node.cpus / self._each + 1e-9)
        return min(node.gpus, by_cpu) if self._device == "gpu" else by_cpu

    def assign(self, demands: Sequence[_Demand]) -> list[list[str]]:
        """Node of each place of each group."""
        self._check_totals(demands)
        for demand in demands:
            self._check_nodes(demand)
        problems: list[ConfigError] = []
        for full, spread_first in product((True, False), (False, True)):
            self._free, self._prefer = list(self._all), (min if full else max)
            try:
                return self._assign(demands, spread_first=spread_first)
            except ConfigError as problem:
                problems.append(problem)
        raise problems[0]

    def _assign(self, demands: Sequence[_Demand], *, spread_first: bool) -> list[list[str]]:
        def rank(index: int) -> tuple[bool, int, int]:
            demand = demands[index]
            packed = self._unit(demand) == 1 and demand.config.nodes is None
            late = packed or (spread_first and demand.config.nodes is None)
            return late, -self._unit(demand), -demand.config.gpus

        result: list[list[str]] = [[] for _ in demands]
        for index in sorted(range(len(demands)), key=rank):
            result[index] = [self._cluster.nodes[node].name for node in self._take_group(demands[index])]
        return result

    @staticmethod
    def _unit(demand: _Demand) -> int:
        nodes = demand.config.nodes
        return demand.unit if nodes is None else demand.config.gpus // nodes

    def _check_totals(self, demands: Sequence[_Demand]) -> None:
        need, nodes = sum(demand.config.gpus for demand in demands), self._cluster.nodes
        runtime = self._recipe.config.runtime
        assert isinstance(runtime, RayRuntimeConfig)
        have = self._cluster.gpus if self._device == "gpu" else sum(self._all)
        places, parts = sum(self._all), "; ".join(demand.text for demand in demands)
        source, lower = self._recipe.at("trainer.ranks"), "trainer.ranks"
        if runtime.placement:
            where = self._recipe.provenance.get("runtime.placement", "")
            source = "runtime.placement" + (f" ({where})" if where else "")
            lower = "gpus and trainer.ranks" + (", let roles share a group" if len(demands) > 1 else "")
        if need > have and self._device == "gpu":
            raise ConfigError(
                f"{source} needs {_count(need, 'GPU')} ({parts}), but the cluster has {have} on "
                f"{_count(len(nodes), 'node')}: lower {lower}, or add nodes"
            )
        if need > places:
            raise ConfigError(
                f"{source} needs {_count(need * self._each, 'CPU core')} ({parts}; runtime.cpus_per_rank = "
                f"{self._each:g} for each place), but the cluster has {self._cluster.cpus:g} on "
                f"{_count(len(nodes), 'node')}, enough for {_count(places, 'place')}: lower runtime.cpus_per_rank or "
                f"{lower}, or add nodes"
            )

    def _check_nodes(self, demand: _Demand) -> None:
        largest, spread = max(self._all, default=0), demand.config.nodes
        if demand.unit > largest:
            raise ConfigError(
                f"{self._recipe.at('rollout.engine.tensor_parallel_size')} needs {demand.unit} {self._noun}s on one "
                f"node, but the largest node has {largest}: an engine does not span nodes; lower it and run more "
                "engines"
            )
        if spread is None:
            return
        fitting = sum(places >= self._unit(demand) for places in self._all)
        if fitting < spread:
            raise ConfigError(
                f"runtime.placement: the group of {', '.join(demand.config.roles)} asks for {self._unit(demand)} "
                f"{self._noun}s on each of {_count(spread, 'node')}, but the cluster has "
                f"{_count(len(self._all), 'node')}, {fitting} of which with so many: lower nodes, or gpus"
            )

    def _take_group(self, demand: _Demand) -> list[int]:
        size, used = self._unit(demand), set[int]()
        places: list[int] = []
        if size == 1 and demand.config.nodes is None:
            return self._take_many(demand.config.gpus)
        for _ in range(demand.config.gpus // size):
            fits = [i for i, free in enumerate(self._free) if free >= size and i not in used]
            if not fits:
                raise self._fragmented(demand, size)
            node = self._prefer(fits, key=lambda i: self._free[i])
            self._free[node] -= size
            places += [node] * size
            if demand.config.nodes is not None:
                used.add(node)
        rest = demand.config.gpus - len(places)  # places beyond the engines, on CPUs
        return places + self._take_many(rest)

    def _take_many(self, count: int) -> list[int]:
        """All places on one node where one is large enough, else on as few as can be."""
        places: list[int] = []
        while count:
            fits = [i for i, free in enumerate(self._free) if free >= count]
            largest = max(range(len(self._free)), key=lambda i: self._free[i])
            node = min(fits, key=lambda i: self._free[i]) if fits else largest
            taken = min(count, self._free[node])
            assert taken > 0, "the sum was checked"
            self._free[node] -= taken
            places += [node] * taken
            count -= taken
        return places

    def _fragmented(self, demand: _Demand, size: int) -> ConfigError:
        rows = list(zip(self._cluster.nodes, self._free, self._all, strict=True))
        shown = ", ".join(f"{node.name} {free} of {places}" for node, free, places in rows[:NODES_IN_MESSAGE])
        more = f" and {len(rows) - NODES_IN_MESSAGE} more" if len(rows) > NODES_IN_MESSAGE else ""
        apart = ", on nodes of its own" if demand.config.nodes else ""
        return ConfigError(
            f"runtime.placement: the group of {', '.join(demand.config.roles)} ({demand.config.gpus} "
            f"{self._noun}s) comes in units of {size} on one node{apart}, "
            f"but beside the other groups there are free: {shown}{more}. Change gpus, nodes or "
            "rollout.engine.tensor_parallel_size so that the units fit"
        )


# -------------------------------------------------------------------------------------------------- bundles, processes
def _group_plan(runtime: RayRuntimeConfig, demand: _Demand, nodes: list[str], device: str) -> GroupPlan:
    count, spread = demand.config.gpus, demand.config.nodes
    bundle = {"CPU": runtime.cpus_per_rank} | ({"GPU": 1.0} if device == "gpu" else {})
    strategy: Strategy = "PACK"
    parts = [tuple(range(count))]
    if spread is not None:
        strategy, size = "STRICT_SPREAD", count // spread
        parts = [tuple(range(first, first + size)) for first in range(0, count, size)]
    elif demand.unit > 1:
        strategy, size = "STRICT_PACK", demand.unit
        parts = [tuple(range(first, min(first + size, count))) for first in range(0, count, size)]
    return GroupPlan(demand.config.roles, (bundle,) * count, strategy, tuple(parts), tuple(nodes))


def _processes(runtime: RayRuntimeConfig, demand: _Demand, group: int, device: str) -> Iterator[Process]:
    roles = demand.config.roles
    held: dict[PlacedRole, tuple[PlacedRole, ...]] = {role: (role,) for role in roles}
    planned: tuple[PlacedRole, ...] = tuple(role for role in RUN_PLANS if role in roles)
    for role in planned:
        del held[role]
    if planned:
        held = {planned[0]: planned, **held}
    cpus, gpus = _share(runtime.cpus_per_rank, len(held)), _share(1.0, len(held)) if device == "gpu" else 0.0
    for role, holds in held.items():
        size = demand.unit if role == "rollout" else 1
        for index in range(demand.engines if role == "rollout" else demand.config.gpus):
            bundles = tuple(range(index * size, (index + 1) * size))
            yield Process(role, index, holds, group, bundles, cpus, gpus)


def _share(amount: float, parts: int) -> float:
    """Equal shares that Ray can count and that never add up to more; whole ones above 1, as Ray wants them."""
    share = int(amount / parts * RAY_RESOLUTION + 1e-6) / RAY_RESOLUTION
    return float(int(share)) if share > 1 else share


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
