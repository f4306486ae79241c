"""The math and the code term: what counts, and what code that misbehaves costs."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from skirl.config.rewards import RewardConfig
from skirl.errors import DataError, MissingExtra
from skirl.rewards import math_answer
from skirl.rewards.code_tests import code, last_block
from skirl.rewards.math_answer import math
from skirl.rewards.pool import RewardPool
from skirl.testing.reward_samples import make_group, make_sample, to_samples


def run(config, *texts, **more):
    pool = RewardPool(RewardConfig.model_validate({"num_workers": 1, **config}), to_samples)
    with contextlib.closing(pool):
        return asyncio.run(pool.score(make_group(texts, **more))).scores


# ----------------------------------------------------------------------------------------------------------------- math
@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("so it is 72.", "72", 1.0),
        ("first 72, no, 71", "72", 0.0),
        (r"we get \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1} is wrong, it is \boxed{\frac{3}{6}}.", r"\frac12", 1.0),
        (r"\boxed{1} is wrong, it is \boxed{2}", "1", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("$(x+1)^2$", "x^2+2x+1", 1.0),
        (r"\boxed{x^2+1}", "x^2+2x+1", 0.0),
        ("the answer is 18", "Janet sells 16 - 3 - 4 = 9 eggs.\n#### 18", 1.0),
        (r"\boxed{50\%}", r"\boxed{50\%}", 1.0),
        (r"\boxed{" * 30, "1", 0.0),
        ("I do not know", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_math(response, reference, score):
    assert math(make_sample(response, reference)) == score


def test_math_needs_a_reference():
    with pytest.raises(DataError, match="needs a reference answer, and row made/0 has none"):
        math(make_sample("1"))
    with pytest.raises(DataError, match="the reference '' cannot be read as mathematics"):
        math(make_sample("1", ""))


def test_an_answer_that_takes_too_long_to_compare_scores_0():
    hard = r"\boxed{9^{9^{9^9}}}"
    scores = run({"terms": {"math": "math"}, "timeout_s": 4.0}, r"\boxed{\frac{1}{3}}", hard, reference=r"\frac13")
    assert [one.total for one in scores] == [1.0, 0.0]


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setattr(math_answer, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"run `pip install 'skirl\[math\]'`"):
        run({"terms": {"math": "math"}}, "1")


# ----------------------------------------------------------------------------------------------------------------- code
def program(text):
    return f"Here it is:\n```python\n{text}\n```\nDone."


def score(text, tests, **settings):
    return code(make_sample(program(text), row={"tests": tests}), **settings)


DOUBLE = "print(int(input()) * 2)"
IO = [{"stdin": "2\n", "stdout": "4"}, {"stdin": "3", "stdout": "6 \n\n"}, {"stdin": "4", "stdout": "9"}]


def test_share_of_the_tests_that_pass():
    assert score(DOUBLE, IO) == pytest.approx(2 / 3)
    assert score(DOUBLE, IO, all_or_nothing=True) == 0.0
    assert score(DOUBLE, IO[:2], all_or_nothing=True) == 1.0
    asserts = ["assert f(1) == 2", "assert f(1) == 3", "import math\nassert f(math.pi) > 4"]
    assert score("def f(x): return x + 1", asserts) == pytest.approx(2 / 3)
    as_json = '[{"stdin": "1", "stdout": "2"}]'
    assert score(DOUBLE, as_json) == 1.0


@pytest.mark.parametrize(
    "text", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "1 / 0", "("]
)
def test_ending_early_passes_no_assertion(text):
    assert score(text, ["assert False"]) == 0.0


def test_a_program_that_fails_after_its_output_does_not_pass():
    assert score("print(4); raise ValueError", IO[:1]) == 0.0


def test_only_the_last_closed_block_counts():
    text = "```\nfirst\n```\nno:\n~~~py\nx = '```'\n~~~\n```python\nopen"
    assert last_block(text) == "x = '```'\n"
    assert last_block("no code") is None
    assert code(make_sample("no code", row={"tests": ["pass"]})) == 0.0
    assert code(make_sample("", row={"tests": ["pass"]})) == 0.0


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "must be a list of tests"),
        ([], "must be a list of tests with at least one"),
        ([{"stdin": "1"}], "a test is"),
        ("[1", "is text, but not JSON"),
        ([3], "holds '3'; a test is"),
    ],
)
def test_tests_of_another_form_are_an_error(tests, said):
    with pytest.raises(DataError, match=said):
        score(DOUBLE, tests)


def test_a_missing_column_is_named():
    with pytest.raises(DataError, match="row made/0 has no column 'tests' with tests; it has: text, unit_tests"):
        code(make_sample(program(DOUBLE), row={"unit_tests": []}))


def test_the_program_sees_no_secret_and_an_empty_directory(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    text = "import os\nprint('MY_TOKEN' in os.environ, os.listdir('.'), os.getcwd() == os.environ['HOME'])\n"
    text += "print(b'MY_TOKEN' in open(f'/proc/{os.getppid()}/environ', 'rb').read())"
    assert score(text, [{"stdin": "", "stdout": "False [] True\nFalse"}]) == 1.0


def living(mark):
    """Processes whose program text holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


