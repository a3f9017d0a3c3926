"""Registers: `<reg_3>` begins a step of thought, and lets go of the step that register 3 held.

The part that every dialect with registers shares: their names and tags, which step each register
of each thread holds, and runs of annotated text with registers in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from stretto.dialects.base import Issue, Vocabulary
from stretto.effects import Cut, Effect, Evict, Move, Place
from stretto.errors import InvalidInput
from stretto.recorder import OpenThread, Recorder

DEFAULT_REGISTERS: Final = 16
MAX_REGISTERS: Final = 1000
BEFORE, STEP, ANSWER = "pre", "step", "answer"
"""Roles on main: before its first register, a step, after the end of reasoning."""

IN_ANSWER, UNKNOWN = "register-in-answer", "unknown-register"
"""Issues: a register after the end of reasoning; one that there is not. Both are text."""

_NAME = re.compile(r"reg_\d+")
_TAG = re.compile(r"<reg_(0|[1-9][0-9]*)>")


def register_name(number: int) -> str:
    """The name of a register's control token."""
    return f"reg_{number}"


def is_register(name: str) -> bool:
    """Whether this is the name of a register's control token."""
    return _NAME.fullmatch(name) is not None


def register_forms(num_registers: int) -> dict[str, str]:
    """Names and text forms of so many registers. Raises `InvalidInput` for no such number."""
    if type(num_registers) is not int or not 1 <= num_registers <= MAX_REGISTERS:
        raise InvalidInput(
            f"num_registers is {num_registers!r}; give a number from 1 to {MAX_REGISTERS}"
        )
    return {register_name(i): f"<{register_name(i)}>" for i in range(num_registers)}


@dataclass(frozen=True, slots=True)
class RegisterTag:
    """A register's tag: `text[start:end]`."""

    number: int
    start: int
    end: int


def register_tags(
    text: str, num_registers: int, other: Iterable[tuple[int, int]] = ()
) -> tuple[list[RegisterTag], list[Issue]]:
    """The registers in a text, in order, and what reads like one and is none.

    `other`: spans of tags of another kind, in order, in which nothing is a register.
    """
    tags: list[RegisterTag] = []
    issues: list[Issue] = []
    spans = iter([*other, (len(text), len(text))])
    start, end = next(spans)
    for found in _TAG.finditer(text):
        while end <= found.start() and end < len(text):
            start, end = next(spans)
        if start <= found.start() < end:
            continue
        digits = found[1]
        number = int(digits) if len(digits) <= len(str(MAX_REGISTERS)) else num_registers
        if number < num_registers:
            tags.append(RegisterTag(number, *found.span()))
        else:
            issues.append(Issue(UNKNOWN, found.start()))
    return tags, issues


@dataclass(slots=True)
class _Held:
    """A thread's steps so far: where each begins among the thread's segments, and by register the
    number of the step that it holds."""

    starts: list[int] = field(default_factory=list)
    holders: dict[int, int] = field(default_factory=dict)


