"""Which role each parameter has, and which roles train."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from skirl.errors import ConfigError, ModelError
from skirl.models.family import Family
from skirl.models.quantize import is_quantized
from skirl.models.scalar_heads import HEAD

__all__ = [
    "Part",
    "Role",
    "TrainableReport",
    "adapter_target",
    "base_name",
    "is_adapter_name",
    "parameter_role",
    "set_trainable",
]

Role = Literal["encoder", "adapter", "language_model"]
Part = Literal["encoder", "adapter", "language_model", "lora", "value_head"]
"""A role, or what is beside the roles' own weights: LoRA's adapters ("adapter" is that of audio), a scalar head."""
_ROLES: tuple[Role, ...] = ("encoder", "adapter", "language_model")
_PARTS: tuple[Part, ...] = (*_ROLES, "lora", "value_head")

_ADAPTER = re.compile(r"\.lora_[AB]\.default\.weight$")
_WRAPPED = ".base_layer."


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of this name is a matrix of a LoRA adapter, as peft names them."""
    return _ADAPTER.search(name) is not None


def adapter_target(name: str) -> str:
    """Checkpoint's name of the weight that this adapter matrix belongs to."""
    return _ADAPTER.sub(".weight", name)


def base_name(name: str) -> str:
    """Checkpoint's name of a parameter: that of the same model without adapters around its layers."""
    return name.replace(_WRAPPED, ".")


def parameter_role(name: str, family: Family) -> Role:
    """Role of a parameter by the longest module path that it lies under; a head belongs to the language model.

    Raises:
        ModelError: it lies under none.
    """
    if _is_value_head(name):
        return "language_model"
    under = [role for role, path in family.roles.items() if name.startswith(path + ".")]
    if not under:
        raise ModelError(
            f"parameter {name} belongs to no role of {family.name} ({', '.join(family.roles.values())}): "
            "this architecture is not supported"
        )
    longest = max(under, key=lambda role: len(family.roles[role]))
    return "language_model" if longest == "head" else longest  # pyright: ignore[reportReturnType]


def _is_value_head(name: str) -> bool:
    return name.startswith(HEAD + ".")


def _part(name: str, family: Family) -> Part:
    if is_adapter_name(name):
        return "lora"
    return "value_head" if _is_value_head(name) else parameter_role(name, family)


@dataclass(frozen=True)
class TrainableReport:
    """Which parameters train; ``str()`` is a small table.

    Attributes:
        trainable, frozen: names by part. Frozen ones include those that are constant by design (position tables).
        numel: number of values by parameter name.
    """

    trainable: Mapping[Part, tuple[str, ...]]
    frozen: Mapping[Part, tuple[str, ...]]
    numel: Mapping[str, int] = field(repr=False)

    @property
    def num_trainable(self) -> int:
        """Values that train."""
        return sum(self.numel[name] for names in self.trainable.values() for name in names)

    def __str__(self) -> str:
        """part, tensors and values that train, and that do not."""
        lines = [f"{'role':<16}{'trainable tensors':>18}{'values':>16}{'frozen tensors':>16}{'values':>16}"]
        for part in _PARTS:
            cells = [self.trainable.get(part, ()), self.frozen.get(part, ())]
            if any(cells):
                counts = [(len(names), sum(self.numel[name] for name in names)) for names in cells]
                (a, b), (c, d) = counts
                lines.append(f"{part:<16}{a:>18,}{b:>16,}{c:>16,}{d:>16,}")
        return "\n".join(lines)


def set_trainable(model: nn.Module, family: Family, freeze: Sequence[str]) -> TrainableReport:
    """Sets ``requires_grad`` of every parameter by role.

    LoRA's adapters and scalar heads always train; the weights of a language model that has adapters never do.

    Args:
        freeze: roles not to train; one that the model lacks is skipped.

    Raises:
        ConfigError: an unknown role, or nothing is left to train.
    """
    unknown = [role for role in freeze if role not in _ROLES]
    if unknown:
        raise ConfigError(f"model.freeze: {unknown[0]!r} is no role; roles are {', '.join(_ROLES)}")
    names = [name for name, _ in model.named_parameters()]
    still = {*freeze, "language_model"} if any(map(is_adapter_name, names)) else set(freeze)
    trainable: dict[Part, list[str]] = {}
    frozen: dict[Part, list[str]] = {}
    numel: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name, family)
        trains = part not in still and name not in family.constant
        parameter.requires_grad_(trains)
        (trainable if trains else frozen).setdefault(part, []).append(name)
        numel[name] = parameter.quant_state.shape.numel() if is_quantized(parameter) else parameter.numel()
    if not trainable:
        raise ConfigError(f"model.freeze: {', '.join(freeze)} is all that this model has, so nothing is left to train")
    report = TrainableReport(
        {part: tuple(names) for part, names in trainable.items()},
        {part: tuple(names) for part, names in frozen.items()},
        numel,
    )
    listed = {name for names in report.trainable.values() for name in names}
    assert listed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return report
