"""Loss of a whole optimizer step from the papers' objectives: sums over responses and tokens, in float64.

A response brings its tokens as ``autodiff`` numbers. What it is divided by is written here from the objectives' own
definitions: token 1/sum T, sequence 1/S 1/T_i, constant 1/(S L), S the responses that have a token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.oracles import corrections, kl, losses, preferences, sequence_losses, values
from tests.oracles.autodiff import Number, mean, stop, total
from tests.oracles.planning import weights


@dataclass
class Response:
    """One sequence of an optimizer step.

    Attributes:
        first, second: the model's outputs: log-probs and entropies, values and zeros, log-probs and divergences.
        auxiliary: the model's own loss of the sequence.
        old, rollout, reference: log-probs; None where the method has none. The rest: as in a training sequence.
    """

    first: list[Number]
    second: list[Number]
    auxiliary: Number | None = None
    old: list[float] | None = None
    rollout: list[float] | None = None
    reference: list[float] | None = None
    advantages: list[float] = field(default_factory=list)
    selected: list[bool] | None = None
    values: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    chosen: bool = True
    margin: float = 0.0
    baseline: float = 0.0

    @property
    def size(self) -> int:
        return len(self.first)

    def old_logprobs(self) -> list[float]:
        return [stop(x) for x in self.first] if self.old is None else self.old

    def log_ratio(self) -> list[Number]:
        return [x - o for x, o in zip(self.first, self.old_logprobs(), strict=True)]


# ------------------------------------------------------------------------------------------------------- policy losses
def _of_tokens(formula: Callable[..., Number], response: Response, *more: Any) -> list[Number]:
    found = []
    for x, a, o, token in zip(
        response.log_ratio(), response.advantages, response.old_logprobs(), range(response.size), strict=True
    ):
        found.append(formula(x, a, o, token, *more))
    return found


def _ppo_clip(how: Any, r: Response) -> list[Number]:
    return _of_tokens(lambda x, a, o, t: losses.ppo_clip_formula(x, a, how.low, how.high, how.dual), r)


def _gspo(how: Any, r: Response) -> list[Number]:
    form = sequence_losses.gspo_token if how.token_level else sequence_losses.gspo
    return form(r.log_ratio(), r.advantages, how.low, how.high)


def _cispo(how: Any, r: Response) -> list[Number]:
    return _of_tokens(lambda x, a, o, t: losses.cispo(r.first[t], x, a, how.low, how.high), r)


def _sapo(how: Any, r: Response) -> list[Number]:
    return _of_tokens(lambda x, a, o, t: losses.sapo(x, a, how.tau_positive, how.tau_negative), r)


def _gmpo(how: Any, r: Response) -> list[Number]:
    return sequence_losses.gmpo(r.log_ratio(), r.advantages, how.clip)


def _topr(how: Any, r: Response) -> list[Number]:
    return sequence_losses.topr(r.first, r.log_ratio(), r.advantages, how.cap)


def _clip_cov(how: Any, r: Response) -> list[Number]:
    assert r.selected is not None
    picked = r.selected
    return _of_tokens(lambda x, a, o, t: losses.clip_cov(x, a, picked[t], how.low, how.high), r)


def _kl_cov(how: Any, r: Response) -> list[Number]:
    assert r.selected is not None
    picked = r.selected
    return _of_tokens(lambda x, a, o, t: losses.kl_cov(x, a, picked[t], how.coef), r)


def _dppo(how: Any, r: Response) -> list[Number]:
    return _of_tokens(lambda x, a, o, t: losses.dppo(x, o, a, how.divergence, how.threshold), r)


POLICY: Mapping[str, Callable[[Any, Response], list[Number]]] = {
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "topr": _topr,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "dppo": _dppo,
}


def factors(how: Any, response: Response) -> list[float]:
    """Of each token's policy loss: the correction of w = pi_old(trainer) / pi(engine)."""
    if how is None:
        return [1.0] * response.size
    assert response.rollout is not None
    gap = [a - b for a, b in zip(response.old_logprobs(), response.rollout, strict=True)]
    settings = {name: value for name, value in how.model_dump().items() if name != "kind"}
    return getattr(corrections, how.kind)(gap, **settings)[0]  # getattr: a table of functions


