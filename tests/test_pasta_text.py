"""Annotated text to traces: the lexer, the automaton, what a trace costs, and the way back."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.dialects import get_dialect
from stretto.dialects.base import Parsed
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.pasta_text import parse_ids, parse_text, to_text
from stretto.dialects.tags import TAG_FORMS, text_tags
from stretto.dialects.words import WordsVocabulary
from stretto.errors import UnknownName
from stretto.trace import Trace, live_tokens, visible

PREDICTED = PastaSettings()


def parse(text: str, prompt: str = "", how: PastaSettings = PREDICTED) -> Parsed:
    return parse_text(text, WordsVocabulary(TAG_FORMS), how, prompt)


def issues(text: str) -> list[tuple[str, int]]:
    return [(issue.code, issue.at) for issue in parse(text).issues]


def promised(text: str) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(t.topic, t.length, t.issues) for t in text_tags(text, 10) if t.kind == "promise"]


# -- lexer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<promise topic="a b" tokens="30"/>',
        "<promise topic='a b' tokens='30'/>",
        '<promise tokens=30 topic="a b"/>',
        '<promise topic="a b" tokens="30" />',
        "<promise\n\ttopic='a b'\r\n tokens=0021/>",
        '<promise topic="a b" topic="c" tokens="21" tokens="x"/>',
        '<promise id=7 topic="a b" Topic="c" tokens="30"/>',
    ],
)
def test_ways_to_write_a_promise(text: str) -> None:
    assert promised(text) == [("a b", 30, ())]


@pytest.mark.parametrize(
    "text",
    [
        '<promise topic="x">',
        '<promise topic="x" tokens="30">',
        '<Promise topic="x" tokens="30"/>',
        '<promise topic="x\ny" tokens="30"/>',
        '<promise topic="x\ry" tokens="30"/>',
        '<promise topic = "x" tokens="30"/>',
        '<promise topic="x"tokens="30"/>',
        '<promise topic="x" tokens=/>',
        '<promise topic="x" tokens/>',
        '<promise topic="x',
        "<promised/>",
        "<Sync/> <sync> </sync> <sync/ > < sync/> <ASYNC> </async > <reg_1> [MASK] [PAD]",
    ],
)
def test_what_is_no_tag_is_text_without_an_issue(text: str) -> None:
    parsed = parse(text)
    assert parsed.text == text
    assert not parsed.issues
    assert parsed.trace.num_text_tokens == parsed.trace.num_tokens


@pytest.mark.parametrize(
    ("value", "length"), [("1", 10), ("10", 10), ("11", 20), ("2041", 2050), ("2048", 2050)]
)
def test_lengths_are_rounded_up(value: str, length: int) -> None:
    assert promised(f"<promise topic=x tokens={value}/>") == [("x", length, ())]


@pytest.mark.parametrize(
    "value", ["", "0", "000", "2049", "-3", "+3", "3.0", "3 ", "0x3", "٣", "³", "9" * 10_000]
)
def test_bad_tokens_count_as_fifty(value: str) -> None:
    text = f'<promise topic=x tokens="{value}"/>'
    assert promised(text) == [("x", 50, ("bad-tokens",))]
    assert (
        parse(text).trace.segments[0].tokens
        == parse("<promise topic=x tokens=50/>").trace.segments[0].tokens
    )


def test_tags_inside_a_value_are_part_of_it_and_those_in_broken_tags_are_not() -> None:
    assert promised("<promise topic='<sync/> a=\"b\" />' tokens=10/>")[0][0] == '<sync/> a="b" />'
    kinds = [t.kind for t in text_tags('<promise topic="<sync/>" tokens=<promise/>', 10)]
    assert kinds == ["sync", "promise"]


@pytest.mark.parametrize(
    "unit",
    [
        '<promise a="',
        "<promise ",
        " a=1",
        """ q=" <promise r='" s="' t=\"""",
        "<async>",
        "word ",
        " ",
        "<",
    ],
)
def test_a_lot_of_anything_is_quick(unit: str) -> None:
    started = time.perf_counter()
    parse("<promise" + unit * (300_000 // len(unit)))
    assert time.perf_counter() - started < 5


# -- automaton ---------------------------------------------------------------------------------

X = "<promise topic=x tokens=10/>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<promise/>", [("missing-topic", 0), ("bad-tokens", 0), ("promise-without-async", 0)]),
        (f"{X}<async>a", [("unclosed-async", 28)]),
        ("a<async>b</async>c", [("async-without-promise", 1)]),
        ("a</async>", [("async-without-promise", 1)]),
        ("<async><async></async></async>", [("async-without-promise", at) for at in (0, 7, 22)]),
        (f"{X}<async>a<sync/>b</async>", [("nested-promise", 36)]),
        (f"{X}<async>{X}</async>", [("nested-promise", 35)]),
        (f"{X}<async><promise/></async>", [("nested-promise", 35)]),
        (f"{X}<async>a<async>b</async>c</async>", [("nested-promise", 36)]),
        (f"{X}<sync/><async>", [("promise-without-async", 0), ("async-without-promise", 35)]),
        (f"{X}{X}<async>a</async>", [("promise-without-async", 28)]),
        (f"{X}<async></async><sync/><sync/>", []),
        ("<sync/>", []),
        ("", []),
    ],
)  # fmt: skip
def test_issues_and_where_they_are(text: str, expected: list[tuple[str, int]]) -> None:
    assert issues(text) == expected


