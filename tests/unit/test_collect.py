"""A step's groups: counted in the ledger, failures settled, and groups without signal replaced (dynamic sampling)."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from skirl.collect import StepCollector, has_signal
from skirl.config.algorithms import DynamicSamplingConfig, MeanRange, Spread
from skirl.config.method import MethodConfig
from skirl.config.rewards import RewardConfig
from skirl.errors import DataError, RewardError
from skirl.prompts.source import ShuffledPrompts
from skirl.protocols import Collected
from skirl.records import Group, Prompt, Ratio, Rollout, Sampling, Score, ScoredGroup, ScoreFailure
from skirl.rollouts.router import Router
from skirl.step import Method
from skirl.testing.fake_engine import FakeEngine
from skirl.testing.fake_scorer import FakeScorer
from skirl.testing.fake_trainer import FakeTrainer
from skirl.tracking.ledger import Ledger
from skirl.tracking.progress import ProgressDisplay
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.tracker import Tracker

SPREAD = {"keep": {"kind": "spread"}}


def prompt(name):
    return Prompt(name, "made", (1, 2), (1, 2), (), None, None, None, {})


@pytest.fixture
def tracker(tmp_path):
    run = RunDirectory.open(tmp_path / "run", resume=False, config={}, command="train")
    with Tracker(run, [], ProgressDisplay(None), 10) as made:
        yield made
    run.close()


class Run:
    """A collector with its parts; ``names`` are the prompts of an epoch."""

    def __init__(self, tracker, score, *, names="abc", dynamic=None, record=None, **reward):
        self.ledger = Ledger()
        self.source = ShuffledPrompts([prompt(n) for n in names], 0)
        self.engine = FakeEngine()
        self.collector = StepCollector(
            Router([self.engine, FakeEngine()], FakeScorer(score), seed=0),
            self.ledger,
            tracker,
            RewardConfig.model_validate({"terms": {"acc": "accuracy"}} | reward),
            record=record or (lambda done, scored, sequences: pytest.fail("the loop records what is kept")),
            sampling=Sampling(max_new_tokens=40, stop_ids=(257,)),
            group_size=4,
            dynamic=None if dynamic is None else DynamicSamplingConfig.model_validate(dynamic),
        )

    def __call__(self, step=3, num_groups=3) -> Collected:
        return self.collector(step, self.source, num_groups)

    def train(self, collected) -> None:
        method = Method(MethodConfig(kl=None), placeholder_id=None, max_scoring_tokens=200)
        batch = method.prepare(collected.kept, FakeTrainer())
        self.ledger.trained(collected.key(s.id) for s in batch.sequences)
        self.ledger.check(idle=True)


def broken(*which):
    failure = ScoreFailure("raised", "ValueError: no")
    return lambda r: failure if (r.prompt_id, r.sample_index) in which else float(len(r.text))


def ids(groups):
    return [g.group.prompt.id for g in groups]


# ------------------------------------------------------------------------------------------------------------- failures
def test_everything_collected_is_in_flight_until_it_is_trained_on(tracker):
    run = Run(tracker, broken())
    collected = run()
    assert sorted(ids(collected.scored)) == ["a", "b", "c"]
    assert collected.kept == collected.scored
    assert collected.seconds > 0
    assert (collected.rounds, collected.without_signal) == (1, 0)
    assert (run.ledger.issued, len(run.ledger.in_flight), run.source.num_taken) == (12, 12, 3)
    run.train(collected)


def test_what_was_waited_for_scores_alone_is_told(tracker):
    class Slow(FakeScorer):
        async def score(self, group):
            await asyncio.sleep(0.3)
            return await super().score(group)

    run = Run(tracker, broken())
    engine = FakeEngine(before=lambda request: asyncio.sleep(0.1))  # 0.4 s a group, that are not waited for scores
    router = Router([engine], Slow(broken()), seed=0)
    run.collector._router = router
    run.collector._reward_metrics = lambda: {"reward/resting/judge": Ratio(2, 1)}
    collected = run()
    waited = collected.metrics["time/reward_wait_s"]
    assert 0.25 < waited.value < collected.seconds - 0.9
    assert collected.metrics["reward/resting/judge"] == Ratio(2, 1)


def test_samples_without_a_score_are_dropped_and_counted(tracker):
    run = Run(tracker, broken(("a", 1), ("c", 0)), max_failure_rate=0.5)
    collected = run()
    assert [len(g.scores) for g in collected.scored] == [4, 4, 4]
    left = {g.group.prompt.id: [r.sample_index for r in g.group.rollouts] for g in collected.kept}
    assert left == {"a": [0, 2, 3], "b": [0, 1, 2, 3], "c": [1, 2, 3]}
    assert run.ledger.drop_reasons == {"reward_failed": 2}
    assert not {"3/a#1", "3/c#0"} & set(run.ledger.in_flight)
    run.train(collected)

    run = Run(tracker, broken(("a", 1)), max_failure_rate=0.5, on_failure="drop_group")
    assert sorted(ids(run().kept)) == ["b", "c"]
    assert run.ledger.drop_reasons == {"reward_failed": 1, "sibling_failed": 3}


def test_too_many_failures_end_the_run_and_what_was_sampled_is_kept(tracker):
    recorded = []

    def record(done, scored, sequences):
        recorded.append((done, len(scored), len(sequences)))

    with pytest.raises(RewardError, match=r"2 of 12 samples .* above reward\.max_failure_rate"):
        Run(tracker, broken(("a", 1), ("c", 0)), max_failure_rate=0.1, record=record)()
    assert recorded == [(4, 3, 0)]
    everything = [(name, i) for name in "abc" for i in range(4)]
    with pytest.raises(RewardError, match="step 3: no rollout has a score"):
        Run(tracker, broken(*everything), max_failure_rate=1.0, record=record)()
    assert recorded == [(4, 3, 0)] * 2


def test_seeds_depend_on_the_step(tracker):
    texts = [sorted(r.text for g in Run(tracker, broken())(s).scored for r in g.group.rollouts) for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


# ----------------------------------------------------------------------------------------------------- dynamic sampling
def only(*names):
    """Scores with a spread for some prompts, equal ones for the rest."""
    return lambda r: float(r.sample_index % 2) if r.prompt_id in names else 1.0


def test_groups_without_signal_are_replaced_until_the_step_is_full(tracker):
    names = [f"p{i}" for i in range(12)]
    order = [p.id for p in ShuffledPrompts([prompt(n) for n in names], 0).take(12)]
    good = [order[1], order[3], order[4], order[9]]  # of each round: first 3, then 2 (1 good), 1 (bad), ...
    run = Run(tracker, only(*good), names=names, dynamic=SPREAD)
    collected = run()
    assert ids(collected.kept) == good[:3]
    # rounds: 3 asked, 1 good; 2 asked (3, 4), both good
    assert (collected.rounds, collected.without_signal, run.source.num_taken) == (2, 2, 5)
    assert sorted(ids(collected.scored)) == sorted(order[:5]), "rollouts on disk hold the dropped groups too"
    assert run.ledger.drop_reasons == {"no_signal": 8}
    run.train(collected)
    following = run(4, num_groups=1)
    assert ids(following.kept) == [order[9]], "each further round asks for what is missing, here one prompt"
    assert run.source.num_taken == 10
    run.train(following)


def test_a_round_asks_for_exactly_what_is_missing(tracker):
    names = [f"p{i}" for i in range(40)]
    run = Run(
        tracker, lambda r: float(r.sample_index % 2) if len(r.prompt_id) % 2 else 1.0, names=names, dynamic=SPREAD
    )
    asked = []
    take = run.source.take
    run.source.take = lambda n: asked.append(n) or take(n)
    collected = run(num_groups=8)
    kept = np.cumsum([0] + [len(p.id) % 2 for p in ShuffledPrompts([prompt(n) for n in names], 0).take(40)])
    expected, position = [], 0
    while kept[position] < 8 and len(expected) < 10:
        expected.append(8 - int(kept[position]))
        position += expected[-1]
    assert asked == expected
    assert len(collected.kept) <= 8
    run.train(collected)


def test_after_the_last_round_the_step_trains_on_what_it_has(tracker):
    run = Run(tracker, only("p0"), names=[f"p{i}" for i in range(30)], dynamic=SPREAD | {"max_rounds": 10})
    collected = run(num_groups=3)
    assert ids(collected.kept) == ["p0"]
    assert (collected.rounds, collected.without_signal) == (10, run.source.num_taken - 1)
    run.train(collected)


def test_a_step_without_any_signal_says_so(tracker):
    recorded = []
    run = Run(tracker, only(), dynamic=SPREAD | {"max_rounds": 2}, record=lambda *args: recorded.append(len(args[1])))
    with pytest.raises(RewardError, match=r"step 3: in 2 rounds .* of 6 groups .* spread .* scores go from 1 to 1\."):
        run()
    assert recorded == [6]
    assert run.ledger.drop_reasons == {"no_signal": 24}


def test_a_prompt_that_returns_in_a_step_is_another_group(tracker):
    """The data's end is reached inside a step: accepted groups stay, and nothing is counted twice."""
    seen = Counter()

    def score(rollout):
        seen[rollout.prompt_id] += 1
        return float(rollout.sample_index % 2) if "(round" in rollout.prompt_id or rollout.prompt_id == "a" else 1.0

    run = Run(tracker, score, names="abcd", dynamic=SPREAD)
    collected = run(num_groups=4)
    assert len(collected.kept) == 4
    names = ids(collected.kept)
    assert "a" in names
    assert len(set(names)) == 4
    assert all(count == 4 for count in seen.values())
    texts = {g.group.prompt.id: [r.text for r in g.group.rollouts] for g in collected.scored}
    again = next(n for n in names if n != "a")
    assert texts[again] != texts[again.partition(" ")[0]], "seeds of their own"
    run.train(collected)


