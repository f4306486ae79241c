"""A method as a formula: the loss of an optimizer step and what stands in it, each line with the setting behind it.

i counts responses, t action tokens. pi is the policy, pi_old the one that the ratio is taken against.
"""

from collections.abc import Callable, Mapping
from typing import Any

from skirl.config.algorithms import GAE, MeanRange, Normalizer
from skirl.config.base import Frozen
from skirl.config.describe import plain
from skirl.config.method import MethodConfig
from skirl.config.rewards import RewardConfig
from skirl.config.schema import Config

__all__ = ["loss_formula", "method_record"]

Line = tuple[str, str]
"""(text, the setting it comes from)."""

_KL = {"k1": "d_it", "k2": "d_it^2 / 2", "k3": "exp(-d_it) - 1 + d_it"}
_BY_TOKEN = ("gae", "reinforce", "reinforce_pp")


def method_record(config: Config) -> str:
    """The whole method, every setting of it, and its loss as a formula; for the log of a run."""
    method = config.method
    lines = [f"method {method.preset}, as changed by the recipe:"]
    lines += [f"  {name} = {_value(value)}" for name, value in method if name != "preset"]
    if config.critic_in_use is not None:
        critic = config.critic_in_use
        lines.append(f"  critic: value_clip = {plain(critic.value_clip)}, warmup_steps = {critic.warmup_steps}")
    lines += ["loss of an optimizer step:", *(f"  {line}" for line, _ in loss_formula(config))]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if not isinstance(value, Frozen):
        return plain(value)
    inside = {name: entry for name, entry in value if name != "kind"}
    kind = str(dict(value).get("kind", ""))
    said = ", ".join(f"{name}: {_value(entry)}" for name, entry in inside.items())
    return f"{kind} {{{said}}}".strip() if said else kind


def loss_formula(config: Config) -> list[Line]:
    """The reinforcement-learning loss of an optimizer step, as (line, the setting it comes from)."""
    method = config.method
    lines = [
        (f"L    = sum over responses i, tokens t of  w_it {_terms(method)}", ""),
        (f"w_it = {_weights(method.normalizer)}", "method.normalizer"),
        *_policy_loss(method),
        *_ratio(method),
        *_kl(method),
    ]
    if method.entropy_coef:
        lines.append(("H_it = entropy of pi at token t", "method.entropy_coef"))
    lines += [*_correction(method), *_advantage(config), *_scores(config), *_groups(method), *_critic(config)]
    sampling = config.rollout.sampling
    cuts = [f"temperature {plain(sampling.temperature)}"]
    cuts += [f"top_p {plain(sampling.top_p)}"] if sampling.top_p < 1 else []
    cuts += [f"top_k {sampling.top_k}"] if sampling.top_k else []
    cuts += [f"min_p {plain(sampling.min_p)}"] if sampling.min_p else []
    lines.append((f"pi, pi_old, pi_ref: probabilities at {', '.join(cuts)}", "rollout.sampling"))
    return lines


def _terms(method: MethodConfig) -> str:
    terms = ["P_it" if method.correction is None else "c_it P_it"]
    if method.kl is not None and method.kl.where == "loss":
        terms.append(f"+ {_beta(method)} K_it")
    if method.entropy_coef:
        terms.append(f"- {plain(method.entropy_coef)} H_it")
    return terms[0] if len(terms) == 1 else f"({' '.join(terms)})"


def _beta(method: MethodConfig) -> str:
    assert method.kl is not None
    return plain(method.kl.coef) if method.kl.adaptive is None else "beta"


def _weights(normalizer: Normalizer) -> str:
    if normalizer.kind == "constant":
        return f"1 / (S {normalizer.length}),  S responses in the optimizer step"
    if normalizer.kind == "token":
        return "1 / (all action tokens of the optimizer step)"
    return "1 / (S T_i),  S responses in the optimizer step, T_i action tokens"


# ---------------------------------------------------------------------------------------------------------- policy loss
def _clip(low: float, high: float) -> str:
    return f"{1 - low:.6g}, {1 + high:.6g}"


def _ppo_clip(loss: Any, a: str) -> list[str]:
    lines = [f"P_it = -min(r_it {a}, clip(r_it, {_clip(loss.low, loss.high)}) {a})"]
    return lines if loss.dual is None else [*lines, f"       and where {a} < 0, at most -{plain(loss.dual)} {a}"]


