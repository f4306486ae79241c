"""Reward processes: what misbehaving user code costs, and what it cannot do."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

import skirl
from skirl.config.schema import RewardConfig
from skirl.errors import ConfigError, RewardError
from skirl.rewards.policy import apply_failures
from skirl.rewards.pool import RewardPool
from skirl.testing.reward_samples import make_group, to_samples


@pytest.fixture
def pool(tmp_path):
    """Makes started pools that are closed at the end."""
    made = []

    def make(source=None, *, output=None, **settings):
        if source is not None:
            path = tmp_path / "my_reward.py"
            path.write_text(textwrap.dedent(source))
            settings["python"] = path
        config = RewardConfig.model_validate({"num_workers": 1, "timeout_s": 20.0, **settings})
        made.append(RewardPool(config, to_samples, output=output))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def score(pool, *texts, reference="one two three"):
    return asyncio.run(pool.score(make_group(texts, reference))).scores


def totals(scores):
    return [one.total for one in scores]


def test_a_sample_that_raises_fails_alone(pool):
    source = """\
        def reward(sample):
            return {"a": look_up(sample), "b": 1}

        def look_up(sample):
            return sample.row["tekst"] if sample.text == "bad" else 0.5
        """
    scores = score(pool(source), "x", "bad", "y")
    assert totals(scores) == [1.5, None, 1.5]
    assert scores[1].failure.kind == "raised"
    assert scores[1].failure.message == "KeyError: 'tekst' (my_reward.py line 5, in look_up)"
    assert 'line 2, in reward\n    return {"a": look_up(sample), "b": 1}' in scores[1].failure.detail


HANGS = """\
    import re

    def reward(sample):
        if sample.text == "bad":
            re.match(r"(a+)+$", "a" * 60 + "b")  # never ends, and holds the interpreter's lock
        return 1.0
    """


def test_a_hang_costs_its_deadline_and_its_sample(pool):
    one = pool(HANGS, timeout_s=0.7)
    began = time.monotonic()
    scores = score(one, "bad", "x", "y", "z")  # x was handed over along with it
    assert 0.7 <= time.monotonic() - began < 0.7 + 2
    assert totals(scores) == [None, 1.0, 1.0, 1.0]
    assert scores[0].failure.kind == "timeout"
    assert scores[0].failure.message == (
        "reward took longer than reward.timeout_s = 0.7 s; its process was killed (at my_reward.py line 5 in reward)"
    )
    assert totals(score(one, "x", "y")) == [1.0, 1.0]  # the pool goes on


def test_other_groups_go_on_during_a_hang(pool):
    one = pool(HANGS, timeout_s=1.5, num_workers=2)

    async def both():
        ends = {}

        async def timed(name, *texts):
            ends[name] = totals((await one.score(make_group(texts))).scores), time.monotonic()

        began = time.monotonic()
        hanging = asyncio.create_task(timed("hanging", "bad"))
        await asyncio.sleep(0.1)
        for name in "abc":
            await timed(name, "x", "y", "z", "w")
        await hanging
        return {name: (result, at - began) for name, (result, at) in ends.items()}

    ends = asyncio.run(both())
    assert ends["hanging"][0] == [None]
    assert all(ends[name][0] == [1.0] * 4 and ends[name][1] < ends["hanging"][1] for name in "abc")


def test_a_reward_that_always_hangs_ends_soon(pool):
    one = pool(HANGS, timeout_s=0.3)
    scores = score(one, *["bad"] * 40)
    kinds = [score.failure.kind for score in scores]
    skipped = [score.failure.message for score in scores if score.failure.message.startswith("not called")]
    assert kinds == ["timeout"] * 40
    assert len(skipped) == 36
    assert (
        "not called: the 4 calls before it all hung or crashed, the last because reward took longer than" in skipped[0]
    )
    assert totals(score(one, "x", "y")) == [1.0, 1.0]  # new work gets a new chance


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("os._exit(3)", "the reward process ended itself with exit code 3; reward code must not call os._exit"),
        (
            "os.kill(os.getpid(), 9)",
            "the reward process was ended by signal 9 (SIGKILL; often the system is out of memory)",
        ),
        (
            "ctypes.string_at(0)",
            "the reward process was ended by signal 11 (SIGSEGV) (at my_reward.py line 5 in reward)",
        ),
    ],
)
def test_a_crash_fails_its_sample_alone(pool, tmp_path, bad, message):
    source = f"""\
        import ctypes, os

        def reward(sample):
            if sample.text == "bad":
                {bad}
            return 1.0
        """
    scores = score(pool(source, output=tmp_path / "out"), "x", "bad", "y")
    assert totals(scores) == [1.0, None, 1.0]
    assert scores[1].failure.kind == "crashed"
    assert scores[1].failure.message == message


def test_children_of_user_code_hold_nothing_up(pool, tmp_path):
    """A forked child keeps every pipe open; the death of its parent is seen all the same, and it is killed too."""
    source = f"""\
        import os, time, pathlib

        child = pathlib.Path({str(tmp_path / "child")!r})

        def reward(sample):
            if sample.text == "bad":
                if os.fork() == 0:
                    child.write_text(str(os.getpid()))
                    time.sleep(600)
                while not child.exists() or not child.read_text():
                    time.sleep(0.01)
                os._exit(5)
            return 1.0
        """
    began = time.monotonic()
    scores = score(pool(source), "x", "bad", "y")
    assert time.monotonic() - began < 5
    assert totals(scores) == [1.0, None, 1.0]
    assert_gone(int((tmp_path / "child").read_text()))


def test_a_forked_copy_that_falls_through_ends_and_does_not_answer_too(pool):
    one = pool(
        "import os\ndef reward(sample): return {'size': len(sample.text), 'pid': os.fork() or 0}", weights={"pid": 0}
    )
    scores = score(one, "a", "bb", "ccc", "dd", "e")
    assert totals(scores) == [1.0, 2.0, 3.0, 2.0, 1.0]
    for each in scores:
        assert_gone(int(each.parts["pid"]))


def test_prints_reach_the_output_and_break_nothing(pool, tmp_path):
    source = """\
        import sys

        def reward(sample):
            print("o" * 300_000)
            sys.stderr.write("e" * 300_000)
            sys.stdout.buffer.write(bytes(range(256)) * 100)
            return 1.0
        """
    assert totals(score(pool(source, output=tmp_path / "out"), *"abcd")) == [1.0] * 4
    written = (tmp_path / "out").read_bytes()
    assert written.count(b"o" * 300_000) == written.count(b"e" * 300_000) == 4


def test_nan_and_strings_are_typed_failures(pool):
    source = "def reward(sample): return {'nan': float('nan'), 'str': '0.5', 'ok': 1}[sample.text]"
    scores = score(pool(source), "nan", "str", "ok")
    assert [one.failure.kind if one.failure else None for one in scores] == ["not_finite", "bad_type", None]
    assert scores[0].failure.message == "reward (my_reward.py) returned nan; a score must be a finite number"


def test_parts_that_differ_are_reported_once(pool, caplog):
    one = pool("def reward(sample): return {'common': len(sample.text), sample.text: 9}")
    with caplog.at_level(logging.WARNING):
        scores = score(one, "a", "bb")
        score(one, "c", "d")
    assert totals(scores) == [1.0, 2.0]
    assert scores[1].parts == {"bb": 9.0, "common": 2.0}
    assert [record.getMessage() for record in caplog.records] == [
        "reward parts differ between the samples of group made/0:\n"
        "  'a' is in sample 0, not in sample 1\n"
        "  'bb' is in sample 1, not in sample 0\n"
        "Totals of this group are made of what all its samples share: common. Parts that some lack are logged, and "
        "weigh nothing in such a group. Return the same names for each sample, with None for a part that does not "
        "apply. (Said once a run.)"
    ]


def test_a_weight_without_a_part_is_reported_once(pool, caplog):
    one = pool("def reward(sample): return {'fluency': 1.0}", weights={"fluensy": 2.0})
    with caplog.at_level(logging.WARNING):
        score(one, "a")
        assert caplog.records == []  # its part may still come
        one.close()
        one.close()
    assert [record.getMessage() for record in caplog.records] == [
        "reward.weights.fluensy has had no effect: none of 1 scored samples has a part of that name (parts: fluency); "
        "did you mean fluency?"
    ]


def test_group_wise_calls(pool):
    source = """\
        def reward(samples):
            best = max(len(s.text) for s in samples)
            return [{"longest": len(s.text) == best, "size": len(samples)} for s in samples]
        """
    scores = score(pool(source, weights={"size": 0.0}), "a", "bbb", "cc")
    assert totals(scores) == [0.0, 1.0, 0.0]
    assert scores[0].parts == {"longest": 0.0, "size": 3.0}


def test_a_group_wise_call_that_hangs_fails_its_group(pool):
    one = pool("import time\ndef reward(samples): time.sleep(60 * len(samples) - 60); return [1.0]", timeout_s=0.3)
    scores = score(one, "a", "b")
    assert [one.failure.kind for one in scores] == ["timeout", "timeout"]
    assert totals(score(one, "a")) == [1.0]


def begin(pool, group, indices):
    for index in indices:
        pool.begin(group.prompt, group.rollouts[index], group.sampling)


def test_scoring_begins_before_the_group_is_whole(pool, tmp_path):
    source = f"""\
        import pathlib

        def reward(sample):
            with open({str(tmp_path / "calls")!r}, "a") as file:
                file.write(sample.text + "\\n")
            return len(sample.text)
        """
    one = pool(source)
    group = make_group(["a", "bb", "ccc"])

    async def run():
        begin(one, group, [1])
        await wait_for_text(tmp_path / "calls")  # computed while its siblings are still being sampled
        begin(one, group, [1, 0])
        return await one.score(group)

    assert totals(asyncio.run(run()).scores) == [1.0, 2.0, 3.0]
    assert sorted((tmp_path / "calls").read_text().split()) == ["a", "bb", "ccc"]  # each once
    assert totals(asyncio.run(one.score(group)).scores) == [1.0, 2.0, 3.0]
    assert len((tmp_path / "calls").read_text().split()) == 6  # nothing was kept


def test_group_wise_calls_wait_for_the_group(pool, tmp_path):
    source = f"""\
        def reward(samples):
            with open({str(tmp_path / "calls")!r}, "a") as file:
                file.write("".join(s.text for s in samples) + "\\n")
            return [len(samples)] * len(samples)
        """
    one = pool(source)
    group = make_group(["a", "b", "c"])
    begin(one, group, range(3))
    assert totals(asyncio.run(one.score(group)).scores) == [3.0, 3.0, 3.0]
    assert (tmp_path / "calls").read_text() == "abc\n"


def test_parts_of_a_begun_rollout_count_by_its_whole_group(pool):
    one = pool("def reward(sample): return {'common': len(sample.text), sample.text: 9}")
    group = make_group(["a", "bb"])
    begin(one, group, [0, 1])
    scores = asyncio.run(one.score(group)).scores
    assert totals(scores) == [1.0, 2.0]
    assert scores[1].parts == {"bb": 9.0, "common": 2.0}


def test_begun_calls_keep_their_deadlines_and_order(pool):
    one = pool(HANGS, timeout_s=0.5, num_workers=2)
    group = make_group(["x", "bad", "y", "z"])
    begin(one, group, [1, 3])
    scores = asyncio.run(one.score(group)).scores
    assert totals(scores) == [1.0, None, 1.0, 1.0]
    assert scores[1].failure.kind == "timeout"


def test_begin_after_close_is_an_error(pool):
    one = pool("def reward(sample): return 1.0")
    group = make_group(["a", "b"])
    begin(one, group, [0])
    one.close()
    with pytest.raises(RewardError, match="not running"):
        begin(one, group, [1])
    with pytest.raises(RewardError):
        asyncio.run(one.score(group))


def test_retries(pool, tmp_path):
    source = f"""\
        import os, time, pathlib

        def reward(sample):
            tries = pathlib.Path({str(tmp_path)!r}, sample.text)
            tries.write_text(tries.read_text() + "i" if tries.exists() else "i")
            count = len(tries.read_text())
            if count == 1 and sample.text == "raises": raise ValueError
            if count == 1 and sample.text == "exits": os._exit(1)
            if count == 1 and sample.text == "hangs": time.sleep(60)
            if sample.text == "always": raise ValueError(count)
            return count
        """
    scores = score(pool(source, retries=2, timeout_s=0.5), "good", "raises", "exits", "hangs", "always")
    assert totals(scores) == [1.0, 2.0, 2.0, 2.0, None]
    assert scores[4].failure.message.startswith("ValueError: 3 ")


def test_terms_of_the_library(pool):
    terms = {
        "cer": {"kind": "accuracy", "unit": "char", "weight": 2.0},
        "keywords": "keywords",
        "loops": {"kind": "repetition", "max_repeats": 2},
    }
    scores = score(pool(terms=terms), "abcd", "abcx", "a a a", reference="abcd")
    assert [dict(one.parts) for one in scores] == [
        {"cer": 1.0, "loops": 0.0},
        {"cer": 0.75, "loops": 0.0},
        {"cer": 0.25, "loops": -1.0},
    ]
    assert totals(scores) == [2.0, 1.5, -0.5]


def test_terms_beside_a_file(pool):
    one = pool("def reward(sample): return {'mine': 1.0}", terms={"accuracy": "accuracy"}, weights={"mine": 0.5})
    assert totals(score(one, "one two three", "one two")) == [1.5, pytest.approx(0.5 + 2 / 3)]


def test_a_part_with_the_name_of_a_term_is_refused(pool):
    [one] = score(pool("def reward(sample): return {'accuracy': 1.0}", terms={"accuracy": "accuracy"}), "x")
    assert one.failure.kind == "bad_type"
    assert "a part named 'accuracy', which is also a term of the recipe" in one.failure.message


def test_library_from_a_users_file(pool):
    source = """\
        from skirl.rewards import speech

        def reward(sample):
            return {"accuracy": speech.accuracy(sample), "keywords": speech.keywords(sample)}
        """
    scores = score(pool(source), "one two three", "one two")
    assert [dict(one.parts) for one in scores] == [{"accuracy": 1.0}, {"accuracy": pytest.approx(2 / 3)}]


def test_samples_share_nothing_that_can_change(pool):
    one = pool("def reward(sample):\n    sample.row['n'] = sample.row.get('n', 0) + 1\n    return sample.row['n']")
    assert totals(score(one, *"abcdefgh")) == [1.0] * 8


def test_rows_may_be_read_only_here(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text("def reward(sample): return len(sample.row)")
    read_only = RewardPool(
        RewardConfig(python=path),
        lambda group: [replace(sample, row=MappingProxyType({"a": 1, "b": 2})) for sample in to_samples(group)],
    )
    assert totals(score(read_only, "x")) == [2.0]
    read_only.close()


def test_chance_in_user_code_goes_by_the_sample(pool):
    source = "import random, numpy\ndef reward(sample): return random.random() + numpy.random.rand()"
    first = totals(score(pool(source, num_workers=2), *"abcdef"))
    assert len(set(first)) == 6
    assert totals(score(pool(source), *"abcdef")) == first


def test_a_file_changed_during_the_run_changes_nothing(pool, tmp_path):
    one = pool(HANGS, timeout_s=0.5)
    (tmp_path / "my_reward.py").write_text("this is no Python")
    assert totals(score(one, "bad", "x")) == [None, 1.0]  # by a process started after the change


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_module_x",
            "failed while it was loaded: ModuleNotFoundError: No module named 'no_such_module_x'",
        ),
        ("import os; os._exit(4)", "my_reward.py: the reward process ended itself with exit code 4"),
        ("def score(sample): ...", "has no function 'reward' (it has: score; set reward.function to one of these)"),
        ("def reward(completions, **kwargs): ...", "Moving a function over from another framework"),
    ],
)
def test_a_file_that_does_not_load_is_refused_at_the_start(pool, source, message):
    with pytest.raises(ConfigError) as caught:
        pool(source)
    assert message in str(caught.value)
    assert str(caught.value).count("reward.python:") + str(caught.value).count("reward.function:") == 1


def test_settings_that_contradict_are_refused(pool, tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.weights\.a and reward\.terms\.a name the same part"):
        pool("def reward(sample): ...", weights={"a": 1.0}, terms={"a": "accuracy"})
    with pytest.raises(ConfigError, match=r"reward\.python is not set"):
        pool(weights={"a": 1.0}, terms={"accuracy": "accuracy"})
    with pytest.raises(ConfigError, match=r"reward\.python: cannot read"):
        pool(python=tmp_path / "gone.py")


def test_rows_that_cannot_be_sent_are_named(pool):
    one = pool("def reward(sample): return 1")
    group = make_group(["a"])
    group = replace(group, prompt=replace(group.prompt, row={"f": lambda: 1}))
    with pytest.raises(RewardError, match=r"row made/0 cannot be sent to a reward process"):
        asyncio.run(one.score(group))


def test_the_event_loop_is_not_blocked_and_may_change(pool):
    one = pool("import time\ndef reward(sample): time.sleep(0.3); return 1.0")

    async def ticks():
        task = asyncio.create_task(one.score(make_group(["a"])))
        count = 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    assert asyncio.run(ticks()) > 10
    assert asyncio.run(ticks()) > 10  # another loop


def test_a_waiter_that_gives_up_does_no_harm(pool):
    one = pool("import time\ndef reward(sample): time.sleep(0.2); return 1.0")

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.score(make_group(["a", "b"])), 0.1)
        return await one.score(make_group(["c"]))

    assert totals(asyncio.run(give_up()).scores) == [1.0]


def test_close_ends_everything(pool, tmp_path):
    source = f"""\
        import os, time

        def reward(sample):
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
            time.sleep(600)
        """
    one = pool(source)

    async def closed_meanwhile():
        task = asyncio.create_task(one.score(make_group(["a"])))
        await wait_for_text(tmp_path / "pid")
        one.close()
        with pytest.raises(RewardError, match="closed while calls were queued"):
            await task

    asyncio.run(closed_meanwhile())
    assert_gone(int((tmp_path / "pid").read_text()))
    with pytest.raises(RewardError, match="not running"):
        asyncio.run(one.score(make_group(["a"])))


def test_processes_do_not_outlive_a_killed_driver(tmp_path):
    """The driver is a script without ``if __name__`` guard, killed amid a call that holds the interpreter's lock."""
    (tmp_path / "my_reward.py").write_text(
        f"import os, re\ndef reward(sample):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    re.match(r'(a+)+$', 'a' * 60 + 'b')\n"
    )
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import asyncio, pathlib\n"
        "from skirl.config.schema import RewardConfig\n"
        "from skirl.rewards.pool import RewardPool\n"
        "from skirl.testing.reward_samples import make_group, to_samples\n"
        f"pool = RewardPool(RewardConfig(python=pathlib.Path({str(tmp_path / 'my_reward.py')!r})), to_samples)\n"
        "asyncio.run(pool.score(make_group(['a'])))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(skirl.__file__).parents[1])}
    with subprocess.Popen([sys.executable, str(driver)], env=environment) as process:
        asyncio.run(wait_for_text(tmp_path / "pid"))
        process.send_signal(signal.SIGKILL)
    assert_gone(int((tmp_path / "pid").read_text()))


