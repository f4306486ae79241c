"""The gradient of an optimizer step does not depend on the split into micro-batches, packs and ranks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.config.algorithms import PPOClip
from skirl.config.schema import OptimConfig
from skirl.planning.schedule import make_plan
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import PolicyObjective
from tests import tiny

LENGTHS = (4, 9, 1, 6, 12, 3, 7)
NORMALIZERS = ("token", "sequence", "constant")
TOLERANCE = 1e-5

SPLITS = {
    "7x1, 1 rank": [[[i] for i in range(7)]],
    "3+4, 1 rank": [[[0, 1, 2], [3, 4, 5, 6]]],
    "3+4, 2 ranks": [[[0, 1, 2]], [[3, 4, 5, 6]]],
    "2 ranks, 2 each": [[[6, 0], [1]], [[2, 5], [4, 3]]],
    "4 ranks": [[[0, 1]], [[2, 3]], [[4, 5]], [[6]]],
    "4 ranks, 2 each, one empty": [[[0], [4]], [[1], [5]], [[2], [6]], [[3], []]],
}


def backend_of(kit, **changes):
    """A backend whose steps change nothing that float32 can see."""
    clip = PPOClip(low=0.2, high=0.28, dual=3.0)
    objective = PolicyObjective(kit.sampling(temperature=0.8), clip, kl_estimator="k3", entropy_coef=0.2)
    return SingleBackend(kit.policy, objective, OptimConfig(lr=1e-30, max_grad_norm=None), total_prompts=1)


def gradient(backend, plan):
    """(gradient by parameter, report) of the plan's one optimizer step, with a KL in the loss."""
    plan = replace(plan, kl_coef=0.3)
    with tiny.GradientTap(backend.policy) as tap:
        report = backend.update(plan, 1)
    assert len(report.losses) == 1
    return tap.sums, report


def norm(sums):
    return float(sum(g.double().square().sum() for g in sums.values()) ** 0.5)


@pytest.fixture(scope="module", params=["tied", "native"])
def backend(request, checkpoints):
    kit = tiny.make_kit(checkpoints[request.param])
    return kit, backend_of(kit)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_seven_sequences(backend, normalizer, request, record_property):
    kit, single = backend
    plan = tiny.whole(tiny.sequences(kit, LENGTHS), normalizer)
    wanted, report = gradient(single, plan)
    assert report.grad_norms[0] == pytest.approx(norm(wanted), rel=1e-5)
    assert norm(wanted) > 1e-3
    worst = 0.0
    for ranks in SPLITS.values():
        found, other = gradient(single, tiny.cut(plan, ranks))
        worst = max(worst, tiny.relative_difference(wanted, found))
        assert other.losses[0] == pytest.approx(report.losses[0], rel=1e-5)
    record_property(f"split_invariance/{'speech' if kit.is_audio else 'text'}/{normalizer}", worst)
    assert worst < TOLERANCE


def test_every_stream_and_weight_is_part_of_that_gradient(backend):
    """So that the test above can fail: the terms and normalisers give different gradients."""
    kit, single = backend
    made = tiny.sequences(kit, LENGTHS)
    found = {n: gradient(single, tiny.whole(made, n))[0] for n in NORMALIZERS}
    assert min(tiny.relative_difference(found["token"], found[n]) for n in NORMALIZERS[1:]) > 0.1
    plain = SingleBackend(
        kit.policy, PolicyObjective(kit.sampling(), PPOClip()), OptimConfig(lr=1e-30, max_grad_norm=None), 1
    )
    assert tiny.relative_difference(found["token"], gradient(plain, tiny.whole(made))[0]) > 0.1


@pytest.fixture(scope="module")
def small(checkpoints):
    """The smallest text model, one sequence of each length, and the gradient of every subset is made anew."""
    kit = tiny.make_kit(checkpoints["small"])
    return kit, backend_of(kit), tiny.sequences(kit, LENGTHS)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    members=st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(50, 300),
    normalizer=st.sampled_from(NORMALIZERS),
)
def test_any_plan_of_any_batch(small, members, num_ranks, max_tokens, normalizer):
    """Plans as the planner makes them, for every cap and number of ranks, against each sequence alone."""
    _, single, made = small
    batch = [made[i] for i in members]
    length = 7 if normalizer == "constant" else None
    plan = make_plan(batch, num_ranks=num_ranks, max_tokens=max_tokens, normalizer=normalizer, constant_length=length)
    wanted, _ = gradient(single, tiny.alone(plan))
    found, _ = gradient(single, plan)
    assert tiny.relative_difference(wanted, found) < TOLERANCE
