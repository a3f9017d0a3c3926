"""Judge `reference`: which answer is nearer to what a person, or a strong model, has answered.

Nearness is chrF++ (Popović 2017: character n-grams to 6 and word n-grams to 2, F with recall
counted twice), by sacrebleu, to the nearest of a prompt's references. No language model has a say
in it, so it is independent of judge `likelihood`, and of whatever was trained to please that. It
rewards answers as long as the references; read it beside a length-controlled rate.

Length is not taken out of it, as `likelihood` takes it out of its mean: what an answer leaves out
is missing from its recall, which is right, and where a prompt's references differ in length, an
answer is measured by the one that it is like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.data.rows import PROMPT_FIELDS, prompt_id, read_lines
from stretto.errors import InvalidInput
from stretto.eval.judges.base import Comparison, Identity, Measure, Question, Verdict
from stretto.eval.judges.standard import Point, standardised

REFERENCE_FIELDS = ("reference_output", "reference", "output", "response", "answer")
"""Of a line that has several, the first."""


class ReferenceJudge:
    """Judges by references, a list a prompt, found by `prompt_id`. Their texts go nowhere: a
    measurement is a number, and the identity has a mark of all of them."""

    def __init__(self, references: Mapping[str, Sequence[str]]) -> None:
        from sacrebleu.metrics.chrf import CHRF

        self._references = {name: list(texts) for name, texts in references.items()}
        self._metric = CHRF(word_order=2)
        lines = [f"{k}\0{text}" for k in sorted(references) for text in sorted(references[k])]
        digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:12]
        settings = {"references": digest, "prefers": "nearer"}
        self._identity = str(Identity("reference", "chrf++", settings))

    @classmethod
    def read(cls, paths: Sequence[Path], field: str | None = None) -> ReferenceJudge:
        """Of the references in files, as `read_references`."""
        return cls(read_references(paths, field))

    @property
    def identity(self) -> str:
        return self._identity

    def nearness(self, prompt: str, answer: str) -> float | None:
        """chrF++ of an answer to the nearest reference, from 0 to 100; None without references."""
        references = self._references.get(prompt_id(prompt))
        if references is None:
            return None
        return float(self._metric.sentence_score(answer, references).score)

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure] | None]:
        for question in questions:
            yield [{"chrf": self.nearness(question.prompt, c)} for c in question.candidates]

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        """chrF++, standardised within each question (mean 0, deviation 1; 0 for all where they do
        not differ): a weight of quality means what it means with judge `likelihood`. None for a
        prompt without references."""
        rows = [[m["chrf"] for m in row] for row in measured]
        points = [[None if value is None else Point(value, 0.0) for value in row] for row in rows]
        return [standardised(row, slope=0.0) for row in points]

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """The nearer answer is better, for sure, by however little: a share of prompts is easier to
        read than a mean of differences, and needs no scale. Equally near ones are a tie. None for
        a prompt without references."""
        return [self._verdict(item) for item in comparisons]

    def _verdict(self, item: Comparison) -> Verdict | None:
        a, b = self.nearness(item.prompt, item.a), self.nearness(item.prompt, item.b)
        if a is None or b is None:
            return None
        return Verdict.of(float((a > b) - (a < b)), {"a": round(a, 4), "b": round(b, 4)})

    def close(self) -> None:
        pass


def read_references(paths: Sequence[Path], field: str | None = None) -> dict[str, list[str]]:
    """References by `prompt_id`, from JSONL with a prompt (`PROMPT_FIELDS`) and a reference
    (`REFERENCE_FIELDS`, or the field of this name) a line; a prompt that comes several times has
    several. Raises `InvalidInput` for a line that lacks either, and for files without a line."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for number, value in read_lines(path):
            prompt = _text(value, PROMPT_FIELDS)
            reference = _text(value, REFERENCE_FIELDS if field is None else (field,))
            if prompt is None or reference is None:
                wanted = " or ".join(REFERENCE_FIELDS) if field is None else field
                raise InvalidInput(
                    f"{path}:{number} lacks a prompt or a reference answer; the latter is text "
                    f"in {wanted}"
                )
            texts = found.setdefault(prompt_id(prompt), [])
            if reference not in texts:
                texts.append(reference)
    if not found:
        names = ", ".join(map(str, paths))
        raise InvalidInput(f"{names} has no references; name the file that has them")
    return found


def _text(value: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of these fields that has text that is not blank."""
    return next((t for n in names if isinstance(t := value.get(n), str) and t.strip()), None)
