"""Registers from dependence graphs: nothing needed is let go of, the least is held, spills."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.graphs import Graph, keyed, labelled_item
from stretto.data.items import Item
from stretto.data.labels import CutText, Labels, label
from stretto.data.registers import (
    deaths,
    last_uses,
    live_counts,
    liveness,
    max_live,
    mean_live,
    needed_kills,
    round_robin,
    stack,
)
from stretto.data.rows import Annotated, Reject
from stretto.data.spill import fit
from stretto.dialects import DialectSettings, get_dialect
from stretto.dialects.words import WordsVocabulary
from stretto.errors import InvalidInput, UnknownName
from stretto.trace import live_tokens


@st.composite
def graphs(draw, most=12):
    """Lengths and reads of some steps."""
    size = draw(st.integers(1, most))
    lengths = draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    reads = [tuple(sorted(draw(st.sets(st.integers(0, k - 1), max_size=3)))) if k else ()
             for k in range(size)]  # fmt: skip
    return lengths, reads


def brute_force(lengths, reads, num_registers, grace):
    """The least mean of all assignments that let go of nothing needed; None if there are none."""
    figures = [
        mean_live(lengths, registers, grace=grace)
        for registers in itertools.product(range(num_registers), repeat=len(lengths))
        if not needed_kills(registers, reads, grace=grace)
    ]
    return min(figures, default=None)


def num_words(text):
    return len(text.split())


def cut_text(lengths, reads, *, facts=True):
    """Steps of so many tokens, registers included, each word its own; `s3` begins step 3."""
    texts = tuple(f" s{k}" + " w" * (n - 2) if n > 1 else "" for k, n in enumerate(lengths))
    return CutText(texts, tuple(map(tuple, reads)), "", tuple(f" f{k}" for k in range(len(texts)))
                   if facts else None)  # fmt: skip


def parsed(annotated, num_registers, grace=False):
    dialect = get_dialect("tip")
    settings = DialectSettings(num_registers=num_registers, grace=grace)
    vocabulary = WordsVocabulary(dialect.forms(settings))
    return dialect.parse_text(annotated, vocabulary, settings, "")


def test_figures_of_a_graph_worked_out_by_hand():
    # 0 and 1 are read by 2, which only the last reads; 3 is a dead end.
    reads = [(), (), (0, 1), (), (2,)]
    assert last_uses(reads) == [2, 2, 4, 3, 4]
    assert live_counts(reads) == [1, 2, 3, 2, 2]
    assert live_counts(reads, grace=True) == [1, 2, 1, 2, 1]
    assert deaths([0, 1, 2, 0, 0]) == [3, None, None, 4, None]
    assert needed_kills([0, 1, 0, 0, 1], reads) == [(0, 2), (2, 3)]
    assert needed_kills([0, 1, 0, 1, 0], reads, grace=True) == []
    # 3 takes the larger of the two dead ones, 4 the dead 3 rather than the smaller 1
    assert liveness([4, 2, 3, 5, 3], reads, 8).registers == (0, 1, 2, 0, 0)
    # of equally large ones the latest
    assert liveness([4, 4, 3, 3, 3], reads, 8).registers == (0, 1, 2, 1, 0)
    assert liveness([4, 2, 3, 5, 3], reads, 2) is None
    assert liveness([4, 2, 3, 5, 3], reads, 2, grace=True).registers == (0, 1, 0, 1, 1)


def test_mean_live_of_a_text_worked_out_by_hand():
    # tokens see 1 2, 3 4, then the first step is gone: 3 4 5
    assert mean_live([2, 2, 3], [0, 1, 0]) == (1 + 2 + 3 + 4 + 3 + 4 + 5) / 7
    assert mean_live([2, 2, 3], [0, 1, 0], grace=True) == (1 + 2 + 3 + 4 + 5 + 4 + 5) / 7
    assert mean_live([2, 2], [0, 0], before=3) == (1 + 2 + 3 + 4 + 5 + 4 + 5) / 7
    assert mean_live([3, 3], [0, 1]) == 7 / 2
    assert mean_live([], []) == 0.0


@given(graphs(), st.booleans(), st.integers(0, 4), st.integers(0, 9))
def test_liveness_lets_go_of_nothing_that_is_needed(graph, grace, slack, seed):
    lengths, reads = graph
    most = max_live(reads, grace=grace)
    rng = random.Random(seed)
    delays = [rng.randint(0, slack) for _ in lengths]
    for number in (most, most + 1, 16):
        found = liveness(lengths, reads, number, grace=grace, slack=delays)
        assert needed_kills(found.registers, reads, grace=grace) == []
        assert max(found.registers) < number
    plain = liveness(lengths, reads, 16, grace=grace)
    assert len(set(plain.registers)) <= most
    assert plain == liveness(lengths, reads, most, grace=grace)  # more registers change nothing
    assert most == 1 or liveness(lengths, reads, most - 1, grace=grace) is None


@given(graphs(), st.booleans())
def test_a_stack_lets_go_of_nothing_that_is_needed(graph, grace):
    lengths, reads = graph
    most = max_live(reads, grace=grace)
    for number in (most, most + 1, 16):
        found = stack(reads, number, grace=grace)
        assert needed_kills(found.registers, reads, grace=grace) == []
        assert max(found.registers) < number
        best = liveness(lengths, reads, number, grace=grace).registers
        held = [mean_live(lengths, r, grace=grace) for r in (best, found.registers)]
        assert held[0] <= held[1] + 1e-9
    assert most == 1 or stack(reads, most - 1, grace=grace) is None


def test_a_stack_worked_out_by_hand():
    # 3 reads 2, whose register 4 takes; 5 takes that of 3, 6 that of 1, the first of two, 7 of 0
    reads = [(), (0,), (0, 1), (2,), (3,), (1, 4), (0, 5), ()]
    assert stack(reads, 8).registers == (0, 1, 2, 3, 2, 3, 1, 0)
    # 4 is written below 3, which is needed: 5 goes above 3
    reads = [(), (), (), (2,), (), (), (0, 1, 3, 4, 5)]
    assert stack(reads, 8).registers == (0, 1, 2, 3, 2, 4, 5)


@given(graphs(most=6), st.booleans())
def test_no_other_assignment_holds_less(graph, grace):
    lengths, reads = graph
    most = max_live(reads, grace=grace)
    best = brute_force(lengths, reads, min(most + 1, 4), grace)
    found = liveness(lengths, reads, most, grace=grace)
    if most <= 4:
        assert mean_live(lengths, found.registers, grace=grace) == pytest.approx(best)
        assert most == 1 or brute_force(lengths, reads, most - 1, grace) is None


def test_no_other_assignment_of_seven_steps_holds_less():
    rng = random.Random(0)
    for _ in range(3):
        reads = [
            tuple({rng.randrange(max(0, k - 3), k) for _ in range(min(k, 2))}) for k in range(7)
        ]
        lengths = [rng.randint(1, 9) for _ in reads]
        best = brute_force(lengths, reads, 4, False)
        found = liveness(lengths, reads, 16)
        assert max_live(reads) <= 4
        assert mean_live(lengths, found.registers) == pytest.approx(best)


@given(graphs(), st.booleans(), st.sampled_from(["liveness", "stack", "round-robin", "random"]))
def test_mean_live_is_that_of_the_trace(graph, grace, policy):
    lengths, reads = [n + 1 for n in graph[0]], graph[1]
    labels = Labels(policy, 12, grace=grace)
    found = label(cut_text(lengths, reads), labels, num_words, "x")
    trace = parsed(found.annotated, 12, grace).trace
    figures = live_tokens(trace)
    assert trace.num_tokens == sum(lengths)
    assert found.details["mean_live"] == pytest.approx(figures.generated_mean)
    assert found.details["dense_live"] == pytest.approx(figures.dense_mean)


@given(graphs(), st.booleans(), st.integers(1, 5))
def test_spills_happen_where_they_must_and_lose_nothing(graph, grace, number):
    lengths, reads = graph
    fitted = fit(lengths, reads, number, grace=grace, restate=lambda steps: 1 + len(steps))
    needs_none = max_live(reads, grace=grace) <= number
    if fitted is None:
        assert not needs_none
        return
    assert (fitted.merged + fitted.restated == 0) == needs_none
    assert max_live(fitted.reads, grace=grace) <= number
    told = [k for piece in fitted.pieces for k in piece.steps]
    assert told == list(range(len(reads)))
    for piece in fitted.pieces:  # what a step reads is in its own piece or in one that it reads
        near = [fitted.pieces[j] for j in piece.reads]
        known = {k for p in (*near, piece) for k in (*p.steps, *p.restates)}
        assert {j for k in piece.steps for j in reads[k]} <= known
        told_before = {k for p in near for k in (*p.steps, *p.restates)}
        assert set(piece.restates) <= told_before
    registers = liveness(fitted.lengths, fitted.reads, number, grace=grace).registers
    assert needed_kills(registers, fitted.reads, grace=grace) == []


def test_each_branch_of_a_spill():
    # 0 and 1 are last read together: one step of both
    merged = fit([3, 3, 3], [(), (), (0, 1)], 2)
    assert [(p.steps, p.length, p.reads) for p in merged.pieces] == [
        ((0, 1), 5, ()),
        ((2,), 3, (0,)),
    ]
    # 0, 1 and 2 wait for 4, 5 and 6: what is read latest is said again in one step
    reads = [(), (), (), (2,), (3, 0), (4, 1), (5,)]
    assert max_live(reads) == 4
    found = fit([3] * 7, reads, 3, restate=lambda steps: 1 + len(steps))
    assert (found.merged, found.restated) == (0, 1)
    assert [p.restates for p in found.pieces] == [(), (), (0, 1), (), (), (), (), ()]
    assert found.reads == ((), (), (0, 1), (), (3,), (2, 4), (2, 5), (6,))
    assert fit([3] * 7, reads, 3) is None
    assert fit([3] * 7, reads, 2, restate=lambda steps: 1 + len(steps)) is None


def test_text_with_registers_is_the_text_without_them():
    cut = CutText((" a", " b", " c"), ((), (), (0, 1)), "Well,", (" A", " B", " C"))
    found = label(cut, Labels(num_registers=3), num_words, "x")
    assert found.annotated == "Well,<reg_0> a<reg_1> b<reg_2> c"
    assert parsed(found.annotated, 3).text == found.response == cut.response
    assert label(cut, Labels("none"), num_words, "x").annotated == cut.response
    merged = label(cut, Labels(num_registers=2), num_words, "x")
    assert (merged.annotated, merged.details["merged"]) == ("Well,<reg_0> a b<reg_1> c", 1)
    assert merged.response == cut.response


def test_what_is_said_again_stands_in_the_text():
    cut = cut_text([3] * 7, [(), (), (), (2,), (3, 0), (4, 1), (5,)])
    found = label(cut, Labels(num_registers=3), num_words, "x")
    assert found.details["restated"] == 1
    assert found.annotated.startswith("<reg_0> s0 w<reg_1> s1 w<reg_2> f0 f1<reg_1> s2 w")


def test_slack_and_random_registers_are_of_the_row_alone():
    cut = cut_text([3] * 12, [()] + [(k,) for k in range(11)])
    drawn = (Labels(slack=4), Labels("random", 4), Labels(slack=4, seed=1), Labels(shifted=True))
    for labels in drawn:
        found = [label(cut, labels, num_words, name).registers for name in ("a", "b", "a")]
        assert found[0] == found[2] != found[1]
    assert label(cut, Labels(), num_words, "a") == label(cut, Labels(), num_words, "b")
    tight = label(cut, Labels(num_registers=2, slack=4), num_words, "a")
    assert tight.details["needed_kills"] == 0 < tight.details["hurried"]
    assert label(cut, Labels("random", 2), num_words, "a").details["needed_kills"] > 0


@given(graphs(), st.sampled_from(["liveness", "round-robin"]))
def test_shifted_registers_are_the_same_under_other_numbers(graph, policy):
    cut = cut_text(*graph)
    for name in ("a", "b", "c"):
        usual = label(cut, Labels(policy), num_words, name)
        found = label(cut, Labels(policy, shifted=True), num_words, name)
        pairs = zip(usual.registers, found.registers, strict=True)
        assert len({(new - old) % 16 for old, new in pairs}) == 1
        assert all(0 <= register < 16 for register in found.registers)
        assert found.details | {"registers": ...} == usual.details | {"registers": ...}
    assert Labels(policy, shifted=True).name == f"{policy}-16-shifted"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "livenes"}, "did you mean 'liveness'"),
        ({"num_registers": 0}, "from 1 to 1000, got 0"),
        ({"slack": -1}, "at least 0, got -1"),
        ({"policy": "random", "slack": 2}, "labels random know no slack"),
    ],
)
def test_labels_that_there_are_not(settings, message):
    with pytest.raises((InvalidInput, UnknownName), match=message):
        Labels(**settings)


# The simulated figures of the fact sheet on labels, whose steps have 9 tokens: a chain of 40 steps
# and a perfect tree of depth 4.
CHAIN = [(k - 1,) if k else () for k in range(40)]


def tree(depth, reads):
    if depth:
        left, right = tree(depth - 1, reads), tree(depth - 1, reads)
        reads.append((left, right))
    else:
        reads.append(())
    return len(reads) - 1


def test_published_figures_of_chains_and_trees():
    perfect: list[tuple[int, ...]] = []
    tree(4, perfect)
    for reads, most, live, in_turn in (
        (CHAIN, 2, 13.8, (61.7, 113.0)),
        (perfect, 6, 36.4, (59.9, 105.2)),
    ):
        lengths = [9] * len(reads)
        assert max_live(reads) == most
        for number in (8, 16):
            registers = liveness(lengths, reads, number).registers
            assert mean_live(lengths, registers) == pytest.approx(live, abs=0.05)
        for number, figure in zip((8, 16), in_turn, strict=True):
            registers = round_robin(len(reads), number).registers
            assert mean_live(lengths, registers) == pytest.approx(figure, abs=0.05)
            assert bool(needed_kills(registers, reads)) == (reads is perfect)


# -- graphs of responses ---------------------------------------------------------------------------


def graph_row(**changes):
    row = {"id": "x/0", "steps": [(2, 4), (4, 6), (6, 8)], "reads": [[], [], [0]]}
    return Graph(**(row | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reads": [[], []]}, "2 reads for 3 steps"),
        ({"facts": ["a"]}, "1 facts for 3 steps"),
        ({"steps": [(2, 4), (5, 6), (6, 8)]}, "step 0 ends at 4 and the next starts at 5"),
        ({"steps": [(2, 4), (4, 4), (4, 8)]}, "step 1 is empty"),
        ({"reads": [[], [1], []]}, "step 1 reads 1, which is not before it"),
    ],
)
def test_graphs_that_are_none(changes, message):
    with pytest.raises(ValueError, match=message):
        graph_row(**changes)


def test_responses_get_registers_or_a_reason():
    def of(response, graph=None, **settings):
        given = Labels(num_registers=settings.pop("number", 8))
        return labelled_item(Item("p", response), graph, given, len, **settings)

    row = of("P: a b c", graph_row(steps=[(2, 4), (4, 6), (6, 8)]))
    assert isinstance(row, Annotated)
    assert row.annotated == "P:<reg_0> a<reg_1> b<reg_2> c"
    assert row.response == "P: a b c"
    assert of("P: a b c", graph_row(), follow=False).annotated == "P:<reg_0> a<reg_1> b<reg_1> c"
    assert of("P: a b c", graph_row(), keep_prompt=False).prompt is None
    reasons = {
        "no-graph": of("P: a b c"),
        "tags-in-response": of("<reg_1>!", graph_row()),
        "not-its-graph": of("P: a b c.", graph_row()),
        "too-few-registers": of("P: a b c", graph_row(), number=1, follow=False),
    }
    for code, reject in reasons.items():
        assert isinstance(reject, Reject)
        assert reject.reasons[0].startswith(code + ": ")
    with pytest.raises(InvalidInput, match="two graphs of x/0"):
        keyed([graph_row(), graph_row()])
