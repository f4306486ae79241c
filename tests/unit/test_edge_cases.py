"""What rewards do to a group in practice, from the user's parts to what each token earns: pitfalls 3, 5, 10 and 11."""

import math

import numpy as np
import pytest

from skirl.config.algorithms import Advantage
from skirl.config.combinations import advantages
from skirl.config.method import MethodConfig
from skirl.config.rewards import RewardConfig
from skirl.errors import RewardError
from skirl.measure import measure
from skirl.protocols import Collected
from skirl.records import Group, Prompt, Rollout, Sampling, ScoredGroup, ScoreFailure, UpdateReport
from skirl.rewards.combine import combine
from skirl.rewards.policy import apply_failures
from skirl.step import Method
from skirl.testing.fake_trainer import FakeTrainer
from skirl.tracking.metrics import finish

FAILED = ScoreFailure("raised", "KeyError: 'answer'")
EVERY = [a for a in advantages() if a.kind != "gdpo"]
ids = [f"{a.kind}{getattr(a, 'gamma', '')}" for a in EVERY]


def group(results, lengths=None, name="a", **weights) -> ScoredGroup:
    """A group whose samples were given these parts (or failures) by reward functions; of 2 action tokens."""
    lengths = [2] * len(results) if lengths is None else lengths
    rollouts = tuple(
        Rollout(
            name,
            i,
            np.array([1, 2, 3]),
            np.full(n, 10 + i),
            np.full(n, -1.5, np.float32),
            np.zeros(n, np.int64),
            "stop" if n else "length",
            "",
        )
        for i, n in enumerate(lengths)
    )
    prompt = Prompt(name, "made", (1, 2, 3), (1, 2, 3), (), None, None, None, {})
    parts = [{"r": r} if isinstance(r, float) else r for r in results]
    return ScoredGroup(Group(prompt, rollouts, Sampling(max_new_tokens=16)), combine(parts, weights).scores)


def kept(*groups, **settings):
    config = RewardConfig.model_validate({"terms": {"x": "accuracy"}, "max_failure_rate": 0.9} | settings)
    return apply_failures(groups, config).groups


def prepared(groups, advantage: Advantage | str = "group_norm", **config):
    how = advantage if isinstance(advantage, str) else advantage.model_dump()
    settings = MethodConfig.model_validate({"kl": None, "advantage": how} | config)
    method = Method(settings, placeholder_id=None, max_scoring_tokens=400)
    batch = method.prepare(groups, FakeTrainer())
    return batch, method.plan(batch, num_ranks=2, max_tokens=64)


def credit(batch):
    return {s.id: s.advantages.tolist() for s in batch.sequences}


def check_whole(groups, batch, plan):
    """Everything is finite, and so is what comes of it."""
    for sequence in batch.sequences:
        assert np.isfinite(sequence.advantages).all()
        assert len(sequence.advantages) == sequence.num_actions
    assert all(np.isfinite(w).all() for w in plan.weights)
    report = FakeTrainer(num_ranks=2).update(plan, 1)
    assert np.isfinite(report.losses).all()
    values = finish(measure(Collected(0, groups, groups, 1.0), batch, UpdateReport(1, (1.0,), (1.0,), (1.0,), {}, 1.0)))
    assert all(math.isfinite(v) for name, v in values.items() if name.startswith("advantage/"))


# -------------------------------------------------------------------------------------------------- one failure of many
@pytest.mark.parametrize("advantage", EVERY, ids=ids)
def test_one_failed_reward_costs_that_sample_alone(advantage):
    """Its siblings are compared as if it had never been sampled, and the other groups do not notice."""
    parts = [1.0, 0.0, 0.5, 2.0]
    lost = kept(group([*parts[:2], FAILED, *parts[2:]]), group(parts, name="b"))
    never = kept(group(parts), group(parts, name="b"))
    found, expected = (credit(prepared(g, advantage)[0]) for g in (lost, never))
    assert [found[f"a#{i}"] for i in (0, 1, 3, 4)] == [expected[f"a#{i}"] for i in range(4)]
    assert [found[f"b#{i}"] for i in range(4)] == [expected[f"b#{i}"] for i in range(4)]
    assert "a#2" not in found
    check_whole(lost, *prepared(lost, advantage))


