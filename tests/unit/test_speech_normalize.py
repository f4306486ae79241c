"""Normalisation: what becomes equal, what stays apart, and that the version is raised with every change."""

import hashlib
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skirl.errors import DataError
from skirl.speech.normalize import NORMALIZER_VERSION, STEPS, normalize, trace, vanishes

CASES = [
    # case, width, punctuation, space
    ("Hello,  World!\n", "English", "hello world"),
    ("ＨＥＬＬＯ　ｗｏｒｌｄ１２", "English", "hello world12"),
    ("well-known -- twenty-twenty…", "English", "well known twenty twenty"),
    ("“Quoted” (aside) [noise] #tag snake_case", "English", "quoted aside noise tag snake case"),
    ("你好，世界！《书》、「引」。", "Chinese", "你好 世界 书 引"),
    ("ﾊﾝｶｸ ｶﾞ", "Japanese", "ハンカク ガ"),
    ("¿Qué? ¡No!", "Spanish", "qué no"),
    # apostrophes: one kind, kept inside words only
    ("Don’t 'quote' the dogs' rock ’n’ roll it´s", "English", "don't quote the dogs rock n roll it's"),
    ("l‘eau d`or", "French", "l'eau d'or"),
    ("' '' don''t", "English", "don''t"),
    # numbers
    ("1,000,000.50 and 3.5, or 7. 1,2,3", "English", "1000000.50 and 3.5 or 7 1 2 3"),
    ("12,34 v1.2.3 .5 5.", "English", "12 34 v1.2.3 5 5"),
    ("٣٫٥ ٢٬٠٠٠", "Arabic", "3.5 2000"),
    ("२०२४ ๒๕", "Hindi", "2024 25"),
    ("１，２００元", "Chinese", "1200元"),
    # spoken symbols are words
    ("50% off: R&D, C++, $5 ￥3 20℃", "English", "50 % off r & d c + + $ 5 ¥ 3 20 ° c"),
    # marks stay
    ("हिन्दी, क्षेत्र!", "Hindi", "हिन्दी क्षेत्र"),
    ("ที่นี่ไม่", "Thai", "ที่นี่ไม่"),
    ("مَرْحَبًا، ســلام", "Arabic", "مَرْحَبًا سلام"),
    ("Tiếng Việt", "Vietnamese", "tiếng việt"),
    # case by language
    ("ISPARTA İzmir", "Turkish", "ısparta izmir"),
    ("ISPARTA İzmir", "English", "isparta izmir"),
    ("ΟΔΟΣ Οδός", "Greek", "οδος οδός"),
    ("STRAẞE Straße", "German", "straße straße"),
    # nothing that is heard
    ("a\u200db\ufeff\u00ad \u200bc ❤️ 1️⃣ 👍🏻 ♪ \u00a8", "English", "ab c 1"),
    # faults of a policy are not swept away
    ("nine \ufffd\ufffd", "English", "nine \ufffd \ufffd"),
    ("language English<asr_text>five<|im_end|>", "English", "language english asr text five im end"),
]


@pytest.mark.parametrize(("text", "language", "expected"), CASES)
def test_literals(text: str, language: str, expected: str) -> None:
    assert normalize(text, language) == unicodedata.normalize("NFC", expected)


@pytest.mark.parametrize(
    ("left", "right"),
    [("don't", "dont"), ("3.5", "35"), ("50%", "50"), ("Maße", "Masse"), ("हिन्दी", "हनद"), ("nine\ufffd", "nine")],
)
def test_what_must_stay_apart(left: str, right: str) -> None:
    assert normalize(left, None).replace(" ", "") != normalize(right, None).replace(" ", "")


def test_codes_and_names_of_languages_are_the_same() -> None:
    assert normalize("IĞDIR", "tr") == normalize("IĞDIR", "Turkish") == "ığdır"
    assert normalize("IĞDIR", None) == normalize("IĞDIR", "None") == "iğdir"
    with pytest.raises(DataError, match="Klingon"):
        normalize("x", "Klingon")


@given(st.text(max_size=40), st.sampled_from([None, "English", "Turkish"]))
@example("ͺ'̈ a", None)
@example("e\u200d\u0301", None)
@settings(max_examples=400)
def test_twice_is_once_and_words_are_clean(text: str, language: str | None) -> None:
    once = normalize(text, language)
    assert normalize(once, language) == once
    assert once == " ".join(once.split())
    assert unicodedata.is_normalized("NFC", once)


@given(st.text(st.characters(categories=["Lu", "Ll", "Lo", "Mn", "Mc", "Nd", "Zs", "Po"]), max_size=30))
@settings(max_examples=300)
def test_composed_decomposed_and_upper_case_are_the_same(text: str) -> None:
    assert normalize(unicodedata.normalize("NFD", text), None) == normalize(text, None)
    ascii_part = text.encode("ascii", "ignore").decode()
    assert normalize(ascii_part.upper(), None) == normalize(ascii_part, None)


# Arabic tatweel is no letter of a word; Hangul jamo compose to syllables, which are fewer.
_LETTERS = st.characters(categories=["Ll", "Lo", "Mn", "Mc"], exclude_characters="\u0640").filter(
    lambda char: (
        unicodedata.normalize("NFKD", char) == char
        and not 0x1100 <= ord(char) <= 0x11FF
        and not 0xFE00 <= ord(char) <= 0xFE0F
        and not 0x180B <= ord(char) <= 0x180D
        and not 0xE0100 <= ord(char) <= 0xE01EF
    )
)


@given(st.lists(_LETTERS, min_size=1, max_size=20))
@settings(max_examples=300)
def test_no_letter_or_mark_is_ever_lost(letters: list[str]) -> None:
    result = normalize("!".join(letters), None).replace(" ", "")
    assert sorted(unicodedata.normalize("NFD", result)) == sorted(letters)


def test_a_text_that_is_deleted_whole_is_told_from_an_empty_one() -> None:
    assert vanishes("♪ ... (?)", None)
    assert not vanishes("", None)
    assert not vanishes(" \n", None)
    assert not vanishes("[noise]", None)


def test_the_trace_shows_every_step_and_ends_at_the_result() -> None:
    steps = trace("ＡＢ, Don’t!", "English")
    assert [name for name, _ in steps] == [step.name for step in STEPS]
    assert dict(steps)["case"] == "ab, don't!"
    assert steps[-1][1] == normalize("ＡＢ, Don’t!", "English") == "ab don't"


def test_a_change_of_any_character_needs_a_new_version() -> None:
    """If this fails, raise NORMALIZER_VERSION and put the new digest here: figures of two versions do not compare."""
    digests = {"1": "59962f15c6c7435d"}
    assert NORMALIZER_VERSION in digests
    # Blocks that every Unicode version of Python 3.11 to 3.13 agrees on.
    blocks = [
        range(0x20, 0x370),
        range(0x900, 0x97F),
        range(0x2000, 0x2070),
        range(0x3000, 0x3040),
        range(0xFF01, 0xFF5F),
    ]
    text = "|".join(normalize(f"a{chr(code)}1", "English") for block in blocks for code in block)
    text += "|".join(normalize(given, language) for given, language, _ in CASES)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digests[NORMALIZER_VERSION]
