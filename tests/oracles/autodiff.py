"""Derivatives of formulas that are written in plain Python: a number knows what it was made of.

Each operation notes its inputs and its derivative by each, in float64; ``gradient`` walks back (Griewank & Walther
2008, chapter 3). No tensor library is involved, so that nothing is shared with the code under test. ``watch`` tells how
near any clip was to deciding otherwise, where float32 code may.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Union

_count = itertools.count()

_watched: list[list[float]] = []

Real = Union["Number", float]


class Number:
    """A float64 and how it changes with the numbers that it was made of."""

    __slots__ = ("links", "order", "value")

    def __init__(self, value: float, links: tuple[tuple["Number", float], ...] = ()) -> None:
        self.value, self.links, self.order = float(value), links, next(_count)

    def __add__(self, other: Real) -> "Number":
        if isinstance(other, Number):
            return Number(self.value + other.value, ((self, 1.0), (other, 1.0)))
        return Number(self.value + other, ((self, 1.0),))

    def __mul__(self, other: Real) -> "Number":
        if isinstance(other, Number):
            return Number(self.value * other.value, ((self, other.value), (other, self.value)))
        return Number(self.value * other, ((self, other),))

    def __neg__(self) -> "Number":
        return Number(-self.value, ((self, -1.0),))

    def __sub__(self, other: Real) -> "Number":
        return self + (-other)

    def __rsub__(self, other: float) -> "Number":
        return (-self) + other

    def __truediv__(self, other: float) -> "Number":
        return Number(self.value / other, ((self, 1.0 / other),))

    __radd__ = __add__
    __rmul__ = __mul__


def numbers(values: Iterable[float]) -> list[Number]:
    """Inputs."""
    return [Number(value) for value in values]


def stop(x: Number) -> float:
    """The value alone: nothing is passed back through it."""
    return x.value


def exp(x: Number) -> Number:
    """e^x."""
    value = math.exp(x.value)
    return Number(value, ((x, value),))


def log_sigmoid(x: Number) -> Number:
    """log(1 / (1 + e^-x)), with derivative 1 / (1 + e^x); branches keep exponents below 0."""
    small = math.exp(-abs(x.value))
    slope = small / (1.0 + small) if x.value > 0 else 1.0 / (1.0 + small)
    return Number(min(0.0, x.value) - math.log1p(small), ((x, slope),))


def sigmoid(x: Number) -> Number:
    """1 / (1 + e^-x)."""
    return exp(log_sigmoid(x))


def log_one_minus_exp(x: Number) -> Number:
    """log(1 - e^x) for x < 0, with derivative e^x / (e^x - 1)."""
    return Number(math.log(-math.expm1(x.value)), ((x, math.exp(x.value) / math.expm1(x.value)),))


def smaller(a: Number, b: Real) -> Number:
    """min(a, b)."""
    other = b if isinstance(b, Number) else Number(b)
    return a if a.value <= other.value else other


def larger(a: Number, b: Real) -> Number:
    """max(a, b)."""
    other = b if isinstance(b, Number) else Number(b)
    return a if a.value >= other.value else other


def clip(x: Number, low: float, high: float) -> Number:
    """x where it is between the bounds, else the bound that it has passed, which nothing moves."""
    note(min(abs(x.value - low), abs(x.value - high)))
    return smaller(larger(x, low), high)


@contextmanager
def watch() -> Iterator[list[float]]:
    """Distances from the border of every decision that is taken inside."""
    distances: list[float] = []
    _watched.append(distances)
    try:
        yield distances
    finally:
        _watched.pop()


def note(distance: float) -> None:
    """A decision was taken, this far from its border."""
    for distances in _watched:
        distances.append(distance)


def total(terms: Iterable[Real]) -> Number:
    """Sum."""
    result = Number(0.0)
    for term in terms:
        result = result + term
    return result


def mean(terms: Sequence[Real]) -> Number:
    """Sum divided by count."""
    return total(terms) / len(terms)


def gradient(result: Number, inputs: Sequence[Number]) -> list[float]:
    """Derivative of the result by each input; 0 for inputs that it was not made of."""
    found, stack = {result.order: result}, [result]
    while stack:
        for parent, _ in stack.pop().links:
            if parent.order not in found:
                found[parent.order] = parent
                stack.append(parent)
    slopes = dict.fromkeys(found, 0.0)
    slopes[result.order] = 1.0
    for order in sorted(found, reverse=True):  # what was made last is settled first
        for parent, slope in found[order].links:
            slopes[parent.order] += slope * slopes[order]
    return [slopes.get(x.order, 0.0) for x in inputs]