def test_a_failure_can_cost_the_group_or_the_run():
    broken, whole = group([1.0, FAILED, 0.0]), group([1.0, 0.0], name="b")
    assert [g.group.prompt.id for g in kept(broken, whole, on_failure="drop_group")] == ["b"]
    with pytest.raises(RewardError, match=r"reward.on_failure is stop, (.|\n)*a#1: raised: KeyError: 'answer'"):
        kept(broken, whole, on_failure="stop")
    with pytest.raises(RewardError, match=r"1 of 5 samples .* 20.0%, above reward.max_failure_rate = 0.1"):
        kept(broken, whole, max_failure_rate=0.1)


@pytest.mark.parametrize("advantage", EVERY, ids=ids)
def test_a_group_of_one_that_is_left_learns_nothing_from_itself(advantage):
    groups = kept(group([FAILED, 3.0, FAILED]), group([1.0, 0.0, 0.5, 0.25, 0.75], name="b"))
    batch, plan = prepared(groups, advantage)
    check_whole(groups, batch, plan)
    if advantage.kind in ("group_norm", "group_mean", "leave_one_out", "max_rl", "pass_at_k", "opo"):
        assert credit(batch)["a#1"] == [0.0, 0.0]


# --------------------------------------------------------------------------------------------------------- score parts
def test_differing_score_parts_weigh_nothing_where_some_lack_them():
    """Samples of one group are compared by what all of them have; the others by all."""
    uneven = group([{"x": 1.0, "bonus": 100.0}, {"x": 0.0}, {"x": 0.5, "bonus": None}])
    even = group([{"x": 1.0, "bonus": 100.0}, {"x": 0.0, "bonus": 0.0}], name="b")
    assert [s.total for s in uneven.scores] == [1.0, 0.0, 0.5]
    assert uneven.scores[0].parts == {"x": 1.0, "bonus": 100.0}, "logged all the same"
    found = credit(prepared(kept(uneven, even), "group_mean")[0])
    assert [found[f"a#{i}"][0] for i in range(3)] == pytest.approx([0.5, -0.5, 0.0])
    assert [found[f"b#{i}"][0] for i in range(2)] == pytest.approx([50.5, -50.5])


def test_parts_that_nobody_shares_are_a_failure_of_each():
    nothing = group([{"x": 1.0}, {"y": 1.0}])
    assert {s.failure.kind for s in nothing.scores} == {"bad_type"}
    assert kept(nothing, group([1.0, 0.0], name="b"), max_failure_rate=1.0)[0].group.prompt.id == "b"


def test_gdpo_takes_parts_apart_and_leaves_out_what_a_group_does_not_share():
    uneven = group([{"x": 1.0, "bonus": 1e6}, {"x": 0.0}])
    whole = group([{"x": 0.0, "bonus": 0.0}, {"x": 1.0, "bonus": 1e6}], name="b")
    groups = kept(uneven, whole)
    batch, plan = prepared(groups, "gdpo")
    check_whole(groups, batch, plan)
    found = credit(batch)
    assert found["a#0"][0] == pytest.approx(-found["a#1"][0])
    assert found["b#1"][0] == pytest.approx(2 * found["a#0"][0], rel=1e-5), "a part of 1e6 counts as one of 1"


