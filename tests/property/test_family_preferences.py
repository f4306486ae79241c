"""Losses of pairs and labelled responses, and distillation, against their oracles: values and gradients.

float32 is held to 1e-6 where the exponent h is within +-6: sigmoid(h) of an h that is rounded is good to |h| eps; for
kto within +-2, whose slope v (1 - v) is good to eps / min(v, 1 - v); and for teachers whose logits are of size 1. Far
exponents, +-40 and more, are for float64.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skirl.algorithms import preferences
from skirl.algorithms.distillation import token_divergence
from tests.oracles import distillation as distillation_oracle
from tests.oracles import preferences as oracle
from tests.oracles.autodiff import Number, gradient, numbers, total
from tests.oracles.logprobs import Matrix, backward, logits_of
from tests.oracles.tally import Tally

CASES = 60
"""Of each loss and dtype; raise it for a longer search."""
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-11}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "float64"])

Settings = dict[str, Any]


def float32(value: float) -> float:
    return float(np.float32(value))


PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Number], list[Settings]]] = {
    "bradley_terry": (preferences.bradley_terry, oracle.bradley_terry, [{}]),
    "log_exp": (preferences.log_exp, oracle.bradley_terry, [{}]),
    "dpo": (
        lambda c, r, m, **how: preferences.dpo(c, r, **how),
        lambda c, r, m, beta, label_smoothing: oracle.dpo(c, r, beta, label_smoothing),
        [{"beta": 0.1, "label_smoothing": 0.0}, {"beta": 0.5, "label_smoothing": 0.2}],
    ),
    "ipo": (
        lambda c, r, m, **how: preferences.ipo(c, r, **how),
        lambda c, r, m, beta: oracle.ipo(c, r, beta),
        [{"beta": 0.1}, {"beta": 1.0}],
    ),
    "simpo": (
        lambda c, r, m, **how: preferences.simpo(c, r, **how),
        lambda c, r, m, beta, margin: oracle.simpo(c, r, beta, margin),
        [{"beta": 2.0, "margin": 1.0}, {"beta": 0.7, "margin": 0.0}],
    ),
    "orpo": (
        lambda c, r, m, **how: preferences.orpo(c, r, **how),
        lambda c, r, m: oracle.orpo(c, r),
        [{}],
    ),
}


def pair_of(name: str, how: Settings, random: np.random.Generator, *, far: bool) -> tuple[float, float, float]:
    """(chosen, rejected, margin); float32 holds them."""
    if name == "orpo":  # mean log-probs
        low = -40.0 if far else -5.0
        chosen, rejected = random.uniform(low, -0.02, size=2)
    else:
        reach = (60.0 if far else 5.0) / how.get("beta", 1.0)
        if name == "ipo":
            reach = 3.0
        middle = random.uniform(-2, 2)
        chosen, rejected = middle + random.uniform(-reach, reach, size=2) / 2
    return float32(chosen), float32(rejected), float32(random.choice([0.0, 1.0]) * random.random())


@DTYPES
@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_pairs(name, dtype, record_property):
    found = Tally(f"{name}/{dtype}")
    code, formula, settings = PAIRS[name]
    for seed in range(CASES):
        random = np.random.default_rng((list(PAIRS).index(name), seed))
        how = settings[seed % len(settings)]
        far = dtype == torch.float64 and seed % 2 == 1
        columns = [pair_of(name, how, random, far=far) for _ in range(int(random.integers(1, 7)))]
        chosen, rejected, margins = ([column[k] for column in columns] for k in range(3))
        upstream = [float32(x) for x in random.standard_normal(len(columns))]
        c, r = numbers(chosen), numbers(rejected)
        expected = [formula(a, b, m, **how) for a, b, m in zip(c, r, margins, strict=True)]
        leaves = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (chosen, rejected)]
        got = code(*leaves, torch.tensor(margins, dtype=dtype), **how)
        slopes = torch.autograd.grad((got * torch.tensor(upstream, dtype=dtype)).sum(), leaves)
        what = f"{name} {how} {chosen} {rejected} {margins}"
        found.cases += 1
        target = 1 / (2 * how["beta"]) if name == "ipo" else 0.0  # what is left of it after the gap is taken off
        found.add(got.tolist(), [loss.value for loss in expected], f"values of {what}", floor=target**2)
        whole = total(loss * up for loss, up in zip(expected, upstream, strict=True))
        by_code = [x for slope in slopes for x in slope.tolist()]
        found.add(by_code, gradient(whole, [*c, *r]), f"gradient of {what}", floor=target * abs(upstream[0]))
        if name == "dpo" and not far:
            by_hand = [oracle.dpo_by_hand(a, b, *how.values()) for a, b in zip(chosen, rejected, strict=True)]
            found.add(got.tolist(), [loss for loss, _ in by_hand], f"values by hand of {what}")
            steps = [slope * up for (_, slope), up in zip(by_hand, upstream, strict=True)]
            found.add(by_code, [*steps, *(-x for x in steps)], f"gradient by hand of {what}")
    # log_exp takes log(1 + e^x) to be x above 20, which is off by e^-20: nothing in float32, 2e-9 in float64.
    found.finish(record_property, 1e-8 if name == "log_exp" and dtype == torch.float64 else BOUNDS[dtype])


@DTYPES
def test_kto(dtype, record_property):
    """Against the formula and against the derivative worked out by hand; the baseline is used as it is, below 0 too."""
    found = Tally(f"kto/{dtype}")
    for seed in range(2 * CASES):
        random = np.random.default_rng((10, seed))
        beta, weights = float(random.choice([0.1, 1.0])), (1.0, float(random.choice([1.0, 1.33])))
        size = int(random.integers(1, 7))
        far = dtype == torch.float64 and seed % 2 == 1
        ratios = [float32(x) for x in random.uniform(-1, 1, size=size) * (50 if far else 1) / beta]
        baselines = [float32(random.uniform(-1, 1) / beta)] * size
        desirable = [bool(random.random() < 0.5) for _ in ratios]
        upstream = [float32(x) for x in random.standard_normal(size)]
        leaf = torch.tensor(ratios, dtype=dtype, requires_grad=True)
        base = torch.tensor(baselines, dtype=dtype, requires_grad=True)
        how = {"beta": beta, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
        got = preferences.kto(leaf, torch.tensor(desirable), base, **how)
        slope, nothing = torch.autograd.grad(
            (got * torch.tensor(upstream, dtype=dtype)).sum(), (leaf, base), allow_unused=True
        )
        assert nothing is None or not nothing.any(), "no gradient to the baseline"
        x = numbers(ratios)
        tokens = list(zip(desirable, baselines, strict=True))
        expected = [oracle.kto(a, *token, beta, weights) for a, token in zip(x, tokens, strict=True)]
        what = f"{ratios} {desirable} {baselines} {how}"
        found.cases += 1
        found.add(got.tolist(), [loss.value for loss in expected], f"values of {what}")
        whole = total(loss * up for loss, up in zip(expected, upstream, strict=True))
        found.add(slope.tolist(), gradient(whole, x), f"gradient of {what}", floor=1e-3 if far else 0)
        by_hand = [oracle.kto_by_hand(a, *token, beta, weights) for a, token in zip(ratios, tokens, strict=True)]
        found.add(got.tolist(), [loss for loss, _ in by_hand], f"values by hand of {what}", floor=1e-3 if far else 0)
        steps = [s * up for (_, s), up in zip(by_hand, upstream, strict=True)]
        found.add(slope.tolist(), steps, f"gradient by hand of {what}", floor=1e-3 if far else 0)
    found.finish(record_property, BOUNDS[dtype])


@DTYPES
def test_step_entropy(dtype, record_property):
    found = Tally(f"step_entropy/{dtype}")
    for seed in range(CASES):
        random = np.random.default_rng((11, seed))
        size = int(random.integers(1, 9))
        far = dtype == torch.float64 and seed % 2 == 1
        logits = [float32(x) for x in random.uniform(-1, 1, size=size) * (60 if far else 5)]
        soft = random.random() < 0.5
        labels = [float32(random.random() if soft else float(random.integers(2))) for _ in logits]
        upstream = [float32(x) for x in random.standard_normal(size)]
        leaf = torch.tensor(logits, dtype=dtype, requires_grad=True)
        got = preferences.step_entropy(leaf, torch.tensor(labels, dtype=dtype))
        (slope,) = torch.autograd.grad((got * torch.tensor(upstream, dtype=dtype)).sum(), leaf)
        x = numbers(logits)
        expected = [oracle.step_entropy(z, label) for z, label in zip(x, labels, strict=True)]
        found.cases += 1
        found.add(got.tolist(), [loss.value for loss in expected], f"values of {logits} {labels}", floor=1.0)
        whole = total(loss * up for loss, up in zip(expected, upstream, strict=True))
        found.add(slope.tolist(), gradient(whole, x), f"gradient of {logits} {labels}", floor=0.1 * abs(upstream[0]))
    found.finish(record_property, BOUNDS[dtype])


# --------------------------------------------------------------------------------------------------------- distillation
def matrix(random: np.random.Generator, rows: int, columns: int, scale: float) -> Matrix:
    return [[float32(scale * x) for x in row] for row in random.standard_normal((rows, columns))]


@pytest.mark.parametrize("direction", ["forward_kl", "reverse_kl"])
@DTYPES
def test_divergence_from_a_teacher(direction, dtype, record_property):
    """Log-probs and divergences, and the gradient of a weighted sum of both by the student's hidden states and head."""
    found = Tally(f"distillation {direction}/{dtype}")
    for seed in range(CASES // 2):
        random = np.random.default_rng((12, seed))
        size, width, other, vocabulary = (int(n) for n in random.integers(1, 8, size=4))
        vocabulary += 2
        student = matrix(random, size, width, 1.0), matrix(random, vocabulary, width, 0.4)
        teacher = matrix(random, size, other, 1.0), matrix(random, vocabulary, other, 0.4)
        targets = [int(t) for t in random.integers(0, vocabulary, size=size)]
        temperature = float(random.choice([1.0, 2.0, 0.7]))
        upstream = [[float32(x) for x in row] for row in random.standard_normal((2, size))]
        if seed % 3 == 0:
            upstream[0] = [0.0] * size  # the divergence alone
        leaves = [torch.tensor(m, dtype=dtype, requires_grad=True) for m in (*student, *teacher)]
        how = {"direction": direction, "temperature": temperature, "chunk": int(random.integers(1, 10))}
        outputs = token_divergence(leaves[0], leaves[1], leaves[2], leaves[3], torch.tensor(targets), **how)
        weighted = [(o * torch.tensor(up, dtype=dtype)).sum() for o, up in zip(outputs, upstream, strict=True)]
        slopes = torch.autograd.grad(weighted[0] + weighted[1], leaves, allow_unused=True)
        assert slopes[2] is None or not slopes[2].any(), "no gradient to the teacher"
        assert slopes[3] is None or not slopes[3].any(), "no gradient to the teacher's head"
        rows = list(zip(logits_of(*student), logits_of(*teacher), targets, strict=True))
        logprobs = [distillation_oracle.logprob(z, target) for z, _, target in rows]
        gaps = [distillation_oracle.divergence(z, t, direction, temperature) for z, t, _ in rows]
        by_logit = [
            [up * a + over * b for a, b in zip(one, two, strict=True)]
            for (_, one), (_, two), up, over in zip(logprobs, gaps, *upstream, strict=True)
        ]
        found.cases += 1
        what = f"seed {seed} {how}"
        found.add(outputs[0].tolist(), [value for value, _ in logprobs], f"log-probs, {what}")
        size_of = temperature**2  # what is left of differences of log-probs of size 1 and more
        found.add(outputs[1].tolist(), [value for value, _ in gaps], f"divergences, {what}", floor=size_of)
        for slope, expected in zip(slopes, backward(*student, by_logit), strict=False):
            found.add(slope.flatten().tolist(), [x for row in expected for x in row], f"gradient, {what}", floor=0.3)
    found.finish(record_property, BOUNDS[dtype] if outputs[0].dtype == dtype else 1e-6)


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient():
    random = np.random.default_rng(13)
    hidden, head = torch.tensor(matrix(random, 5, 4, 1.0)), torch.tensor(matrix(random, 7, 4, 1.0))
    for direction in ("forward_kl", "reverse_kl"):
        leaf = hidden.clone().requires_grad_()
        targets = torch.zeros(5, dtype=torch.int64)
        _, gaps = token_divergence(leaf, head, hidden, head, targets, direction=direction, temperature=1.5, chunk=2)
        (slope,) = torch.autograd.grad(gaps.sum(), leaf)
        assert gaps.abs().max() < 1e-6
        assert slope.abs().max() < 1e-6
