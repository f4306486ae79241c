"""Bytes of each GPU by role, before anything starts: estimates from shapes. Pure; of files it reads headers only.

config.json, headers of *.safetensors -> ModelShape -> items a group -> show-placement, memory share of engines

Counted (P parameters of the whole model, T trained, w bytes of a weight, R training ranks), of policy and critic:
    weights       w P                      ZeRO-3: what trains or passes gradients is split over R
                  4 bits: 0.516 P for the linear layers; a critic has no head
    gradients     w T                      ZeRO-2, 3: / R; 4 T without DeepSpeed: sums are float32
    optimizer     8 T moments, + 4 T float32 masters (bfloat16 weights, or ZeRO-1 to 3);  ZeRO-1 to 3: / R
    activations   L N H w + max(layer, head)  recomputed;  L layer + head  kept;  N tokens of a micro-batch, L layers
      layer       N w (6 H + 3 Q + 4 K + 4 I)   H hidden, Q = heads x head size, K = key-value heads x head size, I MLP
      head        14 bytes a logit of a chunk of 1,024 tokens: the type's own, and float32 three times; not of a critic
    average       4 T of the policy (trainer.ema);  ZeRO-1 to 3: / R
    commit        two buckets
With LoRA T is r (in + out) of each target, and the reference is the policy. Policy and critic in one process train one
after the other: the critic's activations count as far as they are above the policy's. Reward models keep their weights,
and what a batch needs (N w (2 H + layer)), while engines sample: their scoring overlaps sampling.
Not counted: the allocator's fragments, kernels' workspaces, the encoder's activations. CUDA's own context and all of
these have ``MARGIN_BYTES``.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skirl.config.placing import roles_in_use
from skirl.config.recipe import Command
from skirl.config.schema import Config, DeepSpeedBackendConfig, PlacedRole, VLLMEngineConfig
from skirl.errors import ConfigError, ModelError
from skirl.runtime.placement import Placement

__all__ = [
    "Item",
    "ModelShape",
    "Shapes",
    "activation_bytes",
    "choose_sleep_level",
    "engine_memory_share",
    "engine_weight_bytes",
    "group_items",
    "read_model_shape",
    "read_shapes",
    "role_items",
]

GIB = 1 << 30
MARGIN_BYTES = 4 * GIB
"""Of each GPU, for what the formulas leave out."""
MAX_ENGINE_SHARE = 0.85
HEAD_CHUNK = 1024
"""Tokens whose logits are held at once (models/policy.py)."""
BYTES_A_LOGIT = 14
ASLEEP_BYTES = int(2.4 * GIB)
"""What a sleeping engine keeps; measured on an H200 with vLLM 0.26, both levels."""
RESEND_BYTES_PER_S = 50e9
"""A whole commit by CUDA IPC."""
HOST_COPY_BYTES_PER_S = 14e9
"""Weights to the host's memory, as sleep level 1 does; measured on an H200 with vLLM 0.26."""

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a value in 4 bits: a scale of 8 bits a block of 64 values, and one of 32 bits for 256 of those."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


# ---------------------------------------------------------------------------------------------------------- model shape
@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on.

    Attributes:
        parameters: values on disk by role: encoder, adapter, language_model (with its head).
        layers, hidden, intermediate, vocabulary: of the language model. heads, kv_heads, head_size: of its attention.
        linears: of its linear layers by last name ("q_proj"): sums of (inputs + outputs, values).
        head: values of the head where it is no other name of the embeddings.
    """

    parameters: Mapping[str, int]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    head: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    def trained(self, freeze: Sequence[str]) -> int:
        """Parameters of the roles that are not frozen."""
        return sum(count for role, count in self.parameters.items() if role not in freeze)

    def without_head(self) -> "ModelShape":
        """As a value or reward model: the head over the vocabulary gives way to one of a single output."""
        language = {"language_model": self.parameters.get("language_model", 0) - self.head}
        return replace(self, parameters={**self.parameters, **language}, vocabulary=1, head=0)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Every model of a run.

    Attributes:
        critic: None where there is none. rewards: by name. teacher: of a distillation.
    """

    policy: ModelShape
    critic: ModelShape | None = None
    rewards: Mapping[str, ModelShape] = field(default_factory=dict[str, ModelShape])
    teacher: ModelShape | None = None


