"""Training examples: one trace each, flat, with what each token is to predict, and the mask then.

Visibility, positions and labels are the trace's own (`trace.visible`, `trace.labels`), so a model
is trained under exactly what it is run under. Legality is the sampler's (`train.legal`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stretto.data.rows import Answer
from stretto.dialects import Card, DialectSettings, get_dialect
from stretto.dialects.base import Legal, Parsed, Session, Vocabulary
from stretto.dialects.plain import PlainSession
from stretto.errors import InvalidInput, Unsupported
from stretto.methods.diffusion import Window
from stretto.params import SamplingParams
from stretto.recorder import MAIN
from stretto.tokens import ModelCard
from stretto.trace import Origin, Segment, Trace, is_drawn, is_prompt, labels
from stretto.train.blocks import filled, in_spans, plan_free_trace
from stretto.train.legal import UNMASKED, LegalTable, Replay, replay_ids
from stretto.train.prompted import Prompted, PromptIds
from stretto.train.targets import CLASSES, Places, class_of_control, classes_of
from stretto.train.unusable import SPAN_TOO_LONG, SpanTooLong, TooLong, Unusable, WindowTooSmall

IGNORE: Final = -100
"""The target of a token that predicts nothing."""

Ends = dict[str, Legal | None]
"""By thread, the mask under which it draws the end of sequence that ends it."""

ORIGINS: Final[dict[str, Origin]] = {"s": "sampled", "f": "forced", "i": "injected"}
"""The letters of `Answer.origins`."""


@dataclass(frozen=True, eq=False)
class Example:
    """One trace for training, its tokens flat in document order; all tensors are on the CPU.

    `segment` is each token's segment, `sees[s, t]` whether segment `s` sees segment `t`, `is_block`
    which segments see themselves both ways: together they are `trace.visible`. `targets` is the id
    that a token is to predict or `IGNORE`; `classes` an index into `CLASSES` or -1; `legal` the
    number of the mask of that draw in the maker's `table`, or `UNMASKED`; `follows` the token that
    is predicted, by its place here, or -1 for an end of sequence and where there is no target.
    `num_illegal` targets were left out because the sampler could not have drawn them. `key` names
    the row. `in_span` are the tokens of blocks, which a model writes in any order: they are targets
    once they are masked (`train.noise`), and `block_legal` is the number of their mask. `source`
    is what an example with blocks was made of, if that is a text: the prompt's ids and the text.
    """

    key: str
    ids: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    segment: Int[Tensor, "tokens"]
    sees: Bool[Tensor, "segments segments"]
    is_block: Bool[Tensor, "segments"]
    targets: Int[Tensor, "tokens"]
    classes: Int[Tensor, "tokens"]
    legal: Int[Tensor, "tokens"]
    follows: Int[Tensor, "tokens"]
    table: LegalTable
    num_illegal: int
    in_span: Bool[Tensor, "tokens"]
    block_legal: int = UNMASKED
    issues: tuple[str, ...] = ()
    source: tuple[tuple[int, ...], str] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORE).sum() + self.in_span.sum())


class ExampleMaker:
    """Turns rows into examples for one model: its vocabulary, card and number of positions.

    `end_id` is what the last main token predicts; by default the vocabulary's only end of
    sequence, or the lowest. All examples share one `table` of masks. `blocks` is how the dialect
    writes blocks, None if it writes none.
    """

    def __init__(
        self, vocabulary: Vocabulary, card: ModelCard, max_positions: int,
        *, end_id: int | None = None,
    ) -> None:  # fmt: skip
        if end_id is None:
            if not vocabulary.end_ids:
                raise InvalidInput("the model has no end of sequence, so it cannot learn to end")
            end_id = min(vocabulary.end_ids)
        self.table = LegalTable()
        self.end_id = end_id
        self.max_positions = max_positions
        self._vocabulary = vocabulary
        self._parser = Prompted(vocabulary)
        self._card = card
        self._dialect = get_dialect(card.dialect)
        self._settings = DialectSettings.of_card(card, max_positions)
        self._new_session = _session_maker(vocabulary, card, max_positions)
        self._kinds = class_of_control(vocabulary)
        made = self._dialect.blocks
        self.blocks = None if made is None else made(vocabulary, card)

    def from_annotated(
        self, prompt: Sequence[int], text: str, key: str = "", *, ended: bool = True
    ) -> Example:
        """An example from an annotated text; under dialect plain, from a text. One that is not
        `ended` was cut short, so that nothing is learnt of its end. Raises `TooLong`, and
        `Unusable` for a block that is longer than it was promised."""
        parsed = self.parse(prompt, text)
        issues = tuple(issue.code for issue in parsed.issues)
        trace = parsed.trace
        if self.blocks is not None:
            if SPAN_TOO_LONG in issues:
                raise SpanTooLong(
                    f"row {key} has a block that is longer than promised; leave it "
                    "out, or have its promises measured anew"
                )
            trace = filled(trace, self.blocks.filler)
        self._check_length(trace)
        legal = self._legal_of(trace, list(prompt))
        made = self._example(trace, legal, key, ended=ended, issues=issues)
        return made if self.blocks is None else replace(made, source=(tuple(prompt), text))

    def from_window(self, prompt: Sequence[int], text: str, key: str, window: Window) -> Example:
        """An example from a text that is written in a window, without a plan: main predicts
        nothing. Raises `TooLong`, and `Unusable` for a text that the window does not hold."""
        if self.blocks is None:
            raise Unsupported(f"dialect {self._card.dialect} writes no blocks, so it has no window")
        ids = self._vocabulary.encode(text)
        if len(ids) > window.window:
            raise WindowTooSmall(f"row {key} has {len(ids)} tokens and the window {window.window}")
        trace = plan_free_trace(prompt, ids, self.blocks, window, self.max_positions)
        self._check_length(trace)
        masks: list[Legal | None] = [None] * trace.num_tokens
        return self._example(trace, (masks, {}), key, ended=False)

    def check_answers(self) -> None:
        """Raises `Unsupported` if the model writes blocks: no sampled answer can be learnt from by
        its ids, which do not tell in which order and from what they were drawn."""
        if self.blocks is not None:
            raise Unsupported(
                f"dialect {self._card.dialect} writes blocks, which are learnt from annotated text "
                "and not from the ids of sampled answers; give annotated rows"
            )

    def parse(self, prompt: Sequence[int], text: str) -> Parsed:
        """What an annotated text after a prompt of these ids means."""
        return self._dialect.parse_text(text, self._parser, self._settings, PromptIds(prompt))

    def from_answer(self, prompt: Sequence[int], answer: Answer) -> Example:
        """An example of exactly the ids that were sampled; what was forced, injected or, where
        the answer was cut short, never written, is no target. Raises `TooLong`, and `Unusable`
        for a row that no runtime has written, or that was cut off inside a forked thread; as
        `check_answers`.
        """
        self.check_answers()
        if len(answer.ids) != len(answer.origins) or set(answer.origins) - set(ORIGINS):
            raise Unusable(
                f"answer {answer.key} has {len(answer.ids)} ids and origins {answer.origins[:20]!r}"
                "; sample it again"
            )
        origins = [ORIGINS[letter] for letter in answer.origins]
        replay = Replay(list(prompt), self._new_session(), self.max_positions)
        try:
            draws = replay_ids(replay, answer.ids, origins)
        except (ValueError, KeyError) as error:
            raise Unusable(
                f"answer {answer.key} cannot be learnt from: {error}; leave it out"
            ) from None
        ends = {MAIN: replay.legal(MAIN)} if replay.threads[MAIN].is_open else {}
        trace = _with_origins(replay.recorder.freeze(), origins)
        self._check_length(trace)
        legal = [legal for _, legal in draws]
        ended = answer.finish_reason == "stop"
        return self._example(trace, (legal, ends), answer.key, ended=ended)

    # -- internals -----------------------------------------------------------------------------

    def _check_length(self, trace: Trace) -> None:
        """A position is clamped to the model's last one, where the runtime ends a thread."""
        last = max((p for s in trace.segments for p in s.positions), default=0)
        if last >= self.max_positions - 1:
            total = sum(len(s) for s in trace.segments if s.thread == MAIN)
            raise TooLong(max(total, last + 1), self.max_positions)

    def _legal_of(self, trace: Trace, prompt: list[int]) -> tuple[list[Legal | None], Ends]:
        """The mask of each response token's draw, in document order, and those of the ends."""
        replay = Replay(prompt, self._new_session(), self.max_positions)
        legal: list[Legal | None] = []
        ends: Ends = {}
        last = {s.thread: s.id for s in trace.segments}
        for segment in trace.response:
            for token, origin in zip(segment.tokens, segment.origins, strict=True):
                thread = replay.threads.get(segment.thread)
                if not is_drawn(origin) or thread is None or not thread.is_open:
                    legal.append(None)
                    continue
                legal.append(replay.legal(segment.thread))
                replay.draw(segment.thread, token)
            thread = replay.threads.get(segment.thread)
            is_over = last[segment.thread] == segment.id and self._dialect.ends_threads
            if is_over and thread is not None and thread.is_open and thread.parent is not None:
                ends[thread.name] = replay.legal(thread.name)
                replay.stop(thread.name)
        if replay.threads[MAIN].is_open:
            ends[MAIN] = replay.legal(MAIN)
        return legal, ends

    def _example(
        self,
        trace: Trace,
        masks: tuple[list[Legal | None], Ends],
        key: str,
        *,
        ended: bool = True,
        issues: tuple[str, ...] = (),
    ) -> Example:
        legal, ends = masks
        places = Places(trace)
        numbers = dict(zip(places.response, map(self.table.add, legal), strict=True))
        targets, rules = [IGNORE] * places.num_tokens, [UNMASKED] * places.num_tokens
        classes, follows = [-1] * places.num_tokens, [-1] * places.num_tokens
        kinds = classes_of(trace, self._kinds)
        num_illegal = 0
        end_id = self.end_id if ended else None
        ids = labels(trace, end_id, ends_threads=self._dialect.ends_threads)
        for place, following in places.successors():
            wanted = ids[place[0]][place[1]]
            if wanted is None:
                continue
            thread = trace.segments[place[0]].thread
            number = self.table.add(ends.get(thread)) if following is None else numbers[following]
            if not self.table.allows(number, wanted):
                num_illegal += 1
                continue
            row = places.flat(place)
            targets[row], rules[row] = wanted, number
            follows[row] = -1 if following is None else places.flat(following)
            end = "end" if thread == MAIN else "close"
            classes[row] = CLASSES.index(end if following is None else kinds[following])
        flat = [s.id for s in trace.segments for _ in s.tokens]
        tokens = torch.tensor([t for s in trace.segments for t in s.tokens])
        in_blocks = in_spans(trace)
        if self.blocks is not None:
            num_illegal += int((~torch.from_numpy(self.blocks.legal.mask)[tokens[in_blocks]]).sum())
        return Example(
            key=key,
            ids=tokens,
            positions=torch.tensor([p for s in trace.segments for p in s.positions]),
            segment=torch.tensor(flat),
            sees=_sees(trace.segments),
            is_block=torch.tensor([s.kind == "block" for s in trace.segments]),
            targets=torch.tensor(targets),
            classes=torch.tensor(classes),
            legal=torch.tensor(rules),
            follows=torch.tensor(follows),
            table=self.table,
            num_illegal=num_illegal,
            in_span=in_blocks,
            block_legal=UNMASKED if self.blocks is None else self.table.add(self.blocks.legal),
            issues=issues,
        )


