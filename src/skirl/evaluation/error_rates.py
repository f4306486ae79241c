"""Corpus error rates with bootstrap intervals, by source and language.

A corpus rate is sum(edits) / sum(reference units), never a mean of ratios. The expected rate is that of responses
sampled from the policy: the mean, over the samples of each utterance, of the corpus rate. Intervals resample utterances
(Efron & Tibshirani 1993, chapter 13, percentile method; for error rates: Bisani & Ney, ICASSP 2004).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from skirl.errors import DataError
from skirl.speech.edits import Edits, Unit, UnitChoice, count_edits, resolve_unit
from skirl.speech.normalize import NORMALIZER_VERSION, vanishes

__all__ = [
    "Difference",
    "ErrorRate",
    "Evaluation",
    "Interval",
    "Quantity",
    "Utterance",
    "compare",
    "evaluate",
    "rate_name",
    "score_utterance",
]

Doubles = npt.NDArray[np.float64]
Quantity = Literal["greedy", "expected"]

_CONFIDENCE = 0.95
_MAX_DRAWS_AT_ONCE = 2_000_000  # resampled utterances held in memory at a time: 16 MB an array
_RATE_NAMES: dict[Unit, str] = {"char": "CER", "word": "WER", "mixed": "MER"}
_SHOWN_IDS = 5


@dataclass(frozen=True, slots=True)
class Utterance:
    """One scored utterance.

    Attributes:
        id: unique in its source.
        source: name of the data source.
        language: full English name of the reference's language, None if not known.
        reference: reference text. hypothesis: the parsed greedy transcript. Both as they were, not normalised.
        unit: what the edits count.
        edits: of the greedy transcript.
        samples: edits of the transcripts sampled for the expected rate; empty where none were.
        truncated: the budget ended the greedy response.
    """

    id: str
    source: str
    language: str | None
    reference: str
    hypothesis: str
    unit: Unit
    edits: Edits
    samples: tuple[Edits, ...] = ()
    truncated: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """What pairs two evaluations: (source, id)."""
        return self.source, self.id

    @property
    def expected_edits(self) -> float:
        """Mean edits of a sampled transcript; NaN without samples."""
        return math.fsum(edits.total for edits in self.samples) / len(self.samples) if self.samples else float("nan")


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % bootstrap interval; NaN where there are no reference units."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ErrorRate:
    """Error rate of a set of utterances. Rates are ratios (0.05 is 5 %) and may be above 1.

    Attributes:
        name: "CER", "WER", "MER", or "error rate" where some utterances count characters and others words.
        source, language: what the set was chosen by; None is all.
        num_utterances, num_reference: utterances and reference units in it.
        greedy: rate of the greedy transcripts.
        insertions, deletions, substitutions: its parts, per reference unit.
        expected: rate of sampled transcripts, over the utterances that have samples; None if none has.
        num_sampled: utterances that have samples.
        truncated: share of greedy responses that the budget ended.
        num_no_reference: utterances whose reference has no units; all their edits are insertions.
        num_vanished: those of them whose reference held something that normalisation removed: a fault in the data.
    """

    name: str
    source: str | None
    language: str | None
    num_utterances: int
    num_reference: int
    greedy: Interval
    insertions: float
    deletions: float
    substitutions: float
    expected: Interval | None
    num_sampled: int
    truncated: float
    num_no_reference: int
    num_vanished: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All figures of one evaluation.

    Attributes:
        utterances: sorted by source and id.
        overall: over everything.
        sources: one for each source, by name.
        languages: one for each pair of source and language, by name; not known comes last.
        normalizer_version: of the normalisation that the edits were counted on.
        bootstrap: resamples of the intervals. seed: of the resampling.
    """

    utterances: tuple[Utterance, ...]
    overall: ErrorRate
    sources: tuple[ErrorRate, ...]
    languages: tuple[ErrorRate, ...]
    normalizer_version: str
    bootstrap: int
    seed: int


@dataclass(frozen=True, slots=True)
class Difference:
    """after - before, of a rate on the same utterances, with its 95 % paired bootstrap interval. Below 0 is better.

    Attributes:
        name: of the rate. quantity: "greedy" or "expected".
        before, after: the two rates. value: their difference. low, high: its interval.
        num_utterances: utterances compared.
    """

    name: str
    quantity: Quantity
    before: float
    after: float
    value: float
    low: float
    high: float
    num_utterances: int

    @property
    def is_significant(self) -> bool:
        """The interval leaves out 0."""
        return self.low > 0 or self.high < 0


