"""Bytes of a GPU: shapes from file headers, formulas against worked numbers and what was measured on a GPU."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from skirl.assemble_worker import build_worker
from skirl.config.schema import Config
from skirl.errors import ConfigError, ModelError
from skirl.runtime.memory import (
    GIB,
    ModelShape,
    Shapes,
    activation_bytes,
    choose_sleep_level,
    engine_memory_share,
    group_items,
    read_model_shape,
    read_shapes,
    role_items,
)
from skirl.runtime.placement import Cluster, Node, Placement, plan_placement
from skirl.runtime.worker import WorkerSpec
from skirl.training.objective import PolicyObjective
from skirl.training.value_objective import ValueObjective
from tests import tiny

QWEN3_4B = ModelShape({"language_model": 4_022_468_096}, 36, 2560, 9728, 32, 8, 128, 151936)
ALONE = Shapes(QWEN3_4B)
H200 = int(139.8 * GIB)


def recipe(
    *, trainer: dict[str, Any] | None = None, model: dict[str, Any] | None = None, kl: Any = None, **engine: Any
) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m", "dtype": "bfloat16", "gradient_checkpointing": True, **(model or {})},
            "data": {"train": {"a": {"path": "a"}}},
            "run": {"dir": "r"},
            "train": {},
            "method": {"kl": kl},
            "trainer": {"max_tokens_per_micro_batch": 32768, **(trainer or {})},
            "rollout": {"engine": {"kind": "vllm", **engine}},
            "runtime": {"kind": "ray"},
        }
    )


def deepspeed(ranks: int, stage: int, **more: Any) -> dict[str, Any]:
    return {"ranks": ranks, "backend": {"kind": "deepspeed", "zero_stage": stage, **more}}


def placed(config: Config) -> Placement:
    return plan_placement(config, Cluster((Node("n", 64, 16),)), command="train", heads=None)


def held(config: Config, shape: ModelShape = QWEN3_4B) -> dict[str, int]:
    """Bytes of the policy's GPU by name."""
    (items,) = group_items(config, placed(config), Shapes(shape), command="train")
    return {f"{item.role} {item.name}": item.num_bytes for item in items}


# --------------------------------------------------------------------------------------------------------------- shapes
@pytest.mark.parametrize("name", ["tied", "untied", "native", "original", "voxtral"])
def test_shape_of_a_checkpoint_is_what_its_files_hold(checkpoints: Any, name: str) -> None:
    directory = checkpoints[name]
    sizes = {"encoder": 0, "adapter": 0, "language_model": 0}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                role = "language_model"
                if "audio_tower" in key:
                    role = "adapter" if ".proj" in key else "encoder"
                elif "projector" in key:
                    role = "adapter"
                count = 1
                for side in tensors.get_slice(key).get_shape():
                    count *= side
                sizes[role] += count
    found = read_model_shape(directory)
    assert found.parameters == {role: count for role, count in sizes.items() if count}
    raw = json.loads((directory / "config.json").read_text())
    inner = raw.get("thinker_config", raw)
    inner = inner.get("text_config", inner)
    assert (found.layers, found.hidden) == (inner["num_hidden_layers"], inner["hidden_size"])
    assert (found.heads, found.kv_heads) == (inner["num_attention_heads"], inner["num_key_value_heads"])
    assert found.vocabulary == inner["vocab_size"]


def write_checkpoint(directory: Path, shapes: dict[str, list[int]], config: dict[str, Any]) -> Path:
    """A checkpoint without its values: headers are all that is read."""
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


