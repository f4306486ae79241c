"""Plans: every sequence once, under the cap, equal work for all ranks, weights as the papers' objectives say."""

import itertools
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skirl.algorithms.kl import kl_k3
from skirl.algorithms.losses import ppo_clip
from skirl.errors import ConfigError
from skirl.planning.schedule import make_plan
from skirl.records import OptimizerStep, Plan, TrainingSequence
from tests.oracles import planning as oracle

CHECK = settings(deadline=None, max_examples=120, derandomize=True)
NORMALIZERS = ("token", "sequence", "constant")
MAX_TOKENS = 32
CONSTANT_LENGTH = 7

ranks = st.integers(1, 8)
normalizers = st.sampled_from(NORMALIZERS)


def sequence(index: int, tokens: int, actions: int) -> TrainingSequence:
    return TrainingSequence(f"row{index}#0", np.arange(tokens), np.arange(tokens - actions, tokens))


@st.composite
def batches(draw: st.DrawFn, max_size: int = 40) -> list[TrainingSequence]:
    lengths = draw(st.lists(st.integers(1, MAX_TOKENS), max_size=max_size))
    return [sequence(i, length, draw(st.integers(0, length - 1))) for i, length in enumerate(lengths)]


@st.composite
def grouped_batches(draw: st.DrawFn) -> tuple[list[TrainingSequence], list[str]]:
    """Groups of any size, siblings next to one another or not."""
    batch = draw(batches())
    return batch, [f"prompt{draw(st.integers(0, 9))}" for _ in batch]


def plan_of(batch: list[TrainingSequence], num_ranks: int = 1, **changes: Any) -> Plan:
    arguments: dict[str, Any] = {"max_tokens": MAX_TOKENS, "normalizer": "token", "constant_length": CONSTANT_LENGTH}
    return make_plan(batch, num_ranks=num_ranks, **(arguments | changes))


def members(step: OptimizerStep) -> list[int]:
    return [index for rank in step.ranks for micro_batch in rank for index in micro_batch.sequences]


def sizes(plan: Plan, step: OptimizerStep) -> list[list[int]]:
    """Tokens of each micro-batch, rank by rank."""
    return [[sum(plan.sequences[i].num_tokens for i in m.sequences) for m in rank] for rank in step.ranks]


