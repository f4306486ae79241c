"""Weight commits between Ray processes: the ranks as one sender, and which transport connects them to the engines.

ranks' places + engines' places -> transport -> setup for each engine -> ``weights.commit.send_weights``
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from skirl.config.schema import CommitConfig
from skirl.errors import SkirlError
from skirl.records import CommitReport
from skirl.runtime.ray.calls import PEERS_MAY_FAIL_FOR_S, Identity, as_skirl_error, most_telling
from skirl.runtime.ray.engines import RayEngine
from skirl.runtime.ray.ranks import Ranks
from skirl.runtime.threads import in_thread
from skirl.weights.choose import choose_transport
from skirl.weights.commit import send_weights
from skirl.weights.manifest import Bucket, Manifest, TransportName
from skirl.weights.sender import merge_buckets
from skirl.weights.transports.broadcast import plan_broadcast

__all__ = ["Commits", "RankSender"]

log = logging.getLogger(__name__)

ASKS_AGAIN_AFTER_S = 0.02
FREES_WITHIN_S = 5.0


class RankSender:
    """All training ranks as one ``endpoints.Sender``."""

    def __init__(self, ranks: Ranks, config: CommitConfig) -> None:
        self._ranks, self._config = ranks, config

    async def open(self, transport: TransportName, setup: bytes, *, version: int, whole: bool) -> Manifest:
        """Lists what is going to be sent; ranks agree on it."""
        bucket_bytes, checksum = self._config.bucket_mb << 20, self._config.checksum
        manifests = await self._all(
            a.open_weights.remote(transport, setup, version, whole=whole, bucket_bytes=bucket_bytes, checksum=checksum)
            for a in self._ranks.actors
        )
        assert len({m.hash for m in manifests}) == 1, "ranks hold the same model"
        return manifests[0]

    async def pack(self, index: int) -> Bucket:
        """One message, with the payloads of all ranks that send."""
        packed = await self._all(a.pack_weights.remote(index) for a in self._ranks.actors)
        return merge_buckets(packed)

    async def transmit(self, index: int) -> None:
        """Broadcast transports: rank 0 sends."""
        await self._all([self._ranks.actors[0].transmit_weights.remote(index)])  # the first of the identities too

    async def abort(self) -> None:
        """Ends a commit that failed."""
        await self._all(a.abort_weights.remote() for a in self._ranks.actors)

    async def _all(self, references: Any) -> list[Any]:
        """Answers in order of rank, or the most telling error: peers of a rank that died fail as well, or hang."""
        asked = zip(references, self._ranks.identities, strict=False)
        tasks = [asyncio.ensure_future(_answer(reference, rank)) for reference, rank in asked]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks):
                await asyncio.wait(tasks, timeout=PEERS_MAY_FAIL_FOR_S)
        finally:
            for task in tasks:
                task.cancel()
        errors = [e for t in tasks if t.done() and not t.cancelled() and isinstance(e := t.exception(), SkirlError)]
        if errors:
            raise most_telling(errors)
        return [task.result() for task in tasks]


async def _answer(reference: Any, rank: Identity) -> Any:
    try:
        return await reference
    except RayError as error:
        raise as_skirl_error(error, rank, "the weight commit") from None


class Commits:
    """Commits of one run: transport, connections, one at a time."""

    def __init__(self, ranks: Ranks, config: CommitConfig) -> None:
        self._ranks, self._config = ranks, config
        self._sender = RankSender(ranks, config)
        self._transport: TransportName | None = None
        self._setups: dict[tuple[tuple[int, int], ...], list[bytes]] = {}
        self._lock = threading.Lock()
        self._sent = False

    def connect(self, engines: Sequence[RayEngine]) -> None:
        """Picks the transport from where ranks and engines are, and says which and why."""
        places = self._ranks.call("finding the GPUs", lambda actor: actor.place.remote())
        choice = choose_transport(places, [engine.places for engine in engines], self._config.transport)
        self._transport = choice.name
        log.info("weight commits: %s (%s)", choice.name, choice.reason)

    @property
    def transport(self) -> TransportName:
        """What was picked."""
        assert self._transport is not None
        return self._transport

    async def send(self, engines: Sequence[RayEngine], *, version: int, whole: bool) -> CommitReport:
        """All these engines hold ``version`` when this returns; commits that are under way are waited for first."""
        async with self._alone():
            return await self._send(engines, version=version, whole=whole)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Commits come from event loops of several threads: asyncio's own locks belong to one loop."""
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(ASKS_AGAIN_AFTER_S)
        try:
            yield
        finally:
            self._lock.release()

    async def _send(self, engines: Sequence[RayEngine], *, version: int, whole: bool) -> CommitReport:
        setups = await in_thread(lambda: self._setups_of(engines))
        self._sent = True
        try:
            return await send_weights(
                self._sender,
                engines,
                version=version,
                whole=whole,
                transport=self.transport,
                setup=setups,
                timeout_s=self._config.timeout_s,
            )
        except BaseException:  # fence: both ends have dropped the connection; the next one takes a port of its own
            self._setups = {}
            raise

    def close(self) -> None:
        """The ranks free their buffers: files in memory outlive a process that is killed. Harmless to repeat."""
        if self._sent:
            freeing = [actor.abort_weights.remote() for actor in self._ranks.actors]
            self._sent = False
            ray.wait(freeing, num_returns=len(freeing), timeout=FREES_WITHIN_S)

    def _setups_of(self, engines: Sequence[RayEngine]) -> list[bytes]:
        """What the ranks and then each engine need to connect; kept while the same processes take part."""
        if self.transport != "nccl" and self.transport != "gloo":
            return [b""] * (1 + len(engines))
        key = tuple((engine.index, engine.generation) for engine in engines)
        if key not in self._setups:
            address, port = self._ranks.call_one(0, "finding a port", lambda actor: actor.listen_for_engines.remote())
            made = plan_broadcast(
                [len(engine.places) for engine in engines],
                address=address,
                port=port,
                backend=self.transport,
                timeout_s=self._config.timeout_s / 2,  # who waits for a message can still be told to give up
            )
            self._setups = {key: made}  # the connection of before is dropped with its setup
        return self._setups[key]