def test_failures_are_judged_over_the_whole_step(tracker):
    """One failed sample of a late round of one group would be a quarter of that round."""
    names = [f"p{i}" for i in range(16)]
    order = [p.id for p in ShuffledPrompts([prompt(n) for n in names], 0).take(16)]
    failure = ScoreFailure("raised", "no")

    def score(r):
        if r.prompt_id == order[0]:
            return 1.0
        return failure if (r.prompt_id, r.sample_index) == (order[8], 1) else float(r.sample_index % 2)

    run = Run(tracker, score, names=names, dynamic=SPREAD, max_failure_rate=0.1)
    collected = run(num_groups=8)
    assert len(collected.kept[-1].scores) == 3
    assert run.ledger.drop_reasons == {"no_signal": 4, "reward_failed": 1}
    run.train(collected)


def test_resume_takes_the_same_prompts(tracker):
    def score(r):
        return float(r.sample_index % 2) if int(r.prompt_id.partition(" ")[0][1:]) % 3 == 0 else 0.0

    names = [f"p{i}" for i in range(20)]
    whole, first = Run(tracker, score, names=names, dynamic=SPREAD), Run(tracker, score, names=names, dynamic=SPREAD)
    steps = [ids(whole(step, 3).kept) for step in range(4)]
    assert [ids(first(step, 3).kept) for step in range(2)] == steps[:2]
    second = Run(tracker, score, names=names, dynamic=SPREAD)
    second.source.restore(first.source.state())
    assert second.source.num_taken == first.source.num_taken
    assert [ids(second(step, 3).kept) for step in (2, 3)] == steps[2:]
    assert second.source.num_taken == whole.source.num_taken


