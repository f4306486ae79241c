"""Divergence from a teacher, in chunks, against the same on whole float64 logits."""

import math

import pytest
import torch

from skirl.algorithms.distillation import token_divergence


def case(seed: int = 0, tokens: int = 7) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(tokens, 4, generator=random).requires_grad_(),
        "head": torch.randn(11, 4, generator=random).requires_grad_(),
        "teacher_hidden": torch.randn(tokens, 6, generator=random).requires_grad_(),
        "teacher_head": torch.randn(11, 6, generator=random).requires_grad_(),
        "targets": torch.randint(0, 11, (tokens,), generator=random),
    }


def whole(given: dict[str, torch.Tensor], direction: str, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits = given["hidden"].double() @ given["head"].double().T
    teacher = (given["teacher_hidden"].double() @ given["teacher_head"].double().T / temperature).softmax(-1).detach()
    student = (logits / temperature).softmax(-1)
    p, q = (teacher, student) if direction == "forward_kl" else (student, teacher)
    rows = torch.arange(len(logits))
    return logits.log_softmax(-1)[rows, given["targets"]], temperature**2 * (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("direction", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_values_and_gradients(direction, temperature: float, chunk: int):
    given = case()
    got = token_divergence(**given, direction=direction, temperature=temperature, chunk=chunk)
    weights = torch.arange(1.0, 8.0)
    names = ("hidden", "head")
    grads = torch.autograd.grad((weights * (got[1] - 0.5 * got[0])).sum(), [given[name] for name in names])
    expected = whole(given, direction, temperature)
    right = torch.autograd.grad((weights * (expected[1] - 0.5 * expected[0])).sum(), [given[name] for name in names])
    for one, two in zip((*got, *grads), (*expected, *right), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), two.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward_kl", "reverse_kl"])
def test_the_teacher_has_no_gradient(direction):
    given = case()
    token_divergence(**given, direction=direction, temperature=1.0, chunk=4)[1].sum().backward()
    assert given["teacher_hidden"].grad is None
    assert given["teacher_head"].grad is None
    assert given["hidden"].grad is not None


@pytest.mark.parametrize("direction", ["forward_kl", "reverse_kl"])
def test_a_policy_that_is_its_teacher_has_no_divergence(direction):
    given = case()
    twin = {**given, "teacher_hidden": given["hidden"].detach(), "teacher_head": given["head"].detach()}
    divergence = token_divergence(**twin, direction=direction, temperature=2.0, chunk=4)[1]
    torch.testing.assert_close(divergence, torch.zeros(7), rtol=0, atol=1e-6)


def test_worked_distributions():
    """p = (3/4, 1/4), q = (1/2, 1/2)."""
    eye = torch.eye(2)
    teacher = torch.tensor([[math.log(3.0), 0.0]])
    for direction, expected in (
        ("forward_kl", 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),
        ("reverse_kl", 0.5 * math.log(2 / 3) + 0.5 * math.log(2.0)),
    ):
        got = token_divergence(
            torch.zeros(1, 2), eye, teacher, eye, torch.tensor([0]), direction=direction, temperature=1.0, chunk=1
        )
        assert got[0].item() == pytest.approx(math.log(0.5))
        assert got[1].item() == pytest.approx(expected, rel=1e-5)


def test_no_tokens():
    given = case(tokens=0)
    logprobs, divergence = token_divergence(**given, direction="forward_kl", temperature=1.0, chunk=4)
    assert logprobs.shape == divergence.shape == (0,)
    (logprobs.sum() + divergence.sum()).backward()
    assert given["head"].grad is not None
