"""Rollouts go to Parquet and come back whole."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from skirl.errors import CheckpointError
from skirl.records import (
    Group,
    Media,
    Prompt,
    Rollout,
    Sampling,
    Score,
    ScoredGroup,
    ScoreFailure,
    TrainingSequence,
)
from skirl.tracking.rollout_store import RolloutStore, read_rollouts


def rollout(index: int, ids: list[int]) -> Rollout:
    return Rollout(
        prompt_id="noisy/17",
        sample_index=index,
        prompt_ids=np.array([5, 5, 6]),
        response_ids=np.array(ids, np.int64),
        logprobs=np.array([-0.1] * len(ids), np.float32),
        versions=np.array([3] * len(ids)),
        finish_reason="stop" if ids else "abort",
        text="\u4e8c\u5341 twenty",
    )


@pytest.fixture
def scored() -> ScoredGroup:
    prompt = Prompt(
        id="noisy/17",
        source="noisy",
        input_ids=(5, 5, 6),
        compact_ids=(5, 6),
        media=(Media("/clips/a.ogg", 0.5, 2.25), Media("b.wav", data=b"RIFF")),
        reference="\u4e8c\u5341",
        language="Chinese",
        answer=None,
        row={"id": "17", "speaker": np.int64(4), "snr_db": float("nan"), "raw": b"abc"},
        seconds=2.25,
    )
    failure = ScoreFailure("raised", "ValueError: no digits", "traceback")
    scores = (
        Score(0.75, {"accuracy": 1.0, "length": -0.25}),
        Score(None, failure=failure),
        Score(0.0, {"other": 0.5}),
    )
    rollouts = (rollout(0, [7, 8, 2]), rollout(1, [9]), rollout(2, []))
    return ScoredGroup(Group(prompt, rollouts, Sampling()), scores)


@pytest.fixture
def sequences() -> dict[str, TrainingSequence]:
    sequence = TrainingSequence(
        id="noisy/17#0",
        input_ids=np.array([5, 5, 6, 7, 8, 2]),
        action_positions=np.array([3, 4, 5]),
        advantages=np.array([1 / 3, 1 / 3, 1 / 3]),
        reference_logprobs=np.array([-0.2, -0.3, -0.4], np.float32),
    )
    return {sequence.id: sequence}


def test_round_trip(tmp_path: Path, scored: ScoredGroup, sequences: dict[str, TrainingSequence]):
    store = RolloutStore(tmp_path / "rollouts")
    path = store.write(12, [scored], sequences)
    assert path == tmp_path / "rollouts" / "step-000012.parquet"
    first, second, third = store.read(12)
    assert first == {
        "step": 12,
        "prompt_id": "noisy/17",
        "sample_index": 0,
        "source": "noisy",
        "text": "\u4e8c\u5341 twenty",
        "reference": "\u4e8c\u5341",
        "language": "Chinese",
        "finish_reason": "stop",
        "score": 0.75,
        "parts": {"accuracy": 1.0, "length": -0.25},
        "failure_kind": None,
        "failure_message": None,
        "trained": True,
        "prompt_ids": [5, 5, 6],
        "response_ids": [7, 8, 2],
        "versions": [3, 3, 3],
        "logprobs": [float(np.float32(-0.1))] * 3,
        "old_logprobs": None,
        "reference_logprobs": [float(np.float32(value)) for value in (-0.2, -0.3, -0.4)],
        "advantages": [1 / 3] * 3,
        "media": [
            {"path": "/clips/a.ogg", "start_s": 0.5, "duration_s": 2.25},
            {"path": "b.wav", "start_s": 0.0, "duration_s": None},
        ],
        "row": {"id": "17", "speaker": 4, "snr_db": None, "raw": "<3 bytes>"},
    }
    assert (second["score"], second["failure_kind"], second["failure_message"]) == (
        None,
        "raised",
        "ValueError: no digits",
    )
    assert (second["trained"], second["advantages"], second["parts"]) == (False, None, {})
    assert (third["response_ids"], third["finish_reason"], third["parts"]) == ([], "abort", {"other": 0.5})


def test_without_sequences_nothing_is_said_about_training(tmp_path: Path, scored: ScoredGroup):
    store = RolloutStore(tmp_path)
    store.write(1, [scored])
    assert [row["trained"] for row in store.read(1)] == [None] * 3


def test_a_step_without_rollouts_has_a_file_with_the_same_columns(tmp_path: Path, scored: ScoredGroup):
    import pyarrow.parquet as pq

    store = RolloutStore(tmp_path)
    empty, full = store.write(1, []), store.write(2, [scored])
    assert pq.read_schema(empty).equals(pq.read_schema(full))
    assert store.read(1) == []


def test_files_are_plain_parquet(tmp_path: Path, scored: ScoredGroup, sequences: dict[str, TrainingSequence]):
    path = RolloutStore(tmp_path).write(1, [scored], sequences)
    script = (
        "import json, sys, pyarrow.parquet as pq\n"
        "table = pq.read_table(sys.argv[1])\n"
        "assert pq.ParquetFile(sys.argv[1]).metadata.row_group(0).column(0).compression == 'ZSTD'\n"
        "print(json.dumps([sorted({name.split('.')[0] for name in sys.modules} & {'skirl', 'torch'}),"
        " str(table.schema.field('response_ids').type), table['score'].to_pylist()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], "list<element: int32>", [0.75, None, 0.0]]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, scored: ScoredGroup):
    store = RolloutStore(tmp_path)
    store.write(1, [scored])
    before = store.path(1).read_bytes()
    bad = ScoredGroup(Group(scored.group.prompt, scored.group.rollouts[:1], Sampling()), (Score("high"),))  # pyright: ignore
    with pytest.raises(Exception, match="high"):
        store.write(1, [bad])
    assert store.path(1).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.parquet"]


def test_scores_must_match_rollouts(tmp_path: Path, scored: ScoredGroup):
    with pytest.raises(ValueError, match="zip"):
        RolloutStore(tmp_path).write(1, [ScoredGroup(scored.group, scored.scores[:2])])


def test_rewind_deletes_later_steps_and_torn_files(tmp_path: Path, scored: ScoredGroup):
    store = RolloutStore(tmp_path)
    for step in (1, 2, 10, 1_000_000):
        store.write(step, [scored])
    (tmp_path / ".step-000011.parquet.tmp").write_bytes(b"PAR1")
    (tmp_path / "notes.txt").write_text("mine")
    assert store.steps() == [1, 2, 10, 1_000_000]
    store.rewind(2)
    assert store.steps() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-000001.parquet",
        "step-000002.parquet",
    ]


@pytest.mark.parametrize("content", [None, b"PAR1 torn"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None):
    path = tmp_path / "step-000001.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-000001\.parquet"):
        read_rollouts(path)


def test_an_undecodable_file_name_is_written_as_its_escape(tmp_path: Path, scored: ScoredGroup):
    prompt = scored.group.prompt
    odd = Prompt(
        **{name: getattr(prompt, name) for name in prompt.__slots__}
        | {"media": (Media("a\udcff.wav"),), "row": {"p": "a\udcff"}}
    )
    store = RolloutStore(tmp_path)
    store.write(1, [ScoredGroup(Group(odd, scored.group.rollouts, Sampling()), scored.scores)])
    row = store.read(1)[0]
    assert row["media"][0]["path"] == "a\\udcff.wav"
    assert row["row"] == {"p": "a\udcff"}
