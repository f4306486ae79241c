"""Learning rates at literals, parameter groups, and the guard against gradients that are not finite."""

import math

import pytest
import torch
from torch import nn

from skirl.config.schema import OptimConfig, ScheduleConfig
from skirl.training.optim import FiniteGuard, adamw, learning_rate


def rate(consumed, total=1000, lr=2.0, **schedule):
    return learning_rate(OptimConfig(lr=lr, schedule=ScheduleConfig(**schedule)), consumed, total)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, {1: 2.0, 500: 2.0, 1000: 2.0}),
        ({"warmup": 0.1}, {10: 0.2, 50: 1.0, 99: 1.98, 100: 2.0, 1000: 2.0}),
        ({"kind": "linear"}, {0: 2.0, 250: 1.5, 500: 1.0, 1000: 0.0, 1500: 0.0}),
        ({"kind": "linear", "warmup": 0.2, "final": 0.5}, {100: 1.0, 200: 2.0, 600: 1.5, 1000: 1.0}),
        ({"kind": "cosine"}, {0: 2.0, 250: 1 + math.sqrt(0.5), 500: 1.0, 1000: 0.0}),
        ({"kind": "cosine", "warmup": 0.2, "final": 0.1}, {100: 1.0, 200: 2.0, 600: 1.1, 1000: 0.2, 2000: 0.2}),
    ],
)
def test_rate_at_consumed_prompts(schedule, expected):
    assert {n: rate(n, **schedule) for n in expected} == pytest.approx(expected, abs=1e-12)


def test_rate_follows_consumed_prompts_not_optimizer_steps():
    assert rate(50, total=100, kind="linear") == rate(500, total=1000, kind="linear") == 1.0


def test_weights_decay_in_matrices_only_and_frozen_ones_are_left_out():
    layer = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    layer[2].weight.requires_grad_(False)
    config = OptimConfig(lr=0.5, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.25)
    optimizer = adamw(layer.named_parameters(), config, fused=False)
    matrices, vectors = optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(layer[0].weight)]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in (layer[0].bias, layer[1].weight, layer[1].bias)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.25, 0.0)
    assert {(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups} == {(0.5, (0.8, 0.9), 1e-5)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guard_notices_one_bad_element_and_forgets_it_when_asked(bad, dtype):
    weight, frozen = nn.Parameter(torch.ones(5, 7, dtype=dtype)), nn.Parameter(torch.ones(2), requires_grad=False)
    guard = FiniteGuard([weight, frozen], torch.device("cpu"))
    factor = torch.full((5, 7), 1e30, dtype=dtype)
    (weight * factor).sum().backward()
    assert guard.take() == 0  # large is not infinite
    factor[3, 2] = bad
    (weight * factor).sum().backward()
    (weight * 1.0).sum().backward()  # a good one afterwards hides nothing
    assert guard.take() == 1
    (weight * 1.0).sum().backward()
    assert guard.take() == 0
