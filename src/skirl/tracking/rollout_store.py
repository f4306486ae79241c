"""Every rollout of a run on disk: rollouts/step-000012.parquet, one row a rollout, readable with any Parquet reader."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skirl.errors import CheckpointError
from skirl.records import Prompt, Rollout, Score, ScoredGroup, TrainingSequence
from skirl.tracking.json_lines import to_json
from skirl.tracking.on_disk import writing

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RolloutStore", "read_rollouts"]

_NAME = re.compile(r"step-(\d+)\.parquet")


class RolloutStore:
    """The files of one run. Each is written aside and renamed: it is whole or not there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, step: int) -> Path:
        """The file of this step."""
        return self._directory / f"step-{step:06d}.parquet"

    def steps(self) -> list[int]:
        """Steps that have a file, rising."""
        found = (_NAME.fullmatch(path.name) for path in self._directory.glob("step-*.parquet"))
        return sorted(int(match[1]) for match in found if match)

    def write(
        self, step: int, groups: Sequence[ScoredGroup], sequences: Mapping[str, TrainingSequence] | None = None
    ) -> Path:
        """Writes the rollouts of a step; a file of the same step is replaced.

        Args:
            step: number of the step.
            groups: every rollout with its score; those without a score too.
            sequences: what was trained on, by "prompt id#sample index" (``TrainingSequence.id``); gives the columns
                trained, advantages, old_logprobs and reference_logprobs. None leaves them null.

        Raises:
            CheckpointError: the file cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [
            _row(step, group.group.prompt, rollout, score, sequences)
            for group in groups
            for rollout, score in zip(group.group.rollouts, group.scores, strict=True)
        ]
        self._directory.mkdir(parents=True, exist_ok=True)
        target = self.path(step)
        aside = target.with_name(f".{target.name}.tmp")
        try:
            with writing(target), aside.open("wb") as file:
                pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
        return target

    def read(self, step: int) -> list[dict[str, Any]]:
        """The rows of a step, see ``read_rollouts``."""
        return read_rollouts(self.path(step))

    def rewind(self, step: int) -> None:
        """Deletes the files of later steps, and what a killed process left half written."""
        for later in (found for found in self.steps() if found > step):
            self.path(later).unlink()
        for torn in self._directory.glob(".step-*.parquet.tmp"):
            torn.unlink()


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of one file as plain Python: ``parts`` a dict, ``row`` a dict again, token streams lists.

    Raises:
        CheckpointError: no such file, or it is not Parquet.
    """
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.ParquetFile(path).read().to_pylist(maps_as_pydicts="strict")
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise CheckpointError(f"no rollouts can be read from {path}: {error}") from error
    for row in rows:
        row["row"] = json.loads(row["row"])
    return rows


def _schema() -> "pa.Schema":
    import pyarrow as pa

    media = pa.struct([("path", pa.string()), ("start_s", pa.float64()), ("duration_s", pa.float64())])
    return pa.schema([
        ("step", pa.int64()),
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("source", pa.string()),
        ("text", pa.string()),
        ("reference", pa.string()),
        ("language", pa.string()),
        ("finish_reason", pa.string()),
        ("score", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("failure_kind", pa.string()),
        ("failure_message", pa.string()),
        ("trained", pa.bool_()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("versions", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("old_logprobs", pa.list_(pa.float32())),
        ("reference_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float64())),
        ("media", pa.list_(media)),
        ("row", pa.string()),
    ])  # fmt: skip


def _row(
    step: int, prompt: Prompt, rollout: Rollout, score: Score, sequences: Mapping[str, TrainingSequence] | None
) -> dict[str, Any]:
    key = f"{rollout.prompt_id}#{rollout.sample_index}"
    sequence = sequences[key] if sequences is not None and key in sequences else None
    return {
        "step": step,
        "prompt_id": _utf8(rollout.prompt_id),
        "sample_index": rollout.sample_index,
        "source": _utf8(prompt.source),
        "text": _utf8(rollout.text),
        "reference": _utf8(prompt.reference),
        "language": _utf8(prompt.language),
        "finish_reason": rollout.finish_reason,
        "score": score.total,
        "parts": {str(_utf8(name)): float(value) for name, value in score.parts.items()},
        "failure_kind": score.failure.kind if score.failure else None,
        "failure_message": _utf8(score.failure.message) if score.failure else None,
        "trained": sequence is not None if sequences is not None else None,
        "prompt_ids": np.asarray(rollout.prompt_ids, np.int32),
        "response_ids": np.asarray(rollout.response_ids, np.int32),
        "versions": np.asarray(rollout.versions, np.int32),
        "logprobs": np.asarray(rollout.logprobs, np.float32),
        "old_logprobs": sequence.old_logprobs if sequence else None,
        "reference_logprobs": sequence.reference_logprobs if sequence else None,
        "advantages": sequence.advantages if sequence else None,
        "media": [
            {"path": _utf8(clip.path), "start_s": clip.start_s, "duration_s": clip.duration_s} for clip in prompt.media
        ],
        "row": _utf8(to_json(prompt.row)),
    }


def _utf8(text: str | None) -> str | None:
    """Lone surrogates (an undecodable file name) as their escapes: Parquet strings are UTF-8."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")
