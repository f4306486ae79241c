"""Calls that block, awaited from an event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """What a call that blocks returns. One that is given up goes on in its thread, and nothing waits for that: the
    threads of asyncio.to_thread are waited for when the event loop ends, so that Ctrl-C would hang with them.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # given up
            return
        if error is None:
            done.set_result(result)  # pyright: ignore[reportArgumentType]
        else:
            done.set_exception(error)

    def run() -> None:
        result, raised = None, None
        try:
            result = call()
        except BaseException as error:  # fence: raised again where it is awaited
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, raised)

    threading.Thread(target=run, daemon=True).start()
    return await done