def test_more_groups_than_prompts_are_refused(tracker):
    with pytest.raises(DataError, match="4 prompts are asked for in one step"):
        Run(tracker, only(), dynamic=SPREAD)(num_groups=4)


# ------------------------------------------------------------------------------------------------------------ the rules
def group(*totals):
    one = np.array([1])
    rollouts = tuple(
        Rollout("a", i, one, one, np.zeros(1, np.float32), np.zeros(1, np.int64), "stop", "")
        for i in range(len(totals))
    )
    return ScoredGroup(Group(prompt("a"), rollouts, Sampling()), tuple(Score(t) for t in totals))


@pytest.mark.parametrize(
    ("rule", "totals", "kept"),
    [
        (MeanRange(kind="mean_range"), (0.0, 1.0), True),
        (MeanRange(kind="mean_range"), (1.0, 1.0), False),
        (MeanRange(kind="mean_range"), (0.0, 0.0), False),
        (MeanRange(kind="mean_range", low=-1, high=0.5), (0.0, 1.0), False),
        (MeanRange(kind="mean_range", low=-1, high=0.5), (0.0, 0.9), True),
        (Spread(kind="spread"), (0.7,) * 8, False),
        (Spread(kind="spread"), (0.1 + 0.2, 0.3, 0.3), False),  # equal up to rounding
        (Spread(kind="spread"), (1e6, 1e6 + 1e-4), False),
        (Spread(kind="spread"), (0.3, 0.4), True),
        (Spread(kind="spread"), (5.0,), False),
        (Spread(kind="spread", min_std=0.5), (0.0, 1.0), False),
        (Spread(kind="spread", min_std=0.49), (0.0, 1.0), True),
    ],
)
def test_which_groups_have_signal(rule, totals, kept):
    assert has_signal(group(*totals), rule) is kept
