"""What main may say of a unit before it is written: its own name, or its own first words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto.data.units import Unit

TOPIC_WORDS = 6
NAME_WORDS = 8
LONGEST_TOPIC = 60
LONGEST_WORD = 24
"""Of a topic and of a word of it, in characters."""
_LEAD_IN = re.compile(
    r"""([^\n:]{1,80}?)(\*\*|__)?(:|\s[-–—]\s|(?<!vs)(?<!Dr)(?<!Mr)(?<!St)\.(?=\s)|\*\*|__)(\*\*|__)?"""
)
_WORD = re.compile(r"\S+")
_NUMBER = re.compile(r"\s*(?:>[ \t]*)?(?:#{1,6}[ \t]+)?(?:\*\*|__)?\(?(\d{1,3})[.)](?=\s)")
_WEAK_WORDS = (
    "a an and are as at be been but by can could for from has have he her his i if in into is it "
    "its may me my of on or our she should so such than that the their them then there these they "
    "this to was we were when where which while who will with would you your also because"
)
_WEAK = frozenset(_WEAK_WORDS.split())
_EDGE = " \t*_`#\"'“”‘’:;,.!?-–—"


@dataclass(frozen=True, slots=True)
class Topic:
    """A unit's own first words. `text`: as an attribute, no quotes, no line break, maybe empty.
    `end`: where they end in the response, their markup included. `is_name`: the text sets them
    off itself (bold, a colon, a heading, a short first sentence)."""

    text: str
    end: int
    is_name: bool


def topic_of(response: str, unit: Unit) -> Topic:
    """What main may say of a unit before it is written: its name, else its first words.

    At most `NAME_WORDS` words of a name, else `TOPIC_WORDS`, the last of them not weak.
    """
    line_end = response.find("\n", unit.body, unit.end)
    stop = unit.end if line_end < 0 else line_end
    if unit.kind == "fence":
        language = clean_topic(response[unit.body : stop].strip("`~ \t"))
        return Topic(f"{language} code".strip(), stop, True)
    found = _LEAD_IN.match(response, unit.body, stop)
    if unit.kind == "heading":
        name, end = response[unit.body : stop], stop
    elif found is not None:
        name, end = found[1], found.end()
    else:
        name, end = response[unit.body : stop], stop
    words = name.split()
    is_set_off = unit.kind == "heading" or found is not None
    is_name = is_set_off and len(words) <= NAME_WORDS
    is_name = is_name and len(name) <= LONGEST_TOPIC
    if is_name and (text := clean_topic(" ".join(words))):
        return Topic(text, end, True)
    return _first_words(response, unit.body, stop)


def numbered(topic: str, response: str, unit: Unit) -> str:
    """The topic of a numbered item with its number, which a child that sees no sibling cannot
    know, and which tells main how far it has come: `2. Sleep`."""
    found = _NUMBER.match(response, unit.start, unit.body)
    return f"{found[1]}. {topic}" if found is not None and topic else topic


def _first_words(response: str, start: int, stop: int) -> Topic:
    """The first words up to `TOPIC_WORDS`, weak ones at the end left out."""
    spans = [found.span() for found in _WORD.finditer(response, start, stop)][:TOPIC_WORDS]
    if spans and spans[0][1] - spans[0][0] > LONGEST_WORD:  # a script without spaces
        end = spans[0][0] + LONGEST_WORD // 2
        return Topic(clean_topic(response[start:end]), end, False)
    while len(spans) > 1 and spans[-1][1] - spans[0][0] > LONGEST_TOPIC:
        spans.pop()
    while len(spans) > 1 and is_weak_word(response[slice(*spans[-1])]):
        spans.pop()
    end = spans[-1][1] if spans else start
    return Topic(clean_topic(response[start:end]), end, False)


def is_weak_word(word: str) -> bool:
    """Whether a word says nothing by itself, so that no topic should begin or end with it."""
    bare = word.strip(_EDGE + "()[]{}").lower()
    return not bare or bare in _WEAK


def clean_topic(text: str) -> str:
    """Text as an attribute: markup, quotes and line breaks out, no mark at either end, brackets
    closed or left out."""
    text = re.sub(r"[\"`\r\n\v\f\x1c-\x1e\x85\u2028\u2029]|\*\*|__", " ", text)
    text = " ".join(text.split()).strip(_EDGE + " ")
    for opening, closing in ("()", "[]", "{}"):
        if text.count(opening) != text.count(closing):
            text = " ".join(text.replace(opening, " ").replace(closing, " ").split())
        elif text.startswith(opening) and text.endswith(closing):
            text = text[1:-1]
    return text.strip(_EDGE + " ")
