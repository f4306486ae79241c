"""The speech terms against worked literals, and their bounds."""

import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.config.schema import RewardConfig
from skirl.errors import DataError
from skirl.rewards import speech
from skirl.testing.reward_samples import make_sample


@pytest.mark.parametrize(
    ("transcript", "reference", "expected"),
    [
        ("one two three four", "one two three four", 1.0),
        ("One, two: three FOUR!", "one two three four", 1.0),
        ("one two four", "one two three four", 0.75),
        ("", "one two three four", 0.0),
        ("a b c d e f g h", "one two three four", -1.0),
        ("a b c d e f", "one two three four", -0.5),  # 4 substitutions + 2 insertions of 4: still told from the worst
        ("", "", 1.0),
        ("...", "", 1.0),
        ("you", "", -0.1),
        ("thank you for watching", "", -0.4),
        ("a b c d e f g h i j k l", "", -1.0),
        ("word", "[?]", -0.1),  # a reference of which normalisation leaves nothing counts as empty
    ],
)
def test_accuracy(transcript, reference, expected):
    assert speech.accuracy(make_sample(transcript, reference)) == pytest.approx(expected, abs=1e-12)


def test_accuracy_by_unit_and_language():
    chinese = make_sample("今天天气真好", "今天天气很好", reference_language="Chinese")
    assert speech.accuracy(chinese) == pytest.approx(1 - 1 / 6)
    assert speech.accuracy(chinese, unit="word") == 0.0
    assert speech.accuracy(make_sample("a b c d", "x"), clip=1.0) == 0.0
    assert speech.accuracy(make_sample("a b c d", "x"), clip=3.0) == -2.0


def keyword_row(*words):
    return {"keywords": list(words)}


@pytest.mark.parametrize(
    ("transcript", "reference", "words", "expected"),
    [
        ("call doctor smith", "call doctor smith", ["Smith"], 1.0),
        ("call doctor smyth", "call doctor smith", ["Smith"], 0.0),
        ("call doctor smith", "call doctor smyth", ["Smith"], 0.0),  # written, but not said
        ("call doctor", "call doctor", ["Smith"], None),
        ("call doctor", "call doctor", [], None),
        ("party", "party", ["art"], None),  # whole words only
        ("smith and jones", "smith", ["smith", "jones"], (1 / 2 + 1) / 2),
        ("smith", "smith smith", ["smith"], (1 + 1 / 2) / 2),
        (
            "new york",
            "new york city",
            ["new york", "new york city"],
            0.0,
        ),  # the longer one was said, the shorter written
        ("new york city", "new york city", ["city", "new york city"], 1.0),
        ("我在新南门", "我在新南门", ["新南门", "南门"], 1.0),
    ],
)
def test_keywords(transcript, reference, words, expected):
    value = speech.keywords(make_sample(transcript, reference, row=keyword_row(*words)))
    assert value == (None if expected is None else pytest.approx(expected))


def test_keywords_must_be_a_list():
    with pytest.raises(DataError, match="keywords must be a list of strings, got 'smith'"):
        speech.keywords(make_sample("x", "x", row={"keywords": "smith"}))


@pytest.mark.parametrize("term", [speech.accuracy, speech.keywords])
def test_terms_that_need_a_reference_say_so(term):
    with pytest.raises(DataError, match=r"needs a reference text, and row made/0 has none"):
        term(make_sample("x", None))


@pytest.mark.parametrize(
    ("transcript", "reference", "tag", "gold", "expected"),
    [
        ("good day", "good day", "English", "English", 1.0),
        ("good day", "good day", "German", "English", 0.0),
        ("good day", "good day", None, "English", 0.0),
        ("good day", "good day", "Klingon", "English", 0.0),
        ("good day", "good day", "English", None, None),
        ("你好 abcd", "你好", "Chinese", "Chinese", 2 / 6),
        ("你好 abcd", "你好 efgh", "Chinese", "Chinese", 1.0),  # Latin letters were said
        ("", "你好", "Chinese", "Chinese", 1.0),
        ("123", "123", "Chinese", "Chinese", 1.0),
        ("", "", None, "English", None),  # nothing is spoken: the right tag is "None", whatever the row's language
        ("thanks", "", "English", "English", None),
    ],
)
def test_language(transcript, reference, tag, gold, expected):
    sample = make_sample(transcript, reference, language=tag, reference_language=gold)
    assert speech.language(sample) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("transcript", "reference", "expected"),
    [
        ("no no no no", "no", 0.0),
        ("no no no no no", "no", -1.0),
        ("no no no no no", "no no no no no", 0.0),  # it was said
        ("no, no, no, no! no", "yes", -1.0),
        ("and then he said and then he said and then he said and then he said and then he said", "x", -1.0),
        ("哈哈哈哈哈", "哈哈", -1.0),
        ("", "x", 0.0),
        ("a b c d e f g h", "x", 0.0),
    ],
)
def test_repetition(transcript, reference, expected):
    assert speech.repetition(make_sample(transcript, reference)) == expected


@given(st.lists(st.sampled_from("ab"), max_size=24))
def test_longest_run_is_what_slow_counting_finds(units):
    slow = min(len(units), 1)
    for start in range(len(units)):
        for n in range(1, 21):
            gram, repeats = units[start : start + n], 0
            while len(gram) == n and units[start + repeats * n : start + (repeats + 1) * n] == gram:
                repeats += 1
            slow = max(slow, repeats)
    assert speech._longest_run(units) == slow


def test_length():
    assert speech.length(make_sample("x" * 50, "y", seconds=2.0)) == 0.0  # 25 a second
    assert speech.length(make_sample("x" * 51, "y", seconds=2.0)) == -1.0
    assert speech.length(make_sample("字" * 16, "y", seconds=2.0)) == 0.0  # 8 a second
    assert speech.length(make_sample("字" * 17, "y", seconds=2.0)) == -1.0
    assert speech.length(make_sample("字" * 17, "文" * 17, seconds=2.0)) == 0.0  # the reference is as long
    assert speech.length(make_sample("x" * 500, "y", seconds=0.0)) is None


def test_truncation():
    assert speech.truncation(make_sample("x", finish_reason="length")) == -1.0
    assert speech.truncation(make_sample("x", finish_reason="stop")) == 0.0


texts = st.text(alphabet="ab 12,.'你好haé\n", max_size=60)


@given(texts, texts, st.sampled_from(["English", "Chinese", None]), st.floats(0.0, 30.0))
def test_terms_are_bounded_and_depend_on_nothing_else(transcript, reference, language, seconds):
    sample = make_sample(
        transcript, reference, reference_language=language, seconds=seconds, row=keyword_row("a", "你")
    )
    for name, term in speech.TERMS.items():
        value = term(sample)
        assert value is None or -1.0 <= value <= 1.0, name
        assert value == term(sample)
    assert math.isfinite(speech.accuracy(sample))


def test_every_term_of_the_recipe_has_its_function_with_its_settings():
    config = RewardConfig.model_validate({"terms": {kind: kind for kind in speech.TERMS}})
    with pytest.raises(ValueError, match="does not match any of the expected tags"):
        RewardConfig.model_validate({"terms": {"x": "no_such_kind"}})
    for kind, term in config.terms.items():
        settings = term.model_dump(exclude={"kind", "weight"})
        parameters = inspect.signature(speech.TERMS[kind]).parameters
        assert {name: parameters[name].default for name in settings} == settings, kind
        assert len(parameters) == len(settings) + 1, kind
