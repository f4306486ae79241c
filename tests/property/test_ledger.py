"""The ledger balances under any order of calls, and refuses every call that would lose or double a rollout."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skirl.errors import CheckpointError
from skirl.tracking.ledger import Ledger, LedgerError, rollout_key

REASONS = ("reward_failed", "too_old", "no_spread")


class Rollouts(RuleBasedStateMachine):
    """A plain model beside the ledger: every key with its one state."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.states: dict[str, str] = {}

    def in_flight(self) -> list[str]:
        return [key for key, state in self.states.items() if state == "in flight"]

    @rule(number=st.integers(0, 6))
    def issue(self, number: int) -> None:
        keys = [rollout_key(len(self.states) + index, "numbers/row#7", index) for index in range(number)]
        self.ledger.issue(keys)
        self.states |= dict.fromkeys(keys, "in flight")

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), end=st.sampled_from(("trained", *REASONS)))
    def finish(self, data: st.DataObject, end: str) -> None:
        keys = data.draw(st.lists(st.sampled_from(self.in_flight()), unique=True))
        if end == "trained":
            self.ledger.trained(iter(keys))
        else:
            self.ledger.dropped(iter(keys), end)
        self.states |= dict.fromkeys(keys, end)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def wrong_calls_change_nothing(self, data: st.DataObject) -> None:
        before = self.ledger.state()
        good = self.in_flight()
        finished = sorted(set(self.states) - set(good))
        for bad in [*finished[:1], "9/never#0"]:
            keys = data.draw(st.permutations([*good, bad]))
            with pytest.raises(LedgerError, match=bad):
                self.ledger.trained(keys)
            with pytest.raises(LedgerError, match=bad):
                self.ledger.dropped(keys, "too_old")
        for key in good[:1]:
            with pytest.raises(LedgerError, match=key):
                self.ledger.issue(["9/new#0", key])
            with pytest.raises(LedgerError, match=key):
                self.ledger.trained([key, key])
        assert self.ledger.state() == before

    @rule()
    def save_and_restore(self) -> None:
        saved = json.loads(json.dumps(self.ledger.state()))
        self.ledger = Ledger()
        self.ledger.restore(saved)
        assert self.ledger.state() == saved

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        self.ledger.check()
        states = list(self.states.values())
        assert self.ledger.issued == len(states)
        assert self.ledger.num_trained == states.count("trained")
        assert self.ledger.drop_reasons == {reason: states.count(reason) for reason in REASONS if reason in states}
        assert list(self.ledger.in_flight) == self.in_flight()


Rollouts.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRollouts = Rollouts.TestCase


def test_idle_check_names_what_was_forgotten():
    ledger = Ledger()
    ledger.issue(["1/a#0", "1/a#1"])
    ledger.trained(["1/a#0"])
    ledger.check()
    with pytest.raises(LedgerError, match="neither trained on nor dropped: 1/a#1"):
        ledger.check(idle=True)
    ledger.dropped(["1/a#1"], "reward_failed")
    ledger.check(idle=True)


def test_a_lost_key_is_found():
    ledger = Ledger()
    ledger.issue(["1/a#0", "1/a#1"])
    ledger._in_flight.pop("1/a#0")
    with pytest.raises(LedgerError, match=r"issued 2 != trained 0 \+ dropped 0 .* in flight 1: 1/a#1"):
        ledger.check()


def test_metrics_are_the_counts():
    ledger = Ledger()
    ledger.issue([f"1/a#{index}" for index in range(5)])
    ledger.trained(["1/a#0", "1/a#1"])
    ledger.dropped(["1/a#2"], "too_old")
    values = {name: ratio.value for name, ratio in ledger.metrics().items()}
    assert values == {
        "ledger/issued": 5,
        "ledger/trained": 2,
        "ledger/dropped": 1,
        "ledger/dropped/too_old": 1,
        "ledger/in_flight": 2,
    }


@given(reason=st.text())
def test_a_reason_is_a_name(reason: str):
    ledger = Ledger()
    ledger.issue(["1/a#0"])
    if reason.isascii() and reason.isidentifier() and reason == reason.lower() and reason[0] != "_":
        ledger.dropped(["1/a#0"], reason)
    else:
        with pytest.raises(LedgerError, match="a reason is a name"):
            ledger.dropped(["1/a#0"], reason)


GOOD = {"issued": 3, "trained": 1, "dropped": {"too_old": 1}, "in_flight": ["1/a#0"]}


@pytest.mark.parametrize(
    "change",
    [
        {"issued": 4},
        {"trained": 2},
        {"dropped": {}},
        {"in_flight": []},
        {"issued": 4, "in_flight": ["1/a#0", "1/a#0"]},
        {"issued": 1, "trained": -1},
        {"dropped": None},
        {"in_flight": None},
        {"issued": "many"},
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(change: dict):
    ledger = Ledger()
    ledger.restore(GOOD)
    with pytest.raises(CheckpointError):
        ledger.restore(GOOD | change)
    assert ledger.state() == GOOD


def test_memory_is_bounded():
    ledger = Ledger()
    for step in range(2000):
        keys = [rollout_key(step, "numbers/1", index) for index in range(4)]
        ledger.issue(keys)
        ledger.trained(keys[:3])
        ledger.dropped(keys[3:], "reward_failed")
    assert len(json.dumps(ledger.state())) < 200
    assert ledger.issued == 8000
