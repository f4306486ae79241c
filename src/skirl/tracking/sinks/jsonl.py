"""metrics.jsonl: one flat object a step, for pandas, jq and plotting scripts."""

from collections.abc import Mapping
from pathlib import Path

from skirl.tracking.json_lines import append_record, now

__all__ = ["JsonlSink"]


class JsonlSink:
    """Appends {"step", "time", metric: value, ...}; NaN (nothing was counted) and infinities are null."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line. The file is opened for each, so a rewind or a copy in between loses nothing."""
        append_record(self._path, {"step": step, "time": now(), **values})

    def close(self) -> None:
        """Nothing is held open."""
