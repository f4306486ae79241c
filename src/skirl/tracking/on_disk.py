"""What files need that must be there after a fault: errors that name the file, and bytes on the disk itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skirl.errors import CheckpointError

__all__ = ["sync", "sync_tree", "writing"]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the file that cannot be written, which the system's own error does not where a disk is full.

    Raises:
        CheckpointError: an OSError came.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}. Make room, or mend the disk, and go on with "
            "run.resume"
        ) from error


def sync(path: Path) -> None:
    """Has the system write a file, or the names in a directory, to the disk itself; nothing where there is none."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """The same of every file below a directory, and of all the names that lead to them from there."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
