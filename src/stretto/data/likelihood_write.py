"""A plan as annotated text: chunks, their topics and lengths, syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stretto.data.likelihood_plan import Move
from stretto.data.likelihood_views import Part
from stretto.data.markup import promised, write_chunk
from stretto.dialects.pasta_masks import MAX_TOPIC_TOKENS

MAX_JOINED_WORDS = 8
"""Of a topic that names several units."""


@dataclass(frozen=True)
class Writer:
    """`count` gives the tokens of a text; promised lengths are multiples of `unit`."""

    count: Callable[[str], int]
    unit: int

    def text(
        self, response: str, parts: Sequence[Part], topics: Sequence[str], moves: Sequence[Move]
    ) -> str:
        """The response with annotations; without them it is the response, byte for byte."""
        pieces: list[str] = []
        for members, move in _groups(moves):
            units = [parts[i].unit for i in members]
            text = response[units[0].start : units[-1].end]
            if move.sync:
                pieces.append("<sync/>")
            if move.place == "start":
                topic = self.topic([topics[i] for i in members], is_section=units[0].is_lead)
                text = write_chunk(topic, promised(self.count(text), self.unit), text)
            pieces.append(text)
        return "".join(pieces)

    def topic(self, topics: Sequence[str], *, is_section: bool) -> str:
        """The topic of a chunk of units with these. A section's is its heading's; neighbours are
        named together, as far as that is short; one that is too long is cut off."""
        named = list(dict.fromkeys(topic for topic in topics if topic))
        tries = [named[0]]
        if not is_section and len(named) > 1:
            tries = [", ".join(named), f"{named[0]} to {named[-1]}", named[0]]
        for text in tries:
            is_short = text == named[0] or len(text.split()) <= MAX_JOINED_WORDS
            if is_short and self.count(text) <= MAX_TOPIC_TOKENS:
                return text
        words = named[0].split()
        while len(words) > 1 and self.count(" ".join(words)) > MAX_TOPIC_TOKENS:
            words.pop()
        text = " ".join(words)
        while self.count(text) > MAX_TOPIC_TOKENS:
            text = text[:-1]
        return text


def _groups(moves: Sequence[Move]) -> Iterator[tuple[list[int], Move]]:
    """Units written in one piece, and the move of the first of them."""
    members: list[int] = []
    for index, move in enumerate(moves):
        if members and move.place != "continue":
            yield members, moves[members[0]]
            members = []
        members.append(index)
    if members:
        yield members, moves[members[0]]
