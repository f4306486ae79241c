"""Who computes where: worked placements, refusals with numbers, and rules that hold for any recipe and cluster."""

import re
import time
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.config.check import check
from skirl.config.schema import Config
from skirl.errors import ConfigError
from skirl.models.loading import load_tokenizer_and_family
from skirl.runtime.placement import Cluster, Node, Placement, plan_placement, plan_transport, roles_in_use
from skirl.weights.choose import choose_transport
from skirl.weights.endpoints import Place
from tests import tiny


def recipe(
    *,
    groups: list[dict[str, Any]] | None = None,
    ranks: int = 1,
    engine: Any = None,
    kl: Any = None,
    runtime: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    sections: dict[str, Any] | None = None,
    **more: Any,
) -> Config:
    """A recipe with vLLM engines; groups are {"roles", "gpus", "nodes"}."""
    placed = {} if groups is None else {"placement": groups}
    return Config.model_validate(
        {
            "model": {"path": "m", **(model or {})},
            "data": {"train": {"a": {"path": "a"}}, "eval": {"b": {"path": "b"}}},
            "run": {"dir": "r"},
            "train": {},
            "reward": {"python": "r.py"},
            "method": {"kl": kl},
            "trainer": {"backend": {"kind": "deepspeed"}, "ranks": ranks},
            "rollout": {"engine": {"kind": "vllm"} if engine is None else engine, **more},
            "runtime": {"kind": "ray", **placed, **(runtime or {})},
            **(sections or {}),
        }
    )


def group(roles: str, gpus: int, nodes: int | None = None) -> dict[str, Any]:
    return {"roles": roles.split(), "gpus": gpus, "nodes": nodes}


def machines(*gpus: int, cpus: float = 64) -> Cluster:
    return Cluster(tuple(Node(f"n{i}", cpus, count) for i, count in enumerate(gpus)))


def plan(config: Config, cluster: Cluster, heads: tuple[int, int] | None = None, **more: Any) -> Placement:
    return plan_placement(config, cluster, command="train", heads=heads, **more)


