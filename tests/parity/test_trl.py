"""Losses and gradients of the methods that TRL has too, on the same tokens, scores and weights.

TRL's trainers run as black boxes (trl_run.py, a process of its own): on the tokens that they sampled or made of a data
set, ours must equal their logged loss and their gradients in two optimizer steps of plain gradient descent. The second
has ratios away from 1, and log ratios to a reference away from 0. What differs on purpose is in docs/papers.md.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skirl.algorithms.advantages import group_mean, group_norm
from skirl.config.algorithms import CISPO, GSPO, SAPO, PPOClip
from skirl.config.offline import DPOLoss, IPOLoss, KTOLoss
from skirl.planning.schedule import make_plan
from skirl.records import Preference, Sampling, TrainingSequence
from skirl.testing.tiny_task import tiny_task
from skirl.training.objective import Objective, PolicyObjective, micro_batch_loss
from skirl.training.preference_objective import PreferenceObjective
from skirl.training.rows import make_row
from tests.tiny import Kit, make_kit

TOLERANCE = 1e-5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False, "learning_rate": 0.2}),
    "dr_grpo": ("grpo", {"loss_type": "dr_grpo", "beta": 0.0, "scale_rewards": False, "learning_rate": 0.5}),
    "dapo": ("grpo", {"loss_type": "dapo", "beta": 0.0, "epsilon_high": 0.28, "learning_rate": 0.2}),
    "gspo": (
        "grpo",
        {"loss_type": "grpo", "beta": 0.0, "importance_sampling_level": "sequence", "epsilon": 3e-2}
        | {"epsilon_high": 4e-2, "learning_rate": 0.002},
    ),
    "cispo": ("grpo", {"loss_type": "cispo", "beta": 0.0, "epsilon_high": 1.5, "learning_rate": 0.2}),
    "sapo": ("grpo", {"loss_type": "sapo", "beta": 0.0, "learning_rate": 0.2}),
    "dpo": ("dpo", {"loss_type": "sigmoid", "beta": 0.1, "learning_rate": 0.2}),
    "ipo": ("dpo", {"loss_type": "ipo", "beta": 0.1, "learning_rate": 0.002}),
    "kto": ("kto", {"beta": 0.1, "learning_rate": 0.5}),
}
LENGTH = 12  # trl_run.py's max_completion_length


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(checkpoint that all runs start from, what each of TRL's runs did)."""
    pytest.importorskip("trl", reason="the parity tests need trl, which make setup installs")
    root = tmp_path_factory.mktemp("trl")
    tiny_task(root)
    (root / "cases.json").write_text(json.dumps(CASES))
    script = Path(__file__).parent / "trl_run.py"
    command = [sys.executable, str(script), str(root / "model"), str(root / "out.pt"), str(root / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "model", torch.load(root / "out.pt", weights_only=False)


class Descent:
    """Our own two steps: loss and gradients under an objective, then plain gradient descent."""

    def __init__(self, directory: Path, learning_rate: float) -> None:
        self.kit: Kit = make_kit(directory)
        self._rate = learning_rate
        self._parameters = dict(self.kit.policy.named_model_parameters())

    def logprobs(self, sequences: Sequence[TrainingSequence]) -> list[np.ndarray]:
        plan = make_plan(sequences, num_ranks=1, max_tokens=10_000, normalizer="token")
        found: list[np.ndarray] = [np.empty(0)] * len(sequences)
        with torch.no_grad():
            for micro_batch in plan.steps[0].ranks[0]:
                row, _ = make_row(plan, micro_batch, torch.device("cpu"))
                first = self.kit.policy(row, Sampling())[0]
                counts = [sequences[i].num_actions for i in micro_batch.sequences]
                for i, part in zip(micro_batch.sequences, first.split(counts), strict=True):
                    found[i] = part.numpy()
        return found

    def step(
        self, objective: Objective, sequences: Sequence[TrainingSequence], **how: Any
    ) -> tuple[float, dict[str, torch.Tensor]]:
        plan = make_plan(sequences, num_ranks=1, max_tokens=60, **how)  # several micro-batches
        self.kit.policy.zero_grad()
        total = 0.0
        for micro_batch in plan.steps[0].ranks[0]:
            row, streams = make_row(plan, micro_batch, torch.device("cpu"))
            loss, _ = micro_batch_loss(objective, self.kit.policy(row, objective.sampling), streams)
            loss.backward()
            total += loss.item()
        gradients = {n: p.grad.clone() for n, p in self._parameters.items() if p.grad is not None}
        with torch.no_grad():
            for name, gradient in gradients.items():
                self._parameters[name].sub_(self._rate * gradient)
        return total, gradients


def compare(found: tuple[float, dict[str, torch.Tensor]], run: dict[str, Any], number: int, record: Any) -> None:
    """Loss and the whole gradient of one step, relative to the gradient's own norm."""
    loss, gradients = found
    wanted = run["gradients"][number]
    assert wanted.keys() == gradients.keys()
    assert any(bool(g.any()) for g in wanted.values()), "a gradient of zeros compares nothing"
    apart = torch.stack([(gradients[n] - g).norm() for n, g in wanted.items()]).norm()
    whole = torch.stack([g.norm() for g in wanted.values()]).norm()
    record(f"step_{number + 1}", f"{float(apart / whole):.1e}")
    assert float(apart / whole) < TOLERANCE
    assert loss == pytest.approx(run["losses"][number], abs=TOLERANCE * max(1.0, abs(loss)))


# ------------------------------------------------------------------------------------------------------------- rollouts
OBJECTIVES: dict[str, PolicyObjective] = {
    "grpo": PolicyObjective(Sampling(), PPOClip(), "k3"),
    "dr_grpo": PolicyObjective(Sampling(), PPOClip()),
    "dapo": PolicyObjective(Sampling(), PPOClip(high=0.28)),
    "gspo": PolicyObjective(Sampling(), GSPO(kind="gspo", low=3e-2, high=4e-2)),
    "cispo": PolicyObjective(Sampling(), CISPO(kind="cispo", high=0.5)),  # TRL's epsilon_high is the cap itself
    "sapo": PolicyObjective(Sampling(), SAPO(kind="sapo")),
}
NORMALIZERS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"normalizer": "constant", "constant_length": LENGTH},
    "dapo": {"normalizer": "token"},
    "cispo": {"normalizer": "token"},
}


