"""Dialect `apar`, written down: annotated text or ids to a trace, and a trace back to either.

In text, `<fork/><child>detail</child>`: a child stands directly after its fork. In ids its end is
an end of sequence. Neither end is a token of the trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stretto.dialects.apar import CHILD, CHILD_END, FORK, AparSettings, child_name
from stretto.dialects.base import Issue, Parsed, Vocabulary
from stretto.effects import Cut, Fork, Place
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.trace import Trace, text_runs

TagKind = Literal["fork", "child", "end"]

# -- which tags are legal, for text and for ids ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag, legal or not: `source[start:end]`."""

    kind: TagKind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Run:
    """Text between two legal tags, of the thread that is open there: `source[start:end]`."""

    start: int
    end: int


_TAG = re.compile(r"<fork ?/>|<child>|</child>")
_KINDS: dict[str, TagKind] = {"<child>": "child", CHILD_END: "end"}


def text_tags(text: str) -> Iterator[Tag]:
    """The tags of a text, in order."""
    for found in _TAG.finditer(text):
        yield Tag(_KINDS.get(found.group(), "fork"), found.start(), found.end())


def id_tags(ids: Sequence[int], vocabulary: Vocabulary) -> Iterator[Tag]:
    """The tags of a run of ids, in order."""
    kinds: dict[int, TagKind] = dict.fromkeys(vocabulary.end_ids, "end")
    kinds |= {vocabulary.control[FORK]: "fork", vocabulary.control[CHILD]: "child"}
    for at, token in enumerate(ids):
        if token in kinds:
            yield Tag(kinds[token], at, at + 1)


class _Outline:
    """Reads tags: `parts` are the legal ones and the runs between them, in order.

    Every legal tag leaves the thread that goes on behind a fork or a child's start, so what
    touches one is bare. A tag that is not legal is part of a run, and an issue names it.
    """

    def __init__(self, settings: AparSettings) -> None:
        self.parts: list[Run | Tag] = []
        self.issues: list[Issue] = []
        self._max_depth = settings.max_depth
        self._last: Tag | None = None
        self._opened: list[int] = []
        self._literal_child = False

    def read(self, tags: Iterable[Tag], end: int) -> None:
        for tag in tags:
            if self._admits(tag):
                self._advance(tag.start, is_child=tag.kind == "child")
                self.parts.append(tag)
                self._last = tag
        self._advance(end, is_child=False)
        self.issues += [Issue("unclosed-child", at) for at in self._opened]

    def _admits(self, tag: Tag) -> bool:
        """Whether a tag is legal; takes note of it either way."""
        touches = self._last is not None and self._last.end == tag.start
        if tag.kind == "fork":
            if touches:
                return self._refuse("bare-fork", tag)
            if len(self._opened) + 1 >= self._max_depth:
                return self._refuse("nested-fork", tag)
        elif tag.kind == "child":
            if not (touches and self._last is not None and self._last.kind == "fork"):
                self._literal_child = True
                return self._refuse("child-without-fork", tag)
            self._opened.append(tag.start)
        elif self._opened:
            self._opened.pop()
        elif self._literal_child:
            self._literal_child = False
            return False
        else:
            return self._refuse("child-without-fork", tag)
        return True

    def _refuse(self, code: str, tag: Tag) -> bool:
        self.issues.append(Issue(code, tag.start))
        return False

    def _advance(self, to: int, *, is_child: bool) -> None:
        """The run up to the next legal tag or the end."""
        at = 0 if self._last is None else self._last.end
        if self._last is not None and self._last.kind == "fork" and not is_child:
            self.issues.append(Issue("fork-without-child", self._last.start))
        if at < to:
            self.parts.append(Run(at, to))


# -- to a trace ------------------------------------------------------------------------------------


def parse_text(
    text: str, vocabulary: Vocabulary, settings: AparSettings, prompt: str = ""
) -> Parsed:
    """What an annotated text means. Total: raises for no text that the vocabulary can encode."""
    outline = _Outline(settings)
    outline.read(text_tags(text), len(text))
    trace = _replay(
        outline.parts,
        Recorder(vocabulary.encode(prompt), MAIN, settings.max_positions),
        vocabulary,
        lambda run: vocabulary.encode(text[run.start : run.end]),
    )
    rendered = "".join(text[p.start : p.end] for p in outline.parts if isinstance(p, Run))
    return Parsed(trace, rendered, _in_order(outline.issues))


