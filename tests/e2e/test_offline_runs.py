"""The offline commands on the tiny text task, by their recipes: held-out losses fall, exports reload, rows go round."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skirl.config.rewards import RewardModelConfig
from skirl.errors import ConfigError
from skirl.models.reward_model import RewardModel
from skirl.models.scalar_heads import stored_head
from skirl.records import RewardText
from skirl.testing.tiny_task import tiny_task
from tests.e2e.recipes import execute, largest_difference

RECIPES = Path(__file__).parents[2] / "recipes"
QUIET = ["--run.tensorboard", "false", "--run.progress", "false"]
NO_EXPORT = ["--run.export_at_end", "false"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and rows, and a fine-tuned model in sft/ (which the recipes of the other commands start from)."""
    directory = tmp_path_factory.mktemp("task")
    tiny_task(directory)
    run(directory, "sft", "sft")
    return directory


def run(task: Path, command: str, name: str, flags: Sequence[str] = ()) -> list[dict[str, float]]:
    """``skirl COMMAND recipes/tiny-COMMAND.yaml`` with the recipe's runs/tiny-text moved to ``task``."""
    text = (RECIPES / f"tiny-{command}.yaml").read_text(encoding="utf-8")
    text = text.replace("recipes/rewards", str(RECIPES / "rewards")).replace("runs/tiny-text", str(task))
    recipe = task / f"{name}.yaml"
    recipe.write_text(text, encoding="utf-8")
    return execute(command, recipe, [*QUIET, "--run.dir", str(task / name), *flags])


def held_out(steps: Sequence[dict[str, float]], what: str = "loss") -> tuple[float, float]:
    """First and last value."""
    found = [step[f"eval/held_out/{what}"] for step in steps if f"eval/held_out/{what}" in step]
    return found[0], found[-1]


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def exported(directory: Path) -> Path:
    """The one export of a run; that it is there says that it was reloaded in a fresh process with equal outputs."""
    (found,) = (directory / "hf").glob("step-*")
    return found


# -------------------------------------------------------------------------------------------------------- held-out loss
def test_sft_learns_both_answers_of_a_conversation(task: Path) -> None:
    steps = rows(task / "sft" / "metrics.jsonl")
    first, last = held_out(steps)
    assert first > 3.5
    assert last < 0.05
    assert [s["step"] for s in steps if "eval/held_out/loss" in s] == [0, 20, 40]
    assert exported(task / "sft")


