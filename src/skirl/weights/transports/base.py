"""What a transport is: two ends of a pipe for buffers of bytes.

sender: buffer -> (filled by the caller) -> payload -> transmit      receiver: open -> (read by the caller) -> release
"""

from typing import Protocol

from torch import Tensor

__all__ = ["NUM_SLOTS", "ReceivingEnd", "SendingEnd"]

NUM_SLOTS = 2
"""Buffers of a sender: one is filled while the other is read."""


class SendingEnd(Protocol):
    """The trainer's end, in one training rank."""

    def buffer(self, slot: int, num_bytes: int) -> Tensor:
        """[>= num_bytes] uint8 to be filled; grows when needed, else the same memory every time."""
        ...

    def payload(self, slot: int, num_bytes: int) -> dict[str, bytes]:
        """What a receiver needs to reach the filled buffer, by GPU id ("": any). The bytes are in place when this
        returns.
        """
        ...

    def transmit(self, slot: int, num_bytes: int) -> None:
        """Sends the buffer, where the receivers cannot reach it themselves; returns when it may be filled again."""
        ...

    def close(self) -> None:
        """Gives everything back; harmless to repeat."""
        ...


class ReceivingEnd(Protocol):
    """The engine's end, in one of its worker processes."""

    def open(self, payload: dict[str, bytes], num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the worker's device; valid until ``release``."""
        ...

    def release(self) -> None:
        """The bytes have been read, on the device too: the sender may fill the buffer again."""
        ...

    def close(self) -> None:
        """Gives everything back; harmless to repeat."""
        ...
