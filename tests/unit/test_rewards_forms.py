"""Async and batch-wise functions, scores of turns, the memory limit, and scores that must do no harm."""

import asyncio
import math
import textwrap
import time

import pytest

from skirl.config.rewards import RewardConfig
from skirl.errors import ConfigError
from skirl.rewards import processes
from skirl.rewards.pool import RewardPool
from skirl.testing.reward_samples import make_group, to_samples


@pytest.fixture
def pool(tmp_path):
    """Makes started pools that are closed at the end."""
    made = []

    def make(source, **settings):
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(source))
        config = RewardConfig.model_validate({"python": path, "num_workers": 1, "timeout_s": 20.0, **settings})
        made.append(RewardPool(config, to_samples, output=tmp_path / "out"))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def score(pool, *texts, **more):
    return asyncio.run(pool.score(make_group(texts, "one two three", **more))).scores


def score_all(pool, *groups):
    async def all_at_once():
        made = [make_group(texts, prompt_id=f"made/{n}") for n, texts in enumerate(groups)]
        return await asyncio.gather(*map(pool.score, made))

    return [totals(scored.scores) for scored in asyncio.run(all_at_once())]


def totals(scores):
    return [one.total for one in scores]


# ---------------------------------------------------------------------------------------------------------------- async
def test_async_calls_overlap_in_one_process(pool):
    source = "import asyncio, os\nasync def reward(sample): await asyncio.sleep(0.2); return {'pid': os.getpid()}"
    one = pool(source, concurrency=16)
    score(one, "x")
    began = time.monotonic()
    scores = score(one, *["x"] * 32)
    assert 0.4 <= time.monotonic() - began < 32 * 0.2 / 4  # two waves of 16; a fourth of one after another at the most
    assert len({each.parts["pid"] for each in scores}) == 1


def test_no_more_async_calls_than_asked_for(pool):
    source = """\
        import asyncio
        now = most = 0

        async def reward(sample):
            global now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return most
        """
    assert max(totals(score(pool(source, concurrency=3), *["x"] * 20))) == 3.0


def test_async_calls_are_spread_over_the_processes(pool):
    source = "import asyncio, os\nasync def reward(sample): await asyncio.sleep(0.1); return {'pid': os.getpid()}"
    scores = score(pool(source, num_workers=2), *["x"] * 8)
    pids = [each.parts["pid"] for each in scores]
    assert {pids.count(pid) for pid in pids} == {4}


def test_an_async_call_that_never_ends_costs_itself(pool, tmp_path):
    source = """\
        import asyncio

        async def reward(sample):
            return await judge(sample)

        async def judge(sample):
            try:
                await asyncio.sleep(3600 if sample.text == "bad" else 0.01)
            except asyncio.CancelledError:
                print("was cancelled")
                raise
            return 1.0
        """
    one = pool(source, timeout_s=0.5)
    began = time.monotonic()
    scores = score(one, "x", "bad", *["x"] * 20)
    assert time.monotonic() - began < 2
    assert totals(scores) == [1.0, None, *[1.0] * 20]
    assert scores[1].failure.kind == "timeout"
    assert scores[1].failure.message == (
        "reward took longer than reward.timeout_s = 0.5 s; the call was cancelled (at my_reward.py line 8 in judge)"
    )
    assert totals(score(one, "x")) == [1.0]
    assert (tmp_path / "out").read_text() == "was cancelled\n"


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        ("time.sleep(3600)", "timeout", "its process was killed (at my_reward.py line 6 in reward)"),
        ("os._exit(3)", "crashed", "the reward process ended itself with exit code 3"),
    ],
)
def test_an_async_call_that_takes_its_process_along_costs_itself(pool, monkeypatch, bad, kind, said):
    """The others were under way in the same process: they are called again, each alone."""
    monkeypatch.setattr(processes, "ASYNC_GRACE_S", 0.3)
    source = f"""\
        import asyncio, os, time

        async def reward(sample):
            await asyncio.sleep(0.05)
            if sample.text == "bad":
                {bad}
            return 1.0
        """
    scores = score(pool(source, timeout_s=0.4), "x", "bad", "y", "z")
    assert totals(scores) == [1.0, None, 1.0, 1.0]
    assert scores[1].failure.kind == kind
    assert said in scores[1].failure.message


def test_an_async_call_that_raises_fails_alone(pool):
    source = """\
        async def reward(sample):
            if sample.text == "bad":
                raise ValueError("no")
            return 1.0
        """
    scores = score(pool(source), "x", "bad")
    assert totals(scores) == [1.0, None]
    assert scores[1].failure.message == "ValueError: no (my_reward.py line 3, in reward)"
    assert "python_file.py" not in scores[1].failure.detail


def test_terms_beside_an_async_function(pool):
    source = "import asyncio\nasync def reward(sample): await asyncio.sleep(0.01); return 1.0"
    scores = score(pool(source, terms={"accuracy": "accuracy"}), "one two three", "one two", "one")
    assert totals(scores) == [2.0, pytest.approx(1 + 2 / 3), pytest.approx(1 + 1 / 3)]


