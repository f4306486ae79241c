"""Scores from HTTP services: equal servers of one kind, each request to the healthy one with the fewest in flight.

    score -> waiting -> request of up to batch_size -> healthy server with room -> scores
                ^                                          \\-> failed: the server rests, until it is ready again
                +---- each sample by itself, while it has tries left <-/

All of it runs in one event loop. A pause of a server doubles with each failure in a row, answered requests reset it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from skirl.config.rewards import ServiceConfig
from skirl.errors import ConfigError
from skirl.records import RewardSample, ScoreFailure
from skirl.rewards.combine import Parts
from skirl.rewards.wire import WireError, encode_sample, read_answer, request_body

__all__ = ["Service", "check_urls"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
HEALTH_TIMEOUT_S = 5.0
START_WAIT_S = 10.0  # in which one server of each kind must answer when a run starts
MAX_ANSWER = 64 << 20  # bytes
ABOUT_THE_REQUEST = frozenset({400, 413, 415, 422})  # the server is well, it does not want what it was sent


@dataclass(slots=True, eq=False)
class _Item:
    """One sample on its way; ``avoid`` is the server that failed it last."""

    sample: RewardSample
    encoded: bytes
    future: "asyncio.Future[Parts | ScoreFailure]"
    tries: int = 0
    avoid: "_Server | None" = None


@dataclass(slots=True, eq=False)
class _Server:
    """One address and how it is doing."""

    url: str
    in_flight: int = 0
    healthy: bool = True
    failures: int = 0
    last_failure: str = ""

    @property
    def shown(self) -> str:
        """The address for messages: without a password that someone wrote into it."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    @property
    def health_url(self) -> str:
        return _with_health(self.url)


class _Failed(Exception):
    """A request got no scores. ``rests``: the server is to blame."""

    def __init__(self, message: str, *, rests: bool = True) -> None:
        super().__init__(message)
        self.rests = rests


