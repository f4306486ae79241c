"""What a cluster has: asked of Ray where one runs, else of this machine, without starting Ray or touching a GPU."""

import csv
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from skirl.runtime.env import prepare_environment
from skirl.runtime.placement import Cluster, Node

__all__ = ["ask_cluster", "describe_cluster", "local_cluster", "node_ids"]

MIB = 1 << 20
ANSWER_WITHIN_S = 10.0
ACCELERATOR = "accelerator_type:"


def local_cluster() -> Cluster:
    """This machine alone: its cores that this process may use, and the GPUs that nvidia-smi lists."""
    memory = _gpu_memory()
    node = Node(socket.gethostname(), float(len(os.sched_getaffinity(0))), len(memory), min(memory, default=None))
    return Cluster((node,))


def describe_cluster() -> Cluster:
    """The cluster that this process is connected to through Ray, nodes that are alive.

    Ray does not say how much memory a GPU has: it is known of this machine's GPUs, and of equal ones on other nodes.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return Cluster(tuple(_nodes(alive, _own_addresses(), _gpu_memory())))


def node_ids() -> dict[str, str]:
    """Ray's id of each node that is alive, by its name in ``describe_cluster``."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return {_name(node, alive): node["NodeID"] for node in alive}


def ask_cluster(address: str) -> Cluster | None:
    """What the cluster at ``runtime.address`` has; None where none answers. Joins it for a moment, starts nothing."""
    prepare_environment()  # Ray reads how to show its token as it is imported
    import ray

    if ray.is_initialized():
        return describe_cluster()
    if address != "auto" and not _answers(address):
        return None
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except ConnectionError:
        return None
    try:
        return describe_cluster()
    finally:
        ray.shutdown()


def _answers(address: str) -> bool:
    """Something listens there. Ray itself would try for a minute."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        with socket.create_connection((parts.hostname or address, parts.port or 6379), timeout=ANSWER_WITHIN_S):
            return True
    except OSError:
        return False


def _nodes(found: Sequence[Mapping[str, Any]], own: frozenset[str], memory: Sequence[int]) -> list[Node]:
    """Records of ``ray.nodes()`` as nodes; several on one machine are told apart by their Ray ids."""
    here = {kind for node in found if node["NodeManagerAddress"] in own for kind in _accelerators(node)}
    nodes: list[Node] = []
    for node in found:
        resources = node["Resources"]
        known = memory and (node["NodeManagerAddress"] in own or (here and _accelerators(node) == here))
        gpus = int(resources.get("GPU", 0))
        nodes.append(
            Node(_name(node, found), float(resources.get("CPU", 0.0)), gpus, min(memory) if known and gpus else None)
        )
    return sorted(nodes, key=lambda node: node.name)


def _name(node: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    host = str(node["NodeManagerHostname"])
    alone = sum(str(other["NodeManagerHostname"]) == host for other in found) == 1
    return host if alone else f"{host}-{node['NodeID'][:6]}"


def _accelerators(node: Mapping[str, Any]) -> set[str]:
    return {name for name in node["Resources"] if name.startswith(ACCELERATOR)}


def _own_addresses() -> frozenset[str]:
    import ray

    return frozenset({"127.0.0.1", ray.util.get_node_ip_address()})


def _gpu_memory() -> list[int]:
    """Bytes of each GPU of this machine, by nvidia-smi; [] where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=True)
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer has no GPU that could be used
        return []
    return [int(row[0]) * MIB for row in csv.reader(answer.stdout.splitlines()) if row and row[0].strip().isdigit()]
