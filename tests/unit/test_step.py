"""Between scores and plan: streams, shaping, advantages, KL, corrections, chosen tokens; and what is measured."""

import math
from dataclasses import replace

import numpy as np
import pytest

from skirl.config.method import MethodConfig
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
from skirl.step import Batch, Method, score_one, supervised_sequence
from skirl.testing.fake_trainer import FakeTrainer
from skirl.tracking.metrics import finish

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


def scored(name, totals, lengths=None, indices=None, **score):
    """A group with the given total scores; sample i answers with i + 1 tokens."""
    indices = range(len(totals)) if indices is None else indices
    lengths = [i + 1 for i in indices] if lengths is None else lengths
    rollouts = tuple(rollout(name, i, [10 + i] * n) for i, n in zip(indices, lengths, strict=True))
    return ScoredGroup(Group(prompt(name), rollouts, Sampling()), tuple(Score(t, **score) for t in totals))


class SpyTrainer(FakeTrainer):
    """Notes which log-probs were asked for; the reference is not the policy."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.asked, self.plans = [], []
        self._reference = np.random.default_rng(0).standard_normal(512)
        self._values = np.random.default_rng(1).standard_normal(512)

    def logprobs(self, plan, role):
        self.asked.append(role)
        self.plans.append(plan)
        return super().logprobs(plan, role)

    def values(self, plan):
        self.asked.append("critic")
        return super().values(plan)

    def reference_of(self, sequence):
        """[T] reference log-probs of a sequence, as float32."""
        table = self._reference - np.log(np.exp(self._reference).sum())
        return table[sequence.input_ids[sequence.action_positions]].astype(np.float32).astype(np.float64)

    def value_of(self, sequence):
        return self._values[sequence.input_ids[sequence.action_positions]].astype(np.float32).astype(np.float64)


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


def test_every_group_estimator_by_hand():
    """Scores 1, 0, 3 with 1, 2 and 3 tokens."""
    scores, eps = [1.0, 0.0, 3.0], 1e-6
    mean, std = 4 / 3, math.sqrt(((1 - 4 / 3) ** 2 + (4 / 3) ** 2 + (3 - 4 / 3) ** 2) / 2)
    by_hand = {
        "leave_one_out": [1 - 1.5, 0 - 2.0, 3 - 0.5],
        "group_norm": [(r - mean) / (std + eps) for r in scores],
        "group_mean": [r - mean for r in scores],
        "max_rl": [(r - mean) / mean for r in scores],
        "opo": [r - (1 * 1 + 2 * 0 + 3 * 3) / 6 for r in scores],
    }
    for kind, expected in by_hand.items():
        batch = method(advantage=kind).prepare([scored("a", scores)], FakeTrainer())
        assert [s.advantages[0] for s in batch.sequences] == pytest.approx(expected), kind
        assert all(len(set(s.advantages)) == 1 for s in batch.sequences)


def test_pass_at_k_by_hand():
    """4 responses, 1 right (score at least the threshold), k = 2: p = 1 - C(3,2)/C(4,2) = 1/2, s = 1/2."""
    config = {"advantage": {"kind": "pass_at_k", "k": 2, "threshold": 0.7}}
    batch = method(**config).prepare([scored("a", [0.2, 0.9, 0.1, 0.6])], FakeTrainer())
    wrong = (1 - 0.5 - 2 / 3) / 0.5  # C(2,1) / C(3,1)
    assert [s.advantages[0] for s in batch.sequences] == pytest.approx([wrong, 1.0, wrong, wrong])
    lost = method(**config).prepare([scored("a", [0.2, 0.9])], FakeTrainer())
    assert all(not s.advantages.any() for s in lost.sequences), "a draw of 2 of 2 tells nothing apart"


def test_reinforce_pp_baseline_is_whitened_over_the_tokens_of_the_batch():
    groups = [scored("a", [1.0, 2.0]), scored("b", [5.0, 5.0])]
    batch = method(advantage="reinforce_pp_baseline").prepare(groups, FakeTrainer())
    raw = np.array([-0.5, 0.5, 0.5, 0, 0, 0])
    white = (raw - raw.mean()) / math.sqrt(raw.var() + 1e-8)
    assert np.concatenate([s.advantages for s in batch.sequences]) == pytest.approx(white)


def test_gdpo_normalises_parts_apart_and_then_over_the_batch():
    def group(name, parts):
        base = scored(name, [sum(p.values()) for p in parts])
        return ScoredGroup(base.group, tuple(Score(sum(p.values()), p) for p in parts))

    groups = [
        group("a", [{"x": 0.0, "y": 10.0}, {"x": 1.0, "y": 30.0}]),
        group("b", [{"x": 2.0}, {"x": 1.0}]),  # no y at all
        group("c", [{"x": 2.0, "y": 1.0}, {"x": 2.0}]),  # x equal, y not shared: nothing
    ]
    config = {"advantage": {"kind": "gdpo", "weights": {"y": 0.5}, "eps": 0.0}}
    batch = method(**config).prepare(groups, FakeTrainer())
    root = math.sqrt(0.5)
    raw = np.array([-1.5 * root, 1.5 * root, root, -root, 0.0, 0.0])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    assert [s.advantages[0] for s in batch.sequences] == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------- advantages of tokens
def test_gae_with_kl_in_the_reward_equals_a_hand_computation():
    trainer = SpyTrainer()
    config = {"kl": {"where": "reward", "estimator": "k1", "coef": 0.3}}
    config["advantage"] = {"kind": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False}
    batch = method(**config).prepare([scored("a", [1.0, -2.0, 6.0])], trainer)
    for sequence, total in zip(batch.sequences, [1.0, -2.0, 6.0], strict=True):
        value = trainer.value_of(sequence)
        rewards = -0.3 * (sequence.rollout_logprobs.astype(np.float64) - trainer.reference_of(sequence))
        rewards[-1] += total
        later, following, expected = 0.0, 0.0, []
        for r, v in zip(rewards[::-1], value[::-1], strict=True):
            later = r + 0.9 * following - v + 0.9 * 0.8 * later
            following = v
            expected.insert(0, later)
        assert sequence.advantages == pytest.approx(expected, rel=1e-6)
        assert sequence.returns == pytest.approx(np.array(expected) + value, rel=1e-6)
    assert len(set(batch.sequences[2].advantages)) == 3


def test_whitening_changes_advantages_and_not_returns():
    groups = [scored("a", [1.0, -2.0, 6.0]), scored("b", [0.5])]
    plain, white = (
        method(advantage={"kind": "gae", "whiten": w}).prepare(groups, SpyTrainer()).sequences for w in (False, True)
    )
    raw = np.concatenate([s.advantages for s in plain])
    assert np.concatenate([s.advantages for s in white]) == pytest.approx((raw - raw.mean()) / raw.std())
    assert [s.returns.tolist() for s in white] == [s.returns.tolist() for s in plain]


def test_reinforce_discounts_and_reinforce_pp_whitens():
    groups = [scored("a", [1.0, 2.0, 4.0])]
    batch = method(advantage={"kind": "reinforce", "gamma": 0.5}).prepare(groups, FakeTrainer())
    assert [s.advantages.tolist() for s in batch.sequences] == [[1.0], [1.0, 2.0], [1.0, 2.0, 4.0]]
    batch = method(advantage="reinforce_pp").prepare(groups, FakeTrainer())
    raw = np.array([1.0, 2, 2, 4, 4, 4])
    expected = (raw - raw.mean()) / math.sqrt(raw.var() + 1e-8)
    assert np.concatenate([s.advantages for s in batch.sequences]) == pytest.approx(expected)


def turned(turns, ends, total=None):
    base = scored("a", [sum(turns) if total is None else total], lengths=[ends[-1]])
    response = replace(base.group.rollouts[0], turn_ends=ends)
    return ScoredGroup(replace(base.group, rollouts=(response,)), (Score(sum(turns), turns=turns),))


def test_a_turn_earns_its_own_and_later_turns_rewards():
    config = {"advantage": {"kind": "reinforce"}}
    batch = method(**config).prepare([turned((1.0, 10.0, 100.0), (2, 3, 5))], FakeTrainer())
    assert batch.sequences[0].advantages.tolist() == [111, 111, 110, 100, 100]
    shaped = method(**config, shaping={"clip_range": (0, 50)}).prepare(
        [turned((1.0, 10.0, 100.0), (2, 3, 5))], FakeTrainer()
    )
    assert shaped.sequences[0].advantages.tolist() == [50, 50, 49, 39, 39], "what shaping takes is taken at the end"


@pytest.mark.parametrize(
    ("config", "group", "said"),
    [
        ({"advantage": "group_norm"}, turned((1.0, 2.0), (1, 3)), r"a#0 .* biased where the policy decides how many"),
        ({"advantage": "reinforce"}, turned((1.0, 2.0), (1, 2, 3)), r"a#0 has 3 turns, but its reward names 2 values"),
        (
            {"advantage": "reinforce", "policy_loss": "gspo", "normalizer": "sequence"},
            turned((1.0, 2.0), (1, 3)),
            r"group a .* gspo is a loss of whole responses",
        ),
        ({"advantage": "max_rl"}, scored("a", [1.0, -0.5]), r"sample a#1 scored -0.5, .* max_rl .* needs scores >= 0"),
    ],
)
def test_scores_that_a_method_cannot_learn_from(config, group, said):
    with pytest.raises(RewardError, match=said):
        method(**config).prepare([group], FakeTrainer())


# -------------------------------------------------------------------------------------------------------------- shaping
def shaped(totals, shaping, *, lengths=(1, 2, 3), cut=(), budget=10):
    base = scored("a", totals, lengths=list(lengths))
    rollouts = tuple(
        replace(r, finish_reason="length" if i in cut else "stop") for i, r in enumerate(base.group.rollouts)
    )
    group = ScoredGroup(Group(base.group.prompt, rollouts, Sampling(max_new_tokens=budget)), base.scores)
    batch = method(advantage="reinforce", shaping=shaping).prepare([group], FakeTrainer())
    return [float(s.advantages[0]) for s in batch.sequences], batch


def test_shaping_by_hand_and_in_order():
    assert shaped([-9.0, 0.5, 9.0], {"clip_range": (-1, 1)})[0] == [-1.0, 0.5, 1.0]
    assert shaped([1.0, 2.0, 4.0], {"truncation": {"factor": 0.5}}, cut=(0, 2))[0] == [0.5, 2.0, 2.0]
    assert shaped([1.0, 2.0, 4.0], {"truncation": {"score": -1}}, cut=(2,))[0] == [1.0, 2.0, -1.0]
    overlong = {"overlong": {"buffer_share": 0.4, "penalty": 2.0}}  # 4 of 10 tokens
    found, batch = shaped([1.0] * 4, overlong, lengths=(6, 7, 9, 10))
    assert found == pytest.approx([1.0, 0.5, -0.5, -1.0])
    assert batch.metrics["reward/shaping"].value == pytest.approx(-4 / 4)
    length = {"length": {"coef": 2.0, "threshold": 0.5}}
    assert shaped([1.0, 0.0, 1.0], length, lengths=(2, 4, 6))[0] == pytest.approx([2.0, 0.0, 0.0])
    assert shaped([0.0, 0.0, 1.0], length, lengths=(2, 6, 4))[0] == pytest.approx([0.0, -1.0, 1.0])
    everything = {"clip_range": (0, 1), "truncation": {"factor": 0.5}, **overlong, **length}
    found, _ = shaped([7.0, 0.0, 1.0], everything, lengths=(2, 4, 10), cut=(2,))
    assert found == pytest.approx([1 + 1.0, 0 + 2 * 0.25 * 0, 0.5 - 2 - 1.0])
    assert shaped([1.0, 2.0, 3.0], {})[1].metrics == {}


# ------------------------------------------------------------------------------------------------------------------- KL
def adaptive(**config):
    return method(kl={"where": "loss", "coef": 0.1, "adaptive": {"target": 2.0, "horizon": 100}} | config)


def test_the_controller_is_fed_with_the_kl_of_a_response_and_its_state_is_kept():
    trainer = SpyTrainer()
    groups = [scored("a", [1.0, 2.0, 6.0])]
    made = adaptive()
    batch = made.prepare(groups, trainer)
    total = sum((s.rollout_logprobs.astype(np.float64) - trainer.reference_of(s)).sum() for s in batch.sequences)
    assert batch.kl.numerator == pytest.approx(total)
    assert batch.kl.denominator == 3
    assert (batch.kl_coef, made.plan(batch, num_ranks=1, max_tokens=99).kl_coef) == (0.1, 0.1)
    error = min(max(total / 3 / 2.0 - 1, -0.2), 0.2)
    made.adapt(batch)
    second = made.prepare(groups, trainer)
    assert second.kl_coef == pytest.approx(0.1 * (1 + error * 3 / 100))
    assert batch.kl_coef == 0.1
    resumed = adaptive()
    resumed.restore(made.state())
    assert resumed.prepare(groups, trainer).kl_coef == second.kl_coef
    assert made.plan(second, num_ranks=1, max_tokens=99).kl_coef == second.kl_coef


def test_a_fixed_factor_stays_and_is_the_recipes():
    made = method(kl={"where": "reward", "estimator": "k1", "coef": 0.1})
    batch = made.prepare([scored("a", [1.0, 2.0])], SpyTrainer())
    made.adapt(batch)
    assert made.prepare([scored("a", [1.0, 2.0])], SpyTrainer()).kl_coef == 0.1
    assert made.plan(batch, num_ranks=1, max_tokens=99).kl_coef == 0.0, "it is in the reward already"
    other = method(kl={"where": "reward", "estimator": "k1", "coef": 0.2})
    other.restore(made.state())
    assert other.prepare([scored("a", [1.0, 2.0])], SpyTrainer()).kl_coef == 0.2


# ------------------------------------------------------------------------------------------- corrections and selections
def test_corrections_by_hand():
    batch = method(correction={"kind": "tis", "high": 1.2}).prepare([scored("a", [1.0, 2.0])], FakeTrainer())
    gaps = [-math.log(512) - float(np.float32(-1.5 - 0.1 * i)) for i in range(2)]
    assert [s.corrections[0] for s in batch.sequences] == pytest.approx([min(math.exp(g), 1.2) for g in gaps], rel=1e-6)
    assert batch.metrics["correction/cut_fraction"].value == 0.0
    assert batch.metrics["correction/weight_mean"].value == pytest.approx(
        (math.exp(gaps[0]) + 2 * math.exp(gaps[1])) / 3, rel=1e-6
    )
    masked = method(correction="icepop").prepare([scored("a", [1.0, 2.0])], FakeTrainer())
    assert all(not s.corrections.any() for s in masked.sequences)
    assert masked.metrics["correction/cut_fraction"].value == 1.0
    for kind in ("sequence_mask", "sequence_is"):
        found = method(correction=kind).prepare([scored("a", [1.0, 2.0], lengths=[2, 0])], FakeTrainer())
        assert [len(s.corrections) for s in found.sequences] == [2, 0]


def test_tokens_of_high_covariance_are_chosen_in_each_optimizer_step():
    config = {"policy_loss": {"kind": "kl_cov", "share": 0.3}, "mini_batches": 2, "epochs": 2, "old_policy": "rollout"}
    made = method(**config, advantage="group_mean")
    batch = made.prepare([scored("a", [1.0, 2.0, 6.0]), scored("b", [5.0, 0.0, 1.0])], FakeTrainer())
    plan = made.plan(batch, num_ranks=2, max_tokens=40)
    assert all(s.selected is None for s in batch.sequences)
    for members in ((0, 1, 2), (3, 4, 5)):
        sequences = [plan.sequences[i] for i in members]
        logprobs = np.concatenate([s.old_logprobs for s in sequences]).astype(np.float64)
        advantages = np.concatenate([s.advantages for s in sequences])
        covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
        selected = np.concatenate([s.selected for s in sequences])
        assert selected.sum() == 1  # floor(0.3 * 6)
        assert covariance[selected] == covariance.max()


def test_the_choice_of_clip_cov_is_seeded():
    config = {"policy_loss": {"kind": "clip_cov", "share": 0.05, "cov_low": -9e9, "cov_high": 9e9}}

    def chosen(seed, totals=(1.0, 2.0)):
        settings = MethodConfig(**config, kl=None, advantage="group_mean")
        made = Method(settings, placeholder_id=PAD, max_scoring_tokens=400, seed=seed)
        batch = made.prepare([scored("a", list(totals), lengths=[100, 100])], FakeTrainer())
        plan = made.plan(batch, num_ranks=1, max_tokens=999)
        return np.flatnonzero(np.concatenate([s.selected for s in plan.sequences])).tolist()

    assert chosen(1) == chosen(1) != chosen(2)
    assert len(chosen(1)) == 10


def test_the_choice_of_clip_cov_differs_between_optimizer_steps():
    settings = MethodConfig(
        policy_loss={"kind": "clip_cov", "share": 0.05, "cov_low": -9e9, "cov_high": 9e9},
        kl=None,
        advantage="group_mean",
        mini_batches=2,
    )
    made = Method(settings, placeholder_id=PAD, max_scoring_tokens=400, seed=1)
    equal = [scored(name, [1.0, 2.0], lengths=[100, 100]) for name in ("a", "b")]
    plan = made.plan(made.prepare(equal, FakeTrainer()), num_ranks=1, max_tokens=999)
    first, second = (np.concatenate([plan.sequences[i].selected for i in pair]) for pair in ((0, 1), (2, 3)))
    assert first.sum() == second.sum() == 10  # only the step's number tells the two apart
    assert (first != second).any()


# ---------------------------------------------------------------------------------------------------------------- roles
def test_which_roles_a_step_trains():
    assert [method().roles(step) for step in (0, 5)] == [("policy",)] * 2
    ppo = Method(MethodConfig(preset="ppo"), placeholder_id=None, max_scoring_tokens=9, critic_warmup_steps=2)
    assert [ppo.roles(step) for step in (0, 1, 2)] == [("critic",)] * 2 + [("policy", "critic")]


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
        ({"correction": "tis"}, ["policy"]),
        ({"policy_loss": "clip_cov"}, ["policy"]),
        ({"epochs": 2, "old_policy": "rollout"}, []),
        ({"advantage": "gae"}, ["critic"]),
        ({"preset": "ppo", "kl": {"where": "reward", "estimator": "k1"}}, ["reference", "policy", "critic"]),
    ],
)
def test_log_probs_are_computed_only_where_the_method_needs_them(config, asked):
    trainer = SpyTrainer(num_ranks=2)
    batch = method(**config).prepare([scored("a", [1.0, 2.0, 6.0]), scored("b", [5.0, 0.0])], trainer)
    assert trainer.asked == asked
    for sequence in batch.sequences:
        on_host = config.get("old_policy") == "rollout"
        assert (sequence.old_logprobs is not None) == ("policy" in asked or on_host)
        assert (sequence.reference_logprobs is not None) == ("reference" in asked)
        assert (sequence.values is not None) == (sequence.returns is not None) == ("critic" in asked)
        if on_host:
            assert sequence.old_logprobs is sequence.rollout_logprobs
        elif sequence.old_logprobs is not None:
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
            "collect/rounds": 1.0,
            "collect/groups_without_signal": 0.0,
            "policy/version_lag": 6.0,  # the cut rollout, sampled at version 4, was not kept
            "optim/lr": 2e-3,
            "optim/grad_norm": 3.0,
        }
    )
    assert measure_supervised(report).keys() == {"policy/ratio_mean", "optim/lr", "optim/grad_norm"}


def test_measures_of_what_was_prepared():
    trainer = SpyTrainer()
    config = {"preset": "ppo", "mini_batches": 1, "advantage": {"whiten": False}}
    config["kl"] = {"where": "reward", "estimator": "k1", "coef": 0.5}
    group = scored("a", [1.0, 3.0], lengths=[2, 4])
    batch = method(**config).prepare([group], trainer)
    nothing = UpdateReport(3, (), (), (), {"policy/ratio_mean": Ratio(1.0, 6.0)}, 1.0)
    found = measure(Collected(5, [group], [group], 2.0, rounds=3, without_signal=7), batch, nothing)
    advantages, returns, values = (
        np.concatenate([getattr(s, name) for s in batch.sequences]) for name in ("advantages", "returns", "values")
    )
    expected = {
        "advantage/mean": advantages.mean(),
        "advantage/std": advantages.std(),
        "critic/return_mean": returns.mean(),
        "critic/explained_variance": 1 - (returns - values).var() / returns.var(),
        "kl/coef": 0.5,
        "kl/reference_per_response": batch.kl.value,
        "collect/rounds": 3,
        "collect/groups_without_signal": 7,
        "policy/version_lag": 3.0,  # the policy was not updated: what sampled is what there is
        "policy/ratio_mean": 1 / 6,
    }
    assert {name: found[name].value for name in expected} == pytest.approx(expected)
    assert not {"policy/loss", "optim/lr", "optim/grad_norm"} & found.keys()
    finish(found)
