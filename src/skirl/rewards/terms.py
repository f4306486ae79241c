"""The rule library by kind: what a recipe may name under ``reward.terms``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skirl.rewards import code_tests, math_answer, speech

__all__ = ["TERMS", "Term"]

TERMS: Mapping[str, Callable[..., float | None]] = {
    **speech.TERMS,
    "code": code_tests.code,
    "math": math_answer.math,
}
"""Kind of a term -> its function of one sample; the other settings of the term are keyword arguments."""


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a recipe: the name it is logged under, its kind, and its other settings."""

    name: str
    kind: str
    settings: Mapping[str, Any]
