"""Which roles a command starts, and what is wrong with ``runtime.placement`` on any cluster."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from skirl.config.check_files import checkpoint_settings
from skirl.config.recipe import Command, Recipe
from skirl.config.schema import Config, PlacedRole, PlacementGroupConfig, RayRuntimeConfig, VLLMEngineConfig

__all__ = ["needs_reference", "placement_groups", "placement_problems", "roles_in_use", "samples"]


def roles_in_use(config: Config, command: Command) -> tuple[PlacedRole, ...]:
    """Roles that a command starts. The policy's own engine samples inside the policy's ranks, so it is no role.

    Nor is a reference that is the policy without its adapters, or a teacher, which stands beside the policy.
    """
    wanted: dict[PlacedRole, bool] = {
        "policy": True,
        "reference": needs_reference(config, command) and config.model.lora is None,
        "critic": command == "train" and config.method.needs_critic,
        "reward": command in ("train", "sample") and config.reward is not None and bool(config.reward.models),
        "rollout": isinstance(config.rollout.engine, VLLMEngineConfig) and samples(config, command),
    }
    return tuple(role for role, used in wanted.items() if used)


def needs_reference(config: Config, command: Command) -> bool:
    """The command scores under the policy's start."""
    if command == "dpo":
        return config.dpo is not None and config.dpo.loss.kind in ("dpo", "ipo", "kto")
    return command == "train" and config.method.kl is not None


def samples(config: Config, command: Command) -> bool:
    """The command samples responses. ``sft`` does so to judge speech; text is judged by its held-out loss."""
    if command == "kd":
        return config.kd is not None and config.kd.data == "on_policy"
    if command == "sft":
        return bool(config.data.eval) and _may_hear(config.model.path)
    return command in ("train", "eval", "sample")


def _may_hear(checkpoint: Path) -> bool:
    """A checkpoint's config.json has an audio encoder; also where there is none to read, as with a recipe for other
    machines: a place too many is seen in what is shown, one too few ends a run.
    """
    settings = checkpoint_settings(checkpoint)
    return settings is None or not {"audio_config", "thinker_config"}.isdisjoint(settings)


def _known(config: Config, command: Command) -> set[PlacedRole]:
    """Roles that some command of this recipe starts: one placement serves them all."""
    written: dict[Command, bool] = {
        "sft": config.sft is not None,
        "dpo": config.dpo is not None,
        "kd": config.kd is not None,
        "sample": config.sample is not None,
        "train": True,
        "eval": True,
        command: True,
    }
    return {role for name, there in written.items() if there for role in roles_in_use(config, name)}


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
    used, known = roles_in_use(config, command), _known(config, command)
    for role in get_args(PlacedRole):
        places = [(i, group) for i, group in enumerate(_written(config)) for one in group.roles if one == role]
        if len(places) > 1:
            where = " and ".join(recipe.group(i, group) for i, group in places)
            yield f"{where}: {role} is named {len(places)} times; take it out of all but one group."
        if places and role not in known:
            yield f"{recipe.group(*places[0])}: {role} is not used: {_why_unused(recipe, role)}."
        if not places and role in used:
            yield (
                f"runtime.placement has no place for {role}, which skirl {command} starts: add it to a group "
                f"(such as {recipe.group(0, _written(config)[0])}), or give it a group of its own."
            )


def _why_unused(recipe: Recipe, role: PlacedRole) -> str:
    if role == "critic":
        kind = recipe.at("method.advantage.kind")
        return f"{kind} ({recipe.at('method.preset')}) trains none: leave it out"
    if role == "reward":
        return "reward.models names no reward model (reward functions are processes of the driver): leave it out"
    if role == "rollout":
        engine = recipe.at("rollout.engine.kind")
        return (
            f"{engine} samples inside the policy's ranks: set rollout.engine to vllm, or take rollout out of the group"
        )
    if recipe.config.model.lora is not None:
        return "with model.lora the policy without its adapters is the reference: take reference out of the group"
    return "method.kl is null: set method.kl, or take reference out of the group"


def _sizes(recipe: Recipe, command: Command) -> Iterator[str]:
    """GPUs of each group against its ranks, engines and nodes."""
    config, engine = recipe.config, recipe.config.rollout.engine
    for index, group in _numbered(config, command):
        at, ranks = recipe.group(index, group), config.trainer.ranks
        planned = next((role for role in ("policy", "critic", "reference") if role in group.roles), None)
        if planned is not None and group.gpus != ranks:
            why = "one a rank" if planned == "policy" else "since each runs the plan of one of the policy's ranks"
            yield (
                f"{at} gives {group.gpus} GPUs to the {planned}, but {recipe.at('trainer.ranks')} "
                f"need{'s' if ranks == 1 else ''} {ranks}, {why}: set gpus to {ranks} or trainer.ranks to "
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
