"""TFLOP/s and peak memory of one update on packed rows with full recompute, by how log-probs and layers are recomputed.

python benchmarks/update.py --workload text-4B --tokens 32768 --out results.json [--sequence 2048] [--rounds 3]
    [--forms fused whole around]

One row of ``--tokens`` packed tokens is trained on by the plain PyTorch trainer, layers compiled on GPUs, every layer
recomputed. "fused" is what skirl does: log-probs in chunks which the backward pass makes again, layers recomputed
within their graphs. "whole" holds the logits of all tokens at once; "around" recomputes each layer around its graph,
as transformers does. Ratios, which hold across machines: TFLOP/s to those of a matrix product in the same run (for
30 ms before, and for some 3 s afterwards, when a GPU's power limit tells as it does in training); seconds and peak
memory of the forms. The file is written anew after each form.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.grpo import matmul_tflops, stamp
from benchmarks.shapes import SHAPES, build
from skirl.algorithms import logprobs as fused
from skirl.assemble_worker import build_worker
from skirl.config.schema import Config
from skirl.models import policy as policy_module
from skirl.planning.schedule import make_plan
from skirl.records import Plan, Sampling, TrainingSequence
from skirl.runtime.device import has_gpu, memory_bytes, reset_peak_memory, synchronize
from skirl.runtime.worker import Worker, WorkerSpec
from skirl.training.objective import PolicyObjective

FORMS = ("fused", "whole", "around")


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


@contextmanager
def changed(form: str, policy: Any) -> Iterator[None]:
    """The policy computes in another form; not undone where that is "around", which therefore comes last."""
    if form == "whole":
        policy_module.token_logprobs = whole_logprobs
    if form == "around":
        torch.compiler.reset()
        for layer in policy.language_model.layers:
            layer.gradient_checkpointing = True
            if policy.compiled:
                layer.compile(dynamic=True)
    try:
        yield
    finally:
        policy_module.token_logprobs = fused.token_logprobs


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
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rate = matmul_tflops()
    found: dict[str, Any] = {}
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
        work = useful_tflop(parameters, text, options.tokens, options.sequence)
        result = {
            "workload": options.workload, "parameters": parameters, "tokens": options.tokens,
            "sequence": options.sequence, "forms": found, "useful_tflop": work, "matmul_tflops": rate, **stamp(),
        }  # fmt: skip
        for form in sorted(options.forms, key=FORMS.index):
            try:
                with changed(form, worker.policy.model):
                    found[form] = measure(worker, plan, options.rounds)
                rates = {"tflops": work / found[form]["seconds"]}
                rates["share_of_matmul"] = rates["tflops"] / rate if rate else 0.0
                found[form] |= rates
            except torch.OutOfMemoryError as error:
                found[form] = {"failed": str(error).partition("\n")[0]}
            options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
        result["matmul_tflops_for_seconds"] = matmul_tflops(times=2700)
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
