"""The phase machine against a simulated GPU that counts bytes and refuses what a real one would not survive."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skirl.errors import EngineDied, WeightSyncError, WorkerError
from skirl.records import CommitReport
from skirl.runtime.phases import Phases
from skirl.tracking.metrics import finish, spec_of

TRAINER_WEIGHTS, TRAINER_STATE, ENGINE_WEIGHTS, KV_CACHE, BUCKETS = 8, 48, 8, 40, 1
CAPACITY = TRAINER_WEIGHTS + BUCKETS + max(TRAINER_STATE, ENGINE_WEIGHTS + KV_CACHE)
"""Of one GPU: each phase fits, and no two of them together."""


@dataclass
class SimulatedGPU:
    """Both processes of one GPU. Starts as ``start`` of ``Phases`` says; its engines were loaded from nothing."""

    offload: bool = True
    start: str = "train"
    fail: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    version: int = 0
    level: int | None = None
    trained: int | None = None
    frozen: bool = False

    def __post_init__(self):
        self.awake = {"weights", "cache"} if self.start == "generate" else set()
        self.level = 2 if self.start == "train" else None
        self.resident = self.start == "train" or not self.offload
        self.peaks = {"engine": 0, "trainer": 0}
        self.capacity = CAPACITY if self.offload else CAPACITY + TRAINER_STATE
        self.account()

    def account(self, buckets=0):
        engine = ENGINE_WEIGHTS * ("weights" in self.awake) + KV_CACHE * ("cache" in self.awake)
        trainer = TRAINER_WEIGHTS + TRAINER_STATE * self.resident + buckets
        assert engine + trainer <= self.capacity, f"out of memory: engine {engine}, trainer {trainer}"
        self.peaks = {"engine": max(engine, self.peaks["engine"]), "trainer": max(trainer, self.peaks["trainer"])}

    def did(self, call):
        self.calls.append(call)
        if call in self.fail:
            self.fail.discard(call)
            raise EngineDied("engine 0 is gone") if "engine" in call or "sleep" in call else RuntimeError("no memory")

    def sleep_engines(self, level):
        self.did(f"sleep {level}")
        assert self.awake == {"weights", "cache"}, "only whole engines can fall asleep"
        self.awake, self.level = set(), level
        if level == 2:
            self.trained, self.frozen = None, False

    def wake_engine_weights(self):
        self.did("wake engine weights")
        assert self.awake == set()
        self.awake = {"weights"}
        self.account()

    def wake_engine_cache(self):
        self.did("wake engine cache")
        assert self.awake == {"weights"}
        self.awake = {"weights", "cache"}
        self.account()

    def offload_trainer(self):
        self.did("offload")
        assert self.offload
        assert self.resident
        self.resident = False

    def reload_trainer(self):
        self.did("reload")
        assert self.offload
        assert not self.resident
        assert not self.awake, "engines are awake"
        self.resident = True
        self.account()

    def send_weights(self, version, *, whole):
        self.calls.append(f"send {version}{' whole' if whole else ''}")
        assert version == self.version, "the trainer holds another version"
        assert "weights" in self.awake
        assert not (self.offload and self.resident)
        self.account(BUCKETS)
        if "send" in self.fail:
            self.fail.discard("send")
            self.trained, self.frozen = None, False
            raise WeightSyncError("engine 0: model.norm.weight is missing")
        self.trained, self.frozen = version, self.frozen or whole
        return CommitReport(version, whole=whole)

    def policy_version(self):
        return self.version

    def peak_bytes(self):
        peaks, self.peaks = self.peaks, {"engine": 0, "trainer": 0}
        self.account()
        return {name: peak * 10**9 for name, peak in peaks.items()}

    def check(self, phase):
        """What must hold in a phase."""
        if self.offload and "cache" in self.awake:
            assert not self.resident, "KV cache and optimizer at the same time"
        if phase == "generate":
            assert self.awake == {"weights", "cache"}
            assert self.frozen, "engines sample with weights that were never sent"
            assert self.trained == self.version, "engines sample with weights of another version"
        if phase == "train":
            assert not self.awake
            assert self.resident
        if phase == "commit":
            assert "weights" in self.awake
            assert not (self.offload and self.resident)


def machine(gpu, level=2):
    return Phases(gpu, shared=True, sleep_level=level, offload=gpu.offload, start=gpu.start)


def step(phases, gpu):
    """One step of the loop, as the driver makes it."""
    phases.enter("generate")
    phases.enter("train")
    gpu.version += 1
    return phases.commit(gpu.version)


@pytest.mark.parametrize("level", [1, 2])
def test_a_step_in_the_order_of_the_design(level):
    gpu = SimulatedGPU()
    phases = machine(gpu, level)
    step(phases, gpu)
    gpu.calls.clear()
    report = step(phases, gpu)
    whole = level == 2
    sent = f"send 2{' whole' if whole else ''}"
    before, after = ["wake engine cache"], ["offload", "wake engine weights", sent]
    assert gpu.calls == [*before, f"sleep {level}", "reload", *after]
    assert report == CommitReport(2, whole=whole)
    assert (phases.phase, phases.engines, phases.trainer, phases.held_version) == ("commit", "weights", "offloaded", 2)


def test_the_first_commit_is_whole_whatever_the_level():
    gpu = SimulatedGPU()
    phases = machine(gpu, level=1)
    phases.enter("generate")
    assert gpu.calls == ["offload", "wake engine weights", "send 0 whole", "wake engine cache"]


def test_sampling_right_after_training_sends_the_current_version_again_after_level_2_only():
    for level, expected in ((2, ["send 0 whole"]), (1, [])):
        gpu = SimulatedGPU()
        phases = machine(gpu, level)
        phases.enter("generate")
        phases.enter("train")  # a checkpoint, say: no update
        gpu.calls.clear()
        phases.enter("generate")
        assert [call for call in gpu.calls if call.startswith("send")] == expected


def test_entering_a_phase_twice_does_nothing():
    gpu = SimulatedGPU()
    phases = machine(gpu)
    phases.enter("train")
    assert gpu.calls == []
    phases.enter("generate")
    calls = list(gpu.calls)
    phases.enter("generate")
    assert gpu.calls == calls


def test_weights_lost_while_sampling_come_before_the_next_request():
    gpu = SimulatedGPU()
    phases = machine(gpu, level=1)
    phases.enter("generate")
    phases.weights_lost()
    gpu.calls.clear()
    phases.enter("generate")
    assert gpu.calls == ["send 0 whole"]


def test_engines_on_their_own_gpus_are_left_alone():
    gpu = SimulatedGPU(start="generate", offload=False)
    phases = Phases(gpu, shared=False, sleep_level=2)
    for phase in ("generate", "train", "commit", "generate"):
        phases.enter(phase)
        assert phases.phase == phase
    assert gpu.calls == []
    phases.commit(0)
    phases.enter("generate")
    phases.enter("train")
    gpu.version = 1
    phases.commit(1)
    assert gpu.calls == ["send 0 whole", "send 1"]
    assert [name for name in phases.take_report() if name.startswith("time/")] == []


def test_without_offload_the_trainer_stays():
    gpu = SimulatedGPU(offload=False)
    phases = machine(gpu, level=1)
    for _ in range(2):
        step(phases, gpu)
    assert not {"offload", "reload"} & set(gpu.calls)
    assert phases.trainer == "resident"


def test_an_action_that_fails_is_named_and_what_is_unknown_is_said():
    gpu = SimulatedGPU(fail={"sleep 2"})
    phases = machine(gpu)
    phases.enter("generate")
    with pytest.raises(EngineDied, match=r"engines sleep failed on leaving the phase generate: engine 0 is gone"):
        phases.enter("train")
    assert (phases.engines, phases.trainer, phases.held_version) == ("unknown", "offloaded", None)
    calls = list(gpu.calls)
    for phase in ("generate", "train", "commit"):
        with pytest.raises(
            WorkerError, match=rf"cannot enter the phase {phase}: what the engines hold .* engines sleep"
        ):
            phases.enter(phase)
    assert gpu.calls == calls


def test_an_error_that_is_not_ours_becomes_one_that_crosses_processes():
    gpu = SimulatedGPU(fail={"reload"})
    phases = machine(gpu)
    phases.enter("generate")
    with pytest.raises(
        WorkerError, match=r"trainer reload failed .* no memory \(engines asleep, trainer unknown\)"
    ) as caught:
        phases.enter("train")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(WorkerError, match="what the trainer hold"):
        phases.enter("commit")


def test_a_commit_that_fails_can_be_made_again_and_is_whole_then():
    gpu = SimulatedGPU(fail={"send"})
    phases = machine(gpu, level=1)
    with pytest.raises(WeightSyncError, match=r"recommit failed .*model\.norm\.weight is missing"):
        phases.enter("generate")
    assert (phases.phase, phases.engines, phases.held_version) == ("commit", "weights", None)
    phases.enter("train")  # is really left: the trainer has its state back
    assert gpu.resident
    assert phases.commit(0).whole
    phases.enter("generate")
    gpu.check("generate")


def test_a_commit_that_fails_may_have_touched_what_engines_held():
    gpu = SimulatedGPU()
    phases = machine(gpu, level=1)
    step(phases, gpu)
    gpu.fail = {"send"}
    with pytest.raises(WeightSyncError):
        step(phases, gpu)
    assert phases.commit(2).whole


def test_report_holds_the_seconds_of_actions_and_the_peaks_of_phases_left():
    gpu = SimulatedGPU()
    phases = machine(gpu)
    step(phases, gpu)
    phases.take_report()
    step(phases, gpu)
    report = phases.take_report()
    assert all(spec_of(name) is not None for name in report)
    values = finish(report)
    times = {f"time/{a}_s" for a in ("engines_sleep", "engines_wake_weights", "engines_wake_cache")}
    times |= {f"time/{a}_s" for a in ("trainer_reload", "trainer_offload", "switch")}
    assert {name for name in values if name.startswith("time/")} == times
    parts = sum(value for name, value in values.items() if name in times - {"time/switch_s"})
    assert values["time/switch_s"] == pytest.approx(parts)
    assert {name: value for name, value in values.items() if name.startswith("memory/")} == {
        "memory/generate/engine_peak_gb": ENGINE_WEIGHTS + KV_CACHE,
        "memory/generate/trainer_peak_gb": TRAINER_WEIGHTS,
        "memory/train/engine_peak_gb": 0,
        "memory/train/trainer_peak_gb": TRAINER_WEIGHTS + TRAINER_STATE,
        "memory/commit/engine_peak_gb": ENGINE_WEIGHTS,
        "memory/commit/trainer_peak_gb": TRAINER_WEIGHTS + BUCKETS,
    }
    assert phases.take_report() == {}


def test_many_threads_may_ask_for_the_same_phase():
    """Each request of a batch does, from a thread of its own."""
    gpu = SimulatedGPU()
    send = gpu.send_weights
    gpu.send_weights = lambda version, *, whole: (time.sleep(0.05), send(version, whole=whole))[1]
    phases = machine(gpu)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: phases.enter("generate"), range(16)))
    assert gpu.calls == ["offload", "wake engine weights", "send 0 whole", "wake engine cache"]


def test_levels_other_than_1_and_2_are_refused():
    with pytest.raises(ValueError, match="level 1 or 2, not 3"):
        Phases(SimulatedGPU(), shared=True, sleep_level=3)


FAILURES = ("send", "sleep 1", "sleep 2", "wake engine weights", "wake engine cache", "offload", "reload")
OPERATIONS = st.one_of(
    st.sampled_from(["generate", "train", "commit", "send", "update", "lost"]),
    st.sampled_from(FAILURES).map(lambda name: f"fail {name}"),
)


@settings(max_examples=300, deadline=None)
@example(["generate", "train", "update", "generate", "train", "commit", "train", "generate"], 2, True, "train")
@example(["generate", "train", "fail send", "generate", "train", "generate"], 1, True, "train")
@example(["generate", "fail send", "send", "generate"], 1, True, "train")
@given(
    st.lists(OPERATIONS, min_size=8, max_size=30),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(["generate", "train"]),
)
def test_any_sequence_keeps_the_invariants(operations, level, offload, start):
    """The simulated GPU raises AssertionError for whatever a real one would not survive; nothing here may raise one."""
    gpu = SimulatedGPU(offload=offload, start=start)
    phases = machine(gpu, level)
    for operation in operations:
        if operation == "update":
            if phases.phase != "train" or "unknown" in (phases.engines, phases.trainer):
                continue
            gpu.version += 1
            continue
        if operation == "lost":
            gpu.trained, gpu.frozen = None, False
            phases.weights_lost()
            continue
        if operation.startswith("fail "):
            gpu.fail = {operation.removeprefix("fail ")}
            continue
        unknown = "unknown" in (phases.engines, phases.trainer)
        failing, calls = bool(gpu.fail), len(gpu.calls)
        try:
            if operation == "send":
                assert phases.commit(gpu.version).version == gpu.version
            else:
                phases.enter(operation)
        except (WorkerError, EngineDied, WeightSyncError):
            assert failing or unknown
            assert not unknown or len(gpu.calls) == calls, "an action was called on processes in an unknown state"
            gpu.check(None)
            continue
        assert not unknown
        entered = "commit" if operation == "send" else operation
        assert phases.phase == entered
        gpu.check(entered)