class Steps:
    """Which step each register of each thread holds in one request, and what writing one does.

    A step is all segments of its thread from a register to before the next one. With `grace` a
    register still sees the step it kills, else it does not. `is_answering`: main is past the end
    of reasoning, if the vocabulary has such a marker; registers are only text there.
    """

    def __init__(self, vocabulary: Vocabulary, num_registers: int, *, grace: bool = False) -> None:
        names = {register_name(i): i for i in range(num_registers)}
        self._numbers = {vocabulary.control[name]: i for name, i in names.items()}
        self._ids = list(self._numbers)
        self._reasoning_end = vocabulary.reasoning_end
        self._grace = grace
        self._held: dict[str, _Held] = {}
        self.is_answering = False

    def is_register(self, token: int) -> bool:
        return token in self._numbers

    def id_of(self, number: int) -> int:
        return self._ids[number]

    def admits(self, thread: OpenThread) -> bool:
        """Whether a register is one in this thread now, and no text."""
        return not self.is_answering or thread.parent is not None

    def ends_reasoning(self, thread: OpenThread, tokens: Sequence[int]) -> bool:
        """Whether text of these ids on this thread holds the end of its reasoning."""
        return thread.parent is None and self._reasoning_end in tokens

    def write(self, thread: OpenThread, token: int) -> list[Move]:
        """The moves of a register that is written. Nothing of the thread may be held back."""
        held = self._held.setdefault(thread.name, _Held())
        start = len(thread.segments) - (not thread.own.tokens)
        number = self._numbers[token]
        dead = self._killed(thread, held, number, start)
        held.holders[number] = len(held.starts)
        held.starts.append(start)
        cut, place = Cut(role=STEP if thread.parent is None else None), Place(token, markup=True)
        return [cut, place, *dead] if self._grace else [cut, *dead, place]

    def write_text(self, thread: OpenThread, token: int) -> list[Move]:
        """The moves of a token of text; the answer begins after the end of reasoning."""
        if self.is_answering or not self.ends_reasoning(thread, (token,)):
            return [Place(token)]
        self.is_answering = True
        return [Place(token), Cut(role=ANSWER)]

    @staticmethod
    def _killed(thread: OpenThread, held: _Held, number: int, end: int) -> list[Effect]:
        """Evictions of the step that a register holds; `end`: where the newest step ends."""
        step = held.holders.get(number)
        if step is None:
            return []
        stop = held.starts[step + 1] if step + 1 < len(held.starts) else end
        own, seen = thread.own, thread.sees
        handles = thread.segments[held.starts[step] : stop]
        return [Evict(h) for h in handles if h in seen or (h == own.handle and own.tokens)]


class RunWriter:
    """Places runs of a source on the threads of a recorder, as decoding would have placed them.

    `shown` gathers the text of what it places, `issues` what was malformed.
    """

    def __init__(self, recorder: Recorder, vocabulary: Vocabulary, steps: Steps) -> None:
        self.shown: list[str] = []
        self.issues: list[Issue] = []
        self._recorder = recorder
        self._vocabulary = vocabulary
        self._steps = steps

    def write_text(
        self, thread: OpenThread, text: str, start: int, end: int, tags: Sequence[RegisterTag]
    ) -> None:
        """The run `text[start:end]`, with these registers in it."""
        at, is_literal = start, not self._steps.admits(thread)
        for tag in tags:
            before = [] if is_literal else self._vocabulary.encode(text[at : tag.start])
            is_literal = is_literal or self._steps.ends_reasoning(thread, before)
            if is_literal:
                self.issues.append(Issue(IN_ANSWER, tag.start))
                continue
            self.write_ids(thread, [*before, self._steps.id_of(tag.number)], at)
            self.shown.append(text[at : tag.start])
            at = tag.end
        self.write_ids(thread, self._vocabulary.encode(text[at:end]), at)
        self.shown.append(text[at:end])

    def write_ids(self, thread: OpenThread, ids: Sequence[int], start: int) -> None:
        """A run of ids. Issues are placed at `start` and an index into it."""
        for index, token in enumerate(ids, start):
            if not self._steps.is_register(token):
                moves = self._steps.write_text(thread, token)
            elif self._steps.admits(thread):
                moves = self._steps.write(thread, token)
            else:
                self.issues.append(Issue(IN_ANSWER, index))
                moves = [Place(token)]
            carry_out(self._recorder, thread, moves)


def carry_out(recorder: Recorder, thread: OpenThread, moves: Sequence[Move]) -> None:
    """Applies moves of a register or of text to a recorder."""
    for move in moves:
        if isinstance(move, Place):
            recorder.place(thread, move)
        elif isinstance(move, Cut | Evict):
            recorder.apply(thread, move)
        else:
            raise TypeError(f"{move!r} is no move of a register")
