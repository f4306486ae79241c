"""The library of speech rewards: pure functions of one sample, bounded, on text normalised as in evaluation.

Each is a term that a recipe names under ``reward.terms``, and can be called from a user's own reward file:

    from skirl.rewards import speech

    def reward(sample):
        return {"accuracy": speech.accuracy(sample), "keywords": speech.keywords(sample)}

None means that a term does not apply to the sample. Such a part is left out of the totals of its group.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from skirl.errors import DataError
from skirl.records import RewardSample
from skirl.speech.edits import UnitChoice, count_edits, units
from skirl.speech.languages import LANGUAGES, count_scripts, language_name, script_of

__all__ = ["TERMS", "accuracy", "keywords", "language", "length", "repetition", "truncation"]

EMPTY_SCALE = 10  # units of invented speech that are as bad as it gets where nothing was said
MAX_NGRAM = 20  # units of the longest loop that is looked for
MAX_PER_SECOND = {"Han": 8.0, "Hangul": 10.0, "Hiragana": 12.0, "Katakana": 12.0}  # letters of fast speech
MAX_LETTERS_PER_SECOND = 25.0  # of alphabets
MAX_DIGITS_PER_SECOND = 10.0


def accuracy(sample: RewardSample, *, unit: UnitChoice = "auto", clip: float = 2.0) -> float:
    """1 - min(edits / reference units, clip).

    For an empty reference (nothing was said): 1 for an empty transcript, else -min(units / 10, 1).

    Args:
        sample: needs a reference.
        unit: char is CER, word is WER, mixed is MER; auto goes by the language and the reference.
        clip: error rates are cut here. 2 rather than 1 keeps apart what is bad and what is worse: with 1, hallucinated
            and empty answers of a hard clip all score 0, and its group has no signal.

    Returns:
        In [1 - clip, 1]; in [-1, 1] for an empty reference.

    Raises:
        DataError: the row has no reference.
    """
    edits = count_edits(
        _reference(sample, "accuracy"), sample.transcript, unit=unit, language=sample.reference_language
    )
    if edits.num_reference == 0:
        return -min(edits.insertions / EMPTY_SCALE, 1.0) if edits.insertions else 1.0
    return 1.0 - min(edits.total / edits.num_reference, clip)


def keywords(sample: RewardSample) -> float | None:
    """Mean of precision and recall over occurrences of the row's keywords.

    Longer keywords are looked for first and mask what they cover, so that "New York City" is not also "New York".
    Keywords are matched as whole words (whole characters, where a script has no spaces) after normalisation.

    Returns:
        In [0, 1]: 0 if all are missed, or if one is written that was not said; None where neither side has one.

    Raises:
        DataError: the row has no reference, or its keywords are not a list of strings.
    """
    reference = _reference(sample, "keywords")
    listed = sample.row.get("keywords") or ()
    if isinstance(listed, str) or not all(isinstance(word, str) for word in listed):
        raise DataError(f"row {sample.id}: keywords must be a list of strings, got {listed!r}")
    language = sample.reference_language
    wanted = sorted(
        {tuple(units(word, "mixed", language)) for word in listed} - {()}, key=lambda word: (-len(word), word)
    )
    if not wanted:
        return None
    said = _occurrences(units(reference, "mixed", language), wanted)
    written = _occurrences(units(sample.transcript, "mixed", language), wanted)
    if not said and not written:
        return None
    if not said or not written:
        return 0.0
    hits = (said & written).total()
    return (hits / written.total() + hits / said.total()) / 2


def language(sample: RewardSample) -> float | None:
    """1 if the tag that the policy wrote is the row's language, else 0; times the share of letters in its scripts.

    Scripts that stand in the reference count as right, so code-switched rows need no mark.

    Returns:
        In [0, 1]; None where the row's language is not known, or nothing is spoken: the tag is then that of no
        language, whatever the rest of the data is in.
    """
    expected = language_name(sample.reference_language)
    if expected is None or sample.reference == "":
        return None
    try:
        written = language_name(sample.language)
    except DataError:  # the policy made a language up
        written = None
    if written != expected:
        return 0.0
    scripts = count_scripts(sample.transcript)
    allowed = {*LANGUAGES[expected].scripts, *count_scripts(sample.reference or "")}
    total = scripts.total()
    return sum(count for script, count in scripts.items() if script in allowed) / total if total else 1.0


def repetition(sample: RewardSample, *, max_repeats: int = 4) -> float:
    """-1 where the transcript loops, else 0.

    A loop is an n-gram (n up to 20 units: words, or characters of a script without spaces) that stands more than
    ``max_repeats`` times in a row, and more often than any does in the reference ("no no no no no" may have been said).

    Args:
        sample: its transcript must be the raw one: some parsers cut loops short before anyone sees them.
        max_repeats: the longest run that is never a loop.
    """
    sample_language = sample.reference_language
    allowed = max_repeats
    if sample.reference:
        allowed = max(allowed, _longest_run(units(sample.reference, "mixed", sample_language)))
    return -1.0 if _longest_run(units(sample.transcript, "mixed", sample_language)) > allowed else 0.0


def length(sample: RewardSample) -> float | None:
    """-1 where the transcript holds more letters than can be spoken in the clip, else 0.

    Limits, letters a second: Han 8, Hangul 10, kana 12, digits 10, alphabets 25. A transcript that would take no longer
    than the reference is never punished: a clip may be cut tight, or its length may be wrong.

    Returns:
        -1 or 0; None for rows without audio.
    """
    if sample.seconds <= 0:
        return None
    needed = _shortest_seconds(sample.transcript)
    return -1.0 if needed > max(sample.seconds, _shortest_seconds(sample.reference or "")) else 0.0


def truncation(sample: RewardSample) -> float:
    """-1 where the budget ended the response, else 0."""
    return -1.0 if sample.finish_reason == "length" else 0.0


TERMS: Mapping[str, Callable[..., float | None]] = {
    "accuracy": accuracy,
    "keywords": keywords,
    "language": language,
    "length": length,
    "repetition": repetition,
    "truncation": truncation,
}
"""Kind of a term in a recipe -> its function; the other settings of the term are keyword arguments."""


def _reference(sample: RewardSample, term: str) -> str:
    if sample.reference is None:
        raise DataError(f"the {term} term needs a reference text, and row {sample.id} has none")
    return sample.reference


def _occurrences(text: Sequence[str], wanted: Sequence[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
    """How often each keyword stands in the text; earlier keywords take their units away from later ones."""
    free: list[str | None] = list(text)
    counts: Counter[tuple[str, ...]] = Counter()
    for word in wanted:
        start = 0
        while start + len(word) <= len(free):
            if tuple(free[start : start + len(word)]) == word:
                counts[word] += 1
                free[start : start + len(word)] = [None] * len(word)
                start += len(word)
            else:
                start += 1
    return counts


def _longest_run(sequence: Sequence[str]) -> int:
    """How often the most repeated n-gram follows itself, over n up to 20; 1 where nothing repeats, 0 for no units."""
    numbering = {unit: number for number, unit in enumerate(dict.fromkeys(sequence))}
    numbers = np.array([numbering[unit] for unit in sequence], dtype=np.int64)
    longest = min(len(numbers), 1)
    for n in range(1, min(MAX_NGRAM, len(numbers) // 2) + 1):
        differs = np.flatnonzero(numbers[n:] != numbers[:-n])  # a run of k equal n-grams is (k - 1) n equal pairs
        borders = np.concatenate(([-1], differs, [len(numbers) - n]))
        longest = max(longest, (int(np.diff(borders).max()) - 1) // n + 1)
    return longest


def _shortest_seconds(text: str) -> float:
    """Time that fast speech takes for a text, seconds."""
    digits = sum(char.isdigit() for char in text)
    scripts = Counter(map(script_of, text))
    del scripts[None]
    letters = sum(count / MAX_PER_SECOND.get(script or "", MAX_LETTERS_PER_SECOND) for script, count in scripts.items())
    return letters + digits / MAX_DIGITS_PER_SECOND
