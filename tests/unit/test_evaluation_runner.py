"""The evaluator: what it asks engines for, and what it will not count."""

from dataclasses import replace

import numpy as np
import pytest

from skirl.config.schema import EvaluationConfig
from skirl.errors import DataError
from skirl.evaluation.runner import Evaluator
from skirl.models.families import TEXT
from skirl.records import Group, Prompt, Rollout, Sampling
from skirl.rollouts.parse import sample_maker

PROMPTS = [
    Prompt(f"s/{n}", "s", (1,), (1,), (), reference, None, reference, {}) for n, reference in enumerate(("one", "two"))
]
TRAINING = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_new_tokens=40, banned_ids=(3,))


def answer(prompt, index, sampling):
    text = "one" if sampling.temperature == 0 else "two"
    ids = np.ones(1, dtype=np.int64)
    return Rollout(prompt.id, index, ids, ids, np.zeros(1, dtype=np.float32), ids, "stop", text)


def run(prompts, **settings):
    asked = []

    def sample(key, prompts, sampling, count, on_group):
        asked.append((key, sampling, count))
        return [Group(p, tuple(answer(p, n, sampling) for n in range(count)), sampling) for p in prompts]

    evaluator = Evaluator(EvaluationConfig(**settings), sample, sample_maker(TEXT, forced=False), TRAINING, 0)
    return evaluator.run(prompts, lambda group: None), asked


def test_greedy_and_sampled_responses_are_counted_under_the_plain_distribution():
    found, asked = run(PROMPTS, samples=3, temperature=1.0)
    plain = replace(TRAINING, top_p=1.0, top_k=0, min_p=0.0)
    assert asked == [("greedy", replace(plain, temperature=0.0), 1), ("expected", replace(plain, temperature=1.0), 3)]
    assert found.overall.greedy.value == 0.5
    assert found.overall.expected is not None
    assert found.overall.expected.value == 0.5
    assert [len(u.samples) for u in found.utterances] == [3, 3]


def test_rows_without_a_reference_have_no_error_rate():
    with pytest.raises(DataError, match=r"1 of 2 held-out rows have no reference, such as s/1"):
        run([PROMPTS[0], replace(PROMPTS[1], reference=None)])
    run([PROMPTS[0], replace(PROMPTS[1], reference="")])  # nothing is said
