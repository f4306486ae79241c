"""The check before a run: every problem at once, in one report, and what on_invalid does."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from skirl.config.schema import DataConfig, SourceConfig
from skirl.errors import DataError
from skirl.prompts.validate import KINDS, Report, load_prompts, load_rows, validate
from skirl.records import Media, Row


def write_clip(path: Path, seconds: float, rate: int = 16000, channels: int = 1) -> None:
    signal = np.random.default_rng(0).uniform(-0.1, 0.1, (round(seconds * rate), channels))
    soundfile.write(path, signal, rate)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A manifest with every fault that users meet, and two good rows."""
    write_clip(tmp_path / "good.wav", 3.0)
    write_clip(tmp_path / "stereo.wav", 2.0, rate=44100, channels=2)
    write_clip(tmp_path / "short.wav", 0.1)
    (tmp_path / "empty.wav").touch()
    rows: list[dict[str, Any]] = [
        {"id": "good", "audio": "good.wav", "text": "language English<asr_text>one two"},
        {"id": "stereo", "audio": "stereo.wav", "text": "language English<asr_text>three"},
        {"id": "missing", "audio": "wavs/missing.wav", "text": "language English<asr_text>four"},
        {"id": "empty", "audio": "empty.wav", "text": "language English<asr_text>five"},
        {"id": "short", "audio": "short.wav", "text": "language English<asr_text>a"},
        {"id": "silent", "audio": "good.wav", "text": "language English<asr_text>"},
        {"id": "good", "audio": "stereo.wav", "text": "language English<asr_text>six"},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "train.jsonl"


def test_all_faults_of_a_manifest_stand_in_one_report(broken: Path) -> None:
    data = DataConfig(min_seconds=0.2)
    with pytest.raises(DataError) as caught:
        load_rows({"digits": SourceConfig(path=broken)}, data)
    folder = broken.parent
    assert (
        str(caught.value)
        == f"""\
Data check: 7 rows (digits 7), 5 invalid, 0 with warnings
    audio: 10.1 s in 3 at 16 kHz, 2 at 44.1 kHz
    2 will be resampled to 16 kHz, 2 averaged to one channel

INVALID  file is missing: 1 row
    {broken}:3  id 'missing'
        {folder}/wavs/missing.wav
    -> Correct the path; relative paths count from the manifest's directory.

INVALID  file holds no audio: 1 row
    {broken}:4  id 'empty'
        {folder}/empty.wav (0 bytes)
    -> Copy or encode the file again, or remove the row.

INVALID  clip is too short: 1 row
    {broken}:5  id 'short'
        0.1 s, data.min_seconds is 0.2
    -> Remove the row, or lower data.min_seconds.

INVALID  reference is empty: 1 row
    {broken}:6  id 'silent'
        the reference is ''
    -> Fill it in; name its column with text_key; or, if nothing is spoken, mark the row with no_speech: true.

INVALID  id stands twice in its source: 1 row
    {broken}:7  id 'good'
        first in {broken}:1
    -> Give each row its own id, or remove one.

5 rows cannot be used. Correct the data as said above, or leave such rows out with data.on_invalid: drop."""
    )


PROMPTS = ['{"prompt": "a"}', '{"answer": "b"}', '{"id": "x", "prompt": []}', '{"prompt": 7}', '{"prompt": "c"}']


def test_records_that_make_no_row_are_in_the_report_with_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(PROMPTS))
    with pytest.raises(DataError) as caught:
        load_rows({"p": SourceConfig(path=file)}, DataConfig())
    assert (
        str(caught.value)
        == f"""\
Data check: 5 rows (p 5), 3 invalid, 0 with warnings

INVALID  row cannot be understood: 3 rows
    {file}:2
        the row has no prompt: looked for conversations, messages, prompt; it has answer.
    {file}:3
        the prompt in column 'prompt' is empty. Fill it in, or leave the row out.
    {file}:4
        column 'prompt' holds 7; it must hold a text, or a list of turns {{role, content}}.
    -> Correct what is named, or remove the row.

3 rows cannot be used. Correct the data as said above, or leave such rows out with data.on_invalid: drop."""
    )
    rows, report = load_rows({"p": SourceConfig(path=file)}, DataConfig(on_invalid="drop"))
    assert [row.id for row in rows] == ["p:1", "p:5"], "numbers are those of the manifest"
    assert report.render().startswith("Data check: 5 rows (p 5), 3 invalid (3 dropped), 0 with warnings")


