"""Chat records with clips: ms-swift and LLaMA-Factory ({"messages", "audios"}), and FunASR's paths inside the text."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from skirl.errors import DataError
from skirl.prompts.manifests.columns import Source, Unread, audio_row
from skirl.prompts.manifests.jsonl import read_records, turns_of
from skirl.records import Row

__all__ = ["read_chat"]

_CLIP_IN_TEXT = re.compile(r"<\|startofspeech\|>!?(.+?)<\|endofspeech\|>")


def read_chat(source: Source) -> Iterator[Unread]:
    """The last turn of the assistant is the reference, the system turn the context; ``messages`` stays in extra.

    Where the last turn is the user's, the reference comes from a column (``solution``, ``text``, ...).

    Raises:
        DataError: a record has no turns or no clip.
    """
    for where, record in read_records(source.path):
        yield where, partial(_row, source, record, where)


def _row(source: Source, record: dict[str, Any], where: str) -> Row:
    return audio_row(source, _flat(source, record, where), where=where, folder=source.path.parent)


def _flat(source: Source, record: dict[str, Any], where: str) -> dict[str, Any]:
    """The record with the columns that ``audio_row`` knows."""
    column = "messages" if record.get("messages") is not None else "conversations"
    if not record.get(column):
        raise DataError(f"{where}: the row has no messages; it has {', '.join(record) or 'no column'}.")
    turns = turns_of(record[column], where)
    flat = dict(record)
    if source.config.audio_key is None:
        clips = flat.pop("audios", None) or [
            path for turn in turns if turn["role"] == "user" for path in _CLIP_IN_TEXT.findall(turn["content"])
        ]
        if clips:
            flat["audio"] = clips
    if source.config.text_key is None and turns[-1]["role"] == "assistant":
        flat["text"] = turns[-1]["content"]
    system = next((turn["content"] for turn in turns if turn["role"] == "system"), None)
    if system is not None and record.get("context") is None:
        flat["context"] = system
    return flat
