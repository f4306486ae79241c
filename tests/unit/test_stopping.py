"""SIGTERM to the process of a run, sent to this one."""

import os
import signal
import sys
import threading

import pytest

from skirl.runtime.stopping import interrupted_by_sigterm, same_sigterm, stopping


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_is_noted_and_the_second_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopping() as request:
        assert not request.asked
        terminate()
        assert request.asked
        assert "ends after this step, with a checkpoint" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            terminate()
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_interrupts_where_nothing_is_under_way() -> None:
    with interrupted_by_sigterm():
        with stopping():
            pass
        with pytest.raises(KeyboardInterrupt):
            terminate()


def test_what_ray_does_to_it_is_undone() -> None:
    with interrupted_by_sigterm():
        ours = signal.getsignal(signal.SIGTERM)
        with same_sigterm():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        assert signal.getsignal(signal.SIGTERM) is ours


def test_a_run_in_another_thread_leaves_signals_alone() -> None:
    found = []

    def run() -> None:
        with stopping() as request:
            found.append((request.asked, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]
