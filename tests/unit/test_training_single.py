"""Plain PyTorch backend: against torch.optim.AdamW on the plain model, divergence, bfloat16 masters, save and load."""

import math
from dataclasses import replace

import pytest
import torch

from skirl.config.schema import OffloadConfig, OptimConfig, ScheduleConfig
from skirl.errors import TrainingDiverged
from skirl.planning.schedule import make_plan
from skirl.records import Ratio, Sampling
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import PolicyObjective, SupervisedObjective
from skirl.training.offload import Offload
from skirl.training.rows import make_row
from tests import tiny

LENGTHS = (4, 1, 9, 6, 2)


def policy_backend(kit, **optim):
    objective = PolicyObjective(kit.sampling())
    return SingleBackend(kit.policy, objective, OptimConfig(**{"lr": 1e-3} | optim), total_prompts=100)


def bits(backend, directory):
    """Everything that a checkpoint holds, as bytes."""
    directory.mkdir(exist_ok=True)
    backend.save(directory)
    return (directory / "single.pt").read_bytes()


def state(backend, directory):
    directory.mkdir(exist_ok=True)
    backend.save(directory)
    return torch.load(directory / "single.pt", weights_only=True)


# -------------------------------------------------------------------------------------------------- against plain torch
def plain_steps(loaded, trained, made, optim, rates):
    """(losses, norms) of torch's AdamW on transformers' model, one unpadded sequence after another; token mean."""
    parameters = {name: p for name, p in loaded.model.named_parameters() if name in trained}
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    losses, norms = [], []
    for rate in rates:
        total = 0.0
        for sequence in made:
            loss = -tiny.plain_logprobs(loaded, sequence).sum() / sum(LENGTHS)
            loss.backward()
            total += loss.item()
        limit = math.inf if optim.max_grad_norm is None else optim.max_grad_norm
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), limit).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("name", ["tied", "untied", "native"])
def test_steps_equal_adamw_on_the_plain_model(checkpoints, name, max_grad_norm, record_property):
    """Three supervised steps with warm-up, decay and clipping; a large eps keeps rounding of tiny gradients small."""
    optim = OptimConfig(
        lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=max_grad_norm,
        schedule=ScheduleConfig(kind="linear", warmup=0.5),
    )  # fmt: skip
    kit = tiny.make_kit(checkpoints[name])
    start = {n: p.detach().clone() for n, p in kit.policy.named_model_parameters()}
    made = tiny.sequences(kit, LENGTHS, streams=False)
    backend = SingleBackend(kit.policy, SupervisedObjective(), optim, total_prompts=20)
    plan = make_plan(made, num_ranks=2, max_tokens=100, normalizer="token")
    reports = [backend.update(plan, 5 * n) for n in (1, 2, 3)]
    rates = [5e-3, 1e-2, 5e-3]
    assert [r.learning_rates[0] for r in reports] == pytest.approx(rates)

    plain = tiny.plain_model(checkpoints[name])
    losses, norms = plain_steps(plain, start.keys(), made, optim, rates)
    assert [r.losses[0] for r in reports] == pytest.approx(losses, rel=1e-5)
    assert [r.grad_norms[0] for r in reports] == pytest.approx(norms, rel=1e-4)
    assert losses[2] < losses[0]
    weights = dict(plain.model.named_parameters())
    moved = max(float((p - start[n]).detach().abs().max()) for n, p in kit.policy.named_model_parameters())
    difference = max(float((p - weights[n]).detach().abs().max()) for n, p in kit.policy.named_model_parameters())
    record_property(f"adamw_vs_plain/{name}/clip={max_grad_norm}", difference / moved)
    assert moved > 1e-3
    assert difference < 1e-3 * moved
    untouched = set(weights) - set(start)
    held = dict(kit.loaded.model.named_parameters())
    assert all(torch.equal(held[n], weights[n]) for n in untouched)