def test_async_functions_of_groups(pool):
    one = pool("async def reward(samples): return [len(samples)] * len(samples)")
    assert score_all(one, "ab", "abc") == [[2.0] * 2, [3.0] * 3]


# ---------------------------------------------------------------------------------------------------------------- batch
BATCH = """\
    import time

    def reward(batch):
        if any(sample.text == "slow" for sample in batch):
            time.sleep(0.3)
        if any(sample.text == "bad" for sample in batch):
            raise ValueError("bad")
        if any(sample.text == "hang" for sample in batch):
            time.sleep(3600)
        return [{"size": len(batch), "groups": len({sample.id for sample in batch})} for sample in batch]
    """


def parts(pool, *groups):
    async def all_at_once():
        tasks = []
        for n, texts in enumerate(groups):
            tasks.append(asyncio.create_task(pool.score(make_group(texts, prompt_id=f"made/{n}"))))
            await asyncio.sleep(0.1 if n == 0 else 0)  # the first is under way while the others come
        return await asyncio.gather(*tasks)

    return [[dict(one.parts) for one in scored.scores] for scored in asyncio.run(all_at_once())]


def test_whole_groups_that_wait_are_one_batch(pool):
    scored = parts(pool(BATCH), ["slow", "x"], "ab", "abc", "a")
    assert scored[0] == [{"size": 2.0, "groups": 1.0}] * 2
    assert scored[1] == [{"size": 6.0, "groups": 3.0}] * 2
    assert scored[3] == [{"size": 6.0, "groups": 3.0}]


def test_a_batch_is_bounded(pool):
    scored = parts(pool(BATCH), ["slow"], *["a"] * 50)
    assert [one["groups"] for [one] in scored] == [1.0, *[32.0] * 32, *[18.0] * 18]


@pytest.mark.parametrize(("bad", "kind"), [("bad", "raised"), ("hang", "timeout")])
def test_a_group_that_spoils_its_batch_costs_itself(pool, bad, kind):
    one = pool(BATCH, timeout_s=0.8, weights={"size": 1.0, "groups": 0.0})

    async def run():
        first = asyncio.create_task(one.score(make_group(["slow"])))
        await asyncio.sleep(0.1)
        rest = await asyncio.gather(*(one.score(make_group(texts)) for texts in ("ab", ["c", bad], "def")))
        return [await first, *rest]

    scored = [group.scores for group in asyncio.run(run())]
    assert [totals(scores) for scores in scored] == [[1.0], [2.0, 2.0], [None, None], [3.0] * 3]
    assert {each.failure.kind for each in scored[2]} == {kind}


def test_a_batch_of_the_wrong_length_is_a_failure(pool):
    [one] = score(pool("def reward(batch): return [1, 2]"), "x")
    assert one.failure.message == (
        "reward (my_reward.py) returned 2 scores for a batch of 1; return a list with one score a sample"
    )


# ---------------------------------------------------------------------------------------------------------------- turns
def test_scores_of_turns(pool):
    source = "def reward(s): return {'turns': [1.0, 0.5] if s.num_turns == 2 else [3], 'style': len(s.text)}"
    scores = score(pool(source, weights={"style": 0.5, "turns": 2.0}), "ab", "c", num_turns=2)
    assert scores[0].turns == (2.0, 2.0)
    assert totals(scores) == [4.0, 3.5]
    assert scores[0].parts == {"style": 2.0, "turns": 1.5}


# --------------------------------------------------------------------------------------------------------------- memory
def test_too_much_memory_fails_the_sample_alone(pool):
    source = "def reward(s): return len(bytearray(2 << 30)) if s.text == 'bad' else 1.0"
    scores = score(pool(source, memory_mb=1500), "x", "bad", "y")
    assert totals(scores) == [1.0, None, 1.0]
    assert scores[1].failure.kind == "raised"
    assert scores[1].failure.message == "MemoryError (my_reward.py line 1, in reward)"


def test_a_memory_limit_below_what_a_process_takes_is_refused(pool):
    with pytest.raises(ConfigError, match=r"^reward\.memory_mb = 64 is not above the \d+ MiB of address space"):
        pool("def reward(s): return 1", memory_mb=64)


# ---------------------------------------------------------------------------------------------- scores that do no harm
def test_one_failure_differing_parts_an_empty_response_equal_rewards_a_million_and_nan(pool):
    source = """\
        def reward(sample):
            if sample.text == "raise":
                raise RuntimeError("no")
            if sample.text == "nan":
                return {"a": float("nan")}
            if sample.text == "big":
                return {"a": 1e6}
            if sample.text == "more":
                return {"a": 0.7, "b": 5.0}
            return {"a": 0.7}
        """
    one = pool(source)
    scores = score(one, "x", "raise", "", "nan", "big", "more")
    assert totals(scores) == [0.7, None, 0.7, None, 1e6, 0.7]  # b is not in all: logged, not paid
    assert [each.failure.kind if each.failure else None for each in scores] == [
        None,
        "raised",
        None,
        "not_finite",
        None,
        None,
    ]
    assert scores[5].parts == {"a": 0.7, "b": 5.0}
    assert len({each.total for each in score(one, *["x"] * 8)}) == 1
    assert all(each.total is None or math.isfinite(each.total) for each in scores)
