"""Samples of the clips that an engine was asked for last: siblings share them, and so do groups that come again."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from skirl.records import Media

__all__ = ["DecodedClips", "Samples"]

Samples = npt.NDArray[np.float32]


class DecodedClips:
    """Least recently used ones go first.

    Args:
        load: decodes a clip, padded with zeros to at least the given number of samples; called in a thread.
        max_bytes: what is kept between calls.
    """

    def __init__(self, load: Callable[[Media, int], Samples], max_bytes: int = 64 << 20) -> None:
        self._load, self._max_bytes = load, max_bytes
        self._kept: OrderedDict[str, Samples] = OrderedDict()
        self._num_bytes = 0

    async def get(self, clips: Iterable[Media], min_samples: int) -> dict[str, Samples]:
        """Samples by ``Media.key``. Raises what ``load`` raises."""
        found: dict[str, Samples] = {}
        for media in clips:
            if media.key in found:
                continue
            samples = self._kept.get(media.key)
            if samples is None:
                samples = await asyncio.to_thread(self._load, media, min_samples)
            self._keep(media.key, samples)
            found[media.key] = samples
        return found

    def _keep(self, key: str, samples: Samples) -> None:
        if key not in self._kept:
            self._kept[key] = samples
            self._num_bytes += samples.nbytes
        self._kept.move_to_end(key)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