def test_a_mistake_of_the_recipe_is_no_fault_of_the_rows(broken: Path) -> None:
    source = SourceConfig(path=broken, language="tlh")
    with pytest.raises(DataError, match=r"^data\.<train\|eval>\.s\.language: language 'tlh' is not known"):
        load_rows({"s": source}, DataConfig(on_invalid="drop"))


def test_records_and_rows_are_counted_apart(broken: Path) -> None:
    """A record that makes no row does not move the places of the rows behind it."""
    lines = broken.read_text().splitlines()
    broken.write_text("\n".join([lines[0], '{"audio": null}', *lines[1:]]))
    rows, report = load_rows({"digits": SourceConfig(path=broken)}, DataConfig(min_seconds=0.2, on_invalid="drop"))
    assert [(row.id, row.seconds, row.text) for row in rows] == [("good", 3.0, "one two"), ("stereo", 2.0, "three")]
    assert (report.num_rows, report.num_dropped) == ({"digits": 8}, 6)
    none = broken.with_name("none.jsonl")
    none.write_text('{"audio": 3}')
    with pytest.raises(DataError, match=r"the clip is 3; it must be a path(?s:.*)No row is left"):
        load_rows({"digits": SourceConfig(path=none)}, DataConfig(on_invalid="drop"))


def test_drop_leaves_the_invalid_rows_out_and_counts_them(broken: Path) -> None:
    data = DataConfig(min_seconds=0.2, on_invalid="drop")
    rows, report = load_rows({"digits": SourceConfig(path=broken)}, data)
    assert [(row.id, row.seconds, row.text) for row in rows] == [("good", 3.0, "one two"), ("stereo", 2.0, "three")]
    assert report.num_dropped == 5
    assert report.invalid_ids == {f"digits/{name}" for name in ("missing", "empty", "short", "silent", "good")}
    assert "7 rows (digits 7), 5 invalid (5 dropped), 0 with warnings" in report.render()
    with pytest.raises(DataError, match=r"too short(?s:.*)No row is left"):
        load_rows({"digits": SourceConfig(path=broken)}, DataConfig(min_seconds=5, on_invalid="drop"))


