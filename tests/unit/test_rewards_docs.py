"""Every block of docs/rewards.md runs."""

import re
from pathlib import Path

import pytest
import yaml

from skirl.config.schema import RewardConfig
from skirl.rewards.python_file import load
from skirl.testing.reward_samples import make_sample

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (Path(__file__).parents[2] / "docs/rewards.md").read_text(), re.DOTALL)


def blocks(language):
    return [text for name, text in BLOCKS if name == language]


def test_the_recipe_is_valid():
    [recipe] = blocks("yaml")
    assert RewardConfig.model_validate(yaml.safe_load(recipe)).terms.keys() == {"accuracy", "keywords", "loops"}


def test_the_files_run(tmp_path, monkeypatch, capsys):
    by_sample, by_group, trial = blocks("python")
    path = tmp_path / "my_reward.py"
    path.write_text(by_group)
    assert load(path).score([make_sample("ab"), make_sample("a")]) == [{"shortest": 0.0}, {"shortest": 1.0}]
    path.write_text(by_sample)
    monkeypatch.chdir(tmp_path)
    exec(compile(trial, "trial", "exec"), {})
    [parts] = eval(capsys.readouterr().out)
    assert parts == {"accuracy": pytest.approx(0.0), "keywords": 0.0, "fluency": -0.2, "speaker": 0.0}