def read_shapes(config: Config, command: Command) -> Shapes:
    """Shapes of all models that a command loads.

    Raises:
        ModelError: see ``read_model_shape``.
    """
    roles = roles_in_use(config, command)
    policy, critic = read_model_shape(config.model.path), None
    if "critic" in roles and config.critic_in_use is not None:
        critic = read_model_shape(config.critic_in_use.path or config.model.path).without_head()
    models = config.reward.models if "reward" in roles and config.reward is not None else {}
    return Shapes(
        policy=policy.without_head() if command in ("rm", "prm") else policy,
        critic=critic,
        rewards={name: read_model_shape(model.path).without_head() for name, model in models.items()},
        teacher=read_model_shape(config.kd.teacher) if command == "kd" and config.kd is not None else None,
    )


def read_model_shape(directory: Path) -> ModelShape:
    """Shapes of a checkpoint directory from config.json and the headers of its safetensors files.

    Raises:
        ModelError: a file is missing or damaged.
    """
    raw = _language_config(_json(directory / "config.json"))
    heads = int(_first(raw, directory, "num_attention_heads", "n_head"))
    hidden = int(_first(raw, directory, "hidden_size", "n_embd"))
    kv_heads, head_size = raw.get("num_key_value_heads"), raw.get("head_dim")
    counts = {"encoder": 0, "adapter": 0, "language_model": 0}
    linears: dict[str, tuple[int, int]] = {}
    head = 0
    for name, shape in _tensor_shapes(directory):
        role, values = _role(name), math.prod(shape)
        counts[role] += values
        head += values if name.endswith("lm_head.weight") else 0
        if role == "language_model" and len(shape) == 2 and ".layers." in name and name.endswith(".weight"):
            last = name.split(".")[-2]
            sides, sizes = linears.get(last, (0, 0))
            linears[last] = (sides + sum(shape), sizes + values)
    return ModelShape(
        parameters={role: count for role, count in counts.items() if count},
        layers=int(_first(raw, directory, "num_hidden_layers", "n_layer")),
        hidden=hidden,
        intermediate=int(raw.get("intermediate_size") or 4 * hidden),
        heads=heads,
        kv_heads=int(heads if kv_heads is None else kv_heads),
        head_size=int(hidden // heads if head_size is None else head_size),
        vocabulary=int(_first(raw, directory, "vocab_size")),
        linears=linears,
        head=head,
    )


def _language_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model; audio models nest it."""
    for key in ("thinker_config", "text_config"):
        if isinstance(raw.get(key), Mapping):
            raw = raw[key]
    return raw


def _first(raw: Mapping[str, Any], directory: Path, *names: str) -> Any:
    found = next((raw[name] for name in names if raw.get(name) is not None), None)
    if found is None:
        raise ModelError(f"{directory / 'config.json'} says no {names[0]}: the size of this model cannot be estimated")
    return found


def _role(name: str) -> str:
    """Role of a tensor on disk, by the names that the known audio families use."""
    parts = name.split(".")
    if {"multi_modal_projector", "proj1", "proj2"} & set(parts):
        return "adapter"
    return "encoder" if "audio_tower" in parts else "language_model"


def _tensor_shapes(directory: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    index = directory / "model.safetensors.index.json"
    names = sorted(set(_json(index)["weight_map"].values())) if index.exists() else []
    files = [directory / name for name in names] or sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no model*.safetensors: the size of this model cannot be estimated")
    for file in files:
        for name, tensor in _header(file).items():
            if name != "__metadata__":
                yield name, tuple(tensor["shape"])


def _header(file: Path) -> dict[str, Any]:
    """The JSON at a safetensors file's start: 8 bytes of length, then names with dtype, shape and offsets."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError(f"a header of {length} bytes is longer than the file")
            return json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{file} cannot be read ({error}); the file is damaged or cut off, copy it again") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); is {file.parent} a checkpoint?") from error


