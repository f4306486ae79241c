"""Parts of every sample of a group -> totals. Pure.

A total is the weighted sum of the parts that ALL scored samples of a group have: totals are compared within the group,
so one sample must not be paid for a part that its sibling was never asked for. A part may be missing in two ways:

* its value is None: it does not apply to this sample (no keyword on either side). Expected, not reported. If no part is
  left, the totals are 0, which is no signal.
* its name is absent from what the function returned for this sample. It is left out too, and reported; if no part is
  left, every scored sample of the group fails with ``bad_type``, since nothing would count.

A part with a number for each turn counts as their sum. Where one does, the score also says what each turn is worth:

    turn_k = sum over such parts p of weight_p * part_p,k,    and the last turn has all other parts besides

so that the turns sum to the total, and what judges the whole response pays its end, as it does without turns.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skirl.records import Ratio, Score, ScoredGroup, ScoreFailure, sum_ratios

__all__ = ["Combined", "Parts", "combine", "in_group_spread", "without_spread"]

Parts = dict[str, float | tuple[float, ...] | None]
"""Named, unweighted parts of one sample's score: a number, a number for each turn, or None where it does not apply."""

SPREAD_TOLERANCE = 1e-8
"""Scores that differ by less, relative to their size, are equal: the default of advantages of groups, too."""


@dataclass(frozen=True, slots=True)
class Combined:
    """Scores of one group.

    Attributes:
        scores: one a sample, in order.
        shared: names of the parts that made the totals, sorted.
        partial: name -> indices of the samples that have it, for names that some scored sample did not return at all.
    """

    scores: tuple[Score, ...]
    shared: tuple[str, ...]
    partial: Mapping[str, tuple[int, ...]]


def combine(results: Sequence[Parts | ScoreFailure], weights: Mapping[str, float]) -> Combined:
    """Totals of one group: total_i = sum over shared parts p of weight_p * part_p,i.

    Args:
        results: for each sample its parts, or why it has none; parts by turn are equally long within a sample.
        weights: factor of a part; 1 where not given.

    Returns:
        Scores in the order of ``results``, whatever that order is; equal parts give exactly equal totals.
    """
    scored = {index: parts for index, parts in enumerate(results) if not isinstance(parts, ScoreFailure)}
    names = sorted({name for parts in scored.values() for name in parts})
    shared = tuple(name for name in names if all(parts.get(name) is not None for parts in scored.values()))
    partial = {
        name: tuple(index for index, parts in scored.items() if name in parts)
        for name in names
        if not all(name in parts for parts in scored.values())
    }
    nothing = ScoreFailure("bad_type", _nothing_shared(scored)) if partial and not shared else None
    scores: list[Score] = []
    for result in results:
        if isinstance(result, ScoreFailure):
            scores.append(Score(None, failure=result))
            continue
        parts = {name: _sum(value) for name, value in sorted(result.items()) if value is not None}
        score = Score(None, parts, nothing) if nothing else _total(parts, shared, weights)
        scores.append(_with_turns(score, result, shared, weights))
    return Combined(tuple(scores), shared, partial)


def _sum(value: float | tuple[float, ...]) -> float:
    return _fsum(value) if isinstance(value, tuple) else value


def _fsum(terms: Iterable[float]) -> float:
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # beyond the range of float; inf - inf
        return math.nan


def _with_turns(score: Score, result: Parts, shared: Sequence[str], weights: Mapping[str, float]) -> Score:
    by_turn = [(weights.get(name, 1.0), part) for name in shared if isinstance(part := result[name], tuple)]
    if score.total is None or not by_turn:
        return score
    turns = [_fsum(weight * part[k] for weight, part in by_turn) for k in range(len(by_turn[0][1]))]
    turns[-1] = _fsum([score.total, *(-turn for turn in turns[:-1])])
    if all(map(math.isfinite, turns)):
        return replace(score, turns=tuple(turns))
    return Score(None, score.parts, ScoreFailure("not_finite", f"the weighted scores of the turns are {turns}"))


