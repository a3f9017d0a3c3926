"""Dialect `pasta`: promised chunks decode in threads of their own while main goes on.

PASTA (Jin et al., learned asynchronous decoding). Main writes
`<promise topic="..." tokens="30"/>`; at its last token a child forks, whose `<async>` the runtime
writes and whose end is `</async>`. Main is blind to the child until `<sync/>`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.dialects.base import Issue, Legal
from stretto.dialects.outline import Rules
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.tags import (
    ASYNC,
    ASYNC_END,
    SYNC,
    PromiseReader,
    TagKind,
)
from stretto.effects import Close, Fork, Join, Move, Place, Reveal, Wait
from stretto.recorder import MAIN, OpenThread, Recorder

Policy = Literal["predicted", "overlap", "fixed"]
POSITION_MARGIN = 64
"""Positions kept free before a model's last one when a promise makes main skip ahead."""


@dataclass(frozen=True, slots=True)
class PastaSettings:
    """How promises turn into positions; stored with a model.

    `policy` where main goes on after a promise of L tokens whose last token stands at p:
    predicted p+1+L, fixed p+1+`fixed_length`, overlap p+1 (and `<sync/>` goes beyond all it sees).
    `unit`: a promise's number counts units of so many tokens. `max_positions`: the model's, for
    parsing; while decoding the recorder has it.
    """

    policy: Policy = "predicted"
    unit: int = 10
    fixed_length: int = 50
    max_positions: int | None = None

    def resume(
        self, promise_end: int, length: int, max_positions: int | None
    ) -> tuple[int | None, bool]:
        """Main's position after a promise (None: the next one), and whether it was clamped.

        `promise_end` is the position of its last token, `length` the tokens it promises.
        """
        if self.policy == "overlap":
            return None, False
        start = promise_end + 1
        wanted = self.fixed_length if self.policy == "fixed" else length
        if max_positions is None:
            return start + wanted, False
        room = max(0, max_positions - POSITION_MARGIN - start)
        return start + min(wanted, room), room < wanted


def default_child_cap(length: int) -> int:
    """Tokens a child may draw, `</async>` included, for a promise of `length` tokens."""
    return 4 * length + 32


def child_name(number: int) -> str:
    """The thread of main's promise `number`, counted from 1."""
    return f"{MAIN}.{number}"


TagPlace = tuple[int, int]
"""A recorder handle of a segment, and the index of a token in it."""