@dataclass(slots=True, eq=False)
class Service:
    """The servers of one entry of ``reward.services``. Make and use it in one event loop.

    Attributes:
        name: of the entry. config: its settings.
        token: bearer token, None without; never shown.
    """

    name: str
    config: ServiceConfig
    token: str | None = field(repr=False)
    _servers: list[_Server] = field(init=False, repr=False)
    _client: httpx.AsyncClient = field(init=False, repr=False)
    _waiting: deque[_Item] = field(init=False, repr=False, default_factory=deque)
    _tasks: set["asyncio.Task[None]"] = field(init=False, repr=False, default_factory=set)
    _last_healthy: float = field(init=False, repr=False, default=0.0)
    answered: int = field(init=False, repr=False, default=0)
    """Requests that got scores, since the start."""
    seconds: float = field(init=False, repr=False, default=0.0)
    """From sending to the whole answer, of all of these together."""
    retries: int = field(init=False, repr=False, default=0)
    """Samples that were sent again, since the start."""

    def __post_init__(self) -> None:
        """Opens nothing."""
        self._servers = [_Server(url) for url in self.config.urls]
        room = self.config.max_in_flight * len(self._servers) + len(self._servers)
        self._client = httpx.AsyncClient(
            headers={} if self.token is None else {"Authorization": f"Bearer {self.token}"},
            limits=httpx.Limits(max_connections=room, max_keepalive_connections=room),
            timeout=None,  # one deadline over the whole request, below
            follow_redirects=False,  # the token goes where the recipe says, nowhere else
            trust_env=False,
        )

    async def score(self, sample: RewardSample) -> Parts | ScoreFailure:
        """Parts of one sample, or why it has none. Waits while all servers are full; ends by the deadlines."""
        try:
            encoded = encode_sample(sample)
        except WireError as error:
            return self._failure(str(error))
        item = _Item(sample, encoded, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._fill()
        return await item.future

    async def check(self) -> None:
        """Waits until a server is ready; those that are not, rest. Nothing is scored.

        Raises:
            ConfigError: none is: it does not answer, or refuses the token or the path.
        """
        end = time.monotonic() + START_WAIT_S
        while not any(await asyncio.gather(*(self._is_ready(server) for server in self._servers))):
            if time.monotonic() > end:
                told = "; ".join(server.last_failure for server in self._servers)
                raise ConfigError(
                    f"reward.services.{self.name}: no server is ready ({told}). Start one, or correct its settings."
                )
            await asyncio.sleep(FIRST_PAUSE_S)
        self._last_healthy = time.monotonic()
        for server in self._servers:
            if server.last_failure:
                self._rest(server, server.last_failure)

    @property
    def resting(self) -> int:
        """Servers that get no samples now."""
        return sum(not server.healthy for server in self._servers)

    async def close(self) -> None:
        """Ends requests and connections; samples that wait fail."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    # ------------------------------------------------------------------------------------------------------- requests
    def _fill(self) -> None:
        """Sends what waits, as far as there is room. Called whenever a sample comes, or room does."""
        while self._waiting:
            if self._waiting[0].future.done():  # whoever waited gave up
                self._waiting.popleft()
                continue
            server = self._pick(self._waiting[0].avoid)
            if server is None:
                return
            items = [self._waiting.popleft()]
            if not items[0].tries:
                while self._waiting and len(items) < self.config.batch_size and not self._waiting[0].tries:
                    items.append(self._waiting.popleft())
            server.in_flight += 1
            self._spawn(self._request(server, items))

    def _pick(self, avoid: _Server | None) -> _Server | None:
        free = [s for s in self._servers if s.healthy and s.in_flight < self.config.max_in_flight]
        return min(free, key=lambda server: (server is avoid, server.in_flight), default=None)

    async def _request(self, server: _Server, items: Sequence[_Item]) -> None:
        """One request. Consumes a place of the server; unblocks whoever waits for these samples, or for the place."""
        try:
            await self._serve(server, items)
        except Exception as error:
            for item in items:
                if not item.future.done():
                    item.future.set_exception(error)
            raise
        finally:
            server.in_flight -= 1
            self._fill()

    async def _serve(self, server: _Server, items: Sequence[_Item]) -> None:
        start = time.perf_counter()
        try:
            results = await self._post(server, items)
        except _Failed as failed:
            if failed.rests:
                self._rest(server, str(failed))
            self._try_again(server, items, str(failed))
            return
        server.failures = 0
        self.answered += 1
        self.seconds += time.perf_counter() - start
        for item, result in zip(items, results, strict=True):
            if isinstance(result, WireError):
                self._try_again(server, [item], f"POST {server.shown}: status 200, but {result}")
            elif isinstance(result, ScoreFailure):
                _settle(item, self._failure(f"{server.shown}: {result.message}"))
            else:
                _settle(item, result)

    def _try_again(self, server: _Server, items: Sequence[_Item], message: str) -> None:
        for item in reversed(items):
            item.tries += 1
            item.avoid = server
            if item.tries > self.config.retries:
                _settle(item, self._failure(f"{message} (tried {item.tries} time{'s' * (item.tries > 1)})"))
            else:
                self.retries += 1
                self._waiting.appendleft(item)

    async def _post(self, server: _Server, items: Sequence[_Item]) -> list[Parts | ScoreFailure | WireError]:
        where = f"POST {server.shown}"
        try:
            async with asyncio.timeout(self.config.timeout_s):
                status, body = await self._read(server, [item.encoded for item in items])
        except TimeoutError:
            raise _Failed(f"{where}: no answer within timeout_s = {self.config.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Failed(f"{where}: {type(error).__name__}: {error}") from None
        if status != 200:
            raise _Failed(self._refused(server, status, body), rests=status not in ABOUT_THE_REQUEST)
        try:
            return read_answer(body, self.name, [item.sample.num_turns for item in items])
        except WireError as error:
            raise _Failed(f"{where}: status 200, but {error}") from None

    async def _read(self, server: _Server, encoded: Sequence[bytes]) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        body = bytearray()
        async with self._client.stream("POST", server.url, content=request_body(encoded), headers=headers) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER:
                    raise _Failed(f"POST {server.shown}: the answer is longer than {MAX_ANSWER} bytes")
        return response.status_code, bytes(body)

    def _refused(self, server: _Server, status: int, body: bytes) -> str:
        said = body[:200].decode(errors="replace").strip()
        return f"POST {server.shown}: status {status}: {said}{self._hint(status)}"

    def _hint(self, status: int) -> str:
        """Which setting a status speaks of; "" for one that is about the server or the samples."""
        where = f"reward.services.{self.name}"
        if status in {401, 403}:
            if self.config.token_env is None:
                return f"; it wants a token: set {where}.token_env"
            return f"; it does not take the token in {self.config.token_env}"
        if status in {404, 405}:
            return f"; correct the path in {where}.urls (of `skirl serve-reward`: /score)"
        if 300 <= status < 400:
            return f"; redirects are not followed: put the address meant into {where}.urls"
        return ""

    def _failure(self, message: str) -> ScoreFailure:
        return ScoreFailure("service", f"reward.services.{self.name}: {message}")

    # --------------------------------------------------------------------------------------------------------- health
    def _rest(self, server: _Server, message: str) -> None:
        """No more requests to this server until it answers a probe."""
        server.last_failure = message
        if server.healthy:
            server.healthy = False
            self._last_healthy = time.monotonic()
            logger.warning("reward.services.%s: %s; it rests", self.name, message)
            self._spawn(self._probe(server))

    async def _probe(self, server: _Server) -> None:
        """Consumes nothing; unblocks whoever waits for a server, with scores or, after timeout_s, with a failure."""
        while True:
            pause = min(FIRST_PAUSE_S * 2**server.failures, LONGEST_PAUSE_S, max(self.config.timeout_s / 4, 0.05))
            server.failures += 1
            await asyncio.sleep(pause)
            if await self._is_ready(server):
                server.healthy = True
                self._last_healthy = time.monotonic()
                self._fill()
                return
            self._give_up_where_all_rest()

    def _give_up_where_all_rest(self) -> None:
        if any(server.healthy for server in self._servers):
            self._last_healthy = time.monotonic()
        elif time.monotonic() - self._last_healthy > self.config.timeout_s:
            told = "; ".join(server.last_failure for server in self._servers)
            while self._waiting:
                _settle(self._waiting.popleft(), self._failure(f"no server is healthy: {told}"))

    async def _is_ready(self, server: _Server) -> bool:
        server.last_failure = await self._trouble(server)
        return not server.last_failure

    async def _trouble(self, server: _Server) -> str:
        """Why a server cannot be given samples. GET /health may answer anything but a server error: a service need
        not have it. Then a request without samples, of which the status alone tells a wrong token or path.
        """
        where = f"GET {_with_health(server.shown)}"
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S), self._client.stream("GET", server.health_url) as response:
                status = response.status_code  # what else it says may be endless
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{where}: {type(error).__name__}: {error}".rstrip(": ")
        if status >= 500:
            return f"{where}: status {status}"
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                status, body = await self._read(server, [])
        except (TimeoutError, httpx.HTTPError, _Failed):
            return ""  # it may not know what to do without samples
        return self._refused(server, status, body) if self._hint(status) else ""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def check_urls(services: Mapping[str, ServiceConfig]) -> None:
    """Raises ConfigError for an address that is none."""
    for name, config in services.items():
        for url in config.urls:
            parts = urlsplit(url)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ConfigError(
                    f"reward.services.{name}.urls: {url!r} is no HTTP address; write http://HOST:PORT/PATH "
                    "(of `skirl serve-reward`: http://HOST:PORT/score)"
                )


def _settle(item: _Item, result: Parts | ScoreFailure) -> None:
    if not item.future.done():
        item.future.set_result(result)


def _with_health(url: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path="/health", query="", fragment=""))
