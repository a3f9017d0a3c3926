"""How `stretto run` decodes one prompt and shows it: live, as plain text, or as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stretto.cli.output import (
    escaped,
    interruptible,
    is_live,
    json_bytes,
    passing_line,
    say,
    write_file,
    write_json,
    write_text,
)
from stretto.errors import INTERRUPTED, StrettoError
from stretto.runtime.text import num_held

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.completion import Completion
    from stretto.engines.base import Extra
    from stretto.lm import LM, Prompt
    from stretto.methods import Method
    from stretto.params import SamplingParams
    from stretto.runtime.events import Event
    from stretto.stream import Stream


@dataclass(frozen=True)
class Job:
    """What `run` was asked for. `pairs` 0: no comparison."""

    prompt: Prompt
    params: SamplingParams
    method: str
    raw: bool = False
    pairs: int = 0
    as_json: bool = False
    quiet: bool = False
    trace: Path | None = None


class View(Protocol):
    """Shows one answer: entered, updated after every step, left, then finished."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: Any) -> None: ...
    def update(self, events: Sequence[Event], text: str) -> None: ...
    def finish(self, text: str) -> None: ...


class SilentView:
    """Shows nothing."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...
    def update(self, events: Sequence[Event], text: str) -> None: ...
    def finish(self, text: str) -> None: ...


class PlainView(SilentView):
    """Writes settled text to stdout as it comes, in document order.

    An end that may be the beginning of a stop string is held back, since it may be cut off. On a
    terminal, control characters are escaped.
    """

    def __init__(self, stop: Sequence[str], *, is_terminal: bool = False) -> None:
        self._stop = stop
        self._is_terminal = is_terminal
        self._num_written = 0

    def update(self, events: Sequence[Event], text: str) -> None:
        self._write(text[: len(text) - num_held(text, self._stop)])

    def finish(self, text: str) -> None:
        self._write(text if text.endswith("\n") else text + "\n")

    def _write(self, text: str) -> None:
        if len(text) > self._num_written:
            fresh = text[self._num_written :]
            write_text(escaped(fresh) if self._is_terminal else fresh)
            self._num_written = len(text)


class Interrupted(Exception):
    """Ctrl-C ended the answer; what there is of it stays readable."""


class Player:
    """Decodes the answers of a job; the first one is shown as it decodes.

    It has the `generate` of an `LM`, so that `compare` shows its unmeasured first answer too.
    """

    def __init__(self, lm: LM, view: View, is_interrupted: Callable[[], bool]) -> None:
        self._lm = lm
        self._view = view
        self._is_interrupted = is_interrupted
        self._first: Stream | None = None

    @property
    def first(self) -> Completion | None:
        """The answer that was shown, whole or not; None if none was begun."""
        is_done = self._first is not None and self._first.request.is_done
        return self._first.completion if self._first is not None and is_done else None

    def generate(
        self, prompt: Prompt, params: SamplingParams, *, method: str | Method, raw: bool
    ) -> list[Completion]:
        """Answers one prompt. Raises `Interrupted` after Ctrl-C."""
        stream = self._lm.submit(prompt, params, method=method, raw=raw)
        view: View = SilentView()
        if self._first is None:
            self._first, view = stream, self._view
        try:
            with view:
                for events in self._steps(stream):
                    view.update(events, stream.text)
        finally:
            stream.close()
            if not isinstance(sys.exception(), OSError):
                view.finish(stream.text)
        if self._is_interrupted():
            raise Interrupted
        return [stream.completion]

    def _steps(self, stream: Stream) -> Iterator[list[Event]]:
        """The events of each pass. Ctrl-C cancels the request before the next one."""
        request = stream.request
        while not request.is_done:
            if self._is_interrupted():
                stream.close()
            else:
                self._lm.step(request)
            yield request.log.take()


def load(
    model: str,
    *,
    dtype: str,
    device: str,
    engine: str = "auto",
    threads: int | None,
    pool_slots: int,
    page_size: int,
    offline: bool,
    quiet: bool = False,
    extras: Sequence[Extra] = (),
    prefix_cache: bool = False,
) -> LM:
    """Loads a model to compute with `threads` CPU threads (None: torch's own choice)."""
    from stretto.lm import LM

    with passing_line(f"loading {model}" if not quiet and _is_here(model) else ""):
        lm = LM.load(
            model,
            dtype=dtype,
            device=device,
            engine=engine,
            pool_slots=pool_slots,
            page_size=page_size,
            offline=True if offline else None,
            extras=extras,
            prefix_cache=prefix_cache,
        )
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
    return lm


def _is_here(model: str) -> bool:
    """Whether nothing will be fetched or converted, which shows a progress of its own."""
    from stretto.models import embedded
    from stretto.models.shipped import shipped

    names = {embedded.EMBEDDED_MODEL, *shipped()}  # all of the embedded model
    return os.path.isdir(embedded.folder() if model in names else model)


def answer(lm: LM, job: Job) -> int:
    """Answers the prompt, shows it, writes what was asked for, and returns the exit status.

    The last measured answer is reported; after a failure or Ctrl-C, what there is of the first.
    """
    with interruptible() as is_interrupted:
        player = Player(lm, view_for(lm, job), is_interrupted)
        baseline = None
        try:
            if job.pairs:
                completion, baseline = _compare(player, job)
            else:
                (completion,) = player.generate(
                    job.prompt, job.params, method=job.method, raw=job.raw
                )
        except (Exception, KeyboardInterrupt) as error:
            if player.first is None:
                raise
            _keep(lm, job, player.first, None, error)
            if isinstance(error, Interrupted):
                return INTERRUPTED
            raise told(error) from error
        _keep(lm, job, completion, baseline)
    return 0


def _compare(player: Player, job: Job) -> tuple[Completion, Completion]:
    from stretto.comparison import compare

    if not job.quiet and is_live(sys.stderr):
        runs = f"{job.pairs} measured {'pair' if job.pairs == 1 else 'pairs'}"
        say(f"comparing with sequential decoding: each once to warm up, then {runs}")
    return compare(player, job.prompt, job.params, method=job.method, raw=job.raw, pairs=job.pairs)


def view_for(lm: LM, job: Job) -> View:
    """Live on a terminal (on stderr if stdout is to hold JSON), else plain or nothing."""
    stream = sys.stderr if job.as_json else sys.stdout
    if is_live(stream) and not job.quiet:
        from rich.console import Console

        from stretto.cli.live import LiveView

        return LiveView(
            Console(file=stream, highlight=False),
            lm.vocabulary.decode,
            method=lm.find_method(job.method).name,
            model=lm.name,
            prints_answer=not job.as_json,
        )
    if job.as_json:
        return SilentView()
    return PlainView(job.params.stop, is_terminal=sys.stdout is not None and sys.stdout.isatty())


def _keep(
    lm: LM,
    job: Job,
    completion: Completion,
    baseline: Completion | None,
    error: BaseException | None = None,
) -> None:
    """Writes the trace file, the JSON object, and the summary; only the first of them after an
    `error` of stdout."""
    if job.trace is not None:
        from stretto.cli.trace_file import trace_document

        document = trace_document(completion, job.params, lm.card.dialect, lm.vocabulary)
        write_file(job.trace, json_bytes(document))
    if isinstance(error, OSError):
        return
    if job.as_json:
        write_json(completion.to_json())
    elif not job.quiet:
        from stretto.cli.summary import summary_lines

        for line in summary_lines(completion, job.params, baseline, job.pairs):
            say(line)


def told(error: BaseException) -> BaseException:
    """An error that is the machine's limit rather than a bug of ours, as one for users."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return StrettoError("decoding failed: out of memory; try fewer --pool-slots")
    return error
