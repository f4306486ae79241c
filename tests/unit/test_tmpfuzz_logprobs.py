"""Log-probs and entropy of the sampling distribution against loops over tokens and vocabulary: values and gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skirl.algorithms.logprobs import token_logprobs
from tests.oracles import logprobs as oracle
from tests.oracles.logprobs import Filters

PROBABILITIES = (0.5, 0.25, 0.15, 0.1)
CLEAR = 1e-4  # a keep-or-drop decision closer than this may differ between float32 and float64


def assert_equals(got: torch.Tensor, expected: list[float]) -> None:
    """To what float32 can give for logits of size 5."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=2e-6)


def run(hidden: torch.Tensor, head: torch.Tensor, targets: list[int], filters: Filters, chunk: int = 64):
    return token_logprobs(
        hidden,
        head,
        torch.tensor(targets, dtype=torch.int64),
        temperature=filters.temperature,
        banned_ids=torch.tensor(sorted(filters.banned), dtype=torch.int64),
        top_k=filters.top_k,
        top_p=filters.top_p,
        min_p=filters.min_p,
        chunk=chunk,
    )


def of_probabilities(target: int, filters: Filters) -> tuple[float, float]:
    """Log-prob and entropy where the model itself says PROBABILITIES."""
    hidden = torch.tensor([[math.log(p) for p in PROBABILITIES]])
    logprob, entropy = run(hidden, torch.eye(4), [target], filters)
    return logprob.item(), entropy.item()


def entropy_of(*weights: float) -> float:
    return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)


@st.composite
def cases(draw: st.DrawFn):
    tokens, width, vocabulary = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(2, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    hidden = torch.tensor(random.normal(size=(tokens, width)), dtype=torch.float32)
    head = torch.tensor(random.normal(size=(vocabulary, width)) * 1.5, dtype=torch.float32)
    targets = random.integers(0, vocabulary, size=tokens).tolist()
    filters = Filters(
        temperature=draw(st.sampled_from((1.0, 0.0, 0.5, 0.7, 1.3, 2.0))),
        banned=frozenset(draw(st.sets(st.integers(0, vocabulary - 1), max_size=vocabulary - 1))),
        top_k=draw(st.one_of(st.just(0), st.integers(1, vocabulary + 2))),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 0.99))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.01, 0.9))),
    )
    return hidden, head, targets, filters, draw(st.integers(1, tokens + 2))


