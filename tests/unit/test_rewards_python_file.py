"""Loading a reward file, telling its form, checking what it returns."""

import sys

import pytest

from skirl.errors import ConfigError
from skirl.records import ScoreFailure
from skirl.rewards.python_file import load
from skirl.testing.reward_samples import make_sample


@pytest.fixture
def write(tmp_path):
    def write(source):
        path = tmp_path / "my_reward.py"
        path.write_text(source)
        return path

    return write


def refusal(path, function="reward"):
    with pytest.raises(ConfigError) as caught:
        load(path, function)
    return str(caught.value)


@pytest.mark.parametrize(
    ("signature", "form"),
    [
        ("sample", "sample"),
        ("samples", "group"),
        ("group", "group"),
        ("batch", "batch"),
        ("s", "sample"),
        ("s, scale=2.0", "sample"),
        ("samples, **kwargs", "group"),
        ("sample: 'RewardSample'", "sample"),
        ("samples: RewardSample", "sample"),  # an annotation wins over the name
        ("sample: list[RewardSample]", "group"),
        ("batch: list[RewardSample]", "batch"),
        ("x: Sequence[RewardSample]", "group"),
        ("x: 'list[Unknown]'", "group"),
        ("completions: list[RewardSample]", "group"),
    ],
)
@pytest.mark.parametrize("how", ["", "async "])
def test_forms(write, signature, form, how):
    header = "from collections.abc import Sequence\nfrom skirl.records import RewardSample\n"
    function = load(write(f"{header}{how}def reward({signature}):\n    return 1"))
    assert function.form == form
    assert function.is_async is bool(how)


def test_an_object_with_an_async_call_is_async(write):
    source = "class Judge:\n    async def __call__(self, sample): return 2\nreward = Judge()\n"
    function = load(write(source))
    assert function.is_async
    assert function.score([make_sample("x")]) == [{"reward": 2.0}]


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "*args",
        "*, sample",
        "sample, other",
        "sample: str",
        "x: dict",
        "batch: list[list[str]]",
        "x: 'list[list[S]]'",
    ],
)
def test_other_forms_are_refused(write, signature):
    message = refusal(write(f"def reward({signature}):\n    return 1"))
    assert f"`def reward({signature})`" in message
    assert "def reward(sample): " in message
    assert "def reward(samples): " in message
    assert "Moving a function over" not in message


@pytest.mark.parametrize(
    "signature",
    [
        "completions, **kwargs",
        "prompts, completions, **kwargs",
        "queries, prompts, labels",
        "data_source, solution_str, ground_truth, extra_info=None",
    ],
)
def test_forms_of_other_frameworks_are_told_how_to_move(write, signature):
    message = refusal(write(f"def reward({signature}):\n    return 1"))
    assert "Moving a function over from another framework: completions" in message


def test_async_generators_are_refused(write):
    assert "yields; an async function must return its result" in refusal(write("async def reward(s): yield 1"))


def test_missing_file(tmp_path):
    message = refusal(tmp_path / "gone.py")
    assert message.startswith(f"reward.python: cannot read '{tmp_path}/gone.py' (No such file or directory)")


def test_syntax_error_names_the_line(write):
    path = write("def reward(sample):\n    return (1\n")
    assert refusal(path) == f"reward.python: {path} line 2: '(' was never closed: `return (1`"


def test_missing_function_lists_what_there_is(write):
    path = write("import math\nfrom os.path import join\ndef score(s): ...\ndef _hidden(s): ...\nLIMIT = 3\n")
    assert "has no function 'reward' (it has: score; set reward.function to one of these)" in refusal(path)
    assert "'LIMIT' in" in refusal(path, "LIMIT")
    assert "is a int, not a function" in refusal(path, "LIMIT")


def test_failing_import_shows_the_users_lines_only(write, tmp_path):
    path = write("def first():\n    import no_such_module_x\nfirst()\n")
    message = refusal(path)
    assert "failed while it was loaded: ModuleNotFoundError: No module named 'no_such_module_x'" in message
    assert "line 3, in <module>\n    first()" in message
    assert "python_file.py" not in message
    assert "stands beside" not in message
    (tmp_path / "no_such_module_x.py").touch()
    assert f"run with PYTHONPATH={tmp_path}" in refusal(path)


