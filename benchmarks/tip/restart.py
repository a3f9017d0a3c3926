"""Decoding that keeps nothing but the text: each token is drawn from the tokens that are seen now,
all computed anew from one another, at their own positions.

In the runtime a step that survives keeps what it took from steps that are gone. Here it cannot:
what is lost in accuracy came through that channel, and not through the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from answered import Solved, solved

from stretto import SamplingParams
from stretto.dialects.registers import register_name

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.problems import Problem

BATCH = 32


@dataclass
class Writer:
    """One answer under way. `seen`: ids with their positions. `steps`: where the step that each
    register holds begins and ends; `current` is the register of the step under way."""

    seen: list[tuple[int, int]]
    num_placed: int
    limit: int
    written: list[int] = field(default_factory=list)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    current: int | None = None
    is_open: bool = True

    def place(self, token: int, registers: frozenset[int]) -> None:
        """A register lets go of the step that it held, before it is placed."""
        if token in registers:
            if self.current is not None:
                self.steps[self.current] = (self.steps[self.current][0], self.num_placed)
            start, end = self.steps.get(token, (0, 0))
            self.seen = [(i, p) for i, p in self.seen if not start <= p < end]
            self.steps[token] = (self.num_placed, self.num_placed)
            self.current = token
        self.seen.append((token, self.num_placed))
        self.written.append(token)
        self.num_placed += 1
        self.is_open = len(self.written) < self.limit


def restarted(
    lm: LM, problems: Sequence[Problem], label: str, limit: Callable[[Problem], int]
) -> tuple[list[Solved], float]:
    """Greedy answers of a model of dialect tip, strict, and the seconds they took. What they held
    is what the runtime holds of the same tokens."""
    began = time.perf_counter()
    rows: list[Solved] = []
    for start in range(0, len(problems), BATCH):
        part = problems[start : start + BATCH]
        writers = [_writer(lm, problem, limit(problem)) for problem in part]
        _write(lm, writers)
        rows += _told(lm, part, writers, label)
    return rows, time.perf_counter() - began


def _writer(lm: LM, problem: Problem, limit: int) -> Writer:
    ids = lm.encode([{"role": "user", "content": problem.prompt}])
    return Writer([(token, at) for at, token in enumerate(ids)], len(ids), limit)


def _write(lm: LM, writers: Sequence[Writer]) -> None:
    names = map(register_name, range(lm.card.num_registers))
    registers = frozenset(lm.card.control[name] for name in names)
    model = lm.model
    while open_now := [writer for writer in writers if writer.is_open]:
        for writer, token in zip(open_now, _next_tokens(model, open_now), strict=True):
            if token in lm.vocabulary.end_ids:
                writer.is_open = False
            else:
                writer.place(token, registers)


def _next_tokens(model: Any, writers: Sequence[Writer]) -> list[int]:
    """The likeliest next token of each. Rows are filled up on the right. The mask says what is
    filling: without one, gaps between positions would be read as ends of sequences."""
    import torch

    longest = max(len(writer.seen) for writer in writers)
    ids, positions, mask = torch.zeros(3, len(writers), longest, dtype=torch.long).unbind()
    for row, writer in enumerate(writers):
        pairs = torch.tensor(writer.seen)
        ids[row, : len(pairs)], positions[row, : len(pairs)] = pairs.unbind(1)
        mask[row, : len(pairs)] = 1
    last = mask.sum(1) - 1
    with torch.inference_mode():
        hidden = model.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[torch.arange(len(writers)), last])
    return [int(token) for token in logits.argmax(-1)]


def _told(
    lm: LM, problems: Sequence[Problem], writers: Sequence[Writer], label: str
) -> list[Solved]:
    """The rows: the same tokens, forced upon the runtime."""
    end = min(lm.vocabulary.end_ids)
    streams = []
    for problem, writer in zip(problems, writers, strict=True):
        forced = [*writer.written, end]
        params = SamplingParams(max_tokens=writer.limit)
        script = lambda _, index, forced=forced: forced[index]  # noqa: E731
        streams.append(lm.submit(problem.prompt, params, script=script))
    completions = [stream.finish() for stream in streams]
    return [solved(label, p, c) for p, c in zip(problems, completions, strict=True)]
