"""Losses of reward models and of preference learning, per pair, response or step: with gradient, no reduction."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

__all__ = ["bradley_terry", "dpo", "ipo", "kto", "log_exp", "orpo", "simpo", "step_entropy"]


# -------------------------------------------------------------------------------------------------------- reward models
def bradley_terry(
    chosen: Float[Tensor, "P"], rejected: Float[Tensor, "P"], margins: Float[Tensor, "P"]
) -> Float[Tensor, "P"]:
    """-log sigmoid(chosen - rejected - margin).

    Args:
        chosen, rejected: scores of the two responses of each pair.
        margins: by how much the first should win; 0 without margins.

    Source: Ouyang et al., arXiv:2203.02155, eq. 1; margin Touvron et al., arXiv:2307.09288, eq. 2.
        Oracle: tests/oracles/preferences.py
    """
    return -logsigmoid(chosen - rejected - margins)


def log_exp(
    chosen: Float[Tensor, "P"], rejected: Float[Tensor, "P"], margins: Float[Tensor, "P"]
) -> Float[Tensor, "P"]:
    """log(1 + exp(rejected - chosen + margin)): ``bradley_terry`` in its other form, for scores of any size.

    Source: Bai et al., arXiv:2204.05862, section 4.1. Oracle: tests/oracles/preferences.py
    """
    return softplus(rejected - chosen + margins)


def step_entropy(logits: Float[Tensor, "A"], labels: Float[Tensor, "A"]) -> Float[Tensor, "A"]:
    """Binary cross-entropy of a process reward model at the last token of each step, on logits.

    -y log sigmoid(x) - (1 - y) log sigmoid(-x)

    Args:
        logits: x, the model's score of each step.
        labels: y, chance in [0, 1] that the step is right.

    Source: Lightman et al., arXiv:2305.20050; soft labels Wang et al., arXiv:2312.08935, eq. 3.
        Oracle: tests/oracles/preferences.py
    """
    return binary_cross_entropy_with_logits(logits, labels, reduction="none")


# ---------------------------------------------------------------------------------------------------------- preferences
def dpo(
    chosen_log_ratios: Float[Tensor, "P"],
    rejected_log_ratios: Float[Tensor, "P"],
    *,
    beta: float,
    label_smoothing: float,
) -> Float[Tensor, "P"]:
    """-(1 - s) log sigmoid(h) - s log sigmoid(-h),  h = beta (chosen - rejected).

    Args:
        chosen_log_ratios, rejected_log_ratios: sum over a response's action tokens of log pi - log pi_ref.
        beta: strength of the tie to the reference.
        label_smoothing: s, share of labels taken to be wrong (cDPO); 0 is DPO.

    Source: Rafailov et al., arXiv:2305.18290, eq. 7; cDPO Mitchell 2023, ericmitchell.ai/cdpo.pdf, eq. 3.
        Oracle: tests/oracles/preferences.py
    """
    h = beta * (chosen_log_ratios - rejected_log_ratios)
    if label_smoothing == 0:
        return -logsigmoid(h)  # 0 * log sigmoid(-h) would be NaN where h is infinite
    return -(1.0 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def ipo(
    chosen_log_ratios: Float[Tensor, "P"], rejected_log_ratios: Float[Tensor, "P"], *, beta: float
) -> Float[Tensor, "P"]:
    """(chosen - rejected - 1 / (2 beta))^2.

    Args:
        chosen_log_ratios, rejected_log_ratios: of log pi - log pi_ref, the sum or the mean over a response's action
            tokens.
        beta: strength of the tie to the reference (tau in the paper).

    Source: Azar et al., arXiv:2310.12036, eq. 17. Oracle: tests/oracles/preferences.py
    """
    return (chosen_log_ratios - rejected_log_ratios - 1.0 / (2.0 * beta)).square()


def kto(
    log_ratios: Float[Tensor, "S"],
    desirable: Bool[Tensor, "S"],
    baselines: Float[Tensor, "S"],
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Float[Tensor, "S"]:
    """Utility lost by each labelled response against a baseline.

    desirable: lambda_D (1 - sigmoid(beta (r - z))),   undesirable: lambda_U (1 - sigmoid(beta (z - r)))

    Args:
        log_ratios: r, sum over a response's action tokens of log pi - log pi_ref.
        desirable: label of each response.
        baselines: z, estimate of KL(policy, reference) of the step, not below 0 (from mismatched pairs, clamped by the
            caller); no gradient passes.
        beta: strength of the tie to the reference.
        desirable_weight, undesirable_weight: lambda_D, lambda_U.

    Source: Ethayarajh et al., arXiv:2402.01306, eq. 8; lambda_y - v is the loss. Oracle: tests/oracles/preferences.py
    """
    gain = beta * (log_ratios - baselines.detach())
    wanted = desirable_weight * torch.sigmoid(-gain)  # 1 - sigmoid(x) = sigmoid(-x), without cancellation
    unwanted = undesirable_weight * torch.sigmoid(gain)
    return torch.where(desirable, wanted, unwanted)


def simpo(
    chosen_means: Float[Tensor, "P"], rejected_means: Float[Tensor, "P"], *, beta: float, margin: float
) -> Float[Tensor, "P"]:
    """-log sigmoid(beta (chosen - rejected) - margin), without a reference.

    Args:
        chosen_means, rejected_means: mean over a response's action tokens of log pi.
        beta: factor of the difference.
        margin: target margin (gamma).

    Source: Meng et al., arXiv:2405.14734, eq. 6. Oracle: tests/oracles/preferences.py
    """
    return -logsigmoid(beta * (chosen_means - rejected_means) - margin)


def orpo(chosen_means: Float[Tensor, "P"], rejected_means: Float[Tensor, "P"]) -> Float[Tensor, "P"]:
    """The odds-ratio term: -log sigmoid(log(odds(chosen) / odds(rejected))),  odds(p) = p / (1 - p).

    Args: chosen_means, rejected_means: mean over a response's action tokens of log pi, so p is a geometric mean. At
        p = 1 the odds have no bound: log p is held at the largest float below 0, without gradient.

    Returns: without the factor lambda, and without the NLL of the chosen response.
    Source: Hong et al., arXiv:2403.07691, eq. 4 and 7. Oracle: tests/oracles/preferences.py
    """
    return -logsigmoid(_log_odds(chosen_means) - _log_odds(rejected_means))


def _log_odds(log_p: Tensor) -> Tensor:
    below_one = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    return below_one - torch.log(-torch.expm1(below_one))  # log(1 - p): 1 - exp(x) cancels near x = 0