def test_module_is_its_own_and_the_path_is_left_alone(write):
    before = list(sys.path)
    source = (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 2\n"
        "def reward(s): return A().x if __file__.endswith('my_reward.py') else 0\n"
    )
    assert load(write(source)).score([make_sample("x")]) == [{"reward": 2.0}]
    assert sys.path == before
    assert "my_reward" not in sys.modules


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        ("1", {"reward": 1.0}),
        ("True", {"reward": 1.0}),
        ("numpy.float32(0.5)", {"reward": 0.5}),
        ("numpy.array(2)", {"reward": 2.0}),
        ("numpy.bool_(True)", {"reward": 1.0}),
        ("{'a': 1, 'b': None}", {"a": 1.0, "b": None}),
        ("{'turns': [1, numpy.float32(0.5)], 'b': 2}", {"turns": (1.0, 0.5), "b": 2.0}),
        ("{'turns': numpy.array([1, 0])}", {"turns": (1.0, 0.0)}),
        ("{'turns': None}", {"turns": None}),
    ],
)
def test_good_results(write, returned, parts):
    function = load(write(f"import numpy\ndef reward(s): return {returned}"))
    [result] = function.score([make_sample("x", num_turns=2)])
    assert result == parts
    numbers = [n for value in result.values() for n in (value if isinstance(value, tuple) else [value])]
    assert all(number is None or type(number) is float for number in numbers)


@pytest.mark.parametrize(
    ("returned", "kind", "said"),
    [
        ("{'turns': 1.0}", "bad_type", "returned a float 1.0 for part 'turns'; return a list with one number a turn"),
        (
            "{'turns': [1, 2, 3]}",
            "bad_type",
            "returned 3 numbers for part 'turns'; return a list with one number a turn",
        ),
        ("{'turns': [1, 'b']}", "bad_type", "returned a str 'b' in part 'turns'; return a number"),
        ("{'turns': [1, float('nan')]}", "not_finite", "returned nan in part 'turns'; a score must be a finite number"),
        (
            "None",
            "bad_type",
            "returned None (is a return missing?); return a number or a mapping of part names to numbers",
        ),
        ("'0.5'", "bad_type", "returned a str '0.5'; return a number or a mapping"),
        ("[1.0]", "bad_type", "returned a list [1.0]; return"),
        ("{}", "bad_type", "returned an empty mapping"),
        ("{1: 2.0}", "bad_type", "returned a part named 1, a int; names must be str"),
        ("{'a': '1'}", "bad_type", "returned a str '1' for part 'a'; return a number"),
        ("float('nan')", "not_finite", "returned nan; a score must be a finite number"),
        ("{'a': float('inf')}", "not_finite", "returned inf for part 'a'; a score must be a finite number"),
        ("10 ** 400", "not_finite", "returned inf; a score must be a finite number"),
        ("1j", "bad_type", "returned a complex 1j"),
        ("1 / 0", "raised", "ZeroDivisionError: division by zero (my_reward.py line 1, in reward)"),
        ("exit(3)", "raised", "SystemExit: 3 (my_reward.py line 1, in reward)"),
        ("type('T', (), {'__repr__': lambda self: 1 / 0})()", "raised", "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("how", ["", "async "])
def test_bad_results_are_typed_failures(write, returned, kind, said, how):
    [failure] = load(write(f"{how}def reward(s): return {returned}")).score([make_sample("x", num_turns=2)])
    assert isinstance(failure, ScoreFailure)
    assert failure.kind == kind
    assert said in failure.message
    assert "\n" not in failure.message


def test_traceback_begins_in_the_users_file(write):
    path = write("def reward(s):\n    return deep(s)\ndef deep(s):\n    return s.row['tekst']\n")
    [failure] = load(path).score([make_sample("x")])
    assert failure.message == "KeyError: 'tekst' (my_reward.py line 4, in deep)"
    assert failure.detail.splitlines()[1] == f'  File "{path}", line 2, in reward'
    assert "return s.row['tekst']" in failure.detail


def test_group_wise_results(write):
    three = [make_sample(text) for text in "abc"]
    path = write("def reward(samples): return [1, {'a': 2.0}, None]")
    first, second, third = load(path).score(three)
    assert (first, second) == ({"reward": 1.0}, {"a": 2.0})
    assert third.kind == "bad_type"
    path = write("import numpy\ndef reward(samples): return numpy.array([len(s.text) for s in samples])")
    assert load(path).score(three) == [{"reward": 1.0}] * 3
    for returned, got in (
        ("[1.0]", "1 scores"),
        ("1.0", "a float 1.0"),
        ("{'a': [1, 2, 3]}", "a dict {'a': [1, 2, 3]}"),
    ):
        failures = load(write(f"def reward(samples): return {returned}")).score(three)
        assert {failure.message for failure in failures} == {
            f"reward (my_reward.py) returned {got} for a group of 3; return a list with one score a sample"
        }


def test_a_tensor_of_one_number_is_a_number(write):
    pytest.importorskip("torch")
    path = write("import torch\ndef reward(samples): return torch.tensor([0.25] * len(samples))")
    assert load(path).score([make_sample("x")]) == [{"reward": 0.25}]