def test_a_literal_tag_joins_the_text_on_both_sides() -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    parsed = parse_text(f"a<async>b{X}<async>c<sync/>d e</async>f", vocabulary, PREDICTED)
    pieces = [[vocabulary.decode([t]) for t in s.tokens] for s in parsed.trace.segments]
    assert pieces[0][0] == "a<async>b"
    assert pieces[1] == ["<async>", "c<sync/>d", " e", "</async>"]
    assert pieces[2] == ["f"]
    assert parsed.text == "a<async>bc<sync/>d ef"


def test_a_promise_without_a_block_keeps_its_number_and_its_places() -> None:
    trace = parse(f"{X}<sync/>{X}<async>a</async>b").trace
    assert [t.name for t in trace.threads] == ["main", "main.2"]
    first, second, child, last = trace.segments
    assert first.positions == (0, 1, 2, 3, 4)
    assert second.positions[0] == 5 + 10
    assert child.thread == "main.2"
    assert last.positions == (second.positions[-1] + 11,)


def test_offsets_count_code_points_and_line_ends_stay() -> None:
    text = "😀\r\n</async>\r"
    assert issues(text) == [("async-without-promise", 3)]
    assert parse(text).text == text


def test_an_open_block_ends_with_the_text() -> None:
    trace = parse(f"{X}<async>a b").trace
    assert len(trace.segments[1]) == 3
    assert parse(f"{X}<async>a b").text == "a b"


# -- cost --------------------------------------------------------------------------------------


def brute_critical_path(trace: Trace) -> int:
    """The formula of the design: main by steps, a child from its promise, a sync after all."""
    p, sync = (list(TAG_FORMS).index(name) for name in ("promise_end", "sync"))
    content = {t.name: sum(len(s) for s in trace.of_thread(t.name)) - 1 for t in trace.threads}
    step, numbers, ends, last = 0, 0, [], 0
    for segment in trace.response:
        if segment.thread != "main":
            continue
        for token, markup in zip(segment.tokens, segment.markup, strict=True):
            step += 1
            last = max(last, step)
            if markup and token == p:
                numbers += 1
                ends.append(step + content.get(f"main.{numbers}", 0))
            if markup and token == sync:
                step = max([step, *ends])
    return max([last, *ends])


def brute_lives(trace: Trace) -> list[int]:
    return [
        sum(
            visible(query, i, key, j)
            for key in trace.segments
            if key.id == query.id or key.id in query.sees
            for j in range(len(key))
        )
        for query in trace.response
        for i in range(len(query))
    ]


