"""The router: keyed seeds, groups in the order of the prompts, scoring meanwhile, back-pressure, errors as they are."""

import asyncio
import gc
import random
import signal
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.collect import StepCollector
from skirl.config.schema import RewardConfig
from skirl.errors import RewardError, RolloutError, SkirlError
from skirl.prompts.source import ShuffledPrompts
from skirl.records import Prompt, Sampling
from skirl.rollouts.router import Router, request_seed
from skirl.testing.fake_engine import FakeEngine
from skirl.testing.fake_scorer import FakeScorer
from skirl.tracking.ledger import Ledger
from skirl.tracking.progress import ProgressDisplay
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.tracker import Tracker

SAMPLING = Sampling(max_new_tokens=8, stop_ids=(257,))


def prompt(number, length=3):
    return Prompt(f"made/{number}", "made", tuple(range(length)), (1,), (), None, None, None, {})


PROMPTS = [prompt(n, length=3 + n % 4) for n in range(13)]


def nothing(_):
    pass


def tokens(groups):
    return {(r.prompt_id, r.sample_index): r.response_ids.tolist() for g in groups for r in g.rollouts}


def key_of(request):
    return request.prompt.id, request.sample_index


def turns(most):
    """Holds each response back for a number of turns of the event loop that its seed says: every order, no waiting."""

    async def before(request):
        for _ in range(request.seed % (most + 1)):
            await asyncio.sleep(0)

    return before


def shuffled(requests):
    return random.Random(requests[0].seed).sample(requests, len(requests))


def test_seeds_are_keyed_by_run_step_prompt_and_sample():
    keys = [(s, k, p, i) for s in (0, 1) for k in ("step 1", "step 11") for p in ("a/1", "a/11") for i in (1, 11)]
    seeds = {key: request_seed(*key) for key in keys}
    assert len(set(seeds.values())) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds.values())
    assert request_seed(0, "step 1", "a/1", 1) == 13360501866180782854  # the same on every machine, for ever


@pytest.mark.parametrize("num_engines", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 6, 100])
@pytest.mark.parametrize("max_in_flight", [None, 2, 12])
def test_every_request_once_and_groups_in_the_order_of_the_prompts(num_engines, batch_size, max_in_flight):
    engines = [
        FakeEngine(batch_size=batch_size, max_in_flight=max_in_flight, order=shuffled, before=turns(5 * (n + 1)))
        for n in range(num_engines)
    ]
    seen = []
    groups = Router(engines, None, seed=3).sample("step 4", PROMPTS, SAMPLING, 3, seen.append)
    assert [g.prompt for g in groups] == PROMPTS
    assert [[r.sample_index for r in g.rollouts] for g in groups] == [[0, 1, 2]] * len(PROMPTS)
    assert all({r.prompt_id for r in g.rollouts} == {g.prompt.id} for g in groups)
    assert all(g.sampling == SAMPLING for g in groups)
    assert Counter(g.prompt.id for g in seen) == Counter(p.id for p in PROMPTS)

    calls = [call for engine in engines for call in engine.calls]
    asked = [request for call in calls for request in call]
    assert Counter(map(key_of, asked)) == Counter((p.id, i) for p in PROMPTS for i in range(3))
    assert all(q.seed == request_seed(3, "step 4", q.prompt.id, q.sample_index) for q in asked)
    for call in calls:
        assert len(call) <= max(3, batch_size)  # whole groups, up to what the engine wants
        assert set(Counter(q.prompt.id for q in call).values()) == {3}
    if batch_size > 1:
        assert all(engine.calls for engine in engines)
    assert all(engine.in_hand == engine.open_calls == 0 for engine in engines)


def test_results_do_not_depend_on_engines_speed_or_order():
    def sample(engines, prompts):
        return tokens(Router(engines, None, seed=0).sample("step 1", prompts, SAMPLING, 4, nothing))

    wanted = sample([FakeEngine(batch_size=1000)], PROMPTS)
    assert len({tuple(t) for t in wanted.values()}) > 30
    assert sample([FakeEngine(batch_size=4) for _ in range(3)], PROMPTS) == wanted
    uneven = [FakeEngine(batch_size=8, before=turns(9), order=shuffled), FakeEngine(batch_size=8)]
    assert sample(uneven, PROMPTS[::-1]) == wanted
    scheduled = [FakeEngine(batch_size=1, max_in_flight=9, before=turns(9), order=shuffled) for _ in range(3)]
    assert sample(scheduled, PROMPTS) == wanted
    assert sample([FakeEngine()], PROMPTS[3:5]) == {k: v for k, v in wanted.items() if k[0] in ("made/3", "made/4")}


