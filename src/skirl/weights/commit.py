"""One weight commit from the driver's side: all engines or an error. Knows neither Ray nor tensors.

sender.open -> [pack 0 | every receiver.begin] -> [pack k+1 | transmit k | every receiver.receive k]
            -> every receiver.finish
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from skirl.errors import WeightSyncError
from skirl.records import CommitReport
from skirl.weights.endpoints import Receiver, Sender
from skirl.weights.manifest import Bucket, TransportName, size_bytes

__all__ = ["send_weights"]

_logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 30.0
_TRAINER = "the trainer"


class _Failed(Exception):
    """Who failed, and why; None: did not answer in time."""

    def __init__(self, phase: str, errors: Mapping[str, BaseException | None]) -> None:
        super().__init__(phase)
        self.phase = phase
        self.errors = errors


async def send_weights(
    sender: Sender,
    receivers: Sequence[Receiver],
    *,
    version: int,
    whole: bool,
    transport: TransportName,
    setup: bytes | Sequence[bytes],
    timeout_s: float,
) -> CommitReport:
    """Brings ``version`` to every engine.

    Args:
        whole: all tensors; else those that are trained, for engines that hold a whole set.
        setup: for the transport; one for all, or the sender's and then one a receiver.
        timeout_s: deadline of the whole commit.

    Returns:
        The report, when every receiver serves ``version`` and has dropped its caches.

    Raises:
        WeightSyncError: names who refused, failed or did not answer, and why. Everybody was told to abort: a receiver
            that had loaded nothing goes on with its old version, one that had serves nothing until a whole commit.
    """
    start = time.monotonic()
    phases = _Phases(start + timeout_s)
    setups = [setup] * (1 + len(receivers)) if isinstance(setup, bytes) else list(setup)
    assert len(setups) == 1 + len(receivers), "one setup for the sender and one for each receiver"
    assert len({receiver.name for receiver in receivers}) == len(receivers), "messages tell receivers apart by name"
    try:
        manifest = await phases.one("connect", sender.open(transport, setups[0], version=version, whole=whole))
        calls: dict[str, Coroutine[Any, Any, Any]] = {_TRAINER: sender.pack(0)}
        calls |= {r.name: r.begin(manifest, transport, s) for r, s in zip(receivers, setups[1:], strict=True)}
        first: Bucket = (await phases.all("begin", calls))[_TRAINER]
        num_buckets = await _stream(phases, sender, receivers, first, len(manifest.tensors))
        await phases.all("finish", {r.name: r.finish(version) for r in receivers})
    except _Failed as failed:
        await _abort(sender, receivers)
        raise _error(failed, version, transport, timeout_s) from next(filter(None, failed.errors.values()), None)
    except BaseException:  # also a cancelled commit is aborted everywhere
        await _abort(sender, receivers)
        raise
    return CommitReport(
        version=version,
        transport=transport,
        num_bytes=sum(size_bytes(spec) for spec in manifest.tensors),
        num_buckets=num_buckets,
        whole=whole,
        seconds=time.monotonic() - start,
    )


async def _stream(
    phases: "_Phases", sender: Sender, receivers: Sequence[Receiver], first: Bucket, num_tensors: int
) -> int:
    """Sends all buckets; one is packed while the one before is received. Returns how many there were."""
    bucket: Bucket | None = first
    index = done = 0
    while bucket is not None:
        done += len(bucket.tensors)
        # The order matters to a sender that does one thing at a time: the receivers wait for this bucket.
        calls: dict[str, Coroutine[Any, Any, Any]] = {_TRAINER: _send(sender, index, more=done < num_tensors)}
        calls |= {receiver.name: receiver.receive(bucket) for receiver in receivers}
        bucket = (await phases.all(f"bucket {index}", calls, stop_at_first=True))[_TRAINER]
        index += 1
    return index


async def _send(sender: Sender, index: int, *, more: bool) -> Bucket | None:
    """Transmits one bucket and packs the next, side by side; returns the next."""
    if not more:
        await sender.transmit(index)
        return None
    async with asyncio.TaskGroup() as group:
        group.create_task(sender.transmit(index))
        packed = group.create_task(sender.pack(index + 1))
    return packed.result()


class _Phases:
    """Runs calls to named parties under one deadline."""

    def __init__(self, end: float) -> None:
        self._end = end

    async def one(self, phase: str, call: Coroutine[Any, Any, Any]) -> Any:
        """The trainer's answer."""
        return (await self.all(phase, {_TRAINER: call}))[_TRAINER]

    async def all(
        self, phase: str, calls: Mapping[str, Coroutine[Any, Any, Any]], *, stop_at_first: bool = False
    ) -> dict[str, Any]:
        """Everybody's answer, by name.

        Args:
            stop_at_first: do not wait for the others once one has failed.
        """
        tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        until = asyncio.FIRST_EXCEPTION if stop_at_first else asyncio.ALL_COMPLETED
        try:
            await asyncio.wait(tasks.values(), timeout=max(self._end - time.monotonic(), 0.0), return_when=until)
        finally:
            late = [name for name, task in tasks.items() if not task.done()]
            for name in late:
                tasks[name].cancel()
        errors = {name: _outcome(task) for name, task in tasks.items() if name not in late}
        failed = {name: error for name, error in errors.items() if error is not None} or dict.fromkeys(late)
        if failed:
            raise _Failed(phase, failed)
        return {name: task.result() for name, task in tasks.items()}


def _outcome(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("was cancelled") if task.cancelled() else task.exception()


def _error(failed: _Failed, version: int, transport: TransportName, timeout_s: float) -> WeightSyncError:
    what = f"weight commit {version} ({transport}, {failed.phase})"
    silent = [name for name, error in failed.errors.items() if error is None]
    if silent:
        return WeightSyncError(
            f"{what}: {', '.join(silent)} did not answer within rollout.commit.timeout_s = {timeout_s:g} s"
        )
    reasons = "; ".join(f"{name}: {_reason(error)}" for name, error in failed.errors.items())
    return WeightSyncError(f"{what} failed: {reasons}")


def _reason(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"


async def _abort(sender: Sender, receivers: Sequence[Receiver]) -> None:
    """Tells everybody; who does not answer is logged, for the error that is under way says more."""
    calls = {_TRAINER: sender.abort()} | {receiver.name: receiver.abort() for receiver in receivers}
    try:
        await _Phases(time.monotonic() + _ABORT_TIMEOUT_S).all("abort", calls)
    except _Failed as failed:
        for name, error in failed.errors.items():
            _logger.warning("%s could not abort a weight commit: %s", name, error or "no answer")
