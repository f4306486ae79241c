"""The host's maths against exact oracles: advantages, shaping, KL controller, corrections, choices among tokens.

All of it is float64 in and out; 1e-9 of the largest answer is what rounding can be asked for after sums that cancel.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skirl.algorithms import advantages, corrections, kl, losses, shaping
from tests.oracles import advantages as oracle
from tests.oracles import corrections as correction_oracle
from tests.oracles import kl as kl_oracle
from tests.oracles import losses as loss_oracle
from tests.oracles import shaping as shaping_oracle
from tests.oracles.tally import Tally

CASES = 150
"""Of each function; raise it for a longer search."""
TOLERANCE = 1e-8
BOUND = 1e-9


def float64(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scores_of(random: np.random.Generator, *, positive: bool = False) -> list[float]:
    """1 to 9 scores: graded, right or wrong, with ties, all equal, or far from 0."""
    size = int(random.integers(1, 10))
    kind = random.integers(5)
    if kind == 0:
        found = random.integers(0, 2, size=size).astype(float)
    elif kind == 1:
        found = random.choice([0.1, 0.3, 0.1 + 0.2, 0.7], size=size)
    elif kind == 2:
        found = np.full(size, random.standard_normal())
    elif kind == 3:
        found = 100 * random.choice([-1, 1]) + random.standard_normal(size)
    else:
        found = random.standard_normal(size)
    return [float(x) for x in (np.abs(found) if positive else found)]


def seeds(number: int, cases: int = CASES) -> list[np.random.Generator]:
    return [np.random.default_rng((number, seed)) for seed in range(cases)]


def clear(scores: Sequence[float]) -> bool:
    """Not at the border between equal and different scores."""
    return oracle.tolerance_margin(scores, TOLERANCE) > 1e-6


# ----------------------------------------------------------------------------------------------------------- advantages
def one_number(name: str, random: np.random.Generator) -> tuple[list[float], Tensor, list[float]]:
    """(scores, the function's answer, the oracle's)."""
    scores = scores_of(random, positive=name == "max_rl")
    how: dict[str, Any] = {"tolerance": TOLERANCE}
    more: list[Any] = []
    if name == "group_norm":
        how |= {"eps": float(random.choice([0.0, 1e-6, 1e-4])), "ddof": int(random.integers(2))}
    if name == "optimal_baseline":
        more = [[int(n) for n in random.integers(1, 50, size=len(scores))]]
    got = getattr(advantages, name)(float64(scores), *map(float64, more), **how)  # getattr: a table of functions
    return scores, got, getattr(oracle, name)(scores, *more, **how)  # getattr: a table of oracles


@pytest.mark.parametrize("name", ["group_norm", "group_mean", "leave_one_out", "max_rl", "optimal_baseline"])
def test_advantages_of_a_group(name, record_property):
    found = Tally(name)
    for random in seeds(1):
        scores, got, expected = one_number(name, random)
        if not clear(scores):
            found.skipped += 1
            continue
        found.cases += 1
        assert got.dtype == torch.float64
        found.add(got.tolist(), expected, f"{scores}")
        if max(scores) - min(scores) < TOLERANCE or len(scores) == 1:
            assert not got.any(), scores
    found.finish(record_property, BOUND, at_least=CASES * 9 // 10)


def test_pass_at_k_equals_every_choice_listed(record_property):
    """All numbers of right responses, of all groups up to 8, for all k: the closed form against the definition."""
    found = Tally("pass_at_k")
    random = np.random.default_rng(2)
    for size in range(1, 9):
        for num_right in range(size + 1):
            for k in range(1, size + 1):
                right = [bool(x) for x in random.permutation([True] * num_right + [False] * (size - num_right))]
                got = advantages.pass_at_k(torch.tensor(right), k=k)
                found.cases += 1
                found.add(got.tolist(), oracle.pass_at_k(right, k=k), f"{right} k={k}", floor=1e-3)
    found.finish(record_property, BOUND)


def test_gdpo_within_a_group_and_over_the_batch(record_property):
    found = Tally("gdpo")
    for random in seeds(3):
        columns = int(random.integers(1, 5))
        size = len(scores_of(random))
        parts = [[float(x) for x in row] for row in random.standard_normal((size, columns))]
        for k in range(columns):
            kind = random.random()
            for row in parts:
                row[k] = math.nan if kind < 0.2 else 0.5 if kind < 0.4 else row[k]
        weights = [float(w) for w in random.choice([0.0, 0.5, 1.0, -1.0, 2.0], size=columns)]
        how = {"eps": float(random.choice([0.0, 1e-6])), "ddof": int(random.integers(2))}
        got = advantages.decoupled_norm(float64(parts), float64(weights), **how, tolerance=TOLERANCE)
        expected = oracle.decoupled_norm(parts, weights, **how, tolerance=TOLERANCE)
        found.cases += 1
        found.add(got.tolist(), expected, f"{parts} {weights} {how}", floor=1e-3)
        batch = [float(x) for x in random.standard_normal(int(random.integers(0, 20)))]
        eps = float(random.choice([1e-6, 1e-4]))
        if len(batch) > how["ddof"]:
            over = advantages.whiten_scores(float64(batch), eps=eps, ddof=how["ddof"])
            found.add(over.tolist(), oracle.whiten_scores(batch, eps=eps, ddof=how["ddof"]), f"{batch} {how}")
    found.finish(record_property, BOUND)


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("ddof", [0, 1])
def test_the_smallest_batches_give_zeros_or_the_formula_and_never_nan(size, ddof):
    got = advantages.whiten_scores(float64([3.0] * size), eps=1e-6, ddof=ddof)
    assert got.tolist() == [0.0] * size
    assert advantages.whiten(float64([3.0] * size)).tolist() == [0.0] * size


def test_advantages_of_tokens(record_property):
    """GAE and discounted sums, each token from its definition; whitening over a batch."""
    found = Tally("tokens")
    for random in seeds(4):
        size = int(random.integers(0, 12))
        rewards, values = ([float(x) for x in row] for row in random.standard_normal((2, size)))
        if random.random() < 0.5:  # as a score at the last token
            rewards = [0.0] * max(0, size - 1) + rewards[-1:]
        gamma, lam = (float(random.choice([0.0, 0.5, 0.95, 0.99, 1.0])) for _ in range(2))
        expected = oracle.gae(rewards, values, gamma=gamma, lam=lam)
        got = advantages.gae(float64(rewards), float64(values), gamma=gamma, lam=lam)
        found.cases += 1
        for ours, theirs, name in zip(got, expected, ("advantages", "returns"), strict=True):
            found.add(ours.tolist(), theirs, f"{name} {rewards} {values} {gamma} {lam}", floor=1e-3)
        sums = advantages.discounted_returns(float64(rewards), gamma=gamma)
        found.add(sums.tolist(), oracle.discounted_returns(rewards, gamma=gamma), f"{rewards} {gamma}", floor=1e-3)
        shift = 100 * random.standard_normal()
        eps = float(random.choice([1e-8, 1e-2]))
        white = advantages.whiten(float64([r + shift for r in rewards]), eps=eps)
        whitened = oracle.whiten([r + shift for r in rewards], eps=eps)
        found.add(white.tolist(), whitened, f"whiten {rewards}", floor=1.0)
    found.finish(record_property, BOUND)


def test_the_default_of_whitening_is_1e_8():
    values = [0.0, 1e-4]
    assert advantages.whiten(float64(values)).tolist() == pytest.approx(oracle.whiten(values, eps=1e-8), rel=1e-12)


# -------------------------------------------------------------------------------------------------------------- shaping
def test_shaping(record_property):
    found = Tally("shaping")
    for random in seeds(5):
        scores = scores_of(random)
        size = len(scores)
        low = float(random.uniform(-1, 0.5))
        bounds = {"low": low, "high": low + float(random.uniform(0, 1))}
        found.cases += 4
        got = shaping.clip_scores(float64(scores), **bounds)
        found.add(got.tolist(), shaping_oracle.clip_scores(scores, **bounds), f"clip {scores} {bounds}")
        budget = int(random.integers(2, 40))
        soft = {
            "budget": budget,
            "buffer": int(random.integers(1, budget + 1)),
            "penalty": float(random.choice([1.0, 0.5, 3.0])),
        }
        near = [int(n) for n in random.integers(0, budget + 5, size=size)]
        got = shaping.overlong_penalty(torch.tensor(near), **soft)
        found.add(got.tolist(), shaping_oracle.overlong_penalty(near, **soft), f"overlong {near} {soft}")
        cut = [bool(random.random() < 0.5) for _ in scores]
        fixed = [{"factor": 0.3, "score": None}, {"factor": None, "score": -0.5}, {"factor": 0.0, "score": None}]
        how = fixed[int(random.integers(3))]
        got = shaping.truncated_scores(float64(scores), torch.tensor(cut), **how)
        found.add(got.tolist(), shaping_oracle.truncated_scores(scores, cut, **how), f"truncated {scores} {cut} {how}")
        coef = float(random.choice([1.0, 0.3]))
        right = [bool(random.random() < 0.5) for _ in scores]
        lengths = [int(n) for n in random.integers(1, 4 if random.random() < 0.3 else 300, size=size)]
        got = shaping.length_reward(torch.tensor(lengths), torch.tensor(right), coef=coef)
        found.add(got.tolist(), shaping_oracle.length_reward(lengths, right, coef=coef), f"length {lengths} {right}")
    found.finish(record_property, 1e-12)


def test_the_controller_of_the_kl(record_property):
    found = Tally("adapted_coef")
    for random in seeds(6):
        coef, now, target = (float(x) for x in np.exp(random.standard_normal(3)))
        how = {
            "target": target,
            "horizon": int(random.integers(1, 10000)),
            "num_responses": int(random.integers(1, 500)),
        }
        now = target * float(random.uniform(0.7, 1.3)) if random.random() < 0.5 else now
        found.cases += 1
        found.add(
            [kl.adapted_coef(coef, now, **how)], [kl_oracle.adapted_coef(coef, now, **how)], f"{coef} {now} {how}"
        )
    found.finish(record_property, 1e-12)


# ---------------------------------------------------------------------------------------------------------- corrections
CORRECTIONS: dict[str, list[dict[str, float]]] = {
    "tis": [{"low": 0.0, "high": 2.0}, {"low": 0.5, "high": 1.1}],
    "icepop": [{"low": 0.5, "high": 5.0}, {"low": 0.9, "high": 1.1}],
    "sequence_mask": [{"low": 0.99, "high": 1.01, "cap": 2.0}, {"low": 0.8, "high": 1.3, "cap": 1.1}],
    "sequence_is": [{"cap": 2.0}, {"cap": 1.05}],
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections(name, record_property):
    """Gaps of usual and of any size; a response's sum stays within +-20, where its weight is bounded too."""
    found = Tally(name)
    for seed, random in enumerate(seeds(7)):
        size = int(random.integers(0, 9))
        gaps = random.choice([0.005, 0.1, 1.0]) * random.standard_normal(size)
        if seed % 10 == 0 and name in ("tis", "icepop"):
            gaps = random.uniform(-30, 30, size=size)
        gap = [float(x) for x in np.clip(gaps, -30, 30)]
        how = CORRECTIONS[name][seed % 2]
        if correction_oracle.margin(gap, list(how.values())) < 1e-9 or (abs(sum(gap)) > 20 and name == "sequence_is"):
            found.skipped += 1
            continue
        factors, cut = getattr(corrections, name)(float64(gap), **how)  # getattr: a table of functions
        expected, expected_cut = getattr(correction_oracle, name)(gap, **how)  # getattr: a table of oracles
        found.cases += 1
        found.add(factors.tolist(), expected, f"{gap} {how}")
        assert cut.tolist() == expected_cut, (gap, how)
    found.finish(record_property, 1e-12, at_least=CASES * 9 // 10)


# ----------------------------------------------------------------------------------------------------------- selections
def test_covariance(record_property):
    found = Tally("covariance")
    for random in seeds(8):
        size = int(random.integers(0, 30))
        logprobs, worths = ([float(x) for x in row] for row in random.standard_normal((2, size)))
        got = losses.covariance(float64(logprobs), float64(worths))
        found.cases += 1
        found.add(got.tolist(), loss_oracle.covariance(logprobs, worths), f"{logprobs} {worths}", floor=1e-3)
    found.finish(record_property, 1e-12)


def test_kl_cov_takes_the_highest(record_property):
    for random in seeds(9):
        cov = [float(x) for x in random.standard_normal(int(random.integers(0, 60)))]
        share = float(random.choice([2e-4, 0.05, 0.3, 0.9]))
        got = losses.kl_cov_selection(float64(cov), share=share).tolist()
        number = loss_oracle.num_selected(share, len(cov), len(cov))
        highest = sorted(range(len(cov)), key=lambda i: cov[i])[len(cov) - number :]
        assert got == [i in highest for i in range(len(cov))], (cov, share)
    record_property("oracle/kl_cov_selection/cases", CASES)


def test_kl_cov_keeps_to_its_number_among_equals():
    assert losses.kl_cov_selection(float64([1.0] * 10), share=0.3).sum() == 3
    assert losses.kl_cov_selection(float64([0.0] * 10 + [1.0]), share=1e-4).tolist() == [False] * 10 + [True]


def test_clip_cov_draws_among_its_candidates(record_property):
    for seed, random in enumerate(seeds(10)):
        cov = [float(x) for x in 3 * random.standard_normal(int(random.integers(0, 60)))]
        share, low, high = float(random.choice([2e-4, 0.05, 0.3, 0.9])), 1.0, float(random.choice([1.5, 5.0]))
        how = {"share": share, "low": low, "high": high, "seed": seed}
        got = losses.clip_cov_selection(float64(cov), **how)
        inside = [low < c < high for c in cov]
        assert int(got.sum()) == loss_oracle.num_selected(share, len(cov), sum(inside)), (cov, how)
        assert all(ok for ok, chosen in zip(inside, got.tolist(), strict=True) if chosen), (cov, how)
        assert torch.equal(losses.clip_cov_selection(float64(cov), **how), got), "the same seed chooses the same"
    record_property("oracle/clip_cov_selection/cases", CASES)


def test_clip_cov_draws_uniformly():
    """1,000 seeds, 4 of 8 candidates each: every candidate and every pair comes as often as the others."""
    cov = float64([0.0, 2.0, 2.1, 2.2, 2.3, 9.0, 2.4, 2.5, 2.6, 2.7, 1.0, 5.0])
    share, singles, pairs = 4 / 12 + 1e-9, Counter[int](), Counter[tuple[int, int]]()
    for seed in range(1000):
        chosen = losses.clip_cov_selection(cov, share=share, low=1.0, high=5.0, seed=seed).nonzero().flatten().tolist()
        assert len(chosen) == 4
        singles.update(chosen)
        pairs.update((a, b) for a in chosen for b in chosen if a < b)
    assert set(singles) == {1, 2, 3, 4, 6, 7, 8, 9}
    assert max(abs(n - 500) for n in singles.values()) < 5 * math.sqrt(250)
    assert len(pairs) == 28
    assert max(abs(n - 1000 * 3 / 14) for n in pairs.values()) < 5 * math.sqrt(1000 * 3 / 14)


# ------------------------------------------------------------------------------------------------------ inputs are kept
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "leave_one_out": lambda x: advantages.leave_one_out(x, tolerance=TOLERANCE),
    "max_rl": lambda x: advantages.max_rl(x, tolerance=TOLERANCE),
    "optimal_baseline": lambda x: advantages.optimal_baseline(x, x + 1, tolerance=TOLERANCE),
    "gae": lambda x: advantages.gae(x, x, gamma=0.9, lam=0.9),
    "discounted_returns": lambda x: advantages.discounted_returns(x, gamma=0.9),
    "whiten": lambda x: advantages.whiten(x),
    "whiten_scores": lambda x: advantages.whiten_scores(x, eps=1e-6, ddof=1),
    "clip_scores": lambda x: shaping.clip_scores(x, low=0.5, high=0.6),
    "tis": lambda x: corrections.tis(x, low=0.9, high=1.1),
    "sequence_mask": lambda x: corrections.sequence_mask(x, low=0.9, high=1.1, cap=1.05),
    "covariance": lambda x: losses.covariance(x, x),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_stay_as_they_were(name):
    given = float64([0.0, 1.0, 0.25, 3.0])
    CALLS[name](given)
    assert given.tolist() == [0.0, 1.0, 0.25, 3.0]
