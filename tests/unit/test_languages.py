"""Languages: every way data sets write them, and the scripts of letters."""

import pytest

from skirl.errors import DataError
from skirl.speech.languages import LANGUAGES, count_scripts, language_name, script_of


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("zh", "Chinese"), ("zh-CN", "Chinese"), ("cmn", "Chinese"), ("cmn_hans_cn", "Chinese"), ("Chinese", "Chinese"),
        ("chinese", "Chinese"), ("zh-TW", "Chinese"), ("yue", "Cantonese"), ("yue_hant_hk", "Cantonese"),
        ("zh-HK", "Cantonese"), ("en", "English"), ("en-US", "English"), ("ENG", "English"), (" English ", "English"),
        ("fil_ph", "Filipino"), ("fa", "Persian"), ("", None), ("None", None), (None, None), ("und", None),
    ],
)  # fmt: skip
def test_codes_and_names(given: str | None, name: str | None) -> None:
    assert language_name(given) == name


def test_an_unknown_language_is_an_error_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r"language 'Germna' is not known; nearest: German \(de\)"):
        language_name("Germna")
    with pytest.raises(DataError, match=r"'tlh' is not known.*Use a code or a full English name out of: Arabic"):
        language_name("tlh")


def test_the_table_is_complete_and_unambiguous() -> None:
    assert len(LANGUAGES) == 30
    codes = [code for language in LANGUAGES.values() for code in language.codes]
    assert len(codes) == len(set(codes))
    assert {name for name, language in LANGUAGES.items() if language.unit == "char"} == {
        "Cantonese", "Chinese", "Japanese", "Thai",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Mr. Quilter", "English"), ("你好世界々", "Chinese"), ("こんにちは世界スー", "Japanese"),
        ("안녕하세요", "Korean"),
        ("Здравствуй", "Russian"), ("नमस्ते", "Hindi"), ("สวัสดี", "Thai"), ("مرحبا", "Arabic"), ("Καλημέρα", "Greek"),
        ("Tiếng Việt", "Vietnamese"), ("Straße ﬁ", "German"), ("ＡＢＣ", "English"), ("ｶﾀｶﾅ", "Japanese"),
    ],
)  # fmt: skip
def test_every_letter_of_a_language_is_in_its_scripts(text: str, language: str) -> None:
    counts = count_scripts(text)
    assert counts
    assert set(counts) <= set(LANGUAGES[language].scripts)


def test_what_is_no_letter_has_no_script() -> None:
    assert [script_of(char) for char in "7 .,!、。"] == [None] * 7
