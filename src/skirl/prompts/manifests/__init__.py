"""Manifests of every format to canonical rows: ``read``; and which format a manifest has."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from skirl.config.schema import SourceConfig
from skirl.errors import DataError
from skirl.prompts.manifests.chat import read_chat
from skirl.prompts.manifests.columns import PROMPTS, Reader, Source, clip_column, language_of
from skirl.prompts.manifests.jsonl import open_text, read_audio_jsonl, read_records, read_text_jsonl
from skirl.prompts.manifests.kaldi import read_kaldi
from skirl.prompts.manifests.tables import METADATA, parquet_records, read_audiofolder, read_parquet
from skirl.prompts.manifests.wenet import read_wenet
from skirl.records import Row

__all__ = ["READERS", "made_up_id", "read", "read_texts"]

READERS: Mapping[str, Reader] = {
    "audiofolder": read_audiofolder,
    "kaldi": read_kaldi,
    "ms_swift": read_chat,
    "nemo": read_audio_jsonl,
    "parquet": read_parquet,
    "qwen3_asr": read_audio_jsonl,
    "text": read_text_jsonl,
    "wenet": read_wenet,
}
"""Format -> reader. A new format is a function here and a name in ``config.schema.ManifestFormat``."""

_DIRECTORIES = frozenset({"kaldi", "audiofolder", "parquet"})
_MARKS = {
    "qwen3_asr": 'JSON lines {"audio": path, "text": ...}; also FunASR {"key", "source", "target"}',
    "nemo": 'JSON lines {"audio_filepath": path, "duration": s, "text": ...}',
    "kaldi": "a directory with wav.scp and text",
    "wenet": 'JSON lines {"key", "wav", "txt"}, a tar shard, or a list of shards',
    "ms_swift": 'JSON lines or array {"messages": [...], "audios": [path]}',
    "audiofolder": "a directory with metadata.csv, .jsonl or .parquet, or such a file",
    "parquet": "a .parquet file, or a directory of them",
    "text": 'JSON lines {"prompt": ..., "answer": ...} or {"messages": [...]}',
}
OnBad = Callable[[str, DataError], None]
_CHATS = frozenset({"messages", "conversations"})
_log = logging.getLogger(__name__)


def read(source_name: str, config: SourceConfig, on_bad: OnBad | None = None) -> list[Row]:
    """Reads one data source. Clips are not opened; ``Row.seconds`` is what the manifest says, or 0.

    Args:
        source_name: name in the recipe; becomes ``Row.source``.
        config: its settings.
        on_bad: is given "file:line" of a record that makes no row, and why; the row is left out. None raises.

    Raises:
        DataError: the manifest is missing, empty, of no known format or malformed ("file:line" in the message).
    """
    source = Source(source_name, config)
    kind = config.format
    if not config.path.exists():
        raise DataError(f"{config.path}: there is no such manifest. Correct {source.setting}.path.")
    if kind == "auto":
        kind, why = _detect(source)
        _log.info("source %r: %s is read as %s (%s)", source_name, config.path, kind, why)
    if config.path.is_dir() and kind not in _DIRECTORIES:
        raise DataError(f"{config.path}: is a directory, but format {kind} is a file: {_MARKS[kind]}.")
    if kind == "kaldi" and not (config.path / "wav.scp").is_file():
        raise DataError(
            f"{config.path}: has no wav.scp, so it is no Kaldi data directory. Correct {source.setting}.path."
        )
    language_of(source)  # a mistake in the recipe is told of once, not of each row
    rows: list[Row] = []
    number = 0
    for number, (where, make) in enumerate(islice(READERS[kind](source), config.limit), start=1):
        try:
            row = make()
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(where, error)
            continue
        rows.append(row if row.id else replace(row, id=made_up_id(source, row, number)))
    if not number:
        raise DataError(
            f"{config.path}: holds no rows (read as {kind}). Correct {source.setting}.path, or fill the manifest."
        )
    return rows


def read_texts(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """ "file:line" and record of each row of a text manifest as it is written: JSON lines, a JSON array, or Parquet.

    Raises:
        DataError: the manifest is missing, of another format or malformed.
    """
    path, config = source.path, source.config
    if not path.exists():
        raise DataError(f"{path}: there is no such manifest. Correct {source.setting}.path.")
    if config.format not in ("auto", "text", "parquet"):
        raise DataError(
            f"{source.setting}.format is {config.format}, but this command reads text: JSON lines or Parquet. Set it "
            "to text or parquet, or remove it."
        )
    if path.suffix == ".csv":
        raise DataError(f"{path}: is a CSV file, but this command reads JSON lines or Parquet. Convert it.")
    if config.format == "parquet" or path.is_dir() or path.suffix == ".parquet":
        records = parquet_records(path)
    else:
        records = read_records(path)
    yield from islice(records, config.limit)


def made_up_id(source: Source, row: Row, number: int) -> str:
    """Name of the clip or, where it is no file, of the manifest; and the row's number in the source, from 1."""
    name = Path(row.media[0].path).stem if row.media and row.media[0].data is None else source.path.stem
    return f"{name}:{number}"


def _detect(source: Source) -> tuple[str, str]:
    """Format and the reason."""
    path = source.path
    found = _by_directory(path) if path.is_dir() else _by_name(path) or _by_first_row(source)
    if found is not None:
        return found
    formats = "\n".join(f"  {kind:<12} {mark}" for kind, mark in _MARKS.items())
    raise DataError(
        f"{path}: cannot tell what format the manifest has. Set {source.setting}.format to one of:\n{formats}\n"
        f"or, if only a column has an unusual name, {source.setting}.audio_key."
    )


def _by_directory(path: Path) -> tuple[str, str] | None:
    if (path / "wav.scp").is_file():
        return "kaldi", "it has a wav.scp"
    for name in METADATA:
        file = next(path.rglob(name), None)
        if file is not None:
            return "audiofolder", f"it has {file.relative_to(path)}"
    if next(path.rglob("*.parquet"), None) is not None:
        return "parquet", "it has .parquet files"
    return None


def _by_name(path: Path) -> tuple[str, str] | None:
    if path.suffix == ".parquet":
        return "parquet", "its name ends in .parquet"
    if path.suffix == ".csv" or path.name in METADATA:
        return "audiofolder", f"its name is {path.name}"
    if path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return "wenet", "it is a tar file"
    return None


def _by_first_row(source: Source) -> tuple[str, str] | None:
    _, line = next(open_text(source.path), (0, ""))
    if not line:
        raise DataError(f"{source.path}: holds no rows. Correct {source.setting}.path, or fill the manifest.")
    if not line.lstrip().startswith(("{", "[")):
        return ("wenet", "its first line names a tar file") if line.strip().endswith((".tar", ".tgz", ".gz")) else None
    _, record = next(read_records(source.path), ("", {}))
    kind = _by_columns(record, source.config.audio_key)
    return (kind, f"its first row has {', '.join(list(record)[:6])}") if kind else None


def _by_columns(record: Mapping[str, Any], audio_key: str | None) -> str | None:
    if not _CHATS.isdisjoint(record):
        heard = audio_key in record or "audios" in record or "<|startofspeech|>" in str(record)
        return "ms_swift" if heard else "text"
    column = clip_column(record, audio_key)
    if column is not None:
        return {"audio_filepath": "nemo", "wav": "wenet"}.get(column, "qwen3_asr")
    return None if PROMPTS.isdisjoint(record) else "text"
