"""Small real runs for end-to-end and distributed tests: tiny Qwen3-ASR, demo clips, the command's own path."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from skirl import assemble, assemble_offline, assemble_sample
from skirl.config.check import check
from skirl.config.load import Loaded, load
from skirl.tracking.metrics import depends_on_machine

DATA = Path(__file__).parents[2] / "demo" / "data"


def write_recipe(directory: Path, model: Path, **sections: Any) -> Path:
    """A speech recipe over demo clips; ``sections`` are laid over it."""
    recipe: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {
            "train": {"hard": {"path": str(DATA / "hard_train.jsonl"), "limit": 24}},
            "eval": {"hard": {"path": str(DATA / "hard_test.jsonl"), "limit": 6}},
        },
        "run": {"dir": str(directory / "run"), "tensorboard": False, "progress": False, "export_at_end": False},
        "rollout": {"group_size": 4, "sampling": {"max_new_tokens": 10}},
        "trainer": {"optim": {"lr": 1e-3}},
        "evaluation": {"unit": "char"},
    }
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section} if isinstance(section, dict) else section
    path = directory / "recipe.yaml"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


GRPO: dict[str, Any] = {
    "train": {"steps": 5, "prompts_per_step": 4},
    "reward": {"terms": {"accuracy": "accuracy", "truncation": "truncation"}},
    "method": {"kl": {"coef": 0.05}, "mini_batches": 2},
}
SFT: dict[str, Any] = {"sft": {"steps": 5, "batch_size": 6}}


def execute(command: str, recipe: Path, flags: Sequence[str] = ()) -> list[dict[str, float]]:
    """Runs ``skirl COMMAND RECIPE FLAGS`` in this process; returns its metrics without times and memory."""
    loaded = load(recipe, list(flags))
    check(loaded.config, command, loaded.provenance)
    COMMANDS[command](loaded)
    return metrics(loaded.config.run.dir)


COMMANDS: dict[Any, Callable[[Loaded], None]] = {
    "sft": assemble_offline.run_sft,
    "rm": assemble_offline.run_rm,
    "prm": assemble_offline.run_prm,
    "dpo": assemble_offline.run_dpo,
    "kd": assemble_offline.run_kd,
    "train": assemble.run_train,
    "sample": assemble_sample.run_sample,
}


def metrics(run: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what differs from machine to machine."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time" and not depends_on_machine(k)} for line in lines]


def largest_difference(a: list[dict[str, float]], b: list[dict[str, float]]) -> tuple[float, str]:
    """Largest |x - y| / max(1, |x|) over all metrics of all steps, and where."""
    assert [sorted(x) for x in a] == [sorted(y) for y in b]
    found = [
        (abs(x[name] - y[name]) / max(1.0, abs(x[name])), f"step {x['step']} {name}: {x[name]} and {y[name]}")
        for x, y in zip(a, b, strict=True)
        for name in x
        if x[name] is not None
    ]
    return max(found)