def refusal(config: Config, cluster: Cluster, heads: tuple[int, int] | None = None, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(config, cluster, heads, **more)
    return str(caught.value)


KL = {"coef": 0.01}
VLLM = {"kind": "vllm"}
PPO = {"method": {"preset": "ppo"}, "reward": {"models": {"taste": {"path": "rm"}}}}
"""Sections of a run with every role."""


# --------------------------------------------------------------------------------------------------- worked placements
def test_colocate_all_on_eight_gpus() -> None:
    found = plan(recipe(ranks=8, kl=KL), machines(8))
    assert found.device == "gpu"
    assert [g.roles for g in found.groups] == [("policy", "reference", "rollout")]
    assert [p.bundles for p in found.of("policy")] == [(i,) for i in range(8)]
    assert [p.bundles for p in found.of("rollout")] == [(i,) for i in range(8)]
    assert {p.gpus for p in found.processes} == {0.5}  # the reference is in the policy's processes
    assert found.of("policy")[0].holds == ("policy", "reference")
    assert found.of("reference") == ()
    assert found.shares("policy", "reference")
    assert found.engines_share_with_policy


def test_policy_and_reference_beside_engines_of_two_gpus() -> None:
    groups = [group("policy reference", 2), group("rollout", 6)]
    found = plan(recipe(groups=groups, ranks=2, kl=KL, engine={"kind": "vllm", "tensor_parallel_size": 2}), machines(8))
    assert [p.bundles for p in found.of("rollout")] == [(0, 1), (2, 3), (4, 5)]
    assert found.groups[1].strategy == "STRICT_PACK"
    assert found.groups[1].parts == ((0, 1), (2, 3), (4, 5))
    assert {p.gpus for p in found.processes} == {1.0}
    assert not found.engines_share_with_policy
    assert not found.shares("policy", "rollout")


def test_fully_separate_over_two_nodes() -> None:
    groups = [group("policy", 4, 2), group("reference", 4), group("rollout", 8)]
    found = plan(recipe(groups=groups, ranks=4, kl=KL), machines(8, 8))
    assert [len(found.of(role)) for role in ("policy", "reference", "rollout")] == [4, 4, 8]
    assert found.of("reference")[0].holds == ("reference",)
    assert found.groups[0].strategy == "STRICT_SPREAD"
    assert found.groups[0].parts == ((0, 1), (2, 3))
    first, second = (found.groups[0].nodes[i] for i in (0, 2))
    assert first != second
    assert found.groups[0].nodes == (first, first, second, second)


def processes(found: Placement) -> dict[str, tuple[int, tuple[str, ...], float]]:
    """By name: how many, what each holds, its share of a GPU."""
    return {p.role: (len(found.of(p.role)), p.holds, p.gpus) for p in found.processes}


def test_all_roles_of_ppo_on_the_same_gpus() -> None:
    found = plan(recipe(ranks=8, sections=PPO), machines(8))
    assert processes(found) == {
        "policy": (8, ("policy", "critic", "reference"), 0.3333),
        "reward": (8, ("reward",), 0.3333),
        "rollout": (8, ("rollout",), 0.3333),
    }
    assert found.engines_share_with_policy
    assert [found.host_of(role) for role in ("policy", "critic", "reference", "reward")] == [*["policy"] * 3, "reward"]


def test_critic_and_reward_model_beside_policy_and_reference() -> None:
    groups = [group("policy reference", 2), group("critic reward", 2), group("rollout", 4)]
    found = plan(recipe(groups=groups, ranks=2, sections=PPO), machines(8))
    assert processes(found) == {
        "policy": (2, ("policy", "reference"), 1.0),
        "critic": (2, ("critic",), 0.5),
        "reward": (2, ("reward",), 0.5),
        "rollout": (4, ("rollout",), 1.0),
    }
    assert found.host_of("reference") == "policy"
    assert not found.engines_share_with_policy


def test_every_role_on_gpus_of_its_own() -> None:
    groups = [*(group(role, 2) for role in ("policy", "reference", "critic")), group("reward", 1), group("rollout", 1)]
    found = plan(recipe(groups=groups, ranks=2, sections=PPO), machines(8))
    assert processes(found) == {
        role: (1 if role in ("reward", "rollout") else 2, (role,), 1.0)
        for role in ("policy", "reference", "critic", "reward", "rollout")
    }


def test_critic_and_reference_share_processes_without_the_policy() -> None:
    groups = [group("policy rollout", 2), group("reference critic", 2), group("reward", 3)]
    found = plan(recipe(groups=groups, ranks=2, sections=PPO), machines(8))
    assert processes(found)["critic"] == (2, ("critic", "reference"), 1.0)
    assert found.of("reference") == ()
    assert found.host_of("reference") == "critic"


def test_engines_stay_on_one_node_where_a_naive_order_would_cut_one() -> None:
    groups = [group("policy", 2), group("rollout", 6)]
    found = plan(recipe(groups=groups, ranks=2, engine={"kind": "vllm", "tensor_parallel_size": 3}), machines(4, 4))
    for engine in found.of("rollout"):
        assert len(set(found.nodes_of(engine))) == 1
    assert sorted(found.groups[0].nodes) == ["n0", "n1"]  # what they leave


def test_distinct_nodes_and_engines_that_one_order_of_packing_would_not_fit() -> None:
    """Engines on the two small nodes would leave one node for two ranks that want a node each."""
    config = recipe(
        groups=[group("policy", 2, 2), group("rollout", 4)], ranks=2, engine=VLLM | {"tensor_parallel_size": 2}
    )
    found = plan(config, machines(4, 2, 2))
    assert len(set(found.groups[0].nodes)) == 2


@pytest.mark.parametrize("cores", [2, 3])
def test_two_ranks_and_an_engine_on_a_laptop(cores: int) -> None:
    found = plan(recipe(ranks=2, kl=KL), machines(0, cpus=cores))
    assert found.device == "cpu"
    assert [(p.bundles, p.cpus, p.gpus) for p in found.of("rollout")] == [((0,), 0.5, 0.0)]
    assert [p.cpus for p in found.of("policy")] == [0.5, 0.5]
    assert found.groups[0].bundles == ({"CPU": 1.0}, {"CPU": 1.0})


def test_device_of_a_cluster_with_gpus() -> None:
    assert plan(recipe(runtime={"device": "cpu"}), machines(1)).device == "cpu"
    assert plan(recipe(), machines(0, 1)).groups[0].nodes == ("n1",)
    assert "has 0 GPUs on 1 node" in refusal(recipe(runtime={"device": "gpu"}), machines(0))


@pytest.mark.parametrize(("cpus", "share"), [(1.0, 0.5), (8.0, 4.0), (3.0, 1.0), (0.5, 0.25), (0.3333, 0.1666)])
def test_shares_of_a_place_are_counted_as_ray_counts(cpus: float, share: float) -> None:
    found = plan(recipe(runtime={"cpus_per_rank": cpus}), machines(1))
    assert [p.cpus for p in found.processes] == [share, share]


def test_roles_in_use() -> None:
    both = recipe(kl=KL)
    assert roles_in_use(both, "train") == ("policy", "reference", "rollout")
    assert roles_in_use(both, "eval") == ("policy", "rollout")
    assert roles_in_use(both, "sft") == ("policy", "rollout")  # evaluation may sample: there is no checkpoint to tell
    assert roles_in_use(recipe(engine="policy"), "train") == ("policy",)


LORA = {"lora": {"rank": 8}}


@pytest.mark.parametrize(
    ("config", "command", "roles"),
    [
        (recipe(sections=PPO), "train", "policy reference critic reward rollout"),
        (recipe(sections=PPO, model=LORA), "train", "policy critic reward rollout"),
        (recipe(kl=KL, model=LORA), "train", "policy rollout"),
        (recipe(sections={"method": {"preset": "ppo", "kl": None}}), "train", "policy critic rollout"),
        (recipe(sections=PPO), "sft", "policy rollout"),
        (recipe(sections=PPO), "rm", "policy"),
        (recipe(sections=PPO), "prm", "policy"),
        (recipe(sections={"dpo": {}}), "dpo", "policy reference"),
        (recipe(sections={"dpo": {}}, model=LORA), "dpo", "policy"),
        (recipe(sections={"dpo": {"loss": "simpo"}}), "dpo", "policy"),
        (recipe(sections={"kd": {"teacher": "t"}}), "kd", "policy"),
        (recipe(sections={"kd": {"teacher": "t", "data": "on_policy"}}), "kd", "policy rollout"),
        (recipe(sections=PPO), "sample", "policy reward rollout"),
        (recipe(), "sample", "policy rollout"),
        (recipe(sections=PPO), "eval", "policy rollout"),
    ],
)
def test_roles_of_each_command(config: Config, command: Any, roles: str) -> None:
    assert roles_in_use(config, command) == tuple(roles.split())


@pytest.mark.parametrize("name", sorted(tiny.BUILDERS))
def test_sft_keeps_a_place_for_engines_only_where_it_samples(checkpoints: Any, name: str) -> None:
    """Text is judged by its held-out loss, so its engines would never be started."""
    hears = load_tokenizer_and_family(checkpoints[name]).family.placeholder is not None
    groups = [group("policy", 2), group("rollout", 4)]
    config = recipe(groups=groups, ranks=2, model={"path": checkpoints[name]}, sections={"sft": {}})
    assert roles_in_use(config, "sft") == (("policy", "rollout") if hears else ("policy",))
    found = plan_placement(config, machines(6), command="sft", heads=None)
    assert [g.roles for g in found.groups] == ([("policy",), ("rollout",)] if hears else [("policy",)])
    assert check(config, "sft") == []


def test_a_command_starts_only_the_groups_that_it_uses() -> None:
    config = recipe(groups=[group("policy", 2), group("reference", 2), group("rollout", 2)], ranks=2, kl=KL)
    assert "needs 6 GPUs" in refusal(config, machines(4))
    found = plan_placement(config, machines(4), command="eval", heads=None)
    assert [g.roles for g in found.groups] == [("policy",), ("rollout",)]
    assert check(config, "eval") == []


# ------------------------------------------------------------------------------------------------------------ refusals
SEPARATE = [group("policy", 4), group("rollout", 4)]


@pytest.mark.parametrize(
    ("config", "cluster", "heads", "words"),
    [
        (
            recipe(ranks=9),
            machines(8),
            None,
            "trainer.ranks = 9 needs 9 GPUs (policy, rollout: 9), but the cluster has 8 on",
        ),
        (
            recipe(groups=[group("policy", 8), group("rollout", 1)], ranks=8),
            machines(8),
            None,
            "runtime.placement needs 9 GPUs (policy: 8; rollout: 1), but the cluster has 8 on 1 node",
        ),
        (
            recipe(groups=SEPARATE, ranks=2),
            machines(8),
            None,
            "gives 4 GPUs to the policy, but trainer.ranks = 2 need 2",
        ),
        (
            recipe(groups=SEPARATE, ranks=4, engine=VLLM | {"engines": 3}),
            machines(8),
            None,
            "engines = 3 x rollout.engine.tensor_parallel_size = 1 need 3 GPUs, but the group of rollout (rollout) has",
        ),
        (
            recipe(groups=SEPARATE, ranks=4, engine=VLLM | {"engines": 3, "tensor_parallel_size": 2}),
            machines(8),
            None,
            "but rollout.engine.engines = 3 x rollout.engine.tensor_parallel_size = 2 need 6: set gpus to 6",
        ),
        (
            recipe(groups=[group("policy", 1), group("rollout", 3)], engine=VLLM | {"tensor_parallel_size": 3}),
            machines(4),
            (2, 2),
            "tensor_parallel_size = 3 does not divide the model's 2 attention heads (2 key-value heads): use one of 1",
        ),
        (
            recipe(groups=[group("policy", 1), group("rollout", 3)], engine=VLLM | {"tensor_parallel_size": 3}),
            machines(2, 2),
            (6, 3),
            "tensor_parallel_size = 3 needs 3 GPUs on one node, but the largest node has 2",
        ),
        (
            recipe(
                groups=[group("policy", 6, 2), group("rollout", 4)], ranks=6, engine=VLLM | {"tensor_parallel_size": 4}
            ),
            machines(6, 6),
            None,
            "policy (6 GPUs) comes in units of 3 on one node, on nodes of its own, but beside the other groups there "
            "are free: n0 2 of 6, n1 3 of 6",
        ),
        (
            recipe(groups=[group("policy rollout", 3, 2)], ranks=3),
            machines(8, 8),
            None,
            "3 GPUs do not spread evenly over 2",
        ),
        (
            recipe(groups=[group("policy rollout", 6, 3)], ranks=6),
            machines(8, 8),
            None,
            "asks for 2 GPUs on each of 3 nodes, but the cluster has 2 nodes, 2 of which with so many",
        ),
        (
            recipe(ranks=3),
            machines(0, cpus=2),
            None,
            "needs 3 CPU cores (policy, rollout: 3; runtime.cpus_per_rank = 1 for each place), but the cluster has 2",
        ),
        (
            recipe(ranks=4, runtime={"cpus_per_rank": 4}),
            machines(4, cpus=8),
            None,
            "needs 16 CPU cores (policy, rollout: 4; runtime.cpus_per_rank = 4 for each place), but the cluster has 8",
        ),
        (
            recipe(groups=[group("policy", 1), group("rollout reference", 1)], kl=KL),
            machines(2),
            None,
            "engines share GPUs with reference but not with the policy",
        ),
        (
            recipe(groups=[group("policy", 1), group("rollout", 1)], commit={"transport": "cuda_ipc"}),
            machines(2),
            None,
            "rollout.commit.transport = cuda_ipc hands over memory of one GPU, but policy and rollout are on different",
        ),
        (
            recipe(commit={"transport": "nccl"}),
            machines(1),
            None,
            "rollout.commit.transport = nccl cannot join two processes on one GPU",
        ),
        (
            recipe(commit={"transport": "cuda_ipc"}),
            machines(0),
            None,
            "rollout.commit.transport = cuda_ipc does not reach the engines: their 1 workers are on the policy's CPUs",
        ),
        (
            recipe(groups=[group("policy", 2), group("rollout", 2)], ranks=2, commit={"transport": "shared_memory"}),
            machines(2, 2),
            None,
            "2 of them on other nodes than training rank 0. Set it to auto (nccl)",
        ),
        (recipe(groups=[group("policy", 1)]), machines(2), None, "no place for rollout, which skirl train starts"),
        (
            recipe(groups=[group("policy rollout", 1), group("rollout", 1)]),
            machines(2),
            None,
            "runtime.placement[0] {roles: [policy, rollout], gpus: 1} and runtime.placement[1] {roles: [rollout], "
            "gpus: 1}: rollout is named 2 times",
        ),
        (recipe(groups=[group("policy policy rollout", 1)]), machines(2), None, "policy is named 2 times"),
        (
            recipe(groups=[group("policy reference rollout", 1)]),
            machines(2),
            None,
            "reference is not used: method.kl is null: set method.kl, or take reference out of the group",
        ),
        (
            recipe(groups=[group("policy critic rollout", 1)]),
            machines(2),
            None,
            "critic is not used: method.advantage.kind = group_norm (method.preset = grpo) trains none: leave it out",
        ),
        (recipe(groups=[group("policy reward rollout", 1)]), machines(2), None, "reward.models names no reward model"),
        (
            recipe(groups=[group("policy reference rollout", 1)], kl=KL, model={"lora": {}}),
            machines(2),
            None,
            "reference is not used: with model.lora the policy without its adapters is the reference: take reference",
        ),
        (
            recipe(groups=[group("policy reference rollout", 2), group("critic reward", 3)], ranks=2, sections=PPO),
            machines(8),
            None,
            "gives 3 GPUs to the critic, but trainer.ranks = 2 need 2, since each runs the plan of one of the policy's",
        ),
        (
            recipe(groups=[group("policy", 2), group("reference", 1), group("rollout", 1)], ranks=2, kl=KL),
            machines(8),
            None,
            "gives 1 GPUs to the reference, but trainer.ranks = 2 need 2",
        ),
        (
            recipe(groups=[group("policy reference rollout", 2), group("critic", 2)], ranks=2, sections=PPO),
            machines(8),
            None,
            "no place for reward, which skirl train starts",
        ),
        (
            recipe(groups=[group("policy reference critic", 1), group("rollout reward", 1)], sections=PPO),
            machines(8),
            None,
            "engines share GPUs with reward but not with the policy",
        ),
        (
            recipe(groups=[group("policy rollout", 1)], engine="policy"),
            machines(2),
            None,
            "rollout is not used: rollout.engine.kind = policy samples inside the policy's ranks",
        ),
    ],
)
def test_refusals_have_numbers(config: Config, cluster: Cluster, heads: Any, words: str) -> None:
    assert words in refusal(config, cluster, heads)


def test_asynchronous_needs_engines_on_gpus_of_their_own() -> None:
    words = refusal(recipe(ranks=4), machines(8), asynchronous=True)
    assert "rollout and policy share 4 GPUs" in words
    assert "{roles: [policy], gpus: 4}, {roles: [rollout], gpus: 1}" in words
    plan(recipe(groups=SEPARATE, ranks=4), machines(8), asynchronous=True)


def test_key_value_heads_may_be_fewer_than_gpus() -> None:
    config = recipe(ranks=4, engine=VLLM | {"tensor_parallel_size": 4})
    plan(config, machines(4), (8, 2))  # each is held twice
    assert "use one of 1, 2, 3" in refusal(config, machines(4), (6, 6))
    assert "use one of 1, 2" in refusal(config, machines(4), (6, 2))
    assert "(3 key-value heads)" in refusal(config, machines(4), (12, 3))


def test_a_local_runtime_has_nothing_to_place() -> None:
    config = recipe(engine="policy").model_copy(update={"runtime": Config.model_fields["runtime"].default})
    assert "nothing to place" in refusal(config, machines(1))


# ----------------------------------------------------------------------------------------------------------- transport
def test_transport_is_what_the_commit_will_choose() -> None:
    """One rule in two forms: planned here without processes, decided there between processes."""
    shapes = [
        (recipe(ranks=2), machines(2)),
        (recipe(ranks=2), machines(0)),
        (recipe(ranks=4, engine=VLLM | {"tensor_parallel_size": 2}), machines(2, 2)),
        (recipe(groups=SEPARATE, ranks=4), machines(8)),
        (recipe(groups=SEPARATE, ranks=4), machines(4, 4)),
        (recipe(groups=[group("policy", 1), group("rollout", 1)]), machines(0, 0, cpus=1)),
    ]
    seen = set()
    for (config, cluster), asked in product(shapes, ("auto", "cuda_ipc", "nccl", "shared_memory", "gloo")):
        free = plan(config, cluster)
        commit = config.rollout.commit.model_copy(update={"transport": asked})
        changed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"commit": commit})})
        ranks = [where for p in free.of("policy") for where in places(free, p)]
        try:
            expected = choose_transport(ranks, [places(free, p) for p in free.of("rollout")], asked).name
        except ConfigError:
            with pytest.raises(ConfigError):
                plan_transport(changed, free)
            continue
        assert plan_transport(changed, free) == expected, (asked, cluster)
        seen.add(expected)
    assert seen == {"cuda_ipc", "nccl", "shared_memory", "gloo"}
    assert plan_transport(recipe(engine="policy"), plan(recipe(engine="policy"), machines(1))) is None


