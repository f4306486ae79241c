"""Every error a user can cause: what, the value got, where it came from, what to do.

One message string and no custom ``__init__``, so that each class survives pickling between processes.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineDied",
    "MissingExtra",
    "ModelError",
    "RewardError",
    "RolloutError",
    "RunStopped",
    "SkirlError",
    "TrainingDiverged",
    "WeightSyncError",
    "WorkerError",
]


class SkirlError(Exception):
    """Root of skirl's errors; the command line prints its message without a traceback."""


class ConfigError(SkirlError, ValueError):
    """A recipe or flag that cannot be run as written (exit code 2)."""


class DataError(SkirlError, ValueError):
    """A manifest, audio file or row that cannot be used (exit code 2)."""


class ModelError(SkirlError, ValueError):
    """A checkpoint that cannot be loaded as asked (exit code 2)."""


class MissingExtra(SkirlError, ImportError):
    """An optional package is needed; the message holds the command that installs it (exit code 2)."""


class RewardError(SkirlError):
    """A reward function failed more often than the run allows."""


class RolloutError(SkirlError):
    """Sampling failed."""


class RunStopped(SkirlError):
    """SIGTERM ended the run after a step, with a checkpoint (exit code 143)."""


class WeightSyncError(SkirlError):
    """Weights did not reach an engine whole; the engine keeps its old version."""


class CheckpointError(SkirlError):
    """A checkpoint or export is incomplete, or does not belong to this run."""


class TrainingDiverged(SkirlError):
    """Loss or gradient is not finite; raised on every rank before the optimizer step."""


class WorkerError(SkirlError):
    """A worker process died or did not answer in time."""


class EngineDied(RolloutError):
    """A rollout engine's process is gone; it is replaced, and its requests are issued again."""