def test_the_norm_limit_scales_gradients(checkpoints):
    """Reported norms are from before clipping; with a large eps AdamW is linear in what is left after it."""
    moved = {}
    for limit in (None, 0.5, 1e6):
        kit = tiny.make_kit(checkpoints["tied"])
        before = torch.cat([p.detach().flatten() for p in kit.policy.parameters()])
        backend = SingleBackend(
            kit.policy, SupervisedObjective(), OptimConfig(lr=100.0, eps=1e3, max_grad_norm=limit), 100
        )
        report = backend.update(tiny.whole(tiny.sequences(kit, LENGTHS, streams=False)), 5)
        after = torch.cat([p.detach().flatten() for p in kit.policy.parameters()])
        moved[limit] = (report.grad_norms[0], float((after - before).norm()))
    norm = moved[None][0]
    assert norm > 0.5
    assert moved[0.5][0] == moved[1e6][0] == norm
    assert moved[1e6][1] == moved[None][1]
    assert moved[0.5][1] / moved[None][1] == pytest.approx(0.5 / norm, rel=1e-2)


# ----------------------------------------------------------------------------------------------------------- divergence
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "dtype"), [("tied", "float32"), ("native", "float32"), ("tied", "bfloat16")])
def test_divergence_leaves_weights_and_optimizer_bit_for_bit(checkpoints, tmp_path, name, dtype, bad):
    kit = tiny.make_kit(checkpoints[name], dtype=dtype)
    backend = policy_backend(kit)
    made = [replace(s, old_logprobs=None) for s in tiny.sequences(kit, LENGTHS)]
    good = tiny.cut(tiny.whole(made), [[[0, 1], [2], [3, 4]]])
    backend.update(good, 5)
    before = bits(backend, tmp_path / "before")
    advantages = made[2].advantages.copy()
    advantages[3] = bad  # one token of the second of three micro-batches
    poisoned = replace(good, sequences=(*made[:2], replace(made[2], advantages=advantages), *made[3:]))
    with pytest.raises(
        TrainingDiverged, match=r"optimizer step 0 after version 1: .* not finite; weights and optimizer"
    ):
        backend.update(poisoned, 10)
    assert bits(backend, tmp_path / "after") == before
    assert all(p.grad is None for p in kit.policy.parameters())

    losses = backend.update(good, 10).losses  # and what follows is what it would have been
    kit = tiny.make_kit(checkpoints[name], dtype=dtype)
    other = policy_backend(kit)
    assert [other.update(good, n).losses for n in (5, 10)][1] == losses


def test_a_gradient_that_is_not_finite_is_noticed_where_the_loss_is_finite(checkpoints):
    kit = tiny.make_kit(checkpoints["tied"])
    backend = policy_backend(kit)
    norm = kit.policy.language_model.norm.weight
    hook = norm.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), math.inf))
    before = {n: p.detach().clone() for n, p in kit.policy.named_parameters()}
    plan = tiny.whole(tiny.sequences(kit, LENGTHS))
    try:
        second = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-3), 100)
        with pytest.raises(TrainingDiverged, match=r"loss [\d.]+ or a gradient is not finite"):
            second.update(plan, 5)
    finally:
        hook.remove()
    assert all(torch.equal(before[n], p) for n, p in kit.policy.named_parameters())
    assert backend.policy_version == 0


