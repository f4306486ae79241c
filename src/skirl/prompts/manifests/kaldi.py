"""Kaldi and ESPnet data directories: wav.scp, text, segments, utt2spk, utt2lang."""

import logging
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from skirl.errors import DataError
from skirl.prompts.manifests.columns import Source, Unread, audio_row
from skirl.prompts.manifests.jsonl import open_text
from skirl.records import Media

__all__ = ["read_kaldi"]

_PIPE_TIMEOUT_S = 120.0
_COLUMNS = {"text": "text", "utt2spk": "speaker", "utt2lang": "language"}
_log = logging.getLogger(__name__)


def read_kaldi(source: Source) -> Iterator[Unread]:
    """Rows of ``segments``, or of ``wav.scp`` where there are none.

    An entry of wav.scp that ends in "|" is a shell command that writes the file. It is refused unless ``allow_pipes``
    is set; then it is run by the shell in the current directory, once a recording, and its output is kept in memory.

    Raises:
        DataError: a file is malformed or names an unknown recording, a pipe is not allowed or fails.
    """
    folder = source.path
    if source.config.audio_key is not None or source.config.text_key is not None:
        raise DataError(f"{source.setting}: audio_key and text_key have no meaning for a Kaldi directory. Remove them.")
    recordings = _table(folder / "wav.scp")
    columns = {name: _table(folder / file) for file, name in _COLUMNS.items() if (folder / file).exists()}
    utterances = _segments(folder / "segments", recordings) if (folder / "segments").exists() else None
    known = utterances if utterances is not None else recordings
    lost = sorted(set(columns.get("text", {})) - set(known))
    if lost:
        raise DataError(
            f"{columns['text'][lost[0]][1]}: {len(lost)} utterances of text have no audio in "
            f"{'segments' if utterances is not None else 'wav.scp'}, first {lost[0]!r}. Run utils/fix_data_dir.sh."
        )
    opened: dict[str, str | Media] = {}
    for utterance in known:
        recording, times, where = utterances[utterance] if utterances is not None else (utterance, {}, "")
        if recording not in opened:
            opened[recording] = _clip(source, *recordings[recording])
        record: dict[str, Any] = {"id": utterance, "audio": opened[recording], **times}
        record |= {name: table[utterance][0] for name, table in columns.items() if utterance in table}
        where = where or recordings[recording][1]
        yield where, partial(audio_row, source, record, where=where, folder=folder)


def _table(path: Path) -> dict[str, tuple[str, str]]:
    """Key -> (rest of the line, "file:line")."""
    table: dict[str, tuple[str, str]] = {}
    for number, line in open_text(path):
        key, rest = (*line.split(None, 1), "")[:2]
        if key in table:
            raise DataError(f"{path}:{number}: key {key!r} stands here again, first in {table[key][1]}. Remove one.")
        table[key] = (rest.strip(), f"{path}:{number}")
    return table


def _segments(path: Path, recordings: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, float], str]]:
    """Utterance -> (recording, start and end, "file:line")."""
    segments: dict[str, tuple[str, dict[str, float], str]] = {}
    for utterance, (rest, where) in _table(path).items():
        try:
            recording, start, end = rest.split()
            times = {"start": float(start)} | ({"end": float(end)} if float(end) >= 0 else {})  # -1: to the file's end
        except ValueError:
            raise DataError(
                f"{where}: is {utterance + ' ' + rest!r:.80}; it must be utterance, recording, start, end."
            ) from None
        if recording not in recordings:
            raise DataError(f"{where}: recording {recording!r} is not in wav.scp. Run utils/fix_data_dir.sh.")
        segments[utterance] = (recording, times, where)
    return segments


def _clip(source: Source, entry: str, where: str) -> str | Media:
    """A path, or the output of a pipe."""
    if not entry.endswith("|"):
        name, _, offset = entry.rpartition(":")
        if name and offset.isdigit():
            raise DataError(
                f"{where}: {entry} points into a Kaldi archive, which is not read. Write the clips as files."
            )
        return entry
    if not source.config.allow_pipes:
        raise DataError(
            f"{where}: the recording is a shell pipe: {entry:.120}\n"
            f"Pipes are not run unless {source.setting}.allow_pipes is true; set it only for a manifest you trust, "
            "or write the clips as files first."
        )
    command = entry[:-1].strip()
    _log.debug("%s: runs %s", where, command)
    try:
        done = subprocess.run(command, shell=True, capture_output=True, timeout=_PIPE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"{where}: the pipe did not end within {_PIPE_TIMEOUT_S:g} s: {command}") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise DataError(f"{where}: the pipe failed with exit code {done.returncode}: {command}\n{said[-500:]}")
    return Media(f"{where}(pipe)", data=done.stdout)