def _gspo(loss: Any, a: str) -> list[str]:
    s = "s_it" if loss.token_level else "s_i"
    lines = [
        f"P_it = -min({s} {a}, clip({s}, {_clip(loss.low, loss.high)}) {a})",
        "s_i  = exp(mean over t of log r_it)",
    ]
    return [*lines, "s_it = sg(s_i) pi(y_it) / sg(pi(y_it))"] if loss.token_level else lines


def _cispo(loss: Any, a: str) -> list[str]:
    low = "0" if loss.low is None else f"{1 - loss.low:.6g}"
    return [f"P_it = -sg(clip(r_it, {low}, {1 + loss.high:.6g})) {a} log pi(y_it)"]


def _sapo(loss: Any, a: str) -> list[str]:
    positive, negative = plain(loss.tau_positive), plain(loss.tau_negative)
    return [
        f"P_it = -f(r_it) {a},  f(r) = 4 / tau sigmoid(tau (r - 1))",
        f"tau  = {positive} where {a} > 0, else {negative}",
    ]


def _gmpo(loss: Any, a: str) -> list[str]:
    clip = plain(loss.clip)
    return [
        f"P_it = -{a} exp(mean over t of l_it)",
        f"l_it = min(log r_it, {clip}) where {a} > 0, max(log r_it, -{clip}) where {a} < 0",
    ]


def _topr(loss: Any, a: str) -> list[str]:
    return [
        f"P_it = -{a} log pi(y_it) where {a} >= 0",
        f"       -sg(min(product over t of r_it, {plain(loss.cap)})) {a} log pi(y_it) where {a} < 0",
    ]


def _clip_cov(loss: Any, a: str) -> list[str]:
    return [
        f"P_it = -min(r_it {a}, clip(r_it, {_clip(loss.low, loss.high)}) {a})",
        f"       without gradient at a share of {plain(loss.share)} of the optimizer step's tokens, drawn where",
        f"       {plain(loss.cov_low)} < (log pi_old - mean) ({a} - mean) < {plain(loss.cov_high)}",
    ]


def _kl_cov(loss: Any, a: str) -> list[str]:
    return [
        f"P_it = -r_it {a}",
        f"       + {plain(loss.coef)} (r_it - 1 - log r_it) at a share of {plain(loss.share)} of the optimizer step's",
        f"       tokens, those with the largest (log pi_old - mean) ({a} - mean)",
    ]


def _dppo(loss: Any, a: str) -> list[str]:
    divergence = "|pi_old - pi|" if loss.divergence == "tv" else "KL(pi_old, pi) of this token against any other"
    return [
        f"P_it = -r_it {a}, without gradient where r_it moves on from 1 and",
        f"       {divergence} > {plain(loss.threshold)}",
    ]