# ---------------------------------------------------------------------------------------------------------- bytes a GPU
@dataclass(frozen=True, slots=True)
class Item:
    """One line of the table: bytes that one process of a role holds on its GPU.

    Attributes:
        name: "weights", "gradients", "optimizer", "activations", "average", "teacher", "commit", "sampler", "scoring".
        while_sampling: they stay when the trainer has given back what it can (trainer.offload).
        host_bytes: of the same, in the host's memory instead.
    """

    role: str
    name: str
    num_bytes: int
    while_sampling: bool = True
    host_bytes: int = 0


def activation_bytes(shape: ModelShape, tokens: int, width: int, *, recompute: bool) -> int:
    """Peak of what one micro-batch keeps for the backward pass. ``width``: bytes of a weight.

    A 4B model of Qwen3's shape with 32,768 tokens: 9.9 GiB recomputed, with weights and gradients 24.9 GiB; measured on
    an H200: 24 GiB.
    """
    inner = 6 * shape.hidden + (3 * shape.heads + 4 * shape.kv_heads) * shape.head_size + 4 * shape.intermediate
    layer = tokens * inner * width
    head = min(tokens, HEAD_CHUNK) * shape.vocabulary * BYTES_A_LOGIT
    if recompute:
        return shape.layers * tokens * shape.hidden * width + max(layer, head)
    return shape.layers * layer + head


def _trained_items(
    config: Config, shape: ModelShape, role: PlacedRole, *, beside: int = 0, average: bool = False
) -> list[Item]:
    """What one rank holds of a model that is trained.

    Args:
        beside: bytes of activations that are counted elsewhere and never held at the same time.
        average: with the moving average of ``trainer.ema``.
    """
    trainer, width, backend = config.trainer, _DTYPE_BYTES[config.model.dtype], config.trainer.backend
    stage = backend.zero_stage if isinstance(backend, DeepSpeedBackendConfig) else 0
    trained, parts, offload = _trained(config, shape), trainer.ranks, trainer.offload
    # The encoder stands outside the trained module while it is frozen: no backend splits it.
    outside = shape.parameters.get("encoder", 0) if "encoder" in config.model.freeze else 0
    inside = _weight_bytes(config, shape) - width * outside
    optimizer = _split((8 + (4 if width < 4 or stage else 0)) * trained, parts if stage else 1)
    on_host = isinstance(backend, DeepSpeedBackendConfig) and backend.offload_optimizer
    gives_optimizer, gives_gradients = (
        offload is not None and offload.optimizer,
        offload is not None and offload.gradients,
    )
    active = activation_bytes(
        shape, trainer.max_tokens_per_micro_batch, width, recompute=config.model.gradient_checkpointing
    )
    if width < 4 and stage < 2:  # beside the sums, a backward pass leaves whole gradients as activations go
        active = max(active, width * trained)
    items = [
        Item(role, "weights", width * outside + _split(inside, parts if stage == 3 else 1)),
        Item(role, "gradients", _split(4 * trained, parts if stage >= 2 else 1), while_sampling=not gives_gradients),
        Item(
            role,
            "optimizer",
            0 if on_host else optimizer,
            while_sampling=not gives_optimizer,
            host_bytes=optimizer if on_host else 0,
        ),
        Item(role, "activations", max(0, active - beside), while_sampling=False),
    ]
    if average:
        size = _split(4 * trained, parts if stage else 1)
        items.append(Item(role, "average", size, while_sampling=not gives_optimizer))
    return items


