"""Canonical rows to prompts: token ids, placeholders expanded, and the answer for supervised training.

Conversations are rendered turn by turn and never as a whole: what the assistant wrote is tokenised alone, after the
tokens of what it answers, exactly as it is when a policy samples it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skirl.errors import DataError
from skirl.models.families import Family
from skirl.models.loading import end_id
from skirl.records import Media, Prompt, Row

__all__ = ["Rendered", "Renderer"]

Turns = Sequence[Mapping[str, str]]
"""Chat turns {"role", "content"}."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids, and the positions of those to learn from, rising."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]


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

        Raises:
            DataError: audio for a text model or the reverse; forced language where the row has none; what the family
                refuses. The message begins with the row's "file:line".
        """
        try:
            return self._prompt(row)
        except DataError as error:
            if str(error).startswith(row.where):
                raise
            raise DataError(f"{row.where}: {error}") from None

    def _prompt(self, row: Row) -> Prompt:
        forced = row.language if self._forced else None
        if self._forced and row.language is None and row.media:
            raise DataError(
                f"row {row.id} names no language, but data.prompt is forced; set data.<...>.language or use "
                "data.prompt: tagged"
            )
        compact = self._ids(row, forced)
        counts = [
            self._family.num_tokens(self._config, self._num_samples(m, self._family.min_samples)) for m in row.media
        ]
        answer = None
        if row.text is not None:
            spoken = row.language if row.text else None  # silence is of no language, whatever its source is in
            answer = self._family.answer(text=row.text, language=spoken, forced=self._forced)
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

    def conversation(
        self, turns: Turns, *, learn_from: int = 0, end_ids: Sequence[int] = (), where: str = ""
    ) -> Rendered:
        """A conversation, with what the assistant wrote from turn ``learn_from`` on to learn from, end tokens included.

        One answer at the end of a prompt is the prompt, the answer's text and the end token. Several are what the chat
        template makes of them, so it must render a conversation as a continuation of its beginning. What follows the
        last answer is left out.

        Args:
            end_ids: further ids that may end a turn, beside the family's own.
            where: "file:line" for messages.

        Raises:
            DataError: the template rewrites earlier turns, or closes an answer without an end token; there is none; a
                turn holds an end token.
        """
        answers = [i for i, turn in enumerate(turns) if i >= learn_from and turn["role"] == "assistant"]
        ends = {end_id(self._family, self._tokenizer), *end_ids}
        self._check_contents(turns, ends, where)
        if answers == [len(turns) - 1]:
            ids = self._prompt_ids(turns[:-1], where)
            own = [*self._family.tokenize(self._tokenizer, turns[-1]["content"]), end_id(self._family, self._tokenizer)]
            return Rendered((*ids, *own), tuple(range(len(ids), len(ids) + len(own))))
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{where}: {self._name} has no chat template, so a conversation with several answers has no form. Give "
                "the tokenizer one, or learn from the last answer only (sft.turns: last)."
            )
        return self._turn_by_turn(turns, answers, ends, where)

    def steps(self, turns: Turns, steps: Sequence[str], where: str) -> Rendered:
        """A prompt and a solution of several steps, each tokenised alone, with the last token of each to learn from."""
        ids, positions = self._prompt_ids(turns, where), list[int]()
        for step in steps:
            ids += self._family.tokenize(self._tokenizer, step)
            positions.append(len(ids) - 1)
        return Rendered(tuple(ids), tuple(positions))

    def _turn_by_turn(self, turns: Turns, answers: Sequence[int], ends: set[int], where: str) -> Rendered:
        """Text up to an answer, the answer to its end token, text up to the next, ...; each piece tokenised alone."""
        ids: list[int] = []
        positions: list[int] = []
        whole, used, is_open = "", 0, False  # what was rendered, how much of it is in ids, an answer without its end
        for index in answers:
            before = self._text(turns[:index], where, answer=True)
            self._check_prefix(whole, before, index, where)
            whole = self._text(turns[: index + 1], where, answer=False)
            self._check_prefix(before, whole, index, where)
            between = self._family.tokenize(self._tokenizer, before[used:])
            if is_open:
                self._check_end(between[:1], ends, where)
                positions.append(len(ids))
            ids += between
            own, is_open = self._own_part(whole[len(before) :], ends)
            used = len(before) + len(own)
            own_ids = self._family.tokenize(self._tokenizer, own)
            positions += range(len(ids), len(ids) + len(own_ids))
            ids += own_ids
        if is_open:
            positions.append(len(ids))
            ids.append(end_id(self._family, self._tokenizer))
        return Rendered(tuple(ids), tuple(positions))

    def _own_part(self, text: str, ends: set[int]) -> tuple[str, bool]:
        """What the assistant wrote, up to its end token, and whether that is missing: the next turn's opens with it."""
        found = [(at, token) for token in self._tokens(ends) if (at := text.find(token)) >= 0]
        if not found:
            return text, True
        at, token = min(found)
        return text[: at + len(token)], False

    def _tokens(self, ids: set[int]) -> list[str]:
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(sorted(ids))]

    def _check_contents(self, turns: Turns, ends: set[int], where: str) -> None:
        for number, turn in enumerate(turns):
            for token in self._tokens(ends):
                if token in turn["content"]:
                    raise DataError(f"{where}: turn {number} holds {token!r}, which ends a turn; remove it.")

    def _check_prefix(self, beginning: str, text: str, index: int, where: str) -> None:
        if text.startswith(beginning):
            return
        at = next((i for i, (a, b) in enumerate(zip(beginning, text, strict=False)) if a != b), len(text))
        raise DataError(
            f"{where}: the chat template of {self._name} rewrites earlier turns once turn {index} is there "
            f"({beginning[max(0, at - 10) : at + 30]!r} becomes {text[max(0, at - 10) : at + 30]!r}), so that no one "
            "row of tokens holds all answers as they were sampled. Learn from the last one only (sft.turns: last), or "
            "give the tokenizer a template that only appends."
        )

    def _check_end(self, first: Sequence[int], ends: set[int], where: str) -> None:
        if not set(first) & ends:
            raise DataError(
                f"{where}: the chat template of {self._name} closes an answer without an end token "
                f"({', '.join(self._tokens(ends))}), so a policy would never learn to stop. Set the tokenizer's "
                "eos_token to what closes a turn, or correct the template."
            )

    @property
    def _name(self) -> str:
        return str(self._tokenizer.name_or_path or self._family.name)

    def _ids(self, row: Row, forced: str | None) -> list[int]:
        if row.media and self._family.placeholder is None:
            raise DataError(f"row {row.id} holds audio, but the model ({self._family.name}) reads text only")
        if not row.media and self._family.placeholder is not None:
            raise DataError(f"row {row.id} holds no audio, but the model ({self._family.name}) transcribes audio")
        if len(row.media) > 1:
            raise DataError(
                f"row {row.id} has {len(row.media)} clips, and {self._family.name} hears one a prompt: join them, or "
                "make a row of each"
            )
        if row.media:
            text = self._family.prompt(context=row.context, force_language=forced)
            return self._family.tokenize(self._tokenizer, text)
        return self._prompt_ids(row.messages, row.where)

    def _prompt_ids(self, turns: Turns, where: str) -> list[int]:
        """Token ids of chat turns up to where the answer starts."""
        if self._tokenizer.chat_template is None:
            text = "\n".join(turn["content"] for turn in turns)
            return list(self._tokenizer(text, add_special_tokens=True)["input_ids"])
        return self._family.tokenize(self._tokenizer, self._text(turns, where, answer=True))

    def _text(self, turns: Turns, where: str, *, answer: bool) -> str:
        """By the chat template; with ``answer``, up to where the assistant writes next."""
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=answer
            )
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise DataError(f"{where}: the chat template of {self._name} refuses turns of {roles}: {error}") from error

    def _expand(self, compact: list[int], counts: list[int], row: Row) -> list[int]:
        if self._family.placeholder is None:
            return compact
        token = self._tokenizer.convert_tokens_to_ids(self._family.placeholder)
        if compact.count(token) != len(counts):
            raise DataError(
                f"row {row.id} has {len(counts)} clips, but its prompt has {compact.count(token)} audio placeholders; "
                "is a placeholder token written in the row's context?"
            )
        remaining = iter(counts)
        return [t for i in compact for t in ([i] * next(remaining) if i == token else [i])]


def _columns(row: Row) -> dict[str, Any]:
    """Every column of the row, canonical names first."""
    canonical = asdict(row)
    extra = canonical.pop("extra")
    canonical.pop("media")
    return {**extra, **canonical}
