"""What the runtime decodes means the same when it is read back, counted, or put together again
from its events: over random legal answers, near the last position, in a crowded pool."""

from __future__ import annotations

import random
from typing import Any

import pytest
from orchestras import run_all
from stubs import StubEngine
from test_pasta_session import AE, EOS, PE, TEXTS, VOCABULARY, WORD, P, S

from stretto.completion import Completion, complete
from stretto.dialects.pasta import PastaSession, PastaSettings
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.pasta_text import parse_ids, parse_text
from stretto.params import SamplingParams
from stretto.runtime import events
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler
from stretto.trace import Trace, derived_steps, is_drawn

MASKS = {unit: PastaMasks(VOCABULARY, unit) for unit in (1, 10, 30)}


class Orchestrator(StubEngine):
    """A model that likes tags and seldom ends."""

    def forward(self, runs: Any) -> Any:
        logits = super().forward(runs)
        logits[:, [P, S, AE, PE]] += 4
        logits[:, EOS] -= 2
        return logits


def answers(seed: int) -> list[tuple[Request, Completion, PastaSettings]]:
    """Three requests, decoded together."""
    rng = random.Random(seed)
    limit, page = rng.choice([90, 120, 300]), rng.choice([1, 4])
    unit = rng.choice([1, 10, 30])
    policy: Any = rng.choice(["predicted", "overlap", "fixed"])
    how = PastaSettings(policy, unit, rng.randrange(1, 60), limit)
    requests = []
    for sample in range(3):
        params = SamplingParams(
            max_tokens=rng.choice([5, 30, 100, 400]),
            temperature=rng.choice([0.5, 1.0, 3.0]),
            seed=seed,
            max_thread_tokens=rng.choice([None, 1, 3, 20]),
            stop=rng.choice([(), (), ("ab",), (" a b",)]),
            max_forks=rng.choice([0, 2, 64]),
        )
        request = Request(
            [WORD] * rng.choice([1, 2, 20, limit - 2, limit - 1]),
            PastaSession(MASKS[unit], how, max_forks=params.max_forks),
            params,
            decode=VOCABULARY.decode,
            end_ids=VOCABULARY.end_ids,
            max_positions=limit,
            sample=sample,
        )
        requests.append(request)
    engine = Orchestrator(len(TEXTS), max_positions=limit, num_slots=4000)
    num_slots = rng.choice([4000, limit + rng.randrange(10, 200)])
    run_all(Scheduler(engine, Pool(num_slots // page, page)), requests)
    return [(r, _completion(r, page), how) for r in requests]


def _completion(request: Request, page: int) -> Completion:
    annotated, issues = request.session.annotated(request.recorder) or ("", ())
    return complete(
        request,
        method="pasta",
        model="stub",
        engine="stub",
        page_size=page,
        annotated=annotated,
        issues=issues,
    )


def shape(trace: Trace, *, exact: bool) -> list[tuple[object, ...]]:
    return [
        (s.thread, s.role, s.sees, *((s.tokens, s.positions, s.markup) if exact else ()))
        for s in trace.segments
    ]


@pytest.mark.parametrize("part", range(5))
def test_what_is_decoded_is_what_is_read_back(part: int) -> None:
    for seed in range(20 * part, 20 * part + 20):
        for request, done, how in answers(seed):
            codes = {issue.code for issue in done.issues}
            assert codes <= {"clamped-tokens", "unfinished-promise"}
            assert [list(s.steps) for s in done.trace.segments] == derived_steps(done.trace)
            if "unfinished-promise" in codes:  # written out, it is text without an issue
                continue
            prompt = done.trace.segments[0].tokens
            read = parse_text(done.annotated, VOCABULARY, how, VOCABULARY.decode(prompt))
            assert shape(read.trace, exact=False) == shape(done.trace, exact=False)
            assert read.issues == done.issues
            assert read.text == request.document.text
            if all(s.tokens[-1] == AE for s in done.trace.segments if s.role == "child"):
                ids = [token for s in done.trace.response for token in s.tokens]
                again = parse_ids(prompt, ids, VOCABULARY, how)
                assert shape(again.trace, exact=True) == shape(done.trace, exact=True)


@pytest.mark.parametrize("part", range(5))
def test_what_is_decoded_is_counted_once(part: int) -> None:
    for seed in range(20 * part, 20 * part + 20):
        for request, done, how in answers(seed):
            drawn = sum(thread.num_tokens for thread in done.threads)
            usage = done.usage
            assert drawn == request.num_drawn <= request.params.max_tokens
            assert usage.completion_tokens + usage.control_tokens + usage.cut_tokens == drawn
            for thread in done.threads:
                own = [s for s in done.trace.response if s.thread == thread.id]
                origins = [o for s in own for o, p in _placed(s) if p == how.max_positions - 1]
                assert sum(map(is_drawn, origins)) <= 1, "two tokens drawn at the last position"
            assert _put_together(done) == request.document.text


def _placed(segment: Any) -> list[tuple[Any, int]]:
    return list(zip(segment.origins, segment.positions, strict=True))


def _put_together(done: Completion) -> str:
    """The text before any stop string cut it, from events alone."""
    own: dict[str, str] = {}
    children: dict[str, list[tuple[int, str]]] = {}
    for event in done.events:
        if isinstance(event, events.ThreadStart):
            own[event.thread], children[event.thread] = "", []
            if event.parent is not None:
                children[event.parent].append((event.at, event.thread))
        elif isinstance(event, events.Token | events.ThreadEnd):
            own[event.thread] += event.text

    def text_of(thread: str) -> str:
        pieces, start = [], 0
        for at, child in children[thread]:
            pieces += [own[thread][start:at], text_of(child)]
            start = at
        return "".join([*pieces, own[thread][start:]])

    return text_of("main")
