"""One request under way: its events, its text so far, and in the end its completion."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from stretto.completion import Completion, complete

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.runtime.events import Event
    from stretto.runtime.request import Request


class Stream:
    """The events of one request as they happen; decoding goes on while it is iterated. What the
    request fails with is raised.

    `close` (also at the end of a `with` block, or when the iterator is dropped) cancels what is
    not finished and frees its slots at once; a stream that is dropped unclosed is cancelled by the
    model's next pass.
    """

    def __init__(self, lm: LM, request: Request, method: str) -> None:
        weakref.finalize(self, setattr, request, "is_abandoned", True).atexit = False
        self._lm = lm
        self.request = request
        self._method = method
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[Event]:
        from stretto.runtime.events import Done, Usage

        request = self.request
        try:
            while not request.is_done:
                self._lm.step(request)
                yield from request.log.take()
        finally:
            self.close()
        yield from request.log.take()
        request.check()
        yield Usage(asdict(self.completion.usage))
        yield Done(request.text, request.finish_reason or "error")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The settled text so far, in document order. Waits for a pass that is under way."""
        return self._lm.text_of(self.request)

    @property
    def completion(self) -> Completion:
        """The answer. Raises `ValueError` before the request is done."""
        if self._completion is None:
            self._completion = self._complete()
        return self._completion

    def finish(self) -> Completion:
        """Decodes to the end and returns the answer. Raises what the request failed with."""
        while not self.request.is_done:
            self._lm.step(self.request)
        self.request.check()
        return self.completion

    def close(self) -> None:
        """Cancels the request if it is not done. What it has written so far stays readable."""
        if not self.request.is_done:
            self._lm.cancel(self.request)

    def _complete(self) -> Completion:
        lm, request = self._lm, self.request
        annotated, issues = request.session.annotated(request.recorder) or (request.text, ())
        return complete(
            request,
            method=self._method,
            model=lm.name,
            engine=lm.engine.name,
            page_size=lm.scheduler.pool.page_size,
            annotated=annotated,
            issues=issues,
        )
