"""Which parts of a method go together: every policy loss with every advantage and normaliser, and why some do not.

docs/methods.md is generated from here.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast, get_args

from skirl.config.algorithms import GAE, GSPO, Advantage, Normalizer, PolicyLoss, Reinforce, ReinforcePP
from skirl.config.base import Frozen
from skirl.config.describe import first_line
from skirl.config.method import PRESETS, MethodConfig

__all__ = ["Place", "advantages", "combinations", "kl_problem", "legal", "losses", "normalizers", "render"]

Place = Literal["none", "loss", "reward"]
"""Where the KL to the reference is."""

WHOLE_RESPONSE = ("gspo", "gmpo")
"""Losses with one value for a whole response."""
NO_KL_IN_REWARD = {
    "max_rl": "max_rl needs scores >= 0, which a KL taken off them does not leave",
    "pass_at_k": "pass_at_k asks only whether a response is right, so a KL taken off its score would be lost",
    "gdpo": "gdpo reads the parts of a score, not the total that a KL would be taken off",
}


def legal(loss: PolicyLoss, advantage: Advantage, normalizer: Normalizer, kl: Place = "none") -> str | None:
    """Why these do not go together, as the end of a sentence; None where they do.

    Args: kl: "reward" makes the rewards of gae, reinforce and reinforce_pp vary from token to token.
    """
    return _loss_problem(loss, advantage, normalizer, kl) or kl_problem(advantage, kl)


def _loss_problem(loss: PolicyLoss, advantage: Advantage, normalizer: Normalizer, kl: Place) -> str | None:
    whole = loss.kind in WHOLE_RESPONSE and not (isinstance(loss, GSPO) and loss.token_level)
    by_token = _varies(advantage, kl)
    instead = "gspo with token_level: true" if loss.kind == "gspo" else "ppo_clip"
    if whole and normalizer.kind != "sequence":
        return (
            f"{loss.kind} is a loss of whole responses, whose value stands at each of their tokens: with the "
            f"{normalizer.kind} normaliser long responses would count by their length; use the sequence normaliser"
            + (", or token_level: true" if loss.kind == "gspo" else "")
        )
    if whole and by_token is not None:
        return f"{loss.kind} is a loss of whole responses, but {by_token}: use {instead}, or an advantage of responses"
    if loss.kind == "topr" and by_token is not None:
        return f"topr tells good responses from bad ones, but {by_token}: use ppo_clip, or an advantage of responses"
    return None


def kl_problem(advantage: Advantage, kl: Place) -> str | None:
    """Why this advantage does not go with a KL in the reward."""
    reason = NO_KL_IN_REWARD.get(advantage.kind) if kl == "reward" else None
    return None if reason is None else f"{reason}: use method.kl.where = loss"


def _varies(advantage: Advantage, kl: Place) -> str | None:
    """Why the advantage may differ between the tokens of a response; None where it cannot."""
    if isinstance(advantage, GAE):
        return "gae gives each token an advantage of its own"
    if isinstance(advantage, Reinforce) and advantage.gamma < 1:
        return "reinforce with gamma below 1 gives each token an advantage of its own"
    if isinstance(advantage, (Reinforce, ReinforcePP)) and kl == "reward":
        return f"{advantage.kind} with the KL in the reward gives each token an advantage of its own"
    return None


# ---------------------------------------------------------------------------------------------------- all that there is
def losses() -> list[PolicyLoss]:
    """Every policy loss as published, gspo also in its token form."""
    found = [_default(model) for model in _variants(PolicyLoss)]
    after = next(i for i, loss in enumerate(found) if loss.kind == "gspo") + 1
    return [*found[:after], GSPO(kind="gspo", token_level=True), *found[after:]]


def advantages() -> list[Advantage]:
    """Every advantage as published, reinforce also with a discount."""
    found = [_default(model) for model in _variants(Advantage)]
    after = next(i for i, advantage in enumerate(found) if advantage.kind == "reinforce") + 1
    return [*found[:after], Reinforce(kind="reinforce", gamma=0.99), *found[after:]]


def normalizers() -> list[Normalizer]:
    """Every normaliser."""
    return [_default(model) for model in _variants(Normalizer)]


def combinations() -> Iterator[tuple[PolicyLoss, Advantage, Normalizer, Place, str | None]]:
    """Each loss x advantage x normaliser x place of the KL, and why it is refused."""
    for loss in losses():
        for advantage in advantages():
            for normalizer in normalizers():
                for kl in get_args(Place):
                    yield loss, advantage, normalizer, kl, legal(loss, advantage, normalizer, kl)


def _variants(union: Any) -> Sequence[type[Frozen]]:
    """The classes of a discriminated union."""
    return get_args(get_args(union)[0])


def _default(model: type[Frozen]) -> Any:
    given: dict[str, Any] = {"kind": get_args(model.model_fields["kind"].annotation)[0]}
    if "length" in model.model_fields:
        given["length"] = 256
    return model.model_validate(given)


# ------------------------------------------------------------------------------------------------------------- the page
def render() -> str:
    """The text of docs/methods.md."""
    found = list(combinations())
    legal_ones = sum(reason is None for *_, reason in found)
    lines = [
        "# Methods",
        "",
        "Made from the schema and `skirl.config.combinations`. A method is a full record: advantage, policy loss, KL,",
        "correction, normaliser, shaping, dynamic sampling. A preset fills in what a recipe leaves out; `skirl show`",
        "prints the record and its loss as a formula, and `skirl train` does so at its start. docs/papers.md has the",
        "papers, equations and deviations.",
        "",
        "## Presets",
        "",
        "| preset | advantage | policy loss | KL | normaliser | also |",
        "|---|---|---|---|---|---|",
        *map(_preset_row, PRESETS),
        "",
        "## Policy loss x advantage x normaliser",
        "",
        f"{legal_ones} of {len(found)} combinations are legal; the rest is refused before anything starts, for the",
        "reasons below. A cell names the normalisers that go with the pair: **t**oken, **s**equence, **c**onstant.",
        "",
        *_table("none"),
        "",
        "With the KL in the reward (`method.kl.where: reward`):",
        "",
        *_table("reward"),
        "",
        "With the KL in the loss the first table counts.",
        "",
        "## Why not",
        "",
        *(f"- {reason}." for reason in dict.fromkeys(r for *_, r in found if r is not None)),
        "",
        "## Variants",
        "",
        *dict.fromkeys(f"- `{v.kind}`: {first_line(type(v).__doc__)}" for v in _all()),
    ]
    return "\n".join(lines) + "\n"


def _all() -> list[Any]:
    return [*advantages(), *losses(), *normalizers()]


def _preset_row(name: str) -> str:
    method = MethodConfig.model_validate({"preset": name})
    kl = "-" if method.kl is None else f"{method.kl.estimator} in the {method.kl.where}, {method.kl.coef:g}"
    also = [f"{method.mini_batches} mini-batches"] if method.mini_batches > 1 else []
    also += ["overlong penalty"] if method.shaping.overlong is not None else []
    also += [f"dynamic sampling ({method.dynamic_sampling.keep.kind})"] if method.dynamic_sampling is not None else []
    parts = [method.advantage.kind, method.policy_loss.kind, kl, method.normalizer.kind, ", ".join(also) or "-"]
    return f"| `{name}` | {' | '.join(parts)} |"


def _table(kl: Place) -> list[str]:
    columns = losses()
    lines = ["| advantage | " + " | ".join(map(_name, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for advantage in advantages():
        cells = [_cell(loss, advantage, kl) for loss in columns]
        lines.append(f"| {_name(advantage)} | {' | '.join(cells)} |")
    return lines


def _cell(loss: PolicyLoss, advantage: Advantage, kl: Place) -> str:
    return " ".join(n.kind[0] for n in normalizers() if legal(loss, advantage, n, kl) is None) or "-"


def _name(variant: Any) -> str:
    """Kind, and the setting that makes it a variant of its own."""
    if isinstance(variant, GSPO) and variant.token_level:
        return "gspo, token level"
    if isinstance(variant, Reinforce) and variant.gamma < 1:
        return "reinforce, gamma < 1"
    return cast(str, variant.kind)