def test_calls_of_an_engine_without_a_scheduler_depend_on_the_requests_alone():
    """What is computed together is part of the result, down to the last bit."""

    def calls(shift, before):
        prompts = PROMPTS[shift:] + PROMPTS[:shift]
        engines = [FakeEngine(batch_size=8, before=before), FakeEngine(batch_size=8)]
        Router(engines, None, seed=0).sample("step 1", prompts, SAMPLING, 3, nothing)
        assert {engine.most_open_calls for engine in engines} == {1}
        return {tuple(map(key_of, call)) for engine in engines for call in engine.calls}

    assert calls(0, None) == calls(5, turns(20)) == calls(2, lambda _: asyncio.sleep(0.001))
    assert calls(0, None) == {
        tuple((p.id, i) for p in pair for i in range(3))
        for pair in zip(*[iter(sorted(PROMPTS, key=lambda p: (-len(p.input_ids), p.id)))] * 2, strict=False)
    } | {tuple((PROMPTS[8].id, i) for i in range(3))}


def test_a_fast_engine_takes_more():
    fast = FakeEngine(batch_size=2)
    slow = FakeEngine(batch_size=2, before=lambda _: asyncio.sleep(0.02))
    Router([slow, fast], None, seed=0).sample("step 1", PROMPTS, SAMPLING, 2, nothing)
    assert len(slow.calls) < len(fast.calls)


# ----------------------------------------------------------------------------------------- engines with a scheduler
@settings(max_examples=150, deadline=None)
@given(
    limits=st.lists(st.integers(1, 20) | st.none(), min_size=1, max_size=4),
    group_size=st.integers(1, 6),
    num_prompts=st.integers(0, 12),
    batch_size=st.integers(1, 10),
    most=st.integers(0, 12),
)
def test_back_pressure(limits, group_size, num_prompts, batch_size, most):
    """Also for engines of both kinds together, which nothing needs: they must not hang."""
    engines = [
        FakeEngine(batch_size=batch_size, max_in_flight=limit, before=turns(most), order=shuffled) for limit in limits
    ]
    groups = Router(engines, None, seed=0).sample("step 1", PROMPTS[:num_prompts], SAMPLING, group_size, nothing)
    assert tokens(groups).keys() == {(p.id, i) for p in PROMPTS[:num_prompts] for i in range(group_size)}
    for engine, limit in zip(engines, limits, strict=True):
        largest = max(map(len, engine.calls), default=0)
        assert largest <= max(batch_size, group_size)
        if limit is None:
            assert engine.most_open_calls <= 1
        else:
            assert engine.most_in_hand <= max(limit, largest)


def test_room_is_used_at_once():
    """Before a call ends, the responses of it that ended have made room for the next."""
    held = asyncio.Event()

    async def before(request):
        if request.sample_index == 3 and len(engine.calls) < 3:
            await held.wait()
        if len(engine.calls) == 3:
            held.set()

    engine = FakeEngine(batch_size=1, max_in_flight=8, before=before)
    Router([engine], None, seed=0).sample("step 1", PROMPTS[:5], SAMPLING, 4, nothing)
    assert len(engine.calls) == 5
    assert engine.most_open_calls >= 3
    assert engine.most_in_hand <= 8


def test_calls_are_dealt_evenly_by_responses_and_then_by_tokens():
    lengths = [50, 40, 30, 20, 10, 5]
    prompts = [prompt(n, length) for n, length in enumerate(lengths)]
    engines = [FakeEngine(batch_size=1, max_in_flight=100, before=turns(3)) for _ in range(2)]
    Router(engines, None, seed=0).sample("step 1", prompts[::-1], SAMPLING, 4, nothing)
    dealt = [[len(call[0].prompt.input_ids) for call in engine.calls] for engine in engines]
    assert dealt == [[50, 20, 10], [40, 30, 5]]


