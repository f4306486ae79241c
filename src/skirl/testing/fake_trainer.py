"""A trainer without a network, for tests of loops and schedules: one distribution over tokens, really trained."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from skirl.errors import TrainingDiverged
from skirl.records import OptimizerStep, Plan, Ratio, Role, Sampling, TrainingSequence, UpdateReport

__all__ = ["FakeTrainer"]


class FakeTrainer:
    """A ``Trainer`` (and ``WeightCommit``) of a policy that ignores its context: log-probs [V] of the next token.

    Each optimizer step is one of gradient descent on sum(weight * -advantage * log p(token)); without advantages that
    is supervised training. The critic has one value for each token that may follow, and descends on
    sum(weight * (value - return)^2 / 2). Everything else is as the protocol says: versions, reports, divergence, save
    and load.
    """

    def __init__(self, *, num_ranks: int = 1, vocabulary: int = 512, lr: float = 1.0) -> None:
        """Starts uniform, at version 0.

        Args:
            num_ranks: that plans must be made for.
            vocabulary: token ids are below this.
            lr: step of gradient descent, at every step.
        """
        self._num_ranks, self._lr = num_ranks, lr
        self._logits = np.zeros(vocabulary)
        self._reference = self._logits.copy()
        self._values = np.zeros(vocabulary)
        self._version = 0
        self.committed: list[int] = []
        """Versions that were committed, in order."""

    @property
    def num_ranks(self) -> int:
        """Ranks that plans must be made for."""
        return self._num_ranks

    def logprobs(self, plan: Plan, role: Role, sampling: Sampling | None = None) -> list[npt.NDArray[np.float32]]:
        """Per sequence of the plan [T] float32."""
        table = log_softmax(self._logits if role == "policy" else self._reference)
        return [_as_sent(table[_actions(sequence)]) for sequence in plan.sequences]

    def values(self, plan: Plan) -> list[npt.NDArray[np.float32]]:
        """Per sequence of the plan [T] float32."""
        return [_as_sent(self._values[_actions(sequence)]) for sequence in plan.sequences]

    def update(self, plan: Plan, consumed_prompts: int, roles: Sequence[Role] = ("policy",)) -> UpdateReport:
        """Runs the plan for each role; raises TrainingDiverged before a step that is not finite."""
        assert plan.num_ranks == self._num_ranks, (plan.num_ranks, self._num_ranks)
        start = time.perf_counter()
        losses, norms = self._descend(plan) if "policy" in roles else ([], [])
        metrics: dict[str, Ratio] = {}
        if "policy" in roles:
            self._version += 1
            tokens = sum(s.num_actions for s in plan.sequences)
            metrics["policy/ratio_mean"] = Ratio(float(tokens), float(tokens))
        if "critic" in roles:
            metrics |= self._fit_values(plan)
        rates = (self._lr,) * len(losses)
        return UpdateReport(self._version, tuple(losses), tuple(norms), rates, metrics, time.perf_counter() - start)

    def _descend(self, plan: Plan) -> tuple[list[float], list[float]]:
        losses, norms = list[float](), list[float]()
        for number, step in enumerate(plan.steps):
            with np.errstate(invalid="ignore"):  # found below
                loss, gradient = self._gradient(plan, step)
            norm = float(np.linalg.norm(gradient))
            if not np.isfinite([loss, norm]).all():
                raise TrainingDiverged(f"optimizer step {number} after version {self._version}: loss {loss}")
            self._logits = self._logits - self._lr * gradient
            losses.append(loss)
            norms.append(norm)
        return losses, norms

    def _fit_values(self, plan: Plan) -> dict[str, Ratio]:
        errors, count = 0.0, 0
        for step in plan.steps:
            gradient = np.zeros_like(self._values)
            for index in (i for rank in step.ranks for m in rank for i in m.sequences):
                sequence, weights = plan.sequences[index], plan.weights[index]
                assert sequence.returns is not None, "a critic learns from returns"
                error = self._values[_actions(sequence)] - sequence.returns
                np.add.at(gradient, _actions(sequence), weights * error)
                errors, count = errors + float((error**2).sum() / 2), count + len(error)
            self._values = self._values - self._lr * gradient
        return {"critic/loss": Ratio(errors, count), "critic/lr": Ratio(self._lr, 1)}

    def evaluate(self, plan: Plan) -> Mapping[str, Ratio]:
        """The loss alone, without a step."""
        return {"loss": Ratio(sum(self._gradient(plan, step)[0] for step in plan.steps), 1)}

    def _gradient(self, plan: Plan, step: OptimizerStep) -> tuple[float, npt.NDArray[np.float64]]:
        table = log_softmax(self._logits)
        loss, gradient = 0.0, np.zeros_like(table)
        for index in (i for rank in step.ranks for m in rank for i in m.sequences):
            sequence, weights = plan.sequences[index], plan.weights[index]
            wanted = weights if sequence.advantages is None else weights * sequence.advantages
            actions = _actions(sequence)
            loss -= float((wanted * table[actions]).sum())
            gradient += wanted.sum() * np.exp(table)  # d log p(y) / d logits = onehot(y) - p
            np.subtract.at(gradient, actions, wanted)
        return loss, gradient

    def commit(self, version: int) -> Mapping[str, Ratio]:
        """Notes the version."""
        self.committed.append(version)
        return {}

    def policy_version(self) -> int:
        """Updates done so far."""
        return self._version

    def save(self, directory: Path) -> None:
        """One JSON file; Python writes floats so that they are read back bit for bit."""
        state = {"logits": self._logits.tolist(), "values": self._values.tolist(), "version": self._version}
        (directory / "fake.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """What ``save`` wrote."""
        state = json.loads((directory / "fake.json").read_text(encoding="utf-8"))
        self._logits, self._version = np.asarray(state["logits"]), int(state["version"])
        self._values = np.asarray(state["values"])

    def export(self, directory: Path, role: Role = "policy") -> None:
        """The same file, in place of a model that nothing could load."""
        directory.mkdir(parents=True, exist_ok=True)
        self.save(directory)


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Log-probs of one distribution [V]."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _actions(sequence: TrainingSequence) -> npt.NDArray[np.int64]:
    return sequence.input_ids[sequence.action_positions]


def _as_sent(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """float32 and read-only, as what comes from another process is."""
    sent = values.astype(np.float32)
    sent.flags.writeable = False
    return sent