SMALL = {"num_attention_heads": 4, "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10}


def test_sharded_checkpoints_and_what_a_config_leaves_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.a": [3, 5]}, SMALL)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    write_checkpoint(tmp_path, {"model.b": [7]}, SMALL)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-2.safetensors")
    write_checkpoint(tmp_path, {"model.stale": [1000]}, SMALL)
    files = {"model.a": "model-1.safetensors", "model.b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = read_model_shape(tmp_path)
    assert found.total == 22
    assert (found.kv_heads, found.head_size, found.intermediate) == (4, 2, 32)


def test_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        read_model_shape(tmp_path)
    write_checkpoint(tmp_path, {}, {"model_type": "x"})
    with pytest.raises(ModelError, match="says no num_attention_heads"):
        read_model_shape(tmp_path)
    write_checkpoint(tmp_path, {"a": [1]}, SMALL)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="damaged or cut off"):
        read_model_shape(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\*\.safetensors"):
        read_model_shape(tmp_path)


# ------------------------------------------------------------------------------------------------------------- formulas
def test_estimate_agrees_with_what_was_measured() -> None:
    """Forward and backward of 32,768 tokens on one H200 without an optimizer: peak 24 GiB, gradients in bfloat16."""
    found = held(recipe(trainer=deepspeed(1, 1)))
    estimate = found["policy weights"] + 2 * QWEN3_4B.total + found["policy activations"]
    assert estimate == pytest.approx(24 * GIB, rel=0.1)


def test_zero_stages_divide_what_they_shard() -> None:
    parameters = QWEN3_4B.total
    expected = {  # weights, gradients, masters and moments on 8 ranks
        0: (2, 4, 12),
        1: (2, 4, 12 / 8),
        2: (2, 4 / 8, 12 / 8),
        3: (2 / 8, 4 / 8, 12 / 8),
    }
    for stage, factors in expected.items():
        found = held(recipe(trainer=deepspeed(8, stage)))
        for name, factor in zip(("weights", "gradients", "optimizer"), factors, strict=True):
            assert found[f"policy {name}"] == pytest.approx(parameters * factor, abs=1)


def test_float32_has_masters_only_where_the_optimizer_is_sharded() -> None:
    wide = {"dtype": "float32"}
    assert held(recipe(model=wide))["policy optimizer"] == 8 * QWEN3_4B.total
    assert held(recipe(model=wide, trainer=deepspeed(1, 1)))["policy optimizer"] == 12 * QWEN3_4B.total
    assert held(recipe(model=wide))["policy weights"] == 4 * QWEN3_4B.total


def test_whole_gradients_stand_beside_their_float32_sums() -> None:
    few = {"max_tokens_per_micro_batch": 100}  # activations are small, so gradients are what comes and goes
    for trainer in (few, few | deepspeed(1, 0), few | deepspeed(1, 1)):
        found = held(recipe(trainer=trainer))
        assert found["policy gradients"] == 4 * QWEN3_4B.total
        assert found["policy activations"] == 2 * QWEN3_4B.total
    small = activation_bytes(QWEN3_4B, 100, 2, recompute=True)
    assert held(recipe(trainer=few | deepspeed(1, 2)))["policy activations"] == small
    wide = held(recipe(trainer=few, model={"dtype": "float32"}))
    assert wide["policy gradients"] == 4 * QWEN3_4B.total
    assert wide["policy activations"] == activation_bytes(QWEN3_4B, 100, 4, recompute=True)


def test_frozen_roles_have_no_gradients_and_stay_whole_in_zero_3() -> None:
    speech = ModelShape({"encoder": 800, "adapter": 80, "language_model": 8000}, 2, 8, 32, 4, 4, 2, 10)
    found = held(recipe(model={"freeze": ["encoder", "adapter"]}, trainer=deepspeed(4, 3)), speech)
    assert found["policy weights"] == 2 * (800 + 8080 // 4)
    assert found["policy gradients"] == 4 * 8000 // 4
    assert found["policy optimizer"] == 12 * 8000 // 4
    assert held(recipe(model={"freeze": []}, trainer=deepspeed(4, 3)), speech)["policy weights"] == 2 * 8880 // 4


def test_recomputation_saves_activations() -> None:
    one, many = (
        activation_bytes(QWEN3_4B, 1000, 2, recompute=True),
        activation_bytes(QWEN3_4B, 32768, 2, recompute=True),
    )
    assert one < many
    kept = activation_bytes(QWEN3_4B, 32768, 2, recompute=False)
    layer = 32768 * 2 * (6 * 2560 + 3 * 32 * 128 + 4 * 8 * 128 + 4 * 9728)
    assert kept == 36 * layer + 1024 * 151936 * 14
    assert many == 36 * 32768 * 2560 * 2 + layer


def test_who_holds_what() -> None:
    config = recipe(kl={"coef": 0.1}, trainer=deepspeed(2, 2, offload_optimizer=True))
    items = group_items(config, placed(config), ALONE, command="train")[0]
    by_name = {(item.role, item.name): item for item in items}
    assert by_name["reference", "weights"].num_bytes == 2 * QWEN3_4B.total
    assert by_name["policy", "commit"].num_bytes == 1 << 30  # two buckets of 512 MiB
    assert by_name["policy", "optimizer"].num_bytes == 0
    assert by_name["policy", "optimizer"].host_bytes == 6 * QWEN3_4B.total
    (weights,) = role_items(config, ALONE, ["policy"], command="eval", engines=True)
    assert weights.num_bytes == 2 * QWEN3_4B.total
    alone = role_items(recipe(trainer=deepspeed(2, 3)), ALONE, ["policy"], command="train", engines=False)
    assert {item.name: item.num_bytes for item in alone}["sampler"] == 2 * QWEN3_4B.total
    (buckets,) = role_items(config, ALONE, ["rollout"], command="train", engines=True)
    assert buckets.num_bytes == 1 << 30


# --------------------------------------------------------------------------------------- critics, adapters, other roles
PPO = {"method": {"preset": "ppo"}, "reward": {"models": {"taste": {"path": "rm"}}}}
HEADED = ModelShape({"language_model": 1000}, 2, 8, 32, 4, 4, 2, 10, {"q_proj": (40, 300), "down_proj": (80, 500)}, 80)


def by_name(config: Config, shapes: Shapes, roles: str, command: Any = "train", *, engines: bool = True) -> Any:
    items = role_items(config, shapes, roles.split(), command=command, engines=engines)
    return {(item.role, item.name): item for item in items}


def sized(config: Config, **sections: Any) -> Config:
    return Config.model_validate(config.model_dump() | sections)


def test_a_critic_costs_what_a_policy_without_its_head_does() -> None:
    config = sized(recipe(trainer=deepspeed(4, 2) | {"offload": {}, "ema": {}}), **PPO)
    shapes = Shapes(HEADED, critic=HEADED.without_head(), rewards={"taste": HEADED.without_head()})
    together = by_name(config, shapes, "policy critic")
    assert together["critic", "weights"].num_bytes == 2 * 920
    assert together["critic", "gradients"].num_bytes == 4 * 920 // 4
    assert together["critic", "optimizer"].num_bytes == 12 * 920 // 4
    assert not together["critic", "optimizer"].while_sampling
    assert together["policy", "average"].num_bytes == 4 * 1000 // 4
    assert ("critic", "average") not in together
    assert together["critic", "activations"].num_bytes == 0  # one after the other, and the policy has a head beside
    alone = by_name(config, shapes, "critic")
    assert alone["critic", "activations"].num_bytes == activation_bytes(HEADED.without_head(), 32768, 2, recompute=True)


def test_reward_models_stay_while_engines_sample() -> None:
    config = sized(recipe(), reward={"models": {"a": {"path": "a"}, "b": {"path": "b", "dtype": "bfloat16"}}})
    shapes = Shapes(HEADED, rewards={"a": HEADED.without_head(), "b": HEADED.without_head()})
    found = by_name(config, shapes, "reward")
    assert found["reward", "weights of a"].num_bytes == 4 * 920
    assert found["reward", "weights of b"].num_bytes == 2 * 920
    assert all(item.while_sampling for item in found.values())
    layer = 16384 * 4 * (6 * 8 + (3 * 4 + 4 * 4) * 2 + 4 * 32)
    assert found["reward", "scoring"].num_bytes == layer + 2 * 16384 * 8 * 4


def test_adapters_train_and_the_rest_is_held_once() -> None:
    lora = {"rank": 4, "target_modules": ["q_proj"]}
    config = recipe(model={"lora": lora}, trainer=deepspeed(2, 2))
    found = by_name(config, Shapes(HEADED), "policy")
    assert found["policy", "weights"].num_bytes == 2 * (1000 + 4 * 40)
    assert found["policy", "gradients"].num_bytes == 4 * 4 * 40 // 2
    assert found["policy", "optimizer"].num_bytes == 12 * 4 * 40 // 2
    packed = by_name(recipe(model={"lora": lora | {"quantize": "nf4"}}), Shapes(HEADED), "policy")
    assert packed["policy", "weights"].num_bytes == 2 * (200 + 160) + 413  # 800 values of 0.516 bytes


def test_other_commands() -> None:
    config = sized(recipe(), **PPO, kd={"teacher": "t"})
    rm = by_name(config, Shapes(HEADED.without_head()), "policy", "rm", engines=False)
    assert rm["policy", "weights"].num_bytes == 2 * 920
    kd = by_name(config, Shapes(HEADED, teacher=QWEN3_4B), "policy", "kd", engines=False)
    assert kd["policy", "teacher"].num_bytes == 2 * QWEN3_4B.total
    (weights,) = role_items(config, ALONE, ["policy"], command="sample", engines=True)
    assert weights.num_bytes == 2 * QWEN3_4B.total


def test_shapes_of_every_model_of_a_run(checkpoints: Any) -> None:
    paths = {"critic": {"path": checkpoints["tied"]}, "reward": {"models": {"taste": {"path": checkpoints["small"]}}}}
    model = {"path": checkpoints["untied"], "dtype": "float32"}
    config = sized(recipe(), method={"preset": "ppo"}, model=model, kd={"teacher": checkpoints["tied"]}, **paths)
    found = read_shapes(config, "train")
    assert found.critic is not None
    head = found.policy.vocabulary * found.policy.hidden
    assert found.policy.head == head
    assert found.critic.total == found.policy.total - head  # what is tied has no head of its own
    assert found.rewards["taste"].layers == 1
    assert read_shapes(config, "sft") == Shapes(found.policy)
    assert read_shapes(config, "rm").policy == found.policy.without_head()
    assert read_shapes(config, "kd").teacher == read_model_shape(checkpoints["tied"])


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_estimates_are_what_processes_hold(checkpoints: Any, lora: Any) -> None:
    """Policy and critic of a tiny run after an update: bytes by kind, as the backends count them."""
    model = {"path": checkpoints["untied"], "dtype": "float32", "lora": lora}
    config = sized(recipe(), method={"preset": "ppo"}, model=model, trainer={"ema": {}})
    objectives = {"objective": PolicyObjective(tiny.Sampling()), "critic_objective": ValueObjective(clip=None)}
    worker = build_worker(WorkerSpec(config, total_prompts=10, with_reference=False, **objectives))
    made = tiny.sequences(tiny.make_kit(checkpoints["untied"]), (3, 2))
    zeros = [np.zeros(s.num_actions) for s in made]
    plan = tiny.whole([replace(s, values=z.astype(np.float32), returns=z) for s, z in zip(made, zeros, strict=True)])
    worker.update(plan, 5, ("policy", "critic"))
    shapes = read_shapes(config, "train")
    estimated = by_name(config, shapes, "policy critic", engines=False)
    for role, held in (("policy", worker.policy), ("critic", worker.critic)):
        assert held is not None
        found = held.trainer.state_bytes()
        average = estimated[role, "average"].num_bytes if role == "policy" else 0
        assert estimated[role, "weights"].num_bytes == pytest.approx(found["weights"], rel=0.01)
        assert estimated[role, "optimizer"].num_bytes + average == pytest.approx(found["optimizer"], rel=0.02)


# -------------------------------------------------------------------------------------------------------------- engines
def share(config: Config, total: int = H200) -> float:
    return engine_memory_share(config, placed(config), ALONE, command="train", total_bytes=total)


def separate(**engine: Any) -> Config:
    config = recipe(**engine)
    groups = ({"roles": ("policy",), "gpus": 1}, {"roles": ("rollout",), "gpus": 1})
    return Config.model_validate(config.model_dump() | {"runtime": {"kind": "ray", "placement": groups}})


def test_share_of_engines_on_gpus_of_their_own() -> None:
    assert share(separate()) == 0.85
    assert share(separate(gpu_memory_utilization=0.3)) == 0.3


def test_share_of_engines_on_shared_gpus_is_what_the_trainer_leaves() -> None:
    keeps = recipe(trainer=deepspeed(1, 2))
    gives = recipe(trainer=deepspeed(1, 2) | {"offload": {}})
    found = held(keeps)
    left = (H200 - sum(found.values()) - 4 * GIB) / H200
    assert share(keeps) == pytest.approx(left, abs=1e-3)
    assert share(keeps) <= left
    assert share(gives) == pytest.approx(
        left + (found["policy gradients"] + found["policy optimizer"]) / H200, abs=1e-3
    )
    assert share(recipe(gpu_memory_utilization=0.25)) == 0.25
    assert share(recipe(), 10 * H200) == 0.85


def test_a_share_that_does_not_hold_the_weights_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        share(recipe(trainer=deepspeed(1, 2)), 85 * GIB)
    assert "weights take 7.5 GiB of each GPU, but what is left is 2." in str(caught.value)
    assert "of 85.0 GiB; the trainer holds 68.4 GiB there, a micro-batch 9.9 GiB" in str(caught.value)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0\.05 is 7\.0 GiB of 139\.8 GiB"):
        share(separate(gpu_memory_utilization=0.05))
    assert share(recipe(trainer=deepspeed(2, 2), tensor_parallel_size=2), 80 * GIB) > 0


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_sleep_level_is_the_cheaper_one(frozen: int, trained: int) -> None:
    level, why = choose_sleep_level(frozen, frozen + trained)
    assert level == 2  # at the measured rates sending again is never slower than a copy to the host
    assert "level 2 sends" in why
    slow, _ = choose_sleep_level(frozen, frozen + trained, resend_bytes_per_s=1e9, host_copy_bytes_per_s=10e9)
    assert slow == (2 if frozen * 10 <= frozen + trained else 1)
