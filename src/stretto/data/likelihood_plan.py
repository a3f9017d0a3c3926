"""The quickest way to write a response in parts, given what each part may be blind to.

Steps are those of `Trace.critical_path_steps` for dialect pasta: main draws one token a step, a
promise costs main its own tokens, a child runs from its promise on, and what follows a `<sync/>`
waits for all open children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.errors import InvalidInput
from stretto.params import check_int

Place = Literal["main", "start", "continue"]
"""Where a unit is written: on main, in a new promised chunk, or on in the chunk of the unit
before."""

BEAM = 48
"""States kept a unit, of those that no other beats in every respect."""


@dataclass(frozen=True)
class Costs:
    """One unit, as the planner sees it.

    `num_tokens`: wherever it is written. `promise_steps`: what main draws to promise it; None if
    it cannot begin a chunk. `blind` and `pair`: what is lost if all hidden units before it stay
    hidden, and if all but the one right before do; each is 0 where nothing would be hidden.
    `scope_end`: units before that index rest on this one and are in its chunk if it is in one.
    `is_sibling`: it continues a list that the unit before is of.
    """

    num_tokens: int
    promise_steps: int | None
    blind: float
    pair: float
    scope_end: int
    is_sibling: bool = False


@dataclass(frozen=True)
class Rules:
    """`max_loss`: what a unit may lose by being blind. `min_tokens`: of a chunk. `max_promises`
    fork at most.

    What a plan must be quicker by, so that it is simple enough to be learnt: `promise_margin`
    steps for each promise, `odd_margin` for each item of a list that is not treated as its elder:
    on main right after a chunk (main would have to know that it is the last), or on in its elder's
    chunk though it could be one by itself; and in all the share `min_saving` of the steps.
    """

    max_loss: float
    min_tokens: int = 20
    promise_margin: int = 2
    odd_margin: int = 12
    min_saving: float = 0.1
    max_promises: int = 64

    def __post_init__(self) -> None:
        value = self.max_loss
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise InvalidInput(f"max_loss is {value!r}; it must be a number, 0 or more")
        for name in ("min_tokens", "max_promises"):
            check_int(name, getattr(self, name), 1)


@dataclass(frozen=True)
class Move:
    """Where a unit goes, and whether main writes a `<sync/>` before it."""

    place: Place
    sync: bool = False


@dataclass(frozen=True)
class Plan:
    """A move for each unit, and what each loses by it. `steps` of the critical path."""

    moves: tuple[Move, ...]
    steps: int
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        return sum(self.losses)

    @property
    def num_promises(self) -> int:
        return sum(move.place == "start" for move in self.moves)


class _State(NamedTuple):
    """After some units. `clock`: main's steps; `ready`: when all closed chunks are written, and
    `end`: the chunk that may go on (0: none), `size` its tokens. `hidden`: main is blind to some
    chunk; `others`: to one other than that which may go on. Units before `lock` must go on in
    it. `odd`: items that are not treated as their elder."""

    clock: int
    ready: int
    end: int
    loss: float
    promises: int
    odd: int
    size: int
    hidden: bool
    others: bool
    lock: int
    moves: tuple[Move, ...]
    losses: tuple[float, ...]

    @property
    def done(self) -> int:
        return max(self.clock, self.ready, self.end)


def plan(costs: Sequence[Costs], rules: Rules) -> Plan:
    """The plan of the fewest steps in which no unit loses more than `rules.max_loss`; of equals
    the one that loses least. Without promises if none saves enough. Deterministic; exact up to
    `BEAM`.
    """
    alone = sequential(costs)
    states = [_State(0, 0, 0, 0.0, 0, 0, 0, False, False, 0, (), ())]
    for index, unit in enumerate(costs):
        following = [new for state in states for new in _moves(index, state, unit, rules)]
        states = _best(following, rules)
    ends = [s for s in states if not s.end or s.size >= rules.min_tokens]
    best = min(ends, key=lambda s: (_price(s, rules), s.loss, s.promises))
    if _price(best, rules) > (1 - rules.min_saving) * alone.steps:
        return alone
    return Plan(best.moves, best.done, best.losses)


def sequential(costs: Sequence[Costs]) -> Plan:
    """The plan that promises nothing."""
    steps = sum(unit.num_tokens for unit in costs)
    return Plan((Move("main"),) * len(costs), steps, (0.0,) * len(costs))


def _price(state: _State, rules: Rules) -> int:
    return state.done + rules.promise_margin * state.promises + rules.odd_margin * state.odd


def _moves(index: int, state: _State, unit: Costs, rules: Rules) -> Iterator[_State]:
    is_odd = unit.is_sibling and bool(state.end)
    if state.end:
        yield from _goes_on(index, state, unit, rules)
        if index < state.lock or state.size < rules.min_tokens:
            return
        state = state._replace(
            ready=max(state.ready, state.end), end=0, size=0, others=True, lock=0
        )
    moves: list[tuple[bool, _State, float]] = []
    if not state.hidden or unit.blind <= rules.max_loss:
        moves.append((False, state, unit.blind if state.hidden else 0.0))
    if state.hidden:
        clock = max(state.clock + 1, state.ready)
        joined = state._replace(clock=clock, ready=0, hidden=False, others=False)
        moves.append((True, joined, 0.0))
    for sync, before, loss in moves:
        total = before.loss + loss
        on_main = before.clock + unit.num_tokens
        yield before._replace(
            clock=on_main,
            loss=total,
            odd=before.odd + is_odd,
            moves=(*before.moves, Move("main", sync)),
            losses=(*before.losses, loss),
        )
        if unit.promise_steps is None or before.promises >= rules.max_promises:
            continue
        clock = before.clock + unit.promise_steps
        yield before._replace(
            clock=clock,
            end=clock + unit.num_tokens + 1,
            loss=total,
            promises=before.promises + 1,
            size=unit.num_tokens,
            hidden=True,
            lock=unit.scope_end if unit.scope_end > index + 1 else 0,
            moves=(*before.moves, Move("start", sync)),
            losses=(*before.losses, loss),
        )


def _goes_on(index: int, state: _State, unit: Costs, rules: Rules) -> Iterator[_State]:
    """The unit is written on in the chunk of the one before."""
    loss = min(unit.pair, unit.blind) if state.others else 0.0
    if loss > rules.max_loss:
        return
    lock = max(state.lock, unit.scope_end if unit.scope_end > index + 1 else 0)
    is_odd = (
        unit.is_sibling
        and unit.promise_steps is not None
        and unit.num_tokens >= rules.min_tokens
        and unit.blind <= rules.max_loss
        and index >= state.lock
    )
    yield state._replace(
        end=state.end + unit.num_tokens,
        loss=state.loss + loss,
        odd=state.odd + is_odd,
        size=state.size + unit.num_tokens,
        lock=lock,
        moves=(*state.moves, Move("continue")),
        losses=(*state.losses, loss),
    )


def _best(states: Sequence[_State], rules: Rules) -> list[_State]:
    """States that no other beats: among those of one kind, none is as good in all respects."""
    kinds: dict[tuple[object, ...], list[_State]] = {}
    for state in sorted(states, key=lambda s: (_price(s, rules), s.clock, s.loss, s.promises)):
        kind = (
            bool(state.end), state.hidden, state.others, state.lock,
            min(state.size, rules.min_tokens),
        )  # fmt: skip
        kept = kinds.setdefault(kind, [])
        if len(kept) < BEAM and not any(_beats(other, state) for other in kept):
            kept.append(state)
    return [state for kept in kinds.values() for state in kept]


def _beats(one: _State, other: _State) -> bool:
    return (
        one.clock <= other.clock
        and one.ready <= other.ready
        and one.end <= other.end
        and one.loss <= other.loss
        and one.promises <= other.promises
        and one.odd <= other.odd
    )
