"""One rank of a role: the policy with its trainer, its reference and its sampler, as far as they are asked for.

Built by ``assemble.build_worker`` inside that process; called directly by the local runtime and through Ray otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from skirl.config.schema import Config
from skirl.errors import WeightSyncError
from skirl.models.loading import LoadedModel, export_model
from skirl.models.policy import Policy
from skirl.records import Plan, Request, Role, Rollout, Sampling, UpdateReport
from skirl.rollouts.engines.policy import PolicySampler
from skirl.training.backends.single import scoring_pass
from skirl.training.objective import Objective

__all__ = ["Worker", "WorkerSpec"]


@dataclass(frozen=True)
class WorkerSpec:
    """What every rank is built from.

    Attributes:
        objective: what the trainer minimises; None builds a worker that does not train.
        total_prompts: of the whole run, for the learning-rate schedule.
        with_reference: the run needs log-probs under a frozen copy of the starting weights.
        holds: models in this process. Without "policy" and "critic" it scores under the reference alone.
        samples: the policy samples here; False where engines in other processes do.
        trains: what the role "policy" is: a language model; a scalar head on one (rm, prm); a language model beside
            the teacher at ``reference_path`` (kd).
        reference_path: checkpoint of the reference or teacher; None is the policy's own start.
        critic_objective: what the critic minimises; None where the run has no critic.
        reward_models: names in ``reward.models`` that this process holds.
    """

    config: Config
    objective: Objective | None
    total_prompts: int
    with_reference: bool
    holds: tuple[Role, ...] = ("policy", "reference", "critic")
    samples: bool = True
    trains: Literal["policy", "value", "distilled"] = "policy"
    reference_path: Path | None = None
    critic_objective: Objective | None = None
    reward_models: tuple[str, ...] = ()


class Worker:
    """What one rank can do; the methods are those of ``protocols.Trainer`` for its share of the work.

    Args:
        loaded: the Hugging Face model of the policy, or of the reference where there is no policy.
        backend: SingleBackend, DeepSpeedBackend, or None for a worker that does not train.
        sampling_policy: what the sampler reads: the trained policy itself, or under ZeRO-3 a whole copy; None where
            this worker does not sample.
        reference: frozen copy of the start, or None.
        description: for the log.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: Any | None,
        *,
        sampling_policy: Policy | None,
        reference: Policy | None,
        objective: Objective | None,
        export_layout: Literal["same", "native", "original"],
        description: str,
    ) -> None:
        self.description = description
        """What this rank holds, for the log: the trainable parameters by role."""
        self._export_layout: Literal["same", "native", "original"] = export_layout
        self._loaded, self._backend, self._reference, self._objective = loaded, backend, reference, objective
        self._sampling_policy = sampling_policy
        self._sampler = None if sampling_policy is None else PolicySampler(sampling_policy, loaded.tokenizer)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request."""
        assert self._sampler is not None, "this worker was built without a sampler"
        return self._sampler.generate(requests)

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """This rank's share of the plan."""
        return self._trainer().update(plan, consumed_prompts)

    def logprobs(
        self, plan: Plan, role: Role, ranks: Sequence[int], sampling: Sampling | None = None
    ) -> Mapping[int, np.ndarray]:
        """Log-probs by sequence index, of the micro-batches of the given ranks."""
        if role == "policy":
            found = self._trainer().logprobs(plan, sampling)
        else:
            assert self._reference is not None
            assert self._objective is not None
            found = scoring_pass(self._reference, sampling or self._objective.sampling, plan, ranks)
        return {i: t.numpy() for i, t in found.items()}

    def commit(self, version: int) -> None:
        """Brings the trained weights to the sampler. Where both share them, only the version moves."""
        if self._sampler is None:
            return
        if self._backend is not None and self._sampling_policy is not self._backend.policy:
            self._copy_weights()
        self._sampler.policy_version = version

    def _copy_weights(self) -> None:
        assert self._sampling_policy is not None
        held = dict(self._sampling_policy.named_model_parameters())
        sent = set()
        with torch.no_grad():
            for name, tensor in self._trainer().parameters():
                into = held.get(name)
                if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
                    raise WeightSyncError(f"the sampler cannot take tensor {name} {tuple(tensor.shape)} {tensor.dtype}")
                into.copy_(tensor)
                sent.add(name)
        if missing := held.keys() - sent:
            raise WeightSyncError(f"weights that the sampler holds were not sent: {sorted(missing)}")

    def weights(self) -> Any:
        """The trained model's weights, for commits: ``specs`` and ``gathered`` (see weights/endpoints.py)."""
        return self._trainer()

    def policy_version(self) -> int:
        """Updates done so far."""
        return self._trainer().policy_version

    def give_back(self) -> int:
        """Moves what training alone needs off the device; returns bytes."""
        return self._trainer().give_back() if self._backend is not None else 0

    def take_back(self) -> int:
        """Undoes ``give_back``; returns bytes."""
        return self._trainer().take_back() if self._backend is not None else 0

    def save(self, directory: Path) -> None:
        """Trainer state."""
        self._trainer().save(directory)

    def load(self, directory: Path) -> None:
        """What ``save`` wrote; the sampler gets the weights too."""
        self._trainer().load(directory)
        self.commit(self._trainer().policy_version)

    def export(self, directory: Path, *, write: bool) -> None:
        """A Hugging Face model directory. Collective: every rank gathers, the one with ``write`` writes."""
        state = {}
        for name, tensor in self._trainer().parameters():
            if write:
                state[name] = tensor.to("cpu", copy=True)
        if write:
            whole = self._loaded.model.named_parameters()  # a frozen encoder is no part of the trainer
            frozen = {name: p.detach().cpu() for name, p in whole if name not in state and p.numel()}
            export_model(self._loaded, {**frozen, **state}, directory, self._export_layout)

    def _trainer(self) -> Any:
        assert self._backend is not None, "this worker was built to sample only"
        return self._backend