MISBEHAVES = {
    "hangs": "while True: pass",
    "forks": "import os\nwhile True: os.fork()",
    "spawns": "import subprocess, sys\nwhile True: subprocess.Popen([sys.executable, '-c', 'input()', MARK])",
    "hides": (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)', MARK], start_new_session=True)\n"
        "raise SystemExit(1)"
    ),
    "eats": "x = bytearray(1 << 30)",
    "floods": "for _ in range(300): print('x' * 10000)",
    "fills": "open('x', 'wb').write(bytes(64 << 20))",
    "closes": "import os, time\nos.closerange(0, 10)\ntime.sleep(3600)",
}


@pytest.mark.parametrize("how", MISBEHAVES)
def test_code_that_misbehaves_does_not_pass_and_leaves_nothing(how):
    mark = f"mark-{how}-{os.getpid()}"
    text = MISBEHAVES[how].replace("MARK", repr(mark)) + "\n"
    quick = how in {"eats", "floods", "fills"}  # what gets to its end passes
    folders = set(Path("/tmp").glob("skirl-code-*"))
    began = time.monotonic()
    assert score(text, ["pass"], timeout_s=5.0 if quick else 0.5) == 0.0
    assert time.monotonic() - began < 5
    assert not living(mark)
    assert set(Path("/tmp").glob("skirl-code-*")) <= folders


def test_tests_share_a_budget():
    began = time.monotonic()
    assert score("import time; time.sleep(3600)", ["pass"] * 20, timeout_s=0.5, budget_s=0.8) == 0.0
    assert time.monotonic() - began < 3


def test_nothing_is_left_when_the_reward_process_is_killed(tmp_path):
    """The deadline of the whole call, or the end of the run: the supervisor hears of it and cleans up."""
    pid_file = tmp_path / "pid"
    text = "import os, time\nos.setsid() if os.fork() == 0 else 0\n"
    text += f"open({str(pid_file)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(3600)"
    source = "from skirl.rewards.code_tests import code\nfrom skirl.testing.reward_samples import make_sample\n"
    source += f"code(make_sample({program(text)!r}, row={{'tests': ['pass']}}), timeout_s=60, budget_s=60)"
    folders = set(Path("/tmp").glob("skirl-code-*"))
    child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", source])
    end = time.monotonic() + 20
    while not pid_file.exists() or len(pid_file.read_text().split()) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pids = [int(pid) for pid in pid_file.read_text().split()]
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < end, pids
        time.sleep(0.02)
    while set(Path("/tmp").glob("skirl-code-*")) - folders:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_code_as_a_term_of_a_run():
    config = {"terms": {"code": {"kind": "code", "timeout_s": 0.5}}, "timeout_s": 5.0}
    scores = run(config, program(DOUBLE), program("while True: pass"), "none", row={"tests": IO[:2]})
    assert [one.total for one in scores] == [1.0, 0.0, 0.0]
    [failed] = run(config, program(DOUBLE))
    assert failed.failure.message.startswith("DataError: row made/0 has no column 'tests'")
