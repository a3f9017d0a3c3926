"""The planner: no plan that the rules allow is quicker, and the rules hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.likelihood_plan import Costs, Move, Plan, Rules, plan
from stretto.data.likelihood_write import Writer
from stretto.errors import InvalidInput

RULES = Rules(max_loss=0.1, min_tokens=20)


def item(tokens: int = 40, blind: float = 0.0, pair: float | None = None, **more: object) -> Costs:
    values = {"promise_steps": 7, "scope_end": 0, **more}
    return Costs(tokens, blind=blind, pair=blind if pair is None else pair, **values)  # type: ignore[arg-type]


def places(found: Plan) -> str:
    """M, S or C for each unit, lower case after a sync."""
    letters = {"main": "M", "start": "S", "continue": "C"}
    return "".join(letters[m.place].swapcase() if m.sync else letters[m.place] for m in found.moves)


def test_independent_items_are_promised() -> None:
    found = plan([item(10, promise_steps=None), item(), item(), item()], RULES)
    assert places(found) == "MSSM"
    assert found.steps == max(10 + 7 + 7 + 40, 10 + 7 + 7 + 41)
    listed = plan([item(10, promise_steps=None), item(), *[item(is_sibling=True)] * 2], RULES)
    assert places(listed) == "MSSS"
    assert listed.steps == 10 + 3 * 7 + 41


def test_a_chain_stays_on_main() -> None:
    costs = [item(), item(blind=0.3), item(blind=0.3), item(blind=0.3)]
    assert places(plan(costs, RULES)) == "MMMM"


def test_a_dependent_end_waits() -> None:
    found = plan([item(), item(), item(), item(12, blind=0.5, promise_steps=None)], RULES)
    assert places(found) == "SSMm"
    assert found.steps == max(7 + 7 + 40 + 1, 7 + 41, 14 + 41) + 12
    assert found.losses[-1] == 0


def test_what_needs_only_its_neighbour_shares_its_chunk() -> None:
    costs = [item(), item(), item(20, blind=0.5, pair=0.0), item(), item(blind=0.05)]
    found = plan(costs, RULES)
    assert places(found)[1:3] == "SC"


def test_short_units_are_grouped() -> None:
    found = plan([item(12, is_sibling=i > 0) for i in range(8)], RULES)
    sizes = [len(list(group)) for key, group in itertools.groupby(places(found)) if key == "C"]
    assert places(found).startswith("SC")
    assert min(sizes) >= 1


def test_a_lead_takes_what_rests_on_it_along() -> None:
    section = [item(5, scope_end=3), item(30), item(30), item(5, scope_end=6), item(30), item(30)]
    found = plan(section, Rules(0.1, promise_margin=50, min_saving=0))
    for at in (0, 3):
        if found.moves[at].place != "main":
            assert places(found)[at : at + 3] == "SCC"


def test_little_gain_is_no_reason() -> None:
    assert places(plan([item(100, promise_steps=None), item(20), item(20)], RULES)) == "MMM"


def test_at_most_so_many_promises() -> None:
    found = plan([item() for _ in range(12)], Rules(0.1, max_promises=3))
    assert 0 < found.num_promises <= 3


def test_nothing_to_plan() -> None:
    assert plan([], RULES) == Plan((), 0, ())


@pytest.mark.parametrize(
    "bad",
    [
        {"max_loss": -1.0},
        {"max_loss": "much"},
        {"max_loss": float("nan")},
        {"max_loss": 0.1, "min_tokens": 0},
    ],
)
def test_bad_rules_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Rules(**bad)  # type: ignore[arg-type]


# -- against all plans there are -------------------------------------------------------------------


def price(  # noqa: PLR0911
    costs: Sequence[Costs], moves: Sequence[Move], rules: Rules
) -> float | None:
    """Steps and margins of a plan, told step by step; None if a rule forbids it."""
    clock = promises = odd = 0
    children: list[dict[str, int]] = []
    hidden: list[int] = []
    chunk: list[int] = []
    for index, (unit, move) in enumerate(zip(costs, moves, strict=True)):
        before = moves[index - 1].place if index else "main"
        in_scope = any(costs[i].scope_end > index for i in chunk if costs[i].scope_end > i + 1)
        if move.place == "continue":
            if before == "main" or move.sync:
                return None
            others = [i for i in hidden if i not in chunk]
            if others and min(unit.pair, unit.blind) > rules.max_loss:
                return None
            could = unit.promise_steps is not None and unit.num_tokens >= rules.min_tokens
            is_free = unit.blind <= rules.max_loss and not in_scope
            odd += unit.is_sibling and could and is_free
            children[-1]["end"] += unit.num_tokens
            children[-1]["size"] += unit.num_tokens
            chunk.append(index)
            hidden.append(index)
            continue
        if chunk and in_scope:
            return None
        if move.sync:
            if not hidden:
                return None
            clock = max(clock + 1, *(child["end"] for child in children))
            hidden = []
        elif hidden and unit.blind > rules.max_loss:
            return None
        odd += move.place == "main" and before != "main" and unit.is_sibling
        chunk = []
        if move.place == "main":
            clock += unit.num_tokens
            continue
        if unit.promise_steps is None:
            return None
        promises += 1
        clock += unit.promise_steps
        children.append({"end": clock + unit.num_tokens + 1, "size": unit.num_tokens})
        chunk = [index]
        hidden.append(index)
    if any(child["size"] < rules.min_tokens for child in children):
        return None
    done = max([clock, *(child["end"] for child in children)])
    return done + rules.promise_margin * promises + rules.odd_margin * odd


units = st.builds(
    Costs,
    num_tokens=st.integers(1, 60),
    promise_steps=st.one_of(st.none(), st.integers(4, 10)),
    blind=st.sampled_from([0.0, 0.05, 0.3]),
    pair=st.sampled_from([0.0, 0.05, 0.3]),
    scope_end=st.integers(0, 5),
    is_sibling=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(units, min_size=1, max_size=5))
def test_no_allowed_plan_is_better(costs: list[Costs]) -> None:
    choices = [Move(p, s) for p in ("main", "start") for s in (False, True)] + [Move("continue")]
    every = itertools.product(choices, repeat=len(costs))
    prices = [price(costs, moves, RULES) for moves in every]
    best = min(p for p in prices if p is not None)
    alone = sum(unit.num_tokens for unit in costs)
    found = plan(costs, RULES)
    if best > (1 - RULES.min_saving) * alone:
        assert found.num_promises == 0
        assert found.steps == alone
    else:
        assert price(costs, found.moves, RULES) == best
        assert max(found.losses) <= RULES.max_loss


# -- topics of chunks ------------------------------------------------------------------------------


def test_a_chunk_is_named_after_its_units_as_far_as_that_is_short() -> None:
    writer = Writer(lambda text: len(text) // 4, 10)
    assert writer.topic(["Iron", "", "Gold"], is_section=False) == "Iron, Gold"
    assert writer.topic(["Iron", "Gold"], is_section=True) == "Iron"
    many = [f"metal number {i}" for i in range(5)]
    assert writer.topic(many, is_section=False) == "metal number 0 to metal number 4"
    long = "exceedingly long words everywhere " * 4
    assert writer.topic([long.strip()], is_section=False) == long[: len(long) // 2 - 1]
    assert writer.count(writer.topic(["x" * 300], is_section=False)) == 16
