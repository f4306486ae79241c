"""The router: keyed seeds, groups in the order of the prompts, scoring while sampling, errors as they are."""

import asyncio
import time
from collections import Counter

import pytest

from skirl.errors import RewardError, RolloutError, SkirlError
from skirl.records import Prompt, Sampling
from skirl.rollouts.router import Router, request_seed
from skirl.testing.fake_engine import FakeEngine
from skirl.testing.fake_scorer import FakeScorer

SAMPLING = Sampling(max_new_tokens=8, stop_ids=(257,))


def prompt(number, length=3):
    return Prompt(f"made/{number}", "made", tuple(range(length)), (1,), (), None, None, None, {})


PROMPTS = [prompt(n, length=3 + n % 4) for n in range(13)]


def nothing(group):
    pass


def tokens(groups):
    return {(r.prompt_id, r.sample_index): r.response_ids.tolist() for g in groups for r in g.rollouts}


def test_seeds_are_keyed_by_run_step_prompt_and_sample():
    keys = [(s, k, p, i) for s in (0, 1) for k in ("step 1", "step 11") for p in ("a/1", "a/11") for i in (1, 11)]
    seeds = {key: request_seed(*key) for key in keys}
    assert len(set(seeds.values())) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds.values())
    assert request_seed(0, "step 1", "a/1", 1) == 13360501866180782854  # the same on every machine, for ever


@pytest.mark.parametrize("num_engines", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 6, 100])
def test_every_request_once_and_groups_in_the_order_of_the_prompts(num_engines, batch_size):
    slow_first = [
        FakeEngine(batch_size=batch_size, delay_s=lambda _, i=i: 0.002 * (num_engines - i)) for i in range(num_engines)
    ]
    seen = []
    groups = Router(slow_first, None, seed=3).sample("step 4", PROMPTS, SAMPLING, 3, seen.append)
    assert [g.prompt for g in groups] == PROMPTS
    assert [[r.sample_index for r in g.rollouts] for g in groups] == [[0, 1, 2]] * len(PROMPTS)
    assert all({r.prompt_id for r in g.rollouts} == {g.prompt.id} for g in groups)
    assert all(g.sampling == SAMPLING for g in groups)
    assert Counter(g.prompt.id for g in seen) == Counter(p.id for p in PROMPTS)

    asked = [request for engine in slow_first for call in engine.calls for request in call]
    wanted = Counter((p.id, i) for p in PROMPTS for i in range(3))
    assert Counter((q.prompt.id, q.sample_index) for q in asked) == wanted
    assert all(q.seed == request_seed(3, "step 4", q.prompt.id, q.sample_index) for q in asked)
    for call in (call for engine in slow_first for call in engine.calls):
        assert len(call) <= max(3, batch_size)  # whole groups, up to what the engine wants
        assert Counter(q.prompt.id for q in call).keys() == {q.prompt.id for q in call}
        assert set(Counter(q.prompt.id for q in call).values()) == {3}
    if batch_size > 1:
        assert all(engine.calls for engine in slow_first)


def test_results_do_not_depend_on_engines_speed_or_order():
    def sample(engines, prompts):
        return tokens(Router(engines, None, seed=0).sample("step 1", prompts, SAMPLING, 4, nothing))

    wanted = sample([FakeEngine(batch_size=1000)], PROMPTS)
    assert len({tuple(t) for t in wanted.values()}) > 30
    assert sample([FakeEngine(batch_size=4) for _ in range(3)], PROMPTS) == wanted
    uneven = [FakeEngine(batch_size=8, delay_s=lambda requests: 0.001 * len(requests)), FakeEngine(batch_size=8)]
    assert sample(uneven, PROMPTS[::-1]) == wanted
    assert sample([FakeEngine()], PROMPTS[3:5]) == {k: v for k, v in wanted.items() if k[0] in ("made/3", "made/4")}


def test_a_fast_engine_takes_more():
    fast = FakeEngine(batch_size=2)
    slow = FakeEngine(batch_size=2, delay_s=lambda _: 0.05)
    Router([slow, fast], None, seed=0).sample("step 1", PROMPTS, SAMPLING, 2, nothing)
    assert len(slow.calls) < len(fast.calls)


class SlowScorer(FakeScorer):
    """Takes its time without blocking, and notes when it began and ended."""

    def __init__(self, delay_s):
        super().__init__(lambda rollout: float(len(rollout.text)))
        self.delay_s = delay_s
        self.began, self.ended = {}, {}

    async def score(self, group):
        self.began[group.prompt.id] = time.perf_counter()
        await asyncio.sleep(self.delay_s)
        self.ended[group.prompt.id] = time.perf_counter()
        return await super().score(group)


def test_scoring_overlaps_sampling():
    scorer, done = SlowScorer(0.05), []
    engine = FakeEngine(batch_size=2, delay_s=lambda _: 0.05)
    scored = Router([engine], scorer, seed=0).collect(
        "step 1", PROMPTS[:6], SAMPLING, 2, lambda group: done.append(time.perf_counter())
    )
    assert [s.group.prompt.id for s in scored] == [p.id for p in PROMPTS[:6]]
    assert all(s.scores[0].total == len(s.group.rollouts[0].text) for s in scored)
    assert min(scorer.began.values()) < done[1]  # the first group is being scored before the second is back


# --------------------------------------------------------------------------------------------------------------- errors
def failing(error, after=0):
    """An engine that fails from its n-th call on."""
    calls = []

    def write(request):
        calls.append(request)
        if len(calls) > after:
            raise error
        return "fine"

    return FakeEngine(write, batch_size=1)


def collect(engines, scorer=None):
    scorer = scorer or FakeScorer(lambda rollout: 1.0)
    return Router(engines, scorer, seed=0).collect("step 1", PROMPTS, SAMPLING, 1, nothing)


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("others", [0, 2])
def test_an_engines_error_is_raised_itself(after, others):
    """Not inside an ExceptionGroup, which the command line would print as a fault of skirl."""
    slow = [FakeEngine(batch_size=1, delay_s=lambda _: 0.01) for _ in range(others)]
    error = RolloutError("engine 0 lost its weights")
    with pytest.raises(SkirlError) as caught:
        collect([failing(error, after), *slow])
    assert caught.value is error


def test_of_several_errors_a_named_one_is_raised():
    named = RolloutError("named")
    with pytest.raises(RolloutError, match="named"):
        collect([failing(KeyError("bare")), failing(named), failing(KeyError("bare"))])
    with pytest.raises(KeyError, match="bare"):
        collect([failing(KeyError("bare"))])


def test_a_scorers_error_is_raised_at_once():
    """It does not wait for the rest of the step to be sampled."""
    error = RewardError("reward.py is gone")

    class Broken(FakeScorer):
        async def score(self, group):
            raise error

    engine = FakeEngine(batch_size=1, delay_s=lambda _: 0.02)
    with pytest.raises(RewardError) as caught:
        collect([engine], Broken(lambda rollout: 1.0))
    assert caught.value is error
    assert len(engine.calls) < 4


def test_a_failing_progress_call_is_raised():
    def broken(group):
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        Router([FakeEngine()], None, seed=0).sample("step 1", PROMPTS, SAMPLING, 1, broken)


def test_no_prompts_is_no_work():
    engine = FakeEngine()
    assert Router([engine], None, seed=0).sample("step 1", [], SAMPLING, 4, nothing) == []
    assert engine.calls == []
