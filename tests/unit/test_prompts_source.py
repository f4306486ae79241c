"""The seeded order of prompts: whole epochs, another order each, exact resume."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.errors import CheckpointError, DataError
from skirl.prompts.source import ShuffledPrompts
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


@given(number=st.integers(1, 9), seed=st.integers(0, 2**40), takes=st.lists(st.integers(0, 25), max_size=4))
def test_resume_gives_the_prompts_that_would_have_followed(number: int, seed: int, takes: list[int]) -> None:
    source = ShuffledPrompts(prompts(number), seed)
    for take in takes:
        source.take(take)
    state = json.loads(json.dumps(source.state()))
    other = ShuffledPrompts(prompts(number), seed)
    other.restore(state)
    assert ids(other, 30) == ids(source, 30)


@given(number=st.integers(1, 9), seed=st.integers(0, 2**40), takes=st.lists(st.integers(1, 25), min_size=1, max_size=6))
def test_every_epoch_has_each_prompt_once_however_it_is_taken(number: int, seed: int, takes: list[int]) -> None:
    source = ShuffledPrompts(prompts(number), seed)
    stream = [prompt for take in takes for prompt in ids(source, take)]
    assert stream == ids(ShuffledPrompts(prompts(number), seed), len(stream))
    for start in range(0, len(stream) - number + 1, number):
        assert Counter(stream[start : start + number]) == Counter(f"s/{index}" for index in range(number))


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
