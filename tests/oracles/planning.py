"""Loss weights from the papers' objectives, and a packing to measure a plan against."""

from collections.abc import Sequence
from fractions import Fraction


def weights(lengths: Sequence[int], normalizer: str, constant_length: int | None) -> list[Fraction]:
    """The weight of one token of each sequence of an optimizer step; ``lengths`` are its action tokens T_i.

    token 1 / sum(T) (arXiv:2503.14476 eq. 12), sequence 1 / (S T_i) (arXiv:2402.03300 eq. 3), constant 1 / (S L)
    (arXiv:2503.20783); S counts the sequences that have an action token.
    """
    counted = [length for length in lengths if length > 0]
    result = []
    for length in lengths:
        if length == 0:
            result.append(Fraction(0))
        elif normalizer == "token":
            result.append(Fraction(1, sum(counted)))
        elif normalizer == "sequence":
            result.append(Fraction(1, len(counted) * length))
        else:
            assert constant_length is not None
            result.append(Fraction(1, len(counted) * constant_length))
    return result


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> int:
    """Bins that first-fit decreasing needs: at most 11/9 of the fewest possible, plus 6/9 (Dosa 2007)."""
    bins: list[int] = []
    for size in sorted(sizes, reverse=True):
        for index, used in enumerate(bins):
            if used + size <= capacity:
                bins[index] += size
                break
        else:
            bins.append(size)
    return len(bins)
