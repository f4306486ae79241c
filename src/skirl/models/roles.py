"""Which role each parameter has, and which roles train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from skirl.errors import ConfigError, ModelError
from skirl.models.family import Family

__all__ = ["Role", "TrainableReport", "parameter_role", "set_trainable"]

Role = Literal["encoder", "adapter", "language_model"]
_ROLES: tuple[Role, ...] = ("encoder", "adapter", "language_model")


def parameter_role(name: str, family: Family) -> Role:
    """Role of a parameter by the longest module path that it lies under; the head belongs to the language model.

    Raises:
        ModelError: it lies under none.
    """
    under = [role for role, path in family.roles.items() if name.startswith(path + ".")]
    if not under:
        raise ModelError(
            f"parameter {name} belongs to no role of {family.name} ({', '.join(family.roles.values())}): "
            "this architecture is not supported"
        )
    longest = max(under, key=lambda role: len(family.roles[role]))
    return "language_model" if longest == "head" else longest  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class TrainableReport:
    """Which parameters train; ``str()`` is a small table.

    Attributes:
        trainable, frozen: names by role. Frozen ones include those that are constant by design (position tables).
        numel: number of values by parameter name.
    """

    trainable: Mapping[Role, tuple[str, ...]]
    frozen: Mapping[Role, tuple[str, ...]]
    numel: Mapping[str, int] = field(repr=False)

    @property
    def num_trainable(self) -> int:
        """Values that train."""
        return sum(self.numel[name] for names in self.trainable.values() for name in names)

    def __str__(self) -> str:
        """role, tensors and values that train, and that do not."""
        lines = [f"{'role':<16}{'trainable tensors':>18}{'values':>16}{'frozen tensors':>16}{'values':>16}"]
        for role in _ROLES:
            cells = [self.trainable.get(role, ()), self.frozen.get(role, ())]
            if any(cells):
                counts = [(len(names), sum(self.numel[name] for name in names)) for names in cells]
                (a, b), (c, d) = counts
                lines.append(f"{role:<16}{a:>18,}{b:>16,}{c:>16,}{d:>16,}")
        return "\n".join(lines)


def set_trainable(model: nn.Module, family: Family, freeze: Sequence[str]) -> TrainableReport:
    """Sets ``requires_grad`` of every parameter by role.

    Args:
        freeze: roles not to train; one that the model lacks is skipped.

    Raises:
        ConfigError: an unknown role, or nothing is left to train.
    """
    unknown = [role for role in freeze if role not in _ROLES]
    if unknown:
        raise ConfigError(f"model.freeze: {unknown[0]!r} is no role; roles are {', '.join(_ROLES)}")
    trainable: dict[Role, list[str]] = {}
    frozen: dict[Role, list[str]] = {}
    numel: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        role = parameter_role(name, family)
        trains = role not in freeze and name not in family.constant
        parameter.requires_grad_(trains)
        (trainable if trains else frozen).setdefault(role, []).append(name)
        numel[name] = parameter.numel()
    if not trainable:
        raise ConfigError(f"model.freeze: {', '.join(freeze)} is all that this model has, so nothing is left to train")
    report = TrainableReport(
        {role: tuple(names) for role, names in trainable.items()},
        {role: tuple(names) for role, names in frozen.items()},
        numel,
    )
    listed = {name for names in report.trainable.values() for name in names}
    assert listed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return report
