"""One run on disk: config.json, metrics.jsonl, events.jsonl, rollouts/, checkpoints/, hf/ and tensorboard/."""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from skirl.errors import CheckpointError, ConfigError
from skirl.tracking.json_lines import append_record, now, read_records, replace_file, to_json, trim_torn_line
from skirl.tracking.rollout_store import RolloutStore

__all__ = ["RunDirectory"]

logger = logging.getLogger(__name__)

# A run is continued only with the same values of these; run.dir, run.resume, run.progress and the like may differ.
_FIXED = (
    "model",
    "data",
    "sft",
    "rm",
    "dpo",
    "kd",
    "prm",
    "sample",
    "train",
    "critic",
    "rollout",
    "reward",
    "method",
    "trainer",
    "run.seed",
)
_ABSENT = "(absent)"
_SHOWN = 10


class RunDirectory:
    """An open run directory; made by ``RunDirectory.open``, held by one process at a time.

    Attributes:
        path: the directory.
        resumed: it held recorded steps or a checkpoint of this run when it was opened.
        rewound_to: what ``rewind`` was given, -1 for starting over; None if it was not called.
    """

    def __init__(self, path: Path, *, resumed: bool, lock: int) -> None:
        self.path = path
        self.resumed = resumed
        self.rewound_to: int | None = None
        self._lock: int | None = lock

    @classmethod
    def open(cls, path: Path, *, resume: bool, config: Mapping[str, Any], command: str = "train") -> Self:
        """Makes the directory, or opens that of the same run again.

        A directory in which no step was recorded is taken over: nothing is lost. With ``resume`` and no earlier run, a
        new run starts, so that one command line both starts a run and continues it.

        Args:
            path: ``run.dir``.
            resume: ``run.resume``.
            config: the resolved recipe, JSON-able (``model_dump(mode="json")``).
            command: what is run; a directory made by another command is another run.

        Raises:
            ConfigError: another run lives there, is running there, or was started with other settings.
        """
        settings = json.loads(to_json(config))
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        except OSError as error:
            raise ConfigError(f"run.dir: {path} cannot be a run directory: {error}; choose another run.dir") from error
        try:
            resumed = _has_progress(path)
            if resumed:
                _refuse_other_run(path, resume=resume, settings=settings, command=command)
            for name in ("rollouts", "checkpoints", "hf", "tensorboard"):
                (path / name).mkdir(exist_ok=True)
            for name in ("metrics.jsonl", "events.jsonl"):
                trim_torn_line(path / name)
            before = _read_config(path) if resumed else settings
            replace_file(path / "config.json", (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode())
        except BaseException:
            os.close(lock)
            raise
        run = cls(path, resumed=resumed, lock=lock)
        run.event("resumed" if resumed else "created", command=command, changed=_differences(before, settings, ""))
        return run

    @property
    def step(self) -> int:
        """The last step that counts: 0 for a run that starts."""
        return max(self.rewound_to or 0, 0)

    @property
    def metrics_file(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        """What happened and when; only ever appended to."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        """Directory of the Hugging Face models."""
        return self.path / "hf"

    @property
    def tensorboard(self) -> Path:
        """Directory of TensorBoard's events."""
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> RolloutStore:
        """The rollouts, by step."""
        return RolloutStore(self.path / "rollouts")

    def rewind(self, step: int | None) -> None:
        """Forgets the metrics and rollouts recorded after ``step``, which the run will record again.

        Call it before the sinks are made. Checkpoints and exports are left alone; events stay, and this is one.

        Args:
            step: step of the checkpoint that the run continues from; None starts over, step 0 is forgotten too.
        """
        last = -1 if step is None else step
        records = read_records(self.metrics_file)
        kept = [record for record in records if record["step"] <= last]
        if len(kept) < len(records):
            lines = "".join(to_json(record) + "\n" for record in kept)
            replace_file(self.metrics_file, lines.encode("utf-8", "backslashreplace"))
        self.rollouts.rewind(last)
        self.rewound_to = last
        self.event("rewound", step=step, forgotten=len(records) - len(kept))

    def event(self, kind: str, **fields: Any) -> None:
        """Adds a line to events.jsonl: the time, the kind, and whatever else is worth knowing."""
        append_record(self.events_file, {"time": now(), "kind": kind, **fields})

    def close(self) -> None:
        """Lets another process open the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _take_lock(path: Path) -> int:
    """A record lock: it ends with this process, however that ends, and forked children do not inherit it."""
    file = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(file, 200).decode("utf-8", "replace").strip() or "another process"
        os.close(file)
        raise ConfigError(f"run.dir: {path} is in use by {holder}; wait for it or choose another run.dir") from error
    except OSError as error:
        logger.warning("%s cannot be locked (%s): make sure that no other process runs there", path, error)
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file


def _has_progress(path: Path) -> bool:
    files = (path / name for name in ("metrics.jsonl", "samples.jsonl.done"))
    kept = (path / name for name in ("rollouts", "checkpoints", "hf"))
    written = any(file.exists() and file.stat().st_size > 0 for file in files)
    return written or any(any(entry.glob("step-*")) for entry in kept)


def _refuse_other_run(path: Path, *, resume: bool, settings: Any, command: str) -> None:
    if not resume:
        raise ConfigError(
            f"run.dir: {path} holds another run ({_describe(path)}); set run.resume to continue it, "
            "or choose another run.dir"
        )
    before = _read_config(path)
    created = [event["command"] for event in read_records(path / "events.jsonl") if event["kind"] == "created"]
    if created and created[-1] != command:
        raise ConfigError(
            f"run.dir: {path} holds a run of skirl {created[-1]}, and this is skirl {command}; choose another run.dir"
        )
    changed = [line for line in _differences(before, settings, "") if _is_fixed(line)]
    if changed:
        more = f"\n  and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise ConfigError(
            f"run.resume: {path} was started with other settings; resume with the same, or choose another run.dir\n  "
            + "\n  ".join(changed[:_SHOWN])
            + more
        )


def _describe(path: Path) -> str:
    steps = [record["step"] for record in read_records(path / "metrics.jsonl")]
    recorded = f"{max(steps)} steps recorded" if steps else "no step recorded"
    saved = sorted(entry.name for entry in (path / "checkpoints").glob("step-*"))
    return f"{recorded}, " + (f"newest checkpoint {saved[-1]}" if saved else "no checkpoint")


def _read_config(path: Path) -> Any:
    file = path / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"run.resume: the run's settings cannot be read from {file}: {error}") from error


def _differences(before: Any, after: Any, path: str) -> list[str]:
    """One "path: value in the run, value now" for each leaf that differs."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [f"{path}: {_show(before)} in the run, {_show(after)} now"]
    lines: list[str] = []
    for key in [*before, *(key for key in after if key not in before)]:
        old = before.get(key, _ABSENT)
        new = after.get(key, _ABSENT)
        lines += _differences(old, new, f"{path}.{key}" if path else key)
    return lines


def _is_fixed(line: str) -> bool:
    path = line.split(": ", maxsplit=1)[0]
    return any(path == fixed or path.startswith(f"{fixed}.") for fixed in _FIXED)


def _show(value: Any) -> str:
    return value if value == _ABSENT else json.dumps(value, ensure_ascii=False)
