"""Text normalisation before counting errors: one named, versioned pipeline for rewards and evaluation alike.

What it makes equal: full-width and half-width forms, composed and decomposed letters, upper and lower case, digits of
all scripts, quotes and dashes and emoji present or absent, thousands separators, runs of space.

What it keeps, because losing it would hide an error:
- letters and marks of every script (Hindi and Thai vowel signs, Arabic and Hebrew points, Vietnamese tones);
- an apostrophe inside a word ("don't" is not "dont"); at the edge of a word it counts as a quote and goes;
- the point between two digits ("3.5" is not "35"); a comma there is a thousands separator where three digits follow
  ("1,000" is "1000"), else a space;
- symbols that are read aloud (percent, per mille, ampersand, plus, equals, times, divided by, at, degree, currencies),
  each as a word of its own: "50%" is "50 %";
- U+FFFD, the mark of bytes that are no text: a policy that writes broken bytes must pay for them.

What it does not do: tags are the answer parser's business, and one that it left in becomes words and is counted
("<|im_end|>" is "im end"); numbers are not spelled out ("5" is not "five"); a minus sign goes with the hyphens;
Chinese variants (traditional, simplified) and Arabic letter variants stay apart; German sharp s is not "ss", as that
would merge different words. A later step for any of these goes into ``STEPS`` under its own name, and raises
``NORMALIZER_VERSION``.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from skirl.speech.languages import language_name

__all__ = ["NORMALIZER_VERSION", "STEPS", "Step", "normalize", "trace", "vanishes"]

NORMALIZER_VERSION = "1"
"""Raised with every change of what ``normalize`` returns; written beside every figure."""

_APOSTROPHES = frozenset("'`\u00b4\u2018\u2019\u201b\u02bc")
_SPOKEN = frozenset("%\u2030&+=\u00d7\u00f7@\u00b0")
_REPLACEMENT = "\ufffd"
_ZERO_WIDTH_SPACE = "\u200b"
_VARIATION_SELECTORS = (range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0), range(0x180B, 0x180E))
# Tatweel, which only stretches a word; the Arabic decimal point and thousands separator; what NFKC makes of U+FF40.
_REPLACED = {"\u0640": "", "\u066b": ".", "\u066c": ",", "`": "'"}
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_NO_DECIMAL_POINT = re.compile(r",|(?<![0-9])\.|\.(?![0-9])")


class _Table(dict[int, str]):
    """Characters to replacements for ``str.translate``, filled in as characters are met."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str:
        self[code] = result = self._rule(chr(code))
        return result


def _invisible_rule(char: str) -> str:
    """Apostrophes become one kind; joiners, variation selectors, enclosing marks go; lone accents become space."""
    if char in _APOSTROPHES:
        return "'"
    if char == _ZERO_WIDTH_SPACE:
        return " "
    if unicodedata.category(char) in {"Cf", "Me"} or any(ord(char) in block for block in _VARIATION_SELECTORS):
        return ""
    spaced_accent = unicodedata.normalize("NFKC", char)
    return " " if len(spaced_accent) > 1 and spaced_accent[0] == " " else char


def _symbol_rule(char: str) -> str:
    """Letters and marks stay, digits become ASCII, spoken symbols become words, everything else becomes space."""
    category = unicodedata.category(char)
    if char in _REPLACED:
        return _REPLACED[char]
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category[0] in "LMN" or char in "'.,":
        return char
    spoken = char in _SPOKEN or category == "Sc" or char == _REPLACEMENT
    return f" {char} " if spoken else " "


_INVISIBLE = _Table(_invisible_rule)
_SYMBOLS = _Table(_symbol_rule)


def _drop_invisible(text: str, language: str | None) -> str:
    return text.translate(_INVISIBLE)


def _compatibility(text: str, language: str | None) -> str:
    return unicodedata.normalize("NFKC", text)


def _lower(text: str, language: str | None) -> str:
    if language == "Turkish":
        text = text.replace("I", "\u0131")
    # Lower case of U+0130 is "i" with a combining dot, which is "i" in every language.
    return text.lower().replace("i\u0307", "i")


def _symbols(text: str, language: str | None) -> str:
    return text.translate(_SYMBOLS)


def _numbers(text: str, language: str | None) -> str:
    if "," in text:
        text = _THOUSANDS.sub("", text)
    return _NO_DECIMAL_POINT.sub(" ", text) if "," in text or "." in text else text


def _spaces(text: str, language: str | None) -> str:
    words = (word.strip("'") for word in text.split()) if "'" in text else text.split()
    return unicodedata.normalize("NFC", " ".join(word for word in words if word))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the pipeline.

    Attributes:
        name: stands in traces.
        meaning: one line for reports.
        apply: (text, full English language name or None) -> text.
    """

    name: str
    meaning: str
    apply: Callable[[str, str | None], str]


STEPS: tuple[Step, ...] = (
    Step("invisible", "one apostrophe; no joiners, variation selectors, lone accents", _drop_invisible),
    Step("compatibility", "Unicode NFKC: full-width forms, ligatures, composed letters", _compatibility),
    Step("case", "lower case; Turkish I is dotless", _lower),
    Step("symbols", "ASCII digits; punctuation and symbols that are not spoken become space", _symbols),
    Step("numbers", "thousands separators go, the decimal point stays", _numbers),
    Step("spaces", "one space between words, no apostrophe at the edge of a word", _spaces),
)
"""The pipeline, in order."""


@lru_cache(maxsize=256)
def _full_name(language: str | None) -> str | None:
    return language_name(language)


def normalize(text: str, language: str | None) -> str:
    """The text as errors are counted on it; applying it twice changes nothing.

    Args:
        text: reference or transcript, without tags.
        language: code or full English name, None if not known. Both sides of a comparison need the same one.

    Returns:
        Normalised text; "" when nothing in it is counted (see ``vanishes``).

    Raises:
        DataError: the language is not in the table.
    """
    name = _full_name(language)
    for step in STEPS:
        text = step.apply(text, name)
    return text


def trace(text: str, language: str | None) -> list[tuple[str, str]]:
    """(step name, text after it) for each step, to show where a text lost what."""
    name = _full_name(language)
    result = []
    for step in STEPS:
        text = step.apply(text, name)
        result.append((step.name, text))
    return result


def vanishes(text: str, language: str | None) -> bool:
    """True for a text that holds something visible, of which normalisation leaves nothing ("...", "(?)").

    Such a reference has no units, so every error against it is an insertion without a denominator.
    """
    return bool(text.strip()) and not normalize(text, language)
