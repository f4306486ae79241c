"""JSON lines on disk: one object a line, appended whole, readable while a run writes them."""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from skirl.errors import CheckpointError
from skirl.tracking.on_disk import writing

__all__ = [
    "append_lines",
    "append_record",
    "now",
    "read_records",
    "replace_file",
    "to_json",
    "trim_torn_line",
]


def now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def to_json(value: Any) -> str:
    """Strict JSON on one line: NaN and infinities become null, numpy plain lists, bytes their size, the rest text."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one line, in one write, so that readers never see two halves mixed. Raises CheckpointError."""
    # A lone surrogate (an undecodable file name) is written as its escape, which is JSON again.
    append_lines(path, (to_json(record) + "\n").encode("utf-8", "backslashreplace"))


def append_lines(path: Path, lines: bytes) -> None:
    """Adds whole lines, or none: half of one, on a full disk, would run into whatever is written next.

    Raises:
        CheckpointError: they cannot be written.
    """
    with writing(path), path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(end)
            raise


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole line of the file; a last line without its newline is still being written and is left out.

    Raises:
        CheckpointError: a line is not a JSON object.
    """
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CheckpointError(f"{path}:{number} is not JSON ({error}): {line[:80]!r}; remove the line") from error
        if not isinstance(record, dict):
            raise CheckpointError(f"{path}:{number} is not a JSON object: {line[:80]!r}; remove the line")
        records.append(record)
    return records


def trim_torn_line(path: Path) -> None:
    """Drops a last line without its newline: what a killed process was writing."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def replace_file(path: Path, content: bytes) -> None:
    """Writes aside, then renames: the file is the old one or the new one, never a part. Raises CheckpointError."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with writing(path), aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    return f"<{len(value)} bytes>" if isinstance(value, bytes | bytearray | memoryview) else str(value)
