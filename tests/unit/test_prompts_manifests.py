"""Manifests: each format from real files becomes the same canonical rows."""

import csv
import json
import logging
import tarfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from skirl.config.schema import SourceConfig
from skirl.errors import DataError
from skirl.prompts.decode import clip_seconds, load_clip
from skirl.prompts.manifests import READERS, read
from skirl.records import Row

LIBRIVOX = Path(__file__).parents[1] / "data" / "librivox"


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A directory with wavs/a.wav (1 s) and wavs/b.wav (2 s)."""
    (tmp_path / "wavs").mkdir()
    rng = np.random.default_rng(0)
    for name, seconds in [("a", 1), ("b", 2)]:
        soundfile.write(tmp_path / "wavs" / f"{name}.wav", 0.1 * rng.standard_normal(16000 * seconds), 16000)
    return tmp_path


def write_lines(path: Path, *records: dict[str, Any] | str) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rows_of(path: Path, **settings: Any) -> list[Row]:
    return read("s", SourceConfig(path=path, **settings))


def test_qwen3_asr_splits_the_language_prefix_and_keeps_unknown_columns(clips: Path) -> None:
    path = write_lines(
        clips / "m.jsonl",
        {"id": "x", "audio": "wavs/a.wav", "text": "language English<asr_text>Mr. Quilter", "prompt": "hot words",
         "keywords": ["Quilter"], "snr_db": 5.5, "nested": {"a": [1]}},
        {"audio": "wavs/b.wav", "text": "language None<asr_text>你好", "keywords": "你, 好，"},
        {"audio": "wavs/b.wav", "text": "language None<asr_text>"},
        {"audio": "wavs/b.wav", "text": "", "no_speech": True, "language": "zh"},
    )  # fmt: skip
    first, second, third, fourth = rows_of(path)
    assert (first.id, first.source, first.text, first.language) == ("x", "s", "Mr. Quilter", "English")
    assert (first.context, first.keywords) == ("hot words", ("Quilter",))
    assert first.extra == {"snr_db": 5.5, "nested": {"a": [1]}}
    assert first.media[0].path == str(clips / "wavs" / "a.wav")
    assert first.where == f"{path}:1"
    assert (second.id, second.text, second.language, second.keywords) == ("b:2", "你好", None, ("你", "好"))
    assert (third.text, third.language, third.no_speech) == ("", None, True)
    assert (fourth.text, fourth.language, fourth.no_speech) == ("", "Chinese", True)


def test_nemo_offset_and_duration_cut_a_segment_and_a_duration_alone_does_not(clips: Path) -> None:
    path = write_lines(
        clips / "m.json",
        {"audio_filepath": "wavs/b.wav", "duration": 2.0, "text": "one", "target_lang": "de", "source_lang": "en"},
        {"audio_filepath": "wavs/b.wav", "offset": 0.5, "duration": 1.25, "text": "two", "lang": "en", "pnc": "yes"},
    )
    whole, part = rows_of(path)
    assert (whole.media[0].duration_s, whole.seconds, whole.language) == (None, 2.0, "German")
    assert whole.extra == {"source_lang": "en"}
    assert (part.media[0].start_s, part.media[0].duration_s, part.seconds) == (0.5, 1.25, 1.25)
    assert clip_seconds(part.media[0]) == 1.25
    assert part.extra == {"pnc": "yes"}


def test_the_real_clips_of_the_repository_are_read() -> None:
    rows = rows_of(LIBRIVOX / "manifest.jsonl", language="en", limit=2)
    assert [row.seconds for row in rows] == [7.1, 2.99]
    assert rows[1].text == "he was not an ill disposed young man"
    assert clip_seconds(rows[1].media[0]) == pytest.approx(2.99, abs=0.01)


def kaldi_directory(clips: Path, *, wav_scp: str, segments: str | None) -> Path:
    folder = clips / "data"
    folder.mkdir()
    (folder / "wav.scp").write_text(wav_scp)
    if segments is not None:
        (folder / "segments").write_text(segments)
    (folder / "text").write_text("u1 hello  world\nu2\n")
    (folder / "utt2spk").write_text("u1 anna\nu2 bert\n")
    (folder / "utt2lang").write_text("u1 en\nu2 en\n")
    return folder


def test_kaldi_with_segments(clips: Path) -> None:
    folder = kaldi_directory(clips, wav_scp="r ../wavs/b.wav\n", segments="u1 r 0.25 1.5\nu2 r 1.5 -1\n")
    first, second = rows_of(folder)
    assert (first.id, first.text, first.language, first.extra) == ("u1", "hello  world", "English", {"speaker": "anna"})
    assert (first.media[0].path, first.media[0].start_s) == (str(clips / "wavs" / "b.wav"), 0.25)
    assert first.where == f"{folder / 'segments'}:1"
    assert [clip_seconds(row.media[0]) for row in (first, second)] == [1.25, 0.5]
    assert second.text == ""


def test_kaldi_pipes_run_only_when_allowed(clips: Path) -> None:
    command = f"cat {clips}/wavs/a.wav | cat |"
    folder = kaldi_directory(clips, wav_scp=f"u1 {command}\nu2 ../wavs/b.wav\n", segments=None)
    with pytest.raises(DataError, match=r"(?s)wav\.scp:1: the recording is a shell pipe: cat .*allow_pipes is true"):
        rows_of(folder)
    first, _ = rows_of(folder, allow_pipes=True)
    assert first.media[0].data == (clips / "wavs" / "a.wav").read_bytes()
    assert clip_seconds(first.media[0]) == 1.0
    (folder / "wav.scp").write_text("u1 echo no such codec >&2; exit 3 |\nu2 ../wavs/b.wav\n")
    with pytest.raises(DataError, match=r"(?s)wav\.scp:1: the pipe failed with exit code 3: .*no such codec"):
        rows_of(folder, allow_pipes=True)


def test_kaldi_a_pipe_may_not_know_the_length_it_writes(clips: Path) -> None:
    """sox writes a length of 0x7FFFFFFF or so when it cannot go back to the header."""
    data = bytearray((clips / "wavs" / "a.wav").read_bytes())
    at = data.index(b"data") + 4
    data[4:8] = data[at : at + 4] = b"\xff\xff\xff\x7f"
    (clips / "stream.wav").write_bytes(data)
    folder = kaldi_directory(clips, wav_scp=f"u1 cat {clips}/stream.wav |\nu2 ../wavs/b.wav\n", segments=None)
    clip = rows_of(folder, allow_pipes=True)[0].media[0]
    assert (clip_seconds(clip), len(load_clip(clip))) == (1.0, 16000)


@pytest.mark.parametrize(
    ("wav_scp", "segments", "message"),
    [
        ("r a.wav\n", "u1 q 0 1\nu2 r 0 1\n", r"segments:1: recording 'q' is not in wav\.scp"),
        ("r a.wav\n", "u1 r 0\nu2 r 0 1\n", r"segments:1: is 'u1 r 0'; it must be utterance, recording, start, end"),
        ("r a.wav\n", "u1 r 0 1\n", r"text:2: 1 utterances of text have no audio in segments, first 'u2'"),
        ("u1 a.wav\nu1 b.wav\n", None, r"wav\.scp:2: key 'u1' stands here again, first in .*wav\.scp:1"),
        ("u1 a.ark:15\nu2 b.wav\n", None, r"wav\.scp:1: a\.ark:15 points into a Kaldi archive"),
    ],
)
def test_kaldi_errors_name_file_and_line(clips: Path, wav_scp: str, segments: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(kaldi_directory(clips, wav_scp=wav_scp, segments=segments))


def test_wenet_raw_list_and_shards_give_the_same_rows(clips: Path) -> None:
    raw = write_lines(
        clips / "data.list",
        {"key": "k.1", "wav": "wavs/a.wav", "txt": "hello"},
        {"key": "k2", "wav": "wavs/b.wav", "txt": "世界"},
    )
    (clips / "k.1.txt").write_text("hello\n")
    (clips / "k2.txt").write_text("世界", encoding="utf-8")
    with tarfile.open(clips / "shard0.tar", "w") as tar:
        for name, file in [("k.1.wav", "wavs/a.wav"), ("k.1.txt", "k.1.txt"), ("k2.txt", "k2.txt"),
                           ("k2.wav", "wavs/b.wav")]:  # fmt: skip
            tar.add(clips / file, arcname=name)
    shards = write_lines(clips / "shards.list", "shard0.tar")
    for path in (raw, shards, clips / "shard0.tar"):
        rows = rows_of(path)
        assert [(row.id, row.text, clip_seconds(row.media[0])) for row in rows] == [
            ("k.1", "hello", 1.0), ("k2", "世界", 2.0),
        ]  # fmt: skip
    write_lines(clips / "shards.list", "gone.tar")
    with pytest.raises(DataError, match=r"shards\.list:1: there is no shard .*gone\.tar"):
        rows_of(clips / "shards.list")


def test_chat_records_of_ms_swift_llama_factory_and_funasr(clips: Path) -> None:
    answer = {"role": "assistant", "content": "language Chinese<asr_text>你好"}
    swift = write_lines(
        clips / "swift.jsonl",
        {"messages": [{"role": "system", "content": "names: Li"}, {"role": "user", "content": "<audio>"}, answer],
         "audios": ["wavs/a.wav"], "id": "q"},
        {"messages": [{"role": "user", "content": "<audio>"}], "audios": ["wavs/b.wav"], "solution": "ok", "snr": 3},
    )  # fmt: skip
    first, second = rows_of(swift)
    assert (first.id, first.text, first.language, first.context) == ("q", "你好", "Chinese", "names: Li")
    assert (second.text, second.media[0].path) == ("ok", str(clips / "wavs" / "b.wav"))
    assert second.extra == {"snr": 3, "messages": [{"role": "user", "content": "<audio>"}]}

    factory = clips / "factory.json"
    turns = [{"from": "human", "value": "<audio>Write it down."}, {"from": "gpt", "value": "hello"}]
    factory.write_text(json.dumps([{"conversations": turns, "audios": ["wavs/a.wav"]}], indent=1))
    (row,) = rows_of(factory)
    assert (row.text, row.where) == ("hello", f"{factory}:[0]")

    funasr = write_lines(
        clips / "funasr.jsonl",
        {"messages": [{"role": "user", "content": "语音转写：<|startofspeech|>!wavs/a.wav<|endofspeech|>"}, answer]},
    )
    assert rows_of(funasr)[0].media[0].path == str(clips / "wavs" / "a.wav")
    plain = write_lines(clips / "plain.jsonl", {"key": "k", "source": "wavs/a.wav", "target": "hi"})
    assert [(row.id, row.text) for row in rows_of(plain)] == [("k", "hi")]


def test_audio_folder(clips: Path) -> None:
    with (clips / "wavs" / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["file_name", "sentence", "accent"], ["a.wav", "hello, world", "us"], ["b.wav", "", ""]])
    first, second = rows_of(clips)
    assert (first.id, first.text, first.extra) == ("a:1", "hello, world", {"accent": "us"})
    assert first.where == f"{clips / 'wavs' / 'metadata.csv'}:2"
    assert second.text == ""
    with (clips / "wavs" / "metadata.csv").open("a") as file:
        file.write("b.wav,hello, world,us\n")
    with pytest.raises(DataError, match=r"metadata\.csv:4: has another number of cells .*file_name, sentence, accent"):
        rows_of(clips)


def test_parquet_with_bytes_paths_and_text(clips: Path) -> None:
    data = (clips / "wavs" / "b.wav").read_bytes()
    (clips / "hub").mkdir()
    table = pyarrow.Table.from_pylist(
        [
            {"audio": {"bytes": data, "path": "b.wav"}, "sentence": "one", "locale": "en", "n": 1},
            {"audio": {"bytes": None, "path": "../wavs/a.wav"}, "sentence": "two", "locale": "en", "n": 2},
        ]
    )
    pyarrow.parquet.write_table(table, clips / "hub" / "train-0.parquet")
    first, second = rows_of(clips / "hub")
    assert (first.id, first.text, first.language, first.extra) == ("hub:1", "one", "English", {"n": 1})
    assert first.media[0].path == f"{clips / 'hub' / 'train-0.parquet'}:row 1(b.wav)"
    assert second.id == "a:2"
    assert [clip_seconds(row.media[0]) for row in (first, second)] == [2.0, 1.0]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}]),
        clips / "text.parquet",
    )
    (row,) = rows_of(clips / "text.parquet")
    assert (row.messages, row.text, row.media) == (({"role": "user", "content": "1+1?"},), "2", ())
    (clips / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"bad\.parquet: cannot be read as Parquet"):
        rows_of(clips / "bad.parquet")


def test_text_prompts(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "m.jsonl",
        {"prompt": "1+1?", "answer": 2, "level": "easy", "source": "gsm"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"prompt": "no answer"},
    )
    first, second, third = rows_of(path)
    assert first.messages == ({"role": "user", "content": "1+1?"},)
    assert (first.id, first.text, first.extra) == ("m:1", "2", {"level": "easy", "source": "gsm"})
    assert (second.messages, second.text) == (({"role": "user", "content": "hi"},), "hello")
    assert third.text is None


def test_columns_can_be_named_and_a_row_language_beats_the_source_language(clips: Path) -> None:
    path = write_lines(
        clips / "m.jsonl",
        {"clip": "wavs/a.wav", "said": "hello", "text": "not this", "path": "not this"},
        {"clip": "wavs/b.wav", "said": "bonjour", "language": "fr"},
    )
    first, second = rows_of(path, audio_key="clip", text_key="said", language="en")
    assert (first.text, first.language, first.extra) == ("hello", "English", {"text": "not this", "path": "not this"})
    assert second.language == "French"


def test_a_tag_in_the_text_beats_the_source_language(clips: Path) -> None:
    """The source's language is that of rows that name none, and a tag names one."""
    path = write_lines(
        clips / "m.jsonl",
        {"audio": "wavs/a.wav", "text": "language English<asr_text>hello"},
        {"audio": "wavs/b.wav", "text": "language None<asr_text>ni hao"},
        {"audio": "wavs/b.wav", "text": "language None<asr_text>"},
    )
    first, second, third = rows_of(path, language="zh")
    assert (first.text, first.language) == ("hello", "English")
    assert (second.text, second.language) == ("ni hao", "Chinese")
    assert (third.text, third.no_speech) == ("", True)


