"""Tables: Hugging Face audio folders (metadata.csv, .jsonl, .parquet beside the clips) and Parquet data sets."""

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from skirl.errors import DataError
from skirl.prompts.manifests.columns import PROMPTS, Source, Unread, audio_row, clip_column
from skirl.prompts.manifests.jsonl import read_records, text_row

__all__ = ["METADATA", "parquet_records", "read_audiofolder", "read_parquet"]

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of an audio folder's table."""


def read_audiofolder(source: Source) -> Iterator[Unread]:
    """Rows of every metadata file in the folder and below it, in order of their paths; or of one CSV or JSONL file."""
    path = source.path
    files = [path] if path.is_file() else sorted(file for name in METADATA for file in path.rglob(name))
    if not files:
        raise DataError(f"{path}: has no {', '.join(METADATA)} in it or below it. Give the folder that has one.")
    for file in files:
        if file.suffix == ".csv":
            yield from _csv(source, file)
        elif file.suffix == ".parquet":
            yield from _parquet(source, file)
        else:
            for where, record in read_records(file):
                yield where, partial(audio_row, source, record, where=where, folder=file.parent)


def read_parquet(source: Source) -> Iterator[Unread]:
    """Rows of one Parquet file, or of all in a directory, in order of their paths.

    The clip is a path, or a struct of bytes and path; bytes are kept in memory as they are stored (encoded).
    A table with a prompt and no clip holds text prompts.
    """
    for file in _parquet_files(source.path):
        yield from _parquet(source, file)


def parquet_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """ "file:row number" and record of every row of one Parquet file, or of all in a directory."""
    for file in _parquet_files(path):
        yield from _records(file)


def _parquet_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(f"{path}: has no .parquet file in it. Give the directory or file that does.")
    return files


def _csv(source: Source, file: Path) -> Iterator[Unread]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for record in reader:
                where = f"{file}:{reader.line_num}"
                if None in record or None in record.values():
                    raise DataError(
                        f"{where}: has another number of cells than the header, which names "
                        f"{', '.join(reader.fieldnames or ())}. Put quotes around cells that hold commas."
                    )
                yield where, partial(audio_row, source, record, where=where, folder=file.parent)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as CSV in UTF-8 ({error}). Convert it.") from error


def _parquet(source: Source, file: Path) -> Iterator[Unread]:
    for where, record in _records(file):
        if clip_column(record, source.config.audio_key) is None and not PROMPTS.isdisjoint(record):
            yield where, partial(text_row, source, record, where=where)
        else:
            yield where, partial(audio_row, source, record, where=where, folder=file.parent)


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file}:row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as Parquet ({error}). Write or copy it again.") from error
