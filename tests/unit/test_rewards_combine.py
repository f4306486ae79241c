"""Totals of a group, spread of its parts, and what failures do to a step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl.algorithms.advantages import group_mean
from skirl.config.algorithms import GroupMean
from skirl.config.schema import RewardConfig
from skirl.errors import RewardError
from skirl.records import Ratio, Score, ScoredGroup, ScoreFailure
from skirl.rewards.combine import combine, in_group_spread, without_spread
from skirl.rewards.policy import Dropped, apply_failures
from skirl.testing.reward_samples import make_group

FAILED = ScoreFailure("timeout", "reward took longer than reward.timeout_s = 1 s", "stack line 1\nstack line 2")

values = st.floats(-1e6, 1e6)
parts = st.dictionaries(st.sampled_from("abcd"), st.none() | values, min_size=1)
results = st.lists(parts | st.just(FAILED), min_size=1, max_size=8)
weights = st.dictionaries(st.sampled_from("abc"), st.floats(-10, 10))


def totals(combined):
    return [score.total for score in combined.scores]


def test_worked_example():
    combined = combine([{"a": 1.0, "b": 0.5}, {"b": 0.25, "a": 0.0}, FAILED], {"a": 2.0})
    assert totals(combined) == [2.5, 0.25, None]
    assert combined.scores[0].parts == {"a": 1.0, "b": 0.5}  # unweighted
    assert combined.scores[2].failure is FAILED
    assert combined.partial == {}


def test_only_shared_parts_count_and_the_others_are_kept():
    combined = combine([{"a": 1.0, "x": 5.0}, {"a": 2.0}, FAILED, {"a": 3.0, "x": 7.0, "y": 1.0}], {})
    assert totals(combined) == [1.0, 2.0, None, 3.0]
    assert combined.scores[3].parts == {"a": 3.0, "x": 7.0, "y": 1.0}
    assert combined.shared == ("a",)
    assert combined.partial == {"x": (0, 3), "y": (3,)}


def test_none_is_neutral_and_not_reported():
    combined = combine([{"a": 1.0, "k": None}, {"a": 2.0, "k": 0.5}], {})
    assert totals(combined) == [1.0, 2.0]
    assert combined.partial == {}
    assert combined.scores[0].parts == {"a": 1.0}
    assert totals(combine([{"k": None}, {"k": 0.5}], {})) == [0.0, 0.0]


def test_nothing_shared_is_a_failure_of_every_scored_sample():
    combined = combine([{"a": 1.0}, {"b": 2.0}, FAILED], {})
    assert totals(combined) == [None, None, None]
    assert [score.failure.kind for score in combined.scores] == ["bad_type", "bad_type", "timeout"]
    assert combined.scores[0].failure.message == (
        "no part is common to all 2 scored samples of the group (sample 0: a; sample 1: b); "
        "return the same part names for each sample, with None for a part that does not apply"
    )


def test_a_sum_out_of_range_is_a_failure():
    [score] = combine([{"a": 1e300, "b": 1.0}], {"a": 1e300}).scores
    assert score.failure.kind == "not_finite"
    assert score.failure.message == "the weighted sum of the parts is not finite: 1e+300 * a = 1e+300, 1 * b = 1"


def test_scores_of_turns_sum_to_the_total():
    given_parts = {"turns": (1.0, 0.5, 0.25), "style": 2.0}
    [score] = combine([given_parts], {"turns": 2.0, "style": 0.5}).scores
    assert score.total == 2.0 * 1.75 + 0.5 * 2.0
    assert score.turns == (2.0, 1.0, 0.5 + 1.0)  # what judges the whole response pays its end
    assert score.parts == {"turns": 1.75, "style": 2.0}


def test_several_parts_by_turn_add_up_and_count_only_where_all_have_them():
    both = {"turns": (1.0, 0.0), "judge/turns": (0.0, 3.0), "a": 1.0}
    scores = combine([both, {**both, "turns": None}], {}).scores
    assert [score.turns for score in scores] == [(0.0, 4.0), (0.0, 4.0)]
    assert [score.total for score in scores] == [4.0, 4.0]
    scores = combine([both, {"a": 1.0}], {}).scores
    assert [(score.total, score.turns) for score in scores] == [(1.0, ()), (1.0, ())]


@pytest.mark.parametrize("turns", [(1e308, 1e308), (1e308, -1e308)])
def test_turns_out_of_range_are_a_failure(turns):
    [score] = combine([{"turns": turns}], {"turns": 100.0}).scores
    assert score.failure.kind == "not_finite"
    assert score.turns == ()


@given(st.lists(values, min_size=1, max_size=9), values, values)
def test_turns_sum_to_the_total_whatever_they_are(turns, other, weight):
    [score] = combine([{"turns": tuple(turns), "other": other}], {"turns": weight}).scores
    scale = max(abs(weight) * max(map(abs, turns)), abs(other), 1.0)
    assert math.fsum(score.turns) == pytest.approx(score.total, abs=1e-12 * scale)
    assert list(score.turns[:-1]) == [weight * turn for turn in turns[:-1]]


@given(results, weights, st.randoms())
def test_totals_do_not_depend_on_order(given_results, given_weights, chance):
    order = list(range(len(given_results)))
    chance.shuffle(order)
    shuffled = [given_results[index] for index in order]
    shuffled = [dict(reversed(item.items())) if isinstance(item, dict) else item for item in shuffled]
    straight, mixed = combine(given_results, given_weights), combine(shuffled, given_weights)
    assert totals(mixed) == [totals(straight)[index] for index in order]  # exactly


@given(parts, weights, st.integers(2, 8))
def test_equal_parts_give_exactly_equal_totals(one, given_weights, count):
    scores = combine([dict(one) for _ in range(count)], given_weights).scores
    assert len({score.total for score in scores}) == 1
    [expected] = {score.total for score in scores}
    slow = sum(given_weights.get(name, 1.0) * value for name, value in one.items() if value is not None)
    assert expected == pytest.approx(slow, rel=1e-9, abs=1e-6)


def scored(results, weights=None, prompt_id="made/0"):
    group = make_group(["x"] * len(results), prompt_id=prompt_id)
    return ScoredGroup(group, combine(results, weights or {}).scores)


def test_spread_of_parts_and_totals():
    spread = in_group_spread(
        [
            scored([{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]),
            scored([{"a": 0.7}, {"a": 0.7}, FAILED, {"a": 0.7}]),
        ]
    )
    assert spread["part/a/mean"] == Ratio(pytest.approx(3.1), 5.0)
    assert spread["part/a/in_group_std"] == Ratio(pytest.approx(np.std([0, 1], ddof=1)), 2.0)
    assert spread["part/b/mean"].value == 1.0
    assert spread["part/b/in_group_std"] == Ratio(0.0, 1.0)
    assert spread["part/b/present"] == Ratio(2.0, 5.0)
    assert spread["total/mean"] == Ratio(pytest.approx(5.1), 5.0)
    assert spread["groups_without_spread"] == Ratio(1.0, 2.0)
    assert spread["failed"] == Ratio(1.0, 6.0)
    assert spread["failed/timeout"] == Ratio(1.0, 6.0)


def test_spread_of_equal_values_is_exactly_zero():
    assert in_group_spread([scored([{"a": 0.1}] * 3)])["total/in_group_std"].numerator == 0.0
    assert np.std([0.1] * 3, ddof=1) > 0  # what rounding of the mean would give
    rounding = scored([{"a": 0.1 + 0.2}, {"a": 0.3}])
    assert in_group_spread([rounding])["groups_without_spread"].value == 1.0
    assert math.isnan(in_group_spread([scored([FAILED])])["total/mean"].value)


@pytest.mark.parametrize(
    ("scores", "flat"),
    [((0.4,), True), ((1e-9, -1e-9), True), ((0.0, 1e-6), False), ((1e6, 1e6 + 1e-4), True), ((1e6, 1e6 + 1), False)],
)
def test_scores_are_equal_where_they_are_for_advantages(scores, flat):
    """A group that is counted as without spread is one that learns nothing, whatever the size of its scores."""
    advantages = group_mean(torch.tensor(scores, dtype=torch.float64), tolerance=GroupMean(kind="group_mean").tolerance)
    assert (advantages == 0).all().item() is flat
    assert without_spread(scores) is flat
    counted = in_group_spread([scored([{"a": score} for score in scores])])["groups_without_spread"]
    assert counted.value == float(flat)


def test_a_group_without_scores_has_no_spread():
    assert in_group_spread([scored([FAILED])])["groups_without_spread"].value == 1.0


def step():
    good = [scored([{"a": float(i)} for i in range(4)], prompt_id=f"made/{k}") for k in range(4)]
    return [*good, scored([{"a": 1.0}, FAILED, {"a": 2.0}], prompt_id="made/4"), scored([FAILED], prompt_id="made/5")]


def config(**settings):
    return RewardConfig.model_validate({"terms": {"accuracy": "accuracy"}, "max_failure_rate": 0.2, **settings})


def keys(groups):
    return [(g.group.prompt.id, r.sample_index) for g in groups for r in g.group.rollouts]


@pytest.mark.parametrize("on_failure", ["drop_sample", "drop_group"])
def test_every_rollout_is_kept_or_dropped_once(on_failure):
    groups = step()
    kept = apply_failures(groups, config(on_failure=on_failure))
    dropped = [(item.prompt_id, item.sample_index) for item in kept.dropped]
    assert sorted(keys(kept.groups) + dropped) == sorted(keys(groups))
    assert all(isinstance(s, Score) and s.total is not None for g in kept.groups for s in g.scores)
    assert all(len(g.scores) == len(g.group.rollouts) for g in kept.groups)
    assert kept.groups[0] is groups[0]


def test_drop_sample_keeps_the_siblings():
    kept = apply_failures(step(), config())
    assert kept.dropped == [Dropped("made/4", 1, "reward_failed"), Dropped("made/5", 0, "reward_failed")]
    assert keys(kept.groups)[-2:] == [("made/4", 0), ("made/4", 2)]
    assert [score.total for score in kept.groups[-1].scores] == [1.0, 2.0]


def test_drop_group_drops_the_siblings():
    kept = apply_failures(step(), config(on_failure="drop_group"))
    assert Dropped("made/4", 0, "sibling_failed") in kept.dropped
    assert Dropped("made/4", 1, "reward_failed") in kept.dropped
    assert [g.group.prompt.id for g in kept.groups] == [f"made/{k}" for k in range(4)]


def test_stop_says_why():
    with pytest.raises(RewardError) as caught:
        apply_failures(step(), config(on_failure="stop"))
    assert str(caught.value) == (
        "reward.on_failure is stop, and 2 of 20 samples have no score.\n"
        "Failures: 2 timeout.\n"
        "Commonest (2 of 2), for example sample made/4#1: timeout: reward took longer than reward.timeout_s = 1 s\n"
        "  stack line 1\n"
        "  stack line 2\n"
        "Fix the cause, or set reward.on_failure to drop_sample or drop_group."
    )


def test_the_rate_limit_counts_samples_of_the_step():
    assert len(apply_failures(step(), config(max_failure_rate=0.1)).dropped) == 2  # 2 of 20 is not above
    with pytest.raises(RewardError) as caught:
        apply_failures(step(), config(max_failure_rate=0.09))
    assert str(caught.value).startswith(
        "2 of 20 samples of this step have no score: 10.0%, above reward.max_failure_rate = 0.09.\nFailures: 2 timeout."
    )
    assert str(caught.value).endswith("Fix the cause, or set reward.retries or a higher reward.max_failure_rate.")
    assert apply_failures([], config()).groups == []
