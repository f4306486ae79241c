"""Checkpoints that a recipe names, looked at before anything is loaded: a wrong path is told with its setting."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from skirl.config.recipe import Command, Recipe
from skirl.config.schema import Config
from skirl.errors import ModelError
from skirl.models.scalar_heads import has_scalar_head  # light: neither torch nor transformers

__all__ = ["TAG_WRITERS", "check_checkpoints", "checkpoint_settings"]

TAG_WRITERS = frozenset({"qwen3_asr"})
"""``model_type`` of the families that write the language before the words (``Family.answer``)."""


def check_checkpoints(config: Config, command: Command, provenance: Mapping[str, str] = MappingProxyType({})) -> None:
    """Each directory that the command loads a model from is one, as far as its config.json can say.

    Args: as of ``check``, which judges recipes whose files are elsewhere, too.

    Raises: ModelError: one message with all that is wrong.
    """
    recipe = Recipe(config, provenance)
    problems = [problem for path, directory in _named(config, command) for problem in _problem(recipe, path, directory)]
    if command in ("train", "sample"):
        problems += _unwritten_tags(recipe)
    if problems:
        raise ModelError("\n".join(problems))


def _named(config: Config, command: Command) -> Iterator[tuple[str, Path]]:
    """Setting and directory of every model that the command loads."""
    yield "model.path", config.model.path
    if command == "kd" and config.kd is not None:
        yield "kd.teacher", config.kd.teacher
    critic = config.critic_in_use if command == "train" else None
    if critic is not None and critic.path is not None:
        yield "critic.path", critic.path
    if command in ("train", "sample") and config.reward is not None:
        for name, model in config.reward.models.items():
            yield f"reward.models.{name}.path", model.path


def _problem(recipe: Recipe, path: str, directory: Path) -> Iterator[str]:
    at, settings = recipe.at(path), checkpoint_settings(directory)
    if not directory.is_dir():
        yield (
            f"{at} is no directory on this machine. skirl reads local checkpoints only; for a hub name, run "
            f"`hf download {directory} --local-dir DIR` and set {path} to DIR."
        )
    elif not (directory / "config.json").is_file():
        yield f"{at} has no config.json, so it is no checkpoint of Hugging Face: {_instead(path, directory)}"
    elif settings is not None and "model_type" not in settings and {"model", "run"} <= settings.keys():
        yield f"{at} is a run's directory, and no checkpoint: {_instead(path, directory)}"
    elif path.startswith("reward.models.") and settings is not None and not has_scalar_head(settings):
        yield (
            f"{at} has no scalar head: it is a model that writes text. `skirl rm` trains one on it; set {path} to its "
            "hf/step-* then."
        )


def _unwritten_tags(recipe: Recipe) -> Iterator[str]:
    """Terms that score what this model never writes."""
    reward, settings = recipe.config.reward, checkpoint_settings(recipe.config.model.path) or {}
    kind = settings.get("model_type")
    for name, term in () if reward is None else reward.terms.items():
        if term.kind == "language" and kind is not None and kind not in TAG_WRITERS:
            yield (
                f"reward.terms.{name} scores the language tag that the policy writes, but {recipe.at('model.path')} is "
                f"a {kind}, which writes none: every response would get 0. Remove the term (reward.terms.{name}: null)."
            )


def _instead(path: str, directory: Path) -> str:
    if (directory / "adapter_config.json").is_file():
        return (
            f"it holds a LoRA adapter without its model. Add it in (`skirl merge-lora {directory} --base MODEL "
            f"--output DIR`) and set {path} to DIR."
        )
    exports = sorted(directory.glob("hf/step-*/config.json")) or sorted(directory.glob("step-*/config.json"))
    if exports:
        return f"set {path} to an export in it, such as {exports[-1].parent}."
    return f"set {path} to the directory that holds config.json and model*.safetensors."


def checkpoint_settings(directory: Path) -> Mapping[str, Any] | None:
    """What its config.json holds; None where that cannot be read, which whoever loads it says better."""
    try:
        found: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else None
