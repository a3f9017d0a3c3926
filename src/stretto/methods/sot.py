"""Skeleton-of-Thought (Ning et al., arXiv 2307.15337) on one shared pool of KV slots.

Main writes a short outline. As it ends, every point becomes a thread that sees the question and
the whole outline, computed once, then an injected chat turn that asks for that point, then the
point's own beginning. The answer is the points, a line each; the outline is not in it.

An outline of fewer than two points has nothing to decode in parallel: main then stops seeing all
of it, takes the prompt as it was asked, from position 0, and answers like method `sequential`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from stretto.dialects.base import Legal
from stretto.dialects.plain import PlainSession
from stretto.effects import Close, Cut, Evict, Fork, Move, Place, Wait
from stretto.errors import InvalidInput, Unsupported
from stretto.methods.outline import OutlineReader
from stretto.params import THREAD_FIELDS
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.runtime.text import Detokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.dialects.base import Session
    from stretto.lm import LM
    from stretto.params import SamplingParams

OUTLINE_REQUEST = (
    "Question: {question}\n"
    "Write a short outline of the answer: 3 to 6 numbered points of 2 to 5 words."
)
POINT_REQUEST = "Write two sentences about point {number}: {title}"
EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        OUTLINE_REQUEST.format(question="How can I sleep better?"),
        "1. Keep a fixed bedtime\n2. Put screens away early\n3. Make the bedroom dark\n"
        "4. Skip late coffee",
    ),
    (
        POINT_REQUEST.format(number=2, title="Put screens away early"),
        "2. Put screens away early: Bright screens tell the brain that it is still day. Stop using "
        "phones and laptops an hour before bed, and read a book or listen to calm music instead.",
    ),
    (
        OUTLINE_REQUEST.format(question="Why did sailors need lighthouses?"),
        "1. Dark coasts at night\n2. Hidden rocks and reefs\n3. Finding the harbour",
    ),
    (
        POINT_REQUEST.format(number=3, title="Finding the harbour"),
        "3. Finding the harbour: A steady light on a tower showed sailors where the port began. "
        "They could turn towards it from far away and steer the ship home safely, even in fog.",
    ),
)
"""Worked examples, as earlier turns: what was asked and what was answered."""
OUTLINE_CAP = 96
"""Tokens an outline may take, and never more than half of the request's; what it has is used."""
POINT_CAP = 64
"""Tokens a point may take: it was asked for two sentences."""
POINT_SENTENCES = 2
SENTENCE_END = re.compile(r"""[.!?]["')\]]*\s""")
MIN_POINT_TOKENS = 20
"""A point neither ends nor breaks its line before it has this many tokens."""
MIN_POINTS = 2
MAX_POINTS = 6
LINE_BREAKS = ("\n", "\n\n", "\n\n\n", " \n", " \n\n", "\r\n")


