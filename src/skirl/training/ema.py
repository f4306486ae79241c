"""Exponential moving average of what an optimizer steps: float32, beside the weights, of whole tensors or of shards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from skirl.config.schema import EMAConfig
from skirl.errors import CheckpointError

__all__ = ["MovingAverage"]


class MovingAverage:
    """average <- decay * average + (1 - decay) * master, after each optimizer step; it starts as the first weights.

    Masters are float32 where weights are bfloat16: an average kept in bfloat16 would never move, since a step of
    1 - decay of a difference is below its resolution.

    Args: masters: what the optimizer steps on this rank, the same tensors in the same order with each call.
    """

    def __init__(self, masters: Sequence[Tensor], config: EMAConfig) -> None:
        self._decay = config.decay
        self.averages = [m.detach().to(torch.float32, copy=True) for m in masters]
        """In the order of the masters."""

    @torch.no_grad()
    def follow(self, masters: Sequence[Tensor]) -> None:
        """One optimizer step was done."""
        for average, master in zip(self.averages, masters, strict=True):
            average.lerp_(master.detach().float(), 1.0 - self._decay)

    @contextmanager
    def in_place_of(self, masters: Sequence[Tensor]) -> Iterator[None]:
        """Float32 masters hold the averages meanwhile, and the averages hold them; exact, one tensor more at a time."""
        self._exchange(masters)
        try:
            yield
        finally:
            self._exchange(masters)

    @torch.no_grad()
    def _exchange(self, masters: Sequence[Tensor]) -> None:
        for average, master in zip(self.averages, masters, strict=True):
            assert master.dtype == torch.float32
            kept = master.detach().clone()
            master.detach().copy_(average)
            average.copy_(kept)

    def save(self, file: Path) -> None:
        """Every rank its own file."""
        torch.save(self.averages, file)

    @torch.no_grad()
    def load(self, file: Path) -> None:
        """What ``save`` wrote, bit for bit. Raises CheckpointError: it is not there, or of other tensors."""
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing: the checkpoint was saved without trainer.ema; resume without it as well"
            )
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if [t.shape for t in saved] != [t.shape for t in self.averages]:
            raise CheckpointError(f"{file} holds averages of other tensors: another model, or another number of ranks")
        for average, tensor in zip(self.averages, saved, strict=True):
            average.copy_(tensor)