class TestSchedule:
    @CHECK
    @given(grouped_batches(), ranks, st.integers(1, 4), st.integers(1, 3), normalizers)
    def test_every_sequence_once_a_pass_under_the_cap_and_equal_counts(
        self, grouped, num_ranks: int, mini_batches: int, epochs: int, normalizer: str
    ):
        batch, group_of = grouped
        plan = plan_of(
            batch, num_ranks, mini_batches=mini_batches, group_of=group_of, epochs=epochs, normalizer=normalizer
        )
        assert plan.num_ranks == num_ranks
        assert plan.max_tokens == MAX_TOKENS
        assert all(got is want for got, want in zip(plan.sequences, batch, strict=True))
        assert len(plan.steps) == mini_batches * epochs
        for start in range(0, len(plan.steps), mini_batches):
            one_pass = plan.steps[start : start + mini_batches]
            assert one_pass == plan.steps[:mini_batches]
            assert Counter(i for step in one_pass for i in members(step)) == Counter(range(len(batch)))
        for step in plan.steps:
            assert len(step.ranks) == num_ranks
            assert len({len(rank) for rank in step.ranks}) == 1
            assert all(size <= MAX_TOKENS for rank in sizes(plan, step) for size in rank)

    @CHECK
    @given(batches(), ranks)
    def test_no_more_micro_batches_than_first_fit_decreasing_needs(self, batch: list[TrainingSequence], num_ranks: int):
        plan = plan_of(batch, num_ranks)
        bins = oracle.first_fit_decreasing([s.num_tokens for s in batch], MAX_TOKENS)
        assert len(plan.steps[0].ranks[0]) <= max(1, -(-bins // num_ranks))

    @CHECK
    @given(batches(), ranks)
    def test_no_rank_idles_while_another_has_two_micro_batches_to_give(self, batch, num_ranks: int):
        plan = plan_of(batch, num_ranks)
        real = [sum(1 for m in rank if m.sequences) for rank in plan.steps[0].ranks]
        assert max(real) - min(real) <= 1

    @CHECK
    @given(grouped_batches(), ranks, st.integers(2, 4))
    def test_groups_go_whole_and_in_order_to_the_optimizer_steps(self, grouped, num_ranks: int, mini_batches: int):
        batch, group_of = grouped
        plan = plan_of(batch, num_ranks, mini_batches=mini_batches, group_of=group_of)
        step_of: dict[str, set[int]] = {}
        for number, step in enumerate(plan.steps):
            for i in members(step):
                step_of.setdefault(group_of[i], set()).add(number)
        assert all(len(steps) == 1 for steps in step_of.values())
        in_order = [min(step_of[name]) for name in dict.fromkeys(group_of)]
        assert in_order == sorted(in_order)
        counts = [in_order.count(number) for number in range(mini_batches)]
        assert max(counts) - min(counts) <= 1

    @CHECK
    @given(batches(max_size=20), ranks, st.integers(1, 4))
    def test_without_groups_each_sequence_is_dealt_alone(self, batch, num_ranks: int, mini_batches: int):
        alone = plan_of(batch, num_ranks, mini_batches=mini_batches)
        named = plan_of(batch, num_ranks, mini_batches=mini_batches, group_of=[s.id for s in batch])
        assert alone.steps == named.steps

    @CHECK
    @given(grouped_batches(), st.integers(1, 4))
    def test_which_optimizer_step_does_not_depend_on_ranks_or_cap(self, grouped, mini_batches: int):
        batch, group_of = grouped
        plans = [
            plan_of(batch, num_ranks, max_tokens=cap, mini_batches=mini_batches, group_of=group_of)
            for num_ranks, cap in ((1, MAX_TOKENS), (4, 3 * MAX_TOKENS), (3, 10**6))
        ]
        for plan in plans[1:]:
            for step, expected in zip(plan.steps, plans[0].steps, strict=True):
                assert sorted(members(step)) == sorted(members(expected))
            assert [w.tobytes() for w in plan.weights] == [w.tobytes() for w in plans[0].weights]

    def test_five_full_sequences_over_four_ranks(self):
        plan = plan_of([sequence(i, MAX_TOKENS, 5) for i in range(5)], 4)
        (step,) = plan.steps
        assert sorted(len(rank) for rank in step.ranks) == [2, 2, 2, 2]
        assert sorted(sum(1 for m in rank if m.sequences) for rank in step.ranks) == [1, 1, 1, 2]

    def test_two_halves_share_a_micro_batch(self):
        plan = plan_of([sequence(i, MAX_TOKENS // 2, 3) for i in range(4)])
        assert sizes(plan, plan.steps[0]) == [[MAX_TOKENS, MAX_TOKENS]]

    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_nothing_to_train_on_still_gives_every_rank_its_share(self, num_ranks: int):
        plan = plan_of([], num_ranks, mini_batches=2)
        assert plan.weights == ()
        assert [members(step) for step in plan.steps] == [[], []]
        assert plan.num_ranks == num_ranks

    def test_a_sequence_above_the_cap_is_refused_by_name(self):
        batch = [sequence(0, 3, 1), sequence(1, MAX_TOKENS + 1, 1)]
        with pytest.raises(ConfigError, match=r"row1#0.*33.*32"):
            plan_of(batch)
        plan_of([sequence(0, MAX_TOKENS, 1)])

    def test_group_names_of_another_length_are_refused(self):
        """A name too few must not drop the last sequence."""
        batch = [sequence(i, 3, 1) for i in range(4)]
        for names in (["a", "b", "c"], ["a", "b", "c", "d", "e"]):
            with pytest.raises((ValueError, AssertionError)):
                plan_of(batch, mini_batches=2, group_of=names)

    def test_the_constant_normalizer_needs_its_length(self):
        with pytest.raises(ConfigError, match="length"):
            plan_of([sequence(0, 3, 1)], normalizer="constant", constant_length=None)


@st.composite
def paired_batches(draw: st.DrawFn) -> tuple[list[TrainingSequence], list[str]]:
    """Units of one to three sequences that fit a micro-batch, their members anywhere in the batch."""
    batch: list[tuple[TrainingSequence, str]] = []
    for unit in range(draw(st.integers(0, 15))):
        for _ in range(draw(st.integers(1, 3))):
            length = draw(st.integers(1, MAX_TOKENS // 3))
            batch.append((sequence(len(batch), length, draw(st.integers(0, length - 1))), f"unit{unit}"))
    batch = draw(st.permutations(batch))
    return [s for s, _ in batch], [name for _, name in batch]


class TestUnits:
    @CHECK
    @given(paired_batches(), ranks, st.integers(1, 3), normalizers)
    def test_a_unit_is_adjacent_in_order_and_in_one_micro_batch(self, units, num_ranks, mini_batches, normalizer):
        batch, unit_of = units
        plan = plan_of(batch, num_ranks, mini_batches=mini_batches, unit_of=unit_of, normalizer=normalizer)
        rows = [m.sequences for step in plan.steps for rank in step.ranks for m in rank]
        assert sorted(i for row in rows for i in row) == list(range(len(batch)))
        where = {i: (number, place) for number, row in enumerate(rows) for place, i in enumerate(row)}
        for name in set(unit_of):
            places = [where[i] for i, other in enumerate(unit_of) if other == name]
            assert places == [(places[0][0], places[0][1] + k) for k in range(len(places))]
        for step in plan.steps:
            assert len({len(rank) for rank in step.ranks}) == 1
            assert all(size <= MAX_TOKENS for rank in sizes(plan, step) for size in rank)

    @CHECK
    @given(paired_batches(), ranks)
    def test_no_more_micro_batches_than_first_fit_of_the_units_needs(self, units, num_ranks):
        batch, unit_of = units
        plan = plan_of(batch, num_ranks, unit_of=unit_of)
        totals = Counter(dict.fromkeys(unit_of, 0))
        for s, name in zip(batch, unit_of, strict=True):
            totals[name] += s.num_tokens
        bins = oracle.first_fit_decreasing(list(totals.values()), MAX_TOKENS)
        assert len(plan.steps[0].ranks[0]) <= max(1, -(-bins // num_ranks))

    @CHECK
    @given(paired_batches(), ranks, st.integers(1, 3))
    def test_units_in_groups(self, units, num_ranks, mini_batches):
        """Two units a group: both rules hold at once."""
        batch, unit_of = units
        group_of = [str(int(name.removeprefix("unit")) // 2) for name in unit_of]
        plan = plan_of(batch, num_ranks, mini_batches=mini_batches, unit_of=unit_of, group_of=group_of)
        step_of = {i: number for number, step in enumerate(plan.steps) for i in members(step)}
        row_of = {i: m for step in plan.steps for rank in step.ranks for m in rank for i in m.sequences}
        for a, b in itertools.combinations(range(len(batch)), 2):
            assert group_of[a] != group_of[b] or step_of[a] == step_of[b]
            assert unit_of[a] != unit_of[b] or row_of[a] is row_of[b]

    def test_without_units_each_sequence_is_its_own_even_under_one_id(self):
        batch = [sequence(0, MAX_TOKENS, 3), sequence(0, MAX_TOKENS, 3)]
        plan = plan_of(batch, mini_batches=2)
        assert [members(step) for step in plan.steps] == [[0], [1]]

    def test_a_unit_above_the_cap_is_refused_with_all_its_members(self):
        batch = [sequence(0, 20, 5), sequence(1, 13, 5), sequence(2, 30, 5)]
        with pytest.raises(
            ConfigError, match=r"row0#0 \(20\) \+ row1#0 \(13\), which must share a row, have 33 tokens.*cap of 32"
        ):
            plan_of(batch, unit_of=["a", "a", "b"])
        plan_of(batch)

    def test_a_unit_over_two_groups_is_refused(self):
        batch = [sequence(i, 3, 1) for i in range(2)]
        with pytest.raises(ValueError, match="several groups"):
            plan_of(batch, unit_of=["a", "a"], group_of=["x", "y"])


class TestWeights:
    @CHECK
    @given(grouped_batches(), ranks, st.integers(1, 4), normalizers)
    def test_shares_of_sequences(self, grouped, num_ranks: int, mini_batches: int, normalizer: str):
        """1 / (sequences of the step with an action token): whatever the normaliser, ranks and rows."""
        batch, group_of = grouped
        plan = plan_of(batch, num_ranks, mini_batches=mini_batches, group_of=group_of, normalizer=normalizer)
        for step in plan.steps:
            filled = [i for i in members(step) if batch[i].num_actions]
            for i in members(step):
                assert plan.sequence_weights[i] == (1 / len(filled) if i in filled else 0.0)

    @CHECK
    @given(grouped_batches(), ranks, st.integers(1, 4), normalizers)
    def test_weights_equal_the_oracle_in_every_optimizer_step(self, grouped, num_ranks, mini_batches: int, normalizer):
        batch, group_of = grouped
        plan = plan_of(batch, num_ranks, mini_batches=mini_batches, group_of=group_of, normalizer=normalizer)
        assert [len(w) for w in plan.weights] == [s.num_actions for s in batch]
        assert all(w.dtype == np.float64 for w in plan.weights)
        for step in plan.steps:
            index = members(step)
            expected = oracle.weights([batch[i].num_actions for i in index], normalizer, CONSTANT_LENGTH)
            for i, weight in zip(index, expected, strict=True):
                np.testing.assert_allclose(plan.weights[i], float(weight), rtol=1e-15)
            total = sum(float(plan.weights[i].sum()) for i in index)
            if not any(batch[i].num_actions for i in index):
                assert total == 0
            elif normalizer != "constant":
                assert total == pytest.approx(1, rel=1e-12)

    @pytest.mark.parametrize(
        ("normalizer", "expected"),
        [
            ("token", [[1 / 5] * 4, [], [1 / 5]]),
            ("sequence", [[1 / 8] * 4, [], [1 / 2]]),
            ("constant", [[1 / 14] * 4, [], [1 / 14]]),
        ],
    )
    def test_worked_example(self, normalizer: str, expected: list[list[float]]):
        """4, 0 and 1 action tokens; the one without is no response to average over."""
        plan = plan_of([sequence(0, 6, 4), sequence(1, 6, 0), sequence(2, 6, 1)], normalizer=normalizer)
        assert [w.tolist() for w in plan.weights] == [pytest.approx(w, rel=1e-15) for w in expected]


class TestHash:
    @CHECK
    @given(grouped_batches(), st.data())
    def test_equal_exactly_where_schedule_and_weights_are(self, grouped, data: st.DataObject):
        batch, group_of = grouped
        plans = []
        for _ in range(2):
            plans.append(
                plan_of(
                    batch,
                    data.draw(st.integers(1, 3)),
                    normalizer=data.draw(normalizers),
                    constant_length=data.draw(st.integers(6, 7)),
                    mini_batches=data.draw(st.integers(1, 2)),
                    epochs=data.draw(st.integers(1, 2)),
                    max_tokens=data.draw(st.sampled_from((MAX_TOKENS, 2 * MAX_TOKENS))),
                    group_of=data.draw(st.sampled_from((None, group_of))),
                )
            )
        one, two = ((p.steps, [w.tobytes() for w in p.weights]) for p in plans)
        assert (plans[0].hash == plans[1].hash) == (one == two)

    @CHECK
    @given(batches(), ranks, normalizers)
    def test_the_same_batch_gives_the_same_plan(self, batch: list[TrainingSequence], num_ranks: int, normalizer: str):
        one, two = (plan_of(list(batch), num_ranks, normalizer=normalizer) for _ in range(2))
        assert one.hash == two.hash
        assert one.steps == two.steps

    @CHECK
    @given(batches(), st.data())
    def test_one_action_token_more_changes_the_hash(self, batch: list[TrainingSequence], data: st.DataObject):
        spare = [i for i, s in enumerate(batch) if s.num_actions < s.num_tokens - 1]
        assume(spare)
        i = data.draw(st.sampled_from(spare))
        changed = [*batch]
        changed[i] = sequence(i, batch[i].num_tokens, batch[i].num_actions + 1)
        assert plan_of(changed).hash != plan_of(batch).hash

    def test_the_factor_of_the_kl_is_part_of_it(self):
        batch = [sequence(i, 3, 1) for i in range(3)]
        plans = [plan_of(batch, kl_coef=k) for k in (0.0, 0.1, 0.1, 0.2)]
        assert [p.kl_coef for p in plans] == [0.0, 0.1, 0.1, 0.2]
        assert plans[1].hash == plans[2].hash
        assert len({p.hash for p in plans}) == 3

    def test_the_same_in_another_process_with_another_hash_seed(self):
        program = f"""
import sys
sys.path[:0] = {[entry for entry in sys.path if entry]!r}
import numpy as np
from skirl.planning.schedule import make_plan
from skirl.records import TrainingSequence
batch = [TrainingSequence(f"row{{i}}#0", np.arange(3 + i % 11), np.arange(2, 3 + i % 2)) for i in range(23)]
names = [f"prompt{{i // 4}}" for i in range(23)]
print(make_plan(batch, num_ranks=3, max_tokens={MAX_TOKENS}, normalizer="token", mini_batches=2, group_of=names).hash)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=False
        )
        batch = [TrainingSequence(f"row{i}#0", np.arange(3 + i % 11), np.arange(2, 3 + i % 2)) for i in range(23)]
        plan = plan_of(batch, 3, mini_batches=2, group_of=[f"prompt{i // 4}" for i in range(23)])
        assert done.stdout.strip() == plan.hash, done.stderr


class TestSplitInvariance:
    """7 sequences as 1 x 7, 7 x 1 and 3 + 4 on 1, 2 and 4 ranks: one loss, one gradient."""

    def batch(self) -> list[TrainingSequence]:
        actions = (1, 6, 3, 0, 2, 9, 4)
        return [sequence(i, 10, number) for i, number in enumerate(actions)]

    def loss_and_gradient(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Each rank accumulates over its micro-batches; ranks are summed, as a plan's weights ask for."""
        generator = torch.Generator().manual_seed(0)
        noise = [torch.randn(4, s.num_actions, 3, dtype=torch.float64, generator=generator) for s in plan.sequences]
        loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        for rank in plan.steps[0].ranks:
            theta = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
            for micro_batch in rank:
                for i in micro_batch.sequences:
                    log_ratio, advantages = noise[i][0] @ theta, noise[i][1, :, 0]
                    token_loss = ppo_clip(log_ratio, advantages, low=0.2, high=0.28, dual=3.0)
                    token_loss = token_loss + 0.04 * kl_k3(log_ratio, noise[i][2, :, 0])
                    part = (torch.from_numpy(plan.weights[i]) * token_loss).sum()
                    part.backward()
                    loss = loss + part.detach()
            gradient = gradient + (theta.grad if theta.grad is not None else 0)
        return loss, gradient

    @pytest.mark.parametrize("normalizer", NORMALIZERS)
    def test_loss_and_gradient(self, normalizer: str):
        whole = plan_of(self.batch(), 1, max_tokens=70, normalizer=normalizer)
        assert [len(m.sequences) for m in whole.steps[0].ranks[0]] == [7]
        loss, gradient = self.loss_and_gradient(whole)
        assert gradient.abs().min() > 1e-3
        for num_ranks in (1, 2, 4):
            for max_tokens in (10, 40, 70):
                plan = plan_of(self.batch(), num_ranks, max_tokens=max_tokens, normalizer=normalizer)
                got = self.loss_and_gradient(plan)
                torch.testing.assert_close(got[0], loss, rtol=1e-12, atol=1e-14)
                torch.testing.assert_close(got[1], gradient, rtol=1e-12, atol=1e-14)
