"""Annotated rows of dialect pasta in planned form: all text in spans, rounds where there are syncs.

A round's promised chunks become its spans. What main itself says becomes spans too, named after its
own first words, unless it is short: then it joins the span after it, or the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stretto.data.check import MAX_TOPIC_WORDS, Checker
from stretto.data.markup import promised, write_chunk
from stretto.data.rows import Annotated, Reject
from stretto.data.topics import clean_topic, is_weak_word
from stretto.dialects.outline import Promised, Run, Sync, outline
from stretto.dialects.pasta_masks import MAX_TOPIC_TOKENS
from stretto.dialects.tags import text_tags

MAX_WORD = 24
"""Characters of a topic's word: what is longer is no word that a plan could do with."""


@dataclass(frozen=True, slots=True)
class PlannedForm:
    """How rows are converted. `topics` and `rounds` False: the ablations, in which spans have no
    topic, and all of a row's are in one round. `unit`: lengths are its multiples, and what main
    says in fewer tokens gets no span of its own."""

    unit: int = 10
    topics: bool = True
    rounds: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a span; `topic` None where main itself says it."""

    text: str
    topic: str | None = None

    @property
    def is_blank(self) -> bool:
        return not self.text.strip()


def converted(row: Annotated, checker: Checker, form: PlannedForm) -> Annotated | Reject:
    """A pasta row in planned form, held to the rules of `Checker`, which is of dialect planned; a
    reject with the reasons if it breaks them."""
    rounds = pieces_of(row.annotated, checker.count, form.unit)
    text = planned_text(rounds, checker.count, form)
    reasons = checker.reasons(row.response, text)
    if reasons:
        return Reject(prompt_id=row.prompt_id, sample=row.sample, reasons=reasons, text=text)
    details = {"spans": sum(map(len, rounds)), "rounds": len(rounds) if form.rounds else 1}
    return row.model_copy(update={"annotated": text, "details": row.details | details})


def planned_text(rounds: list[list[Piece]], count: Callable[[str], int], form: PlannedForm) -> str:
    """Rounds of pieces as annotated text, each span promised as long as it is."""
    told = [
        "".join(
            write_chunk(
                topic_of(piece, count) if form.topics else "",
                promised(count(piece.text), form.unit),
                piece.text,
            )
            for piece in pieces
        )
        for pieces in rounds
    ]
    return ("<sync/>" if form.rounds else "").join(told)


def pieces_of(annotated: str, count: Callable[[str], int], unit: int) -> list[list[Piece]]:
    """The spans of each round of a pasta text, in order; no round is empty, none is blank."""
    rounds: list[list[Piece]] = []
    for pieces in _rounds(annotated):
        own = _joined(pieces, lambda piece: count(piece.text) < unit)
        if own and not own[0].is_blank:
            rounds.append(own)
        elif rounds and own:  # blank, and alone in its round
            last = rounds[-1][-1]
            rounds[-1][-1] = replace(last, text=last.text + own[0].text)
        elif own:
            rounds.append(own)
    if len(rounds) > 1 and rounds[0][0].is_blank:
        blank, first = rounds.pop(0)[0], rounds[0][0]
        rounds[0][0] = replace(first, text=blank.text + first.text)
    return rounds


def topic_of(piece: Piece, count: Callable[[str], int]) -> str:
    """At most `MAX_TOPIC_WORDS` words that say what a span is about: those of its own topic, or of
    its first line; words that say nothing by themselves are left out of longer ones."""
    source = piece.topic or next((x for x in piece.text.splitlines() if x.strip()), "")
    words = clean_topic(source).split()
    if len(words) > MAX_TOPIC_WORDS:
        words = [w.rstrip(",;:") for w in words if not is_weak_word(w)] or words
    words = [word[:MAX_WORD] for word in words[:MAX_TOPIC_WORDS]]
    while words and count(" ".join(words)) > MAX_TOPIC_TOKENS:
        words.pop()
    return clean_topic(" ".join(words))


# -- internals -------------------------------------------------------------------------------------


def _rounds(annotated: str) -> Iterator[list[Piece]]:
    """What is said between two syncs, in order. A promise without a block says nothing."""
    pieces: list[Piece] = []
    for part in outline(text_tags(annotated, 1), len(annotated))[0]:
        match part:
            case Run(start, end):
                pieces.append(Piece(annotated[start:end]))
            case Promised(tag, block) if block is not None:
                pieces.append(Piece(annotated[block.start : block.end], tag.topic))
            case Sync():
                yield pieces
                pieces = []
    yield pieces


def _joined(pieces: list[Piece], is_short: Callable[[Piece], bool]) -> list[Piece]:
    """Pieces of a round, short ones of main's joined to the one after, or else to the one before;
    blank ones always."""
    found: list[Piece] = []
    before = ""
    for piece in pieces:
        if piece.is_blank or (piece.topic is None and is_short(piece)):
            before += piece.text
            continue
        found.append(replace(piece, text=before + piece.text))
        before = ""
    if not before:
        return found
    if not found:
        return [Piece(before)]
    return [*found[:-1], replace(found[-1], text=found[-1].text + before)]
