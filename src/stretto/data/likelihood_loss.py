"""What a unit loses by being blind to its elder siblings, and which words say best what it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.data.likelihood_scorer import LogProbs
from stretto.data.likelihood_views import Part
from stretto.data.topics import clean_topic, is_weak_word

SURPRISE_NATS = 2.0
"""Of a token's gain what exceeds this counts. A number carried over or a name once introduced
gains far more; a style or a format that siblings share gains less, and a child trained to write
such chunks knows it."""

LEAST_TOKENS = 20
"""A unit's loss is its excess over so many tokens at least: few tokens are no mean."""

REPEAT_TOKENS = 5
"""A run of so many tokens that an elder sibling has just so is wording that the two share: a blind
child would have said it in words of its own. Numbers and symbols in it count all the same: an
expression that is carried over is needed."""

TOPIC_NATS = 1.0
"""A word of a topic is worth each token that main draws for it if the child, left alone, would
need more nats than this for it."""
TOPIC_SCOPE_WORDS = 16
"""A topic is looked for among so many words from the beginning."""
MAX_TOPIC_WORDS = 6


@dataclass(frozen=True)
class Loss:
    """`gain`: nats by which the counted tokens are likelier with all siblings in view;
    `num_counted` tokens. `rate`: of it the excess, a token; what is held against the threshold."""

    gain: float
    num_counted: int
    rate: float


NOTHING = Loss(0.0, 0, 0.0)


def loss_of(part: Part, elders: Sequence[Part], full: LogProbs, blind: LogProbs) -> Loss:
    """Compares two readings of a unit's tokens. `elders`: the units before it.

    Not counted: the separator and marker (their place gives them away, and promises are counted
    by position), and the first token after the topic, where the outline's ellipsis would have
    stood: it tells how the siblings are shown and nothing else. Nor is wording that is shared
    (`REPEAT_TOKENS`).
    """
    counted = ~_repeats(part, elders)
    counted[: part.num_marker] = False
    if part.is_hidden and part.num_named < len(counted):
        counted[part.num_named] = False
    gains = (full.astype(np.float64) - blind.astype(np.float64))[counted]
    excess = float(np.maximum(gains - SURPRISE_NATS, 0.0).sum())
    size = int(counted.sum())
    return Loss(float(gains.sum()), size, excess / max(size, LEAST_TOKENS))


def _repeats(part: Part, elders: Sequence[Part]) -> NDArray[np.bool_]:
    """Which tokens are words in a run of `REPEAT_TOKENS` that is in one of the elders."""
    size, ids = REPEAT_TOKENS, part.ids
    known = {tuple(e.ids[i : i + size]) for e in elders for i in range(len(e.ids) - size + 1)}
    found = np.zeros(len(ids), dtype=np.bool_)
    for start in range(len(ids) - size + 1):
        if tuple(ids[start : start + size]) in known:
            found[start : start + size] = True
    return found & np.array(part.wording, dtype=np.bool_)


_WORD = re.compile(r"\S+")
_STOPS = (".", "!", "?", ":", ";", ",", "**", "__", "-", "–", "—")
_CONNECTIVES = (
    "additionally also another consider finally first firstly for furthermore however in it's "
    "lastly likewise moreover next now once one other overall second secondly similarly some then "
    "that's think third thirdly those thus unlike while often being even just more most many"
)
_EMPTY_WORDS = frozenset(_CONNECTIVES.split())
_CODE = re.compile(r"[(){}\[\]<>;=|\\$]")
_CODE_LINE = re.compile(
    r"^\s*(?:def |import |from \w+ import|return\b|#include|using \w|class \w+.*[:{]|"
    r"(?:if|for|while|elif|else|try|with)\b.*:$|\w+ [-+*/]?= )|[;{}]\s*$",
)
_TELLING = re.compile(r"[^\W\d_]{4}|[^\x00-\u02ff]{2}")
"""What a topic must have in it: four letters in a row, or two of a script that has long words."""


def best_topic(response: str, part: Part, alone: LogProbs, count: Callable[[str], int]) -> str:
    """The words of a unit's beginning that help its chunk most for what they cost main.

    `alone`: the log-probs of its tokens in the view that its child has. A run of words saves the
    child their nats and costs main `TOPIC_NATS` for each of their tokens; the run that saves most
    is the topic, two words or more if there are such. It is within one clause of the first line,
    with no weak word at either end and no code in it. The unit's own first words where there is
    none; "" where they are code.
    """
    unit = part.unit
    stop = response.find("\n", unit.body, unit.end)
    words = [m.span() for m in _WORD.finditer(response, unit.body, unit.end if stop < 0 else stop)]
    words = words[:TOPIC_SCOPE_WORDS]
    ends = [min(count(response[unit.start : end]), len(alone)) for _, end in words]
    best, best_value = "", (False, 0.0)
    for first, last in _runs(response, words):
        begin = ends[first - 1] if first else part.num_marker
        nats = -float(alone[begin : ends[last]].sum())
        value = last > first, nats - TOPIC_NATS * (ends[last] - begin)
        text = clean_topic(response[words[first][0] : words[last][1]])
        if value > best_value and value[1] > 0 and _TELLING.search(text):
            best, best_value = text, value
    return best or sound_topic(part.topic.text)


def is_code(text: str) -> bool:
    """Whether half of the lines read like code that stands outside of a fence. It is never
    promised by itself: its first words are no topic that a reader would give it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(bool(_CODE_LINE.search(line)) for line in lines) >= len(lines) > 0


def is_name(text: str) -> bool:
    """Whether what a text sets off can stand for it: more than a letter."""
    return re.search(r"\w{2}", text) is not None


def sound_topic(text: str) -> str:
    """A topic made of a unit's first words; "" if it is code or says nothing."""
    return "" if _CODE.search(text) or not _TELLING.search(text) else text


def _is_empty(word: str) -> bool:
    return is_weak_word(word) or word.strip(",:;").lower() in _EMPTY_WORDS


def _runs(response: str, words: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First and last of the runs of words that may be a topic."""
    for first, (start, end) in enumerate(words):
        if _is_empty(response[start:end]):
            continue
        for last in range(first, min(len(words), first + MAX_TOPIC_WORDS)):
            word = response[slice(*words[last])]
            if _CODE.search(word):
                break
            if not _is_empty(word):
                yield first, last
            if word.endswith(_STOPS):
                break
