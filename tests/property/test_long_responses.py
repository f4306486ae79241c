"""Losses of whole responses keep their digits where responses are long: thousands of tokens share one value.

A sum of n float32 numbers, one after the other, is off by up to n eps; the oracle's sums are of float64.
"""

from typing import Any

import numpy as np
import pytest
import torch

from skirl.config.algorithms import GMPO, GSPO, TOPR
from skirl.config.offline import DPOLoss, IPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from skirl.planning.schedule import make_plan
from skirl.records import Preference, Sampling, TrainingSequence
from skirl.training.objective import Objective, PolicyObjective, micro_batch_loss
from skirl.training.preference_objective import PreferenceObjective
from skirl.training.rows import make_row
from tests.oracles import objectives as oracle
from tests.oracles.autodiff import gradient, numbers
from tests.oracles.tally import Tally

TOLERANCE = 1e-6
LENGTHS = (1500, 2700)

POLICY = {
    "gspo": GSPO(kind="gspo", low=0.5, high=0.5),
    "gspo token": GSPO(kind="gspo", low=0.5, high=0.5, token_level=True),
    "gmpo": GMPO(kind="gmpo"),
    "topr": TOPR(kind="topr", cap=5.0),
}
PREFERENCES = {
    "dpo": DPOLoss(kind="dpo"),
    "ipo mean": IPOLoss(kind="ipo"),
    "ipo sum": IPOLoss(kind="ipo", reduction="sum"),
    "kto": KTOLoss(kind="kto"),
    "simpo": SimPOLoss(kind="simpo"),
    "orpo": ORPOLoss(kind="orpo"),
}


@pytest.mark.parametrize("name", [*POLICY, *PREFERENCES])
def test_gradients_of_long_responses(name, record_property):
    """Log-probs of size 1; a response is about 0.5 nats from its old and its reference log-probs."""
    random = np.random.default_rng(list(LENGTHS))
    sequences, outputs = [], []
    for i, size in enumerate(LENGTHS):
        now = (-random.exponential(1.0, size=size)).astype(np.float32)
        near = [(now + 0.5 / size**0.5 * noise).astype(np.float32) for noise in random.standard_normal((2, size))]
        sequences.append(
            TrainingSequence(
                f"s{i}",
                np.arange(size + 1),
                np.arange(1, size + 1),
                old_logprobs=near[0],
                reference_logprobs=near[1],
                advantages=np.full(size, -0.7 if i else 1.3),
                preference=Preference(chosen=i == 0, baseline=0.25) if name in PREFERENCES else None,
            )
        )
        outputs.append(now)
    plan = make_plan(sequences, num_ranks=1, max_tokens=5000, normalizer="sequence", unit_of=["a", "a"])
    got = by_code(objective_of(name), plan, outputs)
    responses = [
        oracle.Response(
            first=numbers(map(float, now)),
            second=numbers([0.0] * len(now)),
            old=[float(x) for x in s.old_logprobs],
            reference=[float(x) for x in s.reference_logprobs],
            advantages=[float(x) for x in s.advantages],
            chosen=i == 0,
            baseline=0.25,
        )
        for i, (s, now) in enumerate(zip(sequences, outputs, strict=True))
    ]
    found = Tally(f"long {name}")
    found.cases += 1
    inputs = [x for r in responses for x in r.first]
    found.add(got, gradient(by_oracle(name, responses), inputs), "gradient")
    found.finish(record_property, TOLERANCE)


def objective_of(name: str) -> Objective:
    return PolicyObjective(Sampling(), POLICY[name]) if name in POLICY else PreferenceObjective(PREFERENCES[name])


def by_code(objective: Objective, plan: Any, outputs: list[np.ndarray]) -> list[float]:
    row, streams = make_row(plan, plan.steps[0].ranks[0][0], torch.device("cpu"))
    leaf = torch.tensor(np.concatenate(outputs), requires_grad=True)
    loss, _ = micro_batch_loss(objective, (leaf, torch.zeros_like(leaf), torch.zeros(0)), streams)
    loss.backward()
    assert leaf.grad is not None
    assert len(leaf) == len(row.targets)
    return leaf.grad.tolist()


def by_oracle(name: str, responses: list[oracle.Response]) -> Any:
    if name in POLICY:
        form = oracle.POLICY[POLICY[name].kind]
        return oracle.by_token(responses, lambda r: form(POLICY[name], r), "sequence", None)
    if name == "kto":
        return oracle.labelled(PREFERENCES[name], responses)
    return oracle.pairs(responses, oracle.pair_preference(PREFERENCES[name]))
