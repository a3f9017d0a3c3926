"""Rollouts: answers of the policy with all that training needs, each drawn once and kept.

A file a step, a row a rollout. What a killed run has drawn is read again, so that it goes on as if
it had not stopped; what is missing is drawn with the weights of that step.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from stretto.data.rows import Answer, Reject
from stretto.data.sample import Task as Ask
from stretto.data.sample import answer_of, sample_streams
from stretto.data.store import Store
from stretto.params import SamplingParams
from stretto.runtime.events import ThreadEnd
from stretto.train.examples import IGNORE, Example
from stretto.train.grpo_advantages import Figures
from stretto.train.unusable import Unusable

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.eval.tasks import Item
    from stretto.lm import LM
    from stretto.train.grpo_policy import PolicyRuntime
    from stretto.train.grpo_problems import Problems


class Rollout(Answer):
    """An answer of the policy at one step. `score`: the task's, 0 if it did not end by itself.

    `ends`: the log-probs of the ends of sequence that were drawn, of the threads that ended so, in
    document order of the threads' last tokens. `live_mean`, `live_peak`: generated tokens that a
    response token sees, itself included.
    """

    kind: ClassVar[str] = "rollout"
    score: float
    ends: list[float]
    live_mean: float
    live_peak: int

    @property
    def is_cut(self) -> bool:
        return self.finish_reason != "stop"

    @property
    def figures(self) -> Figures:
        return Figures(self.score, len(self.ids), self.completion_tokens, self.live_mean)


def rollout_of(ask: Ask, completion: Completion, score: Callable[[str], float]) -> Rollout:
    """The row of a completion. An answer that was cut short is not scored: it is wrong."""
    answer = answer_of(ask, completion, keep_prompts=False)
    return Rollout(
        **answer.model_dump(),
        score=score(completion.text) if completion.finish_reason == "stop" else 0.0,
        ends=_ends_of(completion),
        live_mean=float(f"{completion.live_kv.generated_mean:.9g}"),
        live_peak=completion.live_kv.generated_peak,
    )


def _ends_of(completion: Completion) -> list[float]:
    drawn = {
        event.thread: float(f"{event.logprob:.7g}")
        for event in completion.events
        if isinstance(event, ThreadEnd) and event.logprob is not None and event.reason == "stop"
    }
    if completion.finish_reason != "stop":
        drawn.pop("main", None)
    last: dict[str, int] = {}
    for segment in completion.trace.segments:
        last[segment.thread] = segment.id
    return [drawn[name] for name in sorted(drawn, key=lambda name: last[name])]


def old_logprobs(example: Example, rollout: Rollout) -> Float[Tensor, "targets"]:
    """What the sampler recorded of each of an example's targets, in their order. Raises `Unusable`
    where it recorded nothing."""
    follows = example.follows[example.targets != IGNORE]
    ends, known = iter(rollout.ends), rollout.logprobs or []
    found = []
    for place in follows.tolist():
        value = next(ends, None) if place < 0 else known[place - rollout.num_prompt_tokens]
        if value is None:
            raise Unusable(f"rollout {rollout.key} lacks the log-prob of a token it learns")
        found.append(value)
    if next(ends, None) is not None:
        raise Unusable(f"rollout {rollout.key} has an end that it does not learn")
    return torch.tensor(found, dtype=torch.float32)


# -- drawing ---------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """Rollouts of a step, a list a problem in its samples' order; a problem that could not be
    answered has none. `num_tokens` were drawn now, in `seconds`; the others were there."""

    groups: list[list[Rollout]]
    num_tokens: int = 0
    seconds: float = 0.0


class Interrupted(Exception):
    """Told to stop while answers were under way; those that are done are kept."""


@dataclass
class Roller:
    """Draws rollouts with the policy as it is, into a folder: `step-00000001.jsonl` and so on.

    `requests` at once; `should_stop` is asked after each pass, and what is under way is given up
    by raising `Interrupted`. Problems that cannot be answered are told to `reject`.
    """

    policy: PolicyRuntime
    problems: Problems
    folder: Path
    max_tokens: int
    requests: int
    seed: int
    reject: Callable[[Reject], None]
    should_stop: Callable[[], bool] | None = None
    report: Callable[[int, int], None] | None = None

    def draw(self, step: int, items: Sequence[Item], n: int, *, temperature: float = 1.0) -> Drawn:
        """`n` rollouts of each item. What they are depends on the policy, the seed, step, item and
        sample number; those in the step's file are not drawn again."""
        began = time.perf_counter()
        seed = _seed_of(self.seed, step)
        params = SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=seed)
        asks = [(item, Ask(item.prompt, k)) for item in items for k in range(n)]
        num_tokens = 0
        with Store(self.folder / f"step-{step:08d}.jsonl", Rollout) as store:
            left = {ask.key: (item, ask) for item, ask in asks if ask.key not in store}
            if left:
                with self.policy.answering() as lm:
                    for rollout in self._draw(lm, left, params):
                        store.add(rollout)
                        num_tokens += len(rollout.ids)
            rows = dict(store.rows)
        groups = [
            [rows[key] for k in range(n) if (key := Ask(item.prompt, k).key) in rows]
            for item in items
        ]
        return Drawn(groups, num_tokens, time.perf_counter() - began)

    def _draw(
        self, lm: LM, left: dict[str, tuple[Item, Ask]], params: SamplingParams
    ) -> Iterator[Rollout]:
        asks = [ask for _, ask in left.values()]
        done = 0

        def check(_: int) -> None:
            if self.should_stop is not None and self.should_stop():
                raise Interrupted
            if self.report is not None:
                self.report(done, len(asks))

        streams = sample_streams(lm, asks, params, batch=self.requests, report=check)
        with closing(streams):
            for ask, found in streams:
                done += 1
                item = left[ask.key][0]
                if isinstance(found, Reject):
                    self.reject(found)
                    continue
                yield rollout_of(ask, found.completion, partial(self._score, item))

    def _score(self, item: Item, text: str) -> float:
        return min(1.0, max(0.0, self.problems.score(item, text).value))


def _seed_of(seed: int, step: int) -> int:
    """No two steps draw the same numbers, nor do runs of other seeds."""
    key = f"{seed}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
