"""The seeded order of prompts: whole epochs, another order each, exact resume."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.errors import CheckpointError, DataError
from skirl.prompts.source import ShuffledPrompts, check_enough
from skirl.protocols import PromptSource
from skirl.records import Prompt


def prompts(number: int) -> list[Prompt]:
    return [
        Prompt(
            id=f"s/{index}", source="s", input_ids=(1,), compact_ids=(1,), media=(), reference=None, language=None,
            answer=None, row={},
        )
        for index in range(number)
    ]  # fmt: skip


def ids(source: ShuffledPrompts, number: int) -> list[str]:
    return [prompt.id for prompt in source.take(number)]


TAKES = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), max_size=8)))


@given(TAKES, st.integers(0, 2**40))
def test_resume_gives_the_prompts_that_would_have_followed(number_and_takes: tuple[int, list[int]], seed: int) -> None:
    number, takes = number_and_takes
    source = ShuffledPrompts(prompts(number), seed)
    for take in takes:
        source.take(take)
    state = json.loads(json.dumps(source.state()))
    other = ShuffledPrompts(prompts(number), seed)
    other.restore(state)
    for take in (number, max(1, number // 2), number, 1, number):
        assert ids(other, take) == ids(source, take)


@given(TAKES, st.integers(0, 2**40))
def test_every_epoch_has_each_prompt_once_and_no_step_has_one_twice(
    number_and_takes: tuple[int, list[int]], seed: int
) -> None:
    number, takes = number_and_takes
    source = ShuffledPrompts(prompts(number), seed)
    steps = [ids(source, take) for take in takes]
    assert all(len(set(step)) == len(step) for step in steps)
    stream = [prompt for step in steps for prompt in step]
    for start in range(0, len(stream) - number + 1, number):
        assert Counter(stream[start : start + number]) == Counter(f"s/{index}" for index in range(number))


def test_more_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(DataError, match=r"4 prompts are asked for in one step, but data\.train holds 3"):
        ShuffledPrompts(prompts(3), 0).take(4)


def test_steps_that_want_more_than_there_is_are_refused_by_their_setting() -> None:
    check_enough(prompts(3), 3, "rm.batch_size")
    with pytest.raises(DataError) as caught:
        check_enough(prompts(3), 4, "rm.batch_size")
    assert str(caught.value) == (
        "rm.batch_size = 4 asks for more different rows in a step than data.train holds, which is 3: set rm.batch_size "
        "to 3 or less, or add rows."
    )


def test_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    source = ShuffledPrompts(prompts(8), seed=3)
    first, second = ids(source, 8), ids(source, 8)
    assert first != second
    assert first != ids(ShuffledPrompts(prompts(8), seed=4), 8)
    # Literals: a change of them breaks the resume of every run.
    assert [name[2:] for name in first] == ORDER_OF_SEED_3
    assert isinstance(source, PromptSource)


ORDER_OF_SEED_3 = ["0", "1", "2", "7", "5", "6", "4", "3"]


def test_other_data_or_another_seed_is_refused() -> None:
    state = ShuffledPrompts(prompts(4), seed=1).state()
    with pytest.raises(CheckpointError, match="the training data changed since the checkpoint: it had 4 prompts"):
        ShuffledPrompts(prompts(5), seed=1).restore(state)
    with pytest.raises(CheckpointError, match=r"made with run\.seed 1, the recipe says 2"):
        ShuffledPrompts(prompts(4), seed=2).restore(state)
    reordered = ShuffledPrompts(prompts(4)[::-1], seed=1)
    with pytest.raises(CheckpointError, match="the training data changed"):
        reordered.restore(state)


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(DataError, match="there are no prompts to train on"):
        ShuffledPrompts([], seed=0)
