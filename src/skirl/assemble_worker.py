"""A rank's side of the wiring: a spec becomes models, backends and sampler, in the process that will hold them.

spec -> reference | policy (language model, value model, policy beside its teacher) | critic | reward models -> Worker
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skirl.config.schema import Config, DeepSpeedBackendConfig, EMAConfig, OptimConfig
from skirl.models.adapters import adapters_off, add_adapters, check_reference
from skirl.models.attention import PACKED_ATTENTION, register_packed_attention
from skirl.models.clips import ClipStore
from skirl.models.compile import compile_policy
from skirl.models.loading import LoadedModel, load_model, load_tokenizer_and_family, set_trainable
from skirl.models.policy import PACKING_TOLERANCE, PackedModel, Policy, check_packing
from skirl.models.scalar_heads import HeadKind
from skirl.models.value import ValueModel, load_value_model
from skirl.prompts.decode import load_clip
from skirl.records import Plan, Sampling
from skirl.runtime.device import pick_device
from skirl.runtime.worker import ReferenceScorer, RewardScorer, Trained, Worker, WorkerSpec
from skirl.training.backends.single import SingleBackend, scoring_pass
from skirl.training.objective import Objective
from skirl.training.value_objective import StepRewardObjective

__all__ = ["build_worker"]


def build_worker(spec: WorkerSpec) -> Worker:
    """The models that this process holds, and what trains them."""
    config, device, lines = spec.config, pick_device(), list[str]()
    torch.manual_seed(config.run.seed)
    register_packed_attention()
    policy = critic = sampling_policy = None
    reference = _frozen_reference(spec, device)
    if reference is not None:
        lines.append("reference: all frozen")
    if "policy" in spec.holds:
        policy = _policy(spec, device, lines)
        sampling_policy = _sampling_policy(spec, policy, device)
        if reference is None and spec.with_reference and config.model.lora is not None:
            reference = _without_adapters(policy)
            lines.append("reference: the policy without its adapters")
    if "critic" in spec.holds and spec.critic_objective is not None:
        critic = _critic(spec, spec.critic_objective, device, lines)
    rewards = _reward_models(spec, device)
    lines += [f"reward model {name}: all frozen" for name in rewards]
    return Worker(
        description="\n".join(lines),
        policy=policy,
        critic=critic,
        reference=reference,
        sampling_policy=sampling_policy,
        reward_models=rewards,
    )


# ---------------------------------------------------------------------------------------------------------------- roles
def _policy(spec: WorkerSpec, device: torch.device, lines: list[str]) -> Trained:
    """What the role "policy" is in this run, with its backend where the run trains."""
    trains, trainer = spec.objective is not None, spec.config.trainer
    if spec.trains == "value":
        kind: HeadKind = "token" if isinstance(spec.objective, StepRewardObjective) else "sequence"
        loaded = _loaded(spec.config, spec.config.model.path, device, trained=trains, head=kind)
        model: PackedModel = ValueModel(loaded.model, loaded.clips, reads="at")
        model.scalar_head.mean = model.scalar_head.std = None  # those of the start's scores
        steps = spec.config.prm if kind == "token" else None
        model.scalar_head.separator = None if steps is None else steps.separator
    else:
        loaded = _loaded(spec.config, spec.config.model.path, device, trained=trains)
        model = Policy(loaded.model, loaded.clips)
    lines.append(_prepared(spec, model, loaded, "parameters" if spec.trains == "policy" else spec.trains))
    if spec.trains == "distilled":
        model = _beside_teacher(spec, model, device)
    backend = None if spec.objective is None else _backend(spec, model, spec.objective, trainer.optim, ema=trainer.ema)
    averages = backend is not None and trainer.ema is not None
    return Trained(model, loaded.model, backend, spec.config.model.export_layout, averages=averages)


def _sampling_policy(spec: WorkerSpec, policy: Trained, device: torch.device) -> Policy | None:
    """The policy itself, or under ZeRO-3 a whole copy."""
    if not spec.samples or spec.trains == "value":
        return None
    if policy.backend is not None and _is_sharded(spec.config):
        return _frozen(spec.config, spec.config.model.path, device)
    return policy.model.policy if spec.trains == "distilled" else policy.model


def _critic(spec: WorkerSpec, objective: Objective, device: torch.device, lines: list[str]) -> Trained:
    config = spec.config
    critic = config.critic_in_use
    assert critic is not None, "a critic's objective without method.advantage gae"
    loaded = _loaded(config, critic.path or config.model.path, device, trained=True, head="token")
    model = ValueModel(loaded.model, loaded.clips, reads="before")
    model.scalar_head.separator = None  # where it starts from a process reward model
    lines.append(_prepared(spec, model, loaded, "critic"))
    backend = _backend(spec, model, objective, critic.optim, ema=None)
    return Trained(model, loaded.model, backend, config.model.export_layout)


def _frozen_reference(spec: WorkerSpec, device: torch.device) -> ReferenceScorer | None:
    """A copy of the start that never changes; none where the policy without its adapters is that."""
    if not spec.with_reference or "reference" not in spec.holds or spec.objective is None:
        return None
    if spec.config.model.lora is not None and spec.reference_path is None:
        return None
    model, usual = _frozen(spec.config, spec.reference_path or spec.config.model.path, device), spec.objective.sampling
    compile_policy(model, spec.config.trainer.compile)

    def score(plan: Plan, ranks: Sequence[int], sampling: Sampling | None) -> Mapping[int, Tensor]:
        return scoring_pass(model, sampling or usual, plan, ranks)

    return score


def _without_adapters(policy: Trained) -> ReferenceScorer:
    """The policy with its adapters off: the reference of LoRA."""
    check_reference(policy.model)

    def score(plan: Plan, ranks: Sequence[int], sampling: Sampling | None) -> Mapping[int, Tensor]:
        with adapters_off(policy.model):
            return policy.trainer.logprobs(plan, sampling)

    return score


def _beside_teacher(spec: WorkerSpec, policy: PackedModel, device: torch.device) -> Any:
    """The policy with the teacher whose distribution it learns."""
    from skirl.models.distilled import Distilled

    config = spec.config
    assert config.kd is not None
    teacher = _frozen(config, spec.reference_path or config.kd.teacher, device)
    compile_policy(teacher, config.trainer.compile)
    assert isinstance(policy, Policy)
    return Distilled(policy, teacher, direction=config.kd.divergence, temperature=config.kd.temperature)


def _reward_models(spec: WorkerSpec, device: torch.device) -> dict[str, RewardScorer]:
    if not spec.reward_models:
        return {}
    from skirl.models.reward_model import RewardModel

    assert spec.config.reward is not None
    return {name: RewardModel(spec.config.reward.models[name], device) for name in spec.reward_models}


# --------------------------------------------------------------------------------------------------------------- models
@dataclass(frozen=True)
class _Loaded:
    """A model on its device, the clips that it hears, and a table of what trains."""

    model: LoadedModel
    clips: ClipStore | None
    trainable: str


def _loaded(
    config: Config, path: Path, device: torch.device, *, trained: bool, head: HeadKind | None = None
) -> _Loaded:
    """Loads a checkpoint as the recipe's policy is loaded. ``head``: with a scalar head of this kind."""
    model, files = config.model, load_tokenizer_and_family(path, scalar_heads=head is not None)
    parts = {"": "sdpa", "text_config": PACKED_ATTENTION, "audio_config": "sdpa"}
    options: dict[str, Any] = {
        "dtype": model.dtype,
        "attn_implementation": PACKED_ATTENTION if files.family.placeholder is None else parts,
        "gradient_checkpointing": model.gradient_checkpointing and trained,
    }
    loaded = load_model(path, **options) if head is None else load_value_model(path, kind=head, **options)
    trainable = "all frozen"
    if trained:
        if model.lora is not None:
            add_adapters(loaded, model.lora, seed=config.run.seed)
        trainable = str(set_trainable(loaded.model, loaded.family, model.freeze))
    else:
        loaded.model.requires_grad_(False)
    loaded.model.to(device)
    clips = None
    if loaded.family.placeholder is not None:
        encoder = loaded.model.get_submodule(loaded.family.roles["encoder"])
        clips = ClipStore(
            loaded.model,
            loaded.family,
            loaded.processor,
            load=load_clip,
            encoder_frozen=not any(p.requires_grad for p in encoder.parameters()),
        )
    return _Loaded(loaded, clips, trainable)


