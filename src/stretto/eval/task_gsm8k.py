"""Task `gsm8k`: word problems from a user's file, each with one number as its answer.

The expected number is the one after the last `####` of the file's answer, or the whole of it. An
answer is right iff the last number in it is that number: thousands separators are dropped, `18`
and `18.0` are equal, `18` and `18.5` are not, and an answer without a number is wrong.
"""

from __future__ import annotations

from stretto.errors import InvalidInput
from stretto.eval.judges.exact import last_number
from stretto.eval.tasks import Item, Loaded, Score, Source, Task, from_files

REQUEST = "\nWork it out step by step. End with the answer as a number alone on the last line."
"""Appended to every problem: the last number must be the answer."""


def _load(source: Source) -> Loaded:
    return from_files("gsm8k", source, _item)


def _item(prompt: str, reference: str | None, place: str) -> Item:
    wanted = last_number((reference or "").rpartition("####")[2])
    if wanted is None:
        raise InvalidInput(
            f"{place} has no number as its answer; name the field that has with --reference-field"
        )
    return Item(prompt + REQUEST, wanted)


def score(item: Item, text: str) -> Score:
    """1 if the last number of the answer is the expected one, else 0."""
    found = last_number(text)
    vote = None if found is None else f"{found:.17g}"
    return Score(float(found == item.gold), details={"found": found}, vote=vote)


GSM8K = Task("gsm8k", 1, _load, score, has_votes=True)