def places(placement: Placement, process: Any) -> list[Place]:
    return [
        Place(name, f"GPU-{process.group}-{bundle}" if placement.device == "gpu" else None)
        for name, bundle in zip(placement.nodes_of(process), process.bundles, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------- properties
Request = tuple[Config, Cluster, tuple[int, int]]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Recipes that are often possible: sizes are drawn around what the nodes have."""
    nodes = draw(st.lists(st.integers(0, 8), min_size=1, max_size=5))
    cpus = draw(st.sampled_from([1.0, 2.0, 8.0, 64.0]))
    size, engines = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 12))
    spread = st.sampled_from([None, None, None, 1, 2, 3])
    kl = draw(st.sampled_from([None, KL]))
    separate = draw(st.integers(0, 3))
    roles = ["policy", *(["reference"] if kl else [])]
    if separate == 0:
        groups = None
    elif separate == 1:
        groups = [group(" ".join([*roles, "rollout"]), ranks, draw(spread))]
    elif separate == 2 or not kl:
        groups = [group(" ".join(roles), ranks, draw(spread)), group("rollout", size * engines, draw(spread))]
    else:
        groups = [group("rollout", size * engines), group("reference", ranks), group("policy", ranks, draw(spread))]
    config = recipe(
        groups=groups,
        ranks=ranks,
        kl=kl,
        engine=VLLM | {"tensor_parallel_size": size, "engines": draw(st.sampled_from([None, None, engines]))},
        runtime={
            "cpus_per_rank": draw(st.sampled_from([0.1, 0.5, 1.0, 3.0])),
            "device": draw(st.sampled_from(["auto", "cpu"])),
        },
    )
    return config, machines(*nodes, cpus=cpus), draw(st.sampled_from([(12, 4), (4, 2), (24, 24)]))


@settings(max_examples=200, deadline=None)
@given(requests())
def test_any_request_is_placed_by_the_rules_or_refused_with_numbers(asked: Request) -> None:
    config, cluster, heads = asked
    problem = ""
    try:
        found = plan(config, cluster, heads)
    except ConfigError as error:
        problem = str(error)
    if problem:
        assert re.search(r"\d", problem)
        return
    assert len(found.of("policy")) == config.trainer.ranks
    demand_is_within_supply(found, cluster)
    parts_are_together(found)
    for index, one in enumerate(found.groups):
        assert {role for p in found.processes if p.group == index for role in p.holds} == set(one.roles)
        for bundle in range(len(one.bundles)):
            shares_fit(found, index, bundle)
    engines = found.of("rollout")
    assert [p.index for p in engines] == list(range(len(engines)))
    for engine in engines:
        assert all(b == a + 1 for a, b in pairwise(engine.bundles))
        assert len(set(found.nodes_of(engine))) == 1


def demand_is_within_supply(found: Placement, cluster: Cluster) -> None:
    places = [place for one in found.groups for place in zip(one.bundles, one.nodes, strict=True)]
    for node in cluster.nodes:
        here = [bundle for bundle, name in places if name == node.name]
        assert sum(bundle.get("GPU", 0) for bundle in here) <= node.gpus
        assert sum(bundle["CPU"] for bundle in here) <= node.cpus + 1e-6


def parts_are_together(found: Placement) -> None:
    for one in found.groups:
        assert [i for part in one.parts for i in part] == list(range(len(one.bundles)))
        nodes = [{one.nodes[i] for i in part} for part in one.parts]
        assert one.strategy == "PACK" or all(len(names) == 1 for names in nodes)
        if one.strategy == "STRICT_SPREAD":
            assert len(set.union(*nodes)) == len(one.parts)


def shares_fit(found: Placement, index: int, bundle: int) -> None:
    inside = [p for p in found.processes if p.group == index and bundle in p.bundles]
    supply = found.groups[index].bundles[bundle]
    assert sum(p.gpus for p in inside) <= supply.get("GPU", 0.0)
    assert sum(p.cpus for p in inside) <= supply["CPU"]
    assert len({p.role for p in inside}) == len(inside)  # two shards of one role never share


def test_a_thousand_gpus_are_planned_at_once() -> None:
    cluster = machines(*[8] * 125, cpus=192)
    config = recipe(
        groups=[group("policy reference", 400, 50), group("rollout", 600)],
        ranks=400,
        kl=KL,
        engine=VLLM | {"tensor_parallel_size": 4},
    )
    start = time.perf_counter()
    found = plan(config, cluster, (32, 8))
    seconds = time.perf_counter() - start
    assert len(found.of("rollout")) == 150
    assert len(found.of("policy")) == 400
    assert seconds < 1.0