def _frozen(config: Config, path: Path, device: torch.device) -> Policy:
    loaded = _loaded(config, path, device, trained=False)
    return Policy(loaded.model, loaded.clips)


def _prepared(spec: WorkerSpec, model: PackedModel, loaded: _Loaded, name: str) -> str:
    """Checks packing and compiles a model that trains or samples; returns its description."""
    config, trains = spec.config, spec.objective is not None
    if config.model.gradient_checkpointing and trains:
        model.language_model.train()  # transformers recomputes layers in train mode only
        _without_dropout(model)
    model.set_router_aux(config.model.router_aux_coef)
    packing = check_packing(model, PACKING_TOLERANCE[config.model.dtype])
    compile_policy(model, config.trainer.compile, sharded=_is_sharded(config) and trains)
    return f"{name}:\n{loaded.trainable}\nlargest difference of packed hidden states: {packing:.1e}"


def _is_sharded(config: Config) -> bool:
    backend = config.trainer.backend
    return isinstance(backend, DeepSpeedBackendConfig) and backend.zero_stage == 3


def _without_dropout(model: PackedModel) -> None:
    """Dropout would make the ratio of policy to sampler random."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):  # getattr: an attribute of attention modules
            vars(module)["attention_dropout"] = 0.0


def _backend(spec: WorkerSpec, model: Any, objective: Objective, optim: OptimConfig, *, ema: EMAConfig | None) -> Any:
    trainer = spec.config.trainer
    shared: dict[str, Any] = {"total_prompts": spec.total_prompts, "offload": trainer.offload, "ema": ema}
    if not isinstance(trainer.backend, DeepSpeedBackendConfig):
        return SingleBackend(model, objective, optim, **shared)
    from skirl.training.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(model, objective, optim, trainer.backend, dtype=spec.config.model.dtype, **shared)
