"""Between scores and plan: streams, advantages, KL in the reward; and what is collected, counted and measured."""

import math
from dataclasses import replace

import numpy as np
import pytest

from skirl.collect import StepCollector
from skirl.config.method import MethodConfig
from skirl.config.schema import RewardConfig
from skirl.errors import RewardError
from skirl.measure import measure, measure_supervised
from skirl.protocols import Collected
from skirl.records import (
    Group,
    Media,
    Prompt,
    Ratio,
    Rollout,
    Sampling,
    Score,
    ScoredGroup,
    ScoreFailure,
    UpdateReport,
)
from skirl.rollouts.router import Router
from skirl.step import Batch, Method, score_one, supervised_sequence
from skirl.testing.fake_engine import FakeEngine
from skirl.testing.fake_scorer import FakeScorer
from skirl.testing.fake_trainer import FakeTrainer
from skirl.tracking.ledger import Ledger
from skirl.tracking.progress import ProgressDisplay
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.tracker import Tracker

PAD = 99


def prompt(name, ids=(1, PAD, PAD, PAD, 2)):
    return Prompt(name, "made", tuple(ids), (1, PAD, 2), (Media("a.wav"),), None, None, None, {})


def rollout(name, index, tokens, version=0):
    return Rollout(
        prompt_id=name,
        sample_index=index,
        prompt_ids=np.array([1, PAD, PAD, PAD, 2]),
        response_ids=np.asarray(tokens, dtype=np.int64),
        logprobs=np.full(len(tokens), -1.5 - 0.1 * index, dtype=np.float32),
        versions=np.full(len(tokens), version),
        finish_reason="stop",
        text="",
    )


def scored(name, totals, lengths=None, indices=None):
    """A group with the given total scores; sample i answers with i + 1 tokens."""
    indices = range(len(totals)) if indices is None else indices
    lengths = [i + 1 for i in indices] if lengths is None else lengths
    rollouts = tuple(rollout(name, i, [10 + i] * n) for i, n in zip(indices, lengths, strict=True))
    return ScoredGroup(Group(prompt(name), rollouts, Sampling()), tuple(Score(t) for t in totals))


