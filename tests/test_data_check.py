"""Annotated texts: taken apart and mended, checked by rule, made from structure, counted."""

from __future__ import annotations

import re

import pytest
from data_kit import LIST, checker, read_json_lines, structure, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.annotators import Annotation, Refusal, get_annotator
from stretto.data.check import Checker, check_file
from stretto.data.markup import (
    chunks_of,
    holds_tags,
    promised,
    relengthed,
    stripped,
    transplanted,
    write_chunk,
)
from stretto.data.rows import Annotated, Answer, prompt_id
from stretto.data.stats import Facts, facts_of, geomean, histogram, most_threads, summary
from stretto.data.structure import Structure
from stretto.data.teacher_demos import DEMONSTRATIONS
from stretto.dialects.pasta import PastaSettings
from stretto.errors import UnknownName
from stretto.trace import LiveTokens, is_drawn

TEXT = "Intro:\n\nThe first part is long enough.\nThe second part is, too.\n\nBoth."
MARKED = (
    'Intro:<promise topic="first" tokens="10"/><async>\n\nThe first part is long enough.</async>'
    '<promise topic="second" tokens="10"/><async>\nThe second part is, too.</async>'
    "<sync/>\n\nBoth."
)


# -- markup ----------------------------------------------------------------------------------------


def test_a_text_is_taken_apart_and_written_again():
    assert stripped(MARKED) == TEXT
    assert [(c.topic, c.tokens) for c in chunks_of(MARKED)] == [("first", 10), ("second", 10)]
    assert relengthed(MARKED, lambda text: 10) == MARKED
    again = relengthed(MARKED.replace("/><async>", " /><async>"), len)
    assert [c.tokens for c in chunks_of(again)] == [40, 30]
    assert stripped(again) == TEXT


def test_a_topic_with_a_quote_stays_one_when_lengths_are_counted_anew():
    again = relengthed('<promise topic=\'say "x"\' tokens="30"/><async>a b c</async>', len)
    assert [(c.topic, c.tokens) for c in chunks_of(again)] == [('say "x"', 10)]
    assert any(r.startswith("topic-with-quote") for r in checker().reasons("a b c", again))


def test_a_promise_without_a_chunk_is_left_out_when_lengths_are_counted_anew():
    text = 'a<promise topic="x" tokens="10"/> b<sync/> c'
    assert relengthed(text, len) == "a b<sync/> c"


@pytest.mark.parametrize(
    ("tokens", "unit", "length"),
    [(0, 10, 10), (1, 10, 10), (10, 10, 10), (11, 10, 20), (2041, 10, 2048), (9999, 1, 2048)],
)
def test_lengths_are_rounded_up_and_stay_valid(tokens, unit, length):
    assert promised(tokens, unit) == length


@pytest.mark.parametrize("text", ["<sync/>", "a</async>", '<promise topic="x"/>'])
def test_tags_in_a_plain_text_are_seen(text):
    assert holds_tags(text)


def test_what_only_looks_like_a_tag_is_text():
    assert not holds_tags("<Sync/> <promise <async")


TRANSPLANTS = {
    "CRLF": (TEXT.replace("\n", "\r\n"), MARKED),
    "other spaces": (TEXT.replace(" part", "  part"), MARKED),
    "spaces at both ends": (f" \n{TEXT}\n\n", MARKED),
    "chunks on lines of their own": (
        TEXT,
        re.sub(r"<async>\s*(.*?)</async>", r"<async>\n\1\n</async>\n", MARKED, flags=re.DOTALL),
    ),
    "no line breaks at all": (TEXT, MARKED.replace("\n", "")),
}


@pytest.mark.parametrize(("response", "marked"), TRANSPLANTS.values(), ids=list(TRANSPLANTS))
def test_marks_move_to_a_response_that_differs_in_whitespace(response, marked):
    text = transplanted(marked, response)
    assert stripped(text) == response
    chunks = [c.content.strip() for c in chunks_of(text)]
    assert chunks == [" ".join(c.split()) if "  " not in response else c for c in chunks]
    assert [c.replace("  ", " ") for c in chunks] == [
        "The first part is long enough.",
        "The second part is, too.",
    ]
    assert text.index("<sync/>") < text.index("Both")


def test_marks_do_not_move_to_another_text():
    assert transplanted(MARKED, TEXT + "!") is None
    assert transplanted(MARKED.replace("long", "l0ng"), TEXT) is None


spaces = st.text(" \n\t\r\u2003", max_size=3)
words = st.lists(st.text("ab.é<", min_size=1, max_size=4), min_size=1, max_size=8)


