"""An event loop in a thread of its own, that outlives the loops of the steps."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from skirl.errors import RewardError

__all__ = ["BackgroundLoop"]

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines; whoever started one waits for its future, from any thread or loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self.closed = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts it.

        Raises:
            RewardError: the loop is closed.
        """
        with self._lock:
            if not self.closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RewardError("rewards are not running: they were closed")

    def close(self) -> None:
        """Cancels what still runs, and ends the thread. May be called twice."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            await asyncio.gather(*tasks, return_exceptions=True)
