"""Rows of data files into examples: what cannot be used is counted, named and kept."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stretto.data.rows import (
    Annotated,
    Answer,
    PromptBook,
    Reject,
    prompt_id,
    read_lines,
    read_rows,
)
from stretto.errors import InvalidInput
from stretto.methods.diffusion import Window
from stretto.train.examples import Example, ExampleMaker
from stretto.train.unusable import Unusable

TrainingRow = Annotated | Answer


@dataclass
class Gathered:
    """The examples of some rows, and what was left out, with its reasons."""

    examples: list[Example] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    issues: Counter[str] = field(default_factory=Counter)

    @property
    def num_illegal(self) -> int:
        return sum(example.num_illegal for example in self.examples)

    def counts(self) -> dict[str, object]:
        """What the summary of a run says of its data."""
        reasons = Counter(reject.reasons[0].split(":")[0] for reject in self.rejects)
        return {
            "examples": len(self.examples),
            "tokens": sum(map(len, self.examples)),
            "targets": sum(example.num_targets for example in self.examples),
            "illegal_targets": self.num_illegal,
            "rejected": dict(sorted(reasons.items())),
            "issues": dict(sorted(self.issues.items())),
        }


def read_training_rows(paths: Sequence[Path]) -> list[TrainingRow]:
    """Rows of annotated texts or of answers; each file holds one kind. Raises `InvalidInput`."""
    rows: list[TrainingRow] = []
    for path in paths:
        first = next(iter(read_lines(path)), None)
        if first is None:
            raise InvalidInput(f"{path} has no rows; check the path")
        rows += read_rows(path, Answer if "ids" in first[1] else Annotated)
    return rows


@dataclass(frozen=True)
class RowEncoder:
    """Turns rows into examples of one model.

    `baseline`: responses as they are without annotations; `window`: so too, in blocks that are
    written in any order. `relabel` rewrites an annotated text first; an answer has none.
    `max_tokens`: longer examples are left out.
    """

    maker: ExampleMaker
    encode_prompt: Callable[[str], list[int]]
    book: PromptBook
    baseline: bool = False
    window: Window | None = None
    relabel: Callable[[str], str] | None = None
    max_tokens: int | None = None

    def gather(self, rows: Iterable[TrainingRow]) -> Gathered:
        """The examples of rows, in order. Raises `InvalidInput` for a row with nothing to learn,
        naming it, and for a row whose prompt is not to be had."""
        gathered = Gathered()
        for row in rows:
            try:
                example = self._example(row)
            except Unusable as error:
                self._reject(gathered, row, f"{error.reason}: {error}")
                continue
            if self.max_tokens is not None and len(example) > self.max_tokens:
                self._reject(gathered, row, f"too-long: {len(example)} tokens")
                continue
            if not example.num_targets:
                raise InvalidInput(
                    f"row {row.key} has no token to learn from ({example.num_illegal} of its "
                    "targets are illegal where they stand); leave it out of the data"
                )
            gathered.examples.append(example)
            gathered.issues.update(example.issues)
        return gathered

    def _example(self, row: TrainingRow) -> Example:
        text = self.book.prompt_of(row)
        if prompt_id(text) != row.prompt_id:
            raise InvalidInput(f"row {row.key} has a prompt of another prompt_id; make it again")
        prompt = self.encode_prompt(text)
        if self.window is not None:
            answer = row.text if isinstance(row, Answer) else row.response
            return self.maker.from_window(prompt, answer, row.key, self.window)
        if isinstance(row, Answer):
            if self.baseline:
                ended = row.finish_reason == "stop"
                return self.maker.from_annotated(prompt, row.text, row.key, ended=ended)
            if self.relabel is not None:
                raise InvalidInput(
                    f"row {row.key} is a sampled answer, which is learnt by its exact ids: its "
                    "promises cannot be relabelled; leave --lengths out, or give annotated rows"
                )
            return self.maker.from_answer(prompt, row)
        if self.baseline:
            return self.maker.from_annotated(prompt, row.response, row.key)
        annotated = row.annotated if self.relabel is None else self.relabel(row.annotated)
        return self.maker.from_annotated(prompt, annotated, row.key)

    @staticmethod
    def _reject(gathered: Gathered, row: TrainingRow, reason: str) -> None:
        gathered.rejects.append(
            Reject(prompt_id=row.prompt_id, sample=row.sample, reasons=[reason])
        )


def split_rows(
    rows: Sequence[TrainingRow], share: float, seed: int
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """(training, validation) rows: about `share` of the prompts, whole, drawn by their hashes."""
    bound = int(share * 2**32)

    def held_out(row: TrainingRow) -> bool:
        digest = hashlib.blake2b(f"{seed}/{row.prompt_id}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") < bound

    return [r for r in rows if not held_out(r)], [r for r in rows if held_out(r)]


def fingerprint(examples: Iterable[Example]) -> str:
    """A hash of what examples are: their ids, positions, views and targets, in order."""
    digest = hashlib.sha256()
    for example in examples:
        for tensor in _tensors(example):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(example: Example) -> Iterator[torch.Tensor]:
    yield from (example.ids, example.positions, example.segment, example.targets)
    yield example.sees.to(torch.uint8)
