"""The sending side of a weight commit, in one training rank.

open -> for each bucket: pack (gather, copy into a buffer, checksum) -> transmit
"""

from collections.abc import Sequence
from dataclasses import replace

from skirl.errors import WeightSyncError
from skirl.weights.buckets import Layout, pack, plan_buckets
from skirl.weights.checksum import checksum as checksum_of
from skirl.weights.endpoints import Place, Weights
from skirl.weights.manifest import Bucket, Manifest, TransportName
from skirl.weights.transports import sending_end
from skirl.weights.transports.base import NUM_SLOTS, SendingEnd

__all__ = ["WeightSender", "merge_buckets"]


class WeightSender:
    """One rank's part. Every rank makes the same calls in the same order: gathering is collective.

    Args:
        sends: this rank fills buffers; else it only takes part in gathering.
        place: of this rank.
        bucket_bytes: size of a buffer; two are held while the connection is.
        checksum: compute one for each bucket.
    """

    def __init__(self, weights: Weights, *, sends: bool, place: Place, bucket_bytes: int, checksum: bool) -> None:
        self._weights = weights
        self._sends = sends
        self._place = place
        self._bucket_bytes = bucket_bytes
        self._checksum = checksum
        self._end: SendingEnd | None = None
        self._connected: tuple[TransportName, bytes] | None = None
        self._layouts: tuple[Layout, ...] = ()
        self._next = 0

    def open(self, transport: TransportName, setup: bytes, *, version: int, whole: bool) -> Manifest:
        """Connects, unless it is connected in the same way, and lists what is going to be sent.

        Args:
            whole: everything; else what is trained.
        """
        specs = self._weights.specs()
        tensors = specs if whole else tuple(spec for spec in specs if spec.trained)
        if not tensors:
            raise WeightSyncError(f"nothing to commit: none of the model's {len(specs)} tensors is trained")
        if self._sends and self._connected != (transport, setup):
            self.abort()
            self._end = sending_end(transport, setup, self._place)
            self._connected = (transport, setup)
        self._layouts = plan_buckets(tensors, self._bucket_bytes)
        self._next = 0
        return Manifest(version, tensors, whole)

    def pack(self, index: int) -> Bucket:
        """Fills buffer ``index % 2``; buckets are packed in order. A rank that does not send has no payload."""
        if index != self._next or index >= len(self._layouts):
            raise WeightSyncError(
                f"bucket {index} was asked for; the next is {self._next} of the commit's {len(self._layouts)}"
            )
        layout = self._layouts[index]
        self._next += 1
        bucket = Bucket(index, layout.tensors, layout.offsets, layout.num_bytes, None, {})
        with self._weights.gathered([spec.name for spec in layout.tensors]) as tensors:
            if not self._sends:
                return bucket
            end = self._connection()
            slot = index % NUM_SLOTS
            capacity = max(later.num_bytes for later in self._layouts[slot::NUM_SLOTS])
            buffer = end.buffer(slot, capacity)[: layout.num_bytes]
            pack(layout, tensors, buffer)
        total = checksum_of(buffer) if self._checksum else None
        return replace(bucket, checksum=total, payload=end.payload(slot, layout.num_bytes))

    def transmit(self, index: int) -> None:
        """Sends the buffer of a packed bucket, where the transport does not let receivers fetch it."""
        if not self._sends:
            return
        if not 0 <= self._next - 1 - index < NUM_SLOTS:
            raise WeightSyncError(f"bucket {index} is in no buffer: {self._next} buckets were packed")
        self._connection().transmit(index % NUM_SLOTS, self._layouts[index].num_bytes)

    def abort(self) -> None:
        """Drops the connection and its buffers; the next ``open`` connects anew. Harmless to repeat."""
        self._layouts = ()
        self._next = 0
        self._connected = None
        if self._end is not None:
            self._end.close()
            self._end = None

    def _connection(self) -> SendingEnd:
        assert self._end is not None, "layouts exist only between open and abort"
        return self._end


def merge_buckets(buckets: Sequence[Bucket]) -> Bucket:
    """One message from those of all ranks: their payloads together; everything else must be equal.

    Raises:
        WeightSyncError: ranks disagree on what the bucket holds, or on its bytes; or none of them sends.
    """
    sent = [bucket for bucket in buckets if bucket.payload]
    if not sent:
        raise WeightSyncError(f"none of the {len(buckets)} training ranks sends weights")
    first = sent[0]
    payload: dict[str, bytes] = {}
    for bucket in sent:
        if twice := payload.keys() & bucket.payload.keys():
            raise WeightSyncError(f"two training ranks send weights for the same place: {', '.join(sorted(twice))}")
        payload |= bucket.payload
    for rank, bucket in enumerate(buckets):
        if replace(bucket, payload={}, checksum=None) != replace(first, payload={}, checksum=None):
            raise WeightSyncError(
                f"training rank {rank} packed bucket {bucket.index} of {len(bucket.tensors)} tensors in "
                f"{bucket.num_bytes} bytes, the first sending rank bucket {first.index} of {len(first.tensors)} in "
                f"{first.num_bytes}"
            )
        if bucket.payload and bucket.checksum != first.checksum:
            names = f"{first.tensors[0].name} to {first.tensors[-1].name}"
            raise WeightSyncError(
                f"training ranks hold different weights: checksum of bucket {first.index} ({names}) is "
                f"{bucket.checksum} on rank {rank}, {first.checksum} on the first sending rank"
            )
    return replace(first, payload=payload)
