"""One process of a run: the models of the roles that it was asked for, with what trains and samples them.

Built by ``assemble_worker.build_worker`` inside that process; called directly by the local runtime, through Ray
otherwise.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from skirl.config.schema import Config
from skirl.errors import CheckpointError, ConfigError, SkirlError, WeightSyncError
from skirl.models.loading import LoadedModel, export_model
from skirl.models.merge import write_adapter
from skirl.models.policy import Policy
from skirl.records import Plan, Ratio, Request, RewardText, Role, Rollout, Sampling, ScoreFailure, UpdateReport
from skirl.rollouts.engines.policy import PolicySampler
from skirl.training.objective import Objective

__all__ = ["ReferenceScorer", "RewardScorer", "Trained", "Worker", "WorkerSpec"]


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


class RewardScorer(Protocol):
    """A local reward model with its own tokenizer."""

    def scores(self, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """Raw scores in order."""
        ...


@dataclass(frozen=True)
class Trained:
    """A model and what trains it.

    Attributes:
        model: called on packed rows: a policy, a value model, a policy beside its teacher.
        loaded: the Hugging Face model that is trained.
        backend: SingleBackend, DeepSpeedBackend, or None where it is not trained.
        layout: of its exports. averages: the backend keeps a moving average of its weights.
    """

    model: Any
    loaded: LoadedModel
    backend: Any | None
    layout: Literal["same", "native", "original"] = "same"
    averages: bool = False

    @property
    def trainer(self) -> Any:
        """The backend."""
        assert self.backend is not None, "this worker was built to sample only"
        return self.backend

    def export(self, directory: Path, *, write: bool) -> None:
        """A Hugging Face model directory; in it ema/, the same of the average, and adapter/, in peft's format.

        Collective: every rank gathers, the one with ``write`` writes.
        """
        self._export(self.trainer.parameters(), directory, write=write)
        if self.averages:
            self._export(self.trainer.ema_parameters(), directory / "ema", write=write)
        if self.loaded.lora is not None:
            adapter = _on_host(self.trainer.adapter_parameters(), keep=write)
            if write:
                write_adapter(self.loaded, adapter, directory / "adapter")

    def _export(self, parameters: Iterable[tuple[str, Tensor]], directory: Path, *, write: bool) -> None:
        state = _on_host(parameters, keep=write)
        if not write:
            return
        whole = self.loaded.model.named_parameters()  # a frozen encoder is no part of the trainer
        held = {n: p.detach().cpu() for n, p in whole if n in self.loaded.shapes and n not in state and p.numel()}
        export_model(self.loaded, {**held, **state}, directory, self.layout)


def _on_host(parameters: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Copies of tensors that are gathered one by one; none where another rank keeps them."""
    kept: dict[str, Tensor] = {}
    for name, tensor in parameters:
        if keep:
            kept[name] = tensor.to("cpu", copy=True)
    return kept


@torch.no_grad()
def _copy_weights(backend: Any, into: Policy) -> None:
    """The trained weights, adapters added in, into a whole copy of the model."""
    held = dict(into.named_model_parameters())
    sent = set()
    for name, tensor in backend.parameters():
        target = held.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise WeightSyncError(f"the sampler cannot take tensor {name} {tuple(tensor.shape)} {tensor.dtype}")
        target.copy_(tensor)
        sent.add(name)
    if missing := held.keys() - sent:
        raise WeightSyncError(f"weights that the sampler holds were not sent: {sorted(missing)}")


ReferenceScorer = Callable[[Plan, Sequence[int], Sampling | None], Mapping[int, Tensor]]
"""Log-probs under the reference by sequence index: of a plan, the micro-batches of these ranks."""


