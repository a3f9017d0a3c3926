"""APAR's rules: which parts of a response become details that a child writes.

From the published data scripts of APAR (arXiv 2401.06761), as rules of our own that keep every
byte: a list of "N. summary: detail" items, else paragraphs whose first sentence stays and whose
rest is the detail. A response with neither, or of a kind that the published packing drops, comes
back as it is, and so serves as one of the unstructured examples that a model is trained on too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from stretto.data.annotators import Annotation, Refusal

MIN_FORKS = 3
MIN_DETAIL = 10
"""Least code points of a list item's detail, line ends at its end aside."""
MIN_ROOT = 20
"""Least code points of a paragraph's part that stays, its own white space around it aside."""
MIN_PARAGRAPHS = 3

_ITEM = re.compile("^[^\\S\n]*\\d+\\.[^\\S\n]+[^\\s:\uff1a][^\n:\uff1a]*[:\uff1a]", re.MULTILINE)
"""The head of a list item up to its colon, which may be a full-width one."""
_NUMBERED_LINE = re.compile(r"\n[^\S\n]*\d+\.\s")
_BLANK_LINE = re.compile(r"\r?\n\r?\n")
_SENTENCE_END = re.compile(r"\. \s*")
_TITLE = re.compile(r"\b(?:mr|mrs|dr)\.", re.IGNORECASE)
_CJK = re.compile("[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]")
_CONFUSING = ("```", "$$", "<", ">", "=", "---", "http")
"""Code, mathematics, tables and links, which the published packing drops."""

_TAG = re.compile(r"<fork ?/>|</?child>")

Span = tuple[int, int]
"""A detail: `response[start:end]`."""


@dataclass(frozen=True)
class AparRules:
    """The annotator `apar`. It writes dialect apar: its rows train models of that dialect."""

    name: ClassVar[str] = "apar"

    def annotate(self, prompt: str, response: str) -> Annotation | Refusal:
        """The response with its details as children. `details`: the `rule` (list, paragraphs or
        none), the number of `forks`, and without any, `why` each rule did not hold.

        Refuses a response that holds one of the dialect's tags as text.
        """
        if (tag := _TAG.search(response)) is not None:
            return Refusal([f"tags-in-response: {tag.group()!r} would be read as a tag"])
        dropped = why_dropped(response)
        if dropped is not None:
            return _plain(response, [dropped])
        whys: list[str] = []
        for rule, find in (("list", list_details), ("paragraphs", paragraph_details)):
            found = find(response)
            if isinstance(found, str):
                whys.append(found)
                continue
            details = {"rule": rule, "forks": len(found)}
            return Annotation(annotated(response, found), details)
        return _plain(response, whys)


def _plain(response: str, whys: list[str]) -> Annotation:
    return Annotation(response, {"rule": "none", "forks": 0, "why": whys})


def annotated(response: str, details: list[Span]) -> str:
    """The response with each detail as the child of a fork before it."""
    pieces, at = [], 0
    for start, end in details:
        pieces += [response[at:start], "<fork/><child>", response[start:end], "</child>"]
        at = end
    return "".join([*pieces, response[at:]])


def why_dropped(response: str) -> str | None:
    """Why the published packing takes no such response for a structured one; None: it may be."""
    if _CJK.search(response):
        return "has Chinese, Japanese or Korean characters"
    found = next((mark for mark in _CONFUSING if mark in response), None)
    return None if found is None else f"has {found!r} in it"


def list_details(response: str) -> list[Span] | str:
    """The details of a list "N. summary: detail", or why there is no such list.

    An item begins a line; its detail goes from the colon to the next item, the last one's to the
    next blank line, and leaves the line ends after it to the list. What follows is the parent's.
    """
    heads = list(_ITEM.finditer(response))
    if len(heads) < MIN_FORKS:
        return f"list: {len(heads)} items, fewer than {MIN_FORKS}"
    ends = [head.start() for head in heads[1:]]
    # Behind a line end at the colon, as a detail may begin on a line of its own.
    last = heads[-1].end()
    blank = _BLANK_LINE.search(response, last + (2 if response.startswith("\r\n", last) else 1))
    ends.append(len(response) if blank is None else blank.start())
    details = []
    for head, end in zip(heads, ends, strict=True):
        start = head.end()
        detail = response[start:end].rstrip("\r\n")
        if len(detail) < MIN_DETAIL:
            return f"list: a detail of {len(detail)} characters, fewer than {MIN_DETAIL}"
        if _NUMBERED_LINE.search(detail):
            return "list: a numbered line inside a detail"
        details.append((start, start + len(detail)))
    if _NUMBERED_LINE.search(response, details[-1][1]):
        return "list: a numbered line after the last item"
    return details


def paragraph_details(response: str) -> list[Span] | str:
    """The details of paragraphs, all but the first sentence of each; or why there are none.

    A sentence ends with ". "; a paragraph of one sentence stays whole. Blank lines, and white
    space around a paragraph or after its first sentence, are the parent's.
    """
    if (title := _TITLE.search(response)) is not None:
        return f"paragraphs: {title.group()!r} looks like the end of a sentence"
    paragraphs = _paragraphs(response)
    if len(paragraphs) < MIN_PARAGRAPHS:
        return f"paragraphs: {len(paragraphs)}, fewer than {MIN_PARAGRAPHS}"
    details = []
    for start, end in paragraphs:
        sentence = _SENTENCE_END.search(response, start, end)
        root_end = end if sentence is None else sentence.end()
        root = len(response[start:root_end].rstrip())
        if root < MIN_ROOT:
            return f"paragraphs: one begins with {root} characters, fewer than {MIN_ROOT}"
        if root_end < end:
            details.append((root_end, end))
    if len(details) < MIN_FORKS:
        return f"paragraphs: {len(details)} of several sentences, fewer than {MIN_FORKS}"
    return details


def _paragraphs(response: str) -> list[Span]:
    """What stands between blank lines, without white space around it."""
    found, at = list[Span](), 0
    ends = [(m.start(), m.end()) for m in _BLANK_LINE.finditer(response)]
    for end, following in [*ends, (len(response), len(response))]:
        piece = response[at:end]
        if piece.strip():
            found.append((at + len(piece) - len(piece.lstrip()), at + len(piece.rstrip())))
        at = following
    return found
