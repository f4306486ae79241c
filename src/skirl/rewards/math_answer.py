"""The math term: is the response's final answer the reference? math-verify reads and compares both."""

from importlib.util import find_spec
from typing import Any

from skirl.errors import DataError, MissingExtra
from skirl.records import RewardSample

__all__ = ["math", "require_math_verify"]

BOX = "\\boxed{"


def require_math_verify() -> None:
    """Raises MissingExtra where math-verify is not installed; imports nothing."""
    if find_spec("math_verify") is None:
        raise MissingExtra(
            "the math term (reward.terms, kind math) needs the package math-verify, which is not installed: "
            "run `pip install 'skirl[math]'`"
        )


def math(sample: RewardSample, *, timeout_s: float = 5.0) -> float:
    r"""1 if the final answer of the response equals the reference mathematically, else 0.

    The final answer is what stands in the last ``\boxed{}``, else the last formula or number. The reference may be
    written like this too, or be the bare answer: ``42``, ``1/2``, ``\frac{1}{2}``, ``x^2 + 1``. A response whose answer
    cannot be read, or not within the time, scores 0.

    Args:
        sample: needs a reference.
        timeout_s: of each of reading and comparing; by SIGALRM, so this must run in the main thread. What holds on
            longer than that (arithmetic of huge numbers) is for the deadline of the process to end.

    Raises:
        DataError: there is no reference, or it is no mathematics.
        MissingExtra: math-verify is not installed.
    """
    if sample.reference is None:
        raise DataError(f"the math term needs a reference answer, and row {sample.id} has none")
    require_math_verify()
    import math_verify

    limit = max(1, int(timeout_s))
    gold = _read(sample.reference, bare=True, limit_s=limit)
    if not gold:
        raise DataError(f"row {sample.id}: the reference {sample.reference[:80]!r} cannot be read as mathematics")
    answer = _read(sample.text, bare=False, limit_s=limit)
    return float(bool(answer) and math_verify.verify(gold, answer, timeout_seconds=limit))


def _read(text: str, *, bare: bool, limit_s: int) -> Any:
    """Expressions that math-verify finds in a text; empty where there is none."""
    from math_verify import parse

    boxed = _last_boxed(text)
    if boxed:
        return parse(boxed, parsing_timeout=limit_s)
    if bare and "$" not in text and (found := parse(f"${text}$", parsing_timeout=limit_s)):
        return found
    return parse(text, parsing_timeout=limit_s)


def _last_boxed(text: str) -> str:
    """The last box that is closed, with its braces; empty where there is none. math-verify itself joins all boxes."""
    start = len(text)
    while (start := text.rfind(BOX, 0, start)) >= 0:
        depth = 0
        for end in range(start + len(BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start : end + 1]
    return ""
