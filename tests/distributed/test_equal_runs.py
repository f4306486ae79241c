"""One recipe, every runtime, backend, number of ranks and ZeRO stage: the same numbers."""

import json
from pathlib import Path

import pytest

from tests.e2e.recipes import GRPO, SFT, execute, largest_difference, write_recipe

# float32, five steps: what is left is the order of summation. Measured: 1.2e-6 at most (docs/exactness.md).
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def local_runs(tiny_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """The same recipes in one process with plain PyTorch, for plans of 1 and 2 ranks."""
    runs = {}
    for ranks in (1, 2):
        for command, sections in (("sft", SFT), ("train", GRPO)):
            directory = tmp_path_factory.mktemp(f"local-{command}-{ranks}")
            recipe = write_recipe(directory, tiny_speech, **sections)
            runs[f"{command} {ranks}"] = execute(command, recipe, ["--trainer.ranks", str(ranks)])
    return runs


@pytest.mark.parametrize("command", ["sft", "train"])
def test_ranks_of_a_plan_do_not_change_a_local_run(local_runs: dict[str, list[dict[str, float]]], command: str) -> None:
    difference, where = largest_difference(local_runs[f"{command} 1"], local_runs[f"{command} 2"])
    assert difference < TOLERANCE, where


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ray_and_deepspeed_equal_local(cluster, tiny_speech, tmp_path, local_runs, ranks, zero_stage, record_property):
    flags = ["--runtime", "ray", "--trainer.backend", "deepspeed", f"--trainer.backend.zero_stage={zero_stage}"]
    flags += ["--trainer.ranks", str(ranks)]
    for command, sections in (("sft", SFT), ("train", GRPO)):
        if command == "sft" and ranks == 1:
            continue  # nothing that the others do not show
        recipe = write_recipe(tmp_path / command, tiny_speech, **sections)
        got = execute(command, recipe, flags)
        difference, where = largest_difference(local_runs[f"{command} 1"], got)
        record_property(f"{command}, ray, {ranks} ranks, ZeRO-{zero_stage}", difference)
        assert difference < TOLERANCE, where


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_items_over_four_ranks(cluster, tiny_speech, tmp_path):
    """Ranks without a sequence run empty micro-batches: nobody waits in a gather of ZeRO-3, and no item is lost."""
    sections = {"sft": {"steps": 2, "batch_size": 5}}
    wanted = execute("sft", write_recipe(tmp_path / "local", tiny_speech, **sections))
    flags = ["--runtime", "ray", "--runtime.cpus_per_rank=0.5", "--trainer.backend", "deepspeed"]
    flags += ["--trainer.backend.zero_stage=3", "--trainer.ranks=4"]
    got = execute("sft", write_recipe(tmp_path / "four", tiny_speech, **sections), flags)
    difference, where = largest_difference(wanted, got)
    assert difference < TOLERANCE, where
    steps = [json.loads(line) for line in (tmp_path / "four" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [100 < step["memory/rank_rss_mb"] < 10_000 for step in steps if step["step"]] == [True, True]