def test_rm_ranks_held_out_pairs_and_its_export_scores_alike(task: Path) -> None:
    steps = run(task, "rm", "rm")
    assert held_out(steps)[0] == pytest.approx(0.6931, abs=1e-4)  # a new head prefers nothing
    assert held_out(steps)[1] < 0.3
    assert held_out(steps, "accuracy")[1] >= 7 / 8
    directory = exported(task / "rm")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    head = stored_head(config, 1, directory)
    assert head is not None
    assert head.std is not None
    assert head.std > 0.5
    model = RewardModel(RewardModelConfig(path=directory), torch.device("cpu"))
    pairs = rows(task / "pairs.jsonl")
    texts = [
        RewardText(({"role": "user", "content": r["prompt"]},), r[c]) for r in pairs for c in ("chosen", "rejected")
    ]
    scores = torch.tensor(model.scores(texts))  # standardised by what the training pairs gave
    assert float(scores.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(scores.std(correction=0)) == pytest.approx(1.0, abs=1e-3)
    assert bool((scores[0::2] > scores[1::2]).all())


def test_prm_finds_the_wrong_steps(task: Path) -> None:
    steps = run(task, "prm", "prm", ["--prm.steps", "60"])
    assert held_out(steps)[0] == pytest.approx(0.6931, abs=1e-4)
    assert held_out(steps)[1] < 0.2
    assert held_out(steps, "accuracy")[1] > 0.9
    config = json.loads((exported(task / "prm") / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForTokenClassification"]


@pytest.mark.parametrize(
    ("loss", "first", "last"),
    [("dpo", 0.6931, 0.62), ("ipo", 25.0, 22.0), ("simpo", None, 0.8), ("orpo", None, 0.8)],
)
def test_preference_losses_fall(task: Path, loss: str, first: float | None, last: float) -> None:
    """``last``: bound, of simpo and orpo as a share of the first value."""
    steps = run(task, "dpo", loss, ["--dpo.loss", loss, *([] if loss == "dpo" else NO_EXPORT)])
    before, after = held_out(steps)
    if first is not None:
        assert before == pytest.approx(first, abs=1e-3)
        assert after < last
    else:
        assert after < last * before
    assert held_out(steps, "accuracy")[1] >= 6 / 8
    if loss == "dpo":
        assert exported(task / "dpo")


def test_kto_learns_from_single_labels(task: Path) -> None:
    paths = ["--data.train.pairs.path", str(task / "labelled.jsonl")]
    paths += ["--data.eval.held_out.path", str(task / "labelled-held-out.jsonl")]
    steps = run(task, "dpo", "kto", ["--dpo.loss", "kto", *paths, *NO_EXPORT])
    assert held_out(steps)[0] == pytest.approx(0.5, abs=1e-4)
    assert held_out(steps)[1] < 0.48
    assert [step["dpo/kl_baseline"] >= 0 for step in steps[1:]] == [True] * 40
    with pytest.raises(ConfigError, match="kto scores each prompt with another response"):
        run(task, "dpo", "kto1", ["--dpo.loss", "kto", "--dpo.batch_size", "1", *paths])


@pytest.mark.parametrize(("data", "direction"), [("off_policy", "forward_kl"), ("on_policy", "reverse_kl")])
def test_kd_reaches_its_teacher(task: Path, data: str, direction: str) -> None:
    flags = ["--kd.data", data, "--kd.divergence", direction, "--kd.steps", "40", *NO_EXPORT]
    steps = run(task, "kd", data, flags)
    first, last = held_out(steps)
    assert first > 2
    assert last < first / 3


# ------------------------------------------------------------------------------------------------------ sample, resume
def test_the_best_and_the_worst_become_pairs_of_the_next_round(task: Path) -> None:
    run(task, "sample", "samples")
    pairs = rows(task / "samples" / "samples.jsonl")
    assert len(pairs) > 20
    assert all(row["chosen_score"] > row["rejected_score"] for row in pairs)
    flags = ["--data.train.pairs.path", str(task / "samples" / "samples.jsonl"), "--dpo.steps", "20", *NO_EXPORT]
    before, after = held_out(run(task, "dpo", "dpo-on-samples", flags))
    assert after < before - 0.05


def test_rejection_sampling_feeds_fine_tuning(task: Path) -> None:
    run(task, "sample", "kept", ["--sample.select", "rejection", "--sample.min_score", "0.25"])
    kept = rows(task / "kept" / "samples.jsonl")
    assert len(kept) > 50
    assert all(row["score"] >= 0.25 and row["finish_reason"] == "stop" for row in kept)
    flags = ["--data.train.dialogues.path", str(task / "kept" / "samples.jsonl"), "--sft.steps", "30", *NO_EXPORT]
    first, last = held_out(run(task, "sft", "sft-on-samples", flags))
    assert last < first - 1.5


def test_sampling_goes_on_with_what_is_left(task: Path) -> None:
    """Half of the prompts, then all: the rows are those of one run."""
    every = ["--sample.select", "all", "--sample.num_samples", "2"]
    run(task, "sample", "whole", every)
    whole = rows(task / "whole" / "samples.jsonl")
    assert len(whole) == 64
    run(task, "sample", "halves", every)
    file, done = task / "halves" / "samples.jsonl", task / "halves" / "samples.jsonl.done"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:33]))  # killed within a prompt
    done.write_text("".join(line + "\n" for line in done.read_text().splitlines()[:16]))
    with pytest.raises(ConfigError, match=r"holds another run .* set run\.resume"):
        run(task, "sample", "halves", every)
    steps = run(task, "sample", "halves", [*every, "--run.resume"])
    assert rows(file) == whole
    assert steps[-1]["sample/rows"] == 64


def test_resume_is_exact(task: Path) -> None:
    """Six steps at once; and six of which the last two are lost and done again, bit for bit."""
    flags = ["--dpo.steps", "6", "--run.checkpoint_every", "4", "--run.keep_checkpoints", "3", *NO_EXPORT]
    whole = run(task, "dpo", "again", flags)
    shutil.rmtree(task / "again" / "checkpoints" / "step-000006")
    assert run(task, "dpo", "again", [*flags, "--run.resume"]) == whole


# ------------------------------------------------------------------------------------------------------- several ranks
@pytest.mark.slow
def test_ray_and_zero_2_give_the_losses_of_one_process(no_cluster: None, task: Path) -> None:
    """A reward model on two ranks: pairs stay together, every metric of every step is that of one process.

    The run starts a Ray cluster of its own, and ends it.
    """
    import ray

    flags = ["--rm.steps", "3", "--trainer.ranks", "2", "--evaluation.every", "2", *NO_EXPORT]
    local = run(task, "rm", "rm-local", flags)
    spread = run(task, "rm", "rm-ray", [*flags, "--runtime", "ray", "--trainer.backend.kind", "deepspeed"])
    assert not ray.is_initialized()
    difference, where = largest_difference(local, spread)
    assert difference < 5e-5, where
