"""A checksum of a buffer where it lies: CPU or GPU, the same value, no copy of the buffer.

The buffer's 64-bit words, seen as a table of 4,096 columns, are summed (mod 2^64) by row and by column; the sums, and
the few bytes behind the last whole row, are hashed on the host. A word that changes changes a sum of each kind; words
that move change the sums that they leave and enter.
"""

import hashlib

import torch
from torch import Tensor

__all__ = ["checksum"]

_COLUMNS = 4_096
_MAX = (1 << 63) - 1
"""Fits the signed 64-bit integers of every codec."""


def checksum(buffer: Tensor) -> int:
    """In [0, 2^63). Finds any single changed bit, any word that moved, and swapped blocks.

    Not cryptographic: made for damaged and mixed-up buffers, not for an adversary. Reads the buffer twice.

    Args:
        buffer: [num_bytes] uint8, contiguous, starting at a multiple of 8 bytes.
    """
    whole = buffer.numel() // (_COLUMNS * 8) * _COLUMNS * 8
    digest = hashlib.sha256(buffer.numel().to_bytes(8, "little"))
    if whole:
        rows = buffer[:whole].view(torch.int64).view(-1, _COLUMNS)
        digest.update(_host_bytes(torch.cat([rows.sum(dim=1), rows.sum(dim=0)])))
    digest.update(_host_bytes(buffer[whole:]))
    return int.from_bytes(digest.digest()[:8], "little") & _MAX


def _host_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()
