"""WeNet: a raw list of {"key", "wav", "txt"}, or shards (tar files of key.wav and key.txt) and lists of shards."""

import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from skirl.errors import DataError
from skirl.prompts.manifests.columns import Source, Unread, audio_row
from skirl.prompts.manifests.jsonl import open_text, read_records
from skirl.records import Media

__all__ = ["read_wenet"]

_AUDIO = frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "webm"})


def read_wenet(source: Source) -> Iterator[Unread]:
    """Rows of a raw list, of one shard, or of every shard of a list, in order. Clips of shards are kept in memory.

    Raises:
        DataError: a shard is missing or no tar file, or a record cannot be understood.
    """
    if _is_tar(source.path.name):
        yield from _shard(source, source.path, where=str(source.path))
        return
    first = next((line for _, line in open_text(source.path)), "")
    if first.lstrip().startswith("{"):
        for where, record in read_records(source.path):
            yield where, partial(audio_row, source, record, where=where, folder=source.path.parent)
        return
    for number, line in open_text(source.path):
        yield from _shard(source, source.path.parent / line.strip(), where=f"{source.path}:{number}")


def _is_tar(name: str) -> bool:
    return name.endswith((".tar", ".tar.gz", ".tgz"))


def _shard(source: Source, path: Path, where: str) -> Iterator[Unread]:
    if not path.is_file():
        raise DataError(f"{where}: there is no shard {path}. Each line must be the path of a tar file.")
    try:
        with tarfile.open(path, "r:*") as tar:
            for key, record in _samples(tar, path):
                inside = f"{path}({key})"
                yield inside, partial(audio_row, source, record, where=inside, folder=path.parent)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{where}: {path} cannot be read as a tar file ({error}). Copy it again.") from error


def _samples(tar: tarfile.TarFile, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Files that follow one another with the same name up to the last dot make up one record."""
    key, record = "", {}
    for member in tar:
        if not member.isfile():
            continue
        name, _, kind = member.name.rpartition(".")
        if name != key and record:
            yield key, record
            record = {}
        key = name
        file = tar.extractfile(member)
        assert file is not None, member.name
        data = file.read()
        record["key"] = Path(name).name
        if kind.lower() in _AUDIO:
            record["wav"] = Media(f"{path}({member.name})", data=data)
        else:
            try:
                record[kind] = data.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}({member.name}): is neither audio nor UTF-8 text ({error.reason}).") from None
    if record:
        yield key, record