def _session_maker(
    vocabulary: Vocabulary, card: ModelCard, max_positions: int
) -> Callable[[], Session]:
    """Sessions as the runtime makes them for this model's own method."""
    if card.dialect == "plain":
        banned = np.zeros(vocabulary.size, dtype=np.bool_)
        banned[sorted({*vocabulary.control.values(), *vocabulary.spare_ids})] = True
        legal = PlainSession(banned)
        return lambda: legal
    known: Card = card
    sessions = get_dialect(card.dialect).sessions(vocabulary, known, max_positions)
    return lambda: _unbounded(sessions(SamplingParams()))


def _unbounded(session: Session) -> Session:
    session.budget = lambda: 1 << 40
    return session


def _with_origins(trace: Trace, origins: list[Origin]) -> Trace:
    """The trace with the origins that were recorded, one a response token."""
    left = iter(origins)
    segments = [
        s if is_prompt(s) else replace(s, origins=tuple(next(left) for _ in s.tokens))
        for s in trace.segments
    ]
    return replace(trace, segments=tuple(segments))


def _sees(segments: Sequence[Segment]) -> Bool[Tensor, "segments segments"]:
    sees = torch.zeros(len(segments), len(segments), dtype=torch.bool)
    for s in segments:
        sees[s.id, sorted(s.sees)] = True
    return sees
