"""Contradictions between sections, found before anything starts. Nothing is repaired; the message names the fix."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from skirl.config.describe import plain
from skirl.config.schema import (
    Config,
    DeepSpeedBackendConfig,
    PlacedRole,
    PlacementGroupConfig,
    RayRuntimeConfig,
    VLLMEngineConfig,
)
from skirl.errors import ConfigError, MissingExtra

__all__ = ["Command", "Recipe", "check", "placement_groups", "placement_problems", "roles_in_use"]

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
    recipe = Recipe(config, provenance)
    problems = [*_sections(recipe, command), *_data(recipe, command), *_processes(recipe), *_engine(recipe)]
    problems += placement_problems(config, command, provenance)
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
class Recipe:
    """A config and where its values were written, for messages that name both."""

    config: Config
    provenance: Mapping[str, str]

    def at(self, path: str) -> str:
        """A setting as messages name it: "rollout.group_size = 1 (recipes/x.yaml:7)"."""
        value: Any = self.config
        for name in path.split("."):
            value = dict(value)[name]
        where = self.provenance.get(path, "")
        return f"{path} = {plain(value)}" + (f" ({where})" if where else "")

    def group(self, index: int | None, group: PlacementGroupConfig) -> str:
        """A group as messages name it: "runtime.placement[1] {roles: [rollout], gpus: 2} (recipes/x.yaml:7)"."""
        if index is None:
            return f"{self.at('trainer.ranks')}, one group for {' and '.join(group.roles)},"
        nodes = "" if group.nodes is None else f", nodes: {group.nodes}"
        where = self.provenance.get("runtime.placement", "")
        text = f"runtime.placement[{index}] {{roles: [{', '.join(group.roles)}], gpus: {group.gpus}{nodes}}}"
        return text + (f" ({where})" if where else "")


# ------------------------------------------------------------------------------------------------- what a command needs
def _sections(recipe: Recipe, command: Command) -> Iterator[str]:
    config = recipe.config
    if command == "sft" and config.sft is None:
        yield "skirl sft needs the section sft: add `sft: {steps: 300, batch_size: 16}` to the recipe."
    if command == "train" and config.train is None:
        yield "skirl train needs the section train: add `train: {steps: 100, prompts_per_step: 16}` to the recipe."
    if command == "train" and config.reward is None:
        yield "skirl train needs the section reward: add `reward: {python: my_reward.py}`, or reward.terms, or both."


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


# ------------------------------------------------------------------------------------------------------------ placement
def roles_in_use(config: Config, command: Command) -> tuple[PlacedRole, ...]:
    """Roles that a command starts. The policy's own engine samples inside the policy's ranks, so it is no role."""
    roles: list[PlacedRole] = ["policy"]
    if command == "train" and config.method.kl is not None:
        roles.append("reference")
    if isinstance(config.rollout.engine, VLLMEngineConfig) and (command != "sft" or config.data.eval):
        roles.append("rollout")
    return tuple(roles)


def placement_groups(config: Config, command: Command) -> tuple[PlacementGroupConfig, ...]:
    """``runtime.placement`` with the roles that the command starts; without one, all of them on one group.

    Only a Ray runtime has a placement.
    """
    used = roles_in_use(config, command)
    if not _written(config):
        return (PlacementGroupConfig(roles=used, gpus=config.trainer.ranks),)
    return tuple(
        PlacementGroupConfig(roles=tuple(role for role in used if role in g.roles), gpus=g.gpus, nodes=g.nodes)
        for g in _written(config)
        if set(g.roles) & set(used)
    )


def placement_problems(
    config: Config, command: Command, provenance: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """What is wrong with ``runtime.placement`` on any cluster, one sentence each; [] without a Ray runtime."""
    recipe = Recipe(config, provenance)
    if not isinstance(config.runtime, RayRuntimeConfig):
        return []
    problems = [*_roles(recipe, command)] if config.runtime.placement else []
    return problems or [*_sizes(recipe, command), *_sharing(recipe, command)]


def _roles(recipe: Recipe, command: Command) -> Iterator[str]:
    """Each role that is used is in one group, and no other is named."""
    config = recipe.config
    used, known = roles_in_use(config, command), roles_in_use(config, "train")
    method = recipe.at("method.preset")
    why = {
        "reference": "method.kl is null: set method.kl",
        "rollout": f"{recipe.at('rollout.engine.kind')} samples inside the policy's ranks: set rollout.engine to vllm",
        "critic": f"{method} trains none: leave it out",
        "reward": f"{method} asks for no reward model (reward functions are processes of the driver): leave it out",
    }
    for role in get_args(PlacedRole):
        places = [(i, group) for i, group in enumerate(_written(config)) for one in group.roles if one == role]
        if len(places) > 1:
            where = " and ".join(recipe.group(i, group) for i, group in places)
            yield f"{where}: {role} is named {len(places)} times; take it out of all but one group."
        if places and role not in known:
            advice = why[role] + ("" if role in ("critic", "reward") else f", or take {role} out of the group")
            yield f"{recipe.group(*places[0])}: {role} is not used: {advice}."
        if not places and role in used:
            yield (
                f"runtime.placement has no place for {role}, which skirl {command} starts: add it to a group "
                f"(such as {recipe.group(0, _written(config)[0])}), or give it a group of its own."
            )


def _sizes(recipe: Recipe, command: Command) -> Iterator[str]:
    """GPUs of each group against its ranks, engines and nodes."""
    config, engine = recipe.config, recipe.config.rollout.engine
    for index, group in _numbered(config, command):
        at, ranks = recipe.group(index, group), config.trainer.ranks
        if "policy" in group.roles and group.gpus != ranks:
            yield (
                f"{at} gives {group.gpus} GPUs to the policy, but {recipe.at('trainer.ranks')} "
                f"need{'s' if ranks == 1 else ''} {ranks}, one a rank: set gpus to {ranks} or trainer.ranks to "
                f"{group.gpus}."
            )
        a_node = group.gpus // (group.nodes or 1)
        if group.nodes is not None and group.gpus % group.nodes:
            yield (
                f"{at}: {group.gpus} GPUs do not spread evenly over {group.nodes} nodes: set gpus to "
                f"{max(a_node, 1) * group.nodes}, or nodes to a divisor of {group.gpus}."
            )
        if "rollout" not in group.roles or not isinstance(engine, VLLMEngineConfig):
            continue
        parallel, engines = engine.tensor_parallel_size, engine.engines or 1
        if engines * parallel > group.gpus:
            count = "1 engine" if engine.engines is None else recipe.at("rollout.engine.engines")
            more = "trainer.ranks" if index is None else "gpus"
            yield (
                f"{at} gives {group.gpus} GPUs to rollout, but {count} x "
                f"{recipe.at('rollout.engine.tensor_parallel_size')} need {engines * parallel}: set {more} to "
                f"{engines * parallel}, or lower rollout.engine.engines or their size."
            )
        elif group.nodes is not None and a_node % parallel:
            yield (
                f"{at}: {a_node} GPUs a node do not hold whole engines of "
                f"{recipe.at('rollout.engine.tensor_parallel_size')}: an engine lies on one node."
            )


def _sharing(recipe: Recipe, command: Command) -> Iterator[str]:
    """Who may share GPUs with the engines, and the transport that goes with it."""
    config = recipe.config
    for index, group in _numbered(config, command):
        if "rollout" not in group.roles:
            continue
        others = [role for role in group.roles if role != "rollout"]
        if others and "policy" not in others:
            yield (
                f"{recipe.group(index, group)}: engines share GPUs with {', '.join(others)} but not with the policy. "
                "They sleep only while the policy's GPUs train, so nothing would make room: move rollout to a group of "
                f"its own, or {', '.join(others)} to the policy's group."
            )
        transport = config.rollout.commit.transport
        if transport == "cuda_ipc" and "policy" not in others:
            yield (
                f"{recipe.at('rollout.commit.transport')} hands over memory of one GPU, but policy and rollout are on "
                f"different GPUs, since rollout is in {recipe.group(index, group)}: set it to auto (nccl), or put both "
                "roles into one group."
            )
        if transport == "nccl" and "policy" in others:
            yield (
                f"{recipe.at('rollout.commit.transport')} cannot join two processes on one GPU, but policy and rollout "
                "share theirs: set it to auto (cuda_ipc), or give rollout a group of its own."
            )


def _written(config: Config) -> tuple[PlacementGroupConfig, ...]:
    return config.runtime.placement if isinstance(config.runtime, RayRuntimeConfig) else ()


def _numbered(config: Config, command: Command) -> list[tuple[int | None, PlacementGroupConfig]]:
    """Groups that the command starts with their number in the recipe; None where the recipe has none."""
    used = set(roles_in_use(config, command))
    written = _written(config)
    if not written:
        return [(None, group) for group in placement_groups(config, command)]
    numbers = [i for i, group in enumerate(written) if used & set(group.roles)]
    return list(zip(numbers, placement_groups(config, command), strict=True))


# ------------------------------------------------------------------------------------------------------------- training
def _optimization(recipe: Recipe, command: Command) -> Iterator[str]:
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


def _sampling(recipe: Recipe) -> Iterator[str]:
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


def _method(recipe: Recipe) -> Iterator[str]:
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


def _method_warnings(recipe: Recipe) -> Iterator[str]:
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