def rate_name(units: Iterable[Unit]) -> str:
    """Name of a rate over utterances with these units.

    MER holds for utterances of which some are mixed and the others only characters, or only words: it counts those the
    same way. Characters beside words (CER of one language, WER of another) have no common name.
    """
    found = set(units)
    if found >= {"char", "word"}:
        return "error rate"
    return _RATE_NAMES["mixed"] if len(found) > 1 else _RATE_NAMES[found.pop()]


def score_utterance(
    *,
    id: str,
    source: str,
    language: str | None,
    reference: str,
    hypothesis: str,
    samples: Sequence[str] = (),
    unit: UnitChoice = "auto",
    truncated: bool = False,
) -> Utterance:
    """Counts the edits of one utterance; its unit goes by the reference alone.

    Args:
        id, source, language, reference, truncated: see ``Utterance``.
        hypothesis: the greedy transcript, without tags. samples: sampled transcripts.
        unit: "auto" goes by language and script; "char" gives CER for every language, spaces not counted.

    Raises:
        DataError: the language is not in the table.
    """
    resolved = resolve_unit(unit, language, reference)
    texts = (hypothesis, *samples)
    greedy, *sampled = (count_edits(reference, text, unit=resolved, language=language) for text in texts)
    return Utterance(id, source, language, reference, hypothesis, resolved, greedy, tuple(sampled), truncated)


def evaluate(utterances: Iterable[Utterance], *, bootstrap: int = 1000, seed: int = 0) -> Evaluation:
    """Rates of everything, of each source, and of each language of each source.

    Args:
        utterances: scored, in any order; the result does not depend on it.
        bootstrap: resamples of each interval.
        seed: of the resampling; every interval starts from it, so none depends on what else is evaluated.

    Raises:
        DataError: there are none, or two have the same source and id.
    """
    ordered = _by_key(utterances, "the evaluation")
    pairs = sorted(
        {(u.source, u.language) for u in ordered}, key=lambda pair: (pair[0], pair[1] is None, pair[1] or "")
    )
    sources = sorted({u.source for u in ordered})

    def rate(chosen: list[Utterance], source: str | None, language: str | None) -> ErrorRate:
        return _error_rate(chosen, (source, language), bootstrap=bootstrap, seed=seed)

    return Evaluation(
        utterances=tuple(ordered),
        overall=rate(ordered, None, None),
        sources=tuple(rate([u for u in ordered if u.source == source], source, None) for source in sources),
        languages=tuple(rate([u for u in ordered if (u.source, u.language) == pair], *pair) for pair in pairs),
        normalizer_version=NORMALIZER_VERSION,
        bootstrap=bootstrap,
        seed=seed,
    )


def compare(
    before: Iterable[Utterance],
    after: Iterable[Utterance],
    *,
    quantity: Quantity = "greedy",
    bootstrap: int = 1000,
    seed: int = 0,
) -> Difference:
    """Difference of the corpus rates of two systems on the same utterances; both are resampled together.

    Pairing takes out how hard the utterances are, which both systems share, so the interval is much narrower than that
    of two separate evaluations. The spread of sampled transcripts is part of the interval of "expected".

    Args:
        before, after: the same utterances, in any order. Choose a source or a language before the call.
        quantity: "greedy", or "expected" for the mean over samples.
        bootstrap: resamples. seed: of the resampling.

    Raises:
        DataError: the two differ in ids, units or references; there are none; or "expected" is asked without samples.
    """
    left, right = _by_key(before, "'before'"), _by_key(after, "'after'")
    _check_paired(left, right)
    if quantity == "expected":
        for name, side in (("before", left), ("after", right)):
            missing = [u.key for u in side if not u.samples]
            if missing:
                raise DataError(
                    f"no expected rate of '{name}': {len(missing)} of {len(side)} utterances have no samples, such as "
                    f"{_shown(missing)}. Evaluate with evaluation.samples of 1 or more, or compare the greedy rates."
                )
    numerators = np.stack([_edits(left, quantity), _edits(right, quantity)])
    reference = _references(left)
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = numerators.sum(axis=1) / reference.sum()
    draws = _resample(
        np.concatenate([numerators, reference[None]]), lambda sums: (sums[1] - sums[0]) / sums[2], bootstrap, seed
    )
    low, high = _percentiles(draws)
    value = float(rates[1] - rates[0])
    name = rate_name(u.unit for u in left)
    return Difference(name, quantity, float(rates[0]), float(rates[1]), value, low, high, len(left))


