"""Which token of a trace follows which, and what kind of target each one is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from stretto.dialects.base import Vocabulary
from stretto.dialects.registers import is_register
from stretto.dialects.tags import ASYNC_END, PROMISE, PROMISE_END, SYNC, TOKENS
from stretto.trace import Trace

CLASSES: Final = ("content", "promise", "length", "sync", "close", "end", "control", "register")
"""Kinds of targets. close: the end of a forked thread. end: the end of the sequence. control: a
control token of any other kind."""


def class_of_control(vocabulary: Vocabulary) -> dict[int, tuple[str, str]]:
    """Each control id's name and its class as a target."""
    classes = {PROMISE: "promise", TOKENS: "promise", PROMISE_END: "promise"}
    classes |= {SYNC: "sync", ASYNC_END: "close"}
    classes |= {name: "register" for name in vocabulary.control if is_register(name)}
    return {i: (n, classes.get(n, "control")) for n, i in vocabulary.control.items()}


def classes_of(trace: Trace, control: Mapping[int, tuple[str, str]]) -> dict[tuple[int, int], str]:
    """The class of each response token as a target."""
    kinds: dict[tuple[int, int], str] = {}
    inside: dict[str, str] = {}
    for s in trace.response:
        for i, (token, markup) in enumerate(zip(s.tokens, s.markup, strict=True)):
            name = control.get(token) if markup else None
            if name is None:
                kinds[s.id, i] = inside.get(s.thread, "control") if markup else "content"
                continue
            kinds[s.id, i] = name[1]
            if name[0] in (PROMISE, TOKENS):
                inside[s.thread] = "promise" if name[0] == PROMISE else "length"
            else:
                inside.pop(s.thread, None)
    return kinds


class Places:
    """The places (segment, index) of a trace's tokens, and what follows each in its thread."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._starts = [0, *itertools.accumulate(len(s) for s in trace.segments)]
        self.num_tokens = self._starts[-1]
        self.response = [(s.id, i) for s in trace.response for i in range(len(s))]

    def flat(self, place: tuple[int, int]) -> int:
        return self._starts[place[0]] + place[1]

    def successors(self) -> list[tuple[tuple[int, int], tuple[int, int] | None]]:
        """Each token's place and that of its thread's next token; None for a thread's last. Those
        of blocks are left out: they are not written one after the other."""
        pairs: list[tuple[tuple[int, int], tuple[int, int] | None]] = []
        for thread in self._trace.threads:
            segments = [s for s in self._trace.of_thread(thread.name) if s.kind == "causal"]
            own = [(s.id, i) for s in segments for i in range(len(s))]
            pairs += zip(own, [*own[1:], None][: len(own)], strict=True)
        return pairs
