"""Canonical rows to prompts: token ids, placeholders expanded, and the answer for supervised training."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from skirl.errors import DataError
from skirl.models.families import Family
from skirl.models.loading import end_id
from skirl.records import Media, Prompt, Row

__all__ = ["Renderer"]


class Renderer:
    """Makes prompts for one model.

    Args:
        config: the model's configuration, for the token-count formula.
        forced: the row's language stands in the prompt, and the answer is bare text.
        num_samples: samples (16 kHz) that a clip will have once decoded and padded to a minimum.
    """

    def __init__(
        self,
        family: Family,
        tokenizer: Any,
        config: Any,
        *,
        forced: bool,
        num_samples: Callable[[Media, int], int],
    ) -> None:
        self._family, self._tokenizer, self._config = family, tokenizer, config
        self._forced, self._num_samples = forced, num_samples

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """One prompt a row, in order."""
        return [self.prompt(row) for row in rows]

    def prompt(self, row: Row) -> Prompt:
        """Renders one row.

        Raises: DataError: audio for a text model or the reverse; forced language where the row has none.
        """
        forced = row.language if self._forced else None
        if self._forced and row.language is None and row.media:
            raise DataError(
                f"{row.where}: row {row.id} names no language, but data.prompt is forced; set data.<...>.language or "
                "use data.prompt: tagged"
            )
        compact = self._ids(row, forced)
        counts = [
            self._family.num_tokens(self._config, self._num_samples(m, self._family.min_samples)) for m in row.media
        ]
        answer = None
        if row.text is not None:
            answer = self._family.answer(text=row.text, language=row.language, forced=self._forced)
        return Prompt(
            id=f"{row.source}/{row.id}",
            source=row.source,
            input_ids=tuple(self._expand(compact, counts, row)),
            compact_ids=tuple(compact),
            media=row.media,
            reference=row.text,
            language=row.language,
            answer=answer,
            row=_columns(row),
            seconds=row.seconds,
        )

    def target(self, prompt: Prompt) -> list[int]:
        """Token ids of the answer that a perfect policy would write, end token included.

        Raises: DataError: the row has no reference.
        """
        if prompt.answer is None:
            raise DataError(f"row {prompt.id} has no reference text to learn from; supervised training needs one")
        return [*self._family.tokenize(self._tokenizer, prompt.answer), end_id(self._family, self._tokenizer)]

    def _ids(self, row: Row, forced: str | None) -> list[int]:
        if row.media and self._family.placeholder is None:
            raise DataError(
                f"{row.where}: row {row.id} holds audio, but the model ({self._family.name}) reads text only"
            )
        if not row.media and self._family.placeholder is not None:
            raise DataError(
                f"{row.where}: row {row.id} holds no audio, but the model ({self._family.name}) transcribes audio"
            )
        if row.media:
            text = self._family.prompt(context=row.context, force_language=forced)
            return self._family.tokenize(self._tokenizer, text)
        if self._tokenizer.chat_template is None:
            text = "\n".join(m["content"] for m in row.messages)
            return list(self._tokenizer(text, add_special_tokens=True)["input_ids"])
        messages = [dict(m) for m in row.messages]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._family.tokenize(self._tokenizer, text)

    def _expand(self, compact: list[int], counts: list[int], row: Row) -> list[int]:
        if self._family.placeholder is None:
            return compact
        token = self._tokenizer.convert_tokens_to_ids(self._family.placeholder)
        if compact.count(token) != len(counts):
            raise DataError(
                f"{row.where}: row {row.id} has {len(counts)} clips, but its prompt has {compact.count(token)} audio "
                "placeholders; is a placeholder token written in the row's context?"
            )
        remaining = iter(counts)
        return [t for i in compact for t in ([i] * next(remaining) if i == token else [i])]


def _columns(row: Row) -> dict[str, Any]:
    """Every column of the row, canonical names first."""
    canonical = asdict(row)
    extra = canonical.pop("extra")
    canonical.pop("media")
    return {**extra, **canonical}