def test_nan_is_an_empty_cell(tmp_path: Path) -> None:
    """Tables that went through pandas have NaN where nothing was."""
    nothing = float("nan")
    path = write_lines(
        tmp_path / "m.jsonl",
        {"audio": "a.wav", "text": nothing, "id": nothing, "language": nothing, "keywords": nothing, "start": nothing,
         "end": nothing, "duration": nothing, "no_speech": nothing, "prompt": nothing, "snr_db": 1.0},
    )  # fmt: skip
    (row,) = rows_of(path, language="en")
    assert (row.id, row.text, row.language, row.keywords, row.no_speech) == ("a:1", None, "English", (), False)
    assert (row.media[0].start_s, row.media[0].duration_s, row.seconds, row.context) == (0.0, None, 0.0, "")
    path = write_lines(tmp_path / "t.jsonl", {"prompt": "2+2?", "answer": nothing, "text": "4", "id": nothing})
    (row,) = rows_of(path)
    assert (row.id, row.text) == ("t:1", "4")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"audio": "a.wav"}', '{"audio": "b.wav",'], r"m\.jsonl:2: is not JSON \(Expecting prop.*\. Each row must"),
        (['{"audio": "a.wav"}', "[1]"], r"m\.jsonl:2: holds \[1\]; each row must be a JSON object"),
        (['{"audio": "a.wav", "language": "tlh"}'], r"m\.jsonl:1: language 'tlh' is not known"),
        (['{"audio": "a.wav", "language": "zh", "text": "language English<asr_text>x"}'],
         r"m\.jsonl:1: the text says 'language English' but the row's language column says Chinese"),
        (['{"audio": "http://x/a.wav"}'], r"m\.jsonl:1: the clip is at http://x/a\.wav; only local files are read"),
        (['{"audio": "a.wav", "offset": "x"}'], r"m\.jsonl:1: start holds 'x'; it must hold seconds"),
        (['{"audio": "a.wav", "start": 2, "end": 1}'], r"m\.jsonl:1: start 2\.0 s, end 1\.0 s"),
        (['{"audio": "a.wav", "offset": 2, "duration": 0}'], r"m\.jsonl:1: start 2\.0 s, end None s, duration 0"),
        (['{"audio": "a.wav", "end": 1e999}'], r"m\.jsonl:1: end holds inf; it must hold seconds"),
        (['{"audio": NaN, "text": "x"}'], r"m\.jsonl:1: no column holds the clip"),
        (['{"audio": "a.wav", "no_speech": "perhaps"}'], r"m\.jsonl:1: no_speech holds 'perhaps'"),
        (['{"audio": "a.wav", "text": ["x"]}'], r"m\.jsonl:1: column 'text' holds \['x'\]; it must hold one text"),
        (['{"audio": "a.wav"}', '{"text": "x"}'],
         r"m\.jsonl:2: no column holds the clip: looked for audio, .*; the row has text\. Name .*s\.audio_key"),
        (['{"messages": [{"role": "user"}], "audios": ["a"]}'], r"m\.jsonl:1: a turn is \{'role': 'user'\}; it must"),
        (['{"prompt": " "}'], r"m\.jsonl:1: the prompt in column 'prompt' is empty"),
        (['{"prompt": [3]}'], r"m\.jsonl:1: column 'prompt': a turn is 3; it must"),
        (['{"foo": 1}'], r"(?s)m\.jsonl: cannot tell what format .*s\.format to one of:\n  qwen3_asr .*  text "),
        (["hello world"], r"m\.jsonl: cannot tell what format"),
        ([], r"m\.jsonl: holds no rows\. Correct data\.<train\|eval>\.s\.path, or fill the manifest"),
    ],
)  # fmt: skip
def test_errors_say_where_and_what_to_do(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(write_lines(tmp_path / "m.jsonl", *lines))


def test_missing_manifests_and_wrong_kinds_of_path(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"gone\.jsonl: there is no such manifest\. Correct data\.<train\|eval>\.s\.path"
    ):
        rows_of(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="is a directory, but format nemo is a file"):
        rows_of(tmp_path, format="nemo")
    with pytest.raises(DataError, match=r"has no wav\.scp, so it is no Kaldi data directory"):
        rows_of(tmp_path, format="kaldi")
    with pytest.raises(DataError, match="cannot tell what format"):
        rows_of(tmp_path)
    (tmp_path / "latin1.jsonl").write_bytes(b'{"audio": "a.wav"}\n{"audio": "\xe9.wav"}\n')
    with pytest.raises(DataError, match=r"latin1\.jsonl:\d: is not UTF-8 text"):
        rows_of(tmp_path / "latin1.jsonl")


def test_what_auto_found_is_said(clips: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(clips / "m.jsonl", {"audio_filepath": "wavs/a.wav", "duration": 1.0, "text": "x"})
    with caplog.at_level(logging.INFO):
        rows_of(path)
    assert caplog.messages == [f"source 's': {path} is read as nemo (its first row has audio_filepath, duration, text)"]


def test_every_format_of_the_schema_has_a_reader() -> None:
    annotation = SourceConfig.model_fields["format"].annotation
    assert {"auto", *READERS} == set(get_args(annotation))
