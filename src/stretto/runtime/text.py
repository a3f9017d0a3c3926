"""From ids to text, incrementally and in document order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stretto.recorder import MAIN, OpenSegment, OpenThread, Recorder
from stretto.trace import Origin

Decode = Callable[[Sequence[int]], str]
INCOMPLETE = "\ufffd"


class Pieces:
    """A `Decode` that remembers what each id alone gives: most runs end after one id."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> str:
        if len(ids) != 1:
            return self._decode(ids)
        text = self._known.get(ids[0])
        if text is None:
            text = self._known[ids[0]] = self._decode(ids)
        return text


class Detokenizer:
    """Decodes one run of ids as it grows. A character is given out when its last byte is there."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._decode(self._held)
        if text.endswith(INCOMPLETE):
            return ""
        self._held = []
        return text

    def flush(self) -> str:
        """The run ends: what is held becomes text, replacement characters included."""
        held, self._held = self._held, []
        return self._decode(held) if held else ""


@dataclass(frozen=True, slots=True)
class TextToken:
    """Where a text token's characters begin in the rendered text."""

    origin: Origin
    start: int


class Document:
    """The rendered text up to the first place where an open thread can still write.

    `cut`: where the first stop string that was found stands in it.
    """

    def __init__(self, recorder: Recorder, decode: Decode) -> None:
        self._recorder = recorder
        self._detokenizer = Detokenizer(decode)
        self._walk = self._walk_thread(recorder.threads[MAIN])
        self._is_over = False
        self.text = ""
        self.cut: int | None = None
        self.tokens: list[TextToken] = []

    def settle(self) -> None:
        """Reads on as far as the text is settled."""
        if not self._is_over:
            self._is_over = next(self._walk, None) is None
            if self._is_over:
                self.text += self._detokenizer.flush()

    def settle_to(self, stop: Sequence[str]) -> bool:
        """Reads on as far as the text is settled; whether a stop string now cuts it."""
        start = max(0, len(self.text) - max(map(len, stop)) + 1)
        self.settle()
        return self.find(stop, start)

    def find(self, stop: Sequence[str], start: int) -> bool:
        """Whether a stop string stands in the settled text from `start` on; the first one cuts."""
        places = [self.text.find(s, start) for s in stop]
        found = [p for p in places if p >= 0]
        self.cut = min(found, default=None)
        return bool(found)

    def _walk_thread(self, thread: OpenThread) -> Iterator[bool]:
        """Consumes a thread's segments and the threads forked where they end; yields where the
        text is not settled yet."""
        recorder = self._recorder
        ordinal = 0
        while ordinal < len(thread.segments):
            segment = recorder.segments[thread.segments[ordinal]]
            index = 0
            while True:
                stop = len(segment.tokens)
                is_last = segment is thread.own
                if thread.is_open and segment.kind == "block":
                    stop = 0  # its tokens may still be written, in any order
                elif is_last:
                    stop -= min(stop, thread.num_tentative)
                while index < stop:
                    self._consume(segment, index)
                    index += 1
                if not (is_last and thread.is_open):
                    break
                yield True
            while index < len(segment.tokens):
                self._consume(segment, index)
                index += 1
            for child in segment.children:
                self.text += self._detokenizer.flush()
                yield from self._walk_thread(recorder.threads[child])
                self.text += self._detokenizer.flush()
            ordinal += 1

    def _consume(self, segment: OpenSegment, index: int) -> None:
        if segment.origins[index] == "prompt" or segment.markup[index]:
            self.text += self._detokenizer.flush()
            return
        self.tokens.append(TextToken(segment.origins[index], len(self.text)))
        self.text += self._detokenizer.push(segment.tokens[index])


class ThreadText:
    """One thread's own text as it grows, for events; markup ends a run."""

    def __init__(self, decode: Decode) -> None:
        self._detokenizer = Detokenizer(decode)
        self.length = 0

    def push(self, token: int, markup: bool) -> str:
        return self.flush() if markup else self._grow(self._detokenizer.push(token))

    def flush(self) -> str:
        return self._grow(self._detokenizer.flush())

    def _grow(self, added: str) -> str:
        self.length += len(added)
        return added


def num_held(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of `text` that a stop string could begin with."""
    longest = max((len(s) - 1 for s in stop), default=0)
    first = max(0, len(text) - longest)
    return max((len(text) - _begin(text, s, first) for s in stop), default=0)


def _begin(text: str, stop: str, first: int) -> int:
    """Where, from `first` on, `text` goes on to its end as `stop` begins; its length if nowhere.
    Only places of the first character are looked at: this is asked after every pass."""
    at = text.find(stop[0], first)
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) if at < 0 else at
