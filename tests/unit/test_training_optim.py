"""Learning rates at literals, parameter groups, and the guard against gradients that are not finite."""

import copy
import math

import pytest
import torch
from torch import nn

from skirl.config.muon import check_muon
from skirl.config.schema import DeepSpeedBackendConfig, MuonConfig, OptimConfig, ScheduleConfig, SingleBackendConfig
from skirl.errors import ConfigError
from skirl.training.optim import FiniteGuard, learning_rate, make_optimizer, muon_matrices, set_rates


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
    optimizer = make_optimizer(layer, list(layer.named_parameters()), config, fused=False)
    matrices, vectors = optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(layer[0].weight)]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in (layer[0].bias, layer[1].weight, layer[1].bias)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.25, 0.0)
    assert {(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups} == {(0.5, (0.8, 0.9), 1e-5)}


# ----------------------------------------------------------------------------------------------------------------- Muon
class Net(nn.Module):
    """Tied, as language models are: the head's matrix is that of the embedding."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4, bias=False)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 9, bias=False)
        self.gate = nn.Parameter(torch.randn(1, 4))  # a vector in the shape of a matrix
        self.experts = nn.Parameter(torch.randn(2, 4, 4))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.layers[1](self.layers[0](hidden).tanh()) * self.gate
        return self.head(self.norm(hidden @ self.experts.sum(0)))


MUON = MuonConfig(lr=0.02, momentum=0.9, weight_decay=0.1, steps=4)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_gets_the_matrices_of_hidden_layers(tied, caplog):
    net = Net(tied=tied)
    assert muon_matrices(net) == {"layers.0.weight", "layers.1.weight"}
    with caplog.at_level("INFO"):
        optimizer = make_optimizer(net, list(net.named_parameters()), OptimConfig(muon=MUON), fused=False)
    assert "Muon steps 2 matrices: layers.0.weight, layers.1.weight" in caplog.text
    by_muon = [p for g in optimizer.param_groups if g.get("by_muon") for p in g["params"]]
    assert {id(p) for p in by_muon} == {id(layer.weight) for layer in net.layers}
    stepped = [p for g in optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in stepped} == {id(p) for p in net.parameters()}
    assert len(stepped) == len(list(net.parameters()))


def stepped(net, optim, rates, optimizer=None):
    torch.manual_seed(1)
    optimizer = optimizer or make_optimizer(net, list(net.named_parameters()), optim, fused=False)
    for rate in rates:
        nn.functional.cross_entropy(net(torch.randint(9, (20,))), torch.randint(9, (20,))).backward()
        set_rates(optimizer.param_groups, optim, rate)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def twins():
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Net())
    return made


def test_muon_steps_are_torchs_beside_torchs_adamw_on_one_schedule():
    one, other = twins()
    optim = OptimConfig(lr=1e-2, weight_decay=0.2, muon=MUON)
    stepped(one, optim, [5e-3, 1e-2])
    matrices = [layer.weight for layer in other.layers]
    rest = [p for p in other.parameters() if not any(p is m for m in matrices)]
    decayed, others = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    muon = torch.optim.Muon(matrices, momentum=0.9, weight_decay=0.1, ns_steps=4, adjust_lr_fn="original")
    torch.manual_seed(1)
    for share in (0.5, 1.0):
        nn.functional.cross_entropy(other(torch.randint(9, (20,))), torch.randint(9, (20,))).backward()
        for part, peak in ((adam, 1e-2), (muon, 0.02)):
            for group in part.param_groups:
                group["lr"] = share * peak
            part.step()
            part.zero_grad()
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_state_of_both_is_saved_and_loaded_bit_for_bit():
    one, other = twins()
    optim = OptimConfig(lr=1e-2, muon=MUON)
    first = stepped(one, optim, [1e-2, 1e-2])
    other.load_state_dict(one.state_dict())
    second = make_optimizer(other, list(other.named_parameters()), optim, fused=False)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert len(second.state) == len(list(other.parameters()))
    for net, optimizer in ((one, first), (other, second)):
        stepped(net, optim, [2e-2, 1e-2], optimizer)
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_muon_without_a_matrix_to_step_is_refused():
    net = Net()
    for layer in net.layers:
        layer.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"trainer\.optim\.muon"):
        make_optimizer(net, list(net.named_parameters()), OptimConfig(muon=MUON), fused=False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_on_sharded_state_is_refused_with_both_settings(stage):
    backend = DeepSpeedBackendConfig(kind="deepspeed", zero_stage=stage)
    with pytest.raises(ConfigError, match=rf"trainer\.optim\.muon .*trainer\.backend\.zero_stage {stage}"):
        check_muon(OptimConfig(muon=MUON), backend)
    with pytest.raises(ConfigError, match=r"critic\.optim\.muon"):
        check_muon(OptimConfig(muon=MUON), backend, "critic.optim")
    check_muon(OptimConfig(), backend)
    check_muon(OptimConfig(muon=MUON), DeepSpeedBackendConfig(kind="deepspeed", zero_stage=0))
    check_muon(OptimConfig(muon=MUON), SingleBackendConfig(kind="single"))


# ------------------------------------------------------------------------------------------------------------- guarding
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