def _trained(config: Config, shape: ModelShape) -> int:
    """Values that are trained: adapters where the recipe has them, else the roles that are not frozen."""
    lora = config.model.lora
    if lora is None:
        return shape.trained(config.model.freeze)
    sides = sum(shape.linears.get(name, (0, 0))[0] for name in lora.target_modules)
    return lora.rank * sides + shape.trained((*config.model.freeze, "language_model"))


def _weight_bytes(config: Config, shape: ModelShape) -> int:
    """A model in training, its adapters and 4 bits as the recipe has them."""
    width, lora = _DTYPE_BYTES[config.model.dtype], config.model.lora
    if lora is None:
        return width * shape.total
    packed = sum(values for _, values in shape.linears.values()) if lora.quantize is not None else 0
    adapters = lora.rank * sum(shape.linears.get(name, (0, 0))[0] for name in lora.target_modules)
    return width * (shape.total - packed + adapters) + math.ceil(NF4_BYTES * packed)


def _policy_items(config: Config, shapes: Shapes, *, command: Command, engines: bool) -> list[Item]:
    """What one rank of the policy holds, its sampler's copy and a teacher included."""
    shape, width, backend = shapes.policy, _DTYPE_BYTES[config.model.dtype], config.trainer.backend
    if command in ("eval", "sample"):
        return [Item("policy", "weights", width * shape.total)]
    items = _trained_items(config, shape, "policy", average=config.trainer.ema is not None)
    if shapes.teacher is not None:
        items.append(Item("policy", "teacher", width * shapes.teacher.total))
    if engines:
        items.append(Item("policy", "commit", 2 * config.rollout.commit.bucket_mb << 20))
    elif isinstance(backend, DeepSpeedBackendConfig) and backend.zero_stage == 3 and command in ("train", "sft", "kd"):
        items.append(Item("policy", "sampler", width * shape.total))
    return items


def _critic_items(config: Config, shapes: Shapes, *, with_policy: bool) -> list[Item]:
    assert shapes.critic is not None
    width = _DTYPE_BYTES[config.model.dtype]
    beside = activation_bytes(
        shapes.policy,
        config.trainer.max_tokens_per_micro_batch,
        width,
        recompute=config.model.gradient_checkpointing,
    )
    return _trained_items(config, shapes.critic, "critic", beside=beside if with_policy else 0)


def _reward_items(config: Config, shapes: Shapes) -> list[Item]:
    """Every reward rank holds all reward models; they score one batch at a time."""
    assert config.reward is not None
    items, batches = [], [0]
    for name, model in config.reward.models.items():
        shape, width = shapes.rewards[name], _DTYPE_BYTES[model.dtype]
        items.append(Item("reward", f"weights of {name}", width * shape.total))
        one = replace(shape, layers=2)
        batches.append(activation_bytes(one, model.max_tokens_per_batch, width, recompute=True))
    return [*items, Item("reward", "scoring", max(batches))]


