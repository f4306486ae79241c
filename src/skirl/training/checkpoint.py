"""Checkpoints: written aside, manifest last, then renamed; whole or not there.

checkpoints/step-000040/  trainer files (by every rank)  state.json (prompts, ledger)  manifest.json
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skirl.errors import CheckpointError
from skirl.tracking.on_disk import sync, sync_tree, writing

__all__ = ["Checkpoints"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        keep: complete ones kept; older ones are deleted after a new one is safe.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Saves step ``step``.

        Args:
            write: puts the trainer's files into a directory; called once, by the driver, for all ranks.
            state: JSON-able state of the driver's parts.

        Raises:
            CheckpointError: it cannot be written; those of before stay.
        """
        target = self._directory / f"step-{step:06d}"
        aside = self._directory / f".step-{step:06d}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        with writing(aside):
            aside.mkdir(parents=True)
            write(aside)
            _write(aside / "state.json", {"step": step, **state})
            files = {str(f.relative_to(aside)): f.stat().st_size for f in sorted(aside.rglob("*")) if f.is_file()}
            if len(files) < 2:
                raise CheckpointError(
                    f"{aside}: the trainer wrote no file; is the run directory on a disk that all nodes share?"
                )
            _write(aside / "manifest.json", {"step": step, "files": files})
            sync_tree(aside)
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
            sync(self._directory)
        self._delete_old()
        return target

    def _delete_old(self) -> None:
        for old in self.complete()[: -self._keep]:
            path = self._directory / f"step-{old:06d}"
            try:
                shutil.rmtree(path)
            except OSError as error:  # a file server may hold names back that another machine still reads
                log.warning("the old checkpoint %s cannot be deleted: %s", path, error.strerror or error)

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        found = [int(m[1]) for p in self._directory.glob("step-*") if (m := _NAME.fullmatch(p.name))]
        return sorted(s for s in found if not self._missing(s))

    def load_latest(self, read: Callable[[Path], None]) -> dict[str, Any] | None:
        """Loads the newest complete checkpoint and returns its state; None where there is none."""
        steps = self.complete()
        broken = [p.name for p in self._directory.glob("step-*") if _step(p) not in steps]
        if broken:
            log.warning("incomplete checkpoints are passed over: %s", ", ".join(sorted(broken)))
        if not steps:
            return None
        path = self._directory / f"step-{steps[-1]:06d}"
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        read(path)
        return state

    def _missing(self, step: int) -> list[str]:
        """What a checkpoint lacks of its manifest; the manifest itself is written last."""
        path = self._directory / f"step-{step:06d}"
        manifest = path / "manifest.json"
        if not manifest.is_file():
            return ["manifest.json"]
        try:
            files: dict[str, int] = dict(json.loads(manifest.read_text(encoding="utf-8"))["files"])
        except (KeyError, TypeError, ValueError):
            return ["manifest.json"]  # cut short
        return [n for n, size in files.items() if not (path / n).is_file() or (path / n).stat().st_size != size]


def _step(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