FRAGMENTS = [
    "<promise topic=\"a b\" tokens='30'/>", "<promise topic=c tokens=7 />", "<promise/>",
    "<promise topic='\"' tokens=\"x\"/>", "<promise topic=\"", '" tokens="', '"/>', "<async>",
    "</async>", "<async>", "</async>", "<sync/>", "<sync />", "<sync", "/>", "word", " two words",
    " ", "\r\n", "😀", "<Sync/>", "'", "[PAD]",
]  # fmt: skip
SOUPS = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)
POLICIES = st.builds(
    PastaSettings,
    policy=st.sampled_from(["predicted", "overlap", "fixed"]),
    unit=st.sampled_from([1, 10, 7]),
    max_positions=st.sampled_from([None, 100]),
)


@settings(deadline=None, max_examples=200)
@given(SOUPS, SOUPS, POLICIES)
def test_any_text_has_a_meaning(text: str, prompt: str, how: PastaSettings) -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    parsed = parse_text(text, vocabulary, how, prompt)
    trace = parsed.trace
    assert trace.critical_path_steps == brute_critical_path(trace)
    lives, live = brute_lives(trace), live_tokens(trace)
    assert live.peak == max(lives, default=0)
    assert live.mean == pytest.approx(sum(lives) / len(lives) if lives else 0)
    assert [i.at for i in parsed.issues] == sorted(i.at for i in parsed.issues)
    assert all(0 <= i.at < len(text) for i in parsed.issues)
    assert vocabulary.decode([t for s in trace.prompt for t in s.tokens]) == prompt
    assert [s.id for s in trace.segments] == list(range(len(trace.segments)))
    assert all(s.tokens for s in trace.segments)
    to_text(trace, vocabulary, how)


@settings(deadline=None, max_examples=200)
@given(SOUPS, POLICIES)
def test_ids_in_document_order_mean_the_same(text: str, how: PastaSettings) -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    parsed = parse_text(text, vocabulary, how, "the prompt")
    if any(i.code == "unclosed-async" for i in parsed.issues):
        return
    ids = [t for s in parsed.trace.response for t in s.tokens]
    prompt = [t for s in parsed.trace.prompt for t in s.tokens]
    again = parse_ids(prompt, ids, vocabulary, how)
    assert again.trace == parsed.trace
    assert again.text == parsed.text


@settings(deadline=None)
@given(st.text())
def test_text_without_tags_is_itself(text: str) -> None:
    assume(not list(text_tags(text, 10)))  # a string that the package itself holds may be drawn
    assert parse(text).text == text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 11), max_size=60), POLICIES)
def test_any_ids_have_a_meaning(ids: list[int], how: PastaSettings) -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    for piece in ("1", "03", "999", " a", '"', "\n"):
        vocabulary.encode(piece)
    parsed = parse_ids([7], ids, vocabulary, how)
    assert parsed.trace.critical_path_steps == brute_critical_path(parsed.trace)
    assert all(0 <= i.at < len(ids) for i in parsed.issues)
    to_text(parsed.trace, vocabulary, how)


# -- layouts and the way back ------------------------------------------------------------------

WORDS = st.lists(st.sampled_from([" a", " bb", "\n", " 😀"]), max_size=4).map("".join)
PROMISES = st.tuples(
    st.sampled_from(["", "x", "two words", 'a "quoted" one', "it's"]), st.integers(1, 2048), WORDS
)
DOCUMENTS = st.lists(st.one_of(WORDS, PROMISES, st.none()), max_size=12)


def tag(topic: str, tokens: int) -> str:
    quote = "'" if '"' in topic else '"'
    return f'<promise topic={quote}{topic}{quote} tokens="{tokens}"/>'


def write(document: list[str | tuple[str, int, str] | None], grouped: bool) -> str:
    """A document as text: blocks after their promises, or all before the next sync."""
    pieces, blocks = [], []
    for item in [*document, None]:
        if isinstance(item, str):
            pieces.append(item)
        elif item is None:
            pieces += [*blocks, "<sync/>"]
            blocks = []
        else:
            pieces.append(tag(*item[:2]))
            (blocks if grouped else pieces).append(f"<async>{item[2]}</async>")
    return "".join(pieces[:-1])


