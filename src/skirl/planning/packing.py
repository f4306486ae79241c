"""Sequences into micro-batches: a hard token cap first, balance second."""

import heapq
from collections.abc import Sequence

__all__ = ["pack"]


def pack(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Indices by rank and micro-batch: ``result[rank][micro_batch]`` is a list of positions in ``lengths``.

    First-fit decreasing finds how many rows the cap needs; the count is rounded up to a multiple of the ranks, and the
    sequences are spread over that many rows, longest first, each into the emptiest row. Where that overshoots the cap
    the first-fit rows are kept. Rows are then dealt to ranks so that no rank has much more work than another.

    Every rank gets the same number of rows, at least one; rows may be empty. Deterministic.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fitted = _first_fit(lengths, order, max_tokens)
    count = max(1, -(-len(fitted) // num_ranks)) * num_ranks
    rows = _spread(lengths, order, count)
    if any(sum(lengths[i] for i in row) > max_tokens for row in rows):
        rows = fitted + [[] for _ in range(count - len(fitted))]
    return _deal(lengths, [sorted(row) for row in rows], num_ranks)


def _first_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for i in order:
        for row, room in enumerate(free):
            if lengths[i] <= room:
                rows[row].append(i)
                free[row] -= lengths[i]
                break
        else:
            rows.append([i])
            free.append(max_tokens - lengths[i])
    return rows


def _spread(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, row) for row in range(count)]
    for i in order:
        size, row = heapq.heappop(emptiest)
        rows[row].append(i)
        heapq.heappush(emptiest, (size + lengths[i], row))
    return rows


def _deal(lengths: Sequence[int], rows: list[list[int]], num_ranks: int) -> list[list[list[int]]]:
    sized = sorted(rows, key=lambda row: (-sum(lengths[i] for i in row), row))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(sized), num_ranks):
        block = sized[start : start + num_ranks]
        if (start // num_ranks) % 2:
            block = block[::-1]  # there and back, so that no rank always gets the longest row
        for rank, row in zip(ranks, block, strict=True):
            rank.append(row)
    return ranks
