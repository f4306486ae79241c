"""TFLOP/s and peak memory of one update on packed rows with full recompute, with and without the fused log-probs.

python benchmarks/update.py --workload text-4B --tokens 32768 --out results.json [--sequence 2048] [--rounds 3]

One row of ``--tokens`` packed tokens is trained on by the plain PyTorch trainer, layers compiled on GPUs, every layer
recomputed. "fused" makes log-probs in chunks and recomputes them in the backward pass, as skirl does; "whole" holds
the logits of all tokens at once. Ratios, which hold across machines: TFLOP/s to those of a matrix product in the same
run; peak memory of the two.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.grpo import installed, matmul_tflops
from benchmarks.shapes import SHAPES, build
from skirl.algorithms import logprobs as fused
from skirl.assemble_worker import build_worker
from skirl.config.schema import Config
from skirl.models import policy as policy_module
from skirl.planning.schedule import make_plan
from skirl.records import Plan, Sampling, TrainingSequence
from skirl.runtime.device import device_name, has_gpu, memory_bytes, reset_peak_memory, synchronize
from skirl.runtime.worker import Worker, WorkerSpec
from skirl.training.objective import PolicyObjective


def made_plan(tokens: int, length: int, vocabulary: int) -> Plan:
    """``tokens`` tokens in sequences of ``length``, a fifth of each a prompt, in one row."""
    draw = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            f"{i}",
            draw.integers(0, vocabulary, length),
            np.arange(length // 5, length),
            advantages=np.full(length - length // 5, draw.normal()),
        )
        for i in range(tokens // length)
    ]
    return make_plan(sequences, num_ranks=1, max_tokens=tokens, normalizer="token")


def whole_logprobs(hidden: Tensor, head_weight: Tensor, targets: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The same numbers with all logits held at once, and nothing recomputed."""
    how = tuple(settings[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    return settings["score_chunk"](hidden, head_weight, targets, settings["banned_ids"], how)


def measure(worker: Worker, plan: Plan, rounds: int) -> dict[str, float]:
    """Median seconds of an update after the first, which compiles; largest memory meanwhile."""
    worker.update(plan, 1, ("policy",))
    reset_peak_memory()
    seconds = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        worker.update(plan, 1, ("policy",))
        synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": sorted(seconds)[rounds // 2], "peak_gb": memory_bytes()[1] / 1e9 if has_gpu() else 0.0}


def useful_tflop(parameters: int, config: Any, tokens: int, length: int) -> float:
    """6 x parameters x tokens, and causal attention, 6 x layers x heads x width x tokens x length."""
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens * length
    return (6 * parameters * tokens + attention) / 1e12


def main() -> None:
    """Measures both forms and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="text-4B", choices=[*(n for n in SHAPES if n[:4] == "text"), "text-tiny"])
    parser.add_argument("--tokens", type=int, default=32768, help="of the packed row")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of each sequence in it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rate = matmul_tflops()
    with tempfile.TemporaryDirectory() as name:
        parameters = build(Path(name), options.workload)
        model = {"path": f"{name}/model", "gradient_checkpointing": True, "freeze": []}
        model["dtype"] = "bfloat16" if has_gpu() else "float32"
        config = Config.model_validate({"model": model, "data": {}, "run": {"dir": f"{name}/run"}})
        objective = PolicyObjective(Sampling())
        worker = build_worker(WorkerSpec(config, objective, 1, with_reference=False, samples=False))
        assert worker.policy is not None
        text = worker.policy.loaded.config
        plan = made_plan(options.tokens, options.sequence, text.vocab_size)
        found: dict[str, Any] = {"fused": measure(worker, plan, options.rounds)}
        policy_module.token_logprobs = whole_logprobs
        try:
            found["whole"] = measure(worker, plan, options.rounds)
        except torch.OutOfMemoryError as error:
            found["whole"] = {"failed": str(error).partition("\n")[0]}
        policy_module.token_logprobs = fused.token_logprobs
    work = useful_tflop(parameters, text, options.tokens, options.sequence)
    for form in found.values():
        form["tflops"] = work / form["seconds"] if "seconds" in form else None
        form["share_of_matmul"] = form["tflops"] / rate if rate and form["tflops"] else None
    result = {
        "workload": options.workload, "parameters": parameters, "tokens": options.tokens, "sequence": options.sequence,
        "forms": found, "useful_tflop": work, "matmul_tflops": rate, "device": device_name(),
        "versions": {p: installed(p) for p in ("torch", "transformers")}, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
