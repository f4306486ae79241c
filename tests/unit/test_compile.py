"""Compiled policies: equal to uncompiled ones at every row length, with a number of graphs that does not grow.

Run as a program, because the test process may have PyTorch's compiler switched off:
``python -m tests.unit.test_compile CHECKPOINT BACKEND ATTENTION`` writes what it saw as JSON.
"""

import json
import logging
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skirl.models import attention
from skirl.models.compile import compile_policy
from skirl.records import Sampling
from skirl.rollouts.engines.policy import PolicySampler
from skirl.training.optim import FiniteGuard
from skirl.training.rows import make_row
from tests import tiny

ROWS = ((4, 1, 9, 6, 2), (3,), (5, 7), (12, 3, 4, 4, 4, 4, 4), (2, 2))
WARM = 2
"""Rows after which nothing is compiled any more."""


# ------------------------------------------------------------------------------------------------------------- programs
def use_varlen_on_cpu() -> None:
    """The path of GPUs in half precision, with kernels for its two operators that the CPU can run."""
    from torch.nn.attention import varlen

    plain = attention.packed_attention

    def forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        scale = rest[3]
        parts = [[t[a:b].transpose(0, 1) for t in (q, k, v)] for a, b in pairwise(cu.tolist())]
        out = [scaled_dot_product_attention(*part, is_causal=True, scale=scale).transpose(0, 1) for part in parts]
        return torch.cat(out).contiguous(), torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        cu, scale = rest[2], rest[8]
        found = [torch.empty_like(t) for t in (q, k, v)]
        for a, b in pairwise(cu.tolist()):
            query, key, value, out = (t[a:b].transpose(0, 1) for t in (q, k, v, grad))
            later = torch.ones(b - a, b - a).triu(1).bool()
            weights = (query @ key.mT * scale).masked_fill(later, -1e30).softmax(-1)
            slope = out @ value.mT
            scores = weights * (slope - (slope * weights).sum(-1, keepdim=True)) * scale
            for into, part in zip(found, (scores @ key, scores.mT @ query, weights.mT @ out), strict=True):
                into[a:b] = part.transpose(0, 1)
        return tuple(found)

    def packed(*args: Any, scaling: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        _, query, key, value, mask = args
        if mask is not None:
            return plain(*args, scaling=scaling, **kwargs)
        borders, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
        return attention._varlen(query, key, value, borders, longest=longest, scaling=scaling, window=None), None

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    attention.packed_attention = packed  # what a kit registers


def passes(kit: tiny.Kit, rows: Any, *, scoring: bool) -> list[tuple[dict[str, Tensor], Tensor]]:
    """(gradients, log-probs with or without gradient) of each row."""
    found = []
    sampling = Sampling(banned_ids=kit.banned_ids)
    for lengths in rows:
        plan = tiny.whole(tiny.sequences(kit, lengths))
        row, streams = make_row(plan, plan.steps[0].ranks[0][0], torch.device("cpu"))
        kit.policy.zero_grad(set_to_none=True)
        logprobs, entropy, _ = kit.policy(row, sampling)
        (streams.weights * (logprobs + 0.3 * entropy)).sum().backward()
        gradients = {n: p.grad.clone() for n, p in kit.policy.named_parameters() if p.grad is not None}
        if scoring:
            with torch.no_grad():
                logprobs, _, _ = kit.policy(row, sampling)
        found.append((gradients, logprobs.detach()))
    return found


def poisoned(kit: tiny.Kit, guard: FiniteGuard) -> Tensor:
    """1 if the guard sees a weight of the last layer become infinite in the gradient."""
    with torch.no_grad():
        kit.policy.language_model.layers[-1].mlp.down_proj.weight[0, 0] = torch.inf
    passes(kit, ROWS[:1], scoring=False)
    return guard.take()


def compare(checkpoint: Path, backend: str, *, checkpointing: bool, scoring: bool) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    kit = tiny.make_kit(checkpoint)
    if checkpointing:
        kit.loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kit.policy.language_model.train()
    sampler = PolicySampler(kit.policy, kit.loaded.tokenizer)
    requests = tiny.requests(kit.prompts(2), kit.sampling(max_new_tokens=3))
    guard = FiniteGuard(kit.policy.parameters(), kit.policy.device)  # hooks that must be called in compiled layers too
    plain, names = passes(kit, ROWS, scoring=scoring), list(kit.loaded.model.state_dict())
    sampled = [r.response_ids.tolist() for r in sampler.generate(requests)]
    counters.clear()
    assert compile_policy(kit.policy, True, backend=backend)
    compiled, warm = passes(kit, ROWS[:WARM], scoring=scoring), counters["stats"]["unique_graphs"]
    compiled += passes(kit, ROWS[WARM:], scoring=scoring)
    same = [r.response_ids.tolist() for r in sampler.generate(requests)] == sampled
    return {
        "gradients": max(tiny.relative_difference(a[0], b[0]) for a, b in zip(plain, compiled, strict=True)),
        "logprobs": max(float((a[1] - b[1]).abs().max()) for a, b in zip(plain, compiled, strict=True)),
        "graphs": warm,
        "graphs_later": counters["stats"]["unique_graphs"] - warm,
        "breaks": sum(counters["graph_break"].values()),
        "same_names": list(kit.loaded.model.state_dict()) == names,
        "same_samples": same,
        "finite": not guard.take(),
        "notices_infinity": bool(poisoned(kit, guard)),
    }


def main(checkpoint: str, backend: str, path: str) -> None:
    torch.set_num_threads(1)
    if path == "varlen":
        use_varlen_on_cpu()
    scoring = backend != "inductor" and path == "varlen"  # in one case: each graph takes seconds to build
    found = [compare(Path(checkpoint), backend, checkpointing=c, scoring=scoring) for c in (True, False)]
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def run(checkpoint: Path, backend: str, path: str) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-m", "tests.unit.test_compile", str(checkpoint), backend, path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "backend", "path"),
    [("tied", "aot_eager", "varlen"), ("small", "aot_eager", "by sequence"), ("small", "inductor", "varlen")],
)
def test_compiled_policies_equal_plain_ones_at_every_length(checkpoints, record_property, name, backend, path):
    """Both kinds of attention, PyTorch's own kernels and the compiler's, with layers recomputed and not."""
    for found in run(checkpoints[name], backend, path):
        record_property(f"compiled_gradients/{backend}", found["gradients"])
        assert found["gradients"] < 1e-5
        assert found["logprobs"] < 1e-5
        assert found["graphs_later"] == 0
        assert found["same_names"]
        assert found["same_samples"]
        assert found["finite"]
        assert found["notices_infinity"]
        if path == "varlen":  # a layer is one graph, attention inside: with gradient, without; so are the head's chunks
            assert found["breaks"] == 0
            assert found["graphs"] <= 5


def test_what_is_not_wanted_or_sharded_stays_as_it_is(checkpoints, caplog):
    policy = tiny.make_kit(checkpoints["small"]).policy
    assert not compile_policy(policy, None)  # on the CPU
    assert not compile_policy(policy, False)
    with caplog.at_level(logging.INFO):
        assert not compile_policy(policy, True, sharded=True)
    assert "not compiled: ZeRO-3" in caplog.text
    assert not policy.compiled
    assert all(layer._compiled_call_impl is None for layer in policy.language_model.layers)


if __name__ == "__main__":
    main(*sys.argv[1:])
