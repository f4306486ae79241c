"""Whole commits in one process, over shared memory: what arrives, what is refused, what a failure leaves."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skirl.errors import WeightSyncError
from skirl.records import CommitReport, TensorSpec
from skirl.weights.commit import send_weights
from skirl.weights.manifest import Bucket
from tests.weight_ends import LocalReceiver, LocalSender, ModuleWeights, TrainerModel, make_sender


class Rig:
    """A trainer of two ranks, of which one sends, and two engines."""

    def __init__(self) -> None:
        self.model = TrainerModel()
        self.weights = ModuleWeights(self.model)
        specs = self.weights.specs()
        self.sender = LocalSender([make_sender(self.weights), make_sender(self.weights, sends=False)])
        self.engines = [LocalReceiver("engine 0", specs), LocalReceiver("engine 1", specs)]

    def commit(self, version: int, *, whole: bool = True, timeout_s: float = 20.0) -> CommitReport:
        return asyncio.run(
            send_weights(
                self.sender,
                self.engines,
                version=version,
                whole=whole,
                transport="shared_memory",
                setup=b"",
                timeout_s=timeout_s,
            )
        )

    def refused(self, version: int, *, whole: bool = True, timeout_s: float = 20.0) -> str:
        with pytest.raises(WeightSyncError) as caught:
            self.commit(version, whole=whole, timeout_s=timeout_s)
        return str(caught.value)

    def close(self) -> None:
        for rank in self.sender.ranks:
            rank.abort()
        for engine in self.engines:
            engine.worker.abort()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_whole_then_trained_only(rig: Rig) -> None:
    report = rig.commit(1)
    assert all(engine.model.holds(rig.model) for engine in rig.engines)
    assert [engine.version for engine in rig.engines] == [1, 1]
    sizes = {"embed": 37 * 8 * 4, "q": 16 * 8 * 4, "k": 4 * 8 * 2, "frozen": 30 * 4, "mean": 12}
    assert dataclasses.replace(report, seconds=0) == CommitReport(1, "shared_memory", sum(sizes.values()), 3, True)
    assert report.seconds > 0

    rig.model.step()
    before = rig.engines[0].model.snapshot()
    report = rig.commit(2, whole=False)
    assert all(engine.model.holds(rig.model) for engine in rig.engines)
    assert not torch.equal(before["qk"], rig.engines[0].model.qk)
    assert report.num_bytes == sizes["embed"] + sizes["q"] + sizes["k"]
    assert not report.whole
    assert [engine.version for engine in rig.engines] == [2, 2]


def test_a_partial_commit_leaves_frozen_weights_alone(rig: Rig) -> None:
    rig.commit(1)
    for engine in rig.engines:
        engine.model.tower.data.fill_(7.0)
    rig.commit(2, whole=False)
    assert all((engine.model.tower == 7.0).all() for engine in rig.engines)


def drop(specs: list[TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs if spec.name != "q"]


def alter(**fields: object) -> Callable[[list[TensorSpec]], list[TensorSpec]]:
    def edit(specs: list[TensorSpec]) -> list[TensorSpec]:
        return [dataclasses.replace(spec, **fields) if spec.name == "q" else spec for spec in specs]

    return edit


BAD_LISTS = [
    (drop, "1 missing: q"),
    (alter(name="qq"), r"qq (renamed? q is missing)"),
    (alter(shape=(8, 16)), "q ([8, 16], not [16, 8], transposed)"),
    (alter(dtype="bfloat16"), "q (bfloat16, not float32)"),
]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("edit", "message"), BAD_LISTS)
def test_refused_at_begin_nothing_is_touched(rig: Rig, edit, message: str, whole: bool) -> None:
    rig.commit(1)
    old = [engine.model.snapshot() for engine in rig.engines]
    rig.model.step()
    rig.weights.edit = edit
    text = rig.refused(2, whole=whole)
    assert message in text
    assert "engine 0: " in text
    assert "engine 1: " in text, "every refusal is reported"
    for engine, values in zip(rig.engines, old, strict=True):
        assert engine.version == 1
        assert all(torch.equal(value, values[name]) for name, value in engine.model.snapshot().items())

    rig.weights.edit = list
    rig.commit(3, whole=False)
    assert all(engine.model.holds(rig.model) and engine.version == 3 for engine in rig.engines)


def test_one_engine_refuses_and_the_other_is_not_touched(rig: Rig) -> None:
    rig.commit(1)
    old = rig.engines[0].model.snapshot()
    rig.engines[1].worker.forget()
    rig.model.step()
    text = rig.refused(2, whole=False)
    assert "engine 1: " in text
    assert "commit a whole set first" in text.lower()
    assert "engine 0" not in text
    assert rig.engines[0].version == 1
    assert all(torch.equal(value, old[name]) for name, value in rig.engines[0].model.snapshot().items())
    assert rig.engines[1].version is None
    rig.commit(3)
    assert all(engine.model.holds(rig.model) for engine in rig.engines)


def flip_bit(bucket: Bucket) -> Bucket:
    path = Path(json.loads(bucket.payload[""])["path"])
    with path.open("r+b") as file:
        file.seek(bucket.num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(bucket.num_bytes // 2)
        file.write(bytes([byte ^ 0b1000]))
    return bucket


def truncate(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, num_bytes=bucket.num_bytes - 64, checksum=None)


def outgrow(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, num_bytes=1 << 20, checksum=None)


def skip(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, index=bucket.index + 1)


def swap_tensors(bucket: Bucket) -> Bucket:
    other = dataclasses.replace(bucket.tensors[0], name="other")
    return dataclasses.replace(bucket, tensors=(other, *bucket.tensors[1:]))


def hollow(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, tensors=(), offsets=())


DAMAGES = [
    (flip_bit, "was damaged on the way"),
    (truncate, "truncated"),
    (outgrow, "is truncated"),
    (skip, "was due"),
    (swap_tensors, "name='other'"),
    (hollow, "holds 0 tensors"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
@pytest.mark.parametrize("at", [0, 1])
def test_damage_on_the_way(rig: Rig, damage, message: str, at: int) -> None:
    rig.commit(1)
    old = rig.engines[1].model.snapshot()
    rig.model.step()
    rig.engines[1].tamper = lambda bucket: damage(bucket) if bucket.index == at else bucket
    text = rig.refused(2)
    assert "engine 1: " in text or damage is flip_bit  # both engines read the one shared buffer
    assert message in text
    torn = at > 0
    assert rig.engines[1].version == (None if torn else 1)
    if not torn:
        assert all(torch.equal(value, old[name]) for name, value in rig.engines[1].model.snapshot().items())
    else:
        assert "no whole set of weights" in rig.refused(3, whole=False)

    rig.engines[1].tamper = lambda bucket: bucket
    rig.commit(4)
    assert all(engine.model.holds(rig.model) and engine.version == 4 for engine in rig.engines)


def test_partial_before_whole(rig: Rig) -> None:
    text = rig.refused(1, whole=False)
    assert "brings only what is trained" in text
    assert all(engine.version is None for engine in rig.engines)


def test_a_parameter_that_nothing_fills_is_named(rig: Rig) -> None:
    rig.engines[1].model.register_parameter("adapter", torch.nn.Parameter(torch.zeros(3)))
    text = rig.refused(1)
    assert "engine 1: " in text
    assert "1 parameters of the engine's model were not filled, or not wholly: adapter" in text
    assert rig.engines[1].version is None


def test_a_parameter_that_is_half_filled_is_named(rig: Rig) -> None:
    load = rig.engines[0].model.load
    rig.engines[0].worker._load = lambda tensors: load([pair for pair in tensors if pair[0] != "k"])
    assert "not wholly: qk" in rig.refused(1)


def test_coverage_is_proven_once(rig: Rig) -> None:
    rig.commit(1)
    rig.engines[0].model.register_parameter("late", torch.nn.Parameter(torch.zeros(3)))
    rig.commit(2)
    assert (rig.engines[0].model.get_parameter("late") == 0).all()


def test_nan_that_was_sent_is_told_apart(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.model.embed.data[3, 3] = float("nan")
    with caplog.at_level(logging.WARNING):
        rig.commit(1)
    assert "NaN was sent in embed" in caplog.text
    assert "NaN is in tokens" in caplog.text
    assert rig.engines[0].version == 1


def test_ranks_that_disagree(rig: Rig) -> None:
    other = ModuleWeights(TrainerModel(seed=1))
    rig.sender.ranks = [make_sender(rig.weights), make_sender(other)]
    with pytest.raises(WeightSyncError, match="two training ranks send weights for the same place"):
        rig.commit(1)


def test_everything_frozen(rig: Rig) -> None:
    rig.commit(1)
    rig.model.requires_grad_(False)
    assert "none of the model's 5 tensors is trained" in rig.refused(2, whole=False)


def test_buckets_are_packed_while_others_are_received(rig: Rig) -> None:
    slow = rig.engines[0]
    order: list[str] = rig.sender.log
    slow.log = order
    receive = slow.worker.receive

    def slowly(bucket: Bucket) -> None:
        import time

        time.sleep(0.05)
        receive(bucket)

    slow.worker.receive = slowly
    rig.commit(1)
    assert order == [
        *["pack 0", "transmit 0", "pack 1", "received 0"],
        *["transmit 1", "pack 2", "received 1"],  # buffer 0 is filled again only now
        *["transmit 2", "received 2"],
    ]


def test_the_first_bucket_is_packed_while_engines_compare_the_lists(rig: Rig) -> None:
    """Each waits for the other to have begun: one after the other would not end."""
    pack, begin = rig.sender.pack, rig.engines[1].begin
    packing, comparing = asyncio.Event(), asyncio.Event()

    async def meeting_pack(index: int) -> Bucket:
        packing.set()
        await comparing.wait()
        return await pack(index)

    async def meeting_begin(*arguments: object) -> None:
        comparing.set()
        await packing.wait()
        await begin(*arguments)

    rig.sender.pack, rig.engines[1].begin = meeting_pack, meeting_begin
    rig.commit(1, timeout_s=5)
    assert all(engine.model.holds(rig.model) for engine in rig.engines)


def hang(rig: Rig, phase: str) -> None:
    async def never(*args: object) -> None:
        await asyncio.sleep(1000)

    setattr(rig.sender if phase == "pack" else rig.engines[1], phase, never)


@pytest.mark.parametrize(
    ("phase", "who"), [("begin", "engine 1"), ("receive", "engine 1"), ("finish", "engine 1"), ("pack", "the trainer")]
)
def test_deadline_names_who_did_not_answer(rig: Rig, phase: str, who: str) -> None:
    hang(rig, phase)
    text = rig.refused(1, timeout_s=0.5)
    assert f"{who} did not answer within rollout.commit.timeout_s = 0.5 s" in text
    assert "engine 0" not in text
    assert rig.sender.log[-1] == "abort"
    assert all(engine.log[-1] == "abort" for engine in rig.engines)


def test_other_errors_are_told_too(rig: Rig) -> None:
    def explode(tensors: object) -> None:
        raise KeyError("lm_head.weight")

    rig.engines[0].worker._load = explode
    with pytest.raises(WeightSyncError, match=r"engine 0: KeyError: 'lm_head\.weight'") as caught:
        rig.commit(1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert rig.engines[0].version is None


def test_a_cancelled_commit_is_aborted_everywhere(rig: Rig) -> None:
    hang(rig, "finish")

    async def cancelled() -> None:
        commit = send_weights(
            rig.sender, rig.engines, version=1, whole=True, transport="shared_memory", setup=b"", timeout_s=20
        )
        async with asyncio.timeout(0.5):
            await commit

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert rig.sender.log[-1] == "abort"
    assert all(engine.log[-1] == "abort" for engine in rig.engines)


def test_calls_out_of_order(rig: Rig) -> None:
    sender, worker = rig.sender.ranks[0], rig.engines[0].worker
    manifest = sender.open("shared_memory", b"", version=5, whole=True)
    bucket = sender.pack(0)
    with pytest.raises(WeightSyncError, match="none has begun"):
        worker.receive(bucket)
    with pytest.raises(WeightSyncError, match="none has begun"):
        worker.finish(5)
    worker.begin(manifest, "shared_memory", b"")
    with pytest.raises(WeightSyncError, match="commit 5: cannot begin, commit 5 has not ended"):
        worker.begin(manifest, "shared_memory", b"")
    with pytest.raises(WeightSyncError, match="commit 5 runs"):
        worker.forget()
    worker.receive(bucket)  # the second begin did no harm
    assert worker.version is None
    with pytest.raises(WeightSyncError, match=r"not whole: 4 of 5 tensors did not come: q, k, frozen, mean"):
        worker.finish(5)
    with pytest.raises(WeightSyncError, match="commit 5 is running, 6 was to be finished"):
        worker.finish(6)
    with pytest.raises(WeightSyncError, match="bucket 0 came where 1 was due"):
        worker.receive(bucket)
    with pytest.raises(WeightSyncError, match="has failed and can only be aborted"):
        worker.receive(sender.pack(1))
    worker.abort()
    worker.abort()
    with pytest.raises(WeightSyncError, match=r"bucket 1 was asked for; the next is 2"):
        sender.pack(1)
    with pytest.raises(WeightSyncError, match="bucket 2 is in no buffer"):
        sender.transmit(2)


def test_without_checksums(rig: Rig) -> None:
    rig.sender.ranks = [make_sender(rig.weights, checksum=False)]
    rig.commit(1)
    assert all(engine.model.holds(rig.model) for engine in rig.engines)
