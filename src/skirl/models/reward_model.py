"""A local reward model: chat turns and a response in, one number out. It reads text through its own tokenizer.

RewardText -> chat template -> token ids -> packed rows under a cap -> score at the last token -> standardised

A response that the budget cut off is read as if it had ended: every response that a reward model was trained on had,
and its numbers mean something at an end alone. What a cut-off response is worth less is another term's to say.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from skirl.config.rewards import RewardModelConfig
from skirl.errors import ModelError
from skirl.models.attention import PACKED_ATTENTION, register_packed_attention
from skirl.models.loading import end_id
from skirl.models.policy import PACKING_TOLERANCE, check_packing, text_row
from skirl.models.scalar_heads import TextForm
from skirl.models.value import ValueModel, load_value_model
from skirl.records import RewardText, ScoreFailure

__all__ = ["RewardModel", "reward_text_ids"]


class RewardModel:
    """Scores responses with a frozen checkpoint.

    Args:
        device: where it computes.

    Raises:
        ModelError: the checkpoint has no scalar head, hears audio, its tokenizer has no chat template, or it gives a
            number at every token and does not say which one counts.
    """

    def __init__(self, config: RewardModelConfig, device: torch.device) -> None:
        register_packed_attention()
        loaded = load_value_model(config.path, kind=None, dtype=config.dtype, attn_implementation=PACKED_ATTENTION)
        if loaded.family.placeholder is not None:
            raise ModelError(f"{config.path} hears audio; a reward model of `reward.models` reads text only")
        if loaded.tokenizer.chat_template is None:
            raise ModelError(
                f"{config.path}: the tokenizer of this reward model has no chat template, so that turns and response "
                "have no form; put the chat_template.jinja that it was trained with beside its weights"
            )
        loaded.model.requires_grad_(False).to(device)
        self._model = ValueModel(loaded, None, reads="at")
        self._separator = self._model.scalar_head.separator
        if self._model.scalar_head.kind == "token" and self._separator is None:
            raise ModelError(
                f"{config.path} gives a number at every token (...ForTokenClassification), and its config.json does "
                "not say which one scores a response: it is a critic, or from elsewhere. Use a reward model "
                "(`skirl rm`), or a process reward model of `skirl prm`, which stores what ends a step"
            )
        check_packing(self._model, PACKING_TOLERANCE[config.dtype])
        self._tokenizer = loaded.tokenizer
        self._form: TextForm = self._model.scalar_head.form or "chat"
        self._end = end_id(loaded.family, loaded.tokenizer) if self._form == "answer_and_end" else None
        self._pad = loaded.config.pad_token_id if self._model.scalar_head.kind == "sequence" else None
        self._cap, self._standardize = config.max_tokens_per_batch, config.standardize
        self._name = str(config.path)

    def scores(self, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """One score a text, in order, standardised where the checkpoint says how; a failure does not touch the rest."""
        found: list[float | ScoreFailure | None] = [None] * len(texts)
        ids: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            rendered = self._ids(text)
            if isinstance(rendered, ScoreFailure):
                found[index] = rendered
            else:
                ids[index] = rendered
        for batch in self._batches(ids):
            for index, score in zip(batch, self._score([ids[i] for i in batch]), strict=True):
                found[index] = self._standardized(score)
        assert all(one is not None for one in found)
        return [one for one in found if one is not None]

    def _ids(self, text: RewardText) -> list[int] | ScoreFailure:
        from jinja2 import TemplateError

        try:
            ids = reward_text_ids(
                self._tokenizer, text, form=self._form, end=self._end, separator=self._separator or ""
            )
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in text.messages)
            return ScoreFailure("raised", f"the chat template of {self._name} refuses turns of {roles}: {error}")
        if len(ids) > self._cap:
            return ScoreFailure(
                "too_long",
                f"prompt and response have {len(ids)} tokens of {self._name}, which takes {self._cap} at once "
                "(reward.models.NAME.max_tokens_per_batch)",
            )
        return ids if ids else ScoreFailure("raised", f"prompt and response are empty to the tokenizer of {self._name}")

    def _batches(self, ids: dict[int, list[int]]) -> Iterator[list[int]]:
        """Texts of up to the cap of tokens; long ones together, so that rows are full."""
        batch: list[int] = []
        size = 0
        for index in sorted(ids, key=lambda i: -len(ids[i])):
            if batch and size + len(ids[index]) > self._cap:
                yield batch
                batch, size = [], 0
            batch.append(index)
            size += len(ids[index])
        if batch:
            yield batch

    @torch.no_grad()
    def _score(self, parts: Sequence[list[int]]) -> list[float]:
        row = text_row([torch.tensor(part, device=self._model.device) for part in parts])
        hidden = self._model.hidden(row)
        last = [int(start) + self._last(part) for start, part in zip(row.cu_seqlens.tolist(), parts, strict=False)]
        return self._model.head(hidden[torch.tensor(last, device=hidden.device)]).tolist()

    def _last(self, part: list[int]) -> int:
        """Position that ...ForSequenceClassification reads: the last token that is not padding, wherever it stands."""
        return next((i for i in range(len(part) - 1, -1, -1) if part[i] != self._pad), 0)

    def _standardized(self, score: float) -> float | ScoreFailure:
        if not math.isfinite(score):
            return ScoreFailure("not_finite", f"{self._name} gave {score}")
        head = self._model.scalar_head
        if not self._standardize or head.mean is None or head.std is None:
            return score
        return (score - head.mean) / head.std


def reward_text_ids(
    tokenizer: Any, text: RewardText, *, form: TextForm, end: int | None, separator: str = ""
) -> list[int]:
    """Token ids of chat turns and response, as the reward model was trained on them; see ``TextForm``.

    Args:
        end: of a response, for "answer_and_end".
        separator: cuts the response into steps, each of which is tokenised alone and ends with it; blank ones are left
            out. "" takes the response as it is.

    Raises: jinja2.TemplateError: the chat template refuses the turns.
    """
    turns = [dict(turn) for turn in text.messages]

    def tokens(rendered: str) -> list[int]:
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    if form == "chat":
        answered = [*turns, {"role": "assistant", "content": text.response}]
        return tokens(tokenizer.apply_chat_template(answered, tokenize=False))
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    parts = [text.response]
    if separator:
        parts = [step + separator for step in text.response.split(separator) if step.strip()] or [separator]
    ids = [*tokens(prompt), *(token for part in parts for token in tokens(part))]
    return [*ids, end] if form == "answer_and_end" and end is not None else ids
