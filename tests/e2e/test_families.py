"""Every audio family trains by the same path: two GRPO steps, sampler and trainer agreeing, a checked export."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skirl.testing import tiny_models
from tests.e2e.recipes import GRPO, execute, write_recipe


@pytest.mark.parametrize(
    "build",
    [
        tiny_models.tiny_qwen2_audio,
        tiny_models.tiny_glm_asr,
        tiny_models.tiny_voxtral,
        tiny_models.tiny_audio_flamingo_3,
    ],
    ids=lambda build: build.__name__.removeprefix("tiny_"),
)
def test_family_runs_end_to_end(build: Callable[[Path], Path], tmp_path: Path) -> None:
    model = build(tmp_path / "model")
    recipe = write_recipe(tmp_path, model, **{**GRPO, "train": {"steps": 2, "prompts_per_step": 4}})
    flags = ["--run.export_at_end", "true", "--method.mini_batches", "1", "--rollout.sampling.max_new_tokens", "6"]
    steps = execute("train", recipe, flags)
    assert all(step["policy/kl_rollout"] < 1e-9 for step in steps)  # one update a step: both score the same policy
    assert steps[0]["optim/grad_norm"] > 0
    assert any((tmp_path / "run" / "hf" / "step-000002").iterdir())


def test_original_layout_is_trained_and_exported_as_it_came(tmp_path: Path) -> None:
    model = tiny_models.tiny_qwen3_asr(tmp_path / "model", original_layout=True)
    recipe = write_recipe(tmp_path, model, **{**GRPO, "train": {"steps": 2, "prompts_per_step": 4}})
    execute("train", recipe, ["--run.export_at_end", "true"])
    config = (tmp_path / "run" / "hf" / "step-000002" / "config.json").read_text(encoding="utf-8")
    assert "thinker_config" in config