# ------------------------------------------------------------------------------------------------------------- bfloat16
def test_bfloat16_weights_move_as_their_float32_masters_do(checkpoints, tmp_path, record_property):
    """200 steps, each 1e-4 of a weight's size: below bfloat16's resolution of 4e-3, where nothing moves by itself."""
    half, whole = (tiny.make_kit(checkpoints["small"], dtype=d) for d in ("bfloat16", "float32"))
    name = "language_model.layers.0.mlp.up_proj.weight"
    start = half.policy.get_parameter(name).detach().float().clone()
    with torch.no_grad():
        for p, q in zip(whole.policy.parameters(), half.policy.parameters(), strict=True):
            p.copy_(q)
    optim = OptimConfig(lr=1e-4 * float(start.abs().mean()), max_grad_norm=None)
    plan = tiny.whole(tiny.sequences(half, (6, 6), streams=False))
    backends = [SingleBackend(k.policy, SupervisedObjective(), optim, 1000) for k in (half, whole)]
    naive = torch.nn.Parameter(start.to(torch.bfloat16))
    naive_optimizer = torch.optim.AdamW([naive], lr=optim.lr, betas=optim.betas, weight_decay=0.0)
    for n in range(200):
        for backend in backends:
            backend.update(plan, n + 1)
        naive.grad = torch.ones_like(naive)
        naive_optimizer.step()

    masters = dict(
        zip([n for n, _ in half.policy.named_parameters()], state(backends[0], tmp_path)["masters"], strict=True)
    )
    rounded = half.policy.get_parameter(name).detach().float()
    assert torch.equal(rounded, masters[name].to(torch.bfloat16).float())
    wanted = whole.policy.get_parameter(name).detach() - start
    got = masters[name] - start
    correlation = float(torch.corrcoef(torch.stack([wanted.flatten(), got.flatten()]))[0, 1])
    record_property("bf16_masters_correlation", correlation)
    large = start.abs() > start.abs().mean()
    share = float(((rounded - start)[large].abs() > 0).float().mean())
    record_property("bf16_share_moved", share)
    assert correlation > 0.95
    assert float(wanted.abs().mean()) > 100 * optim.lr
    assert share > 0.8
    assert torch.equal(naive.detach().float()[large], start[large])


def test_many_micro_batches_of_bfloat16_weights_add_up(checkpoints):
    """A sum in bfloat16 stands still once what is added is below 1/256 of it."""
    kit = tiny.make_kit(checkpoints["small"], dtype="bfloat16")
    one = tiny.sequences(kit, (4,), streams=False)[0]
    norms = []
    for count in (1, 384):
        copies = [replace(one, id=f"{one.id}{n}") for n in range(count)]
        plan = make_plan(copies, num_ranks=1, max_tokens=one.num_tokens, normalizer="token")
        assert len(plan.steps[0].ranks[0]) == count
        backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-12), 10)
        norms += backend.update(plan, 1).grad_norms
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


# -------------------------------------------------------------------------------------------------------- save and load
@pytest.mark.parametrize(
    ("name", "dtype"), [("tied", "float32"), ("untied", "bfloat16"), ("native", "float32"), ("native", "bfloat16")]
)
def test_what_is_loaded_goes_on_bit_for_bit(checkpoints, tmp_path, name, dtype):
    kit = tiny.make_kit(checkpoints[name], dtype=dtype)
    backend = policy_backend(kit, schedule=ScheduleConfig(kind="cosine"))
    plan = tiny.whole(tiny.sequences(kit, LENGTHS), mini_batches=2, epochs=2)
    backend.update(plan, 5)
    backend.save(tmp_path)
    wanted = [backend.update(plan, 5 * n) for n in (2, 3)]

    fresh_kit = tiny.make_kit(checkpoints[name], dtype=dtype)
    fresh = policy_backend(fresh_kit, schedule=ScheduleConfig(kind="cosine"))
    fresh.load(tmp_path)
    got = [fresh.update(plan, 5 * n) for n in (2, 3)]
    assert [r.losses for r in got] == [r.losses for r in wanted]
    assert [r.grad_norms for r in got] == [r.grad_norms for r in wanted]
    assert [r.policy_version for r in got] == [2, 3]
    assert len(got[0].losses) == 4
    weights = dict(kit.policy.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in fresh_kit.policy.named_parameters())


