"""Contradictions between sections, found before anything starts. Nothing is repaired; the message names the fix."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from skirl.config.check_method import method_problems, method_warnings
from skirl.config.muon import check_muon
from skirl.config.placing import placement_groups, placement_problems, roles_in_use
from skirl.config.recipe import Command, Recipe
from skirl.config.rewards import RewardConfig
from skirl.config.schema import (
    Config,
    DeepSpeedBackendConfig,
    RayRuntimeConfig,
    VLLMEngineConfig,
)
from skirl.errors import ConfigError, MissingExtra

__all__ = ["Command", "Recipe", "check", "placement_groups", "placement_problems", "roles_in_use"]

OFFLINE = ("sft", "rm", "dpo", "kd", "prm")
"""Commands that learn from rows alone."""
SCORED = ("train", "sample")
"""Commands that score responses."""
EXAMPLES: Mapping[str, str] = {
    "sft": "{steps: 300, batch_size: 16}",
    "rm": "{steps: 300, batch_size: 16}",
    "prm": "{steps: 300, batch_size: 16}",
    "dpo": "{steps: 300, batch_size: 16, loss: dpo}",
    "kd": "{teacher: path/to/teacher, steps: 300, batch_size: 16}",
    "train": "{steps: 100, prompts_per_step: 16}",
    "sample": "{num_samples: 8, select: best}",
}
"""Command -> the section of its name, as it might be written."""


def check(config: Config, command: Command, provenance: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Checks what needs more than one section.

    Args:
        config: the recipe.
        command: what is going to run; sections that it does not read are not judged.
        provenance: path -> where its value was written; named in messages where given.

    Returns:
        Warnings: settings that run, but probably not as meant.

    Raises:
        ConfigError: one message with every contradiction.
    """
    recipe = Recipe(config, provenance)
    problems = [*_sections(recipe, command), *_data(recipe, command), *_processes(recipe), *_engine(recipe)]
    problems += placement_problems(config, command, provenance)
    warnings: list[str] = []
    if command not in ("eval", "sample"):
        problems += [*_optimization(recipe, command)]
        warnings += [*_data_warnings(recipe)]
    if command == "train" and config.train is not None:
        problems += [*method_problems(recipe), *_all_without_weight(recipe)]
        warnings += [*method_warnings(recipe)]
    if command in SCORED and dict(config)[command] is not None:
        problems += [*_reward(recipe)]
        warnings += [*_idle_weights(recipe)]
    if command == "kd":
        problems += [*_distillation(recipe)]
    if command in OFFLINE:
        warnings += [*_idle_ranks(recipe, command)]
    if problems:
        head = "" if len(problems) == 1 else f"skirl {command} cannot run this recipe, {len(problems)} reasons:\n  "
        raise ConfigError(head + "\n  ".join(problems))
    return warnings


# ------------------------------------------------------------------------------------------------- what a command needs
def _sections(recipe: Recipe, command: Command) -> Iterator[str]:
    sections = dict(recipe.config)
    if command in EXAMPLES and sections[command] is None:
        yield f"skirl {command} needs the section {command}: add `{command}: {EXAMPLES[command]}` to the recipe."
    if command == "train" and recipe.config.reward is None:
        yield "skirl train needs the section reward: add `reward: {python: my_reward.py}`, or reward.terms, or both."
    select = None if recipe.config.sample is None else recipe.config.sample.select
    if command == "sample" and select in ("best", "rejection", "pairs") and recipe.config.reward is None:
        yield (
            f"{recipe.at('sample.select')} goes by scores, but the recipe has no section reward: add "
            "`reward: {python: my_reward.py}`, or reward.terms, or set sample.select to all."
        )


def _idle_ranks(recipe: Recipe, command: Command) -> Iterator[str]:
    section: Any = dict(recipe.config)[command]
    if section is not None and section.batch_size < recipe.config.trainer.ranks:
        yield f"{recipe.at(f'{command}.batch_size')} is smaller than {recipe.at('trainer.ranks')}: ranks will idle."


