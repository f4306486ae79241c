"""One engine's end of a commit, in the process that owns the engine: its workers answer as one, or not at all.

begin -> receive per bucket -> finish: every worker holds the version -> caches dropped -> the engine's version rises
"""

import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skirl.errors import WeightSyncError
from skirl.records import TensorSpec
from skirl.weights.endpoints import Place
from skirl.weights.manifest import Bucket, Manifest, TransportName

__all__ = ["CallWorkers", "EngineReceiver", "Reply", "WorkerPlace", "match_progress"]

CallWorkers = Callable[[str, bytes], Awaitable[list[bytes]]]
"""Calls a method of every worker of one engine with the same argument; answers in rank order."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one worker answers: a value, or why there is none.

    Errors travel as values. An exception that leaves a worker reaches the caller as text, and in a tensor-parallel
    engine of vLLM (seen in 0.32) the executor stops reading at the first one, so that the other workers' answers are
    taken for those of the next call.
    """

    rank: int
    value: Any = None
    error: str | None = None

    def encode(self) -> bytes:
        """For the way back: vLLM's calls carry bytes unharmed, and turn tensors and records into lists."""
        return pickle.dumps(self)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where one worker computes, and its device's memory in bytes; zeros on the CPU."""

    rank: int
    place: Place
    free_bytes: int
    total_bytes: int


class EngineReceiver:
    """All workers of one engine together: ``endpoints.Receiver``. Messages name the worker; ``send_weights``, or the
    call outside a commit, puts the engine's name before them.

    Args:
        name: for messages: "engine 0 on node-1".
        call_workers: reaches ``vllm_worker.SkirlWorker``.
        invalidate_caches: drops the prefix, multimodal and encoder caches; raises where an engine does not confirm.
        set_version: what the engine stamps on tokens from now on. None: its weights are of no version, and it must
            serve nothing until a commit succeeds.
    """

    def __init__(
        self,
        name: str,
        call_workers: CallWorkers,
        invalidate_caches: Callable[[], Awaitable[None]],
        set_version: Callable[[int | None], None],
    ) -> None:
        self.name = name
        self._call_workers = call_workers
        self._invalidate_caches = invalidate_caches
        self._set_version = set_version
        self._manifest: Manifest | None = None
        self._is_finishing = False

    # ------------------------------------------------------------------------------------------------------- a commit
    async def begin(self, manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        """Every worker compares the manifest with what it must hold.

        Raises:
            WeightSyncError: a worker refuses; none was touched.
        """
        self._manifest, self._is_finishing = manifest, False
        hashes = await self._call("skirl_begin", (manifest, transport, setup))
        _agree(hashes, manifest.hash, "the manifest's hash")

    async def receive(self, bucket: Bucket) -> None:
        """Every worker loads the message.

        Raises:
            WeightSyncError: a worker could not; the engine now holds a mixture until ``abort`` or a whole commit.
        """
        await self._call("skirl_receive", bucket)

    async def finish(self, version: int) -> None:
        """Every worker holds all of ``version``, no cache holds anything older, and tokens are stamped with it.

        Raises:
            WeightSyncError: a worker lacks a tensor or holds another version, or a cache was not dropped.
        """
        if self._manifest is None:
            raise WeightSyncError(f"version {version} is to be finished, but no commit has begun")
        self._is_finishing = True
        held = await self._call("skirl_finish", version)
        _agree(held, (version, self._manifest.hash), "version and manifest hash")
        await self._invalidate_caches()
        self._set_version(version)
        self._manifest, self._is_finishing = None, False

    async def abort(self) -> None:
        """Ends a commit that failed. Where no worker had begun to load, the engine goes on with its version; else it
        has none until a whole commit succeeds.
        """
        is_finishing, self._manifest, self._is_finishing = self._is_finishing, None, False
        held: list[int | None] = [None]
        try:
            held = await self._call("skirl_abort")
        finally:
            if is_finishing or None in held or len(set(held)) > 1:
                self._set_version(None)
        if is_finishing or len(set(held)) > 1:
            await self._ask("skirl_forget")

    # ------------------------------------------------------------------------------------------------- outside commits
    async def expect(self, tensors: Sequence[TensorSpec]) -> None:
        """Tells every worker, once before the first commit, what the engine must hold after a whole one.

        Args:
            tensors: of the checkpoint, read independently of the trainer: frozen ones and persistent buffers too.

        Raises:
            WeightSyncError: the engine keeps weights in a form that a commit could not update.
        """
        await self._ask("skirl_expect", tuple(tensors))

    async def forget(self) -> None:
        """The engine dropped its weights (sleep level 2): the next commit must be whole."""
        self._set_version(None)
        await self._ask("skirl_forget")

    async def places(self, node: str | None = None) -> tuple[WorkerPlace, ...]:
        """Where the workers are, in rank order.

        Args:
            node: what the senders call this machine; None is its host name.
        """
        return tuple(await self._ask("skirl_place", node))

    async def version(self) -> int | None:
        """What the workers hold; None after a failed commit, and before the first."""
        versions = await self._ask("skirl_version")
        _agree(versions, versions[0], "version")
        return versions[0]

    async def progress(self) -> Mapping[str, int]:
        """Tokens that each unfinished request has sampled so far, by vLLM's own request id: see ``match_progress``.

        Exact while generation is paused.
        """
        return (await self._ask("skirl_progress"))[0]

    async def fingerprint(self) -> tuple[Mapping[str, int], ...]:
        """Checksums of what each worker holds, by the engine's own parameter names, in rank order."""
        return tuple(await self._ask("skirl_fingerprint"))

    # ------------------------------------------------------------------------------------------------------ the workers
    async def _ask(self, method: str, argument: Any = None) -> list[Any]:
        """Outside commits, whose driver names the engine."""
        try:
            return await self._call(method, argument)
        except WeightSyncError as error:
            raise WeightSyncError(f"{self.name}: {error}") from None

    async def _call(self, method: str, argument: Any = None) -> list[Any]:
        answers = await self._call_workers(method, pickle.dumps(argument))
        replies: list[Reply] = sorted((pickle.loads(answer) for answer in answers), key=lambda reply: reply.rank)
        failed = [reply for reply in replies if reply.error is not None]
        if failed:
            others = f" (and {len(failed) - 1} more of its workers)" if len(failed) > 1 else ""
            raise WeightSyncError(f"{failed[0].error}{others}")
        return [reply.value for reply in replies]


def _agree(values: Sequence[Any], wanted: Any, what: str) -> None:
    others = {rank: value for rank, value in enumerate(values) if value != wanted}
    if others or not values:
        found = ", ".join(f"worker {rank}: {value}" for rank, value in others.items()) or "no worker answered"
        raise WeightSyncError(f"{what} should be {wanted} on all of the engine's workers, but {found}")


def match_progress(progress: Mapping[str, int], request_ids: Sequence[str]) -> dict[str, int]:
    """Tokens sampled so far, by the ids that requests were submitted under; 0 where none was scheduled yet.

    vLLM appends "-" and 8 random characters to each id.
    """
    counts = dict.fromkeys(request_ids, 0)
    for internal, count in progress.items():
        for known in (internal, internal[:-9]):
            if known in counts:
                counts[known] = count
    return counts
