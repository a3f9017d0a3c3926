"""Whatever a model writes: nothing raises, everything ends, the pool is as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import RandomSession, make_request, run_all
from stubs import StubEngine
from test_pasta_session import EOS, VOCABULARY

from stretto.dialects.pasta import PastaSession, PastaSettings
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.pasta_text import parse_ids
from stretto.params import SamplingParams
from stretto.recorder import OpenSegment
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler
from stretto.trace import visible

MASKS = PastaMasks(VOCABULARY, 10)
POLICIES = ("predicted", "overlap", "fixed")


PROMISE = [0, 8, 1, 12, 2]


def hostile(seed: int) -> Callable[[str, int], int | None]:
    """A model's output: whole and broken promises, tags in bad places, any ids at all, with
    stretches left to the sampler."""
    written: dict[str, list[int | None]] = {}

    def script(thread: str, index: int) -> int | None:
        if thread not in written:
            rng = random.Random(f"{seed}/{thread}")
            tokens = written[thread] = []
            while len(tokens) < 100:
                tokens += rng.choice(
                    [
                        PROMISE,
                        PROMISE,
                        PROMISE[: rng.randrange(1, 5)],
                        [rng.choice([3, 4, 4, 5, 5])],
                        [
                            rng.choice([7, 8, 8, rng.randrange(7, 22)])
                            for _ in range(rng.randrange(9))
                        ],
                        [rng.randrange(VOCABULARY.size) if rng.random() < 0.2 else 8],
                        [None] * rng.randrange(6),
                    ]
                )
        return written[thread][index % 100]

    return script


def hostile_request(seed: int, max_positions: int = 512) -> Request:
    rng = random.Random(seed)
    params = SamplingParams(
        max_tokens=rng.choice([1, 5, 30, 120]),
        temperature=rng.choice([0.0, 0.7, 5.0]),
        top_k=rng.choice([0, 3]),
        top_p=rng.choice([1.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        stop=rng.choice([(), (), ("x\n b",), (" a b 1", "</async>")]),
        stop_ids=frozenset(rng.choice([(), (), (), (9,)])),
        seed=seed,
        max_thread_tokens=rng.choice([None, 3]),
        max_forks=rng.choice([0, 1, 64]),
    )
    settings_ = PastaSettings(rng.choice(POLICIES), 10, 50, max_positions)
    return Request(
        [rng.randrange(7, 20) for _ in range(rng.randrange(1, 10))],
        PastaSession(MASKS, settings_, max_forks=params.max_forks),
        params,
        decode=VOCABULARY.decode,
        end_ids=frozenset({EOS}),
        max_positions=max_positions,
        script=hostile(seed),
    )


def check_finished(request: Request) -> None:
    assert request.finish_reason in ("stop", "length")
    assert all(not t.is_open for t in request.recorder.threads.values())
    assert sum(t.num_drawn for t in request.recorder.threads.values()) <= request.params.max_tokens
    annotated = request.session.annotated(request.recorder)
    assert annotated is not None
    assert all(0 <= issue.at <= len(annotated[0]) for issue in annotated[1])
    positions = [p for s in request.recorder.segments for p in s.positions]
    assert max(positions) < request.recorder.max_positions


@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_streams_end_and_leave_the_pool_as_it_was(part: int) -> None:
    """1,000 streams a part, 25 at a time, in a pool so small that requests are preempted."""
    rng = random.Random(part)
    for batch in range(40):
        page_size = rng.choice([1, 2, 7])
        num_pages = rng.choice([60, 150, 700]) // page_size
        engine = StubEngine(VOCABULARY.size, num_slots=num_pages * page_size)
        scheduler = Scheduler(engine, Pool(num_pages, page_size))
        max_positions = rng.choice([24, 100, 512])
        seeds = range(part * 1000 + batch * 25, part * 1000 + batch * 25 + 25)
        requests = [hostile_request(seed, max_positions) for seed in seeds]
        run_all(scheduler, requests, limit=50_000)
        for request in requests:
            check_finished(request)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, VOCABULARY.size - 1), max_size=60))
def test_any_ids_parse(ids: list[int]) -> None:
    parsed = parse_ids([7, 8], ids, VOCABULARY, PastaSettings())
    assert parsed.trace.num_tokens >= 0
    assert all(0 <= issue.at < len(ids) for issue in parsed.issues)


def stub_logits(request: Request, engine: StubEngine) -> dict[tuple[int, int], Any]:
    """The stub's second layer of every token, from `visible` alone, by (segment, token)."""
    import numpy as np
    from stubs import _mix

    trace = request.recorder.freeze()
    flat = [(s, i) for s in trace.segments for i in range(len(s))]
    first = _mix(
        np.array([s.tokens[i] * (1 << 32) + s.positions[i] for s, i in flat], dtype=np.uint64)
    )
    sees = np.array([[visible(q, i, k, j) for k, j in flat] for q, i in flat])
    second = _mix(first + np.where(sees, first, np.uint64(0)).sum(axis=1, dtype=np.uint64))
    return {(s.id, i): value for (s, i), value in zip(flat, second, strict=True)}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 3]),
    max_rows=st.sampled_from([1, 2, 512]),
)
def test_every_row_sees_exactly_what_visible_says(seed: int, page_size: int, max_rows: int) -> None:
    """Bit for bit, on an engine whose state is a hash of all that a row has seen."""

    class Remembering(StubEngine):
        def forward(self, runs: Any) -> Any:
            logits = super().forward(runs)
            for run in runs:
                for offset, slot in enumerate(run.slots):
                    key = (id(run.view.memory), run.segment.handle, run.start + offset)
                    memory[key] = self.state[1, slot]
            return logits

    memory: dict[tuple[int, int, int], Any] = {}
    engine = Remembering(96, num_slots=600)
    requests = [make_request(seed + k, RandomSession(seed + k, max_length=20)) for k in range(3)]
    scheduler = Scheduler(engine, Pool(150 // page_size, page_size), max_rows)
    run_all(scheduler, requests)
    for request in requests:
        if request.finish_reason != "stop":
            continue
        order: list[OpenSegment] = list(request.recorder.document_order())
        ids = {s.handle: i for i, s in enumerate(order)}
        expected = stub_logits(request, engine)
        mine = {k[1:]: v for k, v in memory.items() if k[0] == id(request.memory)}
        assert mine
        for (handle, index), value in mine.items():
            assert value == expected[ids[handle], index]
