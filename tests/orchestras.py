"""Random traces for tests, over scripted tokens: a made-up dialect that forks, joins, cuts and
evicts at random, and what models of the real ones could write."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.dialects import DialectSettings, get_dialect
from stretto.dialects.base import Legal
from stretto.dialects.registers import is_register
from stretto.effects import Close, Cut, Evict, Fork, Join, Move, Place, Wait
from stretto.engines.hf import WITHOUT_LAYER_TYPES, HFEngine
from stretto.masks import dense_mask, flat_positions, flat_tokens
from stretto.params import SamplingParams
from stretto.recorder import OpenThread, Recorder
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler
from stretto.runtime.views import Run
from stretto.trace import Trace


@dataclass
class RandomSession:
    """Each drawn token brings random moves, from a generator keyed by (seed, thread, index)."""

    seed: int
    max_threads: int = 6
    max_length: int = 12
    rates: dict[str, float] = field(
        default_factory=lambda: {"fork": 0.25, "join": 0.2, "evict": 0.25, "cut": 0.1}
    )
    main_role: str = "main"
    budget: Callable[[], int] = lambda: 0

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        rng = random.Random(f"{self.seed}/{thread.name}/{thread.num_drawn}")
        moves: list[Move] = []
        children = [t.name for t in recorder.threads.values() if t.parent == thread.name]
        joined = {s for h in thread.sees for s in [recorder.segments[h].thread]}
        fresh = tuple(c for c in children if c not in joined)
        if fresh and rng.random() < self.rates["join"]:
            moves += [Wait(fresh), Join(fresh, rebase=rng.random() < 0.5)]
        if thread.sees and rng.random() < self.rates["evict"]:
            moves.append(Evict(rng.choice(list(thread.sees))))
        if rng.random() < self.rates["cut"]:
            moves.append(Cut(position=thread.next_position + rng.randrange(4)))
        moves.append(Place(token))
        if thread.num_drawn >= rng.randrange(2, self.max_length):
            last = [Place(rng.randrange(90), "injected") for _ in range(rng.randrange(3))]
            return [*moves, *last, Close("stop")]
        if len(recorder.threads) < self.max_threads and rng.random() < self.rates["fork"]:
            inject = tuple(rng.randrange(90) for _ in range(rng.randrange(1, 4)))
            name = f"{thread.name}.{len(children) + 1}"
            resume = thread.next_position + rng.randrange(1, 12)
            moves.append(Fork(name, inject, resume=resume))
        return moves

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        return [Close(reason)]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> None:
        return None

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal | None:
        return None


def scripted(seed: int) -> Callable[[str, int], int]:
    """Random tokens keyed by (seed, thread, index)."""
    return lambda thread, index: random.Random(f"{seed}:{thread}:{index}").randrange(90)


END, REASONING_END = 60, 61


class Alphabet:
    """A vocabulary of 96 ids, as many as a tiny model has rows: digits and characters, an end, an
    end of reasoning, and from 95 down a dialect's control tokens. Text round-trips."""

    end_ids = frozenset({END})
    reasoning_end = REASONING_END
    size = 96

    def __init__(self, forms: Mapping[str, str]) -> None:
        self.control = {name: 95 - i for i, name in enumerate(forms)}
        self.spare_ids = frozenset(range(REASONING_END + 1, 96 - len(forms)))
        self._texts = {95 - i: form for i, form in enumerate(forms.values())}
        self._texts |= {i: str(i) if i < 10 else chr(0x3B0 + i) for i in range(60)}
        self._texts |= {END: "</s>", REASONING_END: "</think>"}
        self._ids = {text: i for i, text in self._texts.items() if i <= REASONING_END}
        self._piece = re.compile("</think>|.", re.DOTALL)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(piece, 59) for piece in self._piece.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts.get(i, "?") for i in ids)


