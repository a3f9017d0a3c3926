"""APAR's data rules: the cases of its published scripts, and that no byte is lost."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.annotators import ANNOTATORS, Annotation, Refusal, get_annotator
from stretto.data.apar_rules import (
    AparRules,
    list_details,
    paragraph_details,
    why_dropped,
)
from stretto.dialects.apar import TAG_FORMS, AparSettings
from stretto.dialects.apar_text import parse_text
from stretto.dialects.words import WordsVocabulary

LIST = """Three habits:

1. **Eat**: a warm meal at noon.
2. Sleep\uff1a eight hours, in the dark.
3. Move:
   half an hour of walking.

Start with one of them."""

PARAGRAPHS = """Tea is made of leaves. They are dried first.

  Water is what it needs most.  It must not boil for long. Wait a little.

Milk is a matter of taste.

Sugar was once a luxury. Now it is in all we eat. """


def annotate(response: str) -> Annotation:
    found = AparRules().annotate("why?", response)
    assert isinstance(found, Annotation)
    return found


def details(response: str) -> list[str]:
    """The details by whichever rule holds."""
    found = list_details(response)
    spans = paragraph_details(response) if isinstance(found, str) else found
    return [] if isinstance(spans, str) else [response[a:b] for a, b in spans]


def test_a_list_becomes_forks() -> None:
    assert annotate(LIST) == Annotation(
        """Three habits:

1. **Eat**:<fork/><child> a warm meal at noon.</child>
2. Sleep\uff1a<fork/><child> eight hours, in the dark.</child>
3. Move:<fork/><child>
   half an hour of walking.</child>

Start with one of them.""",
        {"rule": "list", "forks": 3},
    )


def test_paragraphs_become_forks_after_their_first_sentence() -> None:
    assert annotate(PARAGRAPHS) == Annotation(
        """Tea is made of leaves. <fork/><child>They are dried first.</child>

  Water is what it needs most.  <fork/><child>It must not boil for long. Wait a little.</child>

Milk is a matter of taste.

