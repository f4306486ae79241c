"""What every Scorer promises: the pool with a plain and an async function and with models, and the fake."""

import asyncio

import pytest

from skirl.config.schema import RewardConfig
from skirl.protocols import Scorer
from skirl.records import ScoreFailure
from skirl.rewards.pool import RewardPool
from skirl.testing.fake_reward_models import FakeRewardModels
from skirl.testing.fake_scorer import FakeScorer
from skirl.testing.reward_samples import make_group, to_samples

SOURCE = """
def reward(sample):
    if sample.text == "bad":
        raise ValueError("bad")
    return len(sample.text)
"""


@pytest.fixture(params=["pool", "async pool", "models", "fake"])
def scorer(request, tmp_path):
    failure = ScoreFailure("raised", "ValueError: bad")
    if "pool" in request.param:
        path = tmp_path / "reward.py"
        path.write_text(SOURCE.replace("def", "async def") if "async" in request.param else SOURCE)
        made = RewardPool(RewardConfig(python=path), to_samples)
    elif request.param == "models":
        made = RewardPool(RewardConfig.model_validate({"models": {"rm": {"path": tmp_path}}}), to_samples)
        judge = lambda text: failure if text.response == "bad" else float(len(text.response))  # noqa: E731
        made.attach(FakeRewardModels({"rm": judge}))
    else:
        made = FakeScorer(lambda rollout: failure if rollout.text == "bad" else float(len(rollout.text)))
    yield made
    made.close()


def test_it_is_a_scorer(scorer):
    assert isinstance(scorer, Scorer)


def test_one_score_a_rollout_in_order(scorer):
    group = make_group(["a", "bb", "ccc", "dd", "e"])
    scored = asyncio.run(scorer.score(group))
    assert scored.group is group
    assert [score.total for score in scored.scores] == [1.0, 2.0, 3.0, 2.0, 1.0]
    assert all(sum(score.parts.values()) == score.total for score in scored.scores)


def test_a_failure_is_returned_not_raised(scorer):
    scores = asyncio.run(scorer.score(make_group(["a", "bad", "ccc"]))).scores
    assert [score.total for score in scores] == [1.0, None, 3.0]
    assert scores[1].failure.kind == "raised"
    assert scores[0].failure is scores[2].failure is None


def test_groups_may_be_scored_side_by_side_and_in_loop_after_loop(scorer):
    async def many():
        return await asyncio.gather(*(scorer.score(make_group(["x" * n] * 3)) for n in range(1, 9)))

    for _ in range(2):
        assert [group.scores[2].total for group in asyncio.run(many())] == [float(n) for n in range(1, 9)]


def begin(scorer, group, *indices):
    for index in indices:
        scorer.begin(group.prompt, group.rollouts[index], group.sampling)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("begun", [[0, 1, 2, 3], [3, 1], [2, 2, 0]])
def test_scores_are_the_same_when_some_were_begun(scorer, started, begun):
    group = make_group(["a", "bad", "ccc", "dd"])
    if started:
        asyncio.run(scorer.score(make_group(["x"])))  # the pool starts itself with the first group

    async def run():
        begin(scorer, group, *begun)
        await asyncio.sleep(0)
        return await scorer.score(group)

    scored = asyncio.run(run())
    assert scored.group is group
    assert [score.total for score in scored.scores] == [1.0, None, 3.0, 2.0]
    assert scored.scores[1].failure.kind == "raised"
    again = asyncio.run(scorer.score(group))  # nothing is kept of what was begun
    assert [score.total for score in again.scores] == [1.0, None, 3.0, 2.0]


def test_what_was_begun_belongs_to_its_rollout_not_to_its_key(scorer):
    """A prompt returns every epoch, and a step may have ended between a rollout and its group."""
    asyncio.run(scorer.score(make_group(["x"])))
    old, new = make_group(["old", "old"]), make_group(["b", "cc"])

    async def run():
        begin(scorer, old, 0, 1)
        begin(scorer, new, 1)
        return await scorer.score(new), await scorer.score(old)

    scored = asyncio.run(run())
    assert [[score.total for score in group.scores] for group in scored] == [[1.0, 2.0], [3.0, 3.0]]


def test_empty_group(scorer):
    assert asyncio.run(scorer.score(make_group([]))).scores == ()


def test_close_twice(scorer):
    scorer.close()
    scorer.close()
