"""Weight commits between Ray processes: the ranks as one sender, and which transport connects them to the engines.

ranks' places + engines' places -> transport -> setup for each engine -> ``weights.commit.send_weights``
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from skirl.config.schema import CommitConfig
from skirl.errors import WeightSyncError
from skirl.records import CommitReport
from skirl.runtime.ray.calls import as_skirl_error
from skirl.runtime.ray.engines import RayEngine
from skirl.runtime.ray.ranks import Ranks
from skirl.weights.choose import choose_transport
from skirl.weights.commit import send_weights
from skirl.weights.manifest import Bucket, Manifest, TransportName
from skirl.weights.sender import merge_buckets
from skirl.weights.transports.broadcast import plan_broadcast

__all__ = ["Commits", "RankSender"]

log = logging.getLogger(__name__)


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
        await self._all([self._ranks.actors[0].transmit_weights.remote(index)])

    async def abort(self) -> None:
        """Ends a commit that failed."""
        await self._all(a.abort_weights.remote() for a in self._ranks.actors)

    async def _all(self, references: Any) -> list[Any]:
        made = list(references)
        try:
            return list(await asyncio.gather(*made))
        except RayError as error:
            raise as_skirl_error(error, "a training rank", "the weight commit") from None


class Commits:
    """Commits of one run: transport, connections, one at a time."""

    def __init__(self, ranks: Ranks, config: CommitConfig) -> None:
        self._ranks, self._config = ranks, config
        self._sender = RankSender(ranks, config)
        self._transport: TransportName | None = None
        self._setups: dict[tuple[tuple[int, int], ...], list[bytes]] = {}
        self._running: asyncio.Task[CommitReport] | None = None

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
        while self._running is not None and not self._running.done():
            await asyncio.wait([self._running])
        self._running = asyncio.ensure_future(self._send(engines, version=version, whole=whole))
        return await self._running

    async def _send(self, engines: Sequence[RayEngine], *, version: int, whole: bool) -> CommitReport:
        setups = await asyncio.to_thread(self._setups_of, engines)
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
        except WeightSyncError:
            self._setups = {}  # both ends have dropped the connection; the next one takes a port of its own
            raise

    def _setups_of(self, engines: Sequence[RayEngine]) -> list[bytes]:
        """What the ranks and then each engine need to connect; kept while the same processes take part."""
        if self.transport != "nccl" and self.transport != "gloo":
            return [b""] * (1 + len(engines))
        key = tuple((engine.index, engine.generation) for engine in engines)
        if key not in self._setups:
            address, port = self._ranks.call_one(0, "finding a port", lambda actor: actor.endpoint.remote())
            made = plan_broadcast(
                [len(engine.places) for engine in engines],
                address=address,
                port=port,
                backend=self.transport,
                timeout_s=self._config.timeout_s / 2,  # who waits for a message can still be told to give up
            )
            self._setups = {key: made}  # the connection of before is dropped with its setup
        return self._setups[key]
