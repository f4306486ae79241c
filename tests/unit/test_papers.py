"""The settings in docs/papers.md are settings, and every variant of a method is in it."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import yaml

from skirl.config import algorithms, offline
from skirl.config.base import Frozen
from skirl.config.method import PRESETS, MethodConfig
from skirl.config.schema import RolloutConfig, TrainerConfig

TEXT = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
SECTIONS = {"method": MethodConfig, "rollout": RolloutConfig, "trainer": TrainerConfig}
TABLES = "\n".join(line for line in TEXT.splitlines() if line.startswith("|"))


def models(module: ModuleType) -> Iterator[type[Frozen]]:
    """The config classes that a module defines."""
    for model in vars(module).values():
        if isinstance(model, type) and issubclass(model, Frozen) and model.__module__ == module.__name__:
            yield model


VARIANTS = [model for module in (algorithms, offline) for model in models(module)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_valid(recipe: str):
    sections = yaml.safe_load(recipe)
    assert "method" in sections
    for name, values in sections.items():
        SECTIONS[name].model_validate(values)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_are_what_the_papers_are_said_to_be(preset: str):
    recipes = [yaml.safe_load(recipe)["method"] for recipe in RECIPES]
    written = next(method for method in recipes if method["preset"] == preset)
    assert {"advantage", "policy_loss", "kl", "normalizer"} <= written.keys(), "a preset is written out in full"
    length = written["normalizer"].get("length")
    own = {"normalizer": {"kind": "constant", "length": length}} if length else {}
    assert MethodConfig.model_validate(written) == MethodConfig.model_validate({"preset": preset, **own})


def test_every_setting_of_the_tables_is_valid():
    """`method.a: value` in backquotes."""
    settings = re.findall(r"`method\.(\w+): (\{[^`]*\}|[\w.]+)`", TEXT)
    assert len(settings) >= 40
    for name, value in settings:
        MethodConfig.model_validate({name: yaml.safe_load(value)})


@pytest.mark.parametrize("model", [m for m in VARIANTS if "kind" in m.model_fields], ids=lambda m: m.__name__)
def test_every_variant_has_a_row(model: type[Frozen]):
    (kind,) = get_args(model.model_fields["kind"].annotation)
    assert re.search(rf"`{kind}`", TABLES), f"no table of docs/papers.md has `{kind}`"


@pytest.mark.parametrize("model", VARIANTS, ids=lambda m: m.__name__)
def test_every_paper_of_a_variant_is_named(model: type[Frozen]):
    papers = re.findall(r"arXiv:\d{4}\.\d{5}", model.__doc__ or "")
    assert [paper for paper in papers if paper not in TEXT] == []


@pytest.mark.parametrize("command", ["sft", "rm", "prm", "dpo", "kd", "sample"])
def test_every_offline_command_has_a_row(command: str):
    assert f"\n| `{command}`" in TEXT