def test_a_worker_is_light():
    program = (
        "import sys, time; began = time.perf_counter(); import skirl.rewards.worker; ended = time.perf_counter(); "
        "print(ended - began, sorted({'torch', 'ray', 'transformers', 'pydantic', 'deepspeed'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(skirl.__file__).parents[1])}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    seconds, heavy = shown.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 1.0


def test_the_whole_way_to_the_error_of_a_step(pool):
    source = "def reward(sample):\n    return sample.row['tekst'] if 'bad' in sample.text else 1.0"
    one = pool(source)
    scored = asyncio.run(one.score(make_group(["a", "bad", "b", "bad 2"])))
    config = RewardConfig.model_validate({"terms": {"accuracy": "accuracy"}})
    with pytest.raises(RewardError) as caught:
        apply_failures([scored], config)
    assert str(caught.value).startswith(
        "2 of 4 samples of this step have no score: 50.0%, above reward.max_failure_rate = 0.1.\n"
        "Failures: 2 raised.\n"
        "Commonest (2 of 2), for example sample made/0#1: raised: KeyError: 'tekst' (my_reward.py line 2, in reward)\n"
        "  Traceback (most recent call last):\n"
    )


async def wait_for_text(path):
    end = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, f"{path} was not written"
        await asyncio.sleep(0.02)


def assert_gone(pid):
    end = time.monotonic() + 5
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # dead; whoever inherited it has not collected it yet
            return
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.02)


def test_the_deadline_is_of_each_call_not_of_what_was_handed_over(pool):
    one = pool("import time\ndef reward(sample): time.sleep(0.3); return 1.0", timeout_s=0.7)
    assert totals(score(one, *"abcdefgh")) == [1.0] * 8  # four at a time: 1.2 s
