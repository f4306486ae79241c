"""The bars, on a terminal that is emulated far enough to see what a person sees."""

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from skirl.tracking.progress import ProgressDisplay

logger = logging.getLogger("skirl.test_progress")


class Screen(io.StringIO):
    """A terminal of 120 columns: what was written, and the lines that it shows at the end."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        rows: list[list[str]] = [[]]
        y = x = 0
        for token in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|.|\n", self.getvalue(), re.DOTALL):
            if token == "\n":
                y, x = y + 1, 0
                if y == len(rows):
                    rows.append([])
            elif token == "\r":
                x = 0
            elif token.endswith("A") and len(token) > 1:
                y = max(0, y - int(token[2:-1] or 1))
            elif token == "\x1b[2K":
                rows[y] = []
            elif not token.startswith("\x1b"):
                rows[y] += [" "] * (x - len(rows[y]))
                rows[y][x : x + 1] = [token]
                x += 1
        return ["".join(row).rstrip() for row in rows]


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def display(screen: Screen) -> ProgressDisplay:
    return ProgressDisplay(Console(file=screen, force_terminal=True, width=120), error_name="CER")


def test_run_and_phase(screen: Screen, display: ProgressDisplay):
    display.start(total_steps=100, done=10)
    display.step(12, {"reward/mean": 0.8123, "eval/noisy/error_rate": 0.123})
    display.step(13, {"reward/mean": 0.9})
    with display.phase("sampling", 128, "rollouts") as bar:
        bar.advance(64, tokens=1000)
        bar.advance(32, tokens=500)
        with display.phase("scoring"):
            display.refresh()
        shown = [line for line in screen.lines() if line]
        assert shown[0] == "reward 0.900   CER noisy 12.3%"
        assert re.match(r"run +\S+ +13/100 steps +00:0\d, 00:\d\d left$", shown[1])
        assert re.match(r"sampling +\S+ +96/128 rollouts +00:0\d +[\d,]+ tok/s$", shown[2])
        assert re.match(r"scoring +\S+ +0 +00:0\d$", shown[3])
        display.refresh()
        assert len([line for line in screen.lines() if line]) == 3
    display.close()
    assert [line for line in screen.lines() if line] == []


def test_log_lines_scroll_above_the_bars(screen: Screen, display: ProgressDisplay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", screen)  # in the test, as pytest sets its own after the fixtures
    handler = logging.StreamHandler(screen)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        display.start(total_steps=2)
        with display.phase("sampling", 2, "rollouts") as bar:
            for step in range(1, 3):
                bar.advance()
                display.refresh()
                logger.info("step %d/2 | reward [0.5] of /a/path", step)
            sys.stderr.write("a warning\n")
            display.refresh()
            assert [line.split("  ")[0] for line in screen.lines() if line] == [
                "INFO step 1/2 | reward [0.5] of /a/path",
                "INFO step 2/2 | reward [0.5] of /a/path",
                "a warning",
                "run",
                "sampling",
            ]
        display.close()
        logger.info("after")
    finally:
        logger.removeHandler(handler)
    assert handler.stream is screen
    assert sys.stderr is screen
    assert [line for line in screen.lines() if line][2:] == ["a warning", "INFO after"]


def test_results_on_stdout_stay_off_the_terminal(
    screen: Screen, display: ProgressDisplay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stderr", screen)
    results = io.StringIO()  # "> results.txt"
    monkeypatch.setattr(sys, "stdout", results)
    display.start(total_steps=2)
    sys.stdout.write("| CER |\n")
    display.close()
    assert results.getvalue() == "| CER |\n"
    assert "CER" not in screen.getvalue()


def test_off_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setenv("FORCE_COLOR", "1")
    display = ProgressDisplay.on_terminal(wanted=True)
    assert not display.enabled
    display.start(3)
    with display.phase("sampling", 2) as bar:
        bar.advance(2)
    display.step(1, {"reward/mean": 0.5})
    display.close()
    assert bar.done == 2
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(
    ("wanted", "term", "on"), [(True, "xterm-256color", True), (False, "xterm", False), (True, "dumb", False)]
)
def test_on_only_where_wanted_and_possible(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, wanted: bool, term: str, on: bool
):
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", term)
    assert ProgressDisplay.on_terminal(wanted).enabled is on


def test_a_failed_phase_takes_its_bar_away(screen: Screen, display: ProgressDisplay):
    display.start(total_steps=2)
    with pytest.raises(KeyError), display.phase("training", 4):
        raise KeyError
    display.refresh()
    assert [line.split("  ")[0] for line in screen.lines() if line] == ["run"]
    display.close()
    display.close()
