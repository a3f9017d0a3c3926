"""Requests of dialect `planned` whose plans are forced and whose spans are drawn, for tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from orchestras import (
    Alphabet,
    RandomSession,
    make_request,
    one_pass,
    run_all,
    scheduler_for,
    scripted,
)
from stubs import StubEngine

from stretto.dialects.planned import PLANNED_FORMS, PlanCaps, PlannedSession, PlannedSettings
from stretto.dialects.planned_masks import PlannedMasks
from stretto.effects import Close, Denoise, Join, Move, Place, Resume, Wait
from stretto.params import ORDERS, SamplingParams
from stretto.recorder import OpenThread, Recorder
from stretto.runtime import events
from stretto.runtime.request import Request
from stretto.runtime.views import Run
from stretto.trace import Trace

VOCABULARY = Alphabet(PLANNED_FORMS)
CONTROL = VOCABULARY.control
END = next(iter(VOCABULARY.end_ids))
MASKS = PlannedMasks(VOCABULARY, 1)
NUM_SLOTS = 512
TOLERANCE = 1e-4
seeds = st.integers(0, 10**6)
variants = st.sampled_from(["sparse", "dense"])
conventions = st.sampled_from(["shifted", "aligned"])
Plan = list[list[int]]
"""The lengths of each round's spans; the unit is one token."""


def plan_ids(plan: Plan, seed: int = 0) -> list[int]:
    """What main draws for a plan; the unit is one token."""
    rng, ids = random.Random(seed), []
    for number, lengths in enumerate(plan):
        ids += [CONTROL["sync"]] if number else []
        for length in lengths:
            topic = [rng.randrange(10, 60) for _ in range(rng.randrange(3))]
            digits = [int(d) for d in str(length)]
            ids += [CONTROL["promise"], *topic, CONTROL["tokens"], *digits, CONTROL["promise_end"]]
    return [*ids, END]


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    return [
        [rng.randrange(1, 8) for _ in range(rng.randrange(1, 4))]
        for _ in range(rng.randrange(1, 4))
    ]


def planned(
    plan: Plan,
    seed: int = 0,
    *,
    variant: str = "sparse",
    convention: str = "shifted",
    caps: PlanCaps | None = None,
    script: Callable[[str, int], int | None] | None = None,
    max_positions: int = 512,
    sample: int = 0,
    sampling_seed: int | None = None,
    **params: Any,
) -> Request:
    """A request whose plan is forced and whose spans are drawn. The prompt and the topics go by
    `seed`, and so do the draws, unless they have a seed of their own."""
    rng = random.Random(f"prompt {seed}")
    drawn_by = seed if sampling_seed is None else sampling_seed
    ids = plan_ids(plan, seed)
    return Request(
        [rng.randrange(60) for _ in range(rng.randrange(1, 9))],
        PlannedSession(MASKS, PlannedSettings(variant, convention, unit=1), caps),
        SamplingParams(**{"max_tokens": 500, "seed": drawn_by, **params}),
        decode=VOCABULARY.decode,
        end_ids=VOCABULARY.end_ids,
        max_positions=max_positions,
        sample=sample,
        script=script or (lambda thread, i: ids[i] if thread == "main" else None),
    )


def knobs(seed: int) -> dict[str, Any]:
    """Random ways of denoising."""
    rng = random.Random(f"knobs {seed}")
    chosen: dict[str, Any] = {
        "order": rng.choice(ORDERS),
        "early_finish": rng.random() < 0.3,
        "temperature": rng.choice([0.0, 0.7]),
        "top_p": rng.choice([1.0, 0.9]),
    }
    if rng.random() < 0.3:
        return {**chosen, "threshold": rng.choice([0.0, 0.02, 0.1, 1.5])}
    return {**chosen, "steps_ratio": rng.choice([1.0, 0.5, 0.3])}