@dataclass
class Worker:
    """What one process can do; the methods are those of ``protocols.Trainer`` for its share of the work.

    Attributes:
        description: what it holds, for the log: the trainable parameters by role.
        policy, critic: models in training. reference: a frozen copy, or the policy with its adapters off.
        sampling_policy: what the sampler reads: the trained policy itself, or under ZeRO-3 a whole copy; None where
            this worker does not sample.
        reward_models: by name.
    """

    description: str
    policy: Trained | None = None
    critic: Trained | None = None
    reference: ReferenceScorer | None = None
    sampling_policy: Policy | None = None
    reward_models: Mapping[str, RewardScorer] = field(default_factory=dict[str, RewardScorer])

    def __post_init__(self) -> None:
        """The sampler reads the policy's tokenizer."""
        held = self.sampling_policy
        self._sampler = None if held is None else PolicySampler(held, held.loaded.tokenizer)

    # --------------------------------------------------------------------------------------------------------- sampling
    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request."""
        assert self._sampler is not None, "this worker was built without a sampler"
        return self._sampler.generate(requests)

    def commit(self, version: int) -> None:
        """Brings the trained weights to the sampler. Where both share them, only the version moves."""
        if self._sampler is None:
            return
        backend, sampled = None if self.policy is None else self.policy.backend, self.sampling_policy
        assert sampled is not None
        if backend is not None and sampled.loaded is not backend.policy.loaded:
            _copy_weights(backend, sampled)
        self._sampler.policy_version = version

    # --------------------------------------------------------------------------------------------------------- training
    def update(self, plan: Plan, consumed_prompts: int, roles: Sequence[Role]) -> Mapping[Role, UpdateReport]:
        """This rank's share of the plan, for those of the roles that this process holds, one after the other."""
        return {role: held.trainer.update(plan, consumed_prompts) for role, held in self._trained(roles)}

    def evaluate(self, plan: Plan) -> Mapping[str, Ratio]:
        """The objective's sums over this rank's share of the plan, and its "loss"."""
        return self._of("policy").trainer.evaluate(plan)

    def logprobs(
        self, plan: Plan, role: Role, ranks: Sequence[int], sampling: Sampling | None = None
    ) -> Mapping[int, np.ndarray]:
        """Log-probs by sequence index, of the micro-batches of the given ranks."""
        if role == "policy":
            found = self._of("policy").trainer.logprobs(plan, sampling)
        else:
            assert self.reference is not None, "this worker was built without a reference"
            found = self.reference(plan, ranks, sampling)
        return {i: t.numpy() for i, t in found.items()}

    def values(self, plan: Plan) -> Mapping[int, np.ndarray]:
        """The critic's values by sequence index, of this rank's micro-batches."""
        return {i: t.numpy() for i, t in self._of("critic").trainer.logprobs(plan).items()}

    def reward_scores(self, name: str, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """Raw scores by the reward model of this name. Texts that it fails on (they do not fit into memory) have no
        score, and the run's rules decide: a rank that failed would be the end of the run.
        """
        model = self.reward_models[name]
        try:
            return model.scores(texts)
        except SkirlError:
            raise
        except Exception as error:  # fence: counted, bounded by reward.max_failure_rate
            detail = "".join(traceback.format_exception(error, limit=-5))
            return [ScoreFailure("raised", f"{type(error).__name__}: {error}", detail)] * len(texts)

    # -------------------------------------------------------------------------------------------------- weights, memory
    def weights(self) -> Any:
        """The policy's weights, for commits: ``specs`` and ``gathered`` (see weights/endpoints.py)."""
        return self._of("policy").trainer

    def policy_version(self) -> int:
        """Updates of the policy done so far."""
        return self._of("policy").trainer.policy_version

    def give_back(self) -> int:
        """Moves what training alone needs off the device; returns bytes."""
        return sum(held.trainer.give_back() for _, held in self._trained())

    def take_back(self) -> int:
        """Undoes ``give_back``; returns bytes."""
        return sum(held.trainer.take_back() for _, held in self._trained())

    # ------------------------------------------------------------------------------------------------------------ files
    def save(self, directory: Path) -> None:
        """Trainer state, of each role in a directory of its name."""
        for role, held in self._trained():
            (directory / role).mkdir(exist_ok=True)
            held.trainer.save(directory / role)

    def load(self, directory: Path) -> None:
        """What ``save`` wrote; the sampler gets the weights too.

        Raises: CheckpointError: the checkpoint lacks a role of this run.
        """
        for role, held in self._trained():
            if not (directory / role).is_dir():
                raise CheckpointError(
                    f"{directory} holds no state of the {role} (no directory {role}/ in it): it was saved by a run "
                    f"without a {role}, or by a version of skirl that kept the policy's files beside state.json. "
                    "Resume with what saved it, or start in a new run.dir from an exported model"
                )
            held.trainer.load(directory / role)
        if self.policy is not None and self.policy.backend is not None:
            self.commit(self.policy.backend.policy_version)

    def export(self, directory: Path, role: Role, *, write: bool) -> None:
        """A Hugging Face model directory. Collective: every rank gathers, the one with ``write`` writes."""
        self._of(role).export(directory, write=write)

    def _trained(self, roles: Sequence[Role] = ("policy", "critic")) -> list[tuple[Role, Trained]]:
        held: dict[Role, Trained | None] = {"policy": self.policy, "critic": self.critic}
        return [(role, one) for role in roles if (one := held.get(role)) is not None and one.backend is not None]

    def _of(self, role: Role) -> Trained:
        held = self.critic if role == "critic" else self.policy
        if held is None:
            raise ConfigError(f"this run has no {role}: method.advantage.kind gae trains one")
        return held
