"""One table of column names, and the step from a manifest's record to the canonical row."""

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skirl.config.schema import SourceConfig
from skirl.errors import DataError
from skirl.records import Media, Row
from skirl.speech.languages import language_name

__all__ = [
    "ALIASES",
    "PROMPTS",
    "Reader",
    "Source",
    "Unread",
    "audio_row",
    "clip_column",
    "first_column",
    "language_of",
    "reference_of",
    "split_tagged",
    "text_of",
]

ALIASES: Mapping[str, tuple[str, ...]] = {
    "id": ("id", "utt_id", "utt", "uttid", "key"),
    "audio": ("audio", "audio_filepath", "audio_path", "audio_file", "wav", "wav_path", "file_name", "source", "path"),
    "text": ("text", "transcript", "transcription", "sentence", "txt", "target", "reference", "label", "answer",
             "solution"),
    "language": ("language", "lang", "target_lang", "source_lang", "locale"),
    "context": ("context", "prompt"),
    "keywords": ("keywords",),
    "no_speech": ("no_speech",),
    "start": ("start", "offset", "start_s", "begin"),
    "end": ("end", "end_s"),
    "duration": ("duration", "duration_s"),
}  # fmt: skip
"""Canonical column -> names it goes by; the first that a record has is used, the others stay in ``Row.extra``."""

PROMPTS = frozenset({"messages", "conversations", "prompt"})
"""Columns that hold a text prompt, in tables that have no clips."""

_TAGGED = re.compile(r"\s*language\s+([^<>]*?)\s*<asr_text>(.*)", re.DOTALL)
_TRUE, _FALSE = frozenset({"1", "true", "yes"}), frozenset({"", "0", "false", "no"})


@dataclass(frozen=True, slots=True)
class Source:
    """What a reader works on: the source's name in the recipe and its settings."""

    name: str
    config: SourceConfig

    @property
    def path(self) -> Path:
        """The manifest, as the user wrote it."""
        return self.config.path

    @property
    def setting(self) -> str:
        """Start of the source's settings, for messages."""
        return f"data.<train|eval>.{self.name}"


Unread = tuple[str, Callable[[], Row]]
""" "file:line" of a record, and what makes its row, or raises DataError: the records behind a bad one can be read."""
Reader = Callable[[Source], Iterator[Unread]]
"""Records one after another, so that a limit stops the reading. Raises DataError where the manifest itself is bad."""


def clip_column(columns: Collection[str], audio_key: str | None) -> str | None:
    """The column that holds the clip; None for text prompts, in which "source" and "path" name other things."""
    if audio_key is not None and audio_key in columns:
        return audio_key
    column = next((name for name in ALIASES["audio"] if name in columns), None)
    return None if column in {"source", "path"} and not PROMPTS.isdisjoint(columns) else column


