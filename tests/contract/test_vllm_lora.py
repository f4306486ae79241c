"""LoRA through real vLLM engines on the CPU: added into the weights on the way, from 4 bits, and sent as an adapter."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from skirl.config.models import LoRAConfig
from skirl.config.schema import OptimConfig
from skirl.models.adapters import add_adapters
from skirl.models.loading import set_trainable
from skirl.models.policy import Policy
from skirl.records import CommitReport, Rollout, Sampling, TrainingSequence
from skirl.rollouts.engines.vllm import EngineSpec
from skirl.testing import tiny_models
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import SupervisedObjective
from skirl.weights.commit import send_weights
from skirl.weights.engine_client import EngineReceiver
from skirl.weights.manifest import size_bytes
from tests import tiny
from tests.contract.test_vllm_commits import EngineProcess, OneRank, soften

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 1e-5
LORA = LoRAConfig(rank=4, alpha=12.0)
CASES = {
    "merged from 4 bits": LORA.model_copy(update={"quantize": "nf4"}),
    "as an adapter": LORA.model_copy(update={"commit": "adapter"}),
}


class Rig:
    """A trainer of adapters and an engine that starts with random weights."""

    def __init__(self, directory: Any, lora: LoRAConfig) -> None:
        kit = tiny.make_kit(directory)
        add_adapters(kit.loaded, lora)
        set_trainable(kit.loaded.model, kit.loaded.family, ())
        self.kit = replace(kit, policy=Policy(kit.loaded, None))
        self.sampling = Sampling(max_new_tokens=12, banned_ids=kit.banned_ids)
        self.trainer = SingleBackend(self.kit.policy, SupervisedObjective(), OptimConfig(lr=3e-3), 100)
        self.sender, self.version = OneRank(self.trainer), 0  # pyright: ignore[reportArgumentType]
        self.spec = EngineSpec(
            model_path=str(directory),
            dtype="float32",
            seed=0,
            max_model_len=512,
            arguments={"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 1024},
            adapter_rank=lora.rank if lora.commit == "adapter" else None,
            adapter_targets=lora.target_modules if lora.commit == "adapter" else (),
        )

    async def start(self) -> None:
        self.engine = EngineProcess(self.spec, False)
        await self.engine.call("start")
        self.receiver = EngineReceiver(
            "engine 0 on here", self.engine.call_workers, self.engine.invalidate_caches, lambda version: None
        )
        await self.receiver.expect(self.trainer.specs())

    async def commit(self, *, whole: bool = False) -> CommitReport:
        self.version += 1
        return await send_weights(
            self.sender,
            [self.receiver],
            version=self.version,
            whole=whole,
            transport="shared_memory",
            setup=b"",
            timeout_s=60,
        )

    async def sample(self) -> list[Rollout]:
        """Prompts longer than a block of the prefix cache, the same ones each time: what is cached would be used."""
        prompts = [replace(p, input_ids=p.input_ids * 12, compact_ids=p.compact_ids * 12) for p in self.kit.prompts(3)]
        return await self.engine.call("generate", tiny.requests(prompts, self.sampling, group_size=2))

    def difference(self, rollouts: list[Rollout]) -> float:
        """Largest |engine's - trainer's| log-prob of the sampled tokens, under the trainer's weights of now."""
        found = self.trainer.logprobs(self.plan(rollouts), self.sampling)
        return max(float(np.abs(found[i].numpy() - r.logprobs).max()) for i, r in enumerate(rollouts))

    def plan(self, rollouts: list[Rollout]) -> Any:
        made = []
        for number, rollout in enumerate(rollouts):
            ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
            made.append(TrainingSequence(str(number), ids, np.arange(len(rollout.prompt_ids), len(ids))))
        return tiny.whole(made)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tiny_models.tiny_qwen3(tmp_path_factory.mktemp("lora") / "model", hidden=64)
    tiny.sharpen(made)
    soften(made)
    return made


@pytest.mark.parametrize("lora", CASES.values(), ids=CASES)
def test_the_engine_samples_from_what_the_trainer_holds(directory, lora, record_property):
    torch.set_num_threads(1)
    rig = Rig(directory, lora)
    with asyncio.Runner() as runner:
        try:
            runner.run(rig.start())
            whole = runner.run(rig.commit(whole=True))
            worst = [rig.difference(runner.run(rig.sample()))]
            for step in range(3):
                rollouts = runner.run(rig.sample())
                rig.trainer.update(rig.plan(rollouts), step + 1)
                assert rig.difference(runner.run(rig.sample())) > 100 * TOLERANCE  # not sent yet
                part = runner.run(rig.commit())
                worst.append(rig.difference(runner.run(rig.sample())))
        finally:
            runner.run(rig.engine.end())
    record_property("max_logprob_difference", max(worst))
    assert max(worst) < TOLERANCE
    sent = [spec for spec in rig.trainer.specs() if spec.trained]
    assert part.num_bytes == sum(map(size_bytes, sent))
    assert whole.num_bytes > part.num_bytes
    if lora.commit == "adapter":
        assert part.num_bytes == sum(4 * t.numel() for _, t in rig.trainer.adapter_parameters())
