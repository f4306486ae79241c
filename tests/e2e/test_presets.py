"""Presets on the tiny text task, by the command's own path: they learn, resume exactly, leave a critic that loads."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from benchmarks.presets import COMMON, OVERRIDES, TARGET, reach
from skirl.testing.tiny_task import tiny_task
from skirl.tracking.rollout_store import read_rollouts
from tests.e2e.recipes import execute


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("task")
    tiny_task(directory)
    return directory


@pytest.mark.parametrize("preset", ["rloo", "gspo", "cispo"])
def test_preset_learns_the_task(task: Path, tmp_path: Path, preset: str) -> None:
    """The quickest three; benchmarks/results/presets-cpu.md has all ten."""
    reached = reach(preset, task, tmp_path / "run")
    assert reached.steps is not None, f"best reward {reached.best}"
    assert reached.best >= TARGET


def short(task: Path, directory: Path, preset: str, steps: int) -> tuple[Path, list[str]]:
    """Recipe and flags of a few steps with every record kept."""
    directory.mkdir()
    recipe = directory / "recipe.yaml"
    sections = {
        "model": {"path": str(task / "model")},
        "data": {"train": {"echo": {"path": str(task / "prompts.jsonl"), "format": "text"}}},
        "run": {"dir": str(directory / "run")},
        "method": {"preset": preset},
        "train": {"steps": steps},
    }
    recipe.write_text(yaml.safe_dump(sections), encoding="utf-8")
    settings = {
        **COMMON,
        **OVERRIDES[preset],
        "run.save_rollouts": "true",
        "train.prompts_per_step": 4,
        "rollout.group_size": 4,
    }
    return recipe, [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def test_ppo_warms_up_resumes_exactly_and_exports_its_critic(task: Path, tmp_path: Path) -> None:
    """Critic, KL controller and both optimizers go on bit for bit; the critic loads in a fresh process."""
    recipe, flags = short(task, tmp_path / "ppo", "ppo", 5)
    flags += ["--critic.warmup_steps", "2", "--method.kl.adaptive.target", "0.5", "--method.kl.adaptive.horizon", "500"]
    flags += ["--run.checkpoint_every", "3", "--run.keep_checkpoints", "5", "--run.export_at_end", "true"]
    whole = execute("train", recipe, flags)
    assert ["policy/loss" in step for step in whole] == [False, False, True, True, True]
    assert [step["kl/coef"] for step in whole[:3]] == [1e-3] * 3
    assert whole[4]["kl/coef"] != whole[3]["kl/coef"]
    critic = tmp_path / "ppo" / "run" / "hf" / "step-000005" / "critic"
    assert json.loads((critic / "config.json").read_text())["architectures"] == ["Qwen3ForTokenClassification"]
    shutil.rmtree(tmp_path / "ppo" / "run" / "checkpoints" / "step-000005")
    again = execute("train", recipe, [*flags, "--run.resume", "--run.export_at_end", "false"])
    assert again == whole


def test_dapo_replaces_groups_and_keeps_the_dropped_ones_on_disk(task: Path, tmp_path: Path) -> None:
    recipe, flags = short(task, tmp_path / "dapo", "dapo", 3)
    flags += ["--run.checkpoint_every", "2", "--run.keep_checkpoints", "5"]
    whole = execute("train", recipe, flags)
    assert any(step["collect/rounds"] > 1 for step in whole)
    rows = [read_rollouts(tmp_path / "dapo" / "run" / "rollouts" / f"step-00000{i}.parquet") for i in (1, 2, 3)]
    assert sum(map(len, rows)) == whole[-1]["ledger/issued"] == 4 * whole[-1]["data/consumed_prompts"]
    assert sum(row["trained"] for row in rows[0] + rows[1] + rows[2]) == whole[-1]["ledger/trained"]
    assert whole[-1]["ledger/dropped/no_signal"] == whole[-1]["ledger/issued"] - whole[-1]["ledger/trained"]
    assert whole[0]["reward/shaping"] <= 0
    shutil.rmtree(tmp_path / "dapo" / "run" / "checkpoints" / "step-000003")
    assert execute("train", recipe, [*flags, "--run.resume"]) == whole


def test_a_local_reward_model_is_asked_from_the_loop(task: Path, tmp_path: Path) -> None:
    """A reward model of the policy's size beside it: its score is a part of every rollout's."""
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    recipe, flags = short(task, tmp_path / "rm", "grpo", 2)
    config = AutoConfig.from_pretrained(task / "model", num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(tmp_path / "reward")
    steps = execute("train", recipe, [*flags, "--reward.models.judge.path", str(tmp_path / "reward")])
    assert {"reward/part/judge", "reward/part/reward"} <= steps[0].keys()