@settings(deadline=None, max_examples=150)
@given(DOCUMENTS, POLICIES)
def test_both_layouts_mean_the_same_and_text_is_what_is_left(
    document: list[str | tuple[str, int, str] | None], how: PastaSettings
) -> None:
    plain, grouped = write(document, False), write(document, True)
    vocabulary = WordsVocabulary(TAG_FORMS)
    parsed = parse_text(plain, vocabulary, how, "p")
    other = parse_text(grouped, vocabulary, how, "p")
    assert other.trace == parsed.trace
    assert other.text == parsed.text
    stripped = [d if isinstance(d, str) else d[2] for d in document if d is not None]
    assert parsed.text == "".join(stripped)
    assert {i.code for i in parsed.issues} <= {"clamped-tokens"}


@settings(deadline=None, max_examples=150)
@given(DOCUMENTS, POLICIES)
def test_a_trace_written_and_read_is_the_same(
    document: list[str | tuple[str, int, str] | None], how: PastaSettings
) -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    parsed = parse_text(write(document, True), vocabulary, how)
    text, offsets = to_text(parsed.trace, vocabulary, how)
    assert parse_text(text, vocabulary, how).trace == parsed.trace
    for (segment, index), offset in offsets.items():
        token = parsed.trace.segments[segment].tokens[index]
        if token == vocabulary.control["sync"]:
            assert text.startswith("<sync/>", offset)
        if token == vocabulary.control["promise"]:
            assert text.startswith("<promise", offset)


# -- the id form -------------------------------------------------------------------------------

P, TOK, END, ASYNC, ASYNC_END, SYNC = range(6)
A, THREE, BIG = 6, 7, 8


@pytest.mark.parametrize(
    ("ids", "num_threads", "expected"),
    [
        ([P, A, TOK, THREE, END, ASYNC, A, ASYNC_END], 2, []),
        ([P, TOK, THREE, THREE, END, ASYNC, ASYNC_END], 2, []),
        ([P, TOK, END, ASYNC, ASYNC_END], 2, [("bad-tokens", 0)]),
        ([P, TOK, BIG, END, ASYNC, ASYNC_END], 2, [("bad-tokens", 0)]),
        ([A, P, A], 1, [("unfinished-promise", 1)]),
        ([P, A, P, TOK, THREE, END, ASYNC, ASYNC_END], 2, [("unfinished-promise", 0)]),
        ([P, TOK, THREE, A], 1, [("unfinished-promise", 0)]),
        ([P, A, SYNC], 1, [("unfinished-promise", 0)]),
        ([A, TOK, END], 1, [("unfinished-promise", 1), ("unfinished-promise", 2)]),
    ],
)
def test_the_id_form(ids: list[int], num_threads: int, expected: list[tuple[str, int]]) -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    for piece in ("a", "3", "206"):
        vocabulary.encode(piece)
    parsed = parse_ids([], ids, vocabulary, PREDICTED)
    assert [(i.code, i.at) for i in parsed.issues] == expected
    assert len(parsed.trace.threads) == num_threads
    if num_threads == 1:
        assert parsed.text == vocabulary.decode([i for i in ids if i != SYNC])


def test_a_bad_number_keeps_its_ids_and_counts_as_fifty() -> None:
    vocabulary = WordsVocabulary(TAG_FORMS)
    big = vocabulary.encode("206")
    parsed = parse_ids([], [P, TOK, *big, END, ASYNC, ASYNC_END, *big], vocabulary, PREDICTED)
    assert parsed.trace.segments[0].tokens == (P, TOK, *big, END)
    assert parsed.trace.segments[2].positions == (4 + 50,)


# -- names -------------------------------------------------------------------------------------


def test_dialects_by_name() -> None:
    assert get_dialect("pasta").control_forms == TAG_FORMS
    assert get_dialect("plain").parse_text("a<sync/>", WordsVocabulary({}), PREDICTED, "").text
    with pytest.raises(UnknownName, match="did you mean 'pasta'"):
        get_dialect("pastaa")
