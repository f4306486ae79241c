"""Qwen3-ASR: prompt and answer format, features, token count, exact packing of clips in the encoder."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.errors import ModelError
from skirl.models.family import HOP, SAMPLE_RATE, Family, ParsedAnswer, module

__all__ = ["CHAT_TEMPLATE", "QWEN3_ASR", "Qwen3ASR", "rows_of_frames"]

MARKER = "<asr_text>"
FRAMES_A_PASS = 30_000
"""Mel frames that go through a frozen encoder at once, 5 minutes: its convolutions hold 6 MB a second in bfloat16."""
_TAG = re.compile(r"language[ \t]+(\S(?:[^\n]*\S)?)", re.IGNORECASE)

CHAT_TEMPLATE = """\
{%- set turn = namespace(context='', audio='', answer=none) -%}
{%- for message in messages -%}
  {%- set turn.text = '' -%}
  {%- if message.content is string -%}
    {%- set turn.text = message.content -%}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'audio' or 'audio' in part or 'audio_url' in part -%}
        {%- set turn.audio = turn.audio + '<|audio_start|><|audio_pad|><|audio_end|>' -%}
      {%- elif part.text is defined -%}
        {%- set turn.text = turn.text + part.text -%}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if message.role == 'system' -%}
    {%- set turn.context = turn.context + turn.text -%}
  {%- elif message.role == 'assistant' -%}
    {%- set turn.answer = turn.text -%}
  {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>system\\n' + turn.context + '<|im_end|>\\n' -}}
{{- '<|im_start|>user\\n' + turn.audio + '<|im_end|>\\n' -}}
{%- if turn.answer is not none -%}
  {{- '<|im_start|>assistant\\n' + turn.answer + '<|im_end|>\\n' -}}
{%- elif add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""Chat template written beside exports in transformers' layout: the system turn is always there, user text is ignored,
an assistant turn is a training target or a forced language."""


def _strided(frames: int) -> int:
    for _ in range(3):  # three convolutions of stride 2
        frames = (frames - 1) // 2 + 1
    return frames


def rows_of_frames(frames: int, chunk: int) -> int:
    """Encoder rows of so many mel frames, which are convolved in chunks: 13 for each full chunk of 100 frames."""
    return frames // chunk * _strided(chunk) + _strided(frames % chunk)


def _parts(features: Sequence[Mapping[str, Tensor]]) -> Iterator[list[Mapping[str, Tensor]]]:
    """Clips in order, up to ``FRAMES_A_PASS`` together; a longer one alone."""
    part: list[Mapping[str, Tensor]] = []
    frames = 0
    for clip in features:
        own = clip["input_features"].shape[1]
        if part and frames + own > FRAMES_A_PASS:
            yield part
            part, frames = [], 0
        part.append(clip)
        frames += own
    if part:
        yield part


@dataclass(frozen=True)
class Qwen3ASR(Family):
    """Qwen3-ASR 0.6B and 1.7B (technical report: arXiv:2601.21337), in transformers' module names.

    The policy writes ``language English<asr_text>the words``; ``language None<asr_text>`` says that there is no
    speech. ``<asr_text>`` is an ordinary token, which decoding without special tokens keeps.
    """

    def prompt(self, *, context: str, force_language: str | None) -> str:
        """The system turn is always there, empty or not; a forced language is the start of the answer."""
        self._no_control(context, "context")
        return (
            f"<|im_start|>system\n{context}<|im_end|>\n"
            "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
            "<|im_start|>assistant\n"
        ) + (f"language {force_language}{MARKER}" if force_language else "")

    def answer(self, *, text: str, language: str | None, forced: bool) -> str:
        """Bare text after a forced language, else with its tag; an unknown language is "None"."""
        self._no_control(text, "reference text")
        return text if forced else f"language {language or 'None'}{MARKER}{text}"

    def parse(self, text: str, *, forced_language: str | None) -> ParsedAnswer:
        """Splits at the first ``<asr_text>``.

        Without the marker the whole text is the transcript; a tag that is not ``language NAME`` names no language.
        After a forced language the text is bare, and a tag in it is a mistake of the policy that stays visible.
        """
        if forced_language is not None:
            return ParsedAnswer(forced_language, text.strip())
        tag, marker, transcript = text.partition(MARKER)
        if not marker:
            return ParsedAnswer(None, text.strip())
        found = _TAG.fullmatch(tag.strip())
        language = None if found is None or found[1].lower() == "none" else found[1]
        return ParsedAnswer(language, transcript.strip())

    def features(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        """input_features [mel, F], input_features_mask [F] (1 on the clip's own frames); F full chunks."""
        found = processor.feature_extractor(
            self._padded(samples),
            sampling_rate=SAMPLE_RATE,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {"input_features": found["input_features"][0], "input_features_mask": found["attention_mask"][0].long()}

    def num_tokens(self, config: Any, num_samples: int) -> int:
        """13 a second; the last, partial second by the convolutions' rounding."""
        return rows_of_frames(self._audible(num_samples) // HOP, 2 * config.audio_config.n_window)

    def encode_many(self, model: nn.Module, features: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Clips in one pass: the encoder sees one-second chunks, and attends in windows that end with the clip.

        Through a frozen one in parts, to save memory. A trained one is called once: ranks that gather its weights at
        each call must call it equally often.
        """
        tower = module(model, self.roles["encoder"])
        if any(p.requires_grad for p in tower.parameters()):
            return self._encode(tower, features)
        return [rows for part in _parts(features) for rows in self._encode(tower, part)]

    def _encode(self, tower: Any, features: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        chunk = 2 * tower.config.n_window
        mel = torch.cat([f["input_features"] for f in features], dim=1)
        mask = torch.cat([f["input_features_mask"] for f in features])
        chunks = mel.view(mel.shape[0], -1, chunk).transpose(0, 1).contiguous()
        counts = [rows_of_frames(int(f["input_features_mask"].sum()), chunk) for f in features]
        window = tower.config.n_window_infer // chunk * _strided(chunk)
        borders = [0]
        for count in counts:
            borders += [borders[-1] + end for end in (*range(window, count, window), count)]
        output = tower(
            input_features=chunks,
            input_features_mask=mask.view(-1, chunk),
            cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=mel.device),
        )
        return list(output.last_hidden_state.split(counts))

    def check_processor(self, config: Any, processor: Any) -> None:
        """Chunk length and mel bins must agree."""
        extractor, audio = processor.feature_extractor, config.audio_config
        if (extractor.n_window, extractor.feature_size) != (audio.n_window, audio.num_mel_bins):
            raise ModelError(
                f"the feature extractor makes {extractor.feature_size} mel bins in half chunks of {extractor.n_window} "
                f"frames, the encoder wants {audio.num_mel_bins} in {audio.n_window}: the processor's files do not "
                "belong to this checkpoint"
            )


QWEN3_ASR = Qwen3ASR(
    name="Qwen3-ASR",
    model_type="qwen3_asr",
    model_class="Qwen3ASRForConditionalGeneration",
    roles={
        "encoder": "model.audio_tower",
        "adapter": "model.multi_modal_projector",
        "language_model": "model.language_model",
        "head": "lm_head",
    },
    placeholder="<|audio_pad|>",
    banned=("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    control=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    end="<|im_end|>",
    min_samples=SAMPLE_RATE,  # a lone partial chunk is convolved otherwise in vLLM than in transformers
    max_seconds=1200.0,
)
