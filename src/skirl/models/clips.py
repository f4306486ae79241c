"""One feature processor for engine and trainer: features once a clip, encoder output once where the encoder is frozen.

Media -> samples (16 kHz, padded) -> features -> encoder rows [L, D]; each level is kept, newest first, up to a size
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.models.families import Family
from skirl.records import Media

__all__ = ["ClipStore"]


class _Bounded:
    """Least recently used entries, bounded by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: OrderedDict[str, tuple[int, Any]] = OrderedDict()
        self._room = max_bytes

    def get(self, key: str) -> Any | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[1]

    def put(self, key: str, value: Any, size_bytes: int) -> None:
        self._entries[key] = (size_bytes, value)
        self._room -= size_bytes
        while self._room < 0 and len(self._entries) > 1:
            _, (size, _) = self._entries.popitem(last=False)
            self._room += size


class ClipStore:
    """What the encoder needs of each clip, and what it made of it.

    Args:
        model: the Hugging Face model that holds the encoder.
        load: decodes a clip to float32 samples, padded to at least the given number.
        encoder_frozen: encoder output is then a constant of the clip and is kept.
        max_bytes: size of what is kept, for features and for encoder output each.
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        processor: Any,
        *,
        load: Callable[[Media, int], np.ndarray],
        encoder_frozen: bool,
        max_bytes: int = 1 << 30,
    ) -> None:
        self._model, self._family, self._processor, self._load = model, family, processor, load
        self._encoder_frozen = encoder_frozen
        self._features = _Bounded(max_bytes)
        self._rows = _Bounded(max_bytes)
        self.num_encoded = 0
        """Encoder passes so far, clips."""

    def features(self, media: Media) -> dict[str, Tensor]:
        """The encoder's input for one clip, on the host."""
        found = self._features.get(media.key)
        if found is None:
            found = self._family.features(self._processor, self._load(media, self._family.min_samples))
            self._features.put(media.key, found, sum(t.nbytes for t in found.values()))
        return found

    def encode(self, clips: Sequence[Media]) -> list[Tensor]:
        """Encoder rows [L, D] of each clip; equal clips are encoded once. With gradient if the encoder is trained."""
        distinct = {media.key: media for media in clips}
        rows: dict[str, Tensor] = {}
        if self._encoder_frozen:
            rows = {key: found for key in distinct if (found := self._rows.get(key)) is not None}
        missing = [media for key, media in distinct.items() if key not in rows]
        if missing:
            rows.update(zip([m.key for m in missing], self._run(missing), strict=True))
        return [rows[media.key] for media in clips]

    def silence(self) -> Tensor:
        """Encoder rows [L, D] of the shortest clip, of zeros; nothing is kept."""
        samples = np.zeros(self._family.min_samples, dtype=np.float32)
        return self._pass([self._family.features(self._processor, samples)])[0]

    def _pass(self, features: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        weight = next(self._model.get_submodule(self._family.roles["encoder"]).parameters())
        inputs = [{name: _like(value, weight) for name, value in clip.items()} for clip in features]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._encoder_frozen):
            return self._family.encode_many(self._model, inputs)

    def _run(self, clips: list[Media]) -> list[Tensor]:
        rows = self._pass([self.features(media) for media in clips])
        self.num_encoded += len(clips)
        if self._encoder_frozen:
            rows = [row.clone() for row in rows]  # views would keep the whole pass alive, whatever the bound
            for media, row in zip(clips, rows, strict=True):
                self._rows.put(media.key, row, row.nbytes)
        return rows


def _like(value: Tensor, weight: Tensor) -> Tensor:
    return value.to(weight.device, weight.dtype) if value.is_floating_point() else value.to(weight.device)