Sugar was once a luxury. <fork/><child>Now it is in all we eat.</child> """,
        {"rule": "paragraphs", "forks": 3},
    )


def items(*details: str, end: str = "") -> str:
    return "\n".join(f"{n}. Point {n}:{d}" for n, d in enumerate(details, 1)) + end


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (items(" one two three", " four five six"), "list: 2 items, fewer than 3"),
        (items(" 345678910", " 3456789", " 345678910"), "a detail of 8 characters, fewer than 10"),
        (items(" 345678910", " 345678910", ""), "a detail of 0 characters"),
        (items(" 345678910", " 345678910", "\n\n"), "a detail of 0 characters"),
        (items(" 345678910", " 345678910", " 345678910\n 4. none"), "a numbered line inside"),
        (items(" 345678910\n2. none", " 345678910", " 345678910"), "a numbered line inside"),
        (items(*[" 345678910"] * 3, end="\n\n4. none"), "a numbered line after the last item"),
        ("- a: 1234567890\n- b: 1234567890\n- c: 1234567890", "0 items"),
        ("See 1. a: 1234567890 2. b: 1234567890 3. c: 1234567890", "0 items"),
        ("1) a: 1234567890\n2) b: 1234567890\n3) c: 1234567890", "0 items"),
        ("1. a 1234567890\n2. b 1234567890\n3. c 1234567890", "0 items"),
    ],
)
def test_what_is_no_list(response: str, why: str) -> None:
    found = list_details(response)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (items(*[" 345678910"] * 3), [" 345678910"] * 3),
        (items(*[" 345678910"] * 3, end="\n\n\n"), [" 345678910"] * 3),
        (items(*[" 345678910"] * 3, end="\n\nDone: yes."), [" 345678910"] * 3),
        (items(" 345678910\n", " 345678910 \n\n", " 345678910"),
         [" 345678910", " 345678910 ", " 345678910"]),
        (items(" 3:5678910", " 3456 1. 10", " 345678910"),
         [" 3:5678910", " 3456 1. 10", " 345678910"]),
        ("  1. a: 345678910\r\n 2.  b: 345678910\r\n\t10. c: 345678910\r\n",
         [" 345678910"] * 3),
        (items("\n\n45678910", " 345678910", "\n\n45678910"),
         ["\n\n45678910", " 345678910", "\n\n45678910"]),
    ],
)  # fmt: skip
def test_where_details_begin_and_end(response: str, expected: list[str]) -> None:
    assert details(response) == expected


@pytest.mark.parametrize("response", [LIST, PARAGRAPHS, items("\n\n45678910", *[" 345678910"] * 3)])
def test_line_ends_of_another_system_change_nothing(response: str) -> None:
    found = annotate(response.replace("\n", "\r\n"))
    expected = annotate(response)
    assert found.text.replace("\r\n", "\n") == expected.text
    assert found.details == expected.details


def test_a_response_of_line_ends_is_read_in_no_time() -> None:
    """What looked for a number from each of them took as long as their number squared."""
    response = items(" 345678910", " 3456" + "\n" * 60_000 + "789", " 345678910")
    started = time.process_time()
    assert annotate(response).details["forks"] == 3
    assert time.process_time() - started < 2


TWO = "The first of them is long. The second."
ONE = "This one has no second sentence."


@pytest.mark.parametrize(
    ("paragraphs", "why"),
    [
        ([TWO, TWO], "2, fewer than 3"),
        ([TWO, TWO, "  "], "2, fewer than 3"),
        ([TWO, TWO, ONE], "2 of several sentences, fewer than 3"),
        ([TWO, TWO, TWO, "Short one."], "one begins with 10 characters, fewer than 20"),
        ([TWO, TWO, TWO, "Yes. It is a long one."], "one begins with 4 characters"),
        ([TWO, TWO, TWO, "1. A thing in a list of more."], "one begins with 2 characters"),
        ([TWO, TWO, TWO, "Here comes Mr. Brown at last."], "'Mr.' looks like"),
        ([TWO, TWO, TWO + " It was MRS. Brown."], "'MRS.' looks like"),
        ([TWO, TWO, TWO, "The hat of dr. Brown is the right one."], "'dr.' looks like"),
    ],
)
def test_what_are_no_paragraphs(paragraphs: list[str], why: str) -> None:
    found = paragraph_details("\n\n".join(paragraphs))
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize("one", [ONE, "This is version 1.5 of a long sentence.", "A" * 20])
def test_a_paragraph_of_one_sentence_stays_whole(one: str) -> None:
    assert details("\n\n".join([TWO, one, TWO, TWO])) == ["The second."] * 3


def test_the_list_rule_comes_first_and_paragraphs_are_the_way_out() -> None:
    paragraphs = [f"{n}. Point number {n} is this one: it says so. And more" for n in (1, 2, 3)]
    assert annotate("\n\n".join(paragraphs)).details["rule"] == "list"
    texts = [TWO, TWO, TWO, "1. Alpha and beta and gamma: short"]
    assert annotate("\n\n".join(texts)).details["rule"] == "none"
    assert annotate("\n\n".join([TWO, TWO, TWO])).details["rule"] == "paragraphs"


@pytest.mark.parametrize(
    "mark", ["```", "$$", "x = 1", "a > b", "a < b", "---", "https://a.b", "茶", "テ", "차"]
)
def test_what_the_packing_drops_stays_as_it_is(mark: str) -> None:
    for response in (LIST, PARAGRAPHS):
        assert why_dropped(response) is None
        found = annotate(response + mark)
        assert found.text == response + mark
        assert found.details["rule"] == "none"
        assert found.details["forks"] == 0
        assert len(found.details["why"]) == 1


def test_why_neither_rule_holds_is_kept() -> None:
    found = annotate("Hello.")
    assert found == Annotation(
        "Hello.",
        {
            "rule": "none",
            "forks": 0,
            "why": ["list: 0 items, fewer than 3", "paragraphs: 1, fewer than 3"],
        },
    )


@pytest.mark.parametrize("tag", ["<fork/>", "<fork />", "<child>", "</child>"])
def test_a_response_with_a_tag_in_it_is_refused(tag: str) -> None:
    assert AparRules().annotate("", f"a {tag}") == Refusal(
        [f"tags-in-response: {tag!r} would be read as a tag"]
    )


def test_the_registry_has_it() -> None:
    assert "apar" in ANNOTATORS
    annotator = get_annotator("apar", {})
    assert isinstance(annotator, AparRules)
    assert annotator.name == "apar"


def test_torch_is_not_imported() -> None:
    code = "import stretto.data.apar_rules, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- for any response ------------------------------------------------------------------------------

PIECES = [
    "1. ", "2. ", "3. ", "\n1. ", "\n2. ", "\n3. ", "Point: ", "a\uff1ab", "word ",
    "long words here ", ". ", ".", "The first sentence is here. And another one", "\n",
    "\n\n", " \n\n ", "\r\n", " ", ":", "😀", "\u2028", "Mr. X", "<", "<fork/>", "</child>",
]  # fmt: skip
STRUCTURED = st.builds(
    lambda n, detail, gap, end: gap.join(f"{k}. Item {k}: {detail}" for k in range(1, n + 1)) + end,
    st.integers(0, 5),
    st.sampled_from(["short", "a detail that is long", "two\n\nparagraphs of it", "😀" * 12]),
    st.sampled_from(["\n", "\n\n", "\n \n"]),
    st.sampled_from(["", "\n", "\n\nThe end: it is over."]),
)
RESPONSES = st.one_of(
    st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join), STRUCTURED
)


@settings(deadline=None, max_examples=400)
@given(RESPONSES)
def test_without_annotations_it_is_the_response_byte_for_byte(response: str) -> None:
    found = AparRules().annotate("q", response)
    if isinstance(found, Refusal):
        assert any(tag in response for tag in ("<fork", "child>"))
        return
    parsed = parse_text(found.text, WordsVocabulary(TAG_FORMS), AparSettings())
    assert parsed.text == response
    assert not parsed.issues
    assert len(parsed.trace.threads) - 1 == found.details["forks"]
    assert found.details["forks"] == 0 or found.details["forks"] >= 3
    for thread in parsed.trace.threads[1:]:
        (child,) = parsed.trace.of_thread(thread.name)
        assert len(child) > 1