def sampled(run: dict[str, Any], kit: Kit, name: str) -> list[TrainingSequence]:
    """TRL's own completions as sequences with our advantages; groups of four."""
    (batch,) = run["batches"]
    scores = torch.tensor(batch["scores"], dtype=torch.float64).view(-1, 4)
    if name == "dr_grpo":
        advantages = [group_mean(group, tolerance=1e-8) for group in scores]
    else:  # 1e-4 is what TRL adds to the standard deviation
        advantages = [group_norm(group, eps=1e-4, ddof=1, tolerance=1e-8) for group in scores]
    sequences = []
    for i, (text, ids) in enumerate(zip(batch["prompts"], batch["completion_ids"], strict=True)):
        prompt = kit.loaded.tokenizer(text)["input_ids"]
        positions = np.arange(len(prompt), len(prompt) + len(ids))
        sequence = TrainingSequence(f"{i}", np.asarray(prompt + ids, dtype=np.int64), positions)
        value = float(advantages[i // 4][i % 4])
        sequences.append(replace(sequence, advantages=np.full(len(ids), value)))
    return sequences


@pytest.mark.parametrize("name", OBJECTIVES)
def test_policy_losses_equal_trl(
    name: str, theirs: tuple[Path, dict[str, Any]], record_property: pytest.FixtureRequest
) -> None:
    directory, runs = theirs
    ours = Descent(directory, CASES[name][1]["learning_rate"])
    sequences = sampled(runs[name], ours.kit, name)
    how = {"normalizer": "sequence", **NORMALIZERS.get(name, {})}
    if beta := CASES[name][1]["beta"]:
        how["kl_coef"] = beta
    before = ours.logprobs(sequences)
    references = [replace(s, reference_logprobs=p) for s, p in zip(sequences, before, strict=True)]
    first = references if beta else sequences
    compare(ours.step(OBJECTIVES[name], first, **how), runs[name], 0, record_property)
    second = [replace(s, old_logprobs=p) for s, p in zip(first, before, strict=True)]
    compare(ours.step(OBJECTIVES[name], second, **how), runs[name], 1, record_property)


# ---------------------------------------------------------------------------------------------------------- preferences
PREFERENCES: dict[str, PreferenceObjective] = {
    "dpo": PreferenceObjective(DPOLoss(kind="dpo", beta=0.1)),
    "ipo": PreferenceObjective(IPOLoss(kind="ipo", beta=0.1, reduction="mean")),
}


def response(kit: Kit, key: str, prompt: str, text: str, *, chosen: bool) -> TrainingSequence:
    """A prompt and a response with its end token."""
    ids = kit.loaded.tokenizer
    before, after = ids(prompt)["input_ids"], [*ids(text)["input_ids"], ids.eos_token_id]
    positions = np.arange(len(before), len(before) + len(after))
    made = np.asarray(before + after, dtype=np.int64)
    return TrainingSequence(key, made, positions, preference=Preference(chosen))


@pytest.mark.parametrize("name", PREFERENCES)
def test_pair_losses_equal_trl(
    name: str, theirs: tuple[Path, dict[str, Any]], record_property: pytest.FixtureRequest
) -> None:
    directory, runs = theirs
    ours = Descent(directory, CASES[name][1]["learning_rate"])
    sequences: list[TrainingSequence] = []
    for i, row in enumerate(runs[name]["rows"]):
        sequences += [
            response(ours.kit, f"{i}{kind}", row["prompt"], row[kind], chosen=kind == "chosen")
            for kind in ("chosen", "rejected")
        ]
    pairs = [replace(s, reference_logprobs=p) for s, p in zip(sequences, ours.logprobs(sequences), strict=True)]
    units = [f"{i // 2}" for i in range(len(pairs))]
    for number in range(2):
        found = ours.step(PREFERENCES[name], pairs, normalizer="sequence", unit_of=units)
        compare(found, runs[name], number, record_property)


def test_kto_equals_trl(theirs: tuple[Path, dict[str, Any]], record_property: pytest.FixtureRequest) -> None:
    directory, runs = theirs
    run = runs["kto"]
    ours = Descent(directory, CASES["kto"][1]["learning_rate"])
    objective = PreferenceObjective(KTOLoss(kind="kto", beta=0.1))
    rows = run["rows"]
    plain = [response(ours.kit, f"{i}", r["prompt"], r["completion"], chosen=r["label"]) for i, r in enumerate(rows)]
    singles = [replace(s, reference_logprobs=p) for s, p in zip(plain, ours.logprobs(plain), strict=True)]
    for number in range(2):
        assert run["logs"][number]["kl"] == 0.0  # TRL's baseline; with it the losses are the same function
        found = ours.step(objective, singles, normalizer="sequence")
        compare(found, run, number, record_property)