_POLICY_LOSS: Mapping[str, Callable[[Any, str], list[str]]] = {
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


def _policy_loss(method: MethodConfig) -> list[Line]:
    loss = method.policy_loss
    lines = _POLICY_LOSS[loss.kind](loss, _symbol(method))
    paths = {"       and where": "method.policy_loss.dual"}
    return [(line, paths.get(line[:16], "method.policy_loss")) for line in lines]


def _symbol(method: MethodConfig) -> str:
    return "A_it" if method.advantage.kind in _BY_TOKEN else "A_i"


def _ratio(method: MethodConfig) -> list[Line]:
    lines: list[Line] = [("r_it = pi(y_it) / pi_old(y_it)", "")]
    if method.old_policy == "rollout":
        lines.append(("       pi_old: the engine's probabilities when it sampled", "method.old_policy"))
    return lines


def _kl(method: MethodConfig) -> list[Line]:
    kl = method.kl
    if kl is None:
        return []
    lines = [(f"K_it = {_KL[kl.estimator]},  d_it = log pi(y_it) - log pi_ref(y_it)", "method.kl.estimator")]
    if kl.adaptive is not None:
        target, horizon = plain(kl.adaptive.target), kl.adaptive.horizon
        lines += [
            (f"beta = {plain(kl.coef)} at first; after a step of n responses with KL k each, times", "method.kl.coef"),
            (f"       1 + clip(k / {target} - 1, -0.2, 0.2) n / {horizon}", "method.kl.adaptive"),
        ]
    return lines


def _correction(method: MethodConfig) -> list[Line]:
    how: Any = method.correction
    if how is None:
        return []
    texts = {
        "tis": lambda: "clip(v_it, {low}, {high})",
        "icepop": lambda: "v_it where {low} <= v_it <= {high}, else 0",
        "sequence_mask": lambda: "min(v_it, {cap}) where {low} <= exp(mean over t of log v_it) <= {high}, else 0",
        "sequence_is": lambda: "min(product over t of v_it, {cap})",
    }
    text = texts[how.kind]().format(**{name: plain(value) for name, value in how})
    return [(f"c_it = {text}", "method.correction"), ("v_it = pi_old(y_it) / engine(y_it)", "")]


# ----------------------------------------------------------------------------------------------------------- advantages
_BASELINES = {
    "reinforce_pp_baseline": "R_i - mean R",
    "leave_one_out": "R_i - mean of the siblings' R",
    "group_norm": "(R_i - mean R) / (std R + {eps})",
    "group_mean": "R_i - mean R",
    "max_rl": "(R_i - mean R) / mean R",
    "opo": "R_i - (sum over j of T_j R_j) / (sum over j of T_j)",
    "gdpo": "sum over parts k of the score of  v_k (R_ik - mean R_k) / (std R_k + {eps})",
}
_WHITE = "then (A - mean) / sqrt(var + 1e-08) over the action tokens of the batch"


def _advantage(config: Config) -> list[Line]:
    how: Any = config.method.advantage
    if how.kind in _BY_TOKEN:
        return _by_token(config, how)
    if how.kind == "pass_at_k":
        return _pass_at_k(config, how)
    values = {name: plain(value) for name, value in how if name != "weights"}
    over = f"over the G = {config.rollout.group_size} responses to a prompt"
    if how.kind in ("group_norm", "gdpo"):
        over += f", variance with 1/{'G' if how.ddof == 0 else '(G - 1)'}"
    lines = [
        (f"A_i  = {_BASELINES[how.kind].format(**values)}", "method.advantage"),
        (f"       {over}", "rollout.group_size"),
        (
            f"       exactly 0 where max R - min R <= {values['tolerance']} max(1, max |R|)",
            "method.advantage.tolerance",
        ),
    ]
    if how.kind == "gdpo":
        weights = ", ".join(f"{name}: {plain(weight)}" for name, weight in how.weights.items()) or "1 each"
        lines += [
            (f"v_k  = {weights}" + (", others 1" if how.weights else ""), "method.advantage.weights"),
            (f"       then (A_i - mean) / (std + {values['eps']}) over the responses of the batch", "method.advantage"),
        ]
    return [*lines, (f"       {_WHITE}", "method.advantage")] if how.kind == "reinforce_pp_baseline" else lines


def _by_token(config: Config, how: Any) -> list[Line]:
    kl = config.method.kl
    gamma = plain(how.gamma) if how.kind != "reinforce_pp" else "1"
    if isinstance(how, GAE):
        lines = [
            (f"A_it = e_it + {gamma} x {plain(how.lam)} A_i,t+1", "method.advantage"),
            (f"e_it = u_it + {gamma} V_i,t+1 - V_it,  V the critic's, 0 past the end", "method.advantage"),
        ]
    else:
        factor = "" if gamma in ("1", "1.0") else f"{gamma}^(k - t) "
        lines = [(f"A_it = sum over k >= t of {factor}u_ik", "method.advantage")]
    if how.kind == "reinforce_pp" or (isinstance(how, GAE) and how.whiten):
        lines.append((f"       {_WHITE}", "method.advantage"))
    penalty = f"-{_beta(config.method)} K_it at pi_old, " if kl is not None and kl.where == "reward" else ""
    path = "method.kl.where" if penalty else "reward"
    score = "R_i at the last token (a turn's value at the turn's last)"
    return [*lines, (f"u_it = {penalty}plus {score}" if penalty else f"u_it = {score}, else 0", path)]


def _pass_at_k(config: Config, how: Any) -> list[Line]:
    size, k = config.rollout.group_size, how.k
    return [
        ("A_i  = (1 - p) / s where right, else (1 - p - q) / s;  0 where s = 0", "method.advantage"),
        (f"       right: R_i >= {plain(how.threshold)}; c of G = {size} are right, k = {k}", "method.advantage"),
        ("p    = 1 - C(G - c, k) / C(G, k),  s = sqrt(p (1 - p)),  q = C(G - c - 1, k - 1) / C(G - 1, k - 1)", ""),
    ]


# --------------------------------------------------------------------------------------------------------------- scores
def _scores(config: Config) -> list[Line]:
    reward, method = config.reward, config.method
    parts = ["score_i (no section reward in this recipe)"] if reward is None else _parts(reward)
    shaping = _shaping(config)
    tail: list[str] = []
    if method.kl is not None and method.kl.where == "reward" and method.advantage.kind not in _BY_TOKEN:
        tail = [f"- {_beta(method)} (sum over t of K_it at pi_old)"]
    path = "reward, method.kl.where" if tail else "reward"
    if not shaping:
        return [(f"R_i  = {' '.join([*parts, *tail])}".replace("+ -", "- "), path)]
    lines: list[Line] = [(f"R_i  = {' '.join(['S_i, shaped', *tail])}", path)]
    lines += [(f"       {text}", setting) for text, setting in shaping]
    return [*lines, (f"S_i  = {' '.join(parts)}".replace("+ -", "- "), "reward")]


def _shaping(config: Config) -> list[Line]:
    shaping, budget = config.method.shaping, config.rollout.sampling.max_new_tokens
    lines: list[Line] = []
    if shaping.clip_range is not None:
        low, high = map(plain, shaping.clip_range)
        lines.append((f"clipped to [{low}, {high}]", "method.shaping.clip_range"))
    if shaping.truncation is not None:
        value, factor = shaping.truncation.score, shaping.truncation.factor
        said = f"times {plain(factor)}" if value is None else f"{plain(value)} instead"
        lines.append((f"{said} where the budget cut the response off", "method.shaping.truncation"))
    if shaping.overlong is not None:
        buffer, size = round(shaping.overlong.buffer_share * budget), plain(shaping.overlong.penalty)
        text = f"- {size} clip((T_i - {budget - buffer}) / {buffer}, 0, 1)"
        lines.append((text, "method.shaping.overlong"))
    if shaping.length is not None:
        coef, right = plain(shaping.length.coef), plain(shaping.length.threshold)
        text = f"+ {coef} (0.5 - (T_i - min T) / (max T - min T)), at most 0 where S_i < {right}"
        lines.append((text, "method.shaping.length"))
    return lines


def _parts(reward: RewardConfig) -> list[str]:
    parts: list[str] = []
    if reward.python is not None:
        parts.append(f"{reward.python.name}:{reward.function}")
        if reward.weights:
            factors = ", ".join(f"{name} x {plain(weight)}" for name, weight in reward.weights.items())
            parts[-1] += f" ({factors}, other parts x 1)"
    if reward.combine == "sum":
        for named in (reward.terms, reward.services, reward.models):
            parts += [f"{plain(source.weight)} {name}" for name, source in named.items()]
    return [part if index == 0 else f"+ {part}" for index, part in enumerate(parts)]


def _groups(method: MethodConfig) -> list[Line]:
    dynamic = method.dynamic_sampling
    if dynamic is None:
        return []
    keep = dynamic.keep
    if isinstance(keep, MeanRange):
        rule = f"{plain(keep.low)} < mean score < {plain(keep.high)}"
    else:
        rule = f"standard deviation of the scores > {plain(keep.min_std)}"
    return [
        (f"groups are kept where {rule} (raw), others replaced,", "method.dynamic_sampling.keep"),
        (f"       in up to {dynamic.max_rounds} rounds a step", "method.dynamic_sampling.max_rounds"),
    ]


def _critic(config: Config) -> list[Line]:
    critic = config.critic_in_use
    if critic is None:
        return []
    lines = [("critic: sum over i, t of w_it 0.5 (V_it - G_it)^2", "critic")]
    if critic.value_clip is not None:
        c = plain(critic.value_clip)
        lines = [
            ("critic: sum over i, t of w_it 0.5 max((V_it - G_it)^2, (Vc_it - G_it)^2)", "critic"),
            (f"Vc_it = V_old + clip(V_it - V_old, -{c}, {c})", "critic.value_clip"),
        ]
    lines.append(("G_it = A_it + V_it when the batch was made, not whitened", ""))
    if critic.warmup_steps:
        lines.append(
            (f"       the critic is trained alone in the first {critic.warmup_steps} steps", "critic.warmup_steps")
        )
    return lines
