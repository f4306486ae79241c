"""The moving average: against a loop, in float32 whatever the weights are, through checkpoints, as whole tensors."""

import pytest
import torch

from skirl.config.schema import EMAConfig, OffloadConfig, OptimConfig
from skirl.errors import CheckpointError
from skirl.training.backends.single import SingleBackend
from skirl.training.ema import MovingAverage
from skirl.training.objective import SupervisedObjective
from tests import tiny

LENGTHS = (4, 1, 9)
DECAY = 0.9


def backend_of(kit, *, ema=True, **optim):
    settings = OptimConfig(**{"lr": 1e-3} | optim)
    average = EMAConfig(decay=DECAY) if ema else None
    return SingleBackend(kit.policy, SupervisedObjective(), settings, 100, ema=average)


def plan_of(kit, **settings):
    return tiny.whole(tiny.sequences(kit, LENGTHS, streams=False), **settings)


def test_it_follows_tensors_as_a_loop_says():
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(3, 2, generator=generator), torch.randn(5, generator=generator)]
    average = MovingAverage(masters, EMAConfig(decay=0.75))
    wanted = [m.double() for m in masters]
    for _ in range(10):
        for master in masters:
            master += torch.randn(master.shape, generator=generator)
        average.follow(masters)
        wanted = [0.75 * w + 0.25 * m.double() for w, m in zip(wanted, masters, strict=True)]
    for got, want in zip(average.averages, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_masters_and_averages_change_places_and_back():
    masters = [torch.arange(4.0)]
    average = MovingAverage(masters, EMAConfig(decay=0.5))
    masters[0] += 1
    average.follow(masters)
    kept, held = masters[0].clone(), average.averages[0].clone()
    with average.in_place_of(masters):
        assert torch.equal(masters[0], held)
        assert torch.equal(average.averages[0], kept)
    assert torch.equal(masters[0], kept)
    assert torch.equal(average.averages[0], held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tied", "native"])
def test_whole_tensors_under_the_models_names(checkpoints, tmp_path, name, dtype):
    kit = tiny.make_kit(checkpoints[name], dtype=dtype)
    backend = backend_of(kit)
    plan = plan_of(kit, mini_batches=2)
    trained = {n for n, p in kit.policy.named_model_parameters() if p.requires_grad}
    wanted = {n: t.detach().double() for n, t in backend.parameters()}
    for n in range(1, 4):
        backend.update(plan, 5 * n)
    assert not any(t.requires_grad for _, t in backend.ema_parameters())
    found = dict(backend.ema_parameters())
    now = dict(backend.parameters())
    assert list(found) == list(now)
    moved = {n for n, t in found.items() if not torch.equal(t, now[n])}
    assert moved <= trained
    assert len(moved) > len(trained) / 2
    for n, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (now[n].dtype, now[n].shape)
        behind = (tensor.double() - wanted[n]).norm() < (now[n].double() - wanted[n]).norm()
        assert behind or n not in moved


def test_it_is_the_average_of_the_weights_after_each_optimizer_step(checkpoints):
    kit = tiny.make_kit(checkpoints["small"])
    backend, plan = backend_of(kit), plan_of(kit)
    wanted = {n: t.detach().double() for n, t in backend.parameters()}
    for n in range(1, 6):
        backend.update(plan, 5 * n)
        now = dict(backend.parameters())
        wanted = {n: DECAY * w + (1 - DECAY) * now[n].double() for n, w in wanted.items()}
    for n, tensor in backend.ema_parameters():
        torch.testing.assert_close(tensor.double(), wanted[n], rtol=1e-5, atol=1e-7)


def test_it_moves_where_weights_are_bfloat16(checkpoints):
    """Steps far below bfloat16's resolution: an average of the weights themselves, kept as they are, stands still."""
    kit = tiny.make_kit(checkpoints["small"], dtype="bfloat16")
    backend, plan = backend_of(kit, lr=1e-5, max_grad_norm=None), plan_of(kit)
    assert backend._average is not None
    first = [a.clone() for a in backend._average.averages]
    naive = [p.detach().clone() for p in kit.policy.parameters()]
    for n in range(30):
        backend.update(plan, n + 1)
        for a, p in zip(naive, kit.policy.parameters(), strict=True):
            a.lerp_(p.detach(), 1 - DECAY)
    assert {a.dtype for a in backend._average.averages} == {torch.float32}
    shares = [float((a != b).float().mean()) for a, b in zip(backend._average.averages, first, strict=True)]
    assert min(shares) > 0.5
    still = [
        float((a.float() == b.to(torch.bfloat16).float()).float().mean()) for a, b in zip(naive, first, strict=True)
    ]
    assert max(still) > 0.9


def test_it_changes_nothing_about_training(checkpoints):
    losses = []
    for ema in (True, False):
        kit = tiny.make_kit(checkpoints["small"])
        backend, plan = backend_of(kit, ema=ema), plan_of(kit)
        losses.append([backend.update(plan, 5 * n).losses for n in (1, 2, 3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded_bit_for_bit(checkpoints, tmp_path, dtype):
    kit = tiny.make_kit(checkpoints["small"], dtype=dtype)
    backend, plan = backend_of(kit), plan_of(kit)
    backend.update(plan, 5)
    backend.save(tmp_path)
    other_kit = tiny.make_kit(checkpoints["small"], dtype=dtype)
    other = backend_of(other_kit)
    other.load(tmp_path)
    for b in (backend, other):
        b.update(plan, 10)
    assert backend._average is not None
    assert other._average is not None
    assert all(torch.equal(a, b) for a, b in zip(backend._average.averages, other._average.averages, strict=True))
    assert not torch.equal(backend._average.averages[0], backend._masters[0])


def test_a_checkpoint_without_it_is_refused_by_name(checkpoints, tmp_path):
    kit = tiny.make_kit(checkpoints["small"])
    backend_of(kit, ema=False).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"saved without trainer\.ema"):
        backend_of(kit).load(tmp_path)
    backend_of(kit).save(tmp_path)
    with pytest.raises(CheckpointError, match="other tensors"):
        backend_of(tiny.make_kit(checkpoints["tied"])).load(tmp_path)


def test_it_is_given_back_with_the_optimizer(checkpoints):
    kit = tiny.make_kit(checkpoints["small"])
    plain, averaging = backend_of(tiny.make_kit(checkpoints["small"]), ema=False), backend_of(kit)
    size = sum(a.nbytes for a in averaging._average.averages)
    assert averaging.state_bytes()["optimizer"] == plain.state_bytes()["optimizer"] + size
    assert averaging._gives == OffloadConfig()
    before = [a.clone() for a in averaging._average.averages]
    assert averaging.give_back() == size
    with pytest.raises(AssertionError, match="take_back"):
        next(averaging.ema_parameters())
    averaging.take_back()
    assert all(torch.equal(a, b) for a, b in zip(averaging._average.averages, before, strict=True))
