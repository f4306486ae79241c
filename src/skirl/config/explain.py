"""What a command starts: processes, where they are, and how much a step and a run are. The loss is in formula.py."""

from collections.abc import Iterator
from typing import Any

from skirl.config.describe import plain
from skirl.config.placing import needs_reference, samples
from skirl.config.recipe import Command
from skirl.config.rewards import RewardConfig
from skirl.config.schema import (
    Config,
    DeepSpeedBackendConfig,
    PlacedRole,
    PolicyEngineConfig,
    RayRuntimeConfig,
    TrainConfig,
)

__all__ = ["processes"]


def processes(config: Config, command: Command) -> list[tuple[str, str]]:
    """(role, what and where) of everything that a command starts."""
    same = "in the driver" if not isinstance(config.runtime, RayRuntimeConfig) else "in the policy's ranks"
    lines = [("driver", "1 process on this machine: loop, plan, ledger")]
    if isinstance(config.runtime, RayRuntimeConfig):
        lines.append(("runtime", _ray(config.runtime)))
    lines.append(("policy", _policy(config, command)))
    lines += [*_other_models(config, command, same)]
    if samples(config, command):
        budget = config.rollout.sampling.max_new_tokens
        lines.append(("rollouts", f"{_sampler(config, same)}, {budget} tokens each"))
    if command in ("train", "sample") and config.reward is not None:
        lines += [*_rewards(config.reward)]
    return [*lines, *_amounts(config, command)]


def _other_models(config: Config, command: Command, same: str) -> Iterator[tuple[str, str]]:
    if needs_reference(config, command) or command == "train":
        why = "method.kl" if command == "train" else "dpo.loss"
        if not needs_reference(config, command):
            text = f"none ({why} is null)"
        elif config.model.lora is not None:
            text = "the policy without its adapters"
        else:
            text = f"frozen copy of the policy, {_place(config, 'reference', same)} ({why})"
        yield "reference", text
    critic = config.critic_in_use if command == "train" else None
    if critic is not None:
        start = "model.path" if critic.path is None else str(critic.path)
        alone = f", alone in the first {_count(critic.warmup_steps, 'step')}" if critic.warmup_steps else ""
        yield "critic", f"value head on {start}, {_place(config, 'critic', same)}{alone}"
    if command == "kd" and config.kd is not None:
        yield "teacher", f"{config.kd.teacher}, beside the policy"
    if command in ("train", "sample") and config.reward is not None:
        for name, model in config.reward.models.items():
            yield f"reward model {name}", f"{model.path}, {_place(config, 'reward', same)}"


def _place(config: Config, role: PlacedRole, same: str) -> str:
    """Where a role is: with the policy, or on GPUs of its own."""
    runtime = config.runtime
    if not isinstance(runtime, RayRuntimeConfig):
        return same
    apart = [group for group in runtime.placement if role in group.roles and "policy" not in group.roles]
    return f"on GPUs of its own ({apart[0].gpus})" if apart else same


def _rewards(reward: RewardConfig) -> Iterator[tuple[str, str]]:
    if reward.python is not None or reward.terms:
        yield "rewards", f"{_count(reward.num_workers, 'process')}, {plain(reward.timeout_s)} s a call"
    for name, service in reward.services.items():
        number = _count(len(service.urls), "service")
        yield f"reward {name}", f"{number}, up to {service.max_in_flight} requests each at once"


def _sampler(config: Config, same: str) -> str:
    engine = config.rollout.engine
    if isinstance(engine, PolicyEngineConfig):
        return f"the policy's own forward pass, {same}: up to {engine.batch_size} responses a rank at once"
    size = engine.tensor_parallel_size
    parallel = f" of {size} GPUs" if size > 1 else ""
    fill = f"one for {'each GPU' if size == 1 else f'every {size} GPUs'} of its group (1 without GPUs)"
    count = fill if engine.engines is None else str(engine.engines)
    return f"vLLM engines{parallel}: {count}, up to {engine.max_in_flight} responses each at once"


def _ray(runtime: RayRuntimeConfig) -> str:
    gpus = {"auto": "1 GPU where the cluster has GPUs", "gpu": "1 GPU", "cpu": "no GPU"}[runtime.device]
    cluster = f"at {runtime.address}" if runtime.address else "started on this machine"
    return f"Ray, {cluster}; a place is {runtime.cpus_per_rank:g} CPU and {gpus}"


def _policy(config: Config, command: Command) -> str:
    trainer, runtime = config.trainer, config.runtime
    backend = "single"
    if isinstance(trainer.backend, DeepSpeedBackendConfig):
        offload = ", optimizer in host memory" if trainer.backend.offload_optimizer else ""
        backend = f"deepspeed ZeRO-{trainer.backend.zero_stage}{offload}"
    if config.model.lora is not None:
        quantized = "" if config.model.lora.quantize is None else f", base weights in {config.model.lora.quantize}"
        backend += f", LoRA of rank {config.model.lora.rank}{quantized}"
    what = config.model.dtype if command in ("eval", "sample") else f"{config.model.dtype}, {backend}"
    if not isinstance(runtime, RayRuntimeConfig):
        turns = ", one after another" if trainer.ranks > 1 else ""
        return f"{_count(trainer.ranks, 'rank')} in the driver{turns}: {what}"
    return f"{_count(trainer.ranks, 'rank')}: {what}"


def _amounts(config: Config, command: Command) -> list[tuple[str, str]]:
    if command == "train" and config.train is not None:
        return _train_amounts(config, config.train)
    if command == "sample" and config.sample is not None:
        return [("a prompt", f"{_count(config.sample.num_samples, 'response')}, kept: {config.sample.select}")]
    section: Any = dict(config).get(command)
    if command in ("eval", "train", "sample") or section is None:
        return []
    noun = _unit(config, command)
    return [
        ("a step", f"{_count(section.batch_size, noun)}"),
        ("the run", f"{section.steps} steps, {_count(section.steps * section.batch_size, noun)}"),
    ]


def _unit(config: Config, command: Command) -> str:
    """What an offline command counts."""
    if command == "rm":
        return "pair"
    if command == "dpo" and config.dpo is not None:
        return "response" if config.dpo.loss.kind == "kto" else "pair"
    return "row"


def _train_amounts(config: Config, train: TrainConfig) -> list[tuple[str, str]]:
    size, method = config.rollout.group_size, config.method
    rollouts = train.prompts_per_step * size
    updates = method.epochs * method.mini_batches
    batch = f"{train.prompts_per_step} prompts x {size} responses = {rollouts} rollouts"
    step = f"{batch}, {_count(updates, 'optimizer step')}"
    run = f"{train.steps} steps, {train.steps * train.prompts_per_step} prompts, {train.steps * rollouts} rollouts"
    lines = [("a step", step), ("the run", run)]
    if method.dynamic_sampling is not None:
        most = train.prompts_per_step * method.dynamic_sampling.max_rounds
        lines.append(("", f"and what replaces groups without signal: up to {most} prompts a step in all"))
    return lines


def _count(number: int, noun: str) -> str:
    plural = noun + "es" if noun.endswith("s") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"