class Snapshots:
    """An engine that keeps the trace of `request` at every pass, and all logits of the pass."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.request: Request | None = None
        self.passes: list[tuple[Trace, dict[int, int], list[Run], torch.Tensor]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def forward(self, runs: list[Run]) -> torch.Tensor:
        logits = self.engine.forward(runs)
        if self.request is not None:
            recorder = self.request.recorder
            ids = {s.handle: i for i, s in enumerate(recorder.document_order())}
            self.passes.append((recorder.freeze(), ids, runs, logits))
        return logits


def worst_gap(model: Any, snapshots: Snapshots) -> float:
    """Largest difference between a pass's logits and those of one masked pass over the trace as it
    stood then: nothing cached, masks as in training."""
    worst = 0.0
    for trace, ids, runs, logits in snapshots.passes:
        reference = one_pass(model, trace)
        starts = [0, *itertools.accumulate(len(s) for s in trace.segments)]
        row = 0
        for run in runs:
            for index in run.kept:
                if run.view.memory is snapshots.request.memory:
                    flat = starts[ids[run.segment.handle]] + run.start + index
                    worst = max(worst, float((reference[flat] - logits[row]).abs().max()))
                row += 1
    return worst


class FixedEngine(StubEngine):
    """Logits that depend on the row's position alone."""

    def __init__(self, seed: int) -> None:
        super().__init__(96)
        self.table = torch.randn(512, 96, generator=torch.Generator().manual_seed(seed)) * 2

    def forward(self, runs: list[Run]) -> torch.Tensor:
        super().forward(runs)
        return self.table[[run.positions[i] for run in runs for i in run.kept]]


def counted(request: Request, **kw: Any) -> StubEngine:
    engine = StubEngine(96, **kw)
    run_all(scheduler_for(engine, engine.num_slots), [request])
    return engine


def span_steps(request: Request) -> dict[str, list[int]]:
    trace = request.recorder.freeze()
    return {
        s.thread: [step for step in s.steps if step is not None]
        for s in trace.segments
        if s.kind == "block"
    }


def codes(request: Request) -> list[str]:
    annotated = request.session.annotated(request.recorder)
    return [] if annotated is None else [issue.code for issue in annotated[1]]


def tokens_of(request: Request, thread: str) -> list[events.Token]:
    """What was drawn on a thread, in order."""
    log = (e for e in request.log.events if isinstance(e, events.Token))
    return [e for e in log if e.thread == thread and e.origin == "sampled"]


class BlockSession(RandomSession):
    """A made-up dialect in which any thread may have blocks written, among all else it does: before
    one of its tokens, or after its last one, then seen by nobody. Half of the time what follows is
    asked for once they are written."""

    def __init__(self, seed: int, *, is_shifted: bool) -> None:
        super().__init__(seed)
        self._is_shifted = is_shifted
        self._later: dict[str, list[Move]] = {}

    def request(self) -> Request:
        script = scripted(self.seed)
        request = make_request(
            self.seed, self, script=lambda thread, i: None if "~" in thread else script(thread, i)
        )
        request.params = SamplingParams(max_tokens=500, **knobs(self.seed))
        return request

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        moves = super().feed(recorder, thread, token)
        rng = random.Random(f"blocks {self.seed}/{thread.name}/{thread.num_drawn}")
        if any(isinstance(move, Wait) for move in moves) or rng.random() > 0.3:
            return moves
        is_dense, position = rng.random() < 0.5, thread.next_position
        blocks: list[Denoise] = []
        for number in range(rng.randrange(1, 4)):
            name = f"{thread.name}~{thread.num_drawn}{'abc'[number]}"
            length = rng.randrange(1, 6)
            blocks.append(
                Denoise(
                    name, length, position, dense=is_dense, mask=95, before=(94,), after=(93,),
                    shifted=self._is_shifted,
                )
            )  # fmt: skip
            position += length + 2
        names = tuple(block.child for block in blocks)
        if isinstance(moves[-1], Close):
            return [*moves[:-1], *blocks, Wait(names), moves[-1]]
        at = next(i for i, move in enumerate(moves) if isinstance(move, Place))
        after: list[Move] = [Join(names), *moves[at:]]
        if rng.random() < 0.5:
            return [*blocks, Wait(names), *after]
        self._later[thread.name] = after
        return [*blocks, Wait(names), Resume()]

    def resumed(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return self._later.pop(thread.name)
