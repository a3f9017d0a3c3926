"""Answers in points, of a model that would rather ramble: its own words after an opening.

    python benchmarks/pasta/points.py distill.jsonl --prompts prompts.jsonl --out points.jsonl

Where a model answered at length, it answers again: its own first sentence is put before it, and
the beginning of a numbered list of names in bold; what follows is its own. So there is something
to decode in parallel. Nobody asks it for points in the prompt, and a model taught on the whole
answers needs no such help. Goes on where it was killed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto import LM, SamplingParams
from stretto.bench.experiment import told
from stretto.data.rows import Answer, PromptBook, read_rows
from stretto.data.sample import Task, sample_answers
from stretto.data.store import Store
from stretto.methods.sequential import Sequential

LONG_TOKENS = 90
"""An answer of more tokens is given again in points."""
MOST_WORDS = 40
"""Of a first sentence that opens an answer."""
POINTS = "\n\n1. **"
_SENTENCE = re.compile(r"\s*([^\n]+?[.!?:])(?=\s|$)")


def opening_of(answer: Answer) -> str | None:
    """What is put before an answer in points; None for an answer that is to stay as it is."""
    found = _SENTENCE.match(answer.text)
    if answer.completion_tokens <= LONG_TOKENS or found is None:
        return None
    sentence = found[1]
    if len(sentence.split()) > MOST_WORDS or re.match(r"[^A-Za-z]|[A-Za-z]\.", sentence):
        return None
    return sentence + POINTS


@dataclass(frozen=True)
class Opened:
    """Plain decoding after an opening that depends on the prompt."""

    openings: dict[str, str]
    name: str = "opened"

    def start(self, lm: LM, prompt: Any, params: SamplingParams) -> Any:
        ids, session = Sequential().start(lm, prompt, params)
        return [*ids, *lm.vocabulary.encode(self.openings[prompt[-1]["content"]])], session


def answer_in_points(
    answers: Sequence[Answer], book: PromptBook, store: Store[Answer], params: SamplingParams
) -> None:
    """Adds what follows each opening to `store`, but for what is there already."""
    opened = {book.prompt_of(a): opening for a in answers if (opening := opening_of(a))}
    tasks = [task for p in opened if (task := Task(p)).key not in store]
    print(f"{len(opened)} of {len(answers)} in points, {len(tasks)} to do", file=sys.stderr)
    lm = LM.load("smollm2-135m-instruct", dtype="int8")
    rows = sample_answers(
        lm, tasks, params, method=Opened(opened), keep_prompts=False, keep_logprobs=False
    )
    num_left = 0
    for number, row in enumerate(rows, 1):
        if isinstance(row, Answer):
            store.add(row)
        else:
            num_left += 1
            print(f"{row.key}: {'; '.join(row.reasons)}", file=sys.stderr)
        if number % 50 == 0:
            print(f"{number}/{len(tasks)}", file=sys.stderr, flush=True)
    if num_left:
        print(f"{num_left} of {len(tasks)} have no answer", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.5, top_p=0.95, seed=1)
    answers = sorted(read_rows(arguments.answers, Answer), key=lambda row: row.key)
    with Store(arguments.out, Answer) as store:
        answer_in_points(answers, PromptBook.read([arguments.prompts]), store, params)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
