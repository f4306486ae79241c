"""Placements on a real Ray cluster: two nodes on this machine with pretended GPUs."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from skirl.config.schema import Config
from skirl.errors import ConfigError, WorkerError
from skirl.runtime.placement import Cluster, Node, Placement, plan_placement
from skirl.runtime.ray.cluster import ask_cluster, describe_cluster, node_ids
from skirl.runtime.ray.placement import Reservation, gpu_ids_of, reserve

GPUS = (4, 4)


@pytest.fixture(scope="module")
def cluster(end_cluster: Callable[[], None]) -> Iterator[Cluster]:
    """Nodes with 4 GPUs each that do not exist: Ray counts them and shows their ids."""
    end_cluster()
    made = RayCluster()
    for index, gpus in enumerate(GPUS):
        more: dict[str, Any] = {} if index else {"include_dashboard": False}
        made.add_node(num_cpus=8, num_gpus=gpus, object_store_memory=80 << 20, **more)
    ray.init(address=made.address, configure_logging=False, log_to_driver=False)
    yield describe_cluster()
    ray.shutdown()
    made.shutdown()
    del made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray does not wait for the processes that it ends
        gc.collect()


def placement(cluster: Cluster, groups: Sequence[tuple[str, int, int | None]], ranks: int, **engine: Any) -> Placement:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": {"a": {"path": "a"}}},
            "run": {"dir": "r"},
            "train": {},
            "method": {"kl": None},
            "trainer": {"backend": {"kind": "deepspeed"}, "ranks": ranks},
            "rollout": {"engine": {"kind": "vllm", **engine}},
            "runtime": {
                "kind": "ray",
                "placement": [{"roles": roles.split(), "gpus": gpus, "nodes": nodes} for roles, gpus, nodes in groups],
            },
        }
    )
    return plan_placement(config, cluster, command="train", heads=None)


class Probe:
    """Where an actor is."""

    def where(self) -> tuple[str, tuple[str, ...]]:
        return ray.get_runtime_context().get_node_id(), tuple(str(gpu) for gpu in ray.get_gpu_ids())


def start(reservation: Reservation, processes: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Node and GPU ids of an actor in each process's place; the actors stay alive."""
    actors = [ray.remote(Probe).options(**reservation.options(process)).remote() for process in processes]
    return ray.get([actor.where.remote() for actor in actors], timeout=60)


def free(seconds: float = 5.0) -> dict[str, float]:
    """GPUs and cores that are free, once all are or the time is up: Ray gives back in the background."""
    deadline = time.monotonic() + seconds
    while True:
        found = {name: ray.available_resources().get(name, 0.0) for name in ("GPU", "CPU")}
        if found == {"GPU": 8.0, "CPU": 16.0} or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


ALL_FREE = {"GPU": 8.0, "CPU": 16.0}


def test_what_the_cluster_has(cluster: Cluster) -> None:
    assert sorted(node.gpus for node in cluster.nodes) == [4, 4]
    assert {node.cpus for node in cluster.nodes} == {8.0}
    assert len({node.name for node in cluster.nodes}) == 2
    assert ask_cluster("127.0.0.1:9") == cluster  # connected already: no other is asked


def test_roles_of_a_group_share_gpus_and_shards_of_a_role_do_not(cluster: Cluster) -> None:
    found = placement(cluster, [("policy rollout", 2, 1)], 2)
    reservation = reserve(found, 20, name="run")
    policy, rollout = found.of("policy"), found.of("rollout")
    places = start(reservation, [*policy, *rollout])
    assert places[:2] == places[2:]
    assert places[0] != places[1]
    assert all(len(gpus) == 1 for _, gpus in places)
    assert [node for node, _ in places] == [reservation.node_of(process) for process in (*policy, *rollout)]
    reservation.release()
    reservation.release()
    assert free() == ALL_FREE


def test_groups_over_nodes_and_engines_of_several_gpus(cluster: Cluster) -> None:
    found = placement(cluster, [("policy", 2, 2), ("rollout", 4, None)], 2, tensor_parallel_size=2)
    reservation = reserve(found, 20, name="run")
    ranks = [reservation.node_of(process) for process in found.of("policy")]
    assert ranks[0] != ranks[1]
    engines = found.of("rollout")
    assert len(set(gpu_ids_of(reservation, engines[0]))) == 2
    nodes = [reservation.node_of(engine) for engine in engines]
    names = {node_id: name for name, node_id in node_ids().items()}
    planned = [found.nodes_of(process)[0] for process in (*found.of("policy"), *engines)]
    assert [names[node] for node in (*ranks, *nodes)] == planned
    reservation.release()
    assert free() == ALL_FREE


def test_other_nodes_will_do_where_the_planned_ones_are_busy(cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr("skirl.runtime.ray.placement.AS_PLANNED_WITHIN_S", 0.5)
    asked = [("policy rollout", 4, 1)]
    first, second = (
        reserve(placement(cluster, asked, 4), 20, name="run"),
        reserve(placement(cluster, asked, 4), 20, name="run"),
    )
    process = placement(cluster, asked, 4).of("policy")[0]
    assert first.node_of(process) != second.node_of(process)
    first.release()
    second.release()
    assert free() == ALL_FREE


def test_an_impossible_request_starts_nothing(cluster: Cluster) -> None:
    planned = placement(Cluster((Node("large", 64, 9),)), [("policy", 8, None), ("rollout", 1, None)], 8)
    with pytest.raises(ConfigError, match="needs 9 GPU and 9 CPU, but the Ray cluster has 8 GPU and 16 CPU"):
        reserve(planned, 20, name="run")
    with pytest.raises(ConfigError, match="needs 9 GPUs"):
        placement(cluster, [("policy", 8, None), ("rollout", 1, None)], 8)
    assert free(0.0) == ALL_FREE


def test_places_that_do_not_become_free_are_told_and_given_back(cluster: Cluster) -> None:
    held = reserve(placement(cluster, [("policy rollout", 4, 1)], 4), 20, name="run")
    busy = placement(cluster, [("policy", 1, None), ("rollout", 4, None)], 1, tensor_parallel_size=4)
    with pytest.raises(WorkerError) as caught:
        reserve(busy, 1, name="run")
    assert "no place for policy within 1 s" in str(caught.value)  # the rollout's was reserved
    assert "needs 1 GPU and 1 CPU; the whole run needs 5 GPU and 5 CPU" in str(caught.value)
    assert "has 8 GPU and 16 CPU of which 0 GPU and 8 CPU are free" in str(caught.value)
    too_wide = placement(cluster, [("policy", 4, 2), ("rollout", 1, None)], 4)
    with pytest.raises(WorkerError, match="on one node, on another node than"):
        reserve(too_wide, 1, name="run")  # one of its two nodes was reserved
    held.release()
    assert free() == ALL_FREE