def _total(parts: Mapping[str, float], shared: Sequence[str], weights: Mapping[str, float]) -> Score:
    total = _fsum(weights.get(name, 1.0) * parts[name] for name in shared)
    if math.isfinite(total):
        return Score(total, parts)
    said = ", ".join(f"{weights.get(name, 1.0):g} * {name} = {parts[name]:g}" for name in shared)
    return Score(None, parts, ScoreFailure("not_finite", f"the weighted sum of the parts is not finite: {said}"))


def _nothing_shared(scored: Mapping[int, Parts]) -> str:
    some = "; ".join(
        f"sample {index}: {', '.join(sorted(parts)) or 'none'}" for index, parts in list(scored.items())[:3]
    )
    return (
        f"no part is common to all {len(scored)} scored samples of the group ({some}); "
        "return the same part names for each sample, with None for a part that does not apply"
    )


def without_spread(totals: Sequence[float]) -> bool:
    """Whether scores are equal up to rounding, as advantages judge it: max - min <= tolerance * max(1, max |R|).

    None at all are equal, and so is one alone.
    """
    if not totals:
        return True
    return max(totals) - min(totals) <= SPREAD_TOLERANCE * max(1.0, *map(abs, totals))


def in_group_spread(scored_groups: Iterable[ScoredGroup]) -> dict[str, Ratio]:
    """Mean and within-group spread of the total and of every part, as sums.

    A part with a small spread inside the groups carries no signal, whatever its mean; one with a large, constant spread
    dominates a group-normalised sum.

    Returns:
        ``total/mean``, ``total/in_group_std``; for each part ``part/NAME/mean``, ``part/NAME/in_group_std`` and
        ``part/NAME/present`` (share of the scored samples that have it); ``groups_without_spread`` (share of the groups
        whose totals are equal, or that have fewer than two); ``failed`` and ``failed/KIND`` (share of all samples).
        Means weigh every sample the same, spreads every group with at least two values; std divides by n - 1.
    """
    groups = list(scored_groups)
    names = sorted({name for group in groups for score in _scored(group) for name in score.parts})
    result = sum_ratios(_of_group(group, names) for group in groups)
    kinds = sorted({score.failure.kind for group in groups for score in group.scores if score.failure})
    for kind in kinds:
        failed = sum(score.failure is not None and score.failure.kind == kind for g in groups for score in g.scores)
        result[f"failed/{kind}"] = Ratio(float(failed), float(sum(len(group.scores) for group in groups)))
    return result


def _scored(group: ScoredGroup) -> list[Score]:
    return [score for score in group.scores if score.total is not None]


def _of_group(group: ScoredGroup, names: Sequence[str]) -> dict[str, Ratio]:
    scored = _scored(group)
    totals = [score.total for score in scored if score.total is not None]
    result = {
        "failed": Ratio(float(len(group.scores) - len(scored)), float(len(group.scores))),
        "groups_without_spread": Ratio(float(without_spread(totals)), 1.0),
        **_mean_and_std("total", totals),
    }
    for name in names:
        values = [score.parts[name] for score in scored if name in score.parts]
        result[f"part/{name}/present"] = Ratio(float(len(values)), float(len(scored)))
        result |= _mean_and_std(f"part/{name}", values)
    return result


def _mean_and_std(name: str, values: Sequence[float]) -> dict[str, Ratio]:
    data = np.asarray(values, dtype=np.float64)
    enough = len(data) > 1
    equal = enough and data.min() == data.max()  # exactly 0, not what rounding of the mean leaves
    std = float(data.std(ddof=1)) if enough and not equal else 0.0
    return {
        f"{name}/mean": Ratio(math.fsum(values), float(len(data))),
        f"{name}/in_group_std": Ratio(std, float(enough)),
    }
