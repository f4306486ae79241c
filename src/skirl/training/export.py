"""Exports of the policy as a Hugging Face model, each reloaded in a fresh process before it counts.

trainer -> hf/.step-000060.tmp -> python -m skirl.models.verify: log-probs of a probe, compared -> hf/step-000060
"""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from skirl.errors import CheckpointError
from skirl.protocols import Trainer
from skirl.records import Sampling, TrainingSequence

__all__ = ["Exports"]

log = logging.getLogger(__name__)


class Exports:
    """The exports of one run.

    Args:
        probe: a sequence whose action tokens' log-probs must be the same in the exported model.
        expected: those log-probs by the trainer's current weights, [T].
        sampling: the distribution that the trainer scores under.
        tolerance: largest difference of log-probs.
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
        timeout_s: float = 600.0,
    ) -> None:
        self._directory, self._probe, self._expected, self._sampling = directory, probe, expected, sampling
        self._tolerance, self._timeout_s = tolerance, timeout_s

    def write(self, step: int, trainer: Trainer) -> Path:
        """Exports the current weights as step ``step``.

        Raises: CheckpointError: the exported model does not load, or gives other log-probs than the trainer.
        """
        target = self._directory / f"step-{step:06d}"
        aside = self._directory / f".step-{step:06d}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        trainer.export(aside)
        difference = self._reload(aside, self._expected())
        log.info("%s reloaded in a fresh process: largest difference of log-probs %.1e", target, difference)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        return target

    def _reload(self, directory: Path, expected: np.ndarray) -> float:
        probe = {
            "input_ids": self._probe.input_ids.tolist(),
            "action_positions": self._probe.action_positions.tolist(),
            "media": [(m.path, m.start_s, m.duration_s, m.data.hex() if m.data else None) for m in self._probe.media],
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
        got = np.asarray(json.loads(done.stdout.splitlines()[-1]), dtype=np.float64)
        difference = float(np.abs(got - expected).max()) if len(got) else 0.0
        if not difference <= self._tolerance:
            raise CheckpointError(
                f"{directory}: the reloaded model's log-probs differ from the trainer's by {difference:.2g}, more than "
                f"{self._tolerance:.0e}; the export is kept for inspection and does not count"
            )
        return difference