# ---------------------------------------------------------------------------------------------------------- whole steps
def by_token(
    step: Sequence[Response], losses_of: Callable[[Response], list[Number]], normalizer: str, length: int | None
) -> Number:
    """sum over responses and tokens of weight times loss, and the mean of the responses' auxiliary losses."""
    terms: list[Number] = []
    shares = weights([r.size for r in step], normalizer, length)
    filled = sum(r.size > 0 for r in step)
    for response, share in zip(step, shares, strict=True):
        terms += [loss * float(share) for loss in losses_of(response)]
        if response.auxiliary is not None and response.size:
            terms.append(response.auxiliary / filled)
    return total(terms)


def policy(method: Any, kl_coef: float) -> Callable[[Response], list[Number]]:
    """Token losses: correction * policy loss + kl_coef * k(log pi, log pi_ref) - entropy_coef * H.

    Args: method: has policy_loss, correction, kl_estimator, entropy_coef.
    """

    def token_losses(response: Response) -> list[Number]:
        found: list[Number] = []
        by_loss = POLICY[method.policy_loss.kind](method.policy_loss, response)
        for t, (factor, loss) in enumerate(zip(factors(method.correction, response), by_loss, strict=True)):
            term = loss * factor
            if kl_coef:
                assert response.reference is not None
                term = term + penalty(method.kl_estimator, response.first[t], response.reference[t]) * kl_coef
            found.append(term - response.second[t] * method.entropy_coef)
        return found

    return token_losses


def penalty(estimator: str, policy_logprob: Number, reference: float) -> Number:
    """The KL estimator with the derivative that is worked out by hand in ``kl``."""
    value, slope = kl.ESTIMATORS[estimator](policy_logprob.value, reference)
    return Number(value, ((policy_logprob, slope),))


def critic(bound: float | None) -> Callable[[Response], list[Number]]:
    """Half squared errors of values, held near the old ones."""

    def token_losses(r: Response) -> list[Number]:
        return [values.value_loss(v, o, t, bound) for v, o, t in zip(r.first, r.values, r.returns, strict=True)]

    return token_losses


def step_rewards(response: Response) -> list[Number]:
    """Binary cross-entropies."""
    return [preferences.step_entropy(z, label) for z, label in zip(response.first, response.labels, strict=True)]


def distilled(share: float) -> Callable[[Response], list[Number]]:
    """(1 - k) * -log pi + k * divergence."""

    def token_losses(r: Response) -> list[Number]:
        return [-(x * (1 - share)) + d * share for x, d in zip(r.first, r.second, strict=True)]

    return token_losses


def pairs(step: Sequence[Response], loss_of: Callable[[Response, Response], Number]) -> Number:
    """Mean over pairs; of each the chosen response comes first."""
    return mean([loss_of(chosen, rejected) for chosen, rejected in zip(step[0::2], step[1::2], strict=True)])


def reward_model(how: Any) -> Callable[[Response, Response], Number]:
    """-log sigmoid(c - r - margin) + centering (c + r)^2 of the two scores."""

    def loss(chosen: Response, rejected: Response) -> Number:
        (c,), (r,) = chosen.first, rejected.first
        return preferences.bradley_terry(c, r, chosen.margin) + (c + r) * (c + r) * how.centering

    return loss


def pair_preference(how: Any) -> Callable[[Response, Response], Number]:
    """DPO, IPO, SimPO, ORPO of two responses."""

    def log_ratio(r: Response) -> Number:
        assert r.reference is not None
        return total([x - y for x, y in zip(r.first, r.reference, strict=True)])

    def loss(chosen: Response, rejected: Response) -> Number:
        if how.kind == "dpo":
            return preferences.dpo(log_ratio(chosen), log_ratio(rejected), how.beta, how.label_smoothing)
        if how.kind == "ipo":
            sizes = [r.size if how.reduction == "mean" else 1 for r in (chosen, rejected)]
            return preferences.ipo(log_ratio(chosen) / sizes[0], log_ratio(rejected) / sizes[1], how.beta)
        means = mean(chosen.first), mean(rejected.first)
        if how.kind == "simpo":
            return preferences.simpo(*means, how.beta, how.margin)
        return preferences.orpo(*means) * how.coef - means[0]

    return loss


def labelled(how: Any, step: Sequence[Response]) -> Number:
    """KTO: mean over responses."""
    found = []
    for r in step:
        assert r.reference is not None
        log_ratio = total([x - y for x, y in zip(r.first, r.reference, strict=True)])
        weights_of = (how.desirable_weight, how.undesirable_weight)
        found.append(preferences.kto(log_ratio, r.chosen, r.baseline, how.beta, weights_of))
    return mean(found)
