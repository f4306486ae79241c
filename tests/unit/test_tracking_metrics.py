"""The registry, dividing once, and JSON lines."""

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from skirl.errors import CheckpointError
from skirl.records import Ratio, sum_ratios
from skirl.tracking.json_lines import append_record, read_records, replace_file, to_json, trim_torn_line
from skirl.tracking.metrics import REGISTRY, depends_on_machine, finish, render, spec_of

FAMILIES = {
    "reward/part/accuracy": "reward/part/<name>",
    "reward/spread/my part/2": "reward/spread/<name>",
    "time/sampling_s": "time/<phase>_s",
    "time/step_s": "time/step_s",
    "ledger/dropped/too_old": "ledger/dropped/<reason>",
    "ledger/dropped": "ledger/dropped",
    "eval/noisy/error_rate": "eval/<source>/error_rate",
    "eval/noisy/expected_error_rate": "eval/<source>/expected_error_rate",
    "eval/a/b/insertions": "eval/<source>/insertions",
}


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_families(name: str, family: str):
    spec = spec_of(name)
    assert spec is not None
    assert spec.name == family


@pytest.mark.parametrize(
    "name", ["reward/maen", "reward/part/", "eval//error_rate", "eval/noisy/cer", "time/x", "loss", "reward/mean/x", ""]
)
def test_unknown_names_are_refused(name: str):
    with pytest.raises(AssertionError, match="is not registered"):
        finish({name: Ratio(1, 1)})


def test_sums_are_divided_once():
    ranks = [{"policy/entropy": Ratio(1.0, 2)}, {"policy/entropy": Ratio(5.0, 1), "reward/mean": Ratio(0, 0)}]
    values = finish(sum_ratios(ranks))
    assert values["policy/entropy"] == 2.0  # the mean of the means would be 2.75
    assert math.isnan(values["reward/mean"])


def test_a_sum_is_its_numerator():
    assert finish(sum_ratios([{"rollout/tokens": Ratio(30, 1)}, {"rollout/tokens": Ratio(12, 1)}])) == {
        "rollout/tokens": 42.0
    }


@pytest.mark.parametrize("name", ["optim/lr", "optim/grad_norm", "data/epoch"])
def test_last_and_max_cannot_be_added_up(name: str):
    assert finish({name: Ratio(0.5, 1)}) == {name: 0.5}
    with pytest.raises(AssertionError, match="denominator must be 1, not 2"):
        finish(sum_ratios([{name: Ratio(0.5, 1)}, {name: Ratio(0.5, 1)}]))


def test_what_depends_on_the_machine():
    assert all(map(depends_on_machine, ["time/step_s", "time/training_s", "rollout/tokens_per_s", "memory/rss_mb"]))
    assert not any(map(depends_on_machine, ["reward/mean", "rollout/tokens", "optim/lr", "ledger/issued"]))


def test_every_metric_is_documented():
    text = render()
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == list(REGISTRY)
    assert all(spec.meaning.endswith(".") and name == spec.name for name, spec in REGISTRY.items())


def test_json_is_strict():
    value = {
        "nan": math.nan,
        "inf": -math.inf,
        "numpy": np.float32(0.5),
        "array": np.arange(2),
        "np_nan": [np.float64("nan")],
        "bytes": b"RIFF",
        "path": Path("a/b"),
        3: (1, True, None),
    }
    assert json.loads(to_json(value), parse_constant=pytest.fail) == {
        "nan": None,
        "inf": None,
        "numpy": 0.5,
        "array": [0, 1],
        "np_nan": [None],
        "bytes": "<4 bytes>",
        "path": "a/b",
        "3": [1, True, None],
    }


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    append_record(file, {"text": "\u4e09\n\udcff"})
    with file.open("a") as torn:
        torn.write('{"text": "ha')
    assert read_records(file) == [{"text": "\u4e09\n\udcff"}]
    trim_torn_line(file)
    append_record(file, {"text": "b"})
    assert [record["text"] for record in read_records(file)] == ["\u4e09\n\udcff", "b"]


def test_a_full_disk_leaves_no_half_line_for_the_next_one_to_run_into(tmp_path: Path):
    """A run that fails still notes its end, by then perhaps with room again: the line must not be half of two."""
    file = tmp_path / "x.jsonl"
    append_record(file, {"step": 1})
    with full_disk(file.stat().st_size + 8), pytest.raises(CheckpointError, match=r"x\.jsonl cannot be written: File"):
        append_record(file, {"step": 2, "text": "x" * 100})
    append_record(file, {"kind": "closed"})
    assert read_records(file) == [{"step": 1}, {"kind": "closed"}]
    with full_disk(8), pytest.raises(CheckpointError, match=r"x\.jsonl cannot be written: File too large.* room"):
        replace_file(file, b"x" * 100)
    assert len(read_records(file)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writes are cut short there, and then fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("line", ["{]", "3"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str):
    file = tmp_path / "x.jsonl"
    file.write_text(f"{{}}\n{line}\n")
    with pytest.raises(CheckpointError, match=r"x\.jsonl:2 is not"):
        read_records(file)
