"""The algorithm as one complete record. A preset fills in every field that the user leaves out."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from skirl.config.algorithms import (
    Advantage,
    ConstantNormalizer,
    Correction,
    DynamicSamplingConfig,
    GroupMean,
    GroupNorm,
    KLConfig,
    Normalizer,
    PolicyLoss,
    PPOClip,
    SequenceNormalizer,
    ShapingConfig,
    TokenNormalizer,
)
from skirl.config.base import Frozen, by_name

__all__ = [
    "PRESETS",
    "ConstantNormalizer",
    "GroupMean",
    "GroupNorm",
    "KLConfig",
    "MethodConfig",
    "PPOClip",
    "SequenceNormalizer",
    "TokenNormalizer",
]

_CLIP = {"kind": "ppo_clip", "low": 0.2, "high": 0.2}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {  # arXiv:2203.02155, appendix C.4: one pass, 8 mini-batches, beta 0.02, gamma 1, lambda 0.95
        "advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True},
        "policy_loss": _CLIP,
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.02},
        "normalizer": {"kind": "token"},
        "mini_batches": 8,
    },
    "grpo": {
        "advantage": {"kind": "group_norm"},
        "policy_loss": _CLIP,
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
        "normalizer": {"kind": "sequence"},
    },
    "dr_grpo": {
        "advantage": {"kind": "group_mean"},
        "policy_loss": _CLIP,
        "kl": None,
        "normalizer": {"kind": "constant", "length": 256},
    },
    "rloo": {  # a response is one action: its log-probs are summed
        "advantage": {"kind": "leave_one_out"},
        "policy_loss": _CLIP,
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.03},
        "normalizer": {"kind": "constant", "length": 1},
    },
    "reinforce_pp": {
        "advantage": {"kind": "reinforce_pp"},
        "policy_loss": _CLIP,
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.01},
        "normalizer": {"kind": "token"},
    },
    "reinforce_pp_baseline": {
        "advantage": {"kind": "reinforce_pp_baseline"},
        "policy_loss": _CLIP,
        "kl": {"where": "loss", "estimator": "k2", "coef": 0.001},
        "normalizer": {"kind": "token"},
    },
    "dapo": {
        "advantage": {"kind": "group_norm"},
        "policy_loss": {"kind": "ppo_clip", "low": 0.2, "high": 0.28},
        "kl": None,
        "normalizer": {"kind": "token"},
        "mini_batches": 16,
        "shaping": {"overlong": {"buffer_share": 0.2, "penalty": 1.0}},
        "dynamic_sampling": {"keep": {"kind": "mean_range", "low": 0.0, "high": 1.0}},
    },
    "gspo": {
        "advantage": {"kind": "group_norm"},
        "policy_loss": {"kind": "gspo", "low": 3e-4, "high": 4e-4},
        "kl": None,
        "normalizer": {"kind": "sequence"},
        "mini_batches": 4,
    },
    "cispo": {
        "advantage": {"kind": "group_norm"},
        "policy_loss": {"kind": "cispo", "low": None, "high": 4.0},
        "kl": None,
        "normalizer": {"kind": "token"},
        "mini_batches": 16,
    },
    "max_rl": {
        "advantage": {"kind": "max_rl"},
        "policy_loss": {"kind": "ppo_clip", "low": 0.2, "high": 0.28},
        "kl": None,
        "normalizer": {"kind": "token"},
    },
}


class MethodConfig(Frozen):
    """A complete method: advantage, policy loss, KL, normaliser, and how often a batch is used."""

    preset: Literal[
        "ppo",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "dapo",
        "gspo",
        "cispo",
        "max_rl",
    ] = "grpo"
    """The published record that fills in what is left out below."""
    advantage: Annotated[Advantage, BeforeValidator(by_name)] = GroupNorm()
    """How scores become advantages."""
    policy_loss: Annotated[PolicyLoss, BeforeValidator(by_name)] = PPOClip()
    """Loss of an action token."""
    kl: KLConfig | None = KLConfig()
    """Penalty against the reference; null needs no reference model."""
    correction: Annotated[Correction | None, BeforeValidator(by_name)] = None
    """Weights for the gap between engine and trainer, w = trainer's old policy / engine's; null takes none."""
    normalizer: Annotated[Normalizer, BeforeValidator(by_name)] = SequenceNormalizer(kind="sequence")
    """How token losses are weighted."""
    shaping: ShapingConfig = ShapingConfig()
    """Changes to raw scores before the baseline."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without signal; null trains on all."""
    old_policy: Literal["trainer", "rollout"] = "trainer"
    """Whose log-probs the ratio is taken against: the trainer's, from before the first update, or the engine's."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Factor of an entropy bonus; entropy is reported in any case."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over each batch."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps a pass; prompts are dealt out whole."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        written = cast(Mapping[str, Any], data)
        record = PRESETS.get(written.get("preset", "grpo"), {})  # an unknown preset is reported by its own field
        return merge(record, written)

    @property
    def needs_critic(self) -> bool:
        """The advantage is made of a critic's values."""
        return self.advantage.kind == "gae"

    @property
    def needs_old_logprobs(self) -> bool:
        """The trainer must score the batch before it trains on it."""
        several = self.epochs * self.mini_batches > 1
        covariance = self.policy_loss.kind in ("clip_cov", "kl_cov")
        return self.old_policy == "trainer" and (several or self.correction is not None or covariance)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` wins; mappings of the same kind are merged key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if not isinstance(below, Mapping):
            result[key] = value
            continue
        low = cast(Mapping[str, Any], below)
        if isinstance(value, str) and low.get("kind") == value:
            continue
        high = cast(Mapping[str, Any], value) if isinstance(value, Mapping) else None
        same = high is not None and high.get("kind", low.get("kind")) == low.get("kind")
        result[key] = merge(low, high) if same and high is not None else value
    return result