def _split(count: int, parts: int) -> int:
    return -(-count // parts)


def group_items(config: Config, placement: Placement, shapes: Shapes, *, command: Command) -> list[list[Item]]:
    """Bytes of one GPU of each group of a placement, without its engines."""
    engines = placement.group_of("rollout") is not None
    return [role_items(config, shapes, group.roles, command=command, engines=engines) for group in placement.groups]


def role_items(
    config: Config, shapes: Shapes, roles: Sequence[PlacedRole], *, command: Command, engines: bool
) -> list[Item]:
    """Bytes of one GPU that these roles share, without engines on it.

    Args:
        engines: engines in other processes sample; else the policy does.
    """
    items: list[Item] = []
    if "policy" in roles:
        items += _policy_items(config, shapes, command=command, engines=engines)
    if "critic" in roles:
        items += _critic_items(config, shapes, with_policy="policy" in roles)
    if "reference" in roles:
        items.append(Item("reference", "weights", _DTYPE_BYTES[config.model.dtype] * shapes.policy.total))
    if "reward" in roles:
        items += _reward_items(config, shapes)
    if "rollout" in roles and "policy" not in roles:
        items.append(Item("rollout", "commit", 2 * config.rollout.commit.bucket_mb << 20))
    return items


# -------------------------------------------------------------------------------------------------------------- engines
def engine_weight_bytes(config: Config, shape: ModelShape) -> int:
    """The model's weights on each GPU of an engine."""
    engine = config.rollout.engine
    parallel = engine.tensor_parallel_size if isinstance(engine, VLLMEngineConfig) else 1
    return _split(_DTYPE_BYTES[config.model.dtype] * shape.total, parallel)


def engine_memory_share(
    config: Config, placement: Placement, shapes: Shapes, *, command: Command, total_bytes: int
) -> float:
    """Share of each GPU's memory that its engine may use: ``rollout.engine.gpu_memory_utilization``, or a good one.

    On GPUs of its own 0.85. On shared ones what the trainer leaves, at most 0.85: all but what the trainer holds while
    engines sample, the activations of a micro-batch (the allocator may keep their memory) and a margin of 4 GiB.

    Args:
        total_bytes: memory of a GPU.

    Raises:
        ConfigError: the share does not hold the engine's weights.
    """
    engine, group = config.rollout.engine, placement.group_of("rollout")
    assert isinstance(engine, VLLMEngineConfig)
    assert group is not None
    weights, asked = engine_weight_bytes(config, shapes.policy), engine.gpu_memory_utilization
    items = group_items(config, placement, shapes, command=command)[group]
    held = sum(item.num_bytes for item in items if item.while_sampling)
    active = sum(item.num_bytes for item in items if item.name == "activations")
    shared = placement.engines_share_with_policy
    left = (total_bytes - held - active - MARGIN_BYTES) / total_bytes if shared else MAX_ENGINE_SHARE
    share = asked if asked is not None else math.floor(min(left, MAX_ENGINE_SHARE) * 1000) / 1000
    if share * total_bytes < weights:
        source = f"rollout.engine.gpu_memory_utilization = {asked}" if asked is not None else "what is left"
        holds = f"; the trainer holds {_gib(held)} there, a micro-batch {_gib(active)}" if shared else ""
        raise ConfigError(
            f"An engine's weights take {_gib(weights)} of each GPU, but {source} is "
            f"{_gib(max(share, 0) * total_bytes)} of {_gib(total_bytes)}{holds}, and {_gib(MARGIN_BYTES)} stay free: "
            "raise rollout.engine.tensor_parallel_size, set trainer.offload, raise trainer.backend.zero_stage, lower "
            "trainer.max_tokens_per_micro_batch, or give rollout GPUs of its own"
        )
    return share


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def choose_sleep_level(
    frozen_bytes: int,
    total_bytes: int,
    *,
    resend_bytes_per_s: float = RESEND_BYTES_PER_S,
    host_copy_bytes_per_s: float = HOST_COPY_BYTES_PER_S,
) -> tuple[int, str]:
    """Sleep level of engines on shared GPUs, and why: the one that costs less time a step.

    Level 1 copies all weights to the host; level 2 drops them, so that the next commit must bring the frozen ones too.
    The trained ones are sent after either.

    Args:
        frozen_bytes: weights and buffers that commits leave out while the engine holds them.
        total_bytes: all of them.
    """
    assert 0 <= frozen_bytes <= total_bytes
    keep, send = total_bytes / host_copy_bytes_per_s, frozen_bytes / resend_bytes_per_s
    level = 2 if send <= keep else 1
    return level, (
        f"level 2 sends {_gib(frozen_bytes)} of frozen weights again: {send:.2f} s; level 1 copies "
        f"{_gib(total_bytes)} to the host: {keep:.2f} s"
    )
