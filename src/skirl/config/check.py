"""Contradictions between sections, found before anything starts. Nothing is repaired; the message names the fix."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from skirl.config.describe import plain
from skirl.config.schema import Config, DeepSpeedBackendConfig, RayRuntimeConfig
from skirl.errors import ConfigError

__all__ = ["Command", "check"]

Command = Literal["sft", "train", "eval"]


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
    recipe = _Recipe(config, provenance)
    problems = [*_sections(recipe, command), *_data(recipe, command), *_processes(recipe)]
    warnings: list[str] = []
    if command != "eval":
        problems += [*_optimization(recipe, command)]
        warnings += [*_data_warnings(recipe)]
    if command == "train" and config.train is not None:
        problems += [*_sampling(recipe), *_method(recipe), *_reward(recipe)]
        warnings += [*_method_warnings(recipe)]
    if command == "sft" and config.sft is not None and config.sft.batch_size < config.trainer.ranks:
        warnings.append(f"{recipe.at('sft.batch_size')} is smaller than {recipe.at('trainer.ranks')}: ranks will idle.")
    if problems:
        head = "" if len(problems) == 1 else f"skirl {command} cannot run this recipe, {len(problems)} reasons:\n  "
        raise ConfigError(head + "\n  ".join(problems))
    return warnings


@dataclass(frozen=True, slots=True)
class _Recipe:
    config: Config
    provenance: Mapping[str, str]

    def at(self, path: str) -> str:
        """A setting as messages name it: "rollout.group_size = 1 (recipes/x.yaml:7)"."""
        value: Any = self.config
        for name in path.split("."):
            value = dict(value)[name]
        where = self.provenance.get(path, "")
        return f"{path} = {plain(value)}" + (f" ({where})" if where else "")


# ------------------------------------------------------------------------------------------------- what a command needs
def _sections(recipe: _Recipe, command: Command) -> Iterator[str]:
    config = recipe.config
    if command == "sft" and config.sft is None:
        yield "skirl sft needs the section sft: add `sft: {steps: 300, batch_size: 16}` to the recipe."
    if command == "train" and config.train is None:
        yield "skirl train needs the section train: add `train: {steps: 100, prompts_per_step: 16}` to the recipe."
    if command == "train" and config.reward is None:
        yield "skirl train needs the section reward: add `reward: {python: my_reward.py}`, or reward.terms, or both."


def _data(recipe: _Recipe, command: Command) -> Iterator[str]:
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


def _data_warnings(recipe: _Recipe) -> Iterator[str]:
    data = recipe.config.data
    for name, source in data.train.items():
        for held_out, other in data.eval.items():
            if source.path == other.path:
                yield f"data.train.{name} and data.eval.{held_out} are both {source.path}: nothing is held out."


# -------------------------------------------------------------------------------------------------------- where it runs
def _processes(recipe: _Recipe) -> Iterator[str]:
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
        amounts = {"runtime.cpus_per_rank": runtime.cpus_per_rank, "runtime.gpus_per_rank": runtime.gpus_per_rank}
        for path, amount in amounts.items():
            if amount is not None and amount > 1 and amount != int(amount):
                whole = int(amount)
                yield f"{recipe.at(path)}: Ray shares out whole units above 1; write {whole} or {whole + 1}."


# ------------------------------------------------------------------------------------------------------------- training
def _optimization(recipe: _Recipe, command: Command) -> Iterator[str]:
    config = recipe.config
    if set(config.model.freeze) == {"encoder", "adapter", "language_model"}:
        yield f"{recipe.at('model.freeze')} leaves nothing to train: take out at least one role."
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


def _sampling(recipe: _Recipe) -> Iterator[str]:
    rollout, method = recipe.config.rollout, recipe.config.method
    if rollout.sampling.temperature == 0:
        yield (
            f"{recipe.at('rollout.sampling.temperature')} is greedy: all responses to a prompt are equal and "
            "nothing is learned. Set it above 0 (1 is usual); evaluation is greedy in any case."
        )
    if method.advantage.kind in ("group_norm", "group_mean") and rollout.group_size == 1:
        yield (
            f"{recipe.at('method.advantage.kind')} compares the responses of a group, but "
            f"{recipe.at('rollout.group_size')} leaves nothing to compare: every advantage would be 0. "
            "Set rollout.group_size to 2 or more (8 is usual)."
        )


def _method(recipe: _Recipe) -> Iterator[str]:
    train, method = recipe.config.train, recipe.config.method
    if method.kl is not None and method.kl.where == "loss" and method.kl.estimator == "k1":
        yield (
            f"{recipe.at('method.kl.estimator')} has no useful gradient with {recipe.at('method.kl.where')} (in "
            "expectation it is 0): set the estimator to k3 or k2, or method.kl.where to reward."
        )
    if train is not None and train.prompts_per_step % method.mini_batches:
        prompts, parts = train.prompts_per_step, method.mini_batches
        good = ", ".join(str(number) for number in range(1, prompts + 1) if prompts % number == 0)
        yield (
            f"{recipe.at('train.prompts_per_step')} cannot be dealt out evenly to "
            f"{recipe.at('method.mini_batches')}: set train.prompts_per_step to "
            f"{(prompts // parts + 1) * parts}, or method.mini_batches to one of {good}."
        )


def _reward(recipe: _Recipe) -> Iterator[str]:
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


def _method_warnings(recipe: _Recipe) -> Iterator[str]:
    config, method, train = recipe.config, recipe.config.method, recipe.config.train
    budget = config.rollout.sampling.max_new_tokens
    if method.normalizer.kind == "constant" and method.normalizer.length < budget:
        yield (
            f"{recipe.at('method.normalizer.length')} is smaller than "
            f"{recipe.at('rollout.sampling.max_new_tokens')}: a long response weighs more than 1."
        )
    if method.kl is not None and method.kl.where == "reward" and method.kl.estimator != "k1":
        yield (
            f"{recipe.at('method.kl.estimator')} with {recipe.at('method.kl.where')}: in the reward only k1 has the "
            "gradient of the KL divergence; k2 and k3 are meant for method.kl.where = loss."
        )
    if train is not None:
        rollouts = train.prompts_per_step * config.rollout.group_size // method.mini_batches
        if rollouts < config.trainer.ranks:
            yield f"An optimizer step has {rollouts} rollouts for {recipe.at('trainer.ranks')}: ranks will idle."