def _data(recipe: Recipe, command: Command) -> Iterator[str]:
    data = recipe.config.data
    example = "{my_data: {path: manifest.jsonl}}"
    if command != "eval" and not data.train:
        yield f"skirl {command} needs training data, but data.train is empty: add `data: {{train: {example}}}`."
    if command == "eval" and not data.eval:
        yield f"skirl eval needs held-out data, but data.eval is empty: add `data: {{eval: {example}}}`."
    evaluation = recipe.config.evaluation
    asked = {"every": evaluation.every is not None, "before": evaluation.before}
    for name in [name for name, wanted in asked.items() if wanted and command != "eval" and not data.eval]:
        yield (
            f"{recipe.at(f'evaluation.{name}')} asks for evaluation, but data.eval is empty: "
            f"add `data: {{eval: {example}}}`, or remove evaluation.{name}."
        )
    if data.min_seconds >= data.max_seconds:
        yield (
            f"{recipe.at('data.min_seconds')} is not below {recipe.at('data.max_seconds')}, so that every clip is "
            "invalid: lower the one or raise the other."
        )


def _data_warnings(recipe: Recipe) -> Iterator[str]:
    data = recipe.config.data
    for name, source in data.train.items():
        for held_out, other in data.eval.items():
            if source.path == other.path:
                yield f"data.train.{name} and data.eval.{held_out} are both {source.path}: nothing is held out."


# -------------------------------------------------------------------------------------------------------- where it runs
def _processes(recipe: Recipe) -> Iterator[str]:
    trainer, runtime = recipe.config.trainer, recipe.config.runtime
    if isinstance(trainer.backend, DeepSpeedBackendConfig):
        if trainer.ranks > 1 and not isinstance(runtime, RayRuntimeConfig):
            yield (
                f"{recipe.at('trainer.backend.kind')} needs one process for each of {recipe.at('trainer.ranks')}, but "
                f"{recipe.at('runtime.kind')} has one process in all: set runtime to ray, or trainer.backend to single "
                "(which runs the ranks one after another)."
            )
        if trainer.backend.offload_optimizer and trainer.backend.zero_stage == 0:
            yield (
                f"{recipe.at('trainer.backend.offload_optimizer')} needs a sharded optimizer, but "
                f"{recipe.at('trainer.backend.zero_stage')}: raise it to 1 or more, or set offload_optimizer to false."
            )
    elif trainer.ranks > 1 and isinstance(runtime, RayRuntimeConfig):
        yield (
            f"{recipe.at('trainer.backend.kind')} is one process, but {recipe.at('trainer.ranks')} with "
            f"{recipe.at('runtime.kind')} asks for one process a rank: set trainer.backend to deepspeed, "
            "or runtime to local (which runs the ranks one after another)."
        )
    if isinstance(runtime, RayRuntimeConfig):
        amount = runtime.cpus_per_rank
        if amount > 1 and amount != int(amount):
            whole, path = int(amount), "runtime.cpus_per_rank"
            yield f"{recipe.at(path)}: Ray shares out whole units above 1; write {whole} or {whole + 1}."
    elif isinstance(recipe.config.rollout.engine, VLLMEngineConfig):
        yield (
            f"{recipe.at('rollout.engine.kind')} runs each engine as a Ray actor, but {recipe.at('runtime.kind')} has "
            "one process in all: set runtime to ray, or rollout.engine to policy."
        )