@given(words, st.data())
def test_moved_marks_never_change_a_response(parts, data):
    tags = st.sampled_from(["", write_chunk("t", 10, "chunk"), "<sync/>"])
    marked = "".join(data.draw(spaces) + p + data.draw(tags) for p in parts)
    solid = stripped(marked)
    response = "".join(c + data.draw(spaces) for c in solid if not c.isspace())
    moved = transplanted(marked, response)
    assert moved is not None
    assert stripped(moved) == response
    assert len(chunks_of(moved)) == len(chunks_of(marked))
    assert moved.count("<sync/>") == marked.count("<sync/>")


# -- check -----------------------------------------------------------------------------------------


def test_a_good_annotation_has_no_fault():
    assert checker().reasons(TEXT, MARKED) == []
    assert checker().reasons(TEXT, TEXT) == []


LONG = "many words in one " * 40
FAULTS = {
    "text-differs": (TEXT, MARKED.replace("Both", "both")),
    "text-differs: at 7": ("a\r\nb c d", "a\r\nb c D"),
    "unclosed-async": (TEXT, MARKED.replace("</async><sync/>", "")),
    "nested-promise": ("ab", write_chunk("x", 10, "a<sync/>b")),
    "promise-without-async": ("a", '<promise topic="x" tokens="10"/>a<sync/>'),
    "async-without-promise": ("a", "<async>a</async>"),
    "missing-topic": ("a", '<promise tokens="10"/><async>a</async>'),
    "bad-tokens": ("a", '<promise topic="x" tokens="0"/><async>a</async>'),
    "empty-chunk": (" a", write_chunk("x", 10, " ") + "a"),
    "topic-too-long": ("a", write_chunk("z" * 20, 10, "a")),
    "topic-with-quote": ("a", '<promise topic=\'say "x"\' tokens="10"/><async>a</async>'),
    "chunk-too-long": (LONG, write_chunk("x", 10, LONG)),
    "too-many-promises": ("a" * 65, write_chunk("x", 10, "a") * 65),
    "too-many-promises: 20000": ("a" * 20_000, write_chunk("x", 10, "a") * 20_000),
    "empty-response": (" \n", " \n"),
    "tags-in-response": ("write <sync/> here", "write <sync/> here"),
    "not-encodable": ("a\ud800", "a\ud800"),
}


@pytest.mark.parametrize(("code", "texts"), FAULTS.items(), ids=list(FAULTS))
def test_each_fault_is_told_by_its_code(code, texts):
    reasons = checker().reasons(*texts)
    assert any(reason.startswith(code) for reason in reasons), reasons


def test_a_chunks_cap_is_that_of_its_promise_in_the_units_at_hand():
    """30 tokens are promised as 40 where the unit is 40, of which the cap is 4 x 40 + 32."""
    own = Checker(checker().vocabulary, settings=PastaSettings(unit=40))
    text = " word" * 180
    marked = write_chunk("x", 30, text)
    assert 4 * 30 + 32 < own.count(text) + 1 <= 4 * 40 + 32
    assert own.reasons(text, marked) == []
    assert checker().reasons(text, marked)[0].startswith("chunk-too-long")


def test_text_with_tags_of_other_dialects_is_text():
    text = "use <reg_1> and <fork/> and [MASK]"
    assert checker().reasons(text, text) == []


def test_the_runtimes_masks_are_the_judges_of_single_tokens():
    """A token that no state allows is told even where no other rule sees it."""
    own = checker()
    trace = own.parse(MARKED).trace
    assert own._illegal(trace) == []
    legal = own._sessions.__closure__
    assert legal is not None
    drawn = {t for s in trace.response for t, o in zip(s.tokens, s.origins, strict=True)
             if is_drawn(o) and t not in own.vocabulary.control.values()}  # fmt: skip
    masks = next(c.cell_contents for c in legal if hasattr(c.cell_contents, "child"))
    token = next(t for t in trace.of_thread("main.2")[0].tokens if t in drawn)
    masks.child.mask[token] = False
    try:
        assert own._illegal(trace)[0].startswith("illegal-token")
    finally:
        masks.child.mask[token] = True


def annotated(response: str, marked: str, prompt: str = "q", **changes: object) -> dict:
    row = Annotated(
        prompt_id=prompt_id(prompt), prompt=prompt, response=response, annotated=marked,
        annotator="structure",
    )  # fmt: skip
    return row.model_dump(exclude_none=True) | changes