class SpyTrainer(FakeTrainer):
    """Notes which log-probs were asked for; the reference is not the policy."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.asked, self.plans = [], []
        self._reference = np.random.default_rng(0).standard_normal(512)

    def logprobs(self, plan, role):
        self.asked.append(role)
        self.plans.append(plan)
        return super().logprobs(plan, role)


def method(**config):
    return Method(MethodConfig(**{"kl": None} | config), placeholder_id=PAD, max_scoring_tokens=20)


def by_id(batch):
    return {s.id: s for s in batch.sequences}


# ------------------------------------------------------------------------------------------------------------ sequences
def test_a_rollout_becomes_a_sequence_whose_action_tokens_are_its_response():
    batch = method().prepare([scored("a", [1.0, 0.0])], FakeTrainer())
    one = by_id(batch)["a#1"]
    assert one.input_ids.tolist() == [1, PAD, PAD, PAD, 2, 11, 11]
    assert one.action_positions.tolist() == [5, 6]
    assert one.media == (Media("a.wav"),)
    assert one.media_spans == ((1, 3),)
    assert one.rollout_logprobs.tolist() == np.float32([-1.6, -1.6]).tolist()
    assert batch.group_of == ("a", "a")


def test_runs_of_placeholders_are_searched_in_the_prompt_only():
    group = scored("a", [0.0], lengths=[3])
    response = replace(group.group.rollouts[0], response_ids=np.array([PAD, PAD, 7]))
    group = ScoredGroup(replace(group.group, rollouts=(response,)), group.scores)
    assert method().prepare([group], FakeTrainer()).sequences[0].media_spans == ((1, 3),)
    no_audio = Method(MethodConfig(kl=None), placeholder_id=None, max_scoring_tokens=20)
    assert no_audio.prepare([group], FakeTrainer()).sequences[0].media_spans == ()
    two = supervised_sequence(prompt("b", (PAD, 5, PAD, PAD)), [3, 4], PAD)
    assert two.media_spans == ((0, 1), (2, 2))
    assert two.input_ids.tolist() == [PAD, 5, PAD, PAD, 3, 4]
    assert two.action_positions.tolist() == [4, 5]
    assert (two.id, two.advantages, two.rollout_logprobs) == ("b", None, None)


def test_score_one_is_what_the_trainer_says():
    trainer = FakeTrainer(num_ranks=3)
    assert score_one(trainer, supervised_sequence(prompt("b"), [3, 4], PAD)) == pytest.approx([-math.log(512)] * 2)


# ----------------------------------------------------------------------------------------------------------- advantages
def test_group_norm_by_hand():
    batch = method(advantage={"kind": "group_norm", "eps": 0.0}).prepare([scored("a", [1.0, 2.0, 6.0])], FakeTrainer())
    std = math.sqrt((4 + 1 + 9) / 2)
    assert [s.advantages.tolist() for s in batch.sequences] == [
        pytest.approx([-2 / std]), pytest.approx([-1 / std] * 2), pytest.approx([3 / std] * 3)
    ]  # fmt: skip
    assert {s.advantages.dtype for s in batch.sequences} == {np.dtype(np.float64)}


def test_group_mean_by_hand():
    batch = method(advantage="group_mean").prepare([scored("a", [1.0, 2.0, 6.0])], FakeTrainer())
    assert [s.advantages[0] for s in batch.sequences] == pytest.approx([-2, -1, 3])


@pytest.mark.parametrize("kind", ["group_norm", "group_mean"])
def test_equal_scores_give_exact_zeros(kind):
    tenths = [0.1 + 0.2, 0.3, 0.3]  # equal up to rounding
    batch = method(advantage=kind).prepare([scored("a", tenths), scored("b", [0.7] * 8)], FakeTrainer())
    assert all(not s.advantages.any() for s in batch.sequences)


def test_groups_do_not_see_one_another_and_a_lost_sibling_changes_only_its_own():
    groups = [scored("a", [1.0, 2.0, 6.0]), scored("b", [5.0, 0.0]), scored("c", [3.0, 4.0, 4.0])]
    whole = by_id(method().prepare(groups, FakeTrainer()))
    lost = scored("a", [1.0, 6.0], indices=[0, 2])  # a#1 has no score
    left = method().prepare([groups[2], lost, groups[1]], FakeTrainer())
    assert [s.id for s in left.sequences] == ["c#0", "c#1", "c#2", "a#0", "a#2", "b#0", "b#1"]
    assert left.group_of == ("c", "c", "c", "a", "a", "b", "b")
    found = by_id(left)
    for key in ("b#0", "b#1", "c#0", "c#1", "c#2"):
        assert found[key].advantages.tolist() == whole[key].advantages.tolist()
    root = math.sqrt(12.5)
    assert found["a#0"].advantages[0] == pytest.approx(-2.5 / root, rel=1e-5)
    assert found["a#2"].advantages.tolist() == pytest.approx([2.5 / root] * 3, rel=1e-5)
    assert found["a#2"].num_actions == 3


def test_a_group_of_one_that_is_left_learns_nothing():
    batch = method().prepare([scored("a", [6.0], indices=[2])], FakeTrainer())
    assert batch.sequences[0].advantages.tolist() == [0.0] * 3


# -------------------------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({}, []),
        ({"epochs": 2}, ["policy"]),
        ({"mini_batches": 2}, ["policy"]),
        ({"kl": {"where": "loss"}}, ["reference"]),
        ({"kl": {"where": "reward", "estimator": "k1"}}, ["reference"]),
        ({"kl": {"where": "loss"}, "epochs": 2, "mini_batches": 2}, ["reference", "policy"]),
    ],
)
def test_log_probs_are_computed_only_where_the_method_needs_them(config, asked):
    trainer = SpyTrainer(num_ranks=2)
    batch = method(**config).prepare([scored("a", [1.0, 2.0, 6.0]), scored("b", [5.0, 0.0])], trainer)
    assert trainer.asked == asked
    for sequence in batch.sequences:
        assert (sequence.old_logprobs is not None) == ("policy" in asked)
        assert (sequence.reference_logprobs is not None) == ("reference" in asked)
        if sequence.old_logprobs is not None:
            assert sequence.old_logprobs == pytest.approx([-math.log(512)] * sequence.num_actions)
        if sequence.reference_logprobs is not None:
            index = int(sequence.id[-1])
            table = trainer._reference - np.log(np.exp(trainer._reference).sum())
            assert sequence.reference_logprobs == pytest.approx([table[10 + index]] * sequence.num_actions, rel=1e-5)
    for plan in trainer.plans:
        assert plan.num_ranks == 2
        rows = [m.sequences for rank in plan.steps[0].ranks for m in rank]
        assert all(sum(plan.sequences[i].num_tokens for i in row) <= 20 for row in rows)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_equals_a_hand_computation(estimator):
    trainer = SpyTrainer()
    totals = [1.0, 2.0, 6.0]
    config = {"kl": {"where": "reward", "estimator": estimator, "coef": 0.3}, "advantage": "group_mean"}
    batch = method(**config).prepare([scored("a", totals)], trainer)
    table = trainer._reference - np.log(np.exp(trainer._reference).sum())
    rewards = []
    for i, total in enumerate(totals):
        sampled, reference = float(np.float32(-1.5 - 0.1 * i)), float(np.float32(table[10 + i]))
        d = sampled - reference
        value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        rewards.append(total - 0.3 * (i + 1) * value)  # sample i has i + 1 tokens
    mean = sum(rewards) / 3
    assert [s.advantages[0] for s in batch.sequences] == pytest.approx([r - mean for r in rewards], rel=1e-6)
    assert max(abs(r - mean - (t - 3)) for r, t in zip(rewards, totals, strict=True)) > 0.1
    assert all(len(set(s.advantages)) == 1 for s in batch.sequences)


def test_kl_in_the_loss_leaves_advantages_alone():
    groups = [scored("a", [1.0, 2.0, 6.0])]
    with_kl = method(kl={"where": "loss"}).prepare(groups, SpyTrainer())
    without = method().prepare(groups, SpyTrainer())
    assert [s.advantages.tolist() for s in with_kl.sequences] == [s.advantages.tolist() for s in without.sequences]


# ----------------------------------------------------------------------------------------------------------------- plan
def test_the_plan_follows_the_method():
    made = method(epochs=3, mini_batches=2, normalizer={"kind": "constant", "length": 10})
    batch = made.prepare([scored("a", [1.0, 2.0, 6.0]), scored("b", [5.0, 0.0])], FakeTrainer())
    plan = made.plan(batch, num_ranks=2, max_tokens=30)
    assert len(plan.steps) == 6
    members = [sorted(i for rank in s.ranks for m in rank for i in m.sequences) for s in plan.steps]
    assert members == [[0, 1, 2], [3, 4]] * 3  # whole groups
    assert [w[0] for w in plan.weights] == pytest.approx([1 / 30] * 3 + [1 / 20] * 2)
    one = method(normalizer="sequence")
    assert one.plan(batch, num_ranks=1, max_tokens=100).weights[2].tolist() == pytest.approx([1 / 15] * 3)
    token = method(normalizer="token")
    assert token.plan(batch, num_ranks=1, max_tokens=100).weights[2].tolist() == pytest.approx([1 / 9] * 3)


# -------------------------------------------------------------------------------------------------------------- collect
@pytest.fixture
def tracker(tmp_path):
    run = RunDirectory.open(tmp_path / "run", resume=False, config={}, command="train")
    with Tracker(run, [], ProgressDisplay(None), 10) as made:
        yield made
    run.close()


def collect(tracker, score, *, step=3, record=None, **reward):
    router = Router([FakeEngine(), FakeEngine()], FakeScorer(score), seed=0)
    config = RewardConfig(**{"terms": {"acc": "accuracy"}} | reward)
    ledger = Ledger()
    collector = StepCollector(
        router,
        ledger,
        tracker,
        config,
        record=record or (lambda done, scored, sequences: pytest.fail("the loop records what is kept")),
        sampling=Sampling(max_new_tokens=40, stop_ids=(257,)),
        group_size=4,
    )
    return collector(step, [prompt("a"), prompt("b"), prompt("c")]), ledger


def broken(*which):
    failure = ScoreFailure("raised", "ValueError: no")
    return lambda r: failure if (r.prompt_id, r.sample_index) in which else float(len(r.text))


def test_everything_collected_is_in_flight_until_it_is_trained_on(tracker):
    collected, ledger = collect(tracker, broken())
    assert [g.group.prompt.id for g in collected.scored] == ["a", "b", "c"]
    assert collected.kept == collected.scored
    assert collected.seconds > 0
    assert (ledger.issued, len(ledger.in_flight)) == (12, 12)
    batch = method().prepare(collected.kept, FakeTrainer())
    ledger.trained(collected.key(s.id) for s in batch.sequences)
    ledger.check(idle=True)


def test_samples_without_a_score_are_dropped_and_counted(tracker):
    collected, ledger = collect(tracker, broken(("a", 1), ("c", 0)), max_failure_rate=0.5)
    assert [len(g.scores) for g in collected.scored] == [4, 4, 4]
    assert [[r.sample_index for r in g.group.rollouts] for g in collected.kept] == [[0, 2, 3], [0, 1, 2, 3], [1, 2, 3]]
    assert ledger.drop_reasons == {"reward_failed": 2}
    assert not {"3/a#1", "3/c#0"} & set(ledger.in_flight)
    assert len(ledger.in_flight) == 10

    collected, ledger = collect(tracker, broken(("a", 1)), max_failure_rate=0.5, on_failure="drop_group")
    assert [g.group.prompt.id for g in collected.kept] == ["b", "c"]
    assert ledger.drop_reasons == {"reward_failed": 1, "sibling_failed": 3}


def test_too_many_failures_end_the_run_and_what_was_sampled_is_kept(tracker):
    recorded = []

    def record(done, scored, sequences):
        recorded.append((done, len(scored), len(sequences)))

    with pytest.raises(RewardError, match=r"2 of 12 samples .* above reward\.max_failure_rate"):
        collect(tracker, broken(("a", 1), ("c", 0)), max_failure_rate=0.1, record=record)
    assert recorded == [(4, 3, 0)]
    everything = [(name, i) for name in "abc" for i in range(4)]
    with pytest.raises(RewardError, match="step 3: no rollout has a score"):
        collect(tracker, broken(*everything), max_failure_rate=1.0)


def test_seeds_depend_on_the_step(tracker):
    texts = [
        [r.text for g in collect(tracker, broken(), step=s)[0].scored for r in g.group.rollouts] for s in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


# -------------------------------------------------------------------------------------------------------------- measure
def test_measures_are_sums():
    failure = ScoreFailure("raised", "no")
    first = scored("a", [1.0, 3.0], lengths=[2, 4])
    second = scored("b", [2.0, 2.0, 0.0], lengths=[1, 1, 6])
    cut = replace(second.group.rollouts[2], finish_reason="length", versions=np.full(6, 4))
    second = ScoredGroup(
        replace(second.group, rollouts=(*second.group.rollouts[:2], cut)),
        (Score(2.0, {"acc": 2.0}), Score(2.0, {"acc": 2.0}), Score(None, failure=failure)),
    )
    kept = replace(second, group=replace(second.group, rollouts=second.group.rollouts[:2]), scores=second.scores[:2])
    collected = Collected(5, [first, second], [first, kept], seconds=2.0)
    report = UpdateReport(7, (0.5, 0.3), (2.0, 3.0), (1e-3, 2e-3), {"policy/ratio_mean": Ratio(8.0, 8.0)}, 1.0)
    found = measure(collected, Batch((), ()), report)
    values = {name: ratio.value for name, ratio in found.items()}
    assert values == pytest.approx(
        {
            "rollout/response_length": 14 / 5,
            "rollout/truncation_rate": 1 / 5,
            "rollout/tokens": 14.0,
            "rollout/tokens_per_s": 7.0,
            "reward/mean": 8 / 4,
            "reward/std": (math.sqrt(2) + 0.0) / 2,
            "reward/failure_rate": 1 / 5,
            "reward/groups_without_spread": 1 / 2,
            "reward/part/acc": 2.0,
            "reward/spread/acc": 0.0,
            "policy/ratio_mean": 1.0,
            "policy/loss": 0.4,
            "policy/version_lag": 6.0,  # the cut rollout, sampled at version 4, was not kept
            "optim/lr": 2e-3,
            "optim/grad_norm": 3.0,
        }
    )
    assert measure_supervised(report).keys() == {"policy/ratio_mean", "optim/lr", "optim/grad_norm"}