# -------------------------------------------------------------------------------------------------------------- reports
def test_report_sums_over_micro_batches_and_steps(checkpoints):
    kit = tiny.make_kit(checkpoints["tied"])
    made = tiny.sequences(kit, LENGTHS)
    plan = tiny.whole(made, mini_batches=2)
    metrics = policy_backend(kit).update(plan, 5).metrics
    assert {m.denominator for m in metrics.values()} == {float(sum(LENGTHS))}
    kit = tiny.make_kit(checkpoints["tied"])
    apart = policy_backend(kit, lr=1e-30).update(tiny.alone(tiny.whole(made)), 5).metrics
    kit = tiny.make_kit(checkpoints["tied"])
    together = policy_backend(kit, lr=1e-30).update(tiny.whole(made), 5).metrics
    assert apart.keys() == together.keys() >= {"policy/clip_fraction", "policy/entropy", "policy/kl_reference"}
    for name in together:
        assert apart[name].value == pytest.approx(together[name].value, rel=1e-5), name


def test_logprobs_are_taken_without_gradient_under_the_objectives_distribution(checkpoints):
    kit = tiny.make_kit(checkpoints["tied"])
    made = tiny.sequences(kit, LENGTHS)
    plan = make_plan(made, num_ranks=2, max_tokens=60, normalizer="token")
    found = {}
    for temperature in (1.0, 0.5):
        objective = PolicyObjective(Sampling(temperature=temperature))
        found[temperature] = SingleBackend(kit.policy, objective, OptimConfig(), 10).logprobs(plan)
    assert sorted(found[1.0]) == list(range(len(LENGTHS)))
    assert not any(x.requires_grad for x in found[1.0].values())
    assert (found[1.0][2] - found[0.5][2]).abs().max() > 0.5
    backend = SingleBackend(kit.policy, PolicyObjective(Sampling()), OptimConfig(), 10)
    given = backend.logprobs(plan, Sampling(temperature=0.5))
    assert all(torch.equal(given[i], found[0.5][i]) for i in given)


@pytest.mark.parametrize("name", ["tied", "native"])
def test_evaluation_is_the_update_that_does_not_happen(checkpoints, tmp_path, name):
    kit = tiny.make_kit(checkpoints[name])
    backend = policy_backend(kit)
    plan = replace(tiny.alone(tiny.whole(tiny.sequences(kit, LENGTHS))), kl_coef=0.1)
    before = bits(backend, tmp_path / "before")
    found = backend.evaluate(plan)
    assert bits(backend, tmp_path / "after") == before
    assert all(p.grad is None for p in kit.policy.parameters())
    report = backend.update(plan, 5)
    assert found.pop("loss") == Ratio(pytest.approx(report.losses[0], rel=1e-6), 1.0)
    assert found.keys() == report.metrics.keys()
    for metric, ratio in found.items():
        assert ratio.denominator == report.metrics[metric].denominator == sum(LENGTHS), metric
        assert ratio.value == pytest.approx(report.metrics[metric].value, rel=1e-5, abs=1e-9), metric


def test_evaluation_of_nothing_is_nothing(checkpoints):
    backend = policy_backend(tiny.make_kit(checkpoints["small"]))
    plan = make_plan([], num_ranks=2, max_tokens=10, normalizer="token")
    assert backend.evaluate(plan) == {"loss": Ratio(0.0, 1.0)}


