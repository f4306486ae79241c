"""Edit counts from the definition: the slow loops that the fast code is held against."""

from collections.abc import Sequence

Counts = tuple[int, int, int]  # insertions, deletions, substitutions


def distance(reference: Sequence[str], hypothesis: Sequence[str]) -> float:
    """Fewest insertions, deletions and substitutions that turn the reference into the hypothesis.

    cost[i][j]: of the first i reference units against the first j hypothesis units (Wagner & Fischer 1974).
    """
    cost = [[0.0] * (len(hypothesis) + 1) for _ in range(len(reference) + 1)]
    for i in range(len(reference) + 1):
        for j in range(len(hypothesis) + 1):
            ways = []
            if i > 0:
                ways.append(cost[i - 1][j] + 1.0)
            if j > 0:
                ways.append(cost[i][j - 1] + 1.0)
            if i > 0 and j > 0:
                ways.append(cost[i - 1][j - 1] + (0.0 if reference[i - 1] == hypothesis[j - 1] else 1.0))
            cost[i][j] = min(ways) if ways else 0.0
    return cost[-1][-1]


def cheapest_counts(reference: Sequence[str], hypothesis: Sequence[str]) -> set[Counts]:
    """(insertions, deletions, substitutions) of every cheapest alignment."""
    found: list[list[set[Counts]]] = [[set() for _ in range(len(hypothesis) + 1)] for _ in range(len(reference) + 1)]
    for i in range(len(reference) + 1):
        for j in range(len(hypothesis) + 1):
            ways: set[Counts] = {(0, 0, 0)} if i == j == 0 else set()
            if i > 0:
                ways |= {(ins, dels + 1, subs) for ins, dels, subs in found[i - 1][j]}
            if j > 0:
                ways |= {(ins + 1, dels, subs) for ins, dels, subs in found[i][j - 1]}
            if i > 0 and j > 0:
                wrong = int(reference[i - 1] != hypothesis[j - 1])
                ways |= {(ins, dels, subs + wrong) for ins, dels, subs in found[i - 1][j - 1]}
            least = min(sum(way) for way in ways)
            found[i][j] = {way for way in ways if sum(way) == least}
    return found[-1][-1]
