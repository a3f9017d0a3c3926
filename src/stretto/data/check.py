"""Whether an annotated response is fit for training, and what is wrong where it is not.

The rules: it parses without an issue; without annotations it is the response, byte for byte; it
survives being written down and read again; every token of it could have been drawn by the model's
own runtime, chunk caps included.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from stretto.data.markup import chunks_of
from stretto.data.rows import Annotated, first_fault, prompt_id, read_lines
from stretto.dialects import DialectSettings, get_dialect
from stretto.dialects.base import Parsed, Vocabulary
from stretto.dialects.pasta import PastaSettings, child_name, default_child_cap
from stretto.dialects.pasta_masks import MAX_TOPIC_TOKENS
from stretto.dialects.registers import (
    DEFAULT_REGISTERS,
    MAX_REGISTERS,
    is_register,
    register_tags,
)
from stretto.errors import InvalidInput, Unsupported
from stretto.params import SamplingParams
from stretto.recorder import MAIN
from stretto.trace import Trace, is_drawn

if TYPE_CHECKING:
    from stretto.models.registry import ResolvedModel

MAX_POSITIONS = 1 << 20
"""Of an imagined model: whether a row fits a real one's positions is seen in training."""
MAX_TOPIC_WORDS = 3
"""Of a topic of dialect planned."""
UNPLANNED = "text-outside-span"
"""The issue of text that nothing planned, as a response without annotations is."""
NEAR = 20
"""Code points shown on either side of the first difference."""


