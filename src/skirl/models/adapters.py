"""Low-rank adapters of the language model, and the weights that others see: the frozen one and its adapter together.

y = W x + scale * B (A x)   in training;   W + scale * B A   under W's own name wherever weights leave the trainer
W is never written: each sum is made in float32 when it is asked for, one tensor at a time, and rounded once.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skirl.config.models import LoRAConfig
from skirl.errors import ConfigError
from skirl.models.family import Family
from skirl.models.moe import ExpertPart, expert_parts
from skirl.models.quantize import dequantized, is_quantized, quantize_linears
from skirl.models.roles import adapter_target, base_name, is_adapter_name
from skirl.records import TensorSpec

if TYPE_CHECKING:
    from skirl.models.loading import LoadedModel

__all__ = [
    "ENGINE_ADAPTER_ID",
    "MATRIX_A",
    "MATRIX_B",
    "NamedWeight",
    "adapter_specs",
    "adapter_weights",
    "adapters_off",
    "add_adapters",
    "check_reference",
    "committed_weights",
    "exported_weights",
    "is_sent_apart",
    "lora_scale",
    "target_names",
]

MATRIX_A, MATRIX_B = ".lora_A.weight", ".lora_B.weight"
"""Endings of an adapter's tensors, as peft has them in its files."""
ENGINE_ADAPTER_ID = 1
"""Number of the policy's adapter in an engine that adds it itself: one at a time, the next in its place."""


# --------------------------------------------------------------------------------------------------------------- making
def add_adapters(loaded: "LoadedModel", lora: LoRAConfig, *, seed: int = 0) -> None:
    """Puts adapters beside linear layers of the language model, in place, and freezes everything else of the model.

    The sum starts as the loaded weights (B = 0). Adapters have the model's own type: what holds float32 masters of
    bfloat16 weights (every backend does) holds them of adapters too, DeepSpeed would convert them in any case, and an
    engine that gets them as an adapter computes in that type. There is no dropout: it would make the ratio of policy
    to sampler random. Call ``set_trainable`` afterwards, which says what else trains.

    Args:
        loaded: on the CPU; its ``lora`` is set.
        seed: of the matrices A; the same on every rank.

    Raises:
        ConfigError: a name in ``lora.target_modules`` is that of no linear layer of the language model.
        MissingExtra, ModelError: see ``quantize.quantize_linears``.
    """
    import peft

    assert loaded.lora is None, "adapters are added once"
    names = target_names(loaded.model, loaded.family, lora)
    dtype = loaded.model.dtype
    if lora.quantize is not None:
        quantize_linears(loaded.model, loaded.family.roles["language_model"], dtype)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        use_rslora=lora.rank_stabilized,
        target_modules=names,
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, loaded.model)
    for name, parameter in loaded.model.named_parameters():
        parameter.requires_grad_(is_adapter_name(name))
        if is_adapter_name(name):
            parameter.data = parameter.data.to(dtype)
    loaded.model.eval()
    loaded.lora = lora
    made = {adapter_target(name) for name, _ in loaded.model.named_parameters() if is_adapter_name(name)}
    assert made == {f"{name}.weight" for name in names}, "an adapter for each target and no other"


def target_names(model: nn.Module, family: Family, lora: LoRAConfig) -> list[str]:
    """Module paths of the linear layers that get an adapter, in the model's order.

    Raises:
        ConfigError: see ``add_adapters``.
    """
    inside = family.roles["language_model"] + "."
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(inside)]
    found = {name.rsplit(".", 1)[-1] for name in linears}
    absent = [name for name in lora.target_modules if name not in found]
    if absent or not lora.target_modules:
        experts = " (experts that are held as one tensor a layer get no adapter)" if _has_fused(model, absent) else ""
        raise ConfigError(
            f"model.lora.target_modules: {', '.join(absent) or 'empty'}: no linear layer of the language model "
            f"({inside[:-1]}) has this name{experts}; there are {', '.join(sorted(found))}"
        )
    wanted = set(lora.target_modules)
    return [name for name in linears if name.rsplit(".", 1)[-1] in wanted]


def _has_fused(model: nn.Module, names: Iterable[str]) -> bool:
    return any(n.rsplit(".", 1)[-1] in names and p.ndim > 2 for n, p in model.named_parameters())


def lora_scale(lora: LoRAConfig) -> float:
    """Factor of B A."""
    return lora.alpha / (lora.rank**0.5 if lora.rank_stabilized else lora.rank)


def check_reference(model: nn.Module) -> None:
    """Whether the model without its adapters is what training started from: nothing else of it trains.

    Raises:
        ConfigError: something does.
    """
    beside = [name for name, p in model.named_parameters() if p.requires_grad and not is_adapter_name(name)]
    if beside:
        raise ConfigError(
            f"model.lora: the reference is the policy without its adapters, but {len(beside)} other tensors train as "
            f"well ({beside[0]}): add their role to model.freeze ([encoder, adapter]), or train without a reference "
            "(no KL term)"
        )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters meanwhile, exactly: the reference policy. Nothing is copied; weights stay.

    Args: model: a policy, a backend's wrapper around one, or the transformers model.

    Raises: ConfigError: see ``check_reference``.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    check_reference(model)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    trained = {p: p.requires_grad for layer in layers for p in layer.parameters()}
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, requires_grad in trained.items():  # peft lets all adapters train
            parameter.requires_grad_(requires_grad)


