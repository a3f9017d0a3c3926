"""Skeleton-of-Thought (Ning et al., arXiv 2307.15337) on one shared pool of KV slots.

Main writes a short outline. As it ends, every point becomes a thread that sees the question and
the whole outline, computed once, then an injected chat turn that asks for that point, then the
point's own beginning. The answer is the points one after the other; the outline is not in it. An
outline without list items falls back to plain decoding: a thread that sees nothing of the
outline answers the prompt as if it had been asked directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.dialects.base import Legal
from stretto.dialects.plain import PlainSession
from stretto.effects import Close, Fork, Move, Place, Wait
from stretto.errors import Unsupported
from stretto.recorder import MAIN, OpenThread, Recorder

if TYPE_CHECKING:
    from stretto.dialects.base import Session
    from stretto.lm import LM
    from stretto.params import SamplingParams

OUTLINE_REQUEST = (
    "{question}\n\n"
    "Do not answer yet. First plan the answer: write only a numbered list of 3 to 6 points, "
    "each a heading of 2 to 5 words, one point per line, and nothing else."
)
POINT_REQUEST = 'Write one or two short sentences about "{title}". No list.'
OUTLINE_START = "1."
OUTLINE_CAP = 160
"""Tokens an outline may take; what it has by then is used."""
POINT_CAP = 96
"""Tokens a point may take: it was asked for one or two sentences."""
MAX_POINTS = 10

_ITEM = re.compile(r"[ \t]*(?:\d{1,3}[.)](?!\d)|[-*•+](?![-*]))[ \t]*(.*)")


def outline_points(outline: str) -> list[str]:
    """The points of an outline: lines that begin with `1.`, `1)` or a bullet, without the mark.

    Empty points, sub-items such as `1.1` and repeated points are left out.
    """
    points: list[str] = []
    for line in outline.splitlines():
        item = _ITEM.fullmatch(line)
        title = item[1].strip().strip("*_").strip().rstrip(":").strip() if item else ""
        if title and title not in points:
            points.append(title)
    return points


@dataclass(frozen=True)
class SkeletonOfThought:
    """SoT for any chat model; needs a chat template, since points are asked for in new turns."""

    name: str = "sot"
    max_points: int = MAX_POINTS
    outline_cap: int = OUTLINE_CAP
    point_cap: int = POINT_CAP

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], Session]:
        if isinstance(prompt, str):
            raise Unsupported(
                "method 'sot' asks its points as chat turns, but the prompt is raw text or the "
                "model has no chat template; use method 'sequential'"
            )
        *history, last = prompt
        question = {**last, "content": OUTLINE_REQUEST.format(question=last["content"])}
        outline_prompt = [*lm.encode([*history, question]), *lm.vocabulary.encode(OUTLINE_START)]
        return outline_prompt, SoTSession(
            plain=PlainSession(lm.banned),
            decode=lm.vocabulary.decode,
            encode=lm.vocabulary.encode,
            encode_turn=lm.encode_turn,
            direct_prompt=lm.encode(prompt),
            max_points=min(self.max_points, params.max_forks),
            outline_cap=self.outline_cap,
            point_cap=self.point_cap,
        )


@dataclass
class SoTSession:
    """The program: an outline on main, then one thread a point, or one that answers directly."""

    plain: PlainSession
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    encode_turn: Callable[[str], list[int]]
    direct_prompt: list[int]
    max_points: int
    outline_cap: int
    point_cap: int
    main_role: str = "outline"
    budget: Callable[[], int] = lambda: 0
    ends: dict[str, list[int]] = field(default_factory=dict)

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        if thread.name != MAIN:
            return self.plain.feed(recorder, thread, token)
        moves: list[Move] = [Place(token, markup=True)]
        if thread.num_drawn >= self.outline_cap:
            moves += self._expand(recorder, thread, [*self._outline(recorder, thread), token])
        return moves

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        if thread.name == MAIN:
            return self._expand(recorder, thread, self._outline(recorder, thread))
        end: list[Move] = [Place(t, "injected") for t in self.ends.get(thread.name, [])]
        return [*end, Close(reason)]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> None:
        return None

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal | None:
        return self.plain.legal(recorder, thread)

    def _outline(self, recorder: Recorder, thread: OpenThread) -> list[int]:
        segments = [recorder.segments[h] for h in thread.segments]
        return [t for s in segments if s.role == self.main_role for t in s.tokens]

    def _expand(self, recorder: Recorder, thread: OpenThread, outline: list[int]) -> list[Move]:
        points = outline_points(OUTLINE_START + self.decode(outline))[: self.max_points]
        forks = self._points(points) if points else [self._direct(thread)]
        children = tuple(fork.child for fork in forks)
        return [*forks, Wait(children), Close("stop")]

    def _points(self, points: list[str]) -> list[Fork]:
        forks = []
        for number, title in enumerate(points, 1):
            child = f"{MAIN}.{number}"
            turn = self.encode_turn(POINT_REQUEST.format(title=title))
            start = self.encode(f"{number}. {title}:")
            self.ends[child] = self.encode("\n") if number < len(points) else []
            forks.append(
                Fork(
                    child,
                    inject=(*turn, *start),
                    inject_markup=len(turn),
                    cap=self.point_cap,
                    topic=title,
                    role="point",
                    joins=False,
                )
            )
        return forks

    def _direct(self, thread: OpenThread) -> Fork:
        """A thread that sees nothing but the prompt as it was asked, from position 0."""
        return Fork(
            f"{MAIN}.1",
            inject=tuple(self.direct_prompt),
            position=0,
            role="answer",
            joins=False,
            evict=(*thread.sees, thread.own.handle),
        )