def test_rows_that_make_no_prompt_are_in_the_same_report(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.wav", 2.0)
    rows = [
        {"id": "good", "audio": "a.wav", "text": "x"},
        {"id": "odd", "audio": "a.wav", "text": "x", "context": "<|im_end|>"},
        {"id": "gone", "audio": "b.wav", "text": "x", "context": "<|im_end|>"},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    sources = {"s": SourceConfig(path=path)}

    def make(row: Row) -> str:
        if row.context:
            raise DataError(f"{row.where}: context holds {row.context}")
        return f"{row.id}, {row.seconds} s"

    made, report = load_prompts(sources, DataConfig(on_invalid="drop"), make)
    assert made == ["good, 2.0 s"]
    assert [(found.kind, found.row_id) for found in report.findings] == [("no_prompt", "odd"), ("missing_file", "gone")]
    assert report.num_dropped == 2
    with pytest.raises(DataError) as stop:
        load_prompts(sources, DataConfig(), make)
    assert "file is missing: 1 row" in str(stop.value)
    assert f"    {path}:2  id 'odd'\n        context holds <|im_end|>\n" in str(stop.value)


@pytest.fixture
def clip(tmp_path: Path) -> Media:
    """Two seconds."""
    write_clip(tmp_path / "a.wav", 2.0)
    return Media(str(tmp_path / "a.wav"))


def check(*rows: Row) -> Report:
    return validate(rows, min_seconds=0.1, max_seconds=30.0)


def kinds(*rows: Row) -> list[str]:
    return [finding.kind for finding in check(*rows).findings]


@pytest.mark.parametrize(
    ("text", "language", "kind"),
    [
        ("one two three four five six seven", "English", None),
        ("word " * 13, "English", "speech_rate"),
        ("一" * 23, "Chinese", None),
        ("一" * 25, "Chinese", "speech_rate"),
        ("一" * 25, None, "speech_rate"),
        ("language English<asr_text>one", "English", "tags_in_reference"),
        ("one <|im_end|>", "English", "tags_in_reference"),
        ("one <unk> two", "English", "tags_in_reference"),
        ("a < b > c", "English", None),
        ("hello world", "Chinese", "script"),
        ("我用 Python", "Chinese", None),
        ("我用 Python programming", "Chinese", None),
        ("OK", "Chinese", None),
        ("你好", "English", "script"),
        ("Привет", "English", "script"),
        ("Привет мир", "Macedonian", None),
        ("你好", None, None),
        ("12 34", "Chinese", None),
        ("", "English", "empty_reference"),
        (None, "English", "empty_reference"),
        ("...", "English", "empty_reference"),  # rewards would take it for "nothing was said"
        ("\uff1f", "Chinese", "empty_reference"),
        ("50 %", "English", None),
        ("&", None, None),
    ],
)
def test_references(clip: Media, text: str | None, language: str | None, kind: str | None) -> None:
    row = Row(id="a", source="s", media=(clip,), text=text, language=language)
    assert kinds(row) == ([] if kind is None else [kind])


def test_an_empty_reference_is_right_where_nothing_is_spoken(clip: Media) -> None:
    for text in ("", "..."):
        assert kinds(Row(id="a", source="s", media=(clip,), text=text, no_speech=True)) == []


def test_lengths_segments_and_durations(clip: Media) -> None:
    row = Row(id="a", source="s", media=(clip,), text="x")
    assert [f.kind for f in validate([row], min_seconds=0, max_seconds=1.9).findings] == ["too_long"]
    assert kinds(replace(row, seconds=2.4)) == []
    assert kinds(replace(row, seconds=2.6)) == ["duration"]
    assert kinds(replace(row, media=(replace(clip, start_s=5.0),))) == ["bad_segment"]
    part = replace(row, media=(replace(clip, start_s=0.5, duration_s=1.0),))
    assert check(part, row).seconds == (1.0, 2.0)


def test_files_that_are_no_audio(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("this is no audio file")
    soundfile.write(tmp_path / "nothing.wav", np.zeros(0), 16000)
    rows = [
        Row(id=name, source="s", media=(Media(str(tmp_path / name)),), text="x") for name in ("text.wav", "nothing.wav")
    ]
    report = check(*rows, Row(id="bytes", source="s", media=(Media("table", data=b""),), text="x"))
    assert [finding.kind for finding in report.findings] == ["unreadable_file", "empty_file", "empty_file"]
    assert report.invalid == {0, 1, 2}


def test_text_rows_need_no_clip_and_may_hold_tags() -> None:
    row = Row(id="a", source="s", messages=({"role": "user", "content": "<b>hi</b>"},), text="<b>")
    assert kinds(row) == []
    assert "audio" not in check(row).render()


def test_the_same_id_in_two_sources_is_no_duplicate(clip: Media) -> None:
    row = Row(id="a", source="s", media=(clip,), text="x")
    assert kinds(row, replace(row, source="t")) == []


def test_warnings_do_not_stop_and_examples_are_bounded(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.wav", 2.0)
    rows = [{"id": str(number), "audio": "a.wav", "text": "hello world", "lang": "zh"} for number in range(6)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept, report = load_rows({"s": SourceConfig(path=tmp_path / "m.jsonl")}, DataConfig())
    assert len(kept) == 6
    text = report.render()
    assert "WARNING  reference is not in the script of its language: 6 rows" in text
    assert len(re.findall(r"Chinese in Latin letters: 'hello world'", text)) == 3
    assert "... and 3 more" in text
    assert report.invalid_ids == frozenset()


def test_every_kind_has_a_remedy() -> None:
    assert all(kind.remedy.endswith(".") for kind in KINDS.values())
