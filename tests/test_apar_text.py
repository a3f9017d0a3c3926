"""Dialect apar, written down: text and ids to traces, their cost and labels, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from apar_words import CHILD, EOS, FORK, VOCABULARY, A, B
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from stretto.cli.trace import app
from stretto.dialects import get_dialect
from stretto.dialects.apar import TAG_FORMS, AparSettings
from stretto.dialects.apar_text import parse_ids, parse_text, text_tags, to_ids, to_text
from stretto.dialects.base import Parsed
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.words import WordsVocabulary
from stretto.errors import InvalidInput
from stretto.trace import Segment, Trace, labels, live_tokens, visible

GOLDEN = sorted((Path(__file__).parent / "golden").glob("apar_*.json"))
DEEP = AparSettings(max_depth=4)


def parse(text: str, prompt: str = "", how: AparSettings = AparSettings()) -> Parsed:  # noqa: B008
    return parse_text(text, WordsVocabulary(TAG_FORMS), how, prompt)


def issues(text: str, how: AparSettings = AparSettings()) -> list[tuple[str, int]]:  # noqa: B008
    return [(issue.code, issue.at) for issue in parse(text, how=how).issues]


# -- golden --------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_golden(golden: Path) -> None:
    case = json.loads(golden.read_text(encoding="utf-8"))
    args = ["show", "--dialect", "apar", "--json", *case["args"], "-"]
    result = CliRunner().invoke(app, args, input=case["input"].encode(), catch_exceptions=False)
    assert json.loads(result.stdout) == case["output"]


def test_there_are_golden_cases() -> None:
    assert len(GOLDEN) == 2


def test_a_text_of_too_many_forks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="5001 tags"):
        CliRunner().invoke(
            app, ["show", "--dialect", "apar", "-"], input="<fork/>" * 5001, catch_exceptions=False
        )


def test_the_registry_parses_by_the_published_settings() -> None:
    words = WordsVocabulary(TAG_FORMS)
    settings = PastaSettings(max_positions=5)
    parsed = get_dialect("apar").parse_text(
        "a <fork/><child>b c d e f</child>", words, settings, ""
    )
    assert [s.positions for s in parsed.trace.segments] == [(0, 1, 2), (3, 4, 4, 4, 4, 4)]
    assert get_dialect("apar").ends_threads
    assert not get_dialect("pasta").ends_threads


# -- tags ----------------------------------------------------------------------------------------

ONE = "<fork/><child>b</child>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a{ONE}c{ONE}", []),
        (ONE, []),
        ("<fork /><child></child>", []),
        ("a<fork/>", [("fork-without-child", 1)]),
        ("a<fork/> <child>b</child>", [("fork-without-child", 1), ("child-without-fork", 9)]),
        ("a<child>b</child></child>", [("child-without-fork", 1), ("child-without-fork", 17)]),
        ("a</child>", [("child-without-fork", 1)]),
        (f"{ONE}<fork/>", [("bare-fork", 23)]),
        ("<fork/><fork/>", [("fork-without-child", 0), ("bare-fork", 7)]),
        ("<fork/><child><fork/></child>", [("bare-fork", 14)]),
        ("<fork/><child>b<fork/></child>", [("nested-fork", 15)]),
        ("<fork/><child>b", [("unclosed-child", 7)]),
        ("<fork/><child>b<child>c</child>d</child>", [("child-without-fork", 15)]),
        ("", []),
    ],
)
def test_issues_and_where_they_are(text: str, expected: list[tuple[str, int]]) -> None:
    assert issues(text) == expected


@pytest.mark.parametrize(
    "text",
    ["<Fork/>", "<fork>", "<fork  />", "</fork>", "<child/>", "<child >", "[Fork]", "<async>"],
)
def test_what_is_no_tag_is_text_without_an_issue(text: str) -> None:
    parsed = parse(text)
    assert parsed.text == text
    assert not parsed.issues
    assert parsed.trace.num_text_tokens == parsed.trace.num_tokens


def test_depth_is_a_setting() -> None:
    text = "a<fork/><child>b<fork/><child>c</child>d</child>e"
    assert ("nested-fork", 16) in issues(text)
    parsed = parse(text, how=AparSettings(max_depth=3))
    assert not parsed.issues
    assert parsed.text == "abcde"
    assert [t.name for t in parsed.trace.threads] == ["main", "main.1", "main.1.1"]
    assert [(s.thread, sorted(s.sees)) for s in parsed.trace.segments] == [
        ("main", []),
        ("main.1", [0]),
        ("main.1.1", [0, 1]),
        ("main.1", [0, 1]),
        ("main", [0]),
    ]


def test_every_open_child_is_named_at_the_end() -> None:
    assert issues("<fork/><child>b<fork/><child>c", DEEP) == [
        ("unclosed-child", 7),
        ("unclosed-child", 22),
    ]


def test_a_fork_without_a_child_keeps_its_number() -> None:
    trace = parse(f"a<fork/>b{ONE}").trace
    assert [t.name for t in trace.threads] == ["main", "main.2"]
    assert [len(s) for s in trace.segments] == [2, 2, 2]


# -- who sees whom (fact sheet, invariant 36) ------------------------------------------------------


def ancestors(trace: Trace, segment: Segment) -> set[int]:
    """The path from the root: what each thread had written before it forked the next one."""
    parents = {t.name: t.parent for t in trace.threads}
    path, name, first = set[int](), segment.thread, segment.id
    while name is not None:
        path |= {s.id for s in trace.segments if s.thread == name and s.id < first}
        first = next(s.id for s in trace.segments if s.thread == name)
        name = parents[name] or ""
        if not name:
            break
    return path


def brute_steps(trace: Trace) -> int:
    """The last step: a thread draws one token a step, a child from the one after its fork."""
    fork = WordsVocabulary(TAG_FORMS).control["fork"]
    starts, last = {"main": 0}, 0
    counts: dict[str, int] = {}
    for thread in trace.threads:
        step = starts[thread.name]
        for s in trace.of_thread(thread.name):
            for token, origin, markup in zip(s.tokens, s.origins, s.markup, strict=True):
                if origin != "sampled":
                    continue
                step += 1
                if markup and token == fork:
                    counts[thread.name] = counts.get(thread.name, 0) + 1
                    starts[f"{thread.name}.{counts[thread.name]}"] = step
        last = max(last, step)
    return last


FRAGMENTS = [
    "<fork/>", "<fork />", "<child>", "</child>", "<fork/><child>", "a<fork/><child>", "</child>",
    "word", " two words", " ", "\r\n", "😀", "<fork", "/>", "<sync/>",
]  # fmt: skip
SOUPS = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)
SETTINGS = st.builds(
    AparSettings, max_depth=st.integers(1, 4), max_positions=st.sampled_from([None, 12])
)


@settings(deadline=None, max_examples=200)
@given(SOUPS, SOUPS, SETTINGS)
def test_any_text_has_a_meaning(text: str, prompt: str, how: AparSettings) -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    parsed = parse_text(text, vocabulary, how, prompt)
    trace = parsed.trace
    assert trace.critical_path_steps == brute_steps(trace)
    assert [i.at for i in parsed.issues] == sorted(i.at for i in parsed.issues)
    assert all(0 <= i.at < len(text) for i in parsed.issues)
    assert vocabulary.decode([t for s in trace.prompt for t in s.tokens]) == prompt
    assert all(set(s.sees) == ancestors(trace, s) for s in trace.segments)
    assert live_tokens(trace).peak <= len(trace.segments) + sum(map(len, trace.segments))
    text_again, offsets = to_text(trace, vocabulary)
    assert parse_text(text_again, vocabulary, how, prompt).text == parsed.text
    for (segment, index), at in offsets.items():
        if trace.segments[segment].tokens[index] in vocabulary.control.values():
            assert text_again.startswith(("<fork/>", "<child>"), at)


@settings(deadline=None)
@given(st.text())
def test_text_without_tags_is_itself(text: str) -> None:
    assume(not list(text_tags(text)))
    parsed = parse(text)
    assert parsed.text == text
    assert not parsed.issues


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, VOCABULARY.size - 1), max_size=60), SETTINGS)
def test_any_ids_have_a_meaning(ids: list[int], how: AparSettings) -> None:
    parsed = parse_ids([A, B], ids, VOCABULARY, how)
    assert all(0 <= i.at < len(ids) for i in parsed.issues)
    assert parsed.trace.critical_path_steps == brute_steps(parsed.trace)


def test_ids_close_a_child_by_an_end_of_sequence() -> None:
    parsed = parse_ids([], [A, FORK, CHILD, B, EOS, A, EOS], VOCABULARY, AparSettings())
    assert [(s.thread, s.tokens) for s in parsed.trace.segments] == [
        ("main", (A, FORK)),
        ("main.1", (CHILD, B)),
        ("main", (A, EOS)),
    ]
    assert [(i.code, i.at) for i in parsed.issues] == [("child-without-fork", 6)]


# -- the way back ----------------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from([" a", " bb", "\n", " 😀"]), min_size=1, max_size=3).map("".join)
DOCUMENTS = st.recursive(
    st.lists(WORDS, max_size=2),
    lambda inner: st.lists(st.tuples(WORDS, inner), max_size=3),
    max_leaves=12,
)
Document = list[object]


def write(document: Document) -> str:
    pieces = []
    for item in document:
        if isinstance(item, str):
            pieces.append(item)
        else:
            words, inner = item  # type: ignore[misc]
            pieces.append(f"{words}<fork/><child>{write(inner)}</child>")
    return "".join(pieces)


def bare(document: Document) -> str:
    pieces = [item if isinstance(item, str) else item[0] + bare(item[1]) for item in document]  # type: ignore[index]
    return "".join(pieces)


@settings(deadline=None, max_examples=150)
@given(DOCUMENTS)
def test_what_is_well_formed_has_no_issues_and_comes_back(document: Document) -> None:
    how = AparSettings(max_depth=100)
    vocabulary = WordsVocabulary(TAG_FORMS)
    text = write(document)
    parsed = parse_text(text, vocabulary, how, "p q")
    assert not parsed.issues
    assert parsed.text == bare(document)
    assert to_text(parsed.trace, vocabulary)[0] == text
    vocabulary.end_ids = frozenset(vocabulary.encode("the end"))
    ids = to_ids(parsed.trace, min(vocabulary.end_ids))
    prompt = [t for s in parsed.trace.prompt for t in s.tokens]
    again = parse_ids(prompt, ids, vocabulary, how)
    assert again.trace == parsed.trace
    assert again.text == parsed.text
    assert not again.issues


# -- what is trained -------------------------------------------------------------------------------


def predictions(text: str, *, ends_threads: bool = True) -> list[list[str | None]]:
    vocabulary = WordsVocabulary(TAG_FORMS)
    trace = parse_text(text, vocabulary, DEEP, "q").trace
    end = vocabulary.encode("END")[0]
    rows = labels(trace, end, ends_threads=ends_threads)
    return [[None if t is None else vocabulary.decode([t]) for t in row] for row in rows]


def test_labels_are_those_of_one_sample_a_thread() -> None:
    text = "one:<fork/><child> b c</child>\ntwo:<fork/><child></child>"
    assert predictions(text) == [
        ["one:"],
        ["<fork/>", "\ntwo:"],
        [" b", " c", "END"],
        ["<fork/>", "END"],
        ["END"],
    ]
    assert predictions(text, ends_threads=False)[2] == [" b", " c", None]


def test_labels_of_a_parent_that_goes_on_after_a_grandchild() -> None:
    text = "a<fork/><child>b<fork/><child>c</child>d</child>e"
    assert predictions(text) == [
        ["a"],
        ["<fork/>", "e"],
        ["b", "<fork/>", "d"],
        ["c", "END"],
        ["END"],
        ["END"],
    ]


@settings(deadline=None, max_examples=100)
@given(SOUPS)
def test_the_start_of_a_child_is_never_a_target(text: str) -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    trace = parse_text(text, vocabulary, DEEP, "q").trace
    rows = labels(trace, 10**6, ends_threads=True)
    assert sum(t == 10**6 for row in rows for t in row) == len(trace.threads)
    literal = sum(
        token == vocabulary.control["child"] and not markup
        for s in trace.response
        for token, markup in zip(s.tokens, s.markup, strict=True)
    )
    assert literal == 0
    assert all(t != vocabulary.control["child"] for row in rows for t in row)


def test_a_thread_that_was_cut_short_does_not_learn_to_end() -> None:
    from dataclasses import replace

    trace = parse("a<fork/><child>b</child>c").trace
    threads = tuple(
        replace(t, finish_reason="length" if t.parent else "stop") for t in trace.threads
    )
    rows = labels(replace(trace, threads=threads), 10**6, ends_threads=True)
    assert rows[1][-1] is None
    assert rows[2][-1] == 10**6


def test_siblings_and_the_parent_are_blind_to_a_child() -> None:
    trace = parse("a<fork/><child>b</child>c<fork/><child>d</child>e").trace
    a, b, c, d, e = trace.segments
    assert not any(visible(q, 0, b, 0) for q in (c, d, e))
    assert not visible(b, 0, c, 0)
    assert visible(d, 0, c, len(c) - 1)
    assert visible(e, 0, a, 0)
