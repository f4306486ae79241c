"""A rank's side of the wiring: a spec becomes models, backend and sampler, in the process that will hold them."""

from typing import Any

import torch

from skirl.config.schema import Config, DeepSpeedBackendConfig
from skirl.models.attention import PACKED_ATTENTION, register_packed_attention
from skirl.models.clips import ClipStore
from skirl.models.compile import compile_policy
from skirl.models.loading import LoadedModel, load_model, load_tokenizer_and_family, set_trainable
from skirl.models.policy import Policy, check_packing
from skirl.prompts.decode import load_clip
from skirl.runtime.device import pick_device
from skirl.runtime.worker import Worker, WorkerSpec
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import Objective

__all__ = ["build_worker"]

PACKING_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def build_worker(spec: WorkerSpec) -> Worker:
    """One rank's models and trainer, in this process."""
    config = spec.config
    torch.manual_seed(config.run.seed)
    device = pick_device()
    reference = None
    if spec.with_reference and "reference" in spec.holds:
        reference_model, reference, _ = _policy(config, device, frozen=True)
        compile_policy(reference, config.trainer.compile)
        if "policy" not in spec.holds:
            return _worker(
                spec, reference_model, None, sampling_policy=None, reference=reference, description="reference"
            )
    loaded, policy, trainable = _policy(config, device, frozen=spec.objective is None)
    packing = check_packing(policy, PACKING_TOLERANCE[config.model.dtype])
    whole = isinstance(config.trainer.backend, DeepSpeedBackendConfig) and config.trainer.backend.zero_stage == 3
    compile_policy(policy, config.trainer.compile, sharded=whole and spec.objective is not None)
    backend = None if spec.objective is None else _backend(spec, policy, spec.objective)
    sampling_policy = None
    if spec.samples:
        sampling_policy = _policy(config, device, frozen=True)[1] if backend is not None and whole else policy
    description = f"parameters:\n{trainable}\nlargest difference of packed hidden states: {packing:.1e}"
    return _worker(spec, loaded, backend, sampling_policy=sampling_policy, reference=reference, description=description)


def _worker(
    spec: WorkerSpec,
    loaded: LoadedModel,
    backend: Any | None,
    *,
    sampling_policy: Policy | None,
    reference: Policy | None,
    description: str,
) -> Worker:
    return Worker(
        loaded,
        backend,
        sampling_policy=sampling_policy,
        reference=reference,
        objective=spec.objective,
        export_layout=spec.config.model.export_layout,
        description=description,
    )


def _policy(config: Config, device: torch.device, *, frozen: bool) -> tuple[LoadedModel, Policy, str]:
    """The model on its device, the policy around it, and a table of what trains."""
    register_packed_attention()
    model = config.model
    files = load_tokenizer_and_family(model.path)
    parts = {"": "sdpa", "text_config": PACKED_ATTENTION, "audio_config": "sdpa"}
    loaded = load_model(
        model.path,
        dtype=model.dtype,
        attn_implementation=PACKED_ATTENTION if files.family.placeholder is None else parts,
        gradient_checkpointing=model.gradient_checkpointing and not frozen,
    )
    trainable = "all frozen"
    if frozen:
        loaded.model.requires_grad_(False)
    else:
        trainable = str(set_trainable(loaded.model, loaded.family, model.freeze))
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
    policy = Policy(loaded, clips)
    if model.gradient_checkpointing and not frozen:
        policy.language_model.train()  # transformers recomputes layers in train mode only
        _without_dropout(policy)
    return loaded, policy, trainable


def _without_dropout(policy: Policy) -> None:
    """Dropout would make the ratio of policy to sampler random."""
    for module in policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):  # getattr: an attribute of attention modules
            vars(module)["attention_dropout"] = 0.0


def _backend(spec: WorkerSpec, policy: Policy, objective: Objective) -> Any:
    trainer = spec.config.trainer
    if not isinstance(trainer.backend, DeepSpeedBackendConfig):
        return SingleBackend(policy, objective, trainer.optim, spec.total_prompts, offload=trainer.offload)
    from skirl.training.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(
        policy,
        objective,
        trainer.optim,
        trainer.backend,
        dtype=spec.config.model.dtype,
        total_prompts=spec.total_prompts,
        offload=trainer.offload,
    )