class TestOracle:
    @settings(deadline=None, max_examples=1500)
    @given(cases(), st.integers(0, 2**16))
    def test_values_and_gradients(self, case, seed: int):
        hidden, head, targets, filters, chunk = case
        logits = oracle.logits_of(hidden.tolist(), head.tolist())
        expected = [oracle.token(row, target, filters) for row, target in zip(logits, targets, strict=True)]
        assume(all(token.margin > CLEAR for token in expected))
        hidden.requires_grad_()
        head.requires_grad_()
        logprobs, entropy = run(hidden, head, targets, filters, chunk)
        assert_equals(logprobs, [token.logprob for token in expected])
        assert_equals(entropy, [token.entropy for token in expected])

        random = np.random.default_rng(seed)
        by_logprob, by_entropy = random.normal(size=(2, len(targets)))
        allowed = torch.isfinite(logprobs)
        by_logprob[~allowed.numpy()] = 0
        loss = (torch.tensor(by_logprob)[allowed] * logprobs[allowed]).sum() + (
            torch.tensor(by_entropy) * entropy
        ).sum()
        loss.backward()
        by_logit = [
            [a * one + b * two for one, two in zip(token.by_logit_logprob, token.by_logit_entropy, strict=True)]
            for a, b, token in zip(by_logprob, by_entropy, expected, strict=True)
        ]
        by_hidden, by_head = oracle.backward(hidden.tolist(), head.tolist(), by_logit)
        torch.testing.assert_close(hidden.grad, torch.tensor(by_hidden).float(), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(head.grad, torch.tensor(by_head).float(), rtol=1e-4, atol=2e-5)

    def test_the_oracle_is_the_derivative_of_itself(self):
        """Central differences of the oracle's values give the oracle's derivatives."""
        logits, step = [0.3, -1.2, 0.9, 2.0, -0.4], 1e-6
        filters = Filters(temperature=0.7, banned=frozenset({1}), top_k=3)
        answer = oracle.token(logits, 4, filters)
        for v in range(len(logits)):
            up = oracle.token([x + step * (i == v) for i, x in enumerate(logits)], 4, filters)
            down = oracle.token([x - step * (i == v) for i, x in enumerate(logits)], 4, filters)
            assert (up.logprob - down.logprob) / (2 * step) == pytest.approx(answer.by_logit_logprob[v], abs=1e-8)
            assert (up.entropy - down.entropy) / (2 * step) == pytest.approx(answer.by_logit_entropy[v], abs=1e-8)


class TestDistribution:
    @pytest.mark.parametrize(
        ("target", "filters", "probability", "left"),
        [
            (0, Filters(), 0.5, PROBABILITIES),
            (3, Filters(), 0.1, PROBABILITIES),
            (3, Filters(temperature=0.0), 0.1, PROBABILITIES),
            (0, Filters(temperature=0.5), 0.25 / 0.345, [p**2 for p in PROBABILITIES]),
            (0, Filters(top_k=2), 0.5 / 0.75, [0.5, 0.25]),
            (0, Filters(top_k=9), 0.5, PROBABILITIES),
            (0, Filters(top_p=0.4), 1.0, [0.5]),
            (0, Filters(top_p=0.01), 1.0, [0.5]),
            (0, Filters(top_p=0.6), 0.5 / 0.75, [0.5, 0.25]),
            (1, Filters(top_p=0.85), 0.25 / 0.9, [0.5, 0.25, 0.15]),
            (0, Filters(min_p=0.4), 0.5 / 0.75, [0.5, 0.25]),
            (1, Filters(banned=frozenset({0})), 0.5, [0.25, 0.15, 0.1]),
            (1, Filters(banned=frozenset({0}), top_k=2), 0.625, [0.25, 0.15]),
            (1, Filters(banned=frozenset({0}), min_p=0.5), 0.625, [0.25, 0.15]),  # likeliest of what is left
            (0, Filters(top_k=2, top_p=0.6), 1.0, [0.5]),  # top-p of what top-k left: 0.5 / 0.75 reaches 0.6
            (0, Filters(min_p=0.4, top_p=0.6), 1.0, [0.5]),
            (0, Filters(temperature=0.5, min_p=0.4), 1.0, [0.5]),  # temperature first: 0.25^2 / 0.5^2 is below 0.4
            (0, Filters(temperature=0.5, top_p=0.7), 1.0, [0.5]),  # 0.25 / 0.345 reaches 0.7
            (0, Filters(temperature=2.0, top_k=1, top_p=0.5), 1.0, [0.5]),
            (3, Filters(top_k=1), 0.1 / 0.6, [0.5, 0.1]),  # the sampled token is always in
            (3, Filters(top_p=0.4), 0.1 / 0.6, [0.5, 0.1]),
            (3, Filters(min_p=0.9), 0.1 / 0.6, [0.5, 0.1]),
        ],
    )
    def test_worked_examples(self, target: int, filters: Filters, probability: float, left: list[float]):
        logprob, entropy = of_probabilities(target, filters)
        assert logprob == pytest.approx(math.log(probability), abs=2e-6)
        assert entropy == pytest.approx(entropy_of(*left), abs=2e-6)

    def test_a_banned_target_is_minus_infinity_and_the_rest_stays_usable(self):
        hidden = torch.tensor([[math.log(p) for p in PROBABILITIES]] * 2, requires_grad=True)
        head = torch.eye(4, requires_grad=True)
        logprobs, entropy = run(hidden, head, [0, 1], Filters(banned=frozenset({0})))
        assert logprobs[0] == -math.inf
        assert logprobs[1].item() == pytest.approx(math.log(0.5), abs=2e-6)
        assert entropy.tolist() == pytest.approx([entropy_of(0.25, 0.15, 0.1)] * 2, abs=2e-6)
        (logprobs[1] + entropy.sum()).backward()
        for gradient in (hidden.grad, head.grad):
            assert gradient is not None
            assert torch.isfinite(gradient).all()
        assert hidden.grad is not None
        assert hidden.grad[:, 0].tolist() == [0.0, 0.0]

    def test_greedy_and_temperature_1_are_the_same(self):
        hidden, head = torch.randn(3, 4), torch.randn(7, 4)
        greedy, sampled = (run(hidden, head, [0, 3, 6], Filters(temperature=t)) for t in (0.0, 1.0))
        assert torch.equal(greedy[0], sampled[0])
        assert torch.equal(greedy[1], sampled[1])

    def test_large_logits_neither_overflow_nor_lose_the_gradient(self):
        hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
        head = torch.tensor([[1000.0, 0.0], [0.0, 0.0], [-1000.0, 0.0]])
        logprobs, entropy = run(hidden, head, [1], Filters())
        assert logprobs.item() == pytest.approx(-1000.0)
        assert entropy.item() == pytest.approx(0.0, abs=1e-6)
        (logprobs + entropy).sum().backward()
        assert hidden.grad is not None
        assert hidden.grad[0, 0].item() == pytest.approx(-1000.0)


class TestChunks:
    FILTERS = (Filters(), Filters(temperature=0.7, banned=frozenset({2}), top_k=5, top_p=0.9, min_p=0.01))

    @pytest.mark.parametrize("filters", FILTERS)
    def test_the_answer_does_not_depend_on_the_chunk(self, filters: Filters):
        generator = torch.Generator().manual_seed(0)
        hidden, head = torch.randn(9, 4, generator=generator), torch.randn(11, 4, generator=generator)
        answers = []
        for chunk in (1, 2, 4, 9, 100):
            leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
            logprobs, entropy = run(*leaves, [0, 1, 3, 4, 5, 6, 7, 8, 9], filters, chunk)
            (logprobs.sum() + 0.3 * entropy.sum()).backward()
            answers.append((logprobs.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad))
        for answer in answers[1:]:
            for got, expected in zip(answer, answers[0], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)

    def test_the_logits_are_not_kept_for_the_backward_pass(self):
        sizes: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        hidden, head = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs, entropy = run(hidden, head, [7] * 64, Filters(), chunk=8)
        assert max(sizes, default=0) <= max(hidden.numel(), head.numel())  # logits: 64 x 50, a chunk of them 8 x 50
        (logprobs.sum() + entropy.sum()).backward()
        assert hidden.grad is not None
        assert hidden.grad.abs().sum() > 0

    def test_no_tokens(self):
        hidden, head = torch.zeros(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        logprobs, entropy = run(hidden, head, [], Filters(top_k=2))
        assert logprobs.shape == entropy.shape == (0,)
        (logprobs.sum() + entropy.sum()).backward()
        assert head.grad is None or not head.grad.any()

    @pytest.mark.parametrize("trained", ["hidden", "head", "neither"])
    def test_a_frozen_side_gets_no_gradient(self, trained: str):
        hidden = torch.randn(3, 4, requires_grad=trained == "hidden")
        head = torch.randn(5, 4, requires_grad=trained == "head")
        logprobs, entropy = run(hidden, head, [0, 1, 2], Filters(), chunk=2)
        assert logprobs.requires_grad == entropy.requires_grad == (trained != "neither")
        if trained == "neither":
            return
        logprobs.sum().backward()
        assert (hidden.grad is not None, head.grad is not None) == (trained == "hidden", trained == "head")

    def test_bfloat16_weights_give_float32_answers(self):
        """The logits of these weights are exact in bfloat16; what is computed from them would not be."""
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randint(-1, 2, (5, 8), generator=generator).bfloat16()
        head = torch.randint(-2, 3, (9, 8), generator=generator).bfloat16() / 2
        logprobs, entropy = run(hidden, head, [0, 1, 2, 3, 4], Filters())
        logits = oracle.logits_of(hidden.tolist(), head.tolist())
        expected = [oracle.token(row, target, Filters()) for target, row in enumerate(logits)]
        assert_equals(logprobs, [token.logprob for token in expected])
        assert_equals(entropy, [token.entropy for token in expected])
