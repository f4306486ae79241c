"""The settings in docs/papers.md are settings."""

import re
from pathlib import Path

import pytest
import yaml

from skirl.config.method import MethodConfig
from skirl.config.schema import RolloutConfig, TrainerConfig

TEXT = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
SECTIONS = {"method": MethodConfig, "rollout": RolloutConfig, "trainer": TrainerConfig}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_valid(recipe: str):
    sections = yaml.safe_load(recipe)
    assert "method" in sections
    for name, values in sections.items():
        SECTIONS[name].model_validate(values)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
def test_the_presets_are_what_the_papers_are_said_to_be(preset: str):
    recipes = [yaml.safe_load(recipe)["method"] for recipe in RECIPES]
    written = next(method for method in recipes if method["preset"] == preset)
    length = written["normalizer"].get("length")
    own = {"normalizer": {"kind": "constant", "length": length}} if length else {}
    assert MethodConfig.model_validate(written) == MethodConfig.model_validate({"preset": preset, **own})


def test_every_setting_of_the_policy_loss_table_is_valid():
    """`method.a: value` in backquotes."""
    settings = re.findall(r"`method\.(\w+): (\{.*?\}|[\w.]+)`", TEXT)
    assert len(settings) >= 10
    for name, value in settings:
        MethodConfig.model_validate({name: yaml.safe_load(value)})