def first_column(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of the names that the record has with a value."""
    return next((name for name in names if not _is_empty(record.get(name))), None)


def _is_empty(value: Any) -> bool:
    """None, or NaN: what pandas has in cells that hold nothing, and writes into JSON."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def split_tagged(text: str) -> tuple[str | None, str] | None:
    """Splits "language X<asr_text>reference" into X and the reference; None where the text has no such prefix."""
    match = _TAGGED.fullmatch(text)
    return (match[1], match[2].strip()) if match else None


def text_of(value: Any, column: str, where: str) -> str | None:
    """A cell as text: numbers become text, None (or NaN) is None; lists and mappings are refused."""
    if isinstance(value, str):
        return value
    if _is_empty(value):
        return None
    if isinstance(value, (bool, int, float)):
        return str(value)
    raise DataError(f"{where}: column {column!r} holds {value!r:.80}; it must hold one text.")


def reference_of(text: str | None, language: str | None, where: str) -> tuple[str | None, str | None, bool]:
    """Reference, language and whether the text itself says that there is no speech ("language None<asr_text>").

    Args:
        text: the reference as the manifest has it, with or without Qwen3-ASR's prefix.
        language: full name from a column of the same row, if any.
        where: for messages.

    Raises:
        DataError: prefix and column name different languages, or an unknown one.
    """
    tagged = split_tagged(text) if text is not None else None
    if tagged is None:
        return (None if text is None else text.strip()), language, False
    named = _language(tagged[0], where)
    if named is not None and language is not None and named != language:
        raise DataError(
            f"{where}: the text says 'language {named}' but the row's language column says {language}. Correct one."
        )
    return tagged[1], named or language, tagged[1] == "" and named is None


def audio_row(source: Source, record: Mapping[str, Any], *, where: str, folder: Path) -> Row:
    """The canonical row of one record of an audio manifest.

    Args:
        source: the data source; its ``audio_key``, ``text_key`` and ``language`` count here.
        record: column -> value.
        where: "file:line".
        folder: what relative clip paths are relative to.

    Returns:
        The row; its id is "" where the record has none (``read`` makes one up).

    Raises:
        DataError: no column holds the clip, or a column holds what cannot be understood.
    """
    config = source.config
    used = {name: first_column(record, names) for name, names in ALIASES.items()}
    used["audio"] = config.audio_key or used["audio"]
    used["text"] = config.text_key or used["text"]
    if used["audio"] is None or _is_empty(record.get(used["audio"])):
        looked = config.audio_key or ", ".join(ALIASES["audio"])
        raise DataError(
            f"{where}: no column holds the clip: looked for {looked}; the row has {', '.join(record) or 'none'}. "
            f"Name the column with {source.setting}.audio_key."
        )
    for name in ("context", "keywords", "id", "language", "no_speech"):  # a column has one meaning only
        if used[name] in {used["audio"], used["text"]}:
            used[name] = None
    cells = {name: record.get(column) if column else None for name, column in used.items()}
    start_s, duration_s, seconds = _segment(cells, where)
    media = _media(cells["audio"], where=where, folder=folder, start_s=start_s, duration_s=duration_s)
    text, language, says_no_speech = reference_of(
        text_of(cells["text"], used["text"] or "text", where), _language(cells["language"], where), where
    )
    return Row(
        id=text_of(cells["id"], "id", where) or "",
        source=source.name,
        media=media,
        seconds=seconds,
        text=text,
        language=language or language_of(source),
        context=text_of(cells["context"], "context", where) or "",
        keywords=_keywords(cells["keywords"], where),
        no_speech=says_no_speech or _flag(cells["no_speech"], where),
        extra={column: value for column, value in record.items() if column not in set(used.values())},
        where=where,
    )


def language_of(source: Source) -> str | None:
    """Full name of the language of rows that name none. Raises DataError: the recipe names an unknown one."""
    return _language(source.config.language, f"{source.setting}.language")


# ---------------------------------------------------------------------------------------------------------------- cells
def _language(value: Any, where: str) -> str | None:
    try:
        return language_name(text_of(value, "language", where))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _keywords(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    words = re.split("[,\uff0c]", value) if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{where}: keywords holds {value!r:.80}; it must hold a list of texts, or one with commas.")
    return tuple(word.strip() for word in words if word.strip())


def _flag(value: Any, where: str) -> bool:
    said = str(value).strip().lower() if value is not None else ""
    if said not in _TRUE | _FALSE:
        raise DataError(f"{where}: no_speech holds {value!r:.80}; it must hold true or false.")
    return said in _TRUE


def _number(value: Any, column: str, where: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.inf
    if math.isfinite(seconds):
        return seconds
    raise DataError(f"{where}: {column} holds {value!r:.80}; it must hold seconds.")


def _segment(cells: Mapping[str, Any], where: str) -> tuple[float, float | None, float]:
    """Start, length of the cut (None is the rest of the file) and length by the manifest, seconds."""
    start, end, duration = (_number(cells[name], name, where) for name in ("start", "end", "duration"))
    if end is not None:
        duration = end - (start or 0.0)
    cuts = start is not None or end is not None  # a duration alone is NeMo's note of the file's length
    if (start or 0.0) < 0 or (duration or 0.0) < 0 or (cuts and duration == 0):
        raise DataError(f"{where}: start {start} s, end {end} s, duration {duration} s are no segment. Correct them.")
    return start or 0.0, duration if cuts else None, duration or 0.0


def _media(value: Any, *, where: str, folder: Path, start_s: float, duration_s: float | None) -> tuple[Media, ...]:
    if isinstance(value, (list, tuple)) and value:
        return tuple(
            clip
            for part in value
            for clip in _media(part, where=where, folder=folder, start_s=start_s, duration_s=duration_s)
        )
    if isinstance(value, Media):
        return (Media(value.path, start_s, duration_s, value.data),)
    if isinstance(value, Mapping) and (value.get("bytes") is not None or value.get("path")):
        if value.get("bytes") is not None:
            return (Media(f"{where}({value.get('path') or 'audio'})", start_s, duration_s, value["bytes"]),)
        value = value["path"]
    if isinstance(value, bytes):
        return (Media(f"{where}(audio)", start_s, duration_s, value),)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: the clip is {value!r:.80}; it must be a path, or a struct of bytes and path.")
    if re.match(r"[a-z][a-z0-9+]+://", value, re.IGNORECASE):
        raise DataError(f"{where}: the clip is at {value}; only local files are read. Download it first.")
    path = os.path.join(os.path.abspath(folder), os.path.expanduser(value))
    return (Media(os.path.normpath(path), start_s, duration_s),)