class PastaSession:
    """One request's state while it decodes; see `base.Session` for the contract.

    The scheduler sets `budget`, the tokens that the request may still draw; it is read when a
    child forks. At most `max_forks` promises fork. `issues` holds (code, thread, place) with the
    place of the tag in the recorder; `placed_issues` turns them into offsets.
    """

    main_role = "main"

    def __init__(
        self,
        masks: PastaMasks,
        settings: PastaSettings,
        *,
        max_forks: int = 64,
        child_cap: Callable[[int], int] = default_child_cap,
    ) -> None:
        self.budget: Callable[[], int] = lambda: sys.maxsize
        self._masks = masks
        self._settings = settings
        self._max_forks = max_forks
        self._child_cap = child_cap
        self._vocabulary = masks.vocabulary
        self._control = masks.vocabulary.control
        self._rules: Rules[tuple[str, TagPlace]] = Rules()
        self._readers: dict[str, PromiseReader] = {}
        self._begun: dict[str, TagPlace] = {}
        self._num_forks = 0
        self._unjoined: list[str] = []

    @property
    def issues(self) -> list[tuple[str, str, TagPlace]]:
        """What was malformed so far: code, thread, place of the tag. Empty with our masks, but
        for `clamped-tokens` and a promise that the end of the request cut off."""
        return [(code, thread, place) for code, (thread, place) in self._rules.issues]

    # -- base.Session --------------------------------------------------------------------------

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        reader = self._reader(thread)
        moves = [] if reader.accepts(token) else self._give_up_promise(thread)
        if reader.accepts(token):
            return moves + self._read_promise(recorder, thread, token)
        return moves + self._feed_plain(recorder, thread, token)

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        moves = self._give_up_promise(thread)
        if thread.parent is not None:
            end = Place(self._control[ASYNC_END], "injected", markup=True)
            return [*moves, end, Close(reason)]
        return [*moves, *self._wait(recorder), Close(reason)]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return self._give_up_promise(thread)

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]]:
        from stretto.dialects.pasta_text import to_text

        text, offsets = to_text(recorder.freeze(), self._vocabulary, self._settings)
        return text, self.placed_issues(recorder, offsets)

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        if thread.parent is not None:
            if thread.remaining is not None and thread.remaining <= 1:
                return self._masks.forced_end
            return self._masks.child
        reader = self._reader(thread)
        if reader.count:
            return self._masks.in_promise(reader)
        return self._masks.main if self._num_forks < self._max_forks else self._masks.main_full

    # -- beyond the protocol -------------------------------------------------------------------

    def placed_issues(
        self, recorder: Recorder, offsets: Mapping[tuple[int, int], int]
    ) -> tuple[Issue, ...]:
        """The issues with offsets in the annotated text form, which `to_text` has given."""
        ids = {s.handle: i for i, s in enumerate(recorder.document_order())}
        placed = [
            Issue(code, offsets.get((ids.get(handle, -1), index), 0))
            for code, _, (handle, index) in self.issues
        ]
        return tuple(sorted(placed, key=lambda issue: issue.at))

    # -- internals -----------------------------------------------------------------------------

    def _reader(self, thread: OpenThread) -> PromiseReader:
        reader = self._readers.get(thread.name)
        if reader is None:
            reader = self._readers[thread.name] = PromiseReader(self._vocabulary)
        return reader

    def _note(self, code: str, thread: OpenThread, place: TagPlace) -> None:
        self._rules.issues.append((code, (thread.name, place)))

    def _give_up_promise(self, thread: OpenThread) -> list[Move]:
        """What was read of a promise is text after all."""
        reader = self._reader(thread)
        if not reader.count:
            return []
        self._note("unfinished-promise", thread, self._begun[thread.name])
        count = reader.count
        reader.reset()
        return [Reveal(count)]

    def _read_promise(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        reader = self._reader(thread)
        if not reader.count:
            self._begun[thread.name] = next_place(thread)
        if not reader.read(token):
            return [Place(token, markup=True, tentative=True)]
        begun, count = self._begun[thread.name], reader.count
        tag = reader.tag(0, count, self._settings.unit)
        reader.reset()
        where = (thread.name, begun)
        in_child = thread.parent is not None
        if not in_child and self._num_forks >= self._max_forks:
            self._note("too-many-promises", thread, begun)
        elif self._rules.admits("promise", where, in_child=in_child):
            for code in tag.issues:
                self._note(code, thread, begun)
            return [Place(token, markup=True), self._fork(recorder, thread, tag.topic, tag.length)]
        return [Place(token, markup=True, tentative=True), Reveal(count)]

    def _fork(self, recorder: Recorder, thread: OpenThread, topic: str, length: int) -> Fork:
        """The fork of a promise whose last token is about to be placed."""
        self._num_forks += 1
        where = self._rules.pending[0]
        self._rules.admits("async", where, in_child=False)
        promise_end = thread.next_position
        if recorder.max_positions is not None:
            promise_end = min(promise_end, recorder.max_positions - 1)
        resume, clamped = self._settings.resume(promise_end, length, recorder.max_positions)
        if clamped:
            self._rules.issues.append(("clamped-tokens", where))
        child = child_name(self._num_forks)
        self._unjoined.append(child)
        return Fork(
            child,
            inject=(self._control[ASYNC],),
            cap=max(0, min(self._child_cap(length), self.budget())),
            resume=resume,
            topic=topic,
        )

    def _feed_plain(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        """A token that is no part of a promise."""
        name = self._reader(thread).name_of(token)
        kinds: Mapping[str | None, TagKind] = _KINDS
        if name is None:
            return [Place(token)]
        where = (thread.name, next_place(thread))
        if name not in kinds:
            self._rules.issues.append(("unfinished-promise", where))
            return [Place(token)]
        if not self._rules.admits(kinds[name], where, in_child=thread.parent is not None):
            return [Place(token)]
        return self._sync(recorder, token) if name == SYNC else self._end_child(thread, token)

    def _sync(self, recorder: Recorder, token: int) -> list[Move]:
        joined, self._unjoined = tuple(self._unjoined), []
        wait = self._wait(recorder)
        join = Join(joined, rebase=self._settings.policy == "overlap")
        return [*wait, join, Place(token, markup=True)]

    def _end_child(self, thread: OpenThread, token: int) -> list[Move]:
        forced = thread.cap is not None and thread.num_drawn >= thread.cap
        if forced:
            return [Place(token, "forced", markup=True), Close("length")]
        return [Place(token, markup=True), Close("stop")]

    def _wait(self, recorder: Recorder) -> list[Move]:
        threads = recorder.threads.values()
        running = tuple(t.name for t in threads if t.parent is not None and t.is_open)
        return [Wait(running)] if running else []


_KINDS: Mapping[str | None, TagKind] = {ASYNC: "async", ASYNC_END: "async_end", SYNC: "sync"}


def next_place(thread: OpenThread) -> TagPlace:
    """Where the thread's next token will stand, if nothing is cut before it."""
    return thread.own.handle, len(thread.own.tokens)
