"""Local reward models as a source of scores: batching, failures, order."""

import asyncio
import threading

import pytest

from skirl.config.rewards import RewardConfig
from skirl.errors import ConfigError, RewardError, WorkerError
from skirl.protocols import RewardModels
from skirl.records import RewardText, ScoreFailure
from skirl.rewards.pool import RewardPool
from skirl.testing.fake_reward_models import FakeRewardModels
from skirl.testing.reward_samples import make_group, to_samples


@pytest.fixture
def pool(tmp_path):
    made = []

    def make(held, source=None, **settings):
        section = {"models": {"rm": {"path": tmp_path}}, **settings}
        if source is not None:
            section["python"] = tmp_path / "my_reward.py"
            section["python"].write_text(source)
        made.append(RewardPool(RewardConfig.model_validate({"num_workers": 1, **section}), to_samples))
        made[-1].start()
        if held is not None:
            made[-1].attach(held)
        return made[-1]

    yield make
    for one in made:
        one.close()


def score(pool, *texts, **more):
    return asyncio.run(pool.score(make_group(texts, **more))).scores


def length(text):
    return float(len(text.response))


def test_the_fake_is_one():
    assert isinstance(FakeRewardModels({}), RewardModels)


def test_models_read_the_turns_and_the_response(pool):
    models = FakeRewardModels({"rm": length})
    turns = ({"role": "user", "content": "how are you"},)
    scores = score(pool(models, models={"rm": {"path": "x", "weight": 2.0}}), "a", "bb", row={"messages": turns})
    assert [one.total for one in scores] == [2.0, 4.0]
    assert scores[1].parts == {"rm": 2.0}
    assert RewardText(turns, "bb") in [text for _, texts in models.calls for text in texts]


def test_the_function_combines_several_models(pool, tmp_path):
    models = FakeRewardModels({"rm": length, "safety": lambda text: -1.0})
    source = "def reward(s): return {'worst': min(s.scores.values()), 'n': len(s.scores)}"
    both = {"rm": {"path": tmp_path}, "safety": {"path": tmp_path}}
    [one] = score(pool(models, source, models=both, combine="python", weights={"n": 0.1}), "abc")
    assert one.total == pytest.approx(-0.8)
    assert one.parts == {"n": 2.0, "rm": 3.0, "safety": -1.0, "worst": -1.0}


def test_what_waits_is_one_batch(pool):
    entered, go_on = threading.Event(), threading.Event()

    def slow(text):
        entered.set()
        go_on.wait(10)
        return length(text)

    models = FakeRewardModels({"rm": slow})
    one = pool(models)
    group = make_group(["x" * n for n in range(1, 9)])

    async def run():
        one.begin(group.prompt, group.rollouts[0], group.sampling)
        await asyncio.to_thread(entered.wait, 10)
        task = asyncio.create_task(one.score(group))
        await asyncio.sleep(0.1)
        go_on.set()
        return await task

    assert [each.total for each in asyncio.run(run()).scores] == [float(n) for n in range(1, 9)]
    assert [len(texts) for _, texts in models.calls] == [1, 7]


def test_failures_are_typed_and_cost_their_sample(pool):
    def judge(text):
        if text.response == "long":
            return ScoreFailure("too_long", "it has 9 tokens, more than 8")
        return float("nan") if text.response == "nan" else 1.0

    scores = score(pool(FakeRewardModels({"rm": judge})), "a", "long", "nan")
    assert [one.total for one in scores] == [1.0, None, None]
    assert [one.failure.kind for one in scores[1:]] == ["too_long", "not_finite"]
    assert scores[1].failure.message == "reward.models.rm: it has 9 tokens, more than 8"


def test_a_call_that_raises_is_a_failure_and_a_lost_worker_the_end(pool):
    def broken(error):
        def judge(text):
            raise error

        return FakeRewardModels({"rm": judge})

    [one] = score(pool(broken(MemoryError("no room"))), "a")
    assert (one.failure.kind, one.failure.message) == ("raised", "reward.models.rm: MemoryError: no room")
    with pytest.raises(WorkerError, match="rank 0 died"):
        score(pool(broken(WorkerError("rank 0 died"))), "a")


def test_models_that_were_never_attached_are_an_error(pool):
    with pytest.raises(RewardError, match=r"reward\.models\.rm is asked for a score before the models are loaded"):
        score(pool(None), "a")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"terms": {"rm": "accuracy"}}, r"reward\.terms\.rm and reward\.models\.rm name the same part"),
        (
            {"services": {"rm": {"urls": ["http://127.0.0.1:9/score"]}}},
            r"reward\.services\.rm and reward\.models\.rm name the same part: rename one of them",
        ),
        ({"weights": {"rm": 2.0}, "source": "def reward(s): ..."}, r"reward\.weights\.rm and reward\.models\.rm name"),
    ],
)
def test_sources_that_share_a_name_are_refused(pool, settings, said):
    with pytest.raises(ConfigError, match=said):
        pool(None, **settings)


def test_a_part_of_the_function_with_the_name_of_a_model_is_a_failure(pool):
    [one] = score(pool(FakeRewardModels({"rm": length}), "def reward(s): return {'rm': 1}"), "a")
    assert one.failure.kind == "bad_type"
    assert "a part named 'rm', which is also a model of the recipe; rename it there or in reward.models" in (
        one.failure.message
    )
