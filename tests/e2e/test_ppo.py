"""PPO end to end by its recipes: fine-tuning, a reward model, then Ray + DeepSpeed with critic and reward model."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from skirl.testing.tiny_task import tiny_task
from tests.e2e.recipes import execute

RECIPES = Path(__file__).parents[2] / "recipes"
QUIET = ["--run.tensorboard", "false", "--run.progress", "false"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slightly fine-tuned policy in start/ and a reward model in rm/, as the recipe of PPO wants them."""
    directory = tmp_path_factory.mktemp("ppo")
    tiny_task(directory)
    run(directory, "sft", ["--sft.steps", "10", "--run.dir", str(directory / "start")])
    run(directory, "rm", ["--model.path", str(directory / "start/hf/step-000010")])
    return directory


def run(task: Path, command: str, flags: Sequence[str] = ()) -> list[dict[str, float]]:
    """``skirl COMMAND recipes/tiny-...yaml`` with the recipe's runs/tiny-text moved to ``task``."""
    text = (RECIPES / f"tiny-{'ppo' if command == 'train' else command}.yaml").read_text(encoding="utf-8")
    text = text.replace("recipes/rewards", str(RECIPES / "rewards")).replace("runs/tiny-text", str(task))
    recipe = task / f"{command}.yaml"
    recipe.write_text(text, encoding="utf-8")
    return execute(command, recipe, [*QUIET, *flags])


@pytest.mark.parametrize("stage", [2, 3])
def test_ppo_learns_from_a_reward_model_on_ray_and_deepspeed(cluster: None, task: Path, stage: int) -> None:
    """Ranks of policy, critic and reference in one group; the export is compared in a fresh process for one stage."""
    target = task / f"zero-{stage}"
    flags = ["--train.steps", "14", "--trainer.backend.zero_stage", str(stage), "--run.dir", str(target)]
    steps = run(task, "train", [*flags, "--run.export_at_end", str(stage == 3).lower()])
    scores = [step["reward/mean"] for step in steps]
    assert scores[0] < 0.0
    assert max(scores[-3:]) > scores[0] + 0.4  # 0.6 or so; the score has mean 0 and spread 1 over the rm's pairs
    truth = [step["reward/part/reward"] for step in steps]
    assert truth[-1] > truth[0] + 0.03  # the true score rises too, to at most 0.25: the pairs are four digits long
    assert "commit/version" not in steps[0]  # the critic's warm-up leaves the policy as it was
    assert steps[1]["commit/version"] == 1
    assert steps[-1]["critic/loss"] < 0.5 * steps[0]["critic/loss"]
    if stage == 3:
        exported = target / "hf" / "step-000014"
        events = [json.loads(line) for line in (target / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        assert any(event["kind"] == "exported" for event in events)
        config = json.loads((exported / "critic" / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["Qwen3ForTokenClassification"]
