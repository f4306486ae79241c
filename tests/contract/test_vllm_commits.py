"""Weight commits into real vLLM engines on the CPU: they serve what was sent, or the commit says why not.

Engines start with random weights ("dummy"), so that everything they serve right came through a commit.
"""

import asyncio
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skirl.errors import SkirlError, WeightSyncError
from skirl.models.moe import split_experts
from skirl.prompts.decode import load_clip
from skirl.records import CommitReport, Prompt, Rollout, Sampling, TensorSpec, TrainingSequence
from skirl.rollouts.engines.vllm import EngineSpec, VLLMEngine
from skirl.testing import tiny_models
from skirl.weights.commit import send_weights
from skirl.weights.endpoints import Place
from skirl.weights.engine_client import EngineReceiver, match_progress
from skirl.weights.manifest import Bucket
from skirl.weights.sender import WeightSender
from tests import tiny
from tests.engine_process import new_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
BUCKET_BYTES = 64 << 10
"""Several buckets even for tiny models."""


# ----------------------------------------------------------------------------------------------------- the sending side
class ModelWeights:
    """Weights of a whole transformers model; ``alter`` makes them wrong in one way."""

    def __init__(self, model: Any, frozen: Sequence[str] = ()) -> None:
        self.model, self.frozen = model, tuple(frozen)
        self.alter: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors

    def tensors(self) -> dict[str, Tensor]:
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        saved = set(self.model.state_dict())
        named |= {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        return self.alter(split_experts(named))

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), trained=not n.startswith(self.frozen))
            for n, t in self.tensors().items()
        )

    @contextmanager
    def gathered(self, names: Sequence[str]):
        tensors = self.tensors()
        yield {name: tensors[name] for name in names}


class OneRank:
    """The driver's view of a single training rank."""

    def __init__(self, weights: ModelWeights) -> None:
        place = Place("here", None)
        self.rank = WeightSender(weights, sends=True, place=place, bucket_bytes=BUCKET_BYTES, checksum=True)
        self.damage: int | None = None
        """Bucket whose bytes change on the way."""

    async def open(self, transport, setup, *, version, whole):
        return self.rank.open(transport, setup, version=version, whole=whole)

    async def pack(self, index):
        bucket = self.rank.pack(index)
        return replace(bucket, checksum=bucket.checksum ^ 1) if index == self.damage else bucket

    async def transmit(self, index):
        self.rank.transmit(index)

    async def abort(self):
        self.rank.abort()


# ----------------------------------------------------------------------------------------------- an engine's process
def serve(pipe: Any, spec: EngineSpec, is_audio: bool) -> None:
    """Runs in a process of its own: where vLLM is imported, it replaces some of transformers' configs."""
    torch.set_num_threads(1)
    asyncio.run(serve_calls(pipe, VLLMEngine(spec, load_clip if is_audio else None)))