# -------------------------------------------------------------------------------------------------------------- weights
@dataclass(frozen=True)
class NamedWeight:
    """A tensor under the name that a checkpoint has for it, and what it is made from.

    Attributes:
        spec: its whole shape and type; whether it changes in training.
        base: the model's own tensor: whole, a shard (ZeRO-3), or 4 bits.
        a, b: matrices of its adapter, [rank, in] and [out, rank]; None where it has none, or is sent without.
        scale: factor of B A; of ``base`` where that is such a B, apart from its A.
        part: the matrix of ``base`` that this is, where that holds all experts of a layer.
    """

    spec: TensorSpec
    base: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    part: ExpertPart | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What must be whole when ``value`` is asked for."""
        return tuple(t for t in (self.base, self.a, self.b) if t is not None)

    @torch.no_grad()
    def value(self) -> Tensor:
        """The tensor: the model's own memory where it has no adapter and no 4 bits, else made now."""
        base = dequantized(self.base) if is_quantized(self.base) else self.base.detach()
        base = base if self.part is None else self.part.of(base)
        if self.a is None or self.b is None:
            return base if self.scale == 1.0 else (self.scale * base.float()).to(base.dtype)
        return (base.float() + self.scale * (self.b.float() @ self.a.float())).to(getattr(torch, self.spec.dtype))


def committed_weights(loaded: "LoadedModel", tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NamedWeight]:
    """What engines get, by name: the same as without adapters, or with ``lora.commit`` "adapter" the frozen weights and
    the adapters apart, those last, with B times the scale. Experts are named one by one.

    Args: tensors: parameters and buffers under the model's own names, tied ones once.
    """
    found = dict(tensors)
    if loaded.lora is None or loaded.lora.commit == "merged":
        return _by_expert(_named(loaded, found, merge=True))
    scale = lora_scale(loaded.lora)
    apart = {name: weight for name, weight in adapter_weights(loaded, found.items()).items() if is_sent_apart(name)}
    scaled = {n: replace(w, scale=scale) if n.endswith(MATRIX_B) else w for n, w in apart.items()}
    return {**_by_expert(_named(loaded, found, merge=False)), **scaled}


def is_sent_apart(name: str) -> bool:
    """Whether a tensor of a commit is a matrix of an adapter."""
    return name.endswith((MATRIX_A, MATRIX_B))


def _by_expert(weights: Mapping[str, NamedWeight]) -> dict[str, NamedWeight]:
    found: dict[str, NamedWeight] = {}
    for name, weight in weights.items():
        parts = expert_parts(name, weight.spec.shape)
        for part in parts:
            shape = (part.stop - part.start, weight.spec.shape[2])
            found[part.name] = replace(weight, spec=replace(weight.spec, name=part.name, shape=shape), part=part)
        if not parts:
            found[name] = weight
    return found


def exported_weights(loaded: "LoadedModel", tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NamedWeight]:
    """What a checkpoint of the model holds, by name: adapters added in."""
    return _named(loaded, dict(tensors), merge=True)


def adapter_weights(loaded: "LoadedModel", tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NamedWeight]:
    """What training changes, apart from the frozen weights: adapters, and whatever else trains. Empty without adapters.

    "model.layers.0.self_attn.q_proj.lora_A.weight" is what peft calls an adapter's matrix behind its prefix.
    """
    made: dict[str, NamedWeight] = {}
    if loaded.lora is None:
        return made
    for own, tensor in tensors:
        if is_adapter_name(own):
            target, kind = adapter_target(own), "A" if ".lora_A." in own else "B"
            out, into = loaded.shapes[target]
            shape = (loaded.lora.rank, into) if kind == "A" else (out, loaded.lora.rank)
            name = target.removesuffix(".weight") + (MATRIX_A if kind == "A" else MATRIX_B)
            made[name] = NamedWeight(TensorSpec(name, shape, _dtype(tensor), tensor.requires_grad), tensor)
        elif tensor.requires_grad:
            made |= _named(loaded, {own: tensor}, merge=False)
    return made


def adapter_specs(
    weights: Mapping[str, TensorSpec], family: Family, lora: LoRAConfig
) -> dict[str, tuple[TensorSpec, TensorSpec]]:
    """The weights that get an adapter, and the two matrices of each, by the names and shapes of a checkpoint alone.

    Experts are never adapted: in memory those of a layer are one tensor.
    """
    inside = family.roles["language_model"] + "."
    found: dict[str, tuple[TensorSpec, TensorSpec]] = {}
    for name, spec in weights.items():
        stem, _, last = name.rpartition(".")
        wanted = last == "weight" and stem.rsplit(".", 1)[-1] in lora.target_modules and ".experts." not in name
        if wanted and name.startswith(inside):
            out, into = spec.shape
            found[name] = (
                TensorSpec(stem + MATRIX_A, (lora.rank, into), spec.dtype, trained=True),
                TensorSpec(stem + MATRIX_B, (out, lora.rank), spec.dtype, trained=True),
            )
    return found


def _named(loaded: "LoadedModel", found: Mapping[str, Tensor], *, merge: bool) -> dict[str, NamedWeight]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for own, tensor in found.items():
        if merge and is_adapter_name(own):
            pairs.setdefault(adapter_target(own), {})["a" if ".lora_A." in own else "b"] = tensor
    made: dict[str, NamedWeight] = {}
    for own, tensor in found.items():
        if is_adapter_name(own):
            continue
        name = base_name(own)
        pair: dict[str, Any] = dict(pairs.get(name, {}))
        if pair:
            assert loaded.lora is not None
            pair["scale"] = lora_scale(loaded.lora)
        trained = tensor.requires_grad or any(t.requires_grad for t in pairs.get(name, {}).values())
        dtype = str(loaded.model.dtype).removeprefix("torch.") if is_quantized(tensor) else _dtype(tensor)
        made[name] = NamedWeight(TensorSpec(name, loaded.shapes[name], dtype, trained), tensor, **pair)
    return made


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
