"""Steps and seconds that each preset takes to reward 0.8 on the tiny text task, on the CPU.

python benchmarks/presets.py [PRESET ...] [--out benchmarks/results/presets-cpu.json] [--threads 1]

The task is ``skirl.testing.tiny_task``: a model of 0.1M parameters repeats the digit that its prompt names. Every run
is ``skirl train`` in one process (local runtime, plain PyTorch), stopped at the first step whose mean reward over its
rollouts is 0.8. Presets keep the record of their paper but for what is listed under ``OVERRIDES``: sizes and learning
rates are those of a tiny model, and mini-batches fit 16 prompts a step.
"""

import argparse
import json
import logging
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from skirl import assemble
from skirl.config.check import check
from skirl.config.load import load
from skirl.config.method import PRESETS
from skirl.testing.tiny_task import RESPONSE_LENGTH, tiny_task
from skirl.tracking.sinks.jsonl import JsonlSink

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.8
MAX_STEPS = 150
COMMON: dict[str, Any] = {
    "model.freeze": "[]",
    "rollout.group_size": 8,
    "rollout.sampling.max_new_tokens": RESPONSE_LENGTH,
    "train.prompts_per_step": 16,
    "trainer.optim.lr": 5e-3,
    "trainer.optim.betas": "[0.9, 0.99]",
    "trainer.max_tokens_per_micro_batch": 8192,
    "reward.python": ROOT / "recipes" / "rewards" / "echo.py",
    "reward.num_workers": 1,
    "run.tensorboard": "false",
    "run.progress": "false",
    "run.export_at_end": "false",
    "run.save_rollouts": "false",
    "runtime.kind": "local",
    "runtime.threads": 1,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "ppo": {
        "method.mini_batches": 2,
        "method.kl.coef": 1e-3,
        "critic.optim.lr": 5e-3,
        "critic.optim.betas": "[0.9, 0.99]",
    },
    "grpo": {"method.mini_batches": 2},
    "dr_grpo": {"method.normalizer.length": RESPONSE_LENGTH, "method.mini_batches": 2},
    "rloo": {"method.mini_batches": 2, "method.kl.coef": 1e-3},
    "reinforce_pp": {"method.mini_batches": 2, "method.kl.coef": 1e-3},
    "reinforce_pp_baseline": {"method.mini_batches": 2},
    "dapo": {"method.mini_batches": 2, "rollout.sampling.max_new_tokens": RESPONSE_LENGTH + 4},  # the overlong buffer
    "gspo": {"method.mini_batches": 2},
    "cispo": {"method.mini_batches": 2},
    "max_rl": {"method.mini_batches": 2},
}


@dataclass(frozen=True)
class Reached:
    """What a preset took: ``steps`` is None where it did not get there."""

    preset: str
    steps: int | None
    best: float
    seconds: float


class _Enough(Exception):
    """The target is reached."""


@contextmanager
def stopping_at(target: float, seen: list[float]) -> Iterator[None]:
    """Runs inside end at the first step whose mean reward is ``target``; ``seen`` gets each step's reward."""
    original = JsonlSink.log

    def log(self: JsonlSink, step: int, values: Any) -> None:
        original(self, step, values)
        if "reward/mean" in values:
            seen.append(values["reward/mean"])
            if seen[-1] >= target:
                raise _Enough

    JsonlSink.log = log
    try:
        yield
    except _Enough:
        return
    finally:
        JsonlSink.log = original


def reach(preset: str, task: Path, run: Path, *, threads: int = 1, extra: Sequence[str] = ()) -> Reached:
    """Runs one preset on the task in ``task`` until the target or ``MAX_STEPS``."""
    recipe = run.with_suffix(".yaml")
    recipe.write_text(
        f"model: {{path: {task / 'model'}}}\n"
        f"data: {{train: {{echo: {{path: {task / 'prompts.jsonl'}, format: text}}}}}}\n"
        f"run: {{dir: {run}}}\nmethod: {{preset: {preset}}}\ntrain: {{steps: {MAX_STEPS}}}\n",
        encoding="utf-8",
    )
    settings = {**COMMON, "runtime.threads": threads, **OVERRIDES[preset]}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    loaded = load(recipe, [*flags, *extra])
    check(loaded.config, "train", loaded.provenance)
    seen: list[float] = []
    start = time.perf_counter()
    with stopping_at(TARGET, seen):
        assemble.run_train(loaded)
    done = bool(seen) and seen[-1] >= TARGET
    return Reached(preset, len(seen) if done else None, max(seen), round(time.perf_counter() - start, 1))


def table(found: Sequence[Reached]) -> str:
    """The figures as Markdown."""
    lines = [
        "# Presets on the tiny text task, CPU",
        "",
        "Made by `benchmarks/presets.py`: `skirl train` in one process on the CPU until the mean reward of a step's",
        f"rollouts is {TARGET}. 16 prompts x 8 responses of up to {RESPONSE_LENGTH} tokens a step; a model of 0.1M",
        "parameters with random weights. Settings that differ from the preset are in the JSON file beside this one.",
        "",
        "| preset | steps to 0.8 | seconds, start included | best reward |",
        "|---|---|---|---|",
        *(f"| `{r.preset}` | {r.steps or f'not in {MAX_STEPS}'} | {r.seconds} | {r.best:.3f} |" for r in found),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the presets that are named, or all, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("presets", nargs="*", default=[], help="which (default: all)")
    parser.add_argument("--out", type=Path, help="JSON file; a table of the same name goes beside it as .md")
    parser.add_argument("--threads", type=int, default=1)
    options, extra = parser.parse_known_args()
    found: list[Reached] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny_task(directory)
        for preset in options.presets or PRESETS:
            found.append(reach(preset, directory, directory / preset, threads=options.threads, extra=extra))
            print(found[-1], file=sys.stderr, flush=True)
            logging.getLogger("skirl").handlers.clear()
    if options.out is not None:
        common = {k: str(v) for k, v in COMMON.items() if k != "reward.python"}
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version(), **{n: version(n) for n in ("torch", "transformers")}},
            "target": TARGET,
            "common": common,
            "overrides": {r.preset: {k: str(v) for k, v in OVERRIDES[r.preset].items()} for r in found},
            "results": [vars(r) for r in found],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(table(found), encoding="utf-8")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