def _engine(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.config.rollout
    if isinstance(rollout.engine, VLLMEngineConfig):
        yield from _vllm_arguments(recipe)
    elif rollout.vllm:
        name = next(iter(rollout.vllm))
        yield (
            f"{recipe.at(f'rollout.vllm.{name}')} is an argument of vLLM, but {recipe.at('rollout.engine.kind')}: set "
            "rollout.engine to vllm, or remove it from the recipe."
        )


def _vllm_arguments(recipe: Recipe) -> Iterator[str]:
    """Names that the installed vLLM lacks, or that skirl sets itself. Without a vLLM nothing is judged here."""
    from skirl.rollouts.engines.arguments import check_arguments  # light: vLLM is read as text

    for name in recipe.config.rollout.vllm:
        try:
            check_arguments([name])
        except MissingExtra:
            return
        except ConfigError as problem:
            yield f"{recipe.at(f'rollout.vllm.{name}')}: {str(problem).partition(': ')[2]}."


# ------------------------------------------------------------------------------------------------------------- training
def _optimization(recipe: Recipe, command: Command) -> Iterator[str]:
    config = recipe.config
    if set(config.model.freeze) == {"encoder", "adapter", "language_model"}:
        yield f"{recipe.at('model.freeze')} leaves nothing to train: take out at least one role."
    yield from _muon(recipe, command)
    schedule = config.trainer.optim.schedule
    if schedule.kind == "constant" and schedule.final != 0:
        yield (
            f"{recipe.at('trainer.optim.schedule.final')} has no meaning with "
            f"{recipe.at('trainer.optim.schedule.kind')}: set the kind to linear or cosine, or remove final."
        )
    budget, cap = config.rollout.sampling.max_new_tokens, config.trainer.max_tokens_per_micro_batch
    if command == "train" and budget >= cap:
        yield (
            f"A prompt and a response of {recipe.at('rollout.sampling.max_new_tokens')} tokens do not fit into "
            f"{recipe.at('trainer.max_tokens_per_micro_batch')}: lower the one or raise the other."
        )


def _muon(recipe: Recipe, command: Command) -> Iterator[str]:
    config = recipe.config
    optimizers = {"trainer.optim": config.trainer.optim}
    if command == "train" and config.critic_in_use is not None:
        optimizers["critic.optim"] = config.critic_in_use.optim
    for path, optim in optimizers.items():
        try:
            check_muon(optim, config.trainer.backend, path)
        except ConfigError as problem:
            yield f"{recipe.at(f'{path}.muon.lr')}, {recipe.at('trainer.backend.zero_stage')}: {problem}."


def _distillation(recipe: Recipe) -> Iterator[str]:
    kd = recipe.config.kd
    if kd is not None and kd.data == "on_policy" and kd.share < 1:
        yield (
            f"{recipe.at('kd.share')} mixes in the cross-entropy of the answers' own tokens, but with "
            f"{recipe.at('kd.data')} the policy wrote them itself: set share to 1, or data to off_policy."
        )


def _reward(recipe: Recipe) -> Iterator[str]:
    config, reward = recipe.config, recipe.config.reward
    if reward is None:
        return
    for name, term in reward.terms.items():
        if term.kind == "language" and config.data.prompt == "forced":
            yield (
                f"reward.terms.{name} scores the language tag that the policy writes, but with "
                f"{recipe.at('data.prompt')} the tag stands in the prompt: set data.prompt to tagged, or remove the "
                f"term (reward.terms.{name}: null)."
            )
    if reward.python is None and (reward.weights or reward.function != "reward"):
        path = "reward.weights" if reward.weights else "reward.function"
        yield f"{recipe.at(path)} belongs to a reward file, but reward.python is null: set it, or remove {path}."
    for name in reward.weights:
        if name in reward.terms:
            yield (
                f"reward.weights.{name} and reward.terms.{name} share a name, and would be one part in the logs: "
                "rename one of them."
            )


def _all_without_weight(recipe: Recipe) -> Iterator[str]:
    reward = recipe.config.reward
    if reward is None or reward.python is not None:
        return  # what its parts are called, and so what they weigh, shows when it runs
    weights = dict(_weights(reward))
    if not any(weights.values()):
        path = next(iter(weights))
        yield (
            f"{recipe.at(path)}, and no other source of scores weighs anything: every response would be worth 0 and "
            f"nothing learned. Set {path} to 1, or add a source that counts."
        )


def _idle_weights(recipe: Recipe) -> Iterator[str]:
    reward = recipe.config.reward
    if reward is None or reward.combine != "python":
        return
    for path, _ in _weights(reward):
        if recipe.provenance.get(path, "default") != "default":
            yield (
                f"{recipe.at(path)} has no effect: with {recipe.at('reward.combine')} the parts that the function "
                "returns count alone, and the rest is logged."
            )


def _weights(reward: RewardConfig) -> Iterator[tuple[str, float]]:
    """Path and factor of every source but the Python file."""
    for section, sources in (("terms", reward.terms), ("services", reward.services), ("models", reward.models)):
        for name, source in sources.items():
            yield f"reward.{section}.{name}.weight", source.weight
