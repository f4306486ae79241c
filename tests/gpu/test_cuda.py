"""CUDA paths: packed attention, log-probs, sampler against trainer, DeepSpeed over NCCL. Run with ``make test-gpu``."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from skirl.algorithms.logprobs import token_logprobs
from skirl.models.attention import packed_attention
from skirl.rollouts.engines.policy import PolicySampler
from skirl.runtime.device import has_gpu, pick_device
from tests import tiny
from tests.e2e.recipes import GRPO, SFT, execute, largest_difference, write_recipe

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not has_gpu():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("window", [None, 16])
def test_packed_attention_equals_float32_sequences(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [5, 130, 1, 64]
    total = sum(lengths)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = (torch.randn(1, h, total, 64, dtype=torch.bfloat16) for h in (8, 2, 2))
    exact, _ = packed_attention(
        torch.nn.Module(), q.float(), k.float(), v.float(), None, cu_seq_lens_q=borders, sliding_window=window
    )
    device = pick_device()
    q, k, v = (t.to(device).requires_grad_() for t in (q, k, v))
    fast, _ = packed_attention(
        torch.nn.Module(), q, k, v, None, cu_seq_lens_q=borders.to(device), max_length_q=130, sliding_window=window
    )
    assert (fast.float().cpu() - exact).abs().max() < 0.02
    fast.float().square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


def test_log_probs_equal_the_cpu() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(300, 64), torch.randn(1000, 64), torch.randint(0, 1000, (300,))
    form = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "chunk": 128}
    banned = torch.tensor([3, 4])
    targets[targets < 5] = 5
    cpu = token_logprobs(hidden, weight, targets, banned_ids=banned, **form)
    device = pick_device()
    gpu = token_logprobs(hidden.to(device), weight.to(device), targets.to(device), banned_ids=banned.to(device), **form)
    assert max((a - b.cpu()).abs().max() for a, b in zip(cpu, gpu, strict=True)) < 1e-3


@pytest.mark.parametrize("command", ["sft", "train"])
def test_deepspeed_over_nccl_equals_single(tiny_speech: Path, tmp_path: Path, command: str) -> None:
    """One GPU, float32: plain PyTorch, ZeRO 1 to 3 and the optimizer's offload give the same five steps."""
    sections = SFT if command == "sft" else GRPO
    plain = execute(command, write_recipe(tmp_path / "plain", tiny_speech, **sections))
    for name, flags in {
        "zero-1": ["--trainer.backend.zero_stage=1"],
        "zero-2": ["--trainer.backend.zero_stage=2"],
        "zero-3": ["--trainer.backend.zero_stage=3"],
        "offload": ["--trainer.backend.zero_stage=2", "--trainer.backend.offload_optimizer=true"],
    }.items():
        recipe = write_recipe(tmp_path / name, tiny_speech, **sections)
        got = execute(command, recipe, ["--runtime", "ray", "--trainer.backend", "deepspeed", *flags])
        difference, where = largest_difference(plain, got)
        assert difference < 1e-3, (name, where)


def test_bfloat16_sampler_agrees_with_trainer(
    tiny_speech: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """KL of the gap between cached decoding and packed scoring; half the square of a 5 % error would be 1.3e-3."""
    recipe = write_recipe(tmp_path, tiny_speech, **GRPO)
    steps = execute("train", recipe, ["--model.dtype", "bfloat16", "--method.mini_batches", "1"])
    gaps = [s["policy/kl_rollout"] for s in steps]
    record_property("KL(rollout, policy) in bfloat16", gaps)
    assert max(gaps) < 2e-3


def test_sampling_keeps_no_host_memory(tiny_text: Path, record_property: Callable[[str, object], None]) -> None:
    """cuDNN's attention would keep a plan for each number of tokens and rows: megabytes a token, and a tenth of a
    second to build each.
    """
    kit = tiny.make_kit(tiny_text, dtype="bfloat16")
    kit.policy.to(pick_device())
    sampler = PolicySampler(kit.policy, kit.loaded.tokenizer)
    sizes = []
    for _ in range(3):
        sampler.generate(tiny.requests(kit.prompts(24), kit.sampling(max_new_tokens=60)))
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6)
    record_property("resident MB after each generation", sizes)
    assert sizes[2] - sizes[0] < 50
