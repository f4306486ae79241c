"""What the thread that owns the reward processes may never do: hold up whoever asks it, or wait for ever itself."""

import subprocess
import threading
import time

import pytest

from skirl.records import ScoreFailure
from skirl.rewards.processes import Limits, WorkerProcesses
from skirl.rewards.worker import Setup
from skirl.testing.reward_samples import make_sample

SOURCE = """
import time

def reward(sample):
    if sample.text == "hang":
        time.sleep(600)
    return 1.0
"""


@pytest.fixture
def processes():
    made = WorkerProcesses(Setup("my_reward.py", SOURCE, "reward", (), 0.5), Limits(1, 0.5))
    made.start()
    yield made
    made.close()


def test_asking_never_waits_for_the_thread(processes, monkeypatch):
    """An event loop asks, and serves others meanwhile. While the thread is busy (with a process that it ends), what
    wakes it up must not run full: each socket holds a few hundred wake-ups.
    """
    busy, take_in = threading.Event(), processes._take_in

    def held_up():
        busy.wait(20)
        take_in()

    monkeypatch.setattr(processes, "_take_in", held_up)
    futures = []

    def ask():
        futures.extend(processes.submit("function", [make_sample("a")]) for _ in range(3000))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(5)
    waited = asking.is_alive()
    busy.set()
    assert not waited, f"the thread was asked {len(futures)} times, and then the asking stood still"
    assert [future.result(20) for future in futures] == [[{"reward": 1.0}]] * 3000


def test_a_row_whose_name_is_not_utf_8_is_scored(processes):
    assert processes.submit("function", [make_sample("a", sample_id="clip \udcff:1")]).result(20) == [{"reward": 1.0}]


def test_a_process_that_cannot_be_killed_holds_nobody_up(processes, monkeypatch, caplog):
    """One that waits for a dead file server ends when that answers, and no signal helps."""
    monkeypatch.setattr("skirl.rewards.processes.KILLED_WITHIN_S", 0.2)
    wait, ended = subprocess.Popen.wait, threading.Event()

    def stuck(self, timeout=None):
        if ended.wait(timeout):
            return wait(self, timeout)
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", stuck)
    hanging = processes.submit("function", [make_sample("hang")])
    [failure] = hanging.result(10)
    assert isinstance(failure, ScoreFailure)
    assert failure.kind == "timeout"
    assert processes.submit("function", [make_sample("a")]).result(10) == [{"reward": 1.0}]
    assert "does not end although it was killed" in caplog.text
    ended.set()
    began = time.monotonic()
    processes.close()
    assert time.monotonic() - began < 5
