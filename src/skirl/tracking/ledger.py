"""What became of every rollout: issued = trained + dropped(reason) + in flight, at all times.

Memory is bounded: finished rollouts are counts, only those in flight are kept by key.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from skirl.errors import CheckpointError
from skirl.records import Ratio

__all__ = ["Ledger", "LedgerError", "rollout_key"]

_REASON = re.compile(r"[a-z][a-z0-9_]*")
_SHOWN = 5


class LedgerError(AssertionError):
    """A rollout is lost, or counted twice: a fault of skirl, never of the user."""


def rollout_key(step: int, prompt_id: str, sample_index: int) -> str:
    """ "step/prompt id#sample": unique in a run, although a prompt returns every epoch."""
    return f"{step}/{prompt_id}#{sample_index}"


class Ledger:
    """Counts of rollouts by what became of them. Each key is in flight once, then trained on or dropped, once.

    A call with one wrong key changes nothing.
    """

    def __init__(self) -> None:
        self._issued = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._in_flight: dict[str, None] = {}  # a dict, not a set: keys keep the order in which they were issued

    @property
    def issued(self) -> int:
        """Rollouts asked for."""
        return self._issued

    @property
    def num_trained(self) -> int:
        """Rollouts trained on."""
        return self._trained

    @property
    def num_dropped(self) -> int:
        """Rollouts dropped, for any reason."""
        return self._dropped.total()

    @property
    def drop_reasons(self) -> Mapping[str, int]:
        """Rollouts dropped, by reason."""
        return dict(self._dropped)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Keys neither trained on nor dropped, in the order of issue."""
        return tuple(self._in_flight)

    def issue(self, keys: Iterable[str]) -> None:
        """Rollouts are asked for."""
        new = _unique(keys, "issued")
        twice = [key for key in new if key in self._in_flight]
        if twice:
            raise LedgerError(f"issued again while in flight: {_show(twice)}")
        self._in_flight.update(dict.fromkeys(new))
        self._issued += len(new)

    def trained(self, keys: Iterable[str]) -> None:
        """Rollouts were trained on."""
        self._trained += self._finish(keys, "trained on")

    def dropped(self, keys: Iterable[str], reason: str) -> None:
        """Rollouts will not be trained on. ``reason`` is a name such as "reward_failed", not a message."""
        if not _REASON.fullmatch(reason):
            raise LedgerError(f"a reason is a name (a-z, 0-9, _), so that there are few of them; got {reason!r}")
        count = self._finish(keys, "dropped")
        if count:
            self._dropped[reason] += count

    def check(self, *, idle: bool = False) -> None:
        """Raises LedgerError unless the counts balance; with ``idle``, unless nothing is in flight too."""
        if self._issued != self._trained + self.num_dropped + len(self._in_flight):
            raise LedgerError(
                f"issued {self._issued} != trained {self._trained} + dropped {self.num_dropped} "
                f"{dict(self._dropped)} + in flight {len(self._in_flight)}: {_show(self.in_flight)}"
            )
        if idle and self._in_flight:
            raise LedgerError(f"neither trained on nor dropped: {_show(self.in_flight)}")

    def metrics(self) -> dict[str, Ratio]:
        """The counts, for the step's metrics."""
        counts = {
            "ledger/issued": self._issued,
            "ledger/trained": self._trained,
            "ledger/dropped": self.num_dropped,
            "ledger/in_flight": len(self._in_flight),
        }
        counts |= {f"ledger/dropped/{reason}": count for reason, count in sorted(self._dropped.items())}
        return {name: Ratio(count, 1) for name, count in counts.items()}

    def state(self) -> dict[str, Any]:
        """JSON-able counts and keys in flight, saved with each checkpoint."""
        return {
            "issued": self._issued,
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "in_flight": list(self._in_flight),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; raises CheckpointError if it does not balance, and then changes nothing."""
        try:
            issued, trained = int(state["issued"]), int(state["trained"])
            dropped = Counter({str(reason): int(count) for reason, count in state["dropped"].items()})
            in_flight = dict.fromkeys(str(key) for key in state["in_flight"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint's ledger is damaged ({error!r}): {state}") from error
        counts = (issued, trained, *dropped.values())
        balances = issued == trained + dropped.total() + len(in_flight) and len(in_flight) == len(state["in_flight"])
        if not balances or min(counts) < 0:
            raise CheckpointError(
                f"the checkpoint's ledger does not balance: issued {issued}, trained {trained}, "
                f"dropped {dict(dropped)}, in flight {len(state['in_flight'])}; resume from another checkpoint"
            )
        self._issued, self._trained, self._dropped, self._in_flight = issued, trained, dropped, in_flight

    def _finish(self, keys: Iterable[str], what: str) -> int:
        done = _unique(keys, what)
        unknown = [key for key in done if key not in self._in_flight]
        if unknown:
            raise LedgerError(f"{what}, but not in flight (never issued, or finished before): {_show(unknown)}")
        for key in done:
            del self._in_flight[key]
        return len(done)


def _unique(keys: Iterable[str], what: str) -> list[str]:
    counts = Counter(keys)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise LedgerError(f"{what} twice in one call: {_show(twice)}")
    return list(counts)


def _show(keys: Iterable[str]) -> str:
    listed = list(keys)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
