"""Judge `exact`: for prompts whose answers can be checked, 1 for a right answer and 0 otherwise."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.data.rows import PROMPT_FIELDS, prompt_id, read_lines
from stretto.errors import InvalidInput
from stretto.eval.judges.base import Comparison, Identity, Measure, Question, Verdict

Check = Callable[[str, str], float]
"""(prompt, answer) -> the share of it that is right, from 0 to 1."""

MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
EXPECTED_FIELDS = ("answer", "expected", "solution")


class ExactJudge:
    """Judges by a check. `name` names the check in the identity."""

    def __init__(self, check: Check, name: str) -> None:
        self._check = check
        self._name = name

    @property
    def identity(self) -> str:
        return str(Identity("exact", self._name))

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure] | None]:
        for question in questions:
            yield [{"right": self._check(question.prompt, text)} for text in question.candidates]

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        """The share that is right."""
        return [[float(m["right"]) for m in row] for row in measured]

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """The answer with more right is better; the difference is the confidence."""
        verdicts: list[Verdict | None] = []
        for item in comparisons:
            a, b = self._check(item.prompt, item.a), self._check(item.prompt, item.b)
            verdicts.append(Verdict.of(a - b, {"a": a, "b": b}))
        return verdicts

    def close(self) -> None:
        pass


class ExpectedAnswers:
    """A `Check` against known answers, by `prompt_id`.

    An expected answer that is a number (after the last `####`, if there is one) is compared with
    the last number of the answer; any other one must be all of the answer, but for case, white
    space and a full stop at the end. Raises `InvalidInput` for a prompt without a known answer.
    """

    def __init__(self, expected: Mapping[str, str]) -> None:
        self._expected = dict(expected)

    @classmethod
    def read(cls, path: Path) -> ExpectedAnswers:
        """From JSONL with a prompt (`PROMPT_FIELDS`) and an answer (`EXPECTED_FIELDS`) a line."""
        expected: dict[str, str] = {}
        for number, value in read_lines(path):
            prompt, answer = _text(value, PROMPT_FIELDS), _text(value, EXPECTED_FIELDS)
            if prompt is None or answer is None or not _told(answer):
                raise InvalidInput(
                    f"{path}:{number} lacks a prompt or an expected answer; the latter is text in "
                    f"{' or '.join(EXPECTED_FIELDS)}"
                )
            known = expected.setdefault(prompt_id(prompt), answer)
            if _told(known) != _told(answer):
                raise InvalidInput(
                    f"{path}:{number} has another answer to a prompt that came before "
                    f"({_told(answer)[:40]!r}, not {_told(known)[:40]!r}); keep one of them"
                )
        if not expected:
            raise InvalidInput(f"{path} has no expected answers; name the file that has them")
        return cls(expected)

    def __call__(self, prompt: str, answer: str) -> float:
        key = prompt_id(prompt)
        if key not in self._expected:
            raise InvalidInput(f"no expected answer for prompt {key}; add it to the file")
        wanted = _told(self._expected[key])
        if _NUMBER.fullmatch(wanted):
            return float(last_number(answer) == last_number(wanted))
        return float(_plain(answer) == _plain(wanted))


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators allowed; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace(MINUS, "-")) if found else None


def _text(value: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of these fields that has text."""
    return next((value[n] for n in names if isinstance(value.get(n), str)), None)


def _told(answer: str) -> str:
    """What of an expected answer counts: all after the last `####`."""
    return answer.rpartition("####")[2].strip()


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split()).rstrip(". ")