# ------------------------------------------------------------------------------------------------------ empty responses
@pytest.mark.parametrize("advantage", EVERY, ids=ids)
@pytest.mark.parametrize("lengths", [(0, 3, 2), (0, 0, 0), (1, 0, 0)])
def test_an_empty_response_counts_in_its_group_and_carries_no_loss(advantage, lengths):
    groups = kept(group([0.0, 1.0, 0.5], lengths), group([1.0, 0.0], name="b"))
    batch, plan = prepared(groups, advantage)
    check_whole(groups, batch, plan)
    assert len(credit(batch)["a#0"]) == lengths[0]
    filled = sum(n > 0 for n in lengths) + 2
    assert sum(plan.sequence_weights) == pytest.approx(1.0)
    assert sum(float(w.sum()) for w in plan.weights) == pytest.approx(1.0)
    assert sum(s.num_actions > 0 for s in plan.sequences) == filled
    if advantage.kind == "group_mean" and lengths == (0, 3, 2):
        assert credit(batch)["a#1"] == pytest.approx([0.5] * 3), "the empty one is a sibling"


@pytest.mark.parametrize(
    "config", [{"correction": "sequence_mask"}, {"policy_loss": "kl_cov"}, {"policy_loss": "clip_cov"}]
)
def test_streams_of_an_empty_response_are_empty(config):
    groups = kept(group([0.0, 1.0], (0, 3)))
    batch, plan = prepared(groups, **config)
    check_whole(groups, batch, plan)
    empty = plan.sequences[0]
    for stream in (empty.old_logprobs, empty.rollout_logprobs, empty.corrections, empty.selected):
        assert stream is None or len(stream) == 0
    nothing = kept(group([0.0, 1.0], (0, 0)))
    check_whole(nothing, *prepared(nothing, **config))


# -------------------------------------------------------------------------------------------------- equal, huge and NaN
@pytest.mark.parametrize("advantage", EVERY, ids=ids)
@pytest.mark.parametrize("value", [0.7, 0.1 + 0.2, 1e6, 1e-9, 0.0])
def test_eight_equal_rewards_teach_exactly_nothing(advantage, value):
    groups = kept(group([value] * 8))
    batch, plan = prepared(groups, advantage)
    check_whole(groups, batch, plan)
    if advantage.kind in ("reinforce", "gae"):
        return  # they have no baseline of the group
    assert all(not any(a) for a in credit(batch).values())


def test_rewards_that_are_equal_up_to_rounding_teach_exactly_nothing():
    """0.1 + 0.2 is not 0.3: a part summed in another order must not become an advantage of 0.9."""
    parts = [{"x": 0.1, "y": 0.2}, {"x": 0.3, "y": 0.0}, {"x": 0.2, "y": 0.1}]
    groups = kept(group(parts))
    assert len({s.total for s in groups[0].scores}) > 1
    for advantage in EVERY:
        if advantage.kind not in ("reinforce", "gae", "reinforce_pp"):
            assert all(not any(a) for a in credit(prepared(groups, advantage)[0]).values()), advantage.kind


@pytest.mark.parametrize("advantage", EVERY, ids=ids)
def test_rewards_of_a_million_keep_their_digits(advantage):
    """Against small ones beside them, and with differences of 1 between them."""
    groups = kept(group([1e6, 1e6 + 1, 1e6 + 2, 0.0]), group([1.0, 0.0, 0.5, 0.25], name="b"))
    batch, plan = prepared(groups, advantage)
    check_whole(groups, batch, plan)
    close = kept(group([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3]))
    small = kept(group([0.0, 1.0, 2.0, 3.0]))
    if advantage.kind in ("group_norm", "group_mean", "leave_one_out", "opo", "reinforce_pp_baseline"):
        found, expected = (credit(prepared(g, advantage)[0]) for g in (close, small))
        assert all(found[name] == pytest.approx(expected[name], abs=1e-6) for name in expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_is_a_typed_failure_and_never_a_number(bad):
    scored = group([1.0, bad, 0.0])
    assert scored.scores[1].total is None
    assert scored.scores[1].failure.kind == "not_finite"
    groups = kept(scored)
    batch, plan = prepared(groups)
    check_whole(groups, batch, plan)
    assert credit(batch).keys() == {"a#0", "a#2"}


def test_parts_that_overflow_together_are_a_typed_failure():
    scored = group([{"x": 1e308, "y": 1e308}, {"x": 1.0, "y": 1.0}])
    assert scored.scores[0].failure.kind == "not_finite"
    assert scored.scores[1].total == 2.0
