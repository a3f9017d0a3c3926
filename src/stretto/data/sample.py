"""Answers sampled from a model with the project's own runtime: many prompts share each pass."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.data.rows import Answer, Reject, prompt_id
from stretto.errors import InvalidInput
from stretto.params import SamplingParams

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.lm import LM
    from stretto.methods import Method
    from stretto.stream import Stream
    from stretto.trace import Origin

LETTERS: dict[Origin, str] = {"sampled": "s", "forced": "f", "injected": "i", "prompt": "p"}
"""Letters of `Answer.origins`; a method may place prompt tokens, which are in no answer."""


@dataclass(frozen=True)
class Task:
    """One answer to sample: sample number `sample` of a prompt."""

    prompt: str
    sample: int = 0

    @property
    def key(self) -> str:
        """That of the `Answer`, or `Reject`, which comes of it."""
        return f"{prompt_id(self.prompt)}/{self.sample}"


def request_seed(seed: int, prompt: str) -> int:
    """The seed of a prompt's requests: a function of both, never of its place in a file."""
    key = f"{seed}/{prompt_id(prompt)}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def tasks_of(prompts: Iterable[str], n: int = 1) -> list[Task]:
    """`n` tasks a prompt, in order; a prompt that comes again counts once."""
    return [Task(prompt, k) for prompt in dict.fromkeys(prompts) for k in range(n)]


def sample_answers(
    lm: LM,
    tasks: Sequence[Task],
    params: SamplingParams,
    *,
    method: str | Method = "auto",
    batch: int = 32,
    keep_prompts: bool = True,
    keep_logprobs: bool = True,
    report: Callable[[int], None] | None = None,
) -> Iterator[Answer | Reject]:
    """Answers in the order in which they are done, with about `batch` requests under way.

    What an answer says depends on the model, `params` (its `seed` is the run's), prompt and sample
    number; not on the other tasks, their order or `batch`, as far as the engine keeps its promise.
    A prompt that cannot be answered, such as one that does not fit, comes as a `Reject`. `report`
    is told after each pass how many tokens all requests have drawn so far. Leaving the iterator
    early cancels what is under way.
    """
    streams = sample_streams(lm, tasks, params, method=method, batch=batch, report=report)
    keep = {"keep_prompts": keep_prompts, "keep_logprobs": keep_logprobs}
    with closing(streams):
        for task, done in streams:
            yield done if isinstance(done, Reject) else answer_of(task, done.completion, **keep)


def sample_streams(
    lm: LM,
    tasks: Sequence[Task],
    params: SamplingParams,
    *,
    method: str | Method = "auto",
    batch: int = 32,
    report: Callable[[int], None] | None = None,
) -> Generator[tuple[Task, Stream | Reject], None, None]:
    """As `sample_answers`, each task with its finished stream: all that happened in it."""
    if batch < 1:
        raise InvalidInput(f"batch must be at least 1, got {batch}")
    waiting = deque(tasks)
    running: list[tuple[Task, Stream]] = []
    num_drawn = 0
    try:
        while waiting or running:
            while waiting and len(running) < batch:
                task = waiting.popleft()
                started = _submit(lm, task, params, method)
                if isinstance(started, Reject):
                    yield task, started
                else:
                    running.append((task, started))
            if not running:
                continue
            lm.step(running[0][1].request)
            if report is not None:
                report(num_drawn + sum(stream.request.num_drawn for _, stream in running))
            done = [pair for pair in running if pair[1].request.is_done]
            running = [pair for pair in running if not pair[1].request.is_done]
            for task, stream in done:
                num_drawn += stream.request.num_drawn
                stream.request.check()
                yield task, stream
    finally:
        for _, stream in running:
            stream.close()


def _submit(lm: LM, task: Task, params: SamplingParams, method: str | Method) -> Stream | Reject:
    own = replace(params, seed=request_seed(params.seed, task.prompt))
    try:
        return lm.submit(task.prompt, own, method=method, sample=task.sample)
    except InvalidInput as error:
        reasons = [f"not-answerable: {error}"]
        return Reject(prompt_id=prompt_id(task.prompt), sample=task.sample, reasons=reasons)


def answer_of(
    task: Task, completion: Completion, *, keep_prompts: bool = True, keep_logprobs: bool = True
) -> Answer:
    """The row of a completion. Its log-probs are those the sampler recorded, by thread and order;
    the end of sequence is in no trace and has none."""
    ids, letters, logprobs = _tokens(completion)
    usage = completion.usage
    return Answer(
        prompt_id=prompt_id(task.prompt),
        sample=task.sample,
        prompt=task.prompt if keep_prompts else None,
        text=completion.text,
        finish_reason=completion.finish_reason,
        ids=ids,
        origins=letters,
        logprobs=logprobs if keep_logprobs else None,
        num_prompt_tokens=usage.prompt_tokens,
        sequential_steps=usage.sequential_steps,
        completion_tokens=usage.completion_tokens,
        control_tokens=usage.control_tokens,
    )


def _tokens(completion: Completion) -> tuple[list[int], str, list[float | None]]:
    """Ids, origins and log-probs of the response in document order.

    Events come in the order of placing, within a thread as in the trace; each is matched with its
    token. A log-prob is rounded to 7 significant digits, which is float32.
    """
    from stretto.runtime.events import Token

    placed: dict[str, deque[Token]] = {}
    for event in completion.events:
        if isinstance(event, Token) and event.origin != "prompt":
            placed.setdefault(event.thread, deque()).append(event)
    ids: list[int] = []
    letters: list[str] = []
    logprobs: list[float | None] = []
    for segment in completion.trace.response:
        own = placed.get(segment.thread, deque())
        for token, origin in zip(segment.tokens, segment.origins, strict=True):
            event = own.popleft()
            if event.token != token:
                raise AssertionError(f"event {event} stands where the trace has token {token}")
            ids.append(token)
            letters.append(LETTERS[origin])
            value = event.logprob
            logprobs.append(None if value is None else float(f"{value:.7g}"))
    return ids, "".join(letters), logprobs


class Tally:
    """What a run of sampling came to: counts by finish reason, tokens, and time of this run."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.num_rejected = 0
        self.completion_tokens = 0
        self.control_tokens = 0
        self.sequential_steps = 0
        self._started = time.perf_counter()

    @property
    def num_answers(self) -> int:
        return self.reasons.total()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def add(self, row: Answer | Reject) -> None:
        if isinstance(row, Reject):
            self.num_rejected += 1
            return
        self.reasons[row.finish_reason] += 1
        self.completion_tokens += row.completion_tokens
        self.control_tokens += row.control_tokens
        self.sequential_steps += row.sequential_steps

    def to_json(self) -> dict[str, object]:
        seconds = self.seconds
        drawn = self.completion_tokens + self.control_tokens
        return {
            "answers": self.num_answers,
            "finish_reasons": dict(sorted(self.reasons.items())),
            "rejected": self.num_rejected,
            "completion_tokens": self.completion_tokens,
            "control_tokens": self.control_tokens,
            "sequential_steps": self.sequential_steps,
            "seconds": round(seconds, 3),
            "tokens_per_s": round(drawn / seconds, 1) if seconds > 0 else 0.0,
        }
