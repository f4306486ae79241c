"""Every policy and value loss against its oracle: values, gradients and cut tokens, over random responses.

float32 is held to 1e-6 of the gradient's norm where it can be: ratios within exp(+-1.5) for losses of whole responses
(exp of a sum of size x is good to x eps), and within exp(+-19) for losses of tokens, one token of each case near 1.
float64 is held to 1e-11 everywhere, tokens beyond the bound of exp(+-20) included for losses of tokens. A whole
trajectory's ratio (topr) stays within exp(+-20), where it is bounded too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skirl.algorithms import losses, values
from tests.oracles import losses as token_oracle
from tests.oracles import sequence_losses as sequence_oracle
from tests.oracles import values as value_oracle
from tests.oracles.autodiff import Number, gradient, numbers, total, watch
from tests.oracles.tally import Tally

CASES = 60
"""Of each loss and dtype; raise it for a longer search."""
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-11}
KINK = 1e-5
"""A case with a decision nearer than this to its border is left out: float32 may decide otherwise."""

Settings = dict[str, Any]


@dataclass
class Responses:
    """Random responses, as lists of numbers that float32 holds exactly."""

    logprobs: list[float]
    log_ratio: list[float]
    old_logprobs: list[float]
    advantages: list[float]
    segments: list[int]
    num_segments: int
    selected: list[bool]
    upstream: list[float]

    def members(self) -> list[list[int]]:
        return [[a for a, s in enumerate(self.segments) if s == i] for i in range(self.num_segments)]


def float32(value: float) -> float:
    return float(np.float32(value))


def made(random: np.random.Generator, *, far: float, constant: bool) -> Responses:
    """1 to 4 responses of 0 to 7 tokens. ``far``: log ratios reach this; ``constant``: one advantage a response."""
    lengths = [int(n) for n in random.integers(0, 8, size=random.integers(1, 5))]
    lengths[-1] = max(lengths[-1], 1)
    segments = [i for i, n in enumerate(lengths) for _ in range(n)]
    spread = random.choice([0.1, 0.4])
    ratios = [float32(np.clip(spread * random.standard_normal(), -1.5, 1.5)) for _ in segments]
    for a in range(1, len(ratios)):  # the first stays near 1
        if far and random.random() < 0.4:
            ratios[a] = float32(random.uniform(-far, far))
    by_response = [_advantage(random) for _ in lengths]
    advantages = [by_response[s] if constant else _advantage(random) for s in segments]
    old = [float32(random.uniform(-5, -0.3)) for _ in segments]
    ratios = [-x if o + x > -0.05 else x for o, x in zip(old, ratios, strict=True)]  # the policy's p is below 1
    return Responses(
        logprobs=[float32(o + x) for o, x in zip(old, ratios, strict=True)],
        log_ratio=ratios,
        old_logprobs=old,
        advantages=advantages,
        segments=segments,
        num_segments=len(lengths),
        selected=[bool(random.random() < 0.3) for _ in segments],
        upstream=[float32(random.uniform(0.2, 2) * random.choice([-1, 1])) for _ in segments],
    )


def _advantage(random: np.random.Generator) -> float:
    kind = random.random()
    if kind < 0.1:
        return 0.0
    return float32(random.choice([-1.0, 1.0])) if kind < 0.3 else float32(1.5 * random.standard_normal())


@dataclass
class Tensors:
    """What the functions see."""

    logprobs: Tensor
    log_ratio: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    selected: Tensor
    segments: tuple[Tensor, int]


def tensors(case: Responses, dtype: torch.dtype) -> Tensors:
    def tensor(numbers: Sequence[float], grad: bool = False) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, requires_grad=grad)

    return Tensors(
        tensor(case.logprobs, True),
        tensor(case.log_ratio, True),
        tensor(case.old_logprobs),
        tensor(case.advantages),
        torch.tensor(case.selected),
        (torch.tensor(case.segments), case.num_segments),
    )


# ------------------------------------------------------------------------------------------------- the functions' calls
CODE: dict[str, Callable[[Tensors, Settings], Tensor]] = {
    "ppo_clip": lambda t, how: losses.ppo_clip(t.log_ratio, t.advantages, **how),
    "gspo": lambda t, how: losses.gspo(t.log_ratio, t.advantages, *t.segments, **how, token_level=False),
    "gspo_token": lambda t, how: losses.gspo(t.log_ratio, t.advantages, *t.segments, **how, token_level=True),
    "cispo": lambda t, how: losses.cispo(t.logprobs, t.log_ratio, t.advantages, **how),
    "sapo": lambda t, how: losses.sapo(t.log_ratio, t.advantages, **how),
    "gmpo": lambda t, how: losses.gmpo(t.log_ratio, t.advantages, *t.segments, **how),
    "topr": lambda t, how: losses.topr(t.logprobs, t.log_ratio, t.advantages, *t.segments, **how),
    "clip_cov": lambda t, how: losses.clip_cov(t.log_ratio, t.advantages, t.selected, **how),
    "kl_cov": lambda t, how: losses.kl_cov(t.log_ratio, t.advantages, t.selected, **how),
    "dppo": lambda t, how: losses.dppo(t.log_ratio, t.old_logprobs, t.advantages, **how),
}
CUTS: dict[str, Callable[[Tensors, Settings], Tensor]] = {
    "ppo_clip": lambda t, how: losses.ppo_clip_mask(t.log_ratio, t.advantages, low=how["low"], high=how["high"]),
    "gspo": lambda t, how: losses.gspo_cut(t.log_ratio, t.advantages, *t.segments, **how, token_level=False),
    "gspo_token": lambda t, how: losses.gspo_cut(t.log_ratio, t.advantages, *t.segments, **how, token_level=True),
    "cispo": lambda t, how: losses.cispo_cut(t.logprobs, t.log_ratio, t.advantages, **how),
    "gmpo": lambda t, how: losses.gmpo_cut(t.log_ratio, t.advantages, *t.segments, **how),
    "dppo": lambda t, how: losses.dppo_cut(t.log_ratio, t.old_logprobs, t.advantages, **how),
}
SETTINGS: dict[str, list[Settings]] = {
    "ppo_clip": [{"low": 0.2, "high": 0.28, "dual": d} for d in (None, 1.5, 3.0)]
    + [{"low": 0.9, "high": 3.5, "dual": 6.0}],
    "gspo": [{"low": 0.05, "high": 0.08}, {"low": 3e-4, "high": 4e-4}, {"low": 0.6, "high": 1.0}],
    "gspo_token": [{"low": 0.05, "high": 0.08}, {"low": 3e-4, "high": 4e-4}, {"low": 0.6, "high": 1.0}],
    "cispo": [{"low": None, "high": 0.3}, {"low": 0.2, "high": 0.28}, {"low": None, "high": 4.0}],
    "sapo": [{"tau_positive": 1.0, "tau_negative": 1.05}, {"tau_positive": 3.0, "tau_negative": 0.5}],
    "gmpo": [{"clip": 0.4}, {"clip": 0.1}],
    "topr": [{"cap": 1.0}, {"cap": 2.0}, {"cap": 0.5}],
    "clip_cov": [{"low": 0.2, "high": 0.28}, {"low": 1.0, "high": 1.0}],
    "kl_cov": [{"coef": 1.0}, {"coef": 0.2}],
    "dppo": [{"divergence": d, "threshold": t} for d in ("tv", "kl") for t in (0.02, 0.15)],
}
WHOLE = ("gspo", "gspo_token", "gmpo", "topr")
"""Their ratio is of a response."""
CONSTANT = ("gspo", "gmpo", "topr")
"""Their advantage is of a response."""


# --------------------------------------------------------------------------------------------------------- the oracles'
def by_token(formula: Callable[..., Number], case: Responses, log_ratio: list[Number], *more: Any) -> list[Number]:
    return [formula(x, *rest) for x, *rest in zip(log_ratio, *more, strict=True)]


def oracle(name: str, case: Responses, how: Settings, logprobs: list[Number], log_ratio: list[Number]) -> list[Number]:
    """Loss of each token."""
    constants = {key: [value] * len(log_ratio) for key, value in how.items()}
    if name == "cispo":
        return by_token(token_oracle.cispo, case, logprobs, log_ratio, case.advantages, *constants.values())
    if name in ("ppo_clip", "sapo"):
        formula = {"ppo_clip": token_oracle.ppo_clip_formula, "sapo": token_oracle.sapo}[name]
        return by_token(formula, case, log_ratio, case.advantages, *constants.values())
    if name in ("clip_cov", "kl_cov"):
        formula = {"clip_cov": token_oracle.clip_cov, "kl_cov": token_oracle.kl_cov}[name]
        return by_token(formula, case, log_ratio, case.advantages, case.selected, *constants.values())
    if name == "dppo":
        return by_token(token_oracle.dppo, case, log_ratio, case.old_logprobs, case.advantages, *constants.values())
    found: list[Number] = []
    for members in case.members():
        ratios, advantages = [log_ratio[a] for a in members], [case.advantages[a] for a in members]
        if name == "topr":
            found += sequence_oracle.topr([logprobs[a] for a in members], ratios, advantages, *how.values())
        else:
            formula = {
                "gspo": sequence_oracle.gspo,
                "gspo_token": sequence_oracle.gspo_token,
                "gmpo": sequence_oracle.gmpo,
            }[name]
            found += formula(ratios, advantages, *how.values())
    return found


def cut_tokens(name: str, case: Responses, how: Settings) -> list[bool]:
    tokens = list(zip(case.log_ratio, case.advantages, case.old_logprobs, strict=True))
    if name == "ppo_clip":
        return [token_oracle.is_clipped(x, a, how["low"], how["high"]) for x, a, _ in tokens]
    if name == "cispo":
        return [token_oracle.cispo_is_cut(x, **how) for x, _, _ in tokens]
    if name == "gmpo":
        return [sequence_oracle.gmpo_is_cut(x, a, how["clip"]) for x, a, _ in tokens]
    if name == "dppo":
        return [token_oracle.dppo_is_cut(x, o, a, **how) for x, a, o in tokens]
    responses = [[case.log_ratio[a] for a in members] for members in case.members()]
    return [
        sequence_oracle.gspo_is_cut(responses[s], a, **how) for s, a in zip(case.segments, case.advantages, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "float64"])
@pytest.mark.parametrize("name", CODE)
def test_values_gradients_and_cut_tokens(name, dtype, record_property):
    found = Tally(f"{name}/{dtype}")
    for seed in range(CASES):
        random = np.random.default_rng((list(CODE).index(name), seed))
        reach = 0.0 if seed % 2 else far_of(name, dtype)
        case = made(random, far=reach, constant=name in CONSTANT)
        how = SETTINGS[name][seed % len(SETTINGS[name])]
        compare(found, name, case, how, dtype)
    found.finish(record_property, BOUNDS[dtype], at_least=CASES * 9 // 10)


def far_of(name: str, dtype: torch.dtype) -> float:
    if name == "topr":
        return 1.5 if dtype == torch.float32 else 2.8
    if name in WHOLE:
        return 1.5 if dtype == torch.float32 else 19.0
    return 19.0 if dtype == torch.float32 else 30.0


def compare(found: Tally, name: str, case: Responses, how: Settings, dtype: torch.dtype) -> None:
    logprobs, log_ratio = numbers(case.logprobs), numbers(case.log_ratio)
    with watch() as distances:
        expected = oracle(name, case, how, logprobs, log_ratio)
        cut = cut_tokens(name, case, how) if name in CUTS else None
    if min(distances, default=1.0) < KINK:
        found.skipped += 1
        return
    found.cases += 1
    inputs = tensors(case, dtype)
    got = CODE[name](inputs, how)
    assert got.dtype == dtype
    slopes = torch.autograd.grad(
        (got * torch.tensor(case.upstream, dtype=dtype)).sum(), (inputs.logprobs, inputs.log_ratio), allow_unused=True
    )
    whole = total(loss * up for loss, up in zip(expected, case.upstream, strict=True))
    what = f"{name} {how} {case}"
    found.add(got.tolist(), [loss.value for loss in expected], f"values of {what}")
    by_oracle = gradient(whole, [*logprobs, *log_ratio])
    by_code = [x for slope in slopes for x in ([0.0] * len(case.segments) if slope is None else slope.tolist())]
    found.add(by_code, by_oracle, f"gradient of {what}", floor=cancelling(name, case, log_ratio))
    if cut is not None:
        assert CUTS[name](inputs, how).tolist() == cut, what


def cancelling(name: str, case: Responses, log_ratio: list[Number]) -> float:
    """Norm of kl-cov's first term, which its second may take away; other gradients have one term."""
    if name != "kl_cov":
        return 0.0
    terms = [up * math.exp(x.value) * a for up, x, a in zip(case.upstream, log_ratio, case.advantages, strict=True)]
    return math.hypot(*terms) if max(case.log_ratio) < 2 else 0.0


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "cispo"])
def test_gradients_worked_out_by_hand(name, dtype, record_property):
    """Of the sum of the token losses."""
    found = Tally(f"{name} by hand/{dtype}")
    for seed in range(CASES):
        random = np.random.default_rng((100 + list(CODE).index(name), seed))
        reach = 0.0 if seed % 2 else far_of(name, dtype)
        case = made(random, far=min(reach, 19.0), constant=name in CONSTANT)
        how = SETTINGS[name][seed % len(SETTINGS[name])]
        with watch() as distances:
            oracle(name, case, how, numbers(case.logprobs), numbers(case.log_ratio))
        if min(distances, default=1.0) < KINK:
            found.skipped += 1
            continue
        expected: list[tuple[float, float]] = []
        for members in case.members():
            tokens = [(case.logprobs[a], case.log_ratio[a], case.advantages[a]) for a in members]
            if name == "cispo":
                expected += [token_oracle.cispo_by_hand(*token, **how) for token in tokens]
            elif name == "ppo_clip":
                expected += [token_oracle.ppo_clip(*token[1:], **how) for token in tokens]
            else:
                lists = [t[1] for t in tokens], [t[2] for t in tokens]
                expected += sequence_oracle.gspo_by_hand(*lists, **how, token_level=name == "gspo_token")
        inputs = tensors(case, dtype)
        got = CODE[name](inputs, how)
        (slope,) = torch.autograd.grad(got.sum(), inputs.logprobs if name == "cispo" else inputs.log_ratio)
        found.cases += 1
        found.add(got.tolist(), [value for value, _ in expected], f"values of {how} {case}")
        found.add(slope.tolist(), [slope for _, slope in expected], f"gradient of {how} {case}")
    found.finish(record_property, BOUNDS[dtype], at_least=CASES * 9 // 10)


@pytest.mark.parametrize("name", CODE)
def test_a_response_of_nan_stays_alone(name):
    """A token without weight may hold NaN: in the same response for losses of tokens, in another for the rest."""
    for seed in range(10):
        random = np.random.default_rng((200, seed))
        case = made(random, far=0.0, constant=name in CONSTANT)
        how = SETTINGS[name][seed % len(SETTINGS[name])]
        hit = case.segments[int(random.integers(len(case.segments)))]
        used = (
            [s != hit for s in case.segments] if name in WHOLE else [bool(random.random() < 0.5) for _ in case.segments]
        )
        results = []
        for filler in (None, math.nan):
            inputs = tensors(case, torch.float32)
            if filler is not None:
                with torch.no_grad():
                    for tensor in (inputs.logprobs, inputs.log_ratio, inputs.old_logprobs, inputs.advantages):
                        tensor[~torch.tensor(used)] = filler
            got = CODE[name](inputs, how)
            picked = torch.where(torch.tensor(used), got, 0.0)
            slopes = torch.autograd.grad(picked.sum(), (inputs.logprobs, inputs.log_ratio), allow_unused=True)
            results.append([picked.tolist(), *(s[torch.tensor(used)].tolist() for s in slopes if s is not None)])
        assert results[0] == results[1]


def test_sums_and_means_over_responses(record_property):
    found = Tally("segments")
    for seed in range(CASES):
        random = np.random.default_rng((300, seed))
        case = made(random, far=3.0, constant=True)
        upstream = [float32(x) for x in random.standard_normal(case.num_segments)]
        for reduce, is_mean in ((losses.segment_sum, False), (losses.segment_mean, True)):
            given = torch.tensor(case.log_ratio, requires_grad=True)
            got = reduce(given, torch.tensor(case.segments), case.num_segments)
            (slope,) = torch.autograd.grad((got * torch.tensor(upstream)).sum(), given)
            sums = [math.fsum(case.log_ratio[a] for a in members) for members in case.members()]
            sizes = [max(1, len(members)) if is_mean else 1 for members in case.members()]
            found.cases += 1
            scale = math.fsum(map(abs, case.log_ratio))  # terms of both signs cancel
            found.add(got.tolist(), [s / n for s, n in zip(sums, sizes, strict=True)], "values", floor=scale)
            found.add(slope.tolist(), [upstream[s] / sizes[s] for s in case.segments], "gradient")
    found.finish(record_property, 1e-6)


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "float64"])
def test_value_loss(dtype, record_property):
    """Against the formula, and against the derivative worked out by hand."""
    found = Tally(f"value/{dtype}")
    for seed in range(3 * CASES):
        random = np.random.default_rng((400, seed))
        size = int(random.integers(1, 9))
        scale = random.choice([0.5, 3.0])
        old, target = ([float32(x) for x in scale * random.standard_normal(size)] for _ in range(2))
        now = [float32(v + random.choice([0.1, 1.0]) * random.standard_normal()) for v in old]
        clip = [None, 0.2, 1.0][seed % 3]
        value = numbers(now)
        with watch() as distances:
            expected = [value_oracle.value_loss(v, o, t, clip) for v, o, t in zip(value, old, target, strict=True)]
        if min(distances, default=1.0) < KINK:
            found.skipped += 1
            continue
        found.cases += 1
        upstream = [float32(x) for x in random.standard_normal(size)]
        leaf = torch.tensor(now, dtype=dtype, requires_grad=True)
        more = torch.tensor(old, dtype=dtype), torch.tensor(target, dtype=dtype)
        got = values.value_loss(leaf, *more, clip=clip)
        (slope,) = torch.autograd.grad((got * torch.tensor(upstream, dtype=dtype)).sum(), leaf)
        what = f"{now} {old} {target} {clip}"
        size_of = max(abs(a - b) for a, b in zip(now, target, strict=True))
        found.add(got.tolist(), [loss.value for loss in expected], f"values of {what}", floor=size_of**2)
        whole = total(loss * up for loss, up in zip(expected, upstream, strict=True))
        found.add(slope.tolist(), gradient(whole, value), f"gradient of {what}")
        by_hand = [value_oracle.by_hand(*token, clip) for token in zip(now, old, target, strict=True)]
        found.add(got.tolist(), [loss for loss, _ in by_hand], f"values by hand of {what}")
        found.add(slope.tolist(), [s * up for (_, s), up in zip(by_hand, upstream, strict=True)], f"by hand, {what}")
        cut = [value_oracle.is_cut(*token, clip) for token in zip(now, old, target, strict=True)]
        assert values.value_cut(leaf.detach(), *more, clip=clip).tolist() == cut, what
    found.finish(record_property, BOUNDS[dtype], at_least=2 * CASES)
