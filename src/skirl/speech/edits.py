"""Edit counts between a reference and a transcript, on normalised units.

A unit is what one error is counted on:
- ``char`` (CER): a Unicode code point; spaces are not counted, so "a b c" equals "abc". A Hindi or Thai vowel sign
  counts.
- ``word`` (WER): what stands between spaces.
- ``mixed`` (MER): each character of a script written without spaces (Han, kana, Thai, Lao, Khmer, Myanmar, ...), and
  each word or number of any other script. Spaces around the former do not count.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from rapidfuzz.distance import Levenshtein

from skirl.speech.languages import LANGUAGES, language_name
from skirl.speech.normalize import normalize

__all__ = ["Aligned", "Edits", "Operation", "Unit", "UnitChoice", "align", "count_edits", "resolve_unit", "units"]

Unit = Literal["char", "word", "mixed"]
UnitChoice = Literal["auto", "char", "word", "mixed"]
Operation = Literal["equal", "substitute", "delete", "insert"]

# Scripts written without spaces: Thai to Tibetan, Myanmar, Khmer, Han signs, kana, Bopomofo, Han and its extensions.
_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303c\u3041-\u30ff"
    "\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U0001b000-\U0001b16f"
    "\U00020000-\U0003ffff"
)
_ANY_UNSPACED = re.compile(f"[{_UNSPACED}]")
_ANY_SPACED_LETTER = re.compile(rf"[^\W\d_{_UNSPACED}]")
_MIXED_UNIT = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


@dataclass(frozen=True, slots=True)
class Edits:
    """Counts of one comparison, or their sum over many. Not capped: insertions may exceed the reference.

    Attributes:
        insertions, deletions, substitutions: units of one cheapest alignment.
        num_reference: units of the reference; 0 where it is empty.
    """

    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    num_reference: int = 0

    @property
    def total(self) -> int:
        """The edit distance."""
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float:
        """Edits per reference unit; NaN where the reference is empty, whatever the transcript."""
        return self.total / self.num_reference if self.num_reference else float("nan")

    def __add__(self, other: "Edits") -> "Edits":
        """Sums, for corpus rates."""
        return Edits(
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.substitutions + other.substitutions,
            self.num_reference + other.num_reference,
        )


class Aligned(NamedTuple):
    """One column of an alignment; the side that has no unit there is None."""

    operation: Operation
    reference: str | None
    hypothesis: str | None


@lru_cache(maxsize=256)
def _unit_of_language(language: str | None) -> Literal["char", "word"] | None:
    name = language_name(language)
    return None if name is None else LANGUAGES[name].unit


def resolve_unit(unit: UnitChoice, language: str | None, text: str) -> Unit:
    """The unit that errors against a reference are counted in.

    auto goes by the language of the reference and the scripts in it, never by the transcript, so that a policy cannot
    choose its own unit. Chinese, Cantonese, Japanese and Thai count characters, or are mixed if the reference holds a
    letter of another script (digits alone leave it at char). The other languages count words, or are mixed if it holds
    a character of a script without spaces. With no known language the scripts decide; without a letter it is word.

    Args:
        unit: "auto", or the unit itself, which is returned as it is.
        language: code or full English name of the reference's language, None if not known.
        text: the reference, normalised or not.

    Raises:
        DataError: the language is not in the table.
    """
    return unit if unit != "auto" else _unit_of(normalize(text, language), language)


def _unit_of(normalized: str, language: str | None) -> Unit:
    by_language = _unit_of_language(language)
    unspaced = _ANY_UNSPACED.search(normalized) is not None
    if by_language == "word":
        return "mixed" if unspaced else "word"
    if by_language == "char" or unspaced:
        return "mixed" if _ANY_SPACED_LETTER.search(normalized) else "char"
    return "word"


def _split(normalized: str, unit: Unit) -> Sequence[str]:
    if unit == "char":
        return normalized.replace(" ", "")  # a string is the sequence of its characters, and the fastest one to compare
    return normalized.split() if unit == "word" else _MIXED_UNIT.findall(normalized)


def units(text: str, unit: UnitChoice, language: str | None) -> list[str]:
    """Normalised units of a text, in order; with "auto" the text counts as its own reference."""
    normalized = normalize(text, language)
    return list(_split(normalized, unit if unit != "auto" else _unit_of(normalized, language)))


def count_edits(reference: str, hypothesis: str, *, unit: UnitChoice, language: str | None) -> Edits:
    """Edits that turn the reference into the hypothesis, both normalised.

    Their sum is the Levenshtein distance. Where several alignments are cheapest, the split into insertions, deletions
    and substitutions is that of one of them.

    Args:
        reference, hypothesis: text without tags.
        unit: what is counted; "auto" goes by language and reference (see ``resolve_unit``).
        language: code or full English name of the reference's language, None if not known.

    Returns:
        Counts; an empty reference has num_reference 0 and all of the hypothesis as insertions.

    Raises:
        DataError: the language is not in the table.
    """
    normalized = normalize(reference, language)
    resolved = unit if unit != "auto" else _unit_of(normalized, language)
    left = _split(normalized, resolved)
    right = _split(normalize(hypothesis, language), resolved)
    if left == right:
        return Edits(num_reference=len(left))
    operations = [step[0] for step in Levenshtein.editops(left, right).as_list()]
    insertions = operations.count("insert")
    deletions = operations.count("delete")
    return Edits(insertions, deletions, len(operations) - insertions - deletions, len(left))


def align(reference_units: Sequence[str], hypothesis_units: Sequence[str]) -> list[Aligned]:
    """A cheapest alignment, column by column; its edits are those that ``count_edits`` counts.

    Either side, read without its None, is the sequence that was given.
    """
    result: list[Aligned] = []
    for step in Levenshtein.opcodes(reference_units, hypothesis_units):
        left = reference_units[step.src_start : step.src_end]
        right = hypothesis_units[step.dest_start : step.dest_end]
        if step.tag == "delete":
            result += [Aligned("delete", ref, None) for ref in left]
        elif step.tag == "insert":
            result += [Aligned("insert", None, hyp) for hyp in right]
        else:
            name: Operation = "equal" if step.tag == "equal" else "substitute"
            result += [Aligned(name, ref, hyp) for ref, hyp in zip(left, right, strict=True)]
    return result
