"""What a run holds is given back, whatever its end was, and no wait of the driver is without a deadline."""

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skirl import assemble
from skirl.assemble_engines import probed
from skirl.config.schema import Config, PolicyEngineConfig
from skirl.errors import RolloutError, WorkerError
from skirl.records import Prompt, Request, Rollout, Sampling
from skirl.runtime.ray.commits import Commits
from skirl.runtime.ray.engines import EngineActor
from skirl.runtime.ray.workers import RayWorkers


class Part:
    """Notes that it was ended; the one that is interrupted raises first."""

    def __init__(self, name: str, ends: list[str], interrupted: str = "") -> None:
        self._name, self._ends, self._interrupted = name, ends, interrupted

    def kill(self) -> None:
        self._ends.append(self._name)
        if self._name == self._interrupted:
            raise KeyboardInterrupt

    close = release = kill


@pytest.mark.parametrize("interrupted", ["engines", "buffers", "policy", "places"])
def test_a_second_ctrl_c_keeps_nothing_from_being_given_back(interrupted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    workers: Any = RayWorkers.__new__(RayWorkers)
    workers._own_cluster = True
    workers._engines, workers._commits = Part("engines", ends, interrupted), Part("buffers", ends, interrupted)
    workers._ranks = {"policy": Part("policy", ends, interrupted), "reference": Part("reference", ends)}
    workers._reservation = Part("places", ends, interrupted)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: ends.append("ray"))
    with pytest.raises(KeyboardInterrupt):
        workers.shutdown()
    assert ends[:2] == ["engines", "buffers"]
    assert sorted(ends[2:4]) == ["policy", "reference"]
    assert ends[4:] == ["places", "ray"]


def test_workers_that_fail_as_they_are_described_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        ended = False

        def describe(self) -> str:
            raise WorkerError("rank 0 died")

        def shutdown(self) -> None:
            self.ended = True

    broken = Broken()
    monkeypatch.setattr(assemble, "_start", lambda *_: broken)
    with pytest.raises(WorkerError, match="rank 0 died"), assemble.started(None, "train", None):  # type: ignore[arg-type]
        raise AssertionError("unreachable")
    assert broken.ended


def test_an_engine_that_is_still_starting_leaves_no_process() -> None:
    """Its shutdown knows only of a process that is up; the one that loads the model would go on alone."""

    class Starting:
        def __init__(self, pid: int) -> None:
            self._pid = pid

        async def shutdown(self) -> None:
            """There is nothing to shut down yet."""

        def child_pids(self) -> list[int]:
            return [self._pid]

    with subprocess.Popen(["sleep", "60"]) as process:
        actor = EngineActor(0)
        actor._engine = Starting(process.pid)  # type: ignore[assignment]
        asyncio.run(actor.shutdown())
        try:
            assert process.wait(5) == -9
        finally:
            process.kill()


def test_ranks_free_their_buffers_before_they_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    rank = type("Actor", (), {"abort_weights": type("M", (), {"remote": staticmethod(lambda: freed.append(0))})})
    monkeypatch.setattr("ray.wait", lambda references, num_returns, timeout: (references, []))
    commits: Any = Commits.__new__(Commits)
    commits._ranks, commits._sent = type("Ranks", (), {"actors": [rank, rank]}), False
    commits.close()
    assert freed == [], "nothing was sent, and the ranks may be busy for long"
    commits._sent = True
    commits.close()
    commits.close()
    assert len(freed) == 2


def test_ctrl_c_does_not_wait_for_ranks_that_sample() -> None:
    """What it interrupts waits for Ray, up to runtime.call_timeout_s, and only the end of the ranks would end that."""
    answered = threading.Event()
    ranks = SimpleNamespace(call_one=lambda rank, what, of: answered.wait(20) and [])
    workers: Any = RayWorkers.__new__(RayWorkers)
    workers._engines, workers._ranks = None, {"policy": ranks}
    workers._placement = SimpleNamespace(of=lambda role: [None])
    workers._spec = SimpleNamespace(config=SimpleNamespace(rollout=SimpleNamespace(engine=PolicyEngineConfig())))
    [engine] = workers.engines

    async def interrupted() -> None:
        call = asyncio.ensure_future(anext(aiter(engine.generate([]))))
        await asyncio.sleep(0.05)
        call.cancel()

    ended = threading.Event()
    threading.Thread(target=lambda: (asyncio.run(interrupted()), ended.set()), daemon=True).start()
    try:
        assert ended.wait(3), "the event loop waited for the call"
    finally:
        answered.set()


def test_a_probe_does_not_wait_for_an_engine_for_ever(tmp_path: Path) -> None:
    class Hangs:
        batch_size, max_in_flight = 1, 8

        async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Rollout]:
            await asyncio.sleep(20)
            yield None  # type: ignore[misc]

    class Workers:
        engines = (Hangs(),)
        num_ranks = 1

        def commit(self, version: int) -> dict[str, Any]:
            return {}

        invalidate_caches = send_all_weights = lambda self: None

    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": {"a": {"path": "a"}}},
            "run": {"dir": str(tmp_path)},
            "rollout": {"engine": {"kind": "vllm", "request_timeout_s": 0.2}, "probe": {}},
            "trainer": {"backend": {"kind": "deepspeed"}},
            "runtime": {"kind": "ray"},
        }
    )
    prompt = Prompt("a", "s", (1,), (1,), (), None, None, None, {})
    commits = probed(
        config,
        Workers(),
        [prompt],
        Sampling(max_new_tokens=1),
        placeholder_id=None,
        tracker=_Events(),  # type: ignore[arg-type]
    )
    with pytest.raises(RolloutError, match=r"within 0.2 s \(rollout.engine.request_timeout_s\)"):
        commits.commit(0)


class _Events:
    def event(self, *_: Any, **__: Any) -> None:
        """Nobody looks."""
