"""Between processes of one machine: files in memory that both sides map.

A file is locked by its sender as long as that lives, so leftovers of a sender that was killed are known for what they
are, also where process ids mean nothing (containers that share /dev/shm). ``multiprocessing.shared_memory`` is not
used: before Python 3.13 its resource tracker unlinks files that others still use.
"""

import fcntl
import json
import logging
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from skirl.errors import WeightSyncError

__all__ = ["SharedMemoryReceivingEnd", "SharedMemorySendingEnd"]

_logger = logging.getLogger(__name__)

_PREFIX = "skirl-weights-"


@dataclass(frozen=True)
class _File:
    path: Path
    descriptor: int
    """Open and locked."""
    tensor: Tensor


class SharedMemorySendingEnd:
    """Buffers in files under ``directory``, or in the temporary directory where that is too small."""

    def __init__(self, directory: Path = Path("/dev/shm")) -> None:
        self._directory = directory
        self._files: dict[int, _File] = {}
        for place in {directory, Path(tempfile.gettempdir())}:
            _remove_leftovers(place)

    def buffer(self, slot: int, num_bytes: int) -> Tensor:
        """[>= num_bytes] uint8."""
        held = self._files.get(slot)
        if held is not None and held.tensor.numel() >= num_bytes:
            return held.tensor
        self._drop(slot)
        self._files[slot] = self._create(slot, max(num_bytes, 1))
        return self._files[slot].tensor

    def payload(self, slot: int, num_bytes: int) -> dict[str, bytes]:
        """Path and size of the file."""
        held = self._files[slot]
        text = json.dumps({"slot": slot, "path": str(held.path), "size": held.tensor.numel()})
        return {"": text.encode()}

    def transmit(self, slot: int, num_bytes: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Removes the files; receivers that still map one keep it until they let go."""
        for slot in list(self._files):
            self._drop(slot)

    def __del__(self) -> None:
        self.close()

    def _drop(self, slot: int) -> None:
        held = self._files.pop(slot, None)
        if held is not None:
            held.path.unlink(missing_ok=True)
            os.close(held.descriptor)

    def _create(self, slot: int, size: int) -> _File:
        name = f"{_PREFIX}{os.getpid()}-{slot}-{secrets.token_hex(4)}"
        places = [self._directory, Path(tempfile.gettempdir())]
        refusals: list[str] = []
        for place in places:
            try:
                path, descriptor = _allocate(place / name, size)
            except OSError as error:
                refusals.append(f"{place}: {error.strerror or error}, {_free(place)} free")
                continue
            if refusals:
                _logger.warning(
                    "weight commits go through %s, which may be a disk: a buffer of %s did not fit (%s)",
                    place,
                    _mib(size),
                    "; ".join(refusals),
                )
            return _File(path, descriptor, torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8))
        raise WeightSyncError(
            f"no room for a weight-commit buffer of {_mib(size)}: {'; '.join(refusals)}. Make /dev/shm larger (docker "
            "run --shm-size), or rollout.commit.bucket_mb smaller"
        )


class SharedMemoryReceivingEnd:
    """Maps each file once and keeps it while the sender goes on using it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[int, tuple[str, Tensor]] = {}

    def open(self, payload: dict[str, bytes], num_bytes: int) -> Tensor:
        """The mapped file itself on a CPU, a copy on another device."""
        if "" not in payload:
            raise WeightSyncError("a weight bucket came without the path of its shared file")
        said = json.loads(payload[""])
        slot, path, size = int(said["slot"]), str(said["path"]), int(said["size"])
        if slot not in self._mapped or self._mapped[slot][0] != path:
            self._mapped.pop(slot, None)
            self._mapped[slot] = (path, _map(path, size))
        mapped = self._mapped[slot][1]
        if mapped.numel() < num_bytes:
            raise WeightSyncError(f"the shared file {path} is truncated: {mapped.numel()} of {num_bytes} bytes")
        return mapped[:num_bytes].to(self._device)

    def release(self) -> None:
        """Nothing to do on the CPU; a copy to a device was made before ``open`` returned."""

    def close(self) -> None:
        """Unmaps."""
        self._mapped.clear()


def _map(path: str, size: int) -> Tensor:
    try:
        found = os.stat(path).st_size
    except OSError as error:
        raise WeightSyncError(
            f"cannot reach the shared file {path} ({error.strerror}): trainer and engine must run on one machine and "
            "see the same /dev/shm; else set rollout.commit.transport to gloo"
        ) from error
    if found < size:
        raise WeightSyncError(f"the shared file {path} is truncated: {found} of {size} bytes")
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _allocate(path: Path, size: int) -> tuple[Path, int]:
    """Creates, locks and fills up the file: a full file system says so now, not by a SIGBUS at the first write."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink == 0:  # taken for a leftover before it was locked
                os.close(descriptor)
                continue
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return path, descriptor


def _remove_leftovers(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone by now, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its sender lives
        finally:
            os.close(descriptor)


def _free(place: Path) -> str:
    try:
        status = os.statvfs(place)
    except OSError:
        return "nothing"
    return _mib(status.f_bavail * status.f_frsize)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