def test_a_file_is_checked_row_by_row_with_line_numbers(tmp_path):
    good = annotated(TEXT, MARKED)
    rows = [good, good, annotated(TEXT, MARKED, "p", prompt_id="0" * 16), {"prompt_id": "1"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    faults = list(check_file(path, checker()))
    assert faults[0] is None
    codes = [[r.partition(":")[0] for r in fault.reasons] for fault in faults[1:]]
    assert codes == [["repeated"], ["wrong-prompt-id"], ["no-annotated-row"]]
    assert [fault.line for fault in faults[1:]] == [2, 3, 4]
    assert len(read_json_lines(path)) == 4


# -- structure -------------------------------------------------------------------------------------


def annotate(text: str, **options: object) -> Annotation:
    own = Structure(checker().count, **options) if options else structure()
    result = own.annotate("", text)
    assert isinstance(result, Annotation)
    assert checker().reasons(text, result.text) == []
    return result


def topics(text: str, **options: object) -> list[str]:
    return [chunk.topic for chunk in chunks_of(annotate(text, **options).text)]


def test_items_are_promised_and_a_conclusion_waits_for_them():
    result = annotate(LIST)
    assert [c.topic for c in chunks_of(result.text)] == ["1. Sleep", "2. Water", "3. Walks"]
    assert result.text.startswith("Three things help:<promise")
    assert "</async><sync/>\n\nIn conclusion" in result.text
    assert result.details == {"by": "items", "promises": 3}
    for chunk in chunks_of(result.text):
        own = checker().count(chunk.content)
        assert 0 <= chunk.tokens - own < 10


def test_short_items_are_grouped_and_a_rest_joins_the_last_group():
    items = "".join(f"- thing {n} of it\n" for n in range(12))
    result = annotate(f"Things:\n\n{items}")
    groups = [checker().count(c.content) for c in chunks_of(result.text)]
    assert len(groups) > 1
    assert min(groups) >= 20
    assert all(";" in c.topic for c in chunks_of(result.text))


@pytest.mark.parametrize("text", ["Just one sentence.", "- a\n- b\n- c", "A.\n\nB.", "```\nx\n```"])
def test_nothing_worth_it_is_promised_in_short_texts(text):
    assert annotate(text).text == text


SENTENCE = "This part is about {} and says at some length what there is to say about it here."


def test_paragraphs_are_promised_with_their_code_and_a_conclusion_stays():
    code = "```python\nfor i in range(3):\n\n    print(i)\n```"
    text = "\n\n".join([SENTENCE.format("one"), SENTENCE.format("two"), code, "Overall, fine."])
    result = annotate(text)
    chunks = chunks_of(result.text)
    assert [c.content.strip().endswith(e) for c, e in zip(chunks, ("here.", "```"), strict=True)]
    assert code in chunks[1].content
    assert result.text.endswith("<sync/>\n\nOverall, fine.")


def test_sections_or_items_whichever_takes_fewer_steps():
    tips = "".join(f"- {SENTENCE.format(n)}\n" for n in ("one", "two", "three"))
    sections = f"# Guide\n\n## Pros\n{tips}\n## Cons\n{tips}\n## Conclusion\nBuy it."
    assert annotate(sections).details["by"] == "items"
    few = "".join(f"- thing {n} of it\n" for n in range(5))
    result = annotate(f"## Pros\n{few}\n## Cons\n{few}\n## Conclusion\nBuy it.")
    assert result.details == {"by": "sections", "promises": 2}
    assert [c.topic for c in chunks_of(result.text)] == ["Pros", "Cons"]
    assert "<sync/>\n\n## Conclusion" in result.text


def test_a_topic_has_no_quote_no_line_break_and_fits():
    items = "".join(
        f'- "Quoted" `{n}` and a very long name of a thing that goes on and on: '
        f"{SENTENCE.format(n)}\n"
        for n in range(3)
    )
    for topic in topics(items):
        assert not set(topic) & set('"\r\n`')
        assert 0 < checker().count(topic) <= 16


def test_more_items_than_can_be_forked_are_grouped():
    items = "".join(f"- {SENTENCE.format(n)}\n" for n in range(90))
    assert 1 < len(topics(items)) <= 32


def test_several_lists_do_not_come_to_more_promises_than_are_forked():
    items = "".join(f"- {SENTENCE.format(n)} {SENTENCE.format(n)}\n" for n in range(30))
    result = annotate("\n".join(f"List {n}:\n\n{items}" for n in range(4)))
    assert result.details["by"] == "items"
    assert 32 < result.details["promises"] <= 64


def test_text_that_cannot_be_encoded_is_refused():
    assert isinstance(structure().annotate("", "a\ud800" + LIST), Refusal)


lines = st.sampled_from(
    ["# Head", "## Sub", "**Bold**", "Intro:", "- item one with a few more words", "1. first",
     "   nested text", "```", "| a | b |", "", "", "Plain words go here, more of them.",
     "In conclusion, it ends.", SENTENCE.format("x"), "<promise <async", "日本語 text", "a\r"],
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(lines, max_size=14), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_whatever_the_form_the_annotation_passes_the_check(parts, end):
    text = end.join(parts)
    if text.strip():
        annotate(text, min_tokens=5)


def test_annotators_are_found_by_name():
    assert get_annotator("structure", {"count": len}).name == "structure"
    with pytest.raises(UnknownName, match="did you mean 'structure'"):
        get_annotator("structur", {})


def test_the_teachers_examples_keep_to_the_rules():
    assert len(DEMONSTRATIONS) == 7
    for demo in DEMONSTRATIONS:
        assert checker().reasons(demo.response, demo.annotated) == []
        for chunk in chunks_of(demo.annotated):
            assert checker().count(chunk.content) >= 20
            assert 2 <= len(chunk.topic.split()) <= 6
    marks = [demo.annotated.count("<sync/>") for demo in DEMONSTRATIONS]
    chunks = [len(chunks_of(demo.annotated)) for demo in DEMONSTRATIONS]
    assert 0 in chunks
    assert any(m and c > 3 for m, c in zip(marks, chunks, strict=True))


# -- stats -----------------------------------------------------------------------------------------


def test_figures_of_a_row_are_those_of_its_trace():
    row = Annotated.model_validate(annotated(TEXT, MARKED))
    facts = facts_of(row, checker())
    trace = checker().parse(MARKED).trace
    assert facts.num_tokens == checker().count(TEXT)
    assert facts.steps == trace.critical_path_steps
    assert facts.speedup == pytest.approx(checker().count(TEXT) / trace.critical_path_steps)
    first = checker().count("\n\nThe first part is long enough.")
    second = checker().count("\nThe second part is, too.")
    assert facts.chunks == ((10, first), (10, second))
    assert facts.num_chunk_tokens == first + second
    assert (facts.num_syncs, facts.num_idle_syncs) == (1, 0)
    assert facts.threads == most_threads(trace) > 1


def test_a_sampled_answer_has_the_figures_of_its_text():
    trace = checker().parse(MARKED).trace
    ids = [t for s in trace.response for t in s.tokens]
    answer = Answer(
        prompt_id="0" * 16, text=TEXT, finish_reason="stop", ids=ids, origins="s" * len(ids),
        num_prompt_tokens=1, sequential_steps=1, completion_tokens=trace.num_text_tokens,
        control_tokens=0,
    )  # fmt: skip
    facts = facts_of(answer, checker())
    same = facts_of(Annotated.model_validate(annotated(TEXT, MARKED)), checker())
    assert (facts.chunks, facts.steps, facts.num_syncs) == (same.chunks, same.steps, 1)


def test_a_sync_that_joins_nothing_is_idle():
    row = Annotated.model_validate(annotated("a b", "a<sync/> b<sync/>"))
    facts = facts_of(row, checker())
    assert (facts.num_syncs, facts.num_idle_syncs) == (2, 2)


def test_the_summary_of_known_rows_is_known():
    plain = Facts(10, 10, 1.0, 1, 0, 0, (), 0, LiveTokens(7.5, 12, 5.5, 10, 7.5))
    quick = Facts(40, 10, 3.5, 4, 1, 0, ((20, 10), (10, 30)), 20, LiveTokens(15, 40, 15, 40, 20))
    result = summary([plain, quick])
    assert result["live_tokens"] == {"mean": 10.25, "peak": 40, "dense": 13.75}
    assert result["rows"] == 2
    assert (result["with_promises"], result["two_threads_or_more"]) == (1, 1)
    assert result["speedup"]["geomean"] == pytest.approx(2.0)
    assert result["speedup"]["mean"] == pytest.approx(2.5)
    assert result["length_ratio"]["max"] == 3.0
    assert result["longer_than_promised"] == 1
    assert result["in_chunks"] == pytest.approx(0.4)
    assert result["promises_per_row"] == {"0": 1, "2": 1}
    assert result["speedup_histogram"]["1-1.25"] == 1
    assert result["speedup_histogram"]["4-6"] == 1
    assert sum(result["speedup_histogram"].values()) == 2


def test_figures_of_no_rows_are_zeros():
    assert summary([])["speedup"]["geomean"] == 0.0
    assert geomean([0.0]) == 0.0
    assert histogram([0.5, 6.0, 99.0]) | {} == histogram([99.0, 0.5, 6.0])
