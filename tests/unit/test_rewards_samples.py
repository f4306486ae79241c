"""What a reward sees of a rollout."""

from dataclasses import replace

from skirl.models.families import TEXT
from skirl.rollouts.parse import sample_maker
from skirl.testing.reward_samples import make_group

TURNS = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})


def test_chat_turns_and_the_number_of_turns():
    group = make_group([" a ", "b"], "ref", row={"messages": TURNS}, num_turns=2)
    first, second = sample_maker(TEXT, forced=False)(group)
    assert first.messages == TURNS
    assert (first.text, first.transcript, first.num_turns) == (" a ", "a", 2)
    one_turn = replace(group, rollouts=tuple(replace(rollout, turn_ends=()) for rollout in group.rollouts))
    assert [sample.num_turns for sample in sample_maker(TEXT, forced=False)(one_turn)] == [1, 1]
    assert second.index == 1


def test_rows_without_turns_have_none():
    [sample] = sample_maker(TEXT, forced=False)(make_group(["a"]))
    assert sample.messages == ()