class Checker:
    """Checks annotated texts of a dialect with a real tokenizer.

    `settings`: how a promise counts; `num_registers`: of a dialect that has them. `reasons` begin
    with a code, as in `code: what and where`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        dialect: str = "pasta",
        settings: PastaSettings | None = None,
        num_registers: int = DEFAULT_REGISTERS,
    ) -> None:
        self.vocabulary = vocabulary
        self.settings = PastaSettings() if settings is None else settings
        self.num_registers = num_registers
        self._all = DialectSettings.given({**asdict(self.settings), "num_registers": num_registers})
        self._dialect = get_dialect(dialect)
        if self._dialect.is_foreign:
            raise Unsupported(f"dialect {dialect} writes no annotations: there is nothing to check")
        self._sessions = self._dialect.sessions(vocabulary, self._all, MAX_POSITIONS)

    @property
    def dialect(self) -> str:
        return self._dialect.name

    def count(self, text: str) -> int:
        """The number of tokens of a text. Raises `InvalidInput` if it cannot be encoded."""
        return len(self.vocabulary.encode(text))

    def parse(self, annotated: str) -> Parsed:
        return self._dialect.parse_text(annotated, self.vocabulary, self._all, "")

    def refusals(self, response: str) -> list[str]:
        """Why a response cannot be annotated at all; empty if it can."""
        if not response.strip():
            return ["empty-response: there is nothing to annotate"]
        try:
            parsed = self.parse(response)
        except InvalidInput as error:
            return [f"not-encodable: {error}"]
        trace = parsed.trace
        issues = [issue for issue in parsed.issues if issue.code != UNPLANNED]
        if issues or trace.num_text_tokens != trace.num_tokens:
            return ["tags-in-response: it has a tag in its own text, which would be read as one"]
        return []

    def reasons(self, response: str, annotated: str) -> list[str]:
        """What is wrong with an annotation of a response; empty if nothing is."""
        if found := self.refusals(response) or self._too_many(annotated):
            return found
        if found := self._too_few_registers(annotated):
            return found
        try:
            parsed = self.parse(annotated)
        except InvalidInput as error:
            return [f"not-encodable: {error}"]
        found = [f"{i.code}: {_around(annotated, i.at)}" for i in parsed.issues]
        if parsed.text != response:
            found.append(f"text-differs: {_difference(response, parsed.text)}")
        if not found and self._dialect.name == "pasta":
            found += self._round_trip(parsed.trace, annotated)
            found += self._chunk_faults(annotated) + self._cut_off(parsed.trace, annotated)
        elif not found and self._dialect.name == "planned":
            found += self._chunk_faults(annotated, MAX_TOPIC_WORDS)
        return found or self._illegal(parsed.trace)

    def _too_many(self, annotated: str) -> list[str]:
        """More promises than are forked; told before the text is parsed, which would take long."""
        if self._dialect.name not in ("pasta", "planned"):
            return []
        number, most = len(chunks_of(annotated)), SamplingParams().max_forks
        if number <= most:
            return []
        return [f"too-many-promises: {number}, of which the runtime forks {most}"]

    def _too_few_registers(self, annotated: str) -> list[str]:
        """A register beyond those there are, told once and not as text that differs."""
        if not any(map(is_register, self._dialect.forms(self._all))):
            return []
        tags, _ = register_tags(annotated, MAX_REGISTERS)
        most = max((tag.number for tag in tags), default=0)
        if most < self.num_registers:
            return []
        return [
            f"too-few-registers: register {most} is written, and there are {self.num_registers}"
        ]

    def _round_trip(self, trace: Trace, annotated: str) -> list[str]:
        """Text to trace to text, and text to ids, must lead to the same trace."""
        from stretto.dialects.pasta_text import parse_ids, to_text

        text, _ = to_text(trace, self.vocabulary, self.settings)
        ids = [token for segment in trace.segments for token in segment.tokens]
        for form, again in (
            ("text", self.parse(text).trace),
            ("ids", parse_ids([], ids, self.vocabulary, self.settings).trace),
        ):
            if again.segments != trace.segments:
                return [f"no-round-trip: read again from {form}, it has other segments"]
        return []

    def _chunk_faults(self, annotated: str, most_words: int | None = None) -> list[str]:
        """Topics that cannot be drawn or have more words, and chunks without text."""
        found = []
        for number, chunk in enumerate(chunks_of(annotated, self.settings.unit), start=1):
            where = f"promise {number}, {chunk.topic!r},"
            num_topic, num_words = self.count(chunk.topic), len(chunk.topic.split())
            if num_topic > MAX_TOPIC_TOKENS:
                found.append(
                    f"topic-too-long: {where} has {num_topic} tokens, at most {MAX_TOPIC_TOKENS}"
                )
            elif most_words is not None and num_words > most_words:
                found.append(f"topic-too-long: {where} has {num_words} words, at most {most_words}")
            if '"' in chunk.topic:
                found.append(f"topic-with-quote: {where} has a double quote")
            if not (chunk.content or "").strip():
                found.append(f"empty-chunk: {where} has no text")
        return found

    def _cut_off(self, trace: Trace, annotated: str) -> list[str]:
        """Chunks that have more tokens than they may draw."""
        found = []
        for number, chunk in enumerate(chunks_of(annotated, self.settings.unit), start=1):
            where = f"promise {number}, {chunk.topic!r},"
            drawn = [o for s in trace.of_thread(child_name(number)) for o in s.origins]
            num_drawn, cap = sum(map(is_drawn, drawn)), default_child_cap(chunk.tokens)
            if num_drawn > cap:
                found.append(
                    f"chunk-too-long: {where} has {num_drawn} tokens for {chunk.tokens} promised; "
                    f"it is cut off at {cap}"
                )
        return found

    def _illegal(self, trace: Trace) -> list[str]:
        """Tokens that the runtime would not have let the model draw."""
        from stretto.train.legal import Replay

        replay = Replay([], self._sessions(SamplingParams()), MAX_POSITIONS)
        last = {s.thread: s.id for s in trace.segments}
        for segment in trace.response:
            if segment.kind == "block":  # written in any order, once its plan is over
                continue
            for token, origin in zip(segment.tokens, segment.origins, strict=True):
                if not is_drawn(origin):
                    continue
                if segment.thread not in replay.threads:
                    return [f"not-forked: the runtime would not have forked {segment.thread}"]
                legal = replay.legal(segment.thread)
                if legal is not None and not legal.mask[token]:
                    text = self.vocabulary.decode([token])
                    return [f"illegal-token: {text!r} in {segment.thread} cannot be drawn there"]
                replay.draw(segment.thread, token)
            is_over = segment.thread != MAIN and last[segment.thread] == segment.id
            if is_over and self._dialect.ends_threads:
                replay.stop(segment.thread)
        return []


def _around(text: str, at: int) -> str:
    return f"at {at}, {text[at : at + 2 * NEAR]!r}"


def _difference(expected: str, found: str) -> str:
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    near = slice(max(0, at - NEAR), at + NEAR)
    return f"at {at} it has {found[near]!r} where the response has {expected[near]!r}"


def load_checker(
    tokenizer: str | None = None,
    *,
    dialect: str = "pasta",
    unit: int = 10,
    num_registers: int | None = None,
) -> Checker:
    """A checker with the tokenizer of a file, folder or model, an adapter's being its base's; by
    default the embedded model's. `num_registers`: None is as many as its card says.

    Raises `InvalidInput` and its kinds if there is none.
    """
    from stretto.models.adapters import base_of
    from stretto.models.embedded import EMBEDDED_MODEL
    from stretto.models.weights import is_adapter
    from stretto.tokens import load_vocabulary
    from stretto.tokens.card import ModelCard

    path = None if tokenizer is None else Path(tokenizer).expanduser()
    if path is None or path.suffix.lower() == ".gguf" or not os.path.exists(path):
        path = _resolve(EMBEDDED_MODEL if tokenizer is None else tokenizer).path
    if is_adapter(path):
        path = base_of(path, _resolve).path
    if num_registers is None:
        folder = path if os.path.isdir(path) else path.parent
        num_registers = ModelCard.load(folder).num_registers
    forms = get_dialect(dialect).forms(DialectSettings(num_registers=num_registers))
    return Checker(
        load_vocabulary(path, forms),
        dialect=dialect,
        settings=PastaSettings(unit=unit),
        num_registers=num_registers,
    )


def _resolve(name: str) -> ResolvedModel:
    from stretto.models import resolve

    return resolve(name, offline=True)


# -- files -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A row of a file that is not fit for training. `key` is empty where none could be read."""

    file: str
    line: int
    key: str
    reasons: list[str]


