"""Steps that need more registers than there are: merged, restated, or given up.

Where too many steps are needed at once, in this order: two neighbours with the same last use become
one step; or facts that are needed latest (Belady) are said again in one step, which is read from
then on in place of those that it repeats. If neither helps, the steps do not fit. A step that is
still needed is never let go of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.data.registers import Reads, last_uses, live_counts

Restated = Callable[[tuple[int, ...]], int | None]
"""Tokens of a step that repeats what these steps found, its register included; None: cannot be."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A step of the new text: of the old `steps`, in order, or of the facts of `restates`; one of
    the two is empty. `reads`: numbers of earlier pieces."""

    steps: tuple[int, ...]
    restates: tuple[int, ...]
    length: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Fitted:
    """Steps that fit, and how many mergers and restatements that took."""

    pieces: tuple[Piece, ...]
    merged: int
    restated: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(piece.length for piece in self.pieces)

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        return tuple(piece.reads for piece in self.pieces)


def unchanged(lengths: Sequence[int], reads: Reads) -> Fitted:
    """Each step as a piece, whether they fit or not."""
    pairs = enumerate(zip(lengths, reads, strict=True))
    return Fitted(
        tuple(Piece((k,), (), n, tuple(sorted({*needed}))) for k, (n, needed) in pairs), 0, 0
    )


def fit(
    lengths: Sequence[int],
    reads: Reads,
    num_registers: int,
    *,
    grace: bool = False,
    restate: Restated | None = None,
) -> Fitted | None:
    """The steps as pieces of which at most `num_registers` are needed at once, or None. Without
    `restate` steps are merged alone."""
    pieces = list(unchanged(lengths, reads).pieces)
    merged = restated = 0
    while (at := _overfull(pieces, num_registers, grace)) is not None:
        if (pair := _equals(pieces, at, grace)) is not None:
            pieces = _with_merged(pieces, pair)
            merged += 1
        elif (found := _with_restated(pieces, at, num_registers, grace, restate)) is not None:
            pieces = found
            restated += 1
        else:
            return None
    return Fitted(tuple(pieces), merged, restated)


def _overfull(pieces: Sequence[Piece], num_registers: int, grace: bool) -> int | None:
    counts = live_counts([piece.reads for piece in pieces], grace=grace)
    return next((k for k, count in enumerate(counts) if count > num_registers), None)


def _live(last: Sequence[int], at: int, grace: bool) -> list[int]:
    return [j for j in range(at) if last[j] >= at + int(grace)]


# -- merging ---------------------------------------------------------------------------------------


def _equals(pieces: Sequence[Piece], at: int, grace: bool) -> int | None:
    """The first of two neighbours that are both needed at a place, last read by the same piece.
    Neither is one that restates facts."""
    last = last_uses([piece.reads for piece in pieces])
    needed = {*_live(last, at, grace), at} - {i for i, p in enumerate(pieces) if p.restates}
    pairs = (i for i in range(at) if {i, i + 1} <= needed and last[i] == last[i + 1])
    return next(pairs, None)


def _with_merged(pieces: Sequence[Piece], first: int) -> list[Piece]:
    a, b = pieces[first], pieces[first + 1]
    reads = tuple(sorted({*a.reads, *b.reads} - {first}))
    both = Piece(a.steps + b.steps, (), a.length + b.length - 1, reads)
    moved = [i if i <= first else i - 1 for i in range(len(pieces))]
    changed = [*pieces[:first], both, *pieces[first + 2 :]]
    return [_renumbered(piece, moved) for piece in changed]


def _renumbered(piece: Piece, moved: Sequence[int]) -> Piece:
    reads = tuple(sorted({moved[j] for j in piece.reads}))
    return Piece(piece.steps, piece.restates, piece.length, reads)


# -- restating -------------------------------------------------------------------------------------


def _with_restated(
    pieces: Sequence[Piece], at: int, num_registers: int, grace: bool, restate: Restated | None
) -> list[Piece] | None:
    """With one more piece before `at`, as late as there is a register for it: it repeats two pieces
    that are needed at `at` and beyond, those that are needed again last."""
    if restate is None:
        return None
    last = last_uses([piece.reads for piece in pieces])
    needed = set(_live(last, at, grace))
    for place in range(at, 1, -1):
        across = [j for j in range(place) if last[j] >= place]
        if len(across) + 1 > num_registers:
            continue
        next_use = {j: _next_use(pieces, j, place) for j in across if j in needed}
        victims = sorted(next_use, key=lambda j: (-next_use[j], j))[:2]
        if len(victims) < 2 or min(next_use[j] for j in victims) <= place:
            continue
        facts = tuple(sorted({f for j in victims for f in _facts(pieces[j])}))
        length = restate(facts)
        if length is not None:
            repeated = Piece((), facts, length, tuple(sorted(victims)))
            return _inserted(pieces, place, repeated)
    return None


def _next_use(pieces: Sequence[Piece], step: int, place: int) -> int:
    return next(k for k in range(place, len(pieces)) if step in pieces[k].reads)


def _facts(piece: Piece) -> tuple[int, ...]:
    return (*piece.steps, *piece.restates)


def _inserted(pieces: Sequence[Piece], place: int, repeated: Piece) -> list[Piece]:
    """Whatever read what is repeated reads the new piece from there on."""
    moved = [i if i < place else i + 1 for i in range(len(pieces))]
    later = [_renumbered(piece, moved) for piece in pieces[place:]]
    victims = set(repeated.reads)
    turned = [
        Piece(p.steps, p.restates, p.length, tuple(sorted({*p.reads} - victims | {place})))
        if victims & {*p.reads}
        else p
        for p in later
    ]
    return [*pieces[:place], repeated, *turned]
