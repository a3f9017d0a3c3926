"""Dialect `apar`: a thread forks the detail of what it has just said and goes on to the next point.

APAR (Liu et al., arXiv 2401.06761), the baseline that PASTA is measured against. A thread draws
`<fork/>`; at once a child forks, whose `<child>` the runtime writes, and which goes on with the
detail until it draws an end of sequence. The thread itself goes on with its next sibling and never
sees the child: nothing is joined, the answer is over when every thread is. Child and parent both
count on from the fork's position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.dialects.base import Issue, Legal, Vocabulary
from stretto.dialects.masks import mask_of, text_ids
from stretto.effects import Close, Fork, Move, Place
from stretto.recorder import MAIN, OpenThread, Recorder

FORK, CHILD = "fork", "child"

TAG_FORMS: Mapping[str, str] = {FORK: "<fork/>", CHILD: "<child>"}
"""Names of the control tokens and their text forms. The published names are [Fork] and [Child]."""

CHILD_END = "</child>"
"""The end of a child in the text form; in ids it is an end of sequence, and in no trace."""


@dataclass(frozen=True, slots=True)
class AparSettings:
    """Where a fork is legal; the defaults are the published ones.

    A thread at depth `max_depth` cannot fork, main being at depth 1: by default no child can.
    While decoding, nor can any thread while `max_threads` threads of the request are open.
    `max_positions`: the model's, for parsing; while decoding the recorder has it.
    """

    max_depth: int = 2
    max_threads: int = 32
    max_positions: int | None = None


def child_name(parent: str, number: int) -> str:
    """The thread of `parent`'s fork `number`, counted from 1."""
    return f"{parent}.{number}"


class AparMasks:
    """Masks over a vocabulary's ids; all sessions of a model share one object.

    Text and ends of sequence are legal everywhere, `<fork/>` where `forking`, `<child>` nowhere.
    Ids without text are legal only if they end a sequence. The vocabulary must not grow any more.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        going_on = [*text_ids(vocabulary), *vocabulary.end_ids]
        self.going_on = Legal(mask_of(vocabulary, going_on))
        self.forking = Legal(mask_of(vocabulary, [*going_on, vocabulary.control[FORK]]))


TagPlace = tuple[int, int]
"""A recorder handle of a segment, and the index of a token in it."""


class AparSession:
    """One request's state while it decodes; see `base.Session` for the contract.

    At most `max_forks` threads fork in all. `issues` holds what was malformed so far, code and
    place of the tag in the recorder: nothing, under our masks.
    """

    main_role = MAIN

    def __init__(
        self, masks: AparMasks, settings: AparSettings, *, max_forks: int = sys.maxsize
    ) -> None:
        self.budget: Callable[[], int] = lambda: sys.maxsize
        self.issues: list[tuple[str, TagPlace]] = []
        self._masks = masks
        self._settings = settings
        self._control = masks.vocabulary.control
        self._forks_left = max_forks
        self._num_children: dict[str, int] = {}
        self._depths: dict[str, int] = {MAIN: 1}
        self._bare: set[str] = set()  # threads whose last token is a fork or a child's start

    # -- base.Session --------------------------------------------------------------------------

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        problem = None
        if token == self._control[FORK]:
            problem = self._problem_of_fork(recorder, thread)
            if problem is None:
                return [Place(token, markup=True), self._fork(thread)]
        elif token == self._control[CHILD]:
            problem = "child-without-fork"
        if problem is not None:
            self.issues.append((problem, (thread.own.handle, len(thread.own.tokens))))
        self._bare.discard(thread.name)
        return [Place(token)]

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        return [Close(reason)]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]]:
        from stretto.dialects.apar_text import to_text

        text, offsets = to_text(recorder.freeze(), self._masks.vocabulary)
        ids = {s.handle: i for i, s in enumerate(recorder.document_order())}
        placed = [Issue(code, offsets[ids[handle], index]) for code, (handle, index) in self.issues]
        return text, tuple(sorted(placed, key=lambda issue: issue.at))

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        can_fork = self._problem_of_fork(recorder, thread) is None
        return self._masks.forking if can_fork else self._masks.going_on

    # -- internals -----------------------------------------------------------------------------

    def _problem_of_fork(self, recorder: Recorder, thread: OpenThread) -> str | None:
        """Why the thread must not fork now, as an issue's code; None: it may."""
        if thread.name in self._bare:
            return "bare-fork"
        if self._depths[thread.name] >= self._settings.max_depth:
            return "nested-fork"
        num_open = sum(t.is_open for t in recorder.threads.values())
        if self._forks_left <= 0 or num_open >= self._settings.max_threads:
            return "too-many-forks"
        return None

    def _fork(self, thread: OpenThread) -> Fork:
        self._forks_left -= 1
        number = self._num_children[thread.name] = self._num_children.get(thread.name, 0) + 1
        child = child_name(thread.name, number)
        self._depths[child] = self._depths[thread.name] + 1
        self._bare |= {thread.name, child}
        return Fork(child, inject=(self._control[CHILD],), joins=False)
