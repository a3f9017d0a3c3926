"""Requests that take no longer than they may, however slowly bytes come in.

A timeout of a connection starts anew with every byte, so an endpoint that trickles them is never
late. Here a request is given up as a whole.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadline:
    """Runs coroutines of any threads in one of its own, each for `limit_s` seconds and no longer.
    Close it in the end."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asks", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises. Raises `TimeoutError` where that takes too long; the work is
        then cancelled."""
        limited = asyncio.wait_for(work, self._limit_s)
        return asyncio.run_coroutine_threadsafe(limited, self._loop).result()

    def close(self, last: Coroutine[Any, Any, object]) -> None:
        """Cancels what is under way, and does one last thing. A second time it does nothing."""
        if self._loop.is_closed():
            last.close()
            return
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, object]) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last