def test_an_engine_that_falls_behind_gets_less():
    fast = FakeEngine(batch_size=1, max_in_flight=4)
    slow = FakeEngine(batch_size=1, max_in_flight=4, before=lambda _: asyncio.sleep(0.02))
    Router([slow, fast], None, seed=0).sample("step 1", PROMPTS, SAMPLING, 2, nothing)
    assert len(slow.calls) == 2  # what it was given at the start
    assert len(fast.calls) == len(PROMPTS) - 2


# ---------------------------------------------------------------------------------------------------------- scoring
class Noting(FakeScorer):
    """Notes what happens when."""

    def __init__(self, log):
        super().__init__(lambda rollout: log.append(("scored", rollout.sample_index)) or float(len(rollout.text)))
        self.log = log

    async def score(self, group):
        self.log.append(("group", len(group.rollouts)))
        return await super().score(group)


@pytest.mark.parametrize("max_in_flight", [None, 100])
def test_a_rollout_is_scored_while_its_sibling_is_sampled(max_in_flight):
    log = []

    async def before(request):
        log.append(("sampling", request.sample_index))

    engine = FakeEngine(max_in_flight=max_in_flight, before=before, order=lambda requests: requests[::-1])
    ended = []
    [scored] = Router([engine], Noting(log), seed=0).collect("step 1", PROMPTS[:1], SAMPLING, 3, ended.append)
    events = [("sampling", 2), ("scored", 2), ("sampling", 1), ("scored", 1), ("sampling", 0), ("scored", 0)]
    assert log == [*events, ("group", 3)]  # and each exactly once
    assert [r.sample_index for r in ended] == [2, 1, 0]
    assert [r.sample_index for r in scored.group.rollouts] == [0, 1, 2]
    assert [s.total for s in scored.scores] == [len(r.text) for r in scored.group.rollouts]


def test_a_group_is_scored_while_others_are_sampled():
    """The second group is not sampled before the first has been scored: a scorer that waited would never end."""
    scored_first = asyncio.Event()

    class First(FakeScorer):
        async def score(self, group):
            scored_first.set()
            return await super().score(group)

    calls = []

    async def before(request):
        calls.append(request.prompt.id)
        if len(set(calls)) > 1:
            await scored_first.wait()

    engine = FakeEngine(batch_size=1, before=before)
    router = Router([engine], First(lambda rollout: float(rollout.sample_index)), seed=0, timeout_s=20)
    scored = router.collect("step 1", PROMPTS[:4], SAMPLING, 2, nothing)
    assert [s.group.prompt.id for s in scored] == [p.id for p in PROMPTS[:4]]
    assert [[s.total for s in group.scores] for group in scored] == [[0.0, 1.0]] * 4


# ----------------------------------------------------------------------------------------------------------- errors
def failing(error, after=0, **settings):
    """An engine that fails from its n-th response on."""
    written = []

    def write(request):
        written.append(request)
        if len(written) > after:
            raise error
        return "fine"

    return FakeEngine(write, **{"batch_size": 1} | settings)


def collect(engines, scorer=None, group_size=1, **settings):
    router = Router(engines, scorer or FakeScorer(lambda rollout: 1.0), seed=0, **settings)
    return router.collect("step 1", PROMPTS, SAMPLING, group_size, nothing)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("max_in_flight", [None, 6])
def test_an_engines_error_is_raised_itself(after, others, max_in_flight):
    """Not inside an ExceptionGroup, which the command line would print as a fault of skirl."""
    settings = {"batch_size": 1, "max_in_flight": max_in_flight}
    slow = [FakeEngine(before=lambda _: asyncio.sleep(0.01), **settings) for _ in range(others)]
    error = RolloutError("engine 0 lost its weights")
    with pytest.raises(SkirlError) as caught:
        collect([failing(error, after, **settings), *slow])
    assert caught.value is error
    assert all(engine.open_calls == 0 for engine in slow)


def test_of_several_errors_a_named_one_is_raised():
    named = RolloutError("named")
    with pytest.raises(RolloutError, match="named"):
        collect([failing(KeyError("bare")), failing(named), failing(KeyError("bare"))])
    with pytest.raises(RolloutError, match="named"):
        collect([failing(ExceptionGroup("of the engine", [KeyError("bare"), named]))])
    with pytest.raises(KeyError, match="bare"):
        collect([failing(KeyError("bare"))])


