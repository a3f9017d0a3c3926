"""The tags `<promise/>`, `<async>`, `</async>`, `<sync/>`, shared by every dialect that has them.

Two lexers, of text and of ids, find the well-formed tags of a source; `outline` decides which of
them are legal. A tag is a slice of its source, so an illegal one stays part of the text around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.dialects.base import Issue, Vocabulary

PROMISE, TOKENS, PROMISE_END = "promise", "tokens", "promise_end"
ASYNC, ASYNC_END, SYNC = "async", "async_end", "sync"

TAG_FORMS: Mapping[str, str] = {
    PROMISE: '<promise topic="',
    TOKENS: '" tokens="',
    PROMISE_END: '"/>',
    ASYNC: "<async>",
    ASYNC_END: "</async>",
    SYNC: "<sync/>",
}
"""Names of the control tokens and their text forms."""

MAX_PROMISED_TOKENS = 2048
DEFAULT_PROMISED_TOKENS = 50

TagKind = Literal["promise", "async", "async_end", "sync"]


@dataclass(frozen=True, slots=True)
class Tag:
    """A well-formed tag: `source[start:end]`. For a promise: its topic, its length in tokens (a
    multiple of the unit), and what is wrong with either."""

    kind: TagKind
    start: int
    end: int
    topic: str = ""
    length: int = 0
    issues: tuple[str, ...] = ()


# -- lengths ---------------------------------------------------------------------------------------


def round_up(tokens: int, unit: int) -> int:
    """`tokens` rounded up to a multiple of `unit`."""
    return -(-tokens // unit) * unit


def max_units(unit: int) -> int:
    return -(-MAX_PROMISED_TOKENS // unit)


def read_number(digits: str, largest: int) -> int | None:
    """The value of a run of ASCII digits if it is from 1 to `largest` (below 10000), else None."""
    if not (digits.isascii() and digits.isdigit()):
        return None
    significant = digits.lstrip("0")
    if not significant or len(significant) > 4:
        return None
    value = int(significant)
    return value if value <= largest else None


# -- lexer of text ---------------------------------------------------------------------------------

_CANDIDATE = re.compile(r"<promise|<async>|</async>|<sync ?/>")
_PROMISE_END = re.compile(r" ?/>")
_ATTRIBUTE = re.compile(
    r"""\s++([^\s"'<>/=]++)=(?:"([^"\r\n]*+)"|'([^'\r\n]*+)'|((?:[^\s"'<>/]|/(?!>))++))"""
)
_SIMPLE: Mapping[str, TagKind] = {"<async>": "async", "</async>": "async_end"}


def text_tags(text: str, unit: int) -> Iterator[Tag]:
    """The well-formed tags of a text, in order, legal or not. Linear in the text's length."""
    dead: set[int] = set()
    at = 0
    while (found := _CANDIDATE.search(text, at)) is not None:
        start, at = found.span()
        if found.group() != "<promise":
            yield Tag(_SIMPLE.get(found.group(), "sync"), start, at)
        elif (promise := _promise_at(text, start, at, unit, dead)) is not None:
            at = promise.end
            yield promise


def _promise_at(text: str, start: int, at: int, unit: int, dead: set[int]) -> Tag | None:
    """The promise whose name ends at `at`, if the text goes on as one.

    `dead` holds the places between attributes from which no tag end can be reached. What follows
    such a place does not depend on where the tag began, so none is scanned twice.
    """
    values: dict[str, str] = {}
    passed: list[int] = []
    while at not in dead:
        passed.append(at)
        end = _PROMISE_END.match(text, at)
        if end is not None:
            return _promise(start, end.end(), values, unit)
        attribute = _ATTRIBUTE.match(text, at)
        if attribute is None:
            break
        name, *forms = attribute.groups()
        if name in ("topic", "tokens"):
            values.setdefault(name, next(v for v in forms if v is not None))
        at = attribute.end()
    dead.update(passed)
    return None


def _promise(start: int, end: int, values: Mapping[str, str], unit: int) -> Tag:
    issues = () if "topic" in values else ("missing-topic",)
    length = read_number(values.get("tokens", ""), MAX_PROMISED_TOKENS)
    if length is None:
        issues, length = (*issues, "bad-tokens"), DEFAULT_PROMISED_TOKENS
    return Tag("promise", start, end, values.get("topic", ""), round_up(length, unit), issues)


# -- lexer of ids ----------------------------------------------------------------------------------


class PromiseReader:
    """Reads promises in id form, one id at a time: PROMISE topic TOKENS number PROMISE_END.

    Ask `accepts` first; where it is False, what was read so far is no promise: `reset`, and read
    the id afresh. `count` is the number of ids read of the promise under way, 0 outside of one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names = {i: name for name, i in vocabulary.control.items()}
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self.in_number = False
        self.topic: list[int] = []
        self._digits: list[str] = []

    @property
    def digits(self) -> str:
        return "".join(self._digits)

    def name_of(self, token: int) -> str | None:
        """The name of a control token, of the tags or another; None for any other id."""
        return self._names.get(token)

    def accepts(self, token: int) -> bool:
        """Whether the id begins a promise or goes on with the one under way."""
        name = self._names.get(token)
        if not self.count:
            return name == PROMISE
        if not self.in_number:
            return name is None or name == TOKENS
        return name == PROMISE_END or (name is None and self._is_number(token))

    def read(self, token: int) -> bool:
        """Takes an accepted id. True if it completes the promise; reset before the next one."""
        name = self._names.get(token)
        self.count += 1
        if name == TOKENS:
            self.in_number = True
        elif self.in_number and name is None:
            self._digits.append(self._vocabulary.decode([token]))
        elif name is None:
            self.topic.append(token)
        return name == PROMISE_END

    def tag(self, start: int, end: int, unit: int) -> Tag:
        """The completed promise, standing at `start` to `end`."""
        units = read_number(self.digits, max_units(unit))
        bad = units is None
        length = round_up(DEFAULT_PROMISED_TOKENS, unit) if units is None else units * unit
        topic = self._vocabulary.decode(self.topic)
        return Tag("promise", start, end, topic, length, ("bad-tokens",) if bad else ())

    def _is_number(self, token: int) -> bool:
        text = self._vocabulary.decode([token])
        return text.isascii() and text.isdigit()


def id_tags(ids: Sequence[int], vocabulary: Vocabulary, unit: int) -> tuple[list[Tag], list[Issue]]:
    """The well-formed tags of a run of ids, in order, and what was begun and is none."""
    reader = PromiseReader(vocabulary)
    kinds: dict[str | None, TagKind] = {ASYNC: "async", ASYNC_END: "async_end", SYNC: "sync"}
    tags: list[Tag] = []
    issues: list[Issue] = []
    for at, token in enumerate(ids):
        accepted = reader.accepts(token)
        if reader.count and not accepted:
            issues.append(Issue("unfinished-promise", at - reader.count))
            reader.reset()
            accepted = reader.accepts(token)
        name = reader.name_of(token)
        if accepted:
            if reader.read(token):
                tags.append(reader.tag(at + 1 - reader.count, at + 1, unit))
                reader.reset()
        elif name in kinds:
            tags.append(Tag(kinds[name], at, at + 1))
        elif name in TAG_FORMS:
            issues.append(Issue("unfinished-promise", at))
    if reader.count:
        issues.append(Issue("unfinished-promise", len(ids) - reader.count))
    return tags, issues
