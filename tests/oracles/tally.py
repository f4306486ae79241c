"""How many cases were compared, and how far apart the farthest was."""

import math
from collections.abc import Callable, Sequence


def difference(got: Sequence[float], expected: Sequence[float], floor: float = 0.0) -> float:
    """|got - expected| / |expected|, Euclidean; an expected 0 must be met exactly.

    Args: floor: the least that is divided by, where terms of about this size cancel.
    """
    assert len(got) == len(expected), (got, expected)
    gap = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(got, expected, strict=True)))
    size = max(math.sqrt(math.fsum(b * b for b in expected)), floor)
    if gap == 0:
        return 0.0
    return gap / size if size > 0 and not math.isnan(gap) else math.inf


class Tally:
    """Compares, counts, keeps the worst, and writes both into the test report."""

    def __init__(self, name: str) -> None:
        self.name, self.cases, self.skipped = name, 0, 0
        self.worst, self.where = 0.0, ""

    def add(self, got: Sequence[float], expected: Sequence[float], what: str, floor: float = 0.0) -> None:
        """One vector of a case."""
        apart = difference(got, expected, floor)
        if apart > self.worst or not self.where:
            self.worst, self.where = apart, f"{what}: got {list(got)[:12]}, expected {list(expected)[:12]}"

    def finish(self, record: Callable[[str, object], None], bound: float, at_least: int = 1) -> None:
        """Refuses a difference above the bound, or too few cases."""
        record(f"oracle/{self.name}/cases", self.cases)
        record(f"oracle/{self.name}/worst", f"{self.worst:.1e}")
        assert self.cases >= at_least, f"{self.name}: {self.cases} cases, {self.skipped} skipped"
        assert self.worst < bound, f"{self.name}: {self.worst:.2e} in {self.where}"