def _error_rate(
    utterances: list[Utterance], chosen_by: tuple[str | None, str | None], *, bootstrap: int, seed: int
) -> ErrorRate:
    total = sum((u.edits for u in utterances), Edits())
    sampled = [u for u in utterances if u.samples]
    no_reference = [u for u in utterances if u.edits.num_reference == 0]
    return ErrorRate(
        name=rate_name(u.unit for u in utterances),
        source=chosen_by[0],
        language=chosen_by[1],
        num_utterances=len(utterances),
        num_reference=total.num_reference,
        greedy=_interval(utterances, "greedy", bootstrap=bootstrap, seed=seed),
        insertions=_per_unit(total.insertions, total),
        deletions=_per_unit(total.deletions, total),
        substitutions=_per_unit(total.substitutions, total),
        expected=_interval(sampled, "expected", bootstrap=bootstrap, seed=seed) if sampled else None,
        num_sampled=len(sampled),
        truncated=sum(u.truncated for u in utterances) / len(utterances),
        num_no_reference=len(no_reference),
        num_vanished=sum(vanishes(u.reference, u.language) for u in no_reference),
    )


def _per_unit(count: int, total: Edits) -> float:
    return count / total.num_reference if total.num_reference else float("nan")


def _interval(utterances: list[Utterance], quantity: Quantity, *, bootstrap: int, seed: int) -> Interval:
    columns = np.stack([_edits(utterances, quantity), _references(utterances)])
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(columns[0].sum() / columns[1].sum()) if columns[1].any() else float("nan")
    return Interval(value, *_percentiles(_resample(columns, lambda sums: sums[0] / sums[1], bootstrap, seed)))


def _edits(utterances: list[Utterance], quantity: Quantity) -> Doubles:
    if quantity == "greedy":
        return np.array([u.edits.total for u in utterances], np.float64)
    return np.array([u.expected_edits for u in utterances], np.float64)


def _references(utterances: list[Utterance]) -> Doubles:
    return np.array([u.edits.num_reference for u in utterances], np.float64)


def _resample(columns: Doubles, statistic: Callable[[Doubles], Doubles], bootstrap: int, seed: int) -> Doubles:
    """The statistic of ``bootstrap`` resamples, drawn with replacement from the utterances.

    Args:
        columns: [K, U] one column an utterance.
        statistic: maps sums [K, B] over resampled utterances to [B].

    Returns:
        [bootstrap]; where a resample has no reference units, not finite.
    """
    generator = np.random.default_rng(seed)
    num = columns.shape[1]
    at_once = max(1, _MAX_DRAWS_AT_ONCE // num)
    results = []
    for start in range(0, bootstrap, at_once):
        drawn = generator.integers(num, size=(min(at_once, bootstrap - start), num))
        sums = np.stack([column[drawn].sum(axis=1) for column in columns])
        with np.errstate(invalid="ignore", divide="ignore"):
            results.append(statistic(sums))
    return np.concatenate(results)


def _percentiles(draws: Doubles) -> tuple[float, float]:
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return float("nan"), float("nan")
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(finite, [tail, 1 - tail])
    return float(low), float(high)


def _by_key(utterances: Iterable[Utterance], where: str) -> list[Utterance]:
    """Sorted by source and id, which must be unique."""
    ordered = sorted(utterances, key=lambda u: u.key)
    if not ordered:
        raise DataError(f"no utterances in {where}: there is nothing to score. Check the data source and its filters.")
    twice = sorted({a.key for a, b in pairwise(ordered) if a.key == b.key})
    if twice:
        raise DataError(
            f"ids that stand in {where} more than once: {len(twice)}, such as {_shown(twice)}. "
            "Give every row of a source its own id."
        )
    return ordered


def _check_paired(before: list[Utterance], after: list[Utterance]) -> None:
    left, right = {u.key for u in before}, {u.key for u in after}
    if left != right:
        parts = []
        for name, only in (("before", left - right), ("after", right - left)):
            if only:
                parts.append(f"{len(only)} only in '{name}', such as {_shown(sorted(only))}")
        raise DataError(
            f"two evaluations can only be compared on the same utterances: {'; '.join(parts)}. "
            "Evaluate both on the same data."
        )
    other = [
        a.key
        for a, b in zip(before, after, strict=True)
        if (a.unit, a.edits.num_reference, a.reference) != (b.unit, b.edits.num_reference, b.reference)
    ]
    if other:
        raise DataError(
            f"utterances with another reference or unit in 'before' than in 'after': {len(other)}, such as "
            f"{_shown(other)}. Evaluate both with the same references, evaluation.unit and version of skirl."
        )


def _shown(keys: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(keys) - _SHOWN_IDS} more" if len(keys) > _SHOWN_IDS else ""
    return ", ".join("/".join(key) for key in keys[:_SHOWN_IDS]) + more
