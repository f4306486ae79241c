"""What ``skirl sample`` writes: which responses are kept, as rows that ``sft``, ``dpo`` and ``rm`` read again.

scored group -> rows of the prompt -> JSON lines; a second file says which prompts are done, so that a run can go on
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skirl.config.offline import SampleConfig
from skirl.errors import ConfigError, DataError
from skirl.prompts.manifests.columns import split_tagged
from skirl.records import Prompt, Ratio, Rollout, Score, ScoredGroup
from skirl.tracking.json_lines import (
    append_lines,
    append_record,
    read_records,
    replace_file,
    to_json,
    trim_torn_line,
)

__all__ = ["SampleFile", "measure_samples", "select_rows"]

Sampled = tuple[Rollout, Score]


def select_rows(group: ScoredGroup, how: SampleConfig, *, whole_groups: bool = False) -> list[dict[str, Any]]:
    """The rows of one prompt; empty where no response qualifies.

    ``best``, ``rejection`` and ``pairs`` take only responses that ended by themselves and have a score: an answer that
    the budget cut off would be taught as if it were complete. An empty response may be rejected, never taught.

    Args:
        whole_groups: they take nothing of a prompt that has a response without a score (``reward.on_failure``).

    Raises:
        DataError: the prompt's clips lie in a table, so that no row can name them.
    """
    prompt = group.group.prompt
    pairs = list(zip(group.group.rollouts, group.scores, strict=True))
    if how.select == "all":
        return [_response_row(prompt, one, f"{prompt.id}#{one[0].sample_index}") for one in pairs]
    broken = whole_groups and any(score.failure is not None for score in group.scores)
    usable = [one for one in pairs if one[0].finish_reason == "stop" and one[1].total is not None and not broken]
    said = [one for one in usable if one[0].text.strip()]
    if how.select == "rejection":
        kept = [one for one in said if _total(one) >= how.min_score]
        return [_response_row(prompt, one, f"{prompt.id}#{one[0].sample_index}") for one in kept]
    if not said:
        return []
    best, worst = max(said, key=_total), min(usable, key=_total)
    if how.select == "best":
        return [_response_row(prompt, best, prompt.id)]
    if _total(best) == _total(worst) or best[0].text == worst[0].text:
        return []
    return [
        {
            "id": prompt.id,
            "prompt_id": prompt.id,
            **_prompt_columns(prompt),
            "chosen": best[0].text,
            "rejected": worst[0].text,
            "margin": _total(best) - _total(worst),
            "chosen_score": best[1].total,
            "rejected_score": worst[1].total,
        }
    ]


def _total(one: Sampled) -> float:
    assert one[1].total is not None
    return one[1].total


def _response_row(prompt: Prompt, one: Sampled, row_id: str) -> dict[str, Any]:
    rollout, score = one
    row = {
        "id": row_id,
        "prompt_id": prompt.id,
        **_prompt_columns(prompt),
        **_language_column(prompt, rollout.text),
        "text" if prompt.media else "response": rollout.text,
        "score": score.total,
        "parts": dict(score.parts),
        "finish_reason": rollout.finish_reason,
        "sample_index": rollout.sample_index,
    }
    return row if score.failure is None else {**row, "failure": f"{score.failure.kind}: {score.failure.message}"}


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    """The prompt as manifests hold it."""
    if not prompt.media:
        return {"prompt": [dict(turn) for turn in prompt.row["messages"]]}
    clips = []
    for media in prompt.media:
        if media.data is not None:
            raise DataError(f"{prompt.id}: its clip lies in a table, so no row can name it; write the clips as files")
        clips.append(media.path)
    first = prompt.media[0]
    more: dict[str, Any] = {}
    if first.start_s or first.duration_s is not None:
        more["start"] = first.start_s
        if first.duration_s is not None:
            more["end"] = first.start_s + first.duration_s
    if prompt.row.get("context"):
        more["context"] = prompt.row["context"]
    if prompt.row.get("keywords"):
        more["keywords"] = list(prompt.row["keywords"])
    return {"audio": clips[0] if len(clips) == 1 else clips, **more}


def _language_column(prompt: Prompt, text: str) -> dict[str, str]:
    """Of what was heard, where the response does not name it itself."""
    if not prompt.media or prompt.language is None or split_tagged(text) is not None:
        return {}
    return {"language": prompt.language}


def measure_samples(scored: Sequence[ScoredGroup], seconds: float, num_rows: int) -> dict[str, Ratio]:
    """Metrics of one round; ``num_rows``: written since the run began."""
    rollouts = [r for g in scored for r in g.group.rollouts]
    scores = [s for g in scored for s in g.scores if s.total is not None or s.failure is not None]
    totals = [s.total for s in scores if s.total is not None]
    tokens = sum(len(r.response_ids) for r in rollouts)
    metrics = {
        "rollout/response_length": Ratio(tokens, len(rollouts)),
        "rollout/truncation_rate": Ratio(sum(r.finish_reason == "length" for r in rollouts), len(rollouts)),
        "rollout/tokens": Ratio(tokens, 1),
        "rollout/tokens_per_s": Ratio(tokens, seconds),
        "sample/rows": Ratio(num_rows, 1),
    }
    if totals:
        metrics["reward/mean"] = Ratio(sum(totals), len(totals))
    if scores:
        metrics["reward/failure_rate"] = Ratio(len(scores) - len(totals), len(scores))
    return metrics


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


class SampleFile:
    """Rows in JSON lines. ``<name>.done`` beside them lists the prompts that are done, in the order they were.

    Rows are written before their prompt is listed; rows of prompts that are not listed are dropped when a run goes on,
    and sampled again: with the same seeds, and so the same.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Opens the file.

        Raises:
            ConfigError: it exists, and ``resume`` is not set or it is no file of ``skirl sample``; or it cannot be
                written.
        """
        self.path, self._done_path = path, path.with_name(f"{path.name}.done")
        written = _has_content(path)
        if (written or _has_content(self._done_path)) and not resume:
            raise ConfigError(
                f"sample.output: {path} exists already: set run.resume to keep its rows and go on, or choose another"
            )
        if written and not self._done_path.exists():
            raise ConfigError(
                f"sample.output: {path} was not written by skirl sample (there is no {self._done_path.name} beside "
                "it); choose another"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._done_path.touch()
        except OSError as error:
            raise ConfigError(f"sample.output: {path} cannot be written ({error.strerror}); choose another") from error
        trim_torn_line(self._done_path)
        self.done = {str(record["prompt_id"]) for record in read_records(self._done_path)}
        """Ids of the prompts that are done."""
        self.num_rows = 0
        """Rows in the file."""
        self._drop_undone()

    def _drop_undone(self) -> None:
        trim_torn_line(self.path)
        lines = self.path.read_bytes().split(b"\n")[:-1]
        kept = [line for line in lines if json.loads(line)["prompt_id"] in self.done]
        self.num_rows = len(kept)
        if len(kept) < len(lines):
            replace_file(self.path, b"".join(line + b"\n" for line in kept))

    def add(self, prompt_id: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes what is kept of one prompt, perhaps nothing."""
        lines = [to_json(row) + "\n" for row in rows]
        if lines:
            append_lines(self.path, "".join(lines).encode("utf-8", "backslashreplace"))
        append_record(self._done_path, {"prompt_id": prompt_id, "rows": len(lines)})
        self.num_rows += len(lines)
        self.done.add(prompt_id)
