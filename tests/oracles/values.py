"""Loss of one value, with its derivative by cases.

0.5 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2): the value clip of PPO's authors, as in arXiv:2005.12729,
table 1.
"""

from tests.oracles.autodiff import Number, clip, larger, note


def value_loss(value: Number, old: float, target: float, bound: float | None) -> Number:
    """The formula."""
    error = value - target
    if bound is None:
        return error * error * 0.5
    held = clip(value - old, -bound, bound) + old - target
    note(kink_margin(value.value, old, target, bound))
    return larger(error * error, held * held) * 0.5


def by_hand(value: float, old: float, target: float, bound: float | None) -> tuple[float, float]:
    """(loss, derivative by the value).

    The held value is the worse one exactly where V has passed the bound and is nearer to R than the bound is; there the
    loss does not move with V.
    """
    if bound is not None and abs(value - old) > bound:
        held = old + bound if value > old else old - bound
        if abs(held - target) > abs(value - target):
            return 0.5 * (held - target) ** 2, 0.0
    return 0.5 * (value - target) ** 2, value - target


def is_cut(value: float, old: float, target: float, bound: float | None) -> bool:
    """Whether the clip has cut this value's gradient."""
    if bound is None or abs(value - old) <= bound:
        return False
    held = old + bound if value > old else old - bound
    return abs(held - target) > abs(value - target)


def kink_margin(value: float, old: float, target: float, bound: float | None) -> float:
    """Distance from the nearest point where the derivative jumps."""
    if bound is None:
        return 1.0
    held = old + bound if value > old else old - bound
    return min(abs(abs(value - old) - bound), abs(abs(held - target) - abs(value - target)))
