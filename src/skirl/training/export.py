"""Exports as Hugging Face models, each reloaded in a fresh process before it counts.

trainer -> hf/.step-000060.tmp -> python -m skirl.models.verify: log-probs of a probe, compared -> hf/step-000060

hf/step-000060/          the policy (of rm and prm the model with its scalar head)
hf/step-000060/ema/      the same of its moving average, where trainer.ema is set
hf/step-000060/adapter/  its LoRA adapter alone, in peft's format
hf/step-000060/critic/   the critic, where the method has one
"""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from skirl.errors import CheckpointError
from skirl.protocols import Trainer
from skirl.records import Sampling, TrainingSequence
from skirl.tracking.on_disk import sync, sync_tree

__all__ = ["Exports"]

log = logging.getLogger(__name__)

ROUNDING_FACTOR = 4.0
"""How many times as far from float32's as the fresh process's own numbers the trainer's may be: both compute in
bfloat16, with other kernels and mostly on another device."""


class Exports:
    """The exports of one run.

    Args:
        probe: a sequence whose action tokens' log-probs must be the same in the exported model.
        expected: those log-probs by the trainer's current weights, [T].
        sampling: the distribution that the trainer scores under.
        tolerance: largest difference of log-probs. A larger one passes where it is bfloat16's rounding: see
            ``ROUNDING_FACTOR``.
        reads: of a model with a scalar head, where the number of an action token is read: "at" it, or "before".
        finish: adds to an exported directory, before it is reloaded.
        critic: the critic's values of the probe's action tokens, [T]; None where the run has no critic.
        timeout_s: for the fresh process.
    """

    def __init__(
        self,
        directory: Path,
        probe: TrainingSequence,
        expected: Callable[[], np.ndarray],
        sampling: Sampling,
        *,
        tolerance: float,
        reads: Literal["before", "at"] = "before",
        finish: Callable[[Path], None] | None = None,
        critic: Callable[[], np.ndarray] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._directory, self._probe, self._expected, self._sampling = directory, probe, expected, sampling
        self._tolerance, self._timeout_s = tolerance, timeout_s
        self._reads: Literal["before", "at"] = reads
        self._finish, self._critic = finish, critic

    def write(self, step: int, trainer: Trainer) -> Path:
        """Exports the current weights as step ``step``.

        Raises: CheckpointError: the exported model does not load, or gives other log-probs than the trainer.
        """
        target = self._directory / f"step-{step:06d}"
        aside = self._directory / f".step-{step:06d}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        trainer.export(aside)
        if self._finish is not None:
            self._finish(aside)
        difference = self._compare(aside, self._expected(), self._reads, "log-probs")
        log.info("%s reloaded in a fresh process: largest difference of log-probs %.1e", target, difference)
        if (aside / "ema").is_dir():
            self._reload(aside / "ema", self._reads)  # no process holds these weights: that they load is what is known
        if self._critic is not None:
            trainer.export(aside / "critic", "critic")
            difference = self._compare(aside / "critic", self._critic(), "before", "values")
            log.info("%s reloaded in a fresh process: largest difference of values %.1e", target / "critic", difference)
        sync_tree(aside)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        sync(self._directory)
        return target

    def has(self, step: int) -> bool:
        """Whether the export of this step is there, whole."""
        return (self._directory / f"step-{step:06d}").is_dir()

    def _compare(self, directory: Path, expected: np.ndarray, reads: Literal["before", "at"], what: str) -> float:
        got = self._reload(directory, reads)
        if len(got) == 1:
            expected = expected[-1:]  # a reward model's class gives the last token's number alone
        difference = _largest(got - expected)
        if difference <= self._tolerance:
            return difference
        exact = self._reload(directory, reads, "float32")
        difference, rounding = _largest(exact - expected), _largest(exact - got)
        allowed = max(self._tolerance, ROUNDING_FACTOR * rounding)
        if not difference <= allowed:
            raise CheckpointError(
                f"{directory}: the reloaded model's {what} differ from the trainer's by {difference:.2g}, more than "
                f"{allowed:.2g} (computed in float32; in the type of its weights they are off by {rounding:.1g} "
                "themselves); the export is kept for inspection and does not count"
            )
        log.info("%s: %s in the type of the weights are off from float32's by %.2g", directory, what, rounding)
        return difference

    def _reload(self, directory: Path, reads: Literal["before", "at"], dtype: str = "auto") -> np.ndarray:
        """What the model in a directory makes of the probe, in a fresh process; "auto" computes in its own type."""
        probe = {
            "dtype": dtype,
            "input_ids": self._probe.input_ids.tolist(),
            "action_positions": self._probe.action_positions.tolist(),
            "media": [(m.path, m.start_s, m.duration_s, m.data.hex() if m.data else None) for m in self._probe.media],
            "reads": reads,
            "sampling": {
                name: getattr(self._sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "banned_ids")
            },
        }
        command = [sys.executable, "-m", "skirl.models.verify", str(directory)]
        try:
            done = subprocess.run(
                command, input=json.dumps(probe), capture_output=True, text=True, timeout=self._timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"{directory}: the exported model did not load in a fresh process within {self._timeout_s:.0f} s"
            ) from None
        if done.returncode != 0:
            raise CheckpointError(
                f"{directory}: the exported model does not load in a fresh process:\n{done.stderr[-4000:]}"
            )
        return np.asarray(json.loads(done.stdout.splitlines()[-1]), dtype=np.float64)


def _largest(differences: np.ndarray) -> float:
    return float(np.abs(differences).max()) if len(differences) else 0.0