@dataclass(frozen=True)
class SkeletonOfThought:
    """SoT for any chat model; needs a chat template, since points are asked for in new turns.

    Of an outline with more points than the request may fork, the first ones are used, and an
    outline that would not fit the model's positions or the pool is never asked for.
    """

    reads: ClassVar[tuple[str, ...]] = THREAD_FIELDS

    name: str = "sot"
    max_points: int = MAX_POINTS
    outline_cap: int = OUTLINE_CAP
    point_cap: int = POINT_CAP

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], Session]:
        direct = lm.encode(prompt)
        outline_prompt = lm.encode(_outline_chat(_checked(lm, prompt)))
        plain = PlainSession(lm.banned)
        outline_cap = min(self.outline_cap, max(1, params.max_tokens // 2))
        room = min(lm.engine.max_positions, lm.engine.num_slots) - len(outline_prompt)
        if params.max_forks < MIN_POINTS or room < outline_cap + self.point_cap:
            return direct, plain
        return outline_prompt, SoTSession(
            plain=plain,
            opening=Legal(_opening_mask(lm)),
            decode=lm.vocabulary.decode,
            encode=lm.vocabulary.encode,
            encode_turn=lm.encode_turn,
            direct_prompt=direct,
            max_points=min(self.max_points, params.max_forks),
            outline_cap=outline_cap,
            point_cap=self.point_cap,
        )


def _checked(lm: LM, prompt: Sequence[dict[str, str]] | str) -> list[dict[str, str]]:
    """The messages of a chat that points can be asked for in. Raises `Unsupported` for others."""
    if isinstance(prompt, str) or not lm.has_chat_template:
        raise Unsupported(
            "method 'sot' asks its points as chat turns, but the prompt is raw text or the "
            "model has no chat template; use method 'sequential'"
        )
    if prompt[-1]["role"] != "user":
        raise Unsupported(
            f"method 'sot' answers a user's message, but the last one is of role "
            f"{prompt[-1]['role']!r}; use method 'sequential'"
        )
    lm.encode_turn("a")
    return list(prompt)


def _outline_chat(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The chat with the worked examples after its system messages, its last turn asking for an
    outline."""
    num_system = next(i for i, m in enumerate(messages) if m["role"] in ("user", "assistant"))
    examples = [
        {"role": role, "content": content}
        for pair in EXAMPLES
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    last = messages[-1]
    question = {**last, "content": OUTLINE_REQUEST.format(question=last["content"])}
    return [*messages[:num_system], *examples, *messages[num_system:-1], question]


def _opening_mask(lm: LM) -> NDArray[np.bool_]:
    """What a point may begin with: no end of sequence, no bare line break, nothing banned."""
    mask = np.ones(lm.vocabulary.size, dtype=np.bool_) if lm.banned is None else ~lm.banned
    mask[sorted(lm.vocabulary.end_ids)] = False
    for text in LINE_BREAKS:
        ids = lm.vocabulary.encode(text)
        if len(ids) == 1:
            mask[ids] = False
    return mask


@dataclass
class SoTSession:
    """The program: an outline on main, then one thread a point, or a direct answer on main."""

    plain: PlainSession
    opening: Legal
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    encode_turn: Callable[[str], list[int]]
    direct_prompt: list[int]
    max_points: int
    outline_cap: int
    point_cap: int
    main_role: str = "outline"
    ends: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, Detokenizer] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget: Callable[[], int] = lambda: 0
        self.outline = OutlineReader(self.max_points)

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        if thread.role == "outline":
            return self._feed_outline(recorder, thread, token)
        if thread.role == "point":
            return self._feed_point(thread, token)
        return self.plain.feed(recorder, thread, token)

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        if thread.role == "outline":
            self.outline.finish()
            return self._expand(recorder, thread)
        return [*self._end_of(thread), Close(reason)]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return self._end_of(thread)

    def annotated(self, recorder: Recorder) -> None:
        return None

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal | None:
        is_opening = thread.role == "point" and thread.num_drawn < MIN_POINT_TOKENS
        return self.opening if is_opening else self.plain.legal(recorder, thread)

    def _text(self, thread: OpenThread, token: int) -> str:
        return self.readers.setdefault(thread.name, Detokenizer(self.decode)).push(token)

    def _feed_outline(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        moves: list[Move] = [Place(token, markup=True)]
        self.outline.push(self._text(thread, token))
        if thread.num_drawn >= self.outline_cap:
            self.outline.finish(is_complete=False)
        if self.outline.has_title:
            self.outline.push("\n")
            moves += [Place(t, "injected", markup=True) for t in self.encode("\n")]
        if self.outline.is_over:
            moves += self._expand(recorder, thread)
        return moves

    def _feed_point(self, thread: OpenThread, token: int) -> list[Move]:
        """A point ends at its first line break after it has said something, and where a third
        sentence would begin: the token that begins it, or the bare break, is no part of it."""
        head, line_break, _ = self._text(thread, token).partition("\n")
        said = self.said.get(thread.name, "")
        self.said[thread.name] = said + head
        if len(SENTENCE_END.findall(said + head)) >= POINT_SENTENCES:
            return [Place(token, markup=True), *self._end_of(thread), Close("stop")]
        if not line_break or not (said + head).strip():
            return [Place(token)]
        if head.strip():
            return [Place(token), Close("stop")]
        return [Place(token, markup=True), *self._end_of(thread), Close("stop")]

    def _end_of(self, thread: OpenThread) -> list[Move]:
        return [Place(t, "injected") for t in self.ends.get(thread.name, [])]

    def _expand(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        points = self.outline.points
        forks = [self._point(n, title, n == len(points)) for n, title in enumerate(points, 1)]
        longest = max((len(fork.inject) for fork in forks), default=0)
        # One more position: that of the outline's last token, which may not be placed yet.
        end = thread.next_position + 1 + longest + self.point_cap
        is_room = recorder.max_positions is None or end <= recorder.max_positions
        if len(forks) < MIN_POINTS or not is_room:
            return self._direct(thread)
        return [*forks, Wait(tuple(fork.child for fork in forks)), Close("stop")]

    def _point(self, number: int, title: str, is_last: bool) -> Fork:
        child = f"{MAIN}.{number}"
        try:
            turn = self.encode_turn(POINT_REQUEST.format(number=number, title=title))
            start = self.encode(f"{number}. {title}" + ("" if title[-1] in "?!" else ":"))
        except InvalidInput:  # a title that the tokenizer cannot bring back: ask by number alone
            turn = self.encode_turn(POINT_REQUEST.format(number=number, title="").rstrip(": "))
            start = self.encode(f"{number}.")
        self.ends[child] = [] if is_last else self.encode("\n")
        return Fork(
            child,
            inject=(*turn, *start),
            inject_markup=len(turn),
            cap=self.point_cap,
            topic=title,
            role="point",
            joins=False,
        )

    def _direct(self, thread: OpenThread) -> list[Move]:
        """Main begins again: sees nothing written so far, then the prompt as it was asked."""
        outline = [thread.own.handle] if thread.num_drawn else []
        seen = (*thread.sees, *outline)
        return [
            Cut(position=0, role="direct prompt"),
            *(Evict(handle) for handle in seen),
            *(Place(token, "prompt", markup=True) for token in self.direct_prompt),
            Cut(role="answer"),
        ]
