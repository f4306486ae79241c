"""Sections of the commands that learn from data sets, and of ``skirl sample``."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from skirl.config.base import Frozen, by_name

__all__ = [
    "DPOConfig",
    "KDConfig",
    "PRMConfig",
    "PreferenceLoss",
    "RMConfig",
    "SFTConfig",
    "SampleConfig",
]

Steps = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(gt=0)]


class SFTConfig(Frozen):
    """Supervised fine-tuning on references."""

    steps: Steps = 300
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Rows an optimizer step, over all ranks."""
    turns: Literal["all", "last"] = "all"
    """Which assistant turns of a conversation carry loss. The other turns never do."""


# --------------------------------------------------------------------------------------------------------- reward model
class RMConfig(Frozen):
    """A reward model from pairs: Bradley-Terry, arXiv:2203.02155 eq. 1. A new scalar head on model.path."""

    steps: Steps = 300
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Pairs an optimizer step, over all ranks."""
    loss: Literal["sigmoid", "log_exp"] = "sigmoid"
    """sigmoid: -log sigmoid(chosen - rejected - margin). log_exp: log(1 + exp(rejected - chosen + margin)), the same
    function in another form, computed without the sigmoid."""
    use_margin: bool = False
    """Take the margin from the row's column ``margin``: Llama 2, arXiv:2307.09288, eq. 2."""
    centering: Annotated[float, Field(ge=0)] = 0.0
    """Factor of (chosen + rejected)^2, which keeps scores around 0: arXiv:2312.09244; usual 0.01."""


class PRMConfig(Frozen):
    """A process reward model: binary cross-entropy at the last token of each step, arXiv:2305.20050."""

    steps: Steps = 300
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Rows an optimizer step, over all ranks."""
    separator: str = "\n"
    """Text that is put after each step."""


# ---------------------------------------------------------------------------------------------------------- preferences
class DPOLoss(Frozen):
    """-log sigmoid(beta h), h the difference of log ratios to the reference: DPO, arXiv:2305.18290, eq. 7."""

    kind: Literal["dpo"]
    """Which loss."""
    beta: Beta = 0.1
    """Strength of the tie to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of labels taken to be wrong: cDPO (Mitchell 2023, ericmitchell.ai/cdpo.pdf)."""


class IPOLoss(Frozen):
    """(h - 1 / (2 beta))^2: IPO, arXiv:2310.12036, eq. 17."""

    kind: Literal["ipo"]
    """Which loss."""
    beta: Beta = 0.1
    """Strength of the tie to the reference (tau in the paper)."""
    reduction: Literal["sum", "mean"] = "mean"
    """Log ratios of a response: sum over its tokens as in the paper, or mean, as the authors advise for long ones."""


class KTOLoss(Frozen):
    """Kahneman-Tversky utility of single labelled responses: KTO, arXiv:2402.01306, eq. 8."""

    kind: Literal["kto"]
    """Which loss."""
    beta: Beta = 0.1
    """Strength of the tie to the reference."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """lambda_D."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """lambda_U."""


class SimPOLoss(Frozen):
    """-log sigmoid(beta (mean log-prob difference) - margin), without a reference: SimPO, arXiv:2405.14734, eq. 6."""

    kind: Literal["simpo"]
    """Which loss."""
    beta: Beta = 2.0
    """Factor of the length-normalised log-probs."""
    margin: Annotated[float, Field(ge=0)] = 1.0
    """Target margin (gamma)."""


class ORPOLoss(Frozen):
    """NLL of the chosen response plus an odds-ratio term, without a reference: ORPO, arXiv:2403.07691, eq. 6 and 7."""

    kind: Literal["orpo"]
    """Which loss."""
    coef: Annotated[float, Field(gt=0)] = 0.1
    """Factor of the odds-ratio term (lambda)."""


PreferenceLoss = Annotated[DPOLoss | IPOLoss | KTOLoss | SimPOLoss | ORPOLoss, Field(discriminator="kind")]


class DPOConfig(Frozen):
    """Direct preference optimisation, from pairs (kto: from single labelled responses)."""

    steps: Steps = 300
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Pairs (kto: responses) an optimizer step, over all ranks."""
    loss: Annotated[PreferenceLoss, BeforeValidator(by_name)] = DPOLoss(kind="dpo")
    """Which loss."""


# --------------------------------------------------------------------------------------------------------- distillation
class KDConfig(Frozen):
    """A teacher's distribution at each token, over the whole vocabulary: arXiv:1503.02531; on-policy 2306.13649."""

    teacher: Path
    """Checkpoint directory of the teacher; its vocabulary must be the policy's."""
    steps: Steps = 300
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Rows (on_policy: sampled responses) an optimizer step, over all ranks."""
    data: Literal["off_policy", "on_policy"] = "off_policy"
    """off_policy: the rows' own answers. on_policy: answers that the policy samples to the rows' prompts."""
    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """KL(teacher, policy), usual on data; KL(policy, teacher), usual on own samples."""
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """k in (1 - k) cross-entropy + k divergence; 1 leaves the answers' own tokens out. Below 1 only off policy."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of both; the divergence is multiplied by its square."""


# --------------------------------------------------------------------------------------------------------------- sample
class SampleConfig(Frozen):
    """Batch inference: responses to prompts, scored or not, written as JSON lines."""

    num_samples: Annotated[int, Field(ge=1)] = 1
    """Responses a prompt (n)."""
    select: Literal["all", "best", "rejection", "pairs"] = "all"
    """all: every response. best: the one of highest score. rejection: those of at least min_score. pairs: highest and
    lowest as chosen and rejected, where they differ: data of a next round of DPO."""
    min_score: float = 0.5
    """rejection: least score that is kept."""
    output: Path | None = None
    """File for the rows; null is samples.jsonl in run.dir. Rows read by sft (best, rejection) or dpo (pairs) again."""
