"""Seconds by phase of a speech GRPO step, for a Qwen3-ASR of a real shape with random weights.

python benchmarks/speech_grpo.py --size 0.6B --steps 4 --out results.json [--a.recipe.setting value ...]

Speed does not depend on the weights. The model's vocabulary is the release's; its tokenizer is a small one, whose ids
are a part of it. Ratios, which hold across machines: share of a step by phase, and the matrix-multiply rate to hold
training against.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from skirl import assemble
from skirl.config.load import load
from skirl.runtime.device import device_name, has_gpu, peak_memory_bytes, pick_device
from skirl.testing.tiny_models import tiny_qwen3_asr

SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "0.6B": {
        "audio": {"d_model": 896, "encoder_layers": 18, "encoder_attention_heads": 14, "encoder_ffn_dim": 3584,
                  "downsample_hidden_size": 480, "output_dim": 1024},
        "text": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    },
    "1.7B": {
        "audio": {"d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
                  "downsample_hidden_size": 480, "output_dim": 2048},
        "text": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    },
}  # fmt: skip


def build(directory: Path, size: str) -> int:
    """Writes a model of that shape with random bfloat16 weights; returns its parameters."""
    from transformers import AutoConfig, AutoProcessor, Qwen3ASRForConditionalGeneration

    small = tiny_qwen3_asr(directory / "tiny", texts=["one", "two"])
    if size == "tiny":
        small.rename(directory / "model")
        return 0
    config = AutoConfig.from_pretrained(small)
    for name, values in (("audio_config", SHAPES[size]["audio"]), ("text_config", SHAPES[size]["text"])):
        for key, value in values.items():
            setattr(getattr(config, name), key, value)
    config.text_config.layer_types = ["full_attention"] * config.text_config.num_hidden_layers
    torch.manual_seed(0)
    with torch.device(pick_device()):
        model = Qwen3ASRForConditionalGeneration(config).to(torch.bfloat16)
    model.to("cpu").save_pretrained(directory / "model")
    AutoProcessor.from_pretrained(small).save_pretrained(directory / "model")
    return sum(p.numel() for p in model.parameters())


def matmul_tflops(size: int = 8192) -> float:
    """bfloat16 matrix-multiply rate of the device, TFLOP/s; 0 on the CPU."""
    if not has_gpu():
        return 0.0
    a, b = (torch.randn(size, size, device=pick_device(), dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.accelerator.synchronize()
    return 20 * 2 * size**3 / (time.perf_counter() - start) / 1e12


def recipe(directory: Path, steps: int) -> Path:
    """The workload: 32 clips of the demo x 8 responses of up to 128 tokens."""
    settings: dict[str, Any] = {
        "model": {"path": str(directory / "model"), "dtype": "bfloat16" if has_gpu() else "float32"},
        "data": {"train": {"demo": {"path": "demo/data/hard_train.jsonl"}}},
        "run": {"dir": str(directory / "run"), "tensorboard": False, "progress": False, "export_at_end": False},
        "train": {"steps": steps, "prompts_per_step": 32},
        "rollout": {
            "group_size": 8,
            "sampling": {"max_new_tokens": 128},
            "engine": {"kind": "policy", "batch_size": 256},
        },
        "reward": {"terms": {"accuracy": "accuracy", "truncation": "truncation"}},
        "trainer": {"backend": {"kind": "deepspeed", "zero_stage": 2}, "max_tokens_per_micro_batch": 32768},
        "runtime": "ray",
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def main() -> None:
    """Runs the workload and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6B", choices=[*SHAPES, "tiny"])
    parser.add_argument("--steps", type=int, default=4, help="the first is left out of the medians")
    parser.add_argument("--out", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    rate = matmul_tflops()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        parameters = build(directory, options.size)
        start = time.perf_counter()
        assemble.run_train(load(recipe(directory, options.steps), overrides))
        seconds = time.perf_counter() - start
        lines = (directory / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    kept = steps[1:] or steps
    phases = {key: sorted(s[key] for s in kept)[len(kept) // 2] for key in kept[0] if key.startswith("time/")}
    result = {
        "size": options.size, "parameters": parameters, "overrides": overrides, "whole_run_s": seconds,
        "median": phases, "tokens_per_s": sorted(s["rollout/tokens_per_s"] for s in kept)[len(kept) // 2],
        "share_of_step": {k: v / phases["time/step_s"] for k, v in phases.items()},
        "matmul_tflops": rate, "driver_peak_bytes": peak_memory_bytes(), "steps": steps,
        "versions": {p: version(p) for p in ("torch", "transformers", "deepspeed", "ray")},
        "python": platform.python_version(), "device": device_name(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps({k: result[k] for k in ("size", "median", "tokens_per_s", "matmul_tflops")}) + "\n")


if __name__ == "__main__":
    main()
