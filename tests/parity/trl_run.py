"""Runs TRL's trainers as black boxes on a tiny model and writes down what went in and came out: tokens, scores, losses,
gradients. A script of its own, so that nothing of it reaches the process of the tests.

    python trl_run.py MODEL_DIR OUTPUT.pt CASES.json      # {"name": ["grpo", {options}], ...}
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update({"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402

trl: Any = importlib.import_module("trl")
COMMON = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "max_grad_norm": 1e9,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "seed": 0,
    "weight_decay": 0.0,
}
WORDS = ("say 1", "use 2 now", "do 3", "a 0 ok")


class Notes(TrainerCallback):
    """Weights and gradients of each optimizer step, and the logged losses."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []
        self.logs: list[dict] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def grpo(model: Any, tokenizer: Any, directory: str, options: dict) -> dict:
    batches: list[dict] = []

    def score(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **rest: Any) -> Any:
        scores = [float((sum(ids) * 7 + len(ids)) % 5) / 4.0 for ids in completion_ids]
        batches.append({"prompts": prompts, "completion_ids": completion_ids, "scores": scores})
        return scores

    config = trl.GRPOConfig(
        output_dir=directory, per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
        num_iterations=2, max_steps=2, temperature=1.0,
        **COMMON, **options,
    )  # fmt: skip
    notes = Notes()
    data = Dataset.from_list([{"prompt": w} for w in WORDS])
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=score, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[notes]
    )
    trainer.train()
    return {"batches": batches, "losses": notes.losses, "gradients": notes.gradients, "logs": notes.logs}


def dpo(model: Any, tokenizer: Any, directory: str, options: dict) -> dict:
    rows = [{"prompt": w, "chosen": w[-1] * (3 + i), "rejected": "xy" * (1 + i)} for i, w in enumerate(WORDS)]
    return compared(model, tokenizer, rows, (trl.DPOConfig, trl.DPOTrainer), {"output_dir": directory, **options})


def kto(model: Any, tokenizer: Any, directory: str, options: dict) -> dict:
    rows = [{"prompt": w, "completion": w[-1] * (3 + i), "label": i % 2 == 0} for i, w in enumerate(WORDS)]
    return compared(model, tokenizer, rows, (trl.KTOConfig, trl.KTOTrainer), {"output_dir": directory, **options})


def compared(model: Any, tokenizer: Any, rows: list[dict], kind: tuple[Any, Any], options: dict) -> dict:
    """Two steps on all rows against a reference that is the start."""
    config, trainer = kind
    notes = Notes()
    trainer(
        model=model,
        ref_model=AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32),
        args=config(per_device_train_batch_size=4, max_steps=2, **COMMON, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[notes],
    ).train()
    return {"rows": rows, "losses": notes.losses, "gradients": notes.gradients, "logs": notes.logs}


def main(path: str, output: str, cases: str) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = {}
    for name, (kind, options) in json.loads(Path(cases).read_text()).items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        run = {"grpo": grpo, "dpo": dpo, "kto": kto}[kind]
        found[name] = run(model, tokenizer, str(Path(output).parent / "trl"), options)
    torch.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
