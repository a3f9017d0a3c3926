"""What there is to annotate: responses of users' rows and of sampled answers, by their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from stretto.data.rows import Answer, PromptBook, Source, prompt_id


@dataclass(frozen=True)
class Item:
    """A response to annotate: number `sample` of its prompt."""

    prompt: str
    response: str
    sample: int = 0

    @property
    def prompt_id(self) -> str:
        return prompt_id(self.prompt)

    @property
    def response_id(self) -> str:
        """Of a reject, which has not the response itself."""
        return prompt_id(self.response)

    @property
    def key(self) -> str:
        """That of the row which comes of it."""
        return f"{self.prompt_id}/{self.sample}"


def items_of_sources(sources: Iterable[Source]) -> tuple[list[Item], dict[str, int]]:
    """Items of users' rows, and how many rows were left out for which reason.

    Several responses of a prompt are numbered in the order they come; a row that repeats a prompt
    and its response, or has no response, is left out.
    """
    seen: dict[str, set[str]] = {}
    items = []
    left_out: Counter[str] = Counter()
    for source in sources:
        if source.response is None:
            left_out["no response"] += 1
            continue
        known = seen.setdefault(source.prompt, set())
        if source.response in known:
            left_out["repeated"] += 1
            continue
        items.append(Item(source.prompt, source.response, len(known)))
        known.add(source.response)
    return items, dict(left_out)


def items_of_answers(
    answers: Iterable[Answer], book: PromptBook, *, keep_unfinished: bool = False
) -> tuple[list[Item], dict[str, int]]:
    """Items of sampled answers under their own numbers. One that was cut off would teach a model
    to end there, and is left out unless `keep_unfinished`.

    Raises `InvalidInput` if a prompt is in neither the row nor the book.
    """
    items: dict[str, Item] = {}
    left_out: Counter[str] = Counter()
    for answer in answers:
        if answer.finish_reason != "stop" and not keep_unfinished:
            left_out[f"ended with {answer.finish_reason}"] += 1
        elif answer.key in items:
            left_out["repeated"] += 1
        else:
            items[answer.key] = Item(book.prompt_of(answer), answer.text, answer.sample)
    return list(items.values()), dict(left_out)
