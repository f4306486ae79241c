"""Edit counts against a loop oracle, the units of each language, and alignments."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.errors import DataError
from skirl.speech.edits import Aligned, Edits, UnitChoice, align, count_edits, resolve_unit, units
from skirl.speech.normalize import normalize
from tests.oracles.edits import cheapest_counts, distance


def test_the_oracle_on_worked_examples() -> None:
    assert distance("kitten", "sitting") == 3
    assert distance("", "abc") == 3
    assert cheapest_counts("ab", "ba") == {(1, 1, 0), (0, 0, 2)}


@pytest.mark.parametrize(
    ("reference", "hypothesis", "unit", "language", "expected"),
    [
        # spaces are not counted in characters
        ("a b c", "abc", "char", "English", Edits(0, 0, 0, 3)),
        ("five six", "five sex", "char", "English", Edits(0, 0, 1, 7)),
        ("five six", "five sex", "word", "English", Edits(0, 0, 1, 2)),
        # an empty side
        ("", "hello", "char", "English", Edits(5, 0, 0, 0)),
        ("", "hello", "word", "English", Edits(1, 0, 0, 0)),
        ("", "", "auto", None, Edits(0, 0, 0, 0)),
        ("hello you", "", "word", "English", Edits(0, 2, 0, 2)),
        ("...", "hello", "word", "English", Edits(1, 0, 0, 0)),
        # Chinese without spaces is one word, which is why auto counts characters
        ("今天天气好", "今天天汽好", "word", "Chinese", Edits(0, 0, 1, 1)),
        ("今天天气好", "今天天汽好", "auto", "Chinese", Edits(0, 0, 1, 5)),
        ("今天 天气好", "今天，天气 好。", "auto", "zh", Edits(0, 0, 0, 5)),
        # code-switching: a character and a word are one unit each
        ("我用Python写code", "我用 python 写 coat", "auto", "Chinese", Edits(0, 0, 1, 5)),
        ("我用Python写code", "我用python写", "mixed", "Chinese", Edits(0, 1, 0, 5)),
        # not capped: 10 insertions on 2 words
        ("uh huh", "uh huh" + " the" * 10, "word", "English", Edits(10, 0, 0, 2)),
        # composed and decomposed, full and half width, upper and lower case
        ("Tiếng Việt", "tie\u0302\u0301ng vie\u0323\u0302t", "char", "Vietnamese", Edits(0, 0, 0, 9)),
        ("ＡＢＣ１", "abc1", "char", "English", Edits(0, 0, 0, 4)),
        # a vowel sign is a unit
        ("कि", "की", "char", "Hindi", Edits(0, 0, 1, 2)),
    ],
)
def test_literals(reference: str, hypothesis: str, unit: UnitChoice, language: str | None, expected: Edits) -> None:
    assert count_edits(reference, hypothesis, unit=unit, language=language) == expected


def test_corpus_rate_is_not_the_mean_of_rates() -> None:
    """One wrong word alone and four right ones: 1/5, where the mean of ratios says 1/2."""
    pairs = [("yes", "no"), ("one two three four", "one two three four")]
    edits = [count_edits(ref, hyp, unit="word", language="English") for ref, hyp in pairs]
    assert sum(edits, Edits()).rate == pytest.approx(0.2)
    assert sum(e.rate for e in edits) / 2 == pytest.approx(0.5)


def test_the_rate_of_an_empty_reference_is_not_a_number() -> None:
    assert str(Edits(5, 0, 0, 0).rate) == "nan"
    assert (Edits(5, 0, 0, 0) + Edits(0, 0, 0, 5)).rate == 1.0


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("Chinese", "今天天气好", "char"),
        ("yue", "今日天氣好", "char"),
        ("Japanese", "カタカナとひらがな", "char"),
        ("Japanese", "ﾊﾝｶｸ", "char"),
        ("th", "สวัสดี", "char"),
        ("Chinese", "2024年3.5%", "char"),
        ("Chinese", "", "char"),
        ("Chinese", "用Python", "mixed"),
        ("Chinese", "OK", "mixed"),
        ("Thai", "ใช้ iPhone", "mixed"),
        ("English", "hello", "word"),
        ("English", "", "word"),
        ("English", "say 你好", "mixed"),
        ("Korean", "안녕하세요 여러분", "word"),
        ("Hindi", "हिन्दी में", "word"),
        (None, "你好", "char"),
        (None, "你好 world", "mixed"),
        (None, "hello", "word"),
        (None, "42", "word"),
    ],
)
def test_auto_goes_by_language_and_script(language: str | None, text: str, expected: str) -> None:
    assert resolve_unit("auto", language, text) == expected
    assert resolve_unit("word", language, text) == "word"


def test_a_transcript_cannot_choose_its_unit() -> None:
    assert count_edits("你好吗", "hello", unit="auto", language="Chinese") == count_edits(
        "你好吗", "hello", unit="char", language="Chinese"
    )
    assert count_edits("how are you", "你好吗", unit="auto", language="English").num_reference == 3


def test_units() -> None:
    assert units("Five six.", "char", "English") == list("fivesix")
    assert units("Don't stop", "word", "English") == ["don't", "stop"]
    assert units("我用 Python3 写 50% 的 code。", "mixed", "Chinese") == [
        "我",
        "用",
        "python3",
        "写",
        "50",
        "%",
        "的",
        "code",
    ]
    assert units("ใช้ iPhone", "auto", "Thai") == ["ใ", "ช", "้", "iphone"]
    assert units("コーヒー〇々", "mixed", "Japanese") == list("コーヒー〇々")
    assert units("한국어 하나", "mixed", "Korean") == ["한국어", "하나"]
    assert units("", "auto", None) == []


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(DataError, match="Klingon"):
        count_edits("a", "a", unit="auto", language="Klingon")


@given(st.lists(st.sampled_from("abc"), max_size=9), st.lists(st.sampled_from("abc"), max_size=9))
@settings(max_examples=300)
def test_counts_and_alignment_agree_with_the_oracle(left: list[str], right: list[str]) -> None:
    edits = count_edits(" ".join(left), " ".join(right), unit="word", language="English")
    assert edits.total == distance(left, right)
    assert (edits.insertions, edits.deletions, edits.substitutions) in cheapest_counts(left, right)
    assert edits.num_reference == len(left)
    aligned = align(left, right)
    assert [column.reference for column in aligned if column.reference is not None] == left
    assert [column.hypothesis for column in aligned if column.hypothesis is not None] == right
    for column in aligned:
        same = column.reference == column.hypothesis
        assert (column.operation == "equal") == same
        assert (column.operation == "insert") == (column.reference is None)
        assert (column.operation == "delete") == (column.hypothesis is None)
    counted = [column.operation for column in aligned]
    assert (counted.count("insert"), counted.count("delete"), counted.count("substitute")) == (
        edits.insertions,
        edits.deletions,
        edits.substitutions,
    )


@given(st.text(max_size=12), st.text(max_size=12), st.sampled_from(["char", "word", "mixed"]))
@settings(max_examples=300)
def test_any_text_agrees_with_the_oracle(reference: str, hypothesis: str, unit: UnitChoice) -> None:
    edits = count_edits(reference, hypothesis, unit=unit, language=None)
    left, right = units(reference, unit, None), units(hypothesis, unit, None)
    assert edits.total == distance(left, right)
    assert edits.num_reference == len(left)
    assert edits.insertions - edits.deletions == len(right) - len(left)
    assert "".join(left) == normalize(reference, None).replace(" ", "")  # units lose nothing but space


def test_an_alignment_reads_as_it_should() -> None:
    assert align(["a", "b", "c"], ["a", "x", "c", "d"]) == [
        Aligned("equal", "a", "a"),
        Aligned("substitute", "b", "x"),
        Aligned("equal", "c", "c"),
        Aligned("insert", None, "d"),
    ]
    assert align(["a"], []) == [Aligned("delete", "a", None)]
    assert align("", "") == []