@dataclass(frozen=True)
class Writer:
    """What a model of a dialect with registers writes: `script` gives each thread's tokens, from a
    generator keyed by (seed, thread), now and then a control token where it makes no sense."""

    dialect: str
    seed: int
    num_registers: int = 3
    grace: bool = False
    num_items: int = 24
    nonsense: float = 0.03

    @property
    def settings(self) -> DialectSettings:
        return DialectSettings(num_registers=self.num_registers, grace=self.grace)

    @property
    def vocabulary(self) -> Alphabet:
        return Alphabet(get_dialect(self.dialect).forms(self.settings))

    def request(self, **changes: object) -> Request:
        """The request of a random prompt that is answered so."""
        made = get_dialect(self.dialect).sessions(self.vocabulary, self.settings, 512)
        options = {
            "decode": self.vocabulary.decode,
            "end_ids": frozenset({END}),
            "script": self.script(),
        }
        return make_request(self.seed, made(SamplingParams()), **{**options, **changes})

    def script(self) -> Callable[[str, int], int]:
        lines: dict[str, list[int]] = {}

        def token(thread: str, index: int) -> int:
            line = lines.get(thread)
            if line is None:
                line = lines[thread] = self.line(thread)
            return line[index] if index < len(line) else END

        return token

    def line(self, thread: str) -> list[int]:
        """A thread's tokens, up to its end."""
        rng, control = random.Random(f"{self.seed}:{thread}"), self.vocabulary.control
        registers = [i for name, i in control.items() if is_register(name)]
        is_child, tokens = thread != "main", []
        for _ in range(rng.randrange(1, 6 if is_child else self.num_items)):
            kind = rng.random()
            if kind < self.nonsense:
                tokens.append(rng.choice(list(control.values())))
            elif kind < 0.45:
                tokens.append(rng.choice(registers))
            elif kind < 0.6 and "promise" in control and not is_child:
                topic = [rng.randrange(10, 60) for _ in range(rng.randrange(3))]
                promise = [control["promise"], *topic, control["tokens"], rng.randrange(1, 4)]
                tokens += [*promise, control["promise_end"]]
            elif kind < 0.7 and "sync" in control and not is_child:
                tokens.append(control["sync"])
            else:
                tokens += [rng.randrange(60) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.2:
            tokens.insert(rng.randrange(len(tokens) + 1), REASONING_END)
        return [*tokens, control["async_end"]] if is_child else tokens


class Recording:
    """An engine that also keeps each logit row by (request recorder, segment handle, index)."""

    def __init__(self, engine: HFEngine) -> None:
        self.engine = engine
        self.rows: dict[tuple[int, int, int], Tensor] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def forward(self, runs: list[Run]) -> Tensor:
        logits = self.engine.forward(runs)
        row = 0
        for run in runs:
            for index in run.kept:
                if run.segment.kind == "causal":  # a block is written several times
                    key = (id(run.view.memory), run.segment.handle, run.start + index)
                    self.rows[key] = logits[row]
                row += 1
        return logits


def make_request(seed: int, session: object = None, **changes: object) -> Request:
    rng = random.Random(f"prompt {seed}")
    prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 12))]
    return Request(
        prompt,
        session or RandomSession(seed),
        SamplingParams(max_tokens=500),
        **{
            "decode": lambda ids: " ".join(map(str, ids)),
            "end_ids": frozenset(),
            "max_positions": 512,
            "script": scripted(seed),
            **changes,
        },
    )


def run_all(scheduler: Scheduler, requests: list[Request], limit: int = 2000) -> None:
    """Decodes to the end, checking the books after every step."""
    for request in requests:
        scheduler.submit(request)
    for _ in range(limit):
        if not scheduler.step():
            break
        scheduler.check_integrity()
    for request in requests:
        request.check()
        assert request.is_done
    scheduler.check_integrity()
    assert scheduler.pool.num_free_pages == scheduler.pool.num_pages


def model_mask(model: object, trace: Trace) -> object:
    """`visible` and the model's windows, by position, in the form its attention takes."""
    config = model.config
    visible, at = dense_mask(trace), flat_positions(trace)
    masks = {"full_attention": visible}
    if getattr(config, "sliding_window", None) is not None:
        distance = at[:, None] - at[None, :]
        masks["sliding_attention"] = visible & (distance < config.sliding_window)
    if config._attn_implementation == "eager":
        masks = {k: torch.zeros(m.shape).masked_fill(~m, -1e30) for k, m in masks.items()}
    masks = {k: m[None, None] for k, m in masks.items()}
    return masks["full_attention"] if config.model_type in WITHOUT_LAYER_TYPES else masks


def one_pass(model: object, trace: Trace) -> Tensor:
    """Logits of one masked forward pass over a whole trace, the training view of it."""
    with torch.inference_mode():
        return model(
            input_ids=flat_tokens(trace)[None],
            position_ids=flat_positions(trace)[None],
            attention_mask=model_mask(model, trace),
            use_cache=False,
        ).logits[0]


def largest_gap(model: object, request: Request, recording: Recording) -> float:
    """Largest difference between decoded logits and the one masked pass, over all drawn rows."""
    trace = request.recorder.freeze()
    reference = one_pass(model, trace)
    order = list(request.recorder.document_order())
    offset, starts = 0, {}
    for segment in order:
        starts[segment.handle] = offset
        offset += len(segment.tokens)
    mine = {k: v for k, v in recording.rows.items() if k[0] == id(request.memory)}
    assert mine
    return max(
        float((reference[starts[handle] + index] - logits).abs().max())
        for (_, handle, index), logits in mine.items()
    )


def scheduler_for(engine: object, num_pages: int, page_size: int = 1, **kw: object) -> Scheduler:
    return Scheduler(engine, Pool(num_pages, page_size, kw.pop("order", None)), **kw)


def gap_of_a_missed_change(model: object, engine: object, num_slots: int) -> float:
    """`largest_gap` where views never learn that a segment is hidden: it must be noticed."""
    recording = Recording(engine)
    session = RandomSession(3, rates={"fork": 0.5, "join": 0.5, "evict": 0.5, "cut": 0.2})
    request = make_request(3, session)
    scheduler = scheduler_for(recording, num_slots)
    scheduler.submit(request)
    while scheduler.step():
        for thread in request.recorder.threads.values():
            thread.changes = [c if c[0] != "hide" else ("see", c[1]) for c in thread.changes]
    request.check()
    return largest_gap(model, request, recording)