def test_a_scorers_error_is_raised_at_once():
    """It does not wait for the rest of the step to be sampled."""
    error = RewardError("reward.py is gone")

    class Broken(FakeScorer):
        async def score(self, group):
            raise error

    class NeverBegins(FakeScorer):
        def begin(self, prompt, rollout, sampling):
            raise error

    for broken in (Broken, NeverBegins):
        engine = FakeEngine(batch_size=1, before=lambda _: asyncio.sleep(0.02))
        with pytest.raises(RewardError) as caught:
            collect([engine], broken(lambda rollout: 1.0))
        assert caught.value is error
        assert len(engine.calls) < 4
        assert engine.open_calls == 0


def test_a_failing_progress_call_is_raised():
    def broken(_):
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        Router([FakeEngine()], None, seed=0).sample("step 1", PROMPTS, SAMPLING, 1, broken)
    with pytest.raises(RuntimeError, match="no terminal"):
        Router([FakeEngine()], FakeScorer(lambda _: 1.0), seed=0).collect("step 1", PROMPTS, SAMPLING, 1, broken)


def never(request):
    return asyncio.Event().wait()


def test_nothing_is_left_running_after_an_error(recwarn, caplog):
    """Calls of all engines are cancelled and have ended when the error arrives; nothing is reported later."""
    scorings = []

    class Slow(FakeScorer):
        async def score(self, group):
            scorings.append("began")
            try:
                await asyncio.Event().wait()
            finally:
                scorings.append("ended")

    hanging = [FakeEngine(batch_size=1, max_in_flight=4, before=never) for _ in range(2)]
    good = FakeEngine(batch_size=1, max_in_flight=2)

    async def later(request):
        if scorings:
            raise RolloutError("gone")

    bad = FakeEngine(batch_size=1, max_in_flight=1, before=later)
    router = Router([*hanging, good, bad], Slow(lambda _: 1.0), seed=0)
    with pytest.raises(RolloutError, match="gone"):
        router.collect("step 1", PROMPTS, SAMPLING, 1, nothing)
    assert [engine.open_calls for engine in (*hanging, good, bad)] == [0] * 4
    assert [len(engine.calls) for engine in hanging] == [4, 4]
    assert scorings.count("began") == scorings.count("ended") > 0
    gc.collect()
    assert not recwarn.list
    assert not caplog.records


