"""The receiving side of a weight commit, in one engine worker process.

begin (compare the lists, connect) -> receive each bucket (check, load) -> finish (all came) -> version
What a failure leaves: before the first load the old version; after it no version, until a whole commit succeeds.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skirl.errors import WeightSyncError
from skirl.records import TensorSpec
from skirl.weights.buckets import views
from skirl.weights.checksum import checksum
from skirl.weights.endpoints import Place
from skirl.weights.manifest import Bucket, Manifest, TransportName, compare
from skirl.weights.transports import receiving_end
from skirl.weights.transports.base import ReceivingEnd

__all__ = ["WeightReceiver"]

_logger = logging.getLogger(__name__)

_SHOWN = 8
"""Names that a message lists."""


@dataclass
class _Commit:
    """A commit that has begun."""

    manifest: Manifest
    num_tensors: int = 0
    """Received so far."""
    num_buckets: int = 0
    touched: bool = False
    """Loading has begun."""
    broken: bool = False
    """A bucket failed; only ``abort`` is left."""
    sent_nan: list[str] = field(default_factory=list[str])


class WeightReceiver:
    """One worker's part.

    Args:
        load: copies named tensors into the model; it must not keep them, their memory is used again.
        expected: every tensor of the model's checkpoint, as this engine loads it.
        device: that the model is on. place: of this process. worker_rank: its number in its engine.
        named_parameters: the model's own parameters, under its own names.
    """

    def __init__(
        self,
        *,
        load: Callable[[list[tuple[str, Tensor]]], None],
        expected: tuple[TensorSpec, ...],
        device: torch.device,
        place: Place,
        worker_rank: int,
        named_parameters: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        self._load = load
        self._expected = expected
        self._device = device
        self._place = place
        self._worker_rank = worker_rank
        self._named_parameters = named_parameters
        self._version: int | None = None
        self._covered = False
        self._commit: _Commit | None = None
        self._end: ReceivingEnd | None = None
        self._connected: tuple[TransportName, bytes] | None = None

    @property
    def version(self) -> int | None:
        """Policy version of the weights; None before the first commit, during one, and after one that tore them."""
        return self._version

    def forget(self) -> None:
        """The weights are gone (a sleep of level 2): no version, and the next commit must be whole."""
        if self._commit is not None:
            raise WeightSyncError(
                f"{self._me}: the weights cannot go while commit {self._commit.manifest.version} runs"
            )
        self._version = None

    def begin(self, manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        """Compares the lists and connects. Raises WeightSyncError with nothing changed."""
        where = f"{self._me}, commit {manifest.version}"
        if self._commit is not None:
            running = self._commit.manifest.version
            raise WeightSyncError(f"{where}: cannot begin, commit {running} has not ended")
        if not manifest.whole and self._version is None:
            raise WeightSyncError(
                f"{where}: brings only what is trained, but there is no whole set of weights here to put it into (none "
                "was committed yet, they were dropped for sleep, or a commit failed half-way). Commit a whole set first"
            )
        expected = [spec for spec in self._expected if manifest.whole or spec.trained]
        compare(expected, manifest.tensors, where)
        if self._connected != (transport, setup):
            self._disconnect()
            self._end = receiving_end(
                transport, setup, device=self._device, place=self._place, worker_rank=self._worker_rank
            )
            self._connected = (transport, setup)
        self._commit = _Commit(manifest)

    def receive(self, bucket: Bucket) -> None:
        """Loads one bucket; its buffer may be filled again when this returns.

        Raises:
            WeightSyncError: it is not the next one, not what the manifest says, or was damaged on the way.
        """
        commit = self._running(f"bucket {bucket.index}")
        if commit.broken:
            raise WeightSyncError(f"{self._me}: commit {commit.manifest.version} has failed and can only be aborted")
        commit.broken = True  # until this bucket is in
        self._check_order(commit, bucket)
        tensors = self._fetch(commit, bucket)
        if not commit.touched:
            self._touch(commit)
        if not self._covered:
            commit.sent_nan += [name for name, tensor in tensors if _holds_nan(tensor)]
        self._load(tensors)
        self._connection().release()
        commit.num_tensors += len(tensors)
        commit.num_buckets += 1
        if commit.num_tensors == len(commit.manifest.tensors):
            self._check_coverage(commit)
        commit.broken = False

    def finish(self, version: int) -> None:
        """Every tensor of the commit came: ``version`` is what the weights are now."""
        commit = self._running("the end")
        manifest = commit.manifest
        if version != manifest.version:
            raise WeightSyncError(f"{self._me}: commit {manifest.version} is running, {version} was to be finished")
        if commit.broken or commit.num_tensors < len(manifest.tensors):
            rest = [spec.name for spec in manifest.tensors[commit.num_tensors :]]
            raise WeightSyncError(
                f"{self._me}: commit {version} is not whole: {len(rest)} of {len(manifest.tensors)} tensors did not "
                f"come: {_listed(rest)}"
            )
        self._version = version
        self._commit = None

    def abort(self) -> None:
        """Ends a commit that failed, and drops the connection. Harmless to repeat, and after ``finish``."""
        self._commit = None
        self._disconnect()

    @property
    def _me(self) -> str:
        return f"engine worker {self._worker_rank} on {self._place.node}"

    def _running(self, what: str) -> _Commit:
        if self._commit is None:
            raise WeightSyncError(f"{self._me}: {what} of a weight commit came, but none has begun")
        return self._commit

    def _check_order(self, commit: _Commit, bucket: Bucket) -> None:
        if bucket.index != commit.num_buckets:
            raise WeightSyncError(
                f"{self._me}: bucket {bucket.index} came where {commit.num_buckets} was due ({_span(bucket)})"
            )
        due = commit.manifest.tensors[commit.num_tensors :]
        if not 0 < len(bucket.tensors) <= len(due):
            raise WeightSyncError(
                f"{self._me}: bucket {bucket.index} holds {len(bucket.tensors)} tensors where 1 to {len(due)} are due"
            )
        for listed, came in zip(due, bucket.tensors, strict=False):
            if listed != came:
                raise WeightSyncError(
                    f"{self._me}: bucket {bucket.index} does not follow the manifest of commit "
                    f"{commit.manifest.version}: {came} came where {listed} is listed"
                )

    def _fetch(self, commit: _Commit, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The bucket's tensors, with the bytes that were sent."""
        buffer = self._connection().open(bucket.payload, bucket.num_bytes)
        if bucket.checksum is not None and (got := checksum(buffer)) != bucket.checksum:
            raise WeightSyncError(
                f"{self._me}: bucket {bucket.index} of commit {commit.manifest.version} ({_span(bucket)}) was damaged "
                f"on the way: its checksum is {got}, {bucket.checksum} was sent"
            )
        return views(buffer, bucket)

    def _connection(self) -> ReceivingEnd:
        assert self._end is not None, "a commit runs only while connected"
        return self._end

    def _touch(self, commit: _Commit) -> None:
        """From here on the old weights are gone. What a first whole commit leaves out is to be seen as NaN."""
        commit.touched = True
        self._version = None
        if not self._covered:
            with torch.no_grad():
                for _, parameter in self._named_parameters():
                    if _can_be_nan(parameter):
                        parameter.fill_(float("nan"))

    def _check_coverage(self, commit: _Commit) -> None:
        if self._covered:
            return
        holes = [name for name, parameter in self._named_parameters() if _holds_nan(parameter)]
        if holes and commit.sent_nan:
            _logger.warning(
                "%s: NaN was sent in %s, so it is not proven that every parameter was filled; NaN is in %s",
                self._me,
                _listed(commit.sent_nan),
                _listed(holes),
            )
            return
        if holes:
            raise WeightSyncError(
                f"{self._me}: commit {commit.manifest.version} brought every tensor of the checkpoint, but "
                f"{len(holes)} parameters of the engine's model were not filled, or not wholly: {_listed(holes)}"
            )
        self._covered = True

    def _disconnect(self) -> None:
        self._connected = None
        if self._end is not None:
            self._end.close()
            self._end = None


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _holds_nan(tensor: Tensor) -> bool:
    """Without a mask of the tensor's size: NaN survives a sum, and infinities that cancel are looked at closely."""
    if not _can_be_nan(tensor) or not bool(tensor.detach().sum(dtype=torch.float32).isnan()):
        return False
    return bool(tensor.detach().isnan().any())


def _span(bucket: Bucket) -> str:
    if not bucket.tensors:
        return "no tensors"
    return f"{bucket.tensors[0].name} to {bucket.tensors[-1].name}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