async def serve_calls(pipe: Any, engine: VLLMEngine) -> None:
    async def answer(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            if name == "generate":
                value = [rollout async for rollout in engine.generate(*arguments)]
            elif name == "set_version":
                value = setattr(engine, "policy_version", *arguments)
            elif name == "keys":
                value = list(engine._flights)
            else:
                value = await getattr(engine, name)(*arguments)
            pipe.send((number, value, None))
        except SkirlError as error:
            pipe.send((number, None, error))

    tasks = set()
    while (call := await asyncio.to_thread(pipe.recv)) is not None:
        tasks.add(asyncio.create_task(answer(*call)))
    await asyncio.gather(*tasks)


class EngineProcess:
    """A VLLMEngine in another process; calls by name from one event loop, answers in any order."""

    def __init__(self, spec: EngineSpec, is_audio: bool) -> None:
        context = new_processes()
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, spec, is_audio))
        self._process.start()
        other.close()
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._loop.add_reader(self._pipe.fileno(), self._settle)

    def _settle(self) -> None:
        try:
            number, value, error = self._pipe.recv()
        except EOFError:
            self._loop.remove_reader(self._pipe.fileno())
            for future in self._waiting.values():
                future.cancel()
            return
        future = self._waiting.pop(number)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def call(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        self._count += 1
        future = self._waiting[self._count] = self._loop.create_future()
        self._pipe.send((self._count, name, arguments))
        return future

    async def call_workers(self, method: str, payload: bytes) -> list[bytes]:
        return await self.call("call_workers", method, payload)

    async def invalidate_caches(self) -> None:
        await self.call("invalidate_caches")

    async def end(self) -> None:
        try:
            await self.call("shutdown")
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.send(None)
            await asyncio.to_thread(self._process.join, 30)
        finally:
            self._process.kill()
            self._process.join()
            self._pipe.close()


# -------------------------------------------------------------------------------------------------------------- the rig
@dataclass
class Rig:
    """An engine, the transformers model whose weights it is to serve, and what lies between."""

    runner: asyncio.Runner
    engine: EngineProcess
    kit: tiny.Kit
    plain: Any
    weights: ModelWeights
    sender: OneRank
    receiver: EngineReceiver
    num_prompts: int = 3
    version: int = 0
    served: list[int | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    async def commit(self, *, whole: bool = False) -> CommitReport:
        """Sends what the model holds now as the next version."""
        report = await send_weights(
            self.sender,
            [self.receiver],
            version=self.version + 1,
            whole=whole,
            transport="shared_memory",
            setup=b"",
            timeout_s=60,
        )
        self.version += 1
        self.seconds.append(report.seconds)
        return report

    def change(self, seed: int, scale: float = 0.02) -> None:
        """New values of everything that is trained."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.plain.model.named_parameters():
                if not name.startswith(self.weights.frozen):
                    parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)

    def prompts(self) -> list[Prompt]:
        """Longer than a block of the prefix cache, which on the CPU has 128 tokens: shorter ones are never cached."""
        prompts = self.kit.prompts(self.num_prompts)
        if self.kit.is_audio:
            return prompts
        return [replace(p, input_ids=p.input_ids * 12, compact_ids=p.compact_ids * 12) for p in prompts]

    def sampling(self, max_new_tokens: int = 24) -> Sampling:
        return Sampling(max_new_tokens=max_new_tokens, banned_ids=self.kit.banned_ids)

    async def sample(self, prompts: Sequence[Prompt], sampling: Sampling, group_size: int = 2) -> list[Rollout]:
        requests = tiny.requests(prompts, sampling, group_size=group_size)
        return sorted(
            await self.engine.call("generate", requests), key=lambda rollout: (rollout.prompt_id, rollout.sample_index)
        )

    def difference(self, rollout: Rollout, prompt: Prompt, part: slice = slice(None)) -> float:
        """Largest |engine's - transformers'| log-prob of the sampled tokens, under the model's weights of now."""
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        positions = np.arange(len(rollout.prompt_ids), len(ids))
        sequence = TrainingSequence("", ids, positions, media=prompt.media)
        with torch.no_grad():
            logits = tiny.plain_logits(self.plain, sequence)
        logits[:, list(self.kit.banned_ids)] = float("-inf")
        wanted = logits.log_softmax(-1).gather(-1, torch.from_numpy(rollout.response_ids)[:, None])[:, 0].numpy()
        return float(np.abs(wanted - rollout.logprobs)[part].max())

    def parity(self) -> float:
        """Samples, and compares with transformers; the prompts are always the same ones, so caches would be used."""
        prompts = self.prompts()
        rollouts = self.run(self.sample(prompts, self.sampling()))
        assert {v for rollout in rollouts for v in rollout.versions.tolist()} == {self.version}
        by_id = {prompt.id: prompt for prompt in prompts}
        return max(self.difference(rollout, by_id[rollout.prompt_id]) for rollout in rollouts)

    def fingerprint(self) -> tuple[Mapping[str, int], ...]:
        return self.run(self.receiver.fingerprint())


@contextmanager
def started(directory: Path, source: Path, frozen: Sequence[str], tensor_parallel_size: int):
    """A rig around the engine of ``directory``; the model is read from ``source``."""
    kit = tiny.make_kit(source)
    plain = tiny.plain_model(source)
    weights = ModelWeights(plain.model, frozen)
    spec = EngineSpec(
        model_path=str(directory),
        dtype="float32",
        seed=0,
        max_model_len=1024,
        max_in_flight=64,
        tensor_parallel_size=tensor_parallel_size,
        arguments={"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 64, "max_num_batched_tokens": 1024},
        placeholder=plain.family.placeholder if kit.is_audio else None,
    )
    with asyncio.Runner() as runner:

        async def start() -> EngineProcess:
            engine = EngineProcess(spec, kit.is_audio)
            await engine.call("start")
            return engine

        engine, served = runner.run(start()), list[int | None]()

        def set_version(version: int | None) -> None:
            served.append(version)
            if version is not None:
                engine.call("set_version", version)

        receiver = EngineReceiver("engine 0 on here", engine.call_workers, engine.invalidate_caches, set_version)
        rig = Rig(runner, engine, kit, plain, weights, OneRank(weights), receiver, served=served)
        try:
            runner.run(receiver.expect(weights.specs()))
            runner.run(rig.commit(whole=True))
            yield rig
        finally:
            runner.run(engine.end())


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints with heads as wide as vLLM's attention on the CPU needs (32)."""
    root = tmp_path_factory.mktemp("wide")
    made = {
        "tied": tiny_models.tiny_qwen3(root / "tied", hidden=64),
        "untied": tiny_models.tiny_qwen3(root / "untied", hidden=64, tied=False),
        "speech": tiny_models.tiny_qwen3_asr(root / "speech", hidden=128),
        "experts": tiny_models.tiny_qwen3_moe(root / "experts", experts=8),
    }
    for directory in made.values():
        tiny.sharpen(directory)
        soften(directory)
    made["tied, with a copy"] = with_head(made["tied"], root / "copy")
    return made


def soften(directory: Path) -> None:
    """Logits as large as those of the narrower models that ``sharpen`` was made for: float32 errors grow with them."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("norm.weight") and "layers" not in name:
            tensors[name] = tensors[name] / 4
    save_file(tensors, file, metadata={"format": "pt"})


def with_head(source: Path, directory: Path) -> Path:
    """A tied model whose files hold a copy of the embeddings as head, as those of released Qwen3-ASR do."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(frozen=True)
class Case:
    """Which engine a test runs on."""

    checkpoint: str
    frozen: tuple[str, ...] = ()
    tensor_parallel_size: int = 1


def engines(**cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rig", cases.values(), ids=cases, indirect=True, scope="module")


text = engines(tied=Case("tied, with a copy", ("model.embed_tokens",)), untied=Case("untied", ("model.embed_tokens",)))
experts = engines(experts=Case("experts", ("model.embed_tokens",)))
speech = engines(speech=Case("speech", ("model.audio_tower",)))
parallel = engines(parallel=Case("untied", tensor_parallel_size=2))


@pytest.fixture(scope="module")
def rig(request, sources):
    """One engine at a time: pytest runs all tests of a case, and ends its engine, before it starts the next."""
    case = request.param
    source = sources[case.checkpoint.partition(",")[0]]
    with started(sources[case.checkpoint], source, case.frozen, case.tensor_parallel_size) as made:
        yield made


# ------------------------------------------------------------------------------------------------------------- arriving
def check_commits(rig: Rig, count: int) -> float:
    worst = rig.parity()
    for seed in range(count):
        rig.change(seed)
        stale = rig.parity()
        assert stale > 100 * TOLERANCE, "the change is too small to tell old weights or caches from new ones"
        rig.run(rig.commit())
        worst = max(worst, rig.parity())
    return worst


@text
def test_engine_serves_what_was_sent(rig, record_property):
    worst = check_commits(rig, 10)
    record_property("max_logprob_difference", worst)
    record_property("seconds_per_commit", sorted(rig.seconds)[len(rig.seconds) // 2])
    assert worst < TOLERANCE
    assert rig.served[-1] == rig.version == rig.run(rig.receiver.version())


@experts
def test_experts_are_sent_one_by_one(rig, record_property):
    names = [spec.name for spec in rig.weights.specs()]
    assert len([name for name in names if ".experts.7." in name]) == 2 * 3
    worst = check_commits(rig, 3)
    record_property("max_logprob_difference", worst)
    assert worst < TOLERANCE


@speech
def test_same_clip_after_a_commit(rig, record_property):
    """The engine's caches of clips are dropped on both of its sides: one alone ends its process."""
    worst = check_commits(rig, 3)
    record_property("max_logprob_difference", worst)
    assert worst < TOLERANCE


@speech
def test_a_whole_commit_reaches_the_frozen_encoder(rig):
    with torch.no_grad():
        next(iter(rig.plain.model.model.audio_tower.parameters())).mul_(1.5)
    assert rig.parity() > 100 * TOLERANCE
    rig.run(rig.commit(whole=True))
    assert rig.parity() < TOLERANCE


@parallel
def test_tensor_parallel(rig, record_property):
    first, second = rig.fingerprint()
    shared = {name for name in first if name.endswith("norm.weight")}
    assert shared
    assert {name for name in first if first[name] == second[name]} == shared
    rig.num_prompts = 1  # two ranks that wait for one another by spinning, and all else, share the cores
    worst = check_commits(rig, 1)
    record_property("max_logprob_difference", worst)
    record_property("seconds_per_commit", rig.seconds[-1])
    assert worst < TOLERANCE


@parallel
def test_an_error_leaves_tensor_parallel_answers_in_step(rig):
    answers = rig.run(rig.engine.call_workers("skirl_finish", b"no pickle"))
    assert all("UnpicklingError" in pickle.loads(answer).error for answer in answers)
    with pytest.raises(WeightSyncError, match=r"engine worker 0 on .*none has begun \(and 1 more of its workers\)"):
        rig.run(rig.receiver.receive(Bucket(0, (), (), 0, None, {})))
    places = rig.run(rig.receiver.places("node-1"))
    assert [(place.rank, place.place) for place in places] == [(0, Place("node-1", None)), (1, Place("node-1", None))]
    assert rig.run(rig.receiver.version()) == rig.version


# ------------------------------------------------------------------------------------------------------------- refusing
NAME = "model.layers.1.mlp.down_proj.weight"

WRONG: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "dropped": lambda tensors: {name: t for name, t in tensors.items() if name != NAME},
    "renamed": lambda tensors: {name.replace(NAME, NAME + "_"): t for name, t in tensors.items()},
    "transposed": lambda tensors: tensors | {NAME: tensors[NAME].T.contiguous()},
    "dtype": lambda tensors: tensors | {NAME: tensors[NAME].bfloat16()},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("whole", [True, False])
@text
def test_wrong_commit_is_refused_and_the_old_version_served(rig, wrong, whole):
    before, version = rig.fingerprint(), rig.version
    rollouts = rig.run(rig.sample(rig.kit.prompts(2), rig.sampling()))
    rig.weights.alter = WRONG[wrong]
    try:
        with pytest.raises(WeightSyncError, match=r"engine 0 on here.*" + NAME.replace(".", r"\.")):
            rig.run(rig.commit(whole=whole))
    finally:
        rig.weights.alter = lambda tensors: tensors
    assert rig.fingerprint() == before
    assert rig.run(rig.receiver.version()) == rig.served[-1] == version
    again = rig.run(rig.sample(rig.kit.prompts(2), rig.sampling()))
    for old, new in zip(rollouts, again, strict=True):
        assert np.array_equal(old.response_ids, new.response_ids)
        assert np.array_equal(old.versions, new.versions)
        np.testing.assert_allclose(old.logprobs, new.logprobs, atol=TOLERANCE)


@text
def test_a_torn_commit_leaves_no_version_until_a_whole_one(rig):
    rig.sender.damage = 1
    with pytest.raises(WeightSyncError, match="damaged on the way"):
        rig.run(rig.commit())
    rig.sender.damage = None
    assert rig.served[-1] is None
    assert rig.run(rig.receiver.version()) is None
    with pytest.raises(WeightSyncError, match=r"(?i)commit a whole set first"):
        rig.run(rig.commit())
    rig.run(rig.commit(whole=True))
    assert rig.parity() < TOLERANCE


@text
def test_a_cache_that_is_not_dropped_leaves_no_version(rig):
    async def refuse() -> None:
        raise WeightSyncError("the prefix cache was not dropped")

    stuck = EngineReceiver("engine 0 on here", rig.engine.call_workers, refuse, rig.served.append)
    whole, rig.receiver = rig.receiver, stuck
    try:
        with pytest.raises(WeightSyncError, match="prefix cache was not dropped"):
            rig.run(rig.commit())
    finally:
        rig.receiver = whole
    assert rig.served[-1] is None
    assert rig.run(rig.receiver.version()) is None
    rig.run(rig.commit(whole=True))
    assert rig.parity() < TOLERANCE


@text
def test_a_tensor_that_both_lists_forgot_is_found(rig):
    """Neither the trainer nor the checkpoint's list has it, so only the engine's own parameters can tell."""
    rig.weights.alter = WRONG["dropped"]
    try:
        rig.run(rig.receiver.expect(rig.weights.specs()))
        with pytest.raises(WeightSyncError, match=r"not filled.*model\.layers\.1\.mlp\.down_proj\.weight"):
            rig.run(rig.commit(whole=True))
    finally:
        rig.weights.alter = lambda tensors: tensors
    rig.run(rig.receiver.expect(rig.weights.specs()))
    rig.run(rig.commit(whole=True))
    assert rig.parity() < TOLERANCE


@text
def test_fingerprint_shows_what_changed(rig):
    (before,) = rig.fingerprint()
    rig.run(rig.commit())
    assert rig.fingerprint() == (before,)
    with torch.no_grad():
        rig.plain.model.get_parameter("model.layers.0.self_attn.k_proj.weight")[0, 0] += 0.01
    rig.run(rig.commit())
    (after,) = rig.fingerprint()
    assert {n for n in before if before[n] != after[n]} == {"model.layers.0.self_attn.qkv_proj.weight"}


# ------------------------------------------------------------------------------------------------------------ in flight
@text
def test_a_commit_while_requests_are_in_flight(rig, record_property):
    prompts = rig.kit.prompts(3)
    old, sampled = rig.version, {}

    async def sample_across_a_commit() -> list[Rollout]:
        task = asyncio.ensure_future(rig.sample(prompts, rig.sampling(120)))
        while min((await rig.receiver.progress()).values(), default=0) < 20:
            await asyncio.sleep(0.01)
        await rig.engine.call("pause")
        sampled.update(match_progress(await rig.receiver.progress(), await rig.engine.call("keys")))
        assert not task.done()
        old_model.load_state_dict(rig.plain.model.state_dict())
        rig.change(100)
        await rig.commit()
        await rig.engine.call("resume")
        return await task

    old_model = tiny.plain_model(Path(rig.plain.source)).model
    rollouts = rig.run(sample_across_a_commit())
    assert len(rollouts) == 6
    worst = []
    assert sorted(int((r.versions == old).sum()) for r in rollouts) == sorted(sampled.values())
    for rollout in rollouts:
        prompt = next(p for p in prompts if p.id == rollout.prompt_id)
        switch = int((rollout.versions == old).sum())
        assert 20 <= switch < len(rollout.response_ids)
        assert rollout.versions[switch:].tolist() == [rig.version] * (len(rollout.versions) - switch)
        worst.append(rig.difference(rollout, prompt, slice(switch, None)))
        with using(rig, old_model):
            worst.append(rig.difference(rollout, prompt, slice(0, switch)))
    record_property("max_logprob_difference", max(worst))
    assert max(worst) < TOLERANCE


@contextmanager
def using(rig: Rig, model: Any):
    plain, rig.plain = rig.plain, replace(rig.plain, model=model)
    try:
        yield
    finally:
        rig.plain = plain