@pytest.fixture
def _takes_ctrl_c():
    """A process that was started in the background ignores SIGINT, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_takes_ctrl_c")
def test_ctrl_c_ends_all_calls(recwarn, caplog):
    async def interrupt(request):
        if request.prompt.id == PROMPTS[5].id:
            signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    engines = [FakeEngine(batch_size=1, max_in_flight=100, before=interrupt) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        collect(engines)
    assert [engine.open_calls for engine in engines] == [0, 0]
    gc.collect()
    assert not recwarn.list
    assert not caplog.records


@pytest.mark.parametrize("max_in_flight", [None, 100])
def test_the_deadline_of_a_call(max_in_flight):
    async def before(request):
        if key_of(request) == ("made/7", 2):
            await asyncio.Event().wait()

    engines = [FakeEngine(batch_size=1, max_in_flight=max_in_flight, before=before) for _ in range(2)]
    with pytest.raises(RolloutError) as caught:
        collect(engines, group_size=4, timeout_s=0.5)
    [which] = [n for n, engine in enumerate(engines) if any(q.prompt.id == "made/7" for c in engine.calls for q in c)]
    assert str(caught.value) == (
        f"rollout engine {which} of 2 did not finish a call within 0.5 s (rollout.engine.request_timeout_s): 2 of 4 "
        "responses of prompt made/7 had come, and it had 2 responses in hand in all. It hangs (its log says where), or "
        "has more in hand than it can finish in that time: lower rollout.engine.max_in_flight, or raise the deadline"
    )
    assert all(engine.open_calls == 0 for engine in engines)


def test_the_deadline_is_of_each_call_not_of_the_step():
    engine = FakeEngine(batch_size=1, before=lambda _: asyncio.sleep(0.06))
    assert len(collect([engine], timeout_s=0.6)) == len(PROMPTS)  # 13 calls of 0.06 s


def test_an_engines_own_timeout_stays_its_own():
    with pytest.raises(TimeoutError, match="its own"):
        collect([failing(TimeoutError("its own"))], timeout_s=20)


@pytest.mark.parametrize("max_in_flight", [None, 100])
def test_an_engine_that_repeats_loses_or_invents_a_response(max_in_flight):
    def engine(order):
        return FakeEngine(batch_size=4, max_in_flight=max_in_flight, order=order)

    with pytest.raises(RolloutError, match=r"rollout engine 0 of 1 returned response made/\d+#0 twice"):
        collect([engine(lambda requests: [*requests, requests[0]])], group_size=2)
    lost = (
        r"rollout engine 0 of 1 ended a call of 4 responses without 3 of them: "
        r"made/\d+#1, made/\d+#0, made/\d+#1"
    )
    with pytest.raises(RolloutError, match=lost):
        collect([engine(lambda requests: requests[:1])], group_size=2)

    class Confused(FakeEngine):
        def _rollout(self, request):
            other = PROMPTS[0] if request.prompt.id != "made/0" else PROMPTS[1]
            return super()._rollout(type(request)(other, 0, 0, SAMPLING))

    with pytest.raises(RolloutError, match=r"response made/0#0 in a call that did not ask for it, but for made/11"):
        collect([Confused(batch_size=1, max_in_flight=max_in_flight)], group_size=2)


def test_a_call_that_someone_else_cancels_is_not_lost_in_silence():
    async def before(request):
        if request.prompt.id == "made/4":
            raise asyncio.CancelledError

    with pytest.raises(RolloutError, match="cancelled from outside: 3 responses of made/4 never came"):
        collect([FakeEngine(batch_size=1, max_in_flight=6, before=before)], group_size=3)


def test_an_engine_without_a_generator():
    """An iterator is enough."""

    class Plain(FakeEngine):
        def generate(self, requests):
            made = super().generate(requests)

            class Iterator:
                def __aiter__(self):
                    return self

                def __anext__(self):
                    return made.__anext__()

            return Iterator()

    assert len(collect([Plain(max_in_flight=10)])) == len(PROMPTS)


def test_no_prompts_is_no_work():
    engine = FakeEngine()
    assert Router([engine], None, seed=0).sample("step 1", [], SAMPLING, 4, nothing) == []
    assert engine.calls == []


# ------------------------------------------------------------------------------------------------- ledger, progress
def test_a_step_that_fails_leaves_the_ledger_balanced_and_the_bar_at_what_came(tmp_path, monkeypatch):
    """Issued = delivered + in flight: what never came is still in flight, for whoever saves or reports it."""
    bars = []
    phase = ProgressDisplay.phase

    def noted(self, label, total=None, unit=""):
        bars.append((label, total, unit))
        return phase(self, label, total, unit)

    monkeypatch.setattr(ProgressDisplay, "phase", noted)
    advanced = []
    monkeypatch.setattr(
        "skirl.tracking.progress.PhaseBar.advance", lambda _, n=1, tokens=0: advanced.append((n, tokens))
    )
    run = RunDirectory.open(tmp_path / "run", resume=False, config={}, command="train")
    ledger = Ledger()

    def step(number, engine, tracker):
        return StepCollector(
            Router([engine], FakeScorer(lambda _: 1.0), seed=0),
            ledger,
            tracker,
            RewardConfig.model_validate({"terms": {"acc": "accuracy"}}),
            record=lambda done, scored, sequences: pytest.fail("the loop records what is kept"),
            sampling=SAMPLING,
            group_size=2,
        )(number, ShuffledPrompts(PROMPTS[:3], 0), 3)

    with Tracker(run, [], ProgressDisplay(None), 10) as tracker:
        with pytest.raises(RolloutError, match="gone"):
            step(1, failing(RolloutError("gone"), after=3, max_in_flight=1), tracker)
        ledger.check()
        assert (ledger.issued, len(ledger.in_flight), ledger.num_dropped) == (6, 6, 0)
        assert advanced == [(1, 5)] * 3  # "fine" and the stop token
        advanced.clear()
        collected = step(2, FakeEngine(max_in_flight=4), tracker)
    run.close()
    ledger.check()
    assert bars == [("sample", 6, "rollouts")] * 2
    lengths = [len(r.response_ids) for g in collected.scored for r in g.group.rollouts]
    assert sorted(advanced) == sorted((1, length) for length in lengths)
