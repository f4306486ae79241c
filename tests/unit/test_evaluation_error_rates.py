"""Corpus rates against worked figures and loops, and intervals against simulations whose truth is known."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.errors import DataError
from skirl.evaluation.error_rates import Utterance, compare, evaluate, rate_name, score_utterance
from skirl.speech.edits import Edits, Unit


def utterance(
    id: str,
    errors: int,
    num_reference: int,
    *,
    samples=(),
    source="hard",
    language: str | None = "English",
    unit: Unit = "char",
):
    return Utterance(
        id=id,
        source=source,
        language=language,
        reference="x" * num_reference,
        hypothesis="",
        unit=unit,
        edits=Edits(0, 0, errors, num_reference),
        samples=tuple(Edits(0, 0, count, num_reference) for count in samples),
    )


def test_one_utterance_is_scored_on_its_unit() -> None:
    scored = score_utterance(
        id="1",
        source="s",
        language="English",
        reference="Five six.",
        hypothesis="five sex",
        samples=["five six", "five", "five six seven"],
        unit="char",
        truncated=True,
    )
    assert scored.edits == Edits(0, 0, 1, 7)
    assert scored.samples == (Edits(0, 0, 0, 7), Edits(0, 3, 0, 7), Edits(5, 0, 0, 7))
    assert scored.expected_edits == pytest.approx(8 / 3)
    assert (scored.unit, scored.reference, scored.truncated) == ("char", "Five six.", True)
    chinese = score_utterance(id="2", source="s", language="Chinese", reference="九二", hypothesis="九 八")
    assert (chinese.unit, chinese.edits) == ("char", Edits(0, 0, 1, 2))


def test_the_corpus_rate_is_a_ratio_of_sums() -> None:
    """1 of 1 wrong and 0 of 4: 0.2, where the mean of ratios is 0.5."""
    result = evaluate([utterance("a", 1, 1, unit="word"), utterance("b", 0, 4, unit="word")])
    assert result.overall.greedy.value == pytest.approx(0.2)
    assert result.overall.name == "WER"
    assert (result.overall.num_utterances, result.overall.num_reference) == (2, 5)


def test_parts_truncation_and_empty_references() -> None:
    rows = [
        Utterance("a", "s", "English", "x x x x", "", "word", Edits(1, 2, 1, 4), truncated=True),
        Utterance("b", "s", "English", "", "noise", "word", Edits(3, 0, 0, 0)),
        Utterance("c", "s", "English", "...", "", "word", Edits(0, 0, 0, 0)),
        Utterance("d", "s", "English", "x x x x", "x x x x", "word", Edits(0, 0, 0, 4)),
    ]
    rate = evaluate(rows).overall
    assert rate.greedy.value == pytest.approx(7 / 8)
    assert (rate.insertions, rate.deletions, rate.substitutions) == pytest.approx((4 / 8, 2 / 8, 1 / 8))
    assert rate.truncated == pytest.approx(1 / 4)
    assert (rate.num_no_reference, rate.num_vanished) == (2, 1)
    assert rate.expected is None


def test_without_any_reference_unit_the_rate_is_not_a_number() -> None:
    rate = evaluate([Utterance("b", "s", None, "", "noise", "word", Edits(1, 0, 0, 0))]).overall
    assert all(math.isnan(value) for value in (rate.greedy.value, rate.greedy.low, rate.insertions))


def test_the_expected_rate_is_the_sum_over_samples() -> None:
    """(1 + 3 + 0 + 2) edits over 2 samples of 4 + 6 units."""
    rate = evaluate([utterance("a", 0, 4, samples=(1, 3)), utterance("b", 0, 6, samples=(0, 2))]).overall
    assert rate.expected is not None
    assert rate.expected.value == pytest.approx(6 / (2 * 10))
    assert rate.greedy.value == 0


def test_a_lost_sample_changes_only_its_own_utterance() -> None:
    rows = [utterance("a", 0, 4, samples=(1, 3)), utterance("b", 0, 6, samples=(2,)), utterance("c", 0, 90)]
    rate = evaluate(rows).overall
    assert rate.expected is not None
    assert rate.expected.value == pytest.approx((2 + 2) / 10)
    assert (rate.num_sampled, rate.num_utterances) == (2, 3)


def test_sources_and_languages_have_their_own_rates() -> None:
    rows = [
        utterance("1", 1, 10, source="clean", language="Chinese"),
        utterance("1", 3, 10, source="hard", language="Chinese"),
        utterance("2", 5, 10, source="hard", language="English", unit="word"),
        utterance("3", 7, 10, source="hard", language=None, unit="word"),
    ]
    result = evaluate(rows)
    assert [(rate.source, rate.name, rate.greedy.value) for rate in result.sources] == [
        ("clean", "CER", pytest.approx(0.1)),
        ("hard", "error rate", pytest.approx(0.5)),
    ]
    assert [(rate.source, rate.language, rate.name, rate.greedy.value) for rate in result.languages] == [
        ("clean", "Chinese", "CER", pytest.approx(0.1)),
        ("hard", "Chinese", "CER", pytest.approx(0.3)),
        ("hard", "English", "WER", pytest.approx(0.5)),
        ("hard", None, "WER", pytest.approx(0.7)),
    ]
    assert result.overall.greedy.value == pytest.approx(0.4)


def test_names_of_rates() -> None:
    assert rate_name(["char", "char"]) == "CER"
    assert rate_name(["word"]) == "WER"
    assert rate_name(["mixed"]) == rate_name(["char", "mixed"]) == rate_name(["word", "mixed"]) == "MER"
    assert rate_name(["char", "word"]) == rate_name(["char", "word", "mixed"]) == "error rate"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), st.randoms())
@settings(max_examples=50)
def test_order_does_not_matter_and_intervals_hold_the_sums(
    counts: list[tuple[int, int]], shuffler: random.Random
) -> None:
    rows = [utterance(str(index), *count, samples=(count[0], 0)) for index, count in enumerate(counts)]
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    result = evaluate(rows, bootstrap=100)
    assert repr(evaluate(shuffled, bootstrap=100)) == repr(result)  # repr: NaN equals NaN
    edits, reference = sum(c[0] for c in counts), sum(c[1] for c in counts)
    if reference:
        assert result.overall.greedy.value == pytest.approx(edits / reference)
        assert result.overall.greedy.low <= result.overall.greedy.high


def test_a_seed_fixes_the_interval_and_memory_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [utterance(str(index), index % 4, 10) for index in range(50)]
    first = evaluate(rows, seed=1)
    assert first == evaluate(rows, seed=1)
    assert first.overall.greedy != evaluate(rows, seed=2).overall.greedy
    monkeypatch.setattr("skirl.evaluation.error_rates._MAX_DRAWS_AT_ONCE", 50 * 7)
    assert evaluate(rows, seed=1) == first


def test_the_interval_is_that_of_a_plain_loop() -> None:
    chooser = random.Random(0)
    counts = [(chooser.randint(0, 5), chooser.randint(1, 20)) for _ in range(40)]
    draws = []
    for _ in range(4000):
        drawn = [chooser.choice(counts) for _ in counts]
        draws.append(sum(errors for errors, _ in drawn) / sum(reference for _, reference in drawn))
    draws.sort()
    result = evaluate([utterance(str(i), *count) for i, count in enumerate(counts)], bootstrap=4000).overall.greedy
    # Quantiles of 4000 draws have a standard error of about 0.0015 here.
    assert result.low == pytest.approx(draws[100], abs=0.008)
    assert result.high == pytest.approx(draws[3900], abs=0.008)


def test_intervals_cover_the_truth() -> None:
    """Utterances differ in length and difficulty; the true corpus rate is E[edits] / E[units] = 0.15."""
    generator = np.random.default_rng(0)
    trials, covered = 300, 0
    for _ in range(trials):
        lengths = generator.integers(2, 20, size=150)
        difficulty = generator.choice([0.05, 0.25], size=150)
        errors = generator.poisson(difficulty * lengths)
        rows = [utterance(f"{i:03d}", int(e), int(n)) for i, (e, n) in enumerate(zip(errors, lengths, strict=True))]
        # A source alone would do; evaluate() makes three equal intervals of it.
        interval = evaluate(rows, bootstrap=200).overall.greedy
        covered += interval.low <= 0.15 <= interval.high
    # 95 % nominal; the percentile bootstrap is a little narrow, and the standard error of the share is 1.3 %.
    assert 0.90 <= covered / trials <= 0.985


def _two_systems(
    generator: np.random.Generator, before: float, after: float
) -> tuple[list[Utterance], list[Utterance]]:
    lengths = generator.integers(3, 30, size=200)
    difficulty = generator.gamma(0.5, 2.0, size=200)  # shared by both systems
    sides = []
    for rate in (before, after):
        errors = generator.poisson(np.minimum(rate * difficulty, 3.0) * lengths)
        sides.append([utterance(f"{i:03d}", int(e), int(lengths[i]), samples=(int(e),)) for i, e in enumerate(errors)])
    return sides[0], sides[1]


def test_a_paired_interval_is_narrower_than_that_of_two_separate_ones() -> None:
    before, after = _two_systems(np.random.default_rng(1), 0.20, 0.17)
    paired = compare(before, after)
    alone = [evaluate(side).overall.greedy for side in (before, after)]
    unpaired_width = math.hypot(*(interval.high - interval.low for interval in alone))
    assert paired.high - paired.low < 0.6 * unpaired_width
    assert paired.value == pytest.approx(alone[1].value - alone[0].value)
    assert (paired.before, paired.after) == (alone[0].value, alone[1].value)


def test_paired_intervals_cover_no_difference_and_find_a_large_one() -> None:
    generator = np.random.default_rng(2)
    verdicts = [compare(*_two_systems(generator, 0.2, 0.2), bootstrap=200).is_significant for _ in range(200)]
    assert sum(verdicts) / len(verdicts) <= 0.10
    better = compare(*_two_systems(generator, 0.3, 0.15))
    assert better.is_significant
    assert better.high < 0


def test_equal_systems_differ_by_exactly_nothing_in_any_order() -> None:
    before, _ = _two_systems(np.random.default_rng(3), 0.2, 0.2)
    same = compare(before, before[::-1])
    assert (same.value, same.low, same.high, same.is_significant) == (0, 0, 0, False)


def test_the_expected_rate_is_compared_over_samples() -> None:
    before = [utterance("a", 0, 10, samples=(4, 2)), utterance("b", 0, 10, samples=(1, 1))]
    after = [utterance("a", 0, 10, samples=(1,)), utterance("b", 0, 10, samples=(1,))]
    result = compare(before, after, quantity="expected")
    assert (result.before, result.after, result.value) == pytest.approx((0.2, 0.1, -0.1))
    assert (result.quantity, result.name, result.num_utterances) == ("expected", "CER", 2)
    assert compare(before, after).value == 0


def test_what_cannot_be_compared_is_refused() -> None:
    one, two, three = (utterance(name, 1, 5, samples=(1,)) for name in "abc")
    with pytest.raises(DataError, match=r"1 only in 'before', such as hard/a; 1 only in 'after', such as hard/c"):
        compare([one, two], [three, two])
    with pytest.raises(DataError, match=r"another reference or unit in 'before' than in 'after': 1, such as hard/b\."):
        compare([one, two], [one, dataclasses.replace(two, unit="word")])
    with pytest.raises(DataError, match="another reference or unit"):
        compare([one], [dataclasses.replace(one, reference="other")])
    with pytest.raises(DataError, match=r"'after': 1 of 1 utterances have no samples, such as hard/a"):
        compare([one], [dataclasses.replace(one, samples=())], quantity="expected")
    with pytest.raises(DataError, match="no utterances in 'before'"):
        compare([], [])


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(DataError, match="no utterances in the evaluation"):
        evaluate([])
    with pytest.raises(DataError, match=r"stand in the evaluation more than once: 1, such as hard/a\."):
        evaluate([utterance("a", 1, 5), utterance("b", 1, 5), utterance("a", 2, 5)])
    evaluate([utterance("a", 1, 5), utterance("a", 1, 5, source="clean")])
