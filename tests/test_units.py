"""Units: every byte of a response is in exactly one, and Markdown's shapes are seen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.topics import clean_topic, topic_of
from stretto.data.units import cut_units

PIECES = [
    "\n", "\n\n", " ", "  ", "\t", "\r\n", "# Title", "## Part", "**Bold line**", "**Name**: text",
    "1. one", "2) two", "- dash", "* star", "   - nested", "    deep", "```python\ncode\n```",
    "```", "~~~", "| a | b |", "|---|---|", "> quote", "Here it is:",
    "A sentence. Another one! A third?",
    "word " * 40, "Dr. Who met e.g. U.S. agents. They left.", "Step 3: do", "---", "***", "é漢字🎈",
    "\u2028", "\x0b", "a) x", ":", "**", "__x__", "[ ] box", "=", '"quoted"',
]  # fmt: skip
markdown = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=25).map(
    "".join
)


@settings(max_examples=150, deadline=None)
@given(markdown)
def test_units_partition_the_text(text: str) -> None:
    units = cut_units(text)
    assert "".join(text[u.start : u.end] for u in units) == (text if text.strip() else "")
    for index, unit in enumerate(units):
        assert unit.start <= unit.body < unit.end
        assert text[unit.start : unit.end].strip()
        assert index < unit.scope_end <= len(units)
        assert unit.is_lead or unit.scope_end == index + 1
    for before in units[:-1]:
        assert not text[before.start : before.end][-1:].isspace()


@settings(max_examples=100, deadline=None)
@given(markdown)
def test_topics_can_be_attributes(text: str) -> None:
    for unit in cut_units(text):
        topic = topic_of(text, unit)
        assert not set(topic.text) & set('"`\r\n\u2028')
        assert topic.text == topic.text.strip()
        assert unit.start <= topic.end <= unit.end


def cut(text: str) -> list[tuple[str, str, str]]:
    return [(u.kind, topic_of(text, u).text, text[u.start : u.end]) for u in cut_units(text)]


def test_a_list_with_an_opening_and_an_end() -> None:
    text = (
        "Some tips:\n\n1. **Fix leaks**: Soon.\n   - even small ones\n2. Turn it off.\n\nGood luck."
    )
    assert cut(text) == [
        ("lead", "Some tips", "Some tips:"),
        ("item", "Fix leaks", "\n\n1. **Fix leaks**: Soon.\n   - even small ones"),
        ("item", "Turn it off", "\n2. Turn it off."),
        ("paragraph", "Good luck", "\n\nGood luck."),
    ]
    assert [u.scope_end for u in cut_units(text)] == [3, 2, 3, 4]


def test_sections_reach_to_the_next_heading_of_their_level() -> None:
    text = "# All\n\n## One\nText.\n\n## Two\n\n- a thing\n\n# End\nBye."
    units = cut_units(text)
    assert [u.kind for u in units] == [
        "heading", "heading", "paragraph", "heading", "item", "heading", "paragraph",
    ]  # fmt: skip
    assert [u.scope_end for u in units] == [5, 3, 3, 5, 5, 7, 7]


@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_fences_stay_whole(fence: str) -> None:
    block = f"{fence}python\n# no heading\n\n1. no item\n{fence}"
    text = f"Look:\n\n{block}\n\nDone."
    assert cut(text) == [
        ("lead", "Look", "Look:"),
        ("fence", "python code", f"\n\n{block}"),
        ("paragraph", "Done", "\n\nDone."),
    ]


def test_an_unclosed_fence_goes_to_the_end() -> None:
    assert [u.kind for u in cut_units("A.\n\n```\n1. x\n\n2. y\n")] == ["paragraph", "fence"]


def test_tables_stay_whole_and_belong_to_an_item_that_asks_for_them() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    assert [u.kind for u in cut_units(f"Text.\n\n{table}\n\nMore.")] == [
        "paragraph", "table", "paragraph",
    ]  # fmt: skip
    assert [u.kind for u in cut_units(f"- These:\n\n{table}\n- More.")] == ["item", "item"]


def test_an_item_keeps_its_lines_and_paragraphs() -> None:
    text = "1. one\nlazy line\n\n   own paragraph\n\n2. two\n\nOut."
    assert [t for _, _, t in cut(text)] == [
        "1. one\nlazy line\n\n   own paragraph", "\n\n2. two", "\n\nOut.",
    ]  # fmt: skip


def test_long_paragraphs_are_cut_at_sentences_and_not_at_abbreviations() -> None:
    sentence = (
        "Dr. Smith went to the old house on the hill, and nobody there knew of him, e.g. Ann. "
    )
    text = sentence * 6
    units = cut_units(text)
    assert len(units) > 1
    assert {u.kind for u in units} == {"sentences"}
    for unit in units:
        assert text[unit.start : unit.end].strip().startswith("Dr. Smith")


def test_a_lead_without_anything_after_it_is_a_paragraph() -> None:
    assert [u.kind for u in cut_units("Text.\n\nAnd so:")] == ["paragraph", "paragraph"]


def test_names_are_topics_and_other_topics_have_no_weak_end() -> None:
    assert cut("- **Rust**: fast")[0][1] == "Rust"
    assert cut("- Bees – they fly")[0][1] == "Bees"
    assert cut("- Ask the people of your town for some help")[0][1] == "Ask the people of your town"
    assert cut("- Look at this and that and more")[0][1] == "Look"
    assert cut("漢" * 60)[0][1] == "漢" * 12


def test_clean_topic_drops_what_an_attribute_cannot_hold() -> None:
    assert clean_topic(' **A "b"**\n`c`: ') == "A b c"


def test_long_inputs_take_linear_time() -> None:
    import time

    start = time.perf_counter()
    for text in ("- " * 20000, "**" * 20000, "1. a\n" * 5000, "\n " * 20000, "a. B " * 20000):
        cut_units(text)
    assert time.perf_counter() - start < 5
