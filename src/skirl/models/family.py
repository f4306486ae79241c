"""What every model family answers: role names, prompt, clip -> features -> encoder rows, token count, answer parser."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.errors import DataError, ModelError

__all__ = ["SAMPLE_RATE", "Family", "ParsedAnswer"]

SAMPLE_RATE = 16000
"""Samples a second that every family hears."""

HOP = 160
"""Samples a mel frame; 10 ms in every family."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart.

    Attributes:
        language: full English name; None where the answer names none, says "None", or is malformed.
        transcript: outer blanks stripped, repetitions kept.
    """

    language: str | None
    transcript: str


@dataclass(frozen=True)
class Family(ABC):
    """One kind of model; one instance a ``model_type`` stands in ``families.FAMILIES``.

    Attributes:
        name: for messages.
        model_type: of config.json.
        model_class: class of transformers that loads it.
        roles: module paths in the transformers model: language_model and head, for audio also encoder and adapter.
        placeholder: token that stands for the audio; one a clip in ``prompt``; None for text models.
        banned: audio tokens, never sampled: a sampled placeholder would ask for features that do not exist.
        control: tokens that open or close a turn; text from the data must not hold them.
        end: token that ends an answer; None is the tokenizer's eos token.
        min_samples: shorter clips are zero-padded to this before ``features``, in every engine.
        max_seconds: longest clip the family hears without loss; None has no limit.
        constant: parameters that are never trained, as their own authors fixed them (position tables).
        disk_prefixes: prefixes of our (transformers') tensor names -> names in checkpoint files, longest first.
    """

    name: str
    model_type: str
    model_class: str
    roles: Mapping[str, str]
    placeholder: str | None = None
    banned: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    end: str | None = None
    min_samples: int = 0
    max_seconds: float | None = None
    constant: tuple[str, ...] = ()
    disk_prefixes: tuple[tuple[str, str], ...] = ()

    # ------------------------------------------------------------------------------------------------------------ text
    @abstractmethod
    def prompt(self, *, context: str, force_language: str | None) -> str:
        """Chat text up to where the answer starts, with ONE placeholder.

        Args:
            context: free text or hot words, may be empty.
            force_language: full English name that the prompt fixes; None leaves the language to the policy.

        Raises:
            DataError: the context holds a control token, or the family has no place for it.
        """

    def answer(self, *, text: str, language: str | None, forced: bool) -> str:
        """What a perfect policy writes after ``prompt``, without the end token. Bare text, unless a family has tags."""
        self._no_control(text, "reference text")
        return text

    def parse(self, text: str, *, forced_language: str | None) -> ParsedAnswer:
        """Takes raw response text apart; never raises.

        Args:
            text: the response without its stop token.
            forced_language: the language that the prompt fixed; it is then the answer's language.
        """
        return ParsedAnswer(forced_language, text.strip())

    def tokenize(self, tokenizer: Any, text: str) -> list[int]:
        """Token ids of prompt or answer text; control tokens in it become their ids and nothing is added."""
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    # ----------------------------------------------------------------------------------------------------------- audio
    @abstractmethod
    def features(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        """Encoder input of ONE clip, without a batch axis, on the host; a pure function of the samples.

        Args:
            processor: the model's own.
            samples: [num_samples] float32, mono, 16 kHz; padded to ``min_samples`` here if it is shorter.
        """

    @abstractmethod
    def num_tokens(self, config: Any, num_samples: int) -> int:
        """Placeholders of a clip of so many samples at 16 kHz (before or after padding to ``min_samples``).

        Raises:
            DataError: the clip is longer than the family hears.
        """

    @abstractmethod
    def encode_many(self, model: nn.Module, features: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """For each clip [L, D]: the rows that the adapter gets, valid ones only; L is ``num_tokens``.

        The adapter acts on each row alone, so rows of several clips may be joined before it.

        Args:
            model: the transformers model. features: of each clip, on the encoder's device and in its type.
        """

    def encode(self, model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
        """``encode_many`` of one clip."""
        return self.encode_many(model, [features])[0]

    @abstractmethod
    def check_processor(self, config: Any, processor: Any) -> None:
        """Raises ModelError where the processor and the model do not belong together."""

    # --------------------------------------------------------------------------------------------------------- helpers
    def _no_control(self, text: str, what: str) -> str:
        for token in (*self.banned, *self.control):
            if token in text:
                raise DataError(
                    f"{what} {text[:80]!r} holds {token!r}, which {self.name} reads as a control token; "
                    "remove it from the row"
                )
        return text

    def _audible(self, num_samples: int) -> int:
        """Samples after padding; refuses what would be cut off in silence."""
        if self.max_seconds is not None and num_samples > self.max_seconds * SAMPLE_RATE:
            raise self._too_long(num_samples, self.max_seconds)
        return max(num_samples, self.min_samples)

    def _too_long(self, num_samples: int, limit_s: float) -> DataError:
        return DataError(
            f"a clip of {num_samples / SAMPLE_RATE:.1f} s is longer than the {limit_s:g} s that {self.name} hears; "
            "cut it, or lower data.max_seconds"
        )

    def _padded(self, samples: np.ndarray) -> np.ndarray:
        missing = self._audible(len(samples)) - len(samples)
        return np.pad(np.asarray(samples, dtype=np.float32), (0, missing))


@dataclass(frozen=True)
class TextFamily(Family):
    """Causal language models without audio; prompts come from the tokenizer's chat template."""

    def prompt(self, *, context: str, force_language: str | None) -> str:
        """Raises ModelError: see class."""
        raise self._deaf()

    def features(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        """Raises ModelError: see class."""
        raise self._deaf()

    def num_tokens(self, config: Any, num_samples: int) -> int:
        """Raises ModelError: see class."""
        raise self._deaf()

    def encode_many(self, model: nn.Module, features: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Raises ModelError: see class."""
        raise self._deaf()

    def check_processor(self, config: Any, processor: Any) -> None:
        """There is none."""

    @staticmethod
    def _deaf() -> ModelError:
        return ModelError("this is a text model, which hears no audio: use rows without clips, or an audio model")


def module(model: nn.Module, path: str) -> Any:
    """Submodule by dotted path, as Any: its call signature differs between families."""
    return model.get_submodule(path)


def valid_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """The first ``counts[b]`` of each of the rows [B, R, D], joined: [sum(counts), D]."""
    return rows[torch.arange(rows.shape[1], device=rows.device)[None, :] < counts.to(rows.device)[:, None]]