# -------------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("name", ["tied", "native"])
def test_gathered_tensors_are_the_models_own_memory(checkpoints, name):
    kit = tiny.make_kit(checkpoints[name])
    backend = policy_backend(kit)
    specs = backend.specs()
    state = kit.loaded.model.state_dict()
    with backend.gathered([s.name for s in specs]) as tensors:
        assert list(tensors) == [s.name for s in specs]
        for spec in specs:
            tensor = tensors[spec.name]
            assert tensor.data_ptr() == state[spec.name].data_ptr()
            assert (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")
            assert not tensor.requires_grad
    whole = dict(backend.parameters())
    assert list(whole) == [n for n, _ in kit.policy.named_model_parameters()]
    assert {s.name for s in specs if s.trained} == {n for n in whole if kit.loaded.model.get_parameter(n).requires_grad}
    with pytest.raises(KeyError, match=r"no\.such"), backend.gathered(["no.such"]):
        pass


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_that_went_away_and_came_back_is_bit_for_bit_the_same(checkpoints, tmp_path, dtype):
    plan = tiny.whole(tiny.sequences(tiny.make_kit(checkpoints["tied"]), LENGTHS), mini_batches=2)
    stay, leave = (policy_backend(tiny.make_kit(checkpoints["tied"], dtype=dtype)) for _ in range(2))
    assert leave.give_back() == leave.take_back() == leave.state_bytes()["masters"]  # no optimizer state yet
    for n in (1, 2, 3):
        assert leave.update(plan, 5 * n).losses == stay.update(plan, 5 * n).losses
        held = leave.state_bytes()
        logprobs = leave.logprobs(plan)
        moved = leave.give_back()
        assert moved == held["optimizer"] + held["masters"] > 0
        assert leave.give_back() == 0
        assert leave.state_bytes() == {**held, "optimizer": 0, "masters": 0}
        assert all(torch.equal(x, logprobs[i]) for i, x in leave.logprobs(plan).items())
        for refused in (lambda: leave.update(plan, 5), lambda: leave.save(tmp_path), lambda: leave.load(tmp_path)):
            with pytest.raises(AssertionError, match="take_back"):
                refused()
        assert leave.take_back() == moved
        assert leave.take_back() == 0
        assert leave.state_bytes() == held
    assert bits(leave, tmp_path / "leave") == bits(stay, tmp_path / "stay")
    num_bytes = sum(p.numel() for p in leave.policy.parameters()) * 4
    assert held["masters"] == (num_bytes if dtype == "bfloat16" else 0)
    assert 2 * num_bytes < held["optimizer"] < 2 * num_bytes + 1000  # two moments, and counters of steps


def test_what_is_given_back_follows_the_recipe(checkpoints):
    kit = tiny.make_kit(checkpoints["small"], dtype="bfloat16")
    offload = OffloadConfig(optimizer=False, gradients=True)
    backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(), 10, offload=offload)
    backend.update(tiny.whole(tiny.sequences(kit, LENGTHS, streams=False)), 1)
    kit.policy(*row_of(kit))[0].sum().backward()
    assert backend.state_bytes()["gradients"] == backend.state_bytes()["weights"]
    held = backend.state_bytes()["optimizer"]
    assert backend.give_back() == 0
    assert backend.state_bytes()["gradients"] == 0
    assert backend.state_bytes()["optimizer"] == held > 0


def row_of(kit):
    plan = tiny.whole(tiny.sequences(kit, LENGTHS))
    return make_row(plan, plan.steps[0].ranks[0][0], kit.policy.device)[0], Sampling()


def test_views_of_what_went_away_still_see_it_when_it_is_back():
    whole = torch.arange(10.0)
    view, other, scratch = whole[2:5], torch.ones(3), torch.zeros(7)
    offload = Offload(torch.device("cpu"), buffer_bytes=16)
    assert offload.give([whole, view, other], scratch=[scratch]) == 40 + 12
    assert offload.is_away
    assert {t.untyped_storage().nbytes() for t in (whole, other, scratch)} == {0}
    assert offload.take() == 52
    assert not offload.is_away
    assert whole.tolist() == list(range(10))
    assert view.tolist() == [2.0, 3.0, 4.0]
    assert other.tolist() == [1.0] * 3
    assert scratch.shape == (7,)
    assert scratch.untyped_storage().nbytes() == 28
    whole[3] = -1.0
    assert view.tolist() == [2.0, -1.0, 4.0]


def test_host_buffers_are_used_again():
    tensor, offload = torch.arange(1000.0), Offload(torch.device("cpu"))
    addresses = set()
    for _ in range(3):
        offload.give([tensor])
        addresses |= {host.data_ptr() for _, hosts in offload._away for host in hosts}
        offload.take()
    assert len(addresses) == 1