def parse_ids(
    prompt_ids: Sequence[int], ids: Sequence[int], vocabulary: Vocabulary, settings: AparSettings
) -> Parsed:
    """What a serialised response means (see `to_ids`). `at` of an issue is an index into `ids`.

    Total: any ids of the vocabulary have a meaning.
    """
    outline = _Outline(settings)
    outline.read(id_tags(ids, vocabulary), len(ids))
    trace = _replay(
        outline.parts,
        Recorder(list(prompt_ids), MAIN, settings.max_positions),
        vocabulary,
        lambda run: ids[run.start : run.end],
    )
    text = "".join(vocabulary.decode(run) for run in text_runs(trace))
    return Parsed(trace, text, _in_order(outline.issues))


def _in_order(issues: list[Issue]) -> tuple[Issue, ...]:
    return tuple(sorted(issues, key=lambda issue: issue.at))


def _replay(
    parts: Sequence[Run | Tag],
    recorder: Recorder,
    vocabulary: Vocabulary,
    ids_of: Callable[[Run], Sequence[int]],
) -> Trace:
    """Drives a recorder through the parts of a source, as decoding would have driven it."""
    stack = [recorder.threads[MAIN]]
    num_children: dict[str, int] = {}
    for part, following in zip(parts, [*parts, None][1:], strict=True):
        thread = stack[-1]
        if isinstance(part, Run):
            for token in ids_of(part):
                recorder.place(thread, Place(token))
        elif part.kind == "fork":
            recorder.place(thread, Place(vocabulary.control[FORK], markup=True))
            number = num_children[thread.name] = num_children.get(thread.name, 0) + 1
            if isinstance(following, Tag) and following.kind == "child":
                inject = (vocabulary.control[CHILD],)
                fork = Fork(child_name(thread.name, number), inject=inject, joins=False)
                stack.append(recorder.fork(thread, fork))
            else:
                recorder.cut(thread, Cut())
        elif part.kind == "end":
            _end(recorder, stack.pop())
    while len(stack) > 1:
        _end(recorder, stack.pop())
    trace = recorder.freeze()
    return replace(trace, threads=tuple(replace(t, finish_reason=None) for t in trace.threads))


def _end(recorder: Recorder, thread: OpenThread) -> None:
    recorder.close(thread, "stop")
    recorder.fed(thread, len(thread.unfed))


# -- and back --------------------------------------------------------------------------------------


def to_text(trace: Trace, vocabulary: Vocabulary) -> tuple[str, dict[tuple[int, int], int]]:
    """The annotated text of a trace, each child directly after its fork, and where tokens stand.

    Offsets are in code points and keyed by (segment id, token index). They are exact for control
    tokens, also those that are text; other tokens have the offset of the run they stand in.
    """
    control = set(vocabulary.control.values())
    offsets: dict[tuple[int, int], int] = {}
    pieces: list[str] = []
    length = 0
    for ids, keys in _runs(trace, control):
        offsets.update(dict.fromkeys(keys, length))
        pieces.append(vocabulary.decode(ids) if ids else CHILD_END)
        length += len(pieces[-1])
    return "".join(pieces), offsets


def to_ids(trace: Trace, end_of_sequence: int) -> list[int]:
    """The ids of a response in document order, `end_of_sequence` after each child's last one."""
    return [end_of_sequence if key is None else token for key, token in _document(trace)]


def _runs(
    trace: Trace, control: Container[int]
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Control tokens one by one, runs of text between them, and nothing where a child is over;
    with the keys of the tokens."""
    ids, keys = list[int](), list[tuple[int, int]]()
    for key, token in _document(trace):
        if key is not None and token not in control:
            ids.append(token)
            keys.append(key)
            continue
        if ids:
            yield ids, keys
            ids, keys = [], []
        yield ([], []) if key is None else ([token], [key])
    if ids:
        yield ids, keys


def _document(trace: Trace) -> Iterator[tuple[tuple[int, int] | None, int]]:
    """Each response token with its (segment id, token index), in document order; (None, -1) where
    a child is over."""
    parents = {t.name: t.parent for t in trace.threads}
    stack = [MAIN]
    for segment in trace.response:
        if segment.thread not in stack:
            while stack[-1] != parents[segment.thread]:
                stack.pop()
                yield None, -1
            stack.append(segment.thread)
        while stack[-1] != segment.thread:
            stack.pop()
            yield None, -1
        for index, token in enumerate(segment.tokens):
            yield (segment.id, index), token
    for _ in stack[1:]:
        yield None, -1