@dataclass
class CheckReport:
    """What a check of files came to."""

    num_rows: int = 0
    faults: list[Fault] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "ok": self.num_rows - len(self.faults),
            "failed": len(self.faults),
            "reasons": count_codes(fault.reasons for fault in self.faults),
        }


def count_codes(reasons: Iterator[list[str]] | Sequence[list[str]]) -> dict[str, int]:
    """How many rows have a reason of each code, most frequent first."""
    counts = Counter(code for row in reasons for code in {r.partition(":")[0] for r in row})
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def check_file(path: Path, checker: Checker) -> Iterator[Fault | None]:
    """For each row of a file of annotated rows, in order, what is wrong with it, or None.

    Raises `InvalidInput` for a line that is no JSON object, as it makes the whole file doubtful.
    """
    keys: dict[str, int] = {}
    for number, value in read_lines(path):
        key, reasons = "", []
        try:
            row = Annotated.model_validate(value)
        except ValidationError as error:
            reasons = [f"no-annotated-row: {first_fault(error)}"]
        else:
            key = row.key
            if key in keys:
                reasons.append(f"repeated: line {keys[key]} has the same key")
            keys.setdefault(key, number)
            if row.prompt is not None and prompt_id(row.prompt) != row.prompt_id:
                reasons.append(f"wrong-prompt-id: the prompt's is {prompt_id(row.prompt)}")
            reasons += checker.reasons(row.response, row.annotated)
        yield Fault(str(path), number, key, reasons) if reasons else None
