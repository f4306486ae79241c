"""Families with a Whisper-like encoder that hears windows of fixed length, each padded with silence.

Qwen2-Audio (arXiv:2407.10759), GLM-ASR, Voxtral (arXiv:2507.13264), Audio Flamingo 3 (arXiv:2507.08128). A checkpoint's
window is 30 s; it is read from its config, so that tests can have shorter ones.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.errors import DataError, ModelError
from skirl.models.family import HOP, SAMPLE_RATE, Family, ParsedAnswer, module, valid_rows
from skirl.speech.languages import LANGUAGES

__all__ = ["AUDIO_FLAMINGO_3", "GLM_ASR", "QWEN2_AUDIO", "VOXTRAL"]

_ROLES = {
    "encoder": "model.audio_tower",
    "adapter": "model.multi_modal_projector",
    "language_model": "model.language_model",
    "head": "lm_head",
}
# What transformers itself writes for these families, and what vLLM and older releases read.
_DISK = (
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
_POSITIONS = ("model.audio_tower.embed_positions.weight",)
_WINDOWS_A_PASS = 32


@dataclass(frozen=True)
class WindowedFamily(Family):
    """Common part. Features: input_features [W, mel, F], input_features_mask [W, F] for W windows.

    Attributes:
        max_windows: windows a clip may have; None has no limit.
        frames_a_row: after the encoder's stride of 2, so many frames make one row.
    """

    max_windows: int | None = None
    frames_a_row: int = 2

    def features(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        """See class; each window has its own spectrogram floor, as in the processors of these families."""
        extractor = processor.feature_extractor
        window = extractor.n_samples
        padded = self._padded(samples)
        self._check_windows(len(padded), window)
        found = extractor(
            [padded[start : start + window] for start in range(0, len(padded), window)],
            sampling_rate=SAMPLE_RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {"input_features": found["input_features"], "input_features_mask": found["attention_mask"].long()}

    def num_tokens(self, config: Any, num_samples: int) -> int:
        """Whole windows and the rest; a frame counts from its first sample on."""
        window = _positions(config) * 2 * HOP
        total = self._audible(num_samples)
        self._check_windows(total, window)
        full, rest = divmod(total, window)
        return full * self._rows(window // HOP) + self._rows(-(-rest // HOP))

    def encode_many(self, model: nn.Module, features: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Windows of all clips go through the encoder as a batch; through a frozen one in parts, to save memory.

        A trained encoder is called once: ranks that gather its weights at each call must call it equally often.
        """
        tower = module(model, self.roles["encoder"])
        windows = torch.cat([f["input_features"] for f in features])
        masks = torch.cat([f["input_features_mask"] for f in features])
        counts = [self._rows(int(frames)) for frames in masks.sum(-1)]
        size = len(windows) if any(p.requires_grad for p in tower.parameters()) else _WINDOWS_A_PASS
        parts = [self._encode(tower, w, m) for w, m in zip(windows.split(size), masks.split(size), strict=True)]
        rows = valid_rows(torch.cat(parts), torch.tensor(counts))
        ends = np.cumsum([0, *(len(f["input_features"]) for f in features)])
        return list(rows.split([sum(counts[a:b]) for a, b in pairwise(ends)]))

    def check_processor(self, config: Any, processor: Any) -> None:
        """Window length must agree."""
        extractor, positions = processor.feature_extractor, _positions(config)
        if extractor.nb_max_frames != 2 * positions:
            raise ModelError(
                f"the feature extractor makes windows of {extractor.nb_max_frames} frames (chunk_length "
                f"{extractor.chunk_length} s), the encoder has positions for {2 * positions}: the processor's files do "
                "not belong to this checkpoint"
            )

    def _encode(self, tower: Any, windows: Tensor, masks: Tensor) -> Tensor:
        """[W, R, D] rows of whole windows, padding included."""
        return tower(windows).last_hidden_state

    def _rows(self, frames: int) -> int:
        return ((frames - 1) // 2 + 1) // self.frames_a_row

    def _check_windows(self, num_samples: int, window: int) -> None:
        if self.max_windows is not None and num_samples > self.max_windows * window:
            raise self._too_long(num_samples, self.max_windows * window / SAMPLE_RATE)


def _positions(config: Any) -> int:
    """Rows of the encoder's position table: half the frames of a window."""
    audio = config.audio_config
    return audio.max_source_positions if hasattr(audio, "max_source_positions") else audio.max_position_embeddings


def _instruction(text: str, context: str) -> str:
    return f"{text}\nContext: {context}" if context else text


# ---------------------------------------------------------------------------------------------------------- Qwen2-Audio
@dataclass(frozen=True)
class Qwen2Audio(WindowedFamily):
    """Padding is masked in the encoder; two frames are averaged into a row; one window only."""

    def prompt(self, *, context: str, force_language: str | None) -> str:
        """The released chat template; language and context are part of the instruction."""
        into = f" into {force_language} text" if force_language else " into text"
        asked = _instruction(f"Transcribe the audio{into}.", self._no_control(context, "context"))
        return (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\nAudio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\n{asked}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def _encode(self, tower: Any, windows: Tensor, masks: Tensor) -> Tensor:
        from transformers.masking_utils import create_bidirectional_mask

        positions = torch.arange(masks.shape[1] // 2, device=masks.device)
        heard = positions[None, :] < ((masks.sum(-1) - 1) // 2 + 1)[:, None]
        attended = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=torch.zeros(*heard.shape, 1, dtype=windows.dtype, device=windows.device),
            attention_mask=heard.long(),
        )
        return tower(windows, attention_mask=attended).last_hidden_state


QWEN2_AUDIO = Qwen2Audio(
    name="Qwen2-Audio",
    model_type="qwen2_audio",
    model_class="Qwen2AudioForConditionalGeneration",
    roles=_ROLES,
    placeholder="<|AUDIO|>",
    banned=("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    control=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    end="<|im_end|>",
    min_samples=1600,
    max_windows=1,
    constant=_POSITIONS,
    disk_prefixes=_DISK,
)


# -------------------------------------------------------------------------------------------------------------- GLM-ASR
@dataclass(frozen=True)
class GlmAsr(WindowedFamily):
    """Padding is not masked in the encoder; four frames are joined into a row."""

    def prompt(self, *, context: str, force_language: str | None) -> str:
        """The released chat template, with its second user marker after the audio."""
        into = f" into {force_language} text" if force_language else " into text"
        asked = _instruction(f"Please transcribe this audio{into}", self._no_control(context, "context"))
        return f"<|user|>\n<|begin_of_audio|><|pad|><|end_of_audio|><|user|>\n{asked}<|assistant|>\n"

    def _encode(self, tower: Any, windows: Tensor, masks: Tensor) -> Tensor:
        return _joined(tower, windows)


def _joined(tower: Any, windows: Tensor) -> Tensor:
    """Consecutive encoder outputs side by side, as wide as the adapter's input (intermediate_size)."""
    return tower(windows).last_hidden_state.reshape(len(windows), -1, tower.config.intermediate_size)


GLM_ASR = GlmAsr(
    name="GLM-ASR",
    model_type="glmasr",
    model_class="GlmAsrForConditionalGeneration",
    roles=_ROLES,
    placeholder="<|pad|>",
    banned=("<|begin_of_audio|>", "<|pad|>", "<|end_of_audio|>"),
    control=("<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
    end="<|user|>",
    min_samples=1600,
    max_seconds=630.0,  # 21 windows; more is cut off in silence by transformers' processor
    frames_a_row=4,
    disk_prefixes=_DISK,
)


# -------------------------------------------------------------------------------------------------------------- Voxtral
@dataclass(frozen=True)
class Voxtral(WindowedFamily):
    """Every window counts whole, silence included; the spectrogram is made of the whole clip before it is cut."""

    def prompt(self, *, context: str, force_language: str | None) -> str:
        """Mistral's transcription request, which has no place for a context."""
        if context:
            raise DataError(f"context {context[:80]!r}: {self.name}'s transcription request has no place for one")
        known = LANGUAGES.get(force_language) if force_language else None
        if force_language and known is None:
            raise DataError(
                f"language {force_language!r} cannot be forced: use a full English name out of {', '.join(LANGUAGES)}"
            )
        return "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]" + (f"lang:{known.codes[0]}" if known else "") + "[TRANSCRIBE]"

    def tokenize(self, tokenizer: Any, text: str) -> list[int]:
        """Mistral's tokenizers read control tokens in text as plain text, so they are looked up one by one."""
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, (*self.control, *self.banned))) + ")", text):
            if part in self.control or part in self.banned:
                ids.append(tokenizer.convert_tokens_to_ids(part))
            elif part:
                ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    def features(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        """See class; the mask is all ones."""
        extractor = processor.feature_extractor
        mel = extractor(
            self._padded(samples),
            sampling_rate=SAMPLE_RATE,
            padding=True,
            truncation=False,
            pad_to_multiple_of=extractor.n_samples,
            return_tensors="pt",
        )["input_features"][0]
        windows = mel.view(mel.shape[0], -1, extractor.nb_max_frames).transpose(0, 1).contiguous()
        ones = torch.ones(windows.shape[0], windows.shape[2], dtype=torch.long)
        return {"input_features": windows, "input_features_mask": ones}

    def num_tokens(self, config: Any, num_samples: int) -> int:
        """Whole windows."""
        positions = _positions(config)
        return -(-self._audible(num_samples) // (positions * 2 * HOP)) * (positions // self.frames_a_row)

    def _encode(self, tower: Any, windows: Tensor, masks: Tensor) -> Tensor:
        return _joined(tower, windows)


VOXTRAL = Voxtral(
    name="Voxtral",
    model_type="voxtral",
    model_class="VoxtralForConditionalGeneration",
    roles=_ROLES,
    placeholder="[AUDIO]",
    banned=("[AUDIO]", "[BEGIN_AUDIO]"),
    control=("<s>", "</s>", "[INST]", "[/INST]", "[TRANSCRIBE]"),
    end="</s>",
    min_samples=1600,
    frames_a_row=4,
    constant=_POSITIONS,
    disk_prefixes=_DISK,
)


# ----------------------------------------------------------------------------------------------------- Audio Flamingo 3
_WRAPPED = re.compile(
    r"The (?:spoken content of the audio|transcription of the audio|content of the input audio) is "
    r"(?P<quote>['\"])(?P<text>.*)(?P=quote)\.?",
    re.DOTALL,
)


@dataclass(frozen=True)
class AudioFlamingo3(WindowedFamily):
    """Padding is masked in the encoder; two frames are averaged into a row."""

    def prompt(self, *, context: str, force_language: str | None) -> str:
        """The released chat template."""
        into = f" in {force_language}" if force_language else ""
        asked = _instruction(f"Transcribe the input speech{into}.", self._no_control(context, "context"))
        return (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n<sound>{asked}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def parse(self, text: str, *, forced_language: str | None) -> ParsedAnswer:
        """The sentence that the released model wraps transcripts in is taken off; anything else stays as it is."""
        found = _WRAPPED.fullmatch(text.strip())
        return ParsedAnswer(forced_language, (found["text"] if found else text).strip())

    def _encode(self, tower: Any, windows: Tensor, masks: Tensor) -> Tensor:
        return tower(windows, input_features_mask=masks).last_hidden_state


AUDIO_FLAMINGO_3 = AudioFlamingo3(
    name="Audio Flamingo 3",
    model_type="audioflamingo3",
    model_class="AudioFlamingo3ForConditionalGeneration",
    roles=_ROLES,
    placeholder="<sound>",
    banned=("<sound>",),
    control=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    end="<|im_end|>",
    min_samples=1600,
    max_seconds=600.0,
    constant=_POSITIONS,
    disk_prefixes=_DISK,
)
