"""``skirl show-placement``: nodes, GPUs, roles, bytes and transport of a recipe. Starts nothing.

recipe + this machine, a cluster, or pretended nodes -> plan_placement -> tables
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skirl.cli.show import report
from skirl.config.load import Loaded
from skirl.config.placing import roles_in_use
from skirl.config.recipe import Command
from skirl.config.schema import RayRuntimeConfig, VLLMEngineConfig
from skirl.errors import ConfigError, ModelError
from skirl.runtime import memory
from skirl.runtime.memory import Item, Shapes
from skirl.runtime.placement import Cluster, Node, Placement, Process, plan_placement, plan_transport
from skirl.runtime.ray.cluster import ask_cluster, local_cluster

__all__ = ["Pretended", "Report", "placement_report", "show_placement"]


@dataclass(frozen=True, slots=True)
class Pretended:
    """A cluster asked about that need not exist. ``gpu_memory_gb``: of one GPU, in units of 2^30 bytes."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    gpu_memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What ``skirl show-placement`` knows.

    Attributes:
        cluster: what was planned for; source: in words, where it comes from.
        placement: None where ``error`` says why there is none. items: bytes of a GPU by group; None without a model.
        share: of a GPU that an engine takes. sleep: level of engines on shared GPUs, and why.
    """

    loaded: Loaded
    command: Command
    cluster: Cluster
    source: str
    placement: Placement | None
    items: list[list[Item]] | None
    share: float | None
    sleep: str | None
    transport: str | None
    notes: tuple[str, ...]
    error: str | None


# ------------------------------------------------------------------------------------------------------------- planning
def placement_report(loaded: Loaded, command: Command | None, pretended: Pretended) -> Report:
    """Plans a recipe for a command; without one, for the first of train, sft, eval that it has a section for."""
    judged = report(loaded, command)
    config, notes = loaded.config, list(judged.warnings)
    cluster, source = _cluster(loaded, pretended, notes)
    shapes = _shapes(loaded, judged.command, notes)
    found = Report(loaded, judged.command, cluster, source, None, None, None, None, None, tuple(notes), judged.error)
    if judged.error is not None:
        return found
    if not isinstance(config.runtime, RayRuntimeConfig):
        return _in_one_process(found, shapes)
    try:
        heads = None if shapes is None else (shapes.policy.heads, shapes.policy.kv_heads)
        placement = plan_placement(config, cluster, command=judged.command, heads=heads, provenance=loaded.provenance)
    except ConfigError as problem:
        return replace(found, error=str(problem))
    found = replace(found, placement=placement, transport=plan_transport(config, placement))
    if shapes is None:
        return found
    found = replace(found, items=memory.group_items(config, placement, shapes, command=judged.command))
    return _with_engines(found, shapes)


def _in_one_process(found: Report, shapes: Shapes | None) -> Report:
    config, command = found.loaded.config, found.command
    note = "runtime.kind = local: everything runs in the driver's process on this machine, on one GPU where it has any"
    found = replace(found, source="this machine", cluster=local_cluster(), notes=(*found.notes, note))
    if shapes is None:
        return found
    items = memory.role_items(config, shapes, roles_in_use(config, command), command=command, engines=False)
    return replace(found, items=[items])


def _cluster(loaded: Loaded, pretended: Pretended, notes: list[str]) -> tuple[Cluster, str]:
    runtime = loaded.config.runtime
    if pretended.nodes is not None or pretended.gpus_per_node is not None:
        return _pretend(loaded, pretended)
    here = local_cluster()
    source = "this machine"
    if isinstance(runtime, RayRuntimeConfig) and runtime.address is not None:
        asked = ask_cluster(runtime.address)
        if asked is not None:
            here, source = asked, f"the cluster at {runtime.address}"
        else:
            notes.append(
                f"no Ray cluster answers at runtime.address = {runtime.address}: planned for this machine instead; "
                "--nodes and --gpus-per-node plan for another one"
            )
    return _with_memory(here, pretended), source


def _pretend(loaded: Loaded, pretended: Pretended) -> tuple[Cluster, str]:
    """Equal nodes with as many cores as this machine has, or as their GPUs ask for."""
    nodes, own = pretended.nodes or 1, local_cluster().nodes[0]
    gpus = own.gpus if pretended.gpus_per_node is None else pretended.gpus_per_node
    runtime = loaded.config.runtime
    each = runtime.cpus_per_rank if isinstance(runtime, RayRuntimeConfig) else 1.0
    cpus = max(own.cpus, float(math.ceil(each * gpus)))
    found = Cluster(tuple(Node(f"node-{i}", cpus, gpus, own.gpu_memory_bytes) for i in range(nodes)))
    return _with_memory(found, pretended), "pretended nodes"


def _with_memory(cluster: Cluster, pretended: Pretended) -> Cluster:
    if pretended.gpu_memory_gb is None:
        return cluster
    size = int(pretended.gpu_memory_gb * memory.GIB)
    return Cluster(tuple(replace(node, gpu_memory_bytes=size) for node in cluster.nodes))


def _shapes(loaded: Loaded, command: Command, notes: list[str]) -> Shapes | None:
    path = loaded.config.model.path
    if not path.exists():
        notes.append(f"model.path: there is no {path} yet, so bytes and attention heads are not known")
        return None
    try:
        return memory.read_shapes(loaded.config, command)
    except ModelError as problem:
        notes.append(f"bytes and attention heads are not known: {problem}")
        return None


def _with_engines(found: Report, shapes: Shapes) -> Report:
    config, placement = found.loaded.config, found.placement
    assert placement is not None
    found = replace(found, notes=(*found.notes, *_too_large(found, placement)))
    engine = config.rollout.engine
    if not placement.of("rollout") or not isinstance(engine, VLLMEngineConfig) or placement.device == "cpu":
        return found
    sleep = None
    if placement.engines_share_with_policy:
        shape = shapes.policy
        width = memory.engine_weight_bytes(config, shape) * engine.tensor_parallel_size / shape.total
        frozen = int(width * (shape.total - shape.trained(config.model.freeze)))
        level, why = memory.choose_sleep_level(frozen, int(width * shape.total))
        asked = engine.sleep_level
        sleep = f"level {level} (auto: {why})" if asked == "auto" else f"level {asked} (rollout.engine.sleep_level)"
    total = _gpu_memory(found.cluster)
    if total is None:
        note = "the GPUs' memory is not known: --gpu-memory-gb says it, and shows the share that engines get"
        return replace(found, sleep=sleep, notes=(*found.notes, note))
    try:
        share = memory.engine_memory_share(config, placement, shapes, command=found.command, total_bytes=total)
    except ConfigError as problem:
        return replace(found, sleep=sleep, error=str(problem))
    return replace(found, sleep=sleep, share=share)


def _too_large(found: Report, placement: Placement) -> Iterator[str]:
    """Groups that need more than their GPUs have while the policy trains, as far as estimates can say."""
    total = _gpu_memory(found.cluster)
    if total is None or placement.device == "cpu":
        return
    for index, items in enumerate(found.items or []):
        asleep = memory.ASLEEP_BYTES if placement.engines_share_with_policy else 0
        need = sum(item.num_bytes for item in items) + asleep + memory.MARGIN_BYTES
        if need > total:
            yield (
                f"group {index} needs about {_gib(need)} of {_gib(total)} on each GPU while it trains, "
                f"{_gib(memory.MARGIN_BYTES)} of them to spare: it may run out of memory"
            )


def _gpu_memory(cluster: Cluster) -> int | None:
    """Of the smallest GPU."""
    return min((node.gpu_memory_bytes for node in cluster.nodes if node.gpu_memory_bytes), default=None)


# ------------------------------------------------------------------------------------------------------------- printing
def show_placement(found: Report, console: Console, *, as_json: bool) -> None:
    """Prints the report, for people or as one JSON object."""
    if as_json:
        console.print(Text(json.dumps(_as_json(found), indent=2, ensure_ascii=False)), soft_wrap=True)
        return
    console.print(Text(f"skirl {found.command} on {found.source}: {_amount(found.cluster)}"))
    if found.placement is not None:
        _places(found.placement, console)
    if found.items is not None:
        _bytes(found, console)
    if found.placement is not None:
        for line in _lines(found):
            console.print(Text(line), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def _amount(cluster: Cluster) -> str:
    sizes = Counter(node.gpu_memory_bytes for node in cluster.nodes if node.gpus)
    of = ", ".join(f"{_gib(size)} each" for size in sizes if size)
    gpus = f"{cluster.gpus} GPU{'' if cluster.gpus == 1 else 's'}" + (f" ({of})" if of else "")
    nodes = f"{len(cluster.nodes)} node{'' if len(cluster.nodes) == 1 else 's'}"
    return f"{nodes}, {gpus}, {cluster.cpus:g} CPU cores"


def _places(placement: Placement, console: Console) -> None:
    """A line for each node of each group."""
    place = "GPUs" if placement.device == "gpu" else "places"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("node", place, "group", "processes"):
        table.add_column(name, overflow="fold")
    rows = list(_rows(placement))
    numbers: Counter[str] = Counter()
    for node, group, bundles in sorted(rows, key=lambda row: row[0]):
        first = numbers[node]
        numbers[node] += len(bundles)
        roles = f"{group}: {', '.join(placement.groups[group].roles)}"
        table.add_row(node, _range(range(first, numbers[node])), roles, _processes(placement, group, bundles))
    console.print(table)


def _rows(placement: Placement) -> Iterator[tuple[str, int, list[int]]]:
    for index, group in enumerate(placement.groups):
        by_node = sorted(range(len(group.nodes)), key=lambda bundle: (group.nodes[bundle], bundle))
        for node, bundles in groupby(by_node, key=lambda bundle: group.nodes[bundle]):
            yield node, index, list(bundles)


def _processes(placement: Placement, group: int, bundles: list[int]) -> str:
    """ "policy 0-7 (with reference), rollout 0-3 (2 GPUs each)"."""
    inside = [p for p in placement.processes if p.group == group and p.bundles[0] in set(bundles)]
    texts: list[str] = []
    for role, some in groupby(inside, key=lambda p: p.role):
        processes: list[Process] = list(some)
        text = f"{role} {_range([p.index for p in processes])}"
        guests = [name for name in processes[0].holds if name != role]
        text += f" (with {', '.join(guests)})" if guests else ""
        size = len(processes[0].bundles)
        texts.append(text + (f" ({size} {'GPUs' if placement.device == 'gpu' else 'places'} each)" if size > 1 else ""))
    return ", ".join(texts)


def _range(numbers: "list[int] | range") -> str:
    """ "0-3, 6" of [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _bytes(found: Report, console: Console) -> None:
    """What one GPU of each group holds, by role."""
    assert found.items is not None
    where = "GPU" if found.placement is not None and found.placement.device == "gpu" else "process (host memory)"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("group", "role", "what", f"a {where}", "while engines sample", "on the host"):
        table.add_column(name, justify="right" if name.startswith(("a ", "while", "on")) else "left")
    for group, items in enumerate(found.items):
        for item in items:
            kept = _gib(item.num_bytes) if item.while_sampling else "0"
            host = _gib(item.host_bytes) if item.host_bytes else ""
            table.add_row(str(group), item.role, item.name, _gib(item.num_bytes), kept, host)
        kept = sum(item.num_bytes for item in items if item.while_sampling)
        table.add_row(str(group), "", "all but engines", _gib(sum(item.num_bytes for item in items)), _gib(kept), "")
    console.print()
    console.print(table)
    console.print(Text("estimates; formulas: docs/placement.md", style="dim"))


def _lines(found: Report) -> Iterator[str]:
    yield ""
    if found.transport is None:
        yield "weights: the policy samples in its own processes, nothing is sent"
        return
    asked = found.loaded.config.rollout.commit.transport
    yield f"weights reach the engines by {found.transport}" + ("" if asked == "auto" else " (rollout.commit.transport)")
    if found.share is not None:
        asked_share = getattr(
            found.loaded.config.rollout.engine, "gpu_memory_utilization", None
        )  # getattr: of vllm only
        source = "rollout.engine.gpu_memory_utilization" if asked_share is not None else "found by skirl"
        yield f"each engine takes {found.share:.3f} of its GPUs' memory ({source})"
    if found.sleep is not None:
        yield f"engines sleep while the policy trains: {found.sleep}"


def _gib(count: float) -> str:
    return f"{count / memory.GIB:.2f} GiB" if count < 10 * memory.GIB else f"{count / memory.GIB:.1f} GiB"


def _as_json(found: Report) -> dict[str, Any]:
    placement = found.placement
    return {
        "recipe": str(found.loaded.recipe),
        "command": found.command,
        "source": found.source,
        "nodes": [asdict(node) for node in found.cluster.nodes],
        "device": placement.device if placement is not None else None,
        "groups": [_group_as_json(group) for group in placement.groups] if placement is not None else [],
        "processes": [_process_as_json(placement, p) for p in placement.processes] if placement is not None else [],
        "bytes": None if found.items is None else [[asdict(item) for item in items] for items in found.items],
        "transport": found.transport,
        "engine_memory_share": found.share,
        "sleep": found.sleep,
        "notes": list(found.notes),
        "error": found.error,
    }


def _group_as_json(group: Any) -> dict[str, Any]:
    return {"roles": list(group.roles), "strategy": group.strategy, "nodes": list(group.nodes)}


def _process_as_json(placement: Placement, process: Process) -> dict[str, Any]:
    return asdict(process) | {"nodes": list(placement.nodes_of(process))}
