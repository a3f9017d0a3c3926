"""Stretto against other runtimes: same prompts, same weights, one process, interleaved pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.bench.pairs import Report, bootstrap_median, rounded, run_pair
from stretto.bench.program import ForkProgram, Target
from stretto.bench.sides import Decoded, OwnSide, Side, Task
from stretto.bench.source import prompt_of, starts_of
from stretto.errors import InvalidInput, StrettoError, UnknownName
from stretto.params import SamplingParams
from stretto.recorder import MAIN
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.bench.journal import Cell, Journal
    from stretto.bench.peer_llama import LlamaSide
    from stretto.bench.source import Source

PAUSE_S = 0.2
"""Between two sides of a pair: a pool of threads that has just run spins for a while, and would
take the cores from the other side's."""

FULL_PRECISIONS = ("float32", "bfloat16", "BF16")
MAX_LOGIT_ERROR = 0.2
"""Of a side in one of these. One that computes another model is off by 1 or more."""

DEFINITIONS = {
    "prompts": "both sides go on from the same prompt of `context` tokens, computed once, with the "
    "same start token for each of `rows` sequences, and decode greedily",
    "stretto": "threads forked from one request over one prefix; the time is Scheduler.step's: "
    "pass, books, drawing, log-probabilities, events",
    "llama.cpp": "llama_decode and an argmax a row, by llama-cpp-python; sequences share the "
    "prefix's cells (llama_memory_seq_cp in a unified cache); keys and values in float16, its "
    "default; all matrices in the precision named, embedding and head included",
    "transformers": "transformers.generate, SDPA, its default cache, the prefix's keys and values "
    "repeated for each row; from the first token's logits to the last one's",
    "threads": "every side computes with `threads` threads, all cores unless told otherwise",
    "ratio": "median over pairs of the peer's time / ours for the same number of steps and rows: "
    "our tokens per second over the peer's",
    "low, high": "percentile bootstrap 95% interval of `ratio` over pairs",
    "pairs": "interleaved, the two sides in alternating order, after an unmeasured one; the "
    f"process sleeps {PAUSE_S} s before each side, so that no thread pool spins beside another",
    "*_tokens_per_s, *_step_ms": "median over pairs, of all rows together",
    "agree_tokens": "greedy tokens from the first on in which the two sides agree, mean over rows; "
    "of `steps`",
    "*_logit_error": "distance of the first step's logits from those of transformers in float32 "
    "with the same weights, over the norm of these less their mean; a side in float32 or bfloat16 "
    f"must be below {MAX_LOGIT_ERROR}",
}

FORK_DEFINITIONS = {
    "forks": "our side: one request that reads the prompt and forks this many threads",
    "tokens": "tokens that each fork draws; the peer draws forks x tokens tokens one after the "
    "other from the same prompt",
    "forks_s": "wall clock of our request from submission to end, prompt and text included; "
    "median over pairs",
    "sequential_s": "wall clock of the peer from the prompt to the last token; median over pairs",
    "forks_ratio": "median over pairs of sequential_s / forks_s",
    "forks_low, forks_high": "percentile bootstrap 95% interval of `forks_ratio` over pairs",
    "fastest": "whether this is the peer with the least sequential_s",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A runtime that may be installed. `package`: what pip calls it; `has_side`: it is measured."""

    name: str
    module: str
    package: str
    has_side: bool = False

    @property
    def status(self) -> str:
        """`measured`, or why it is not and what to do."""
        if find_spec(self.module) is None:
            return f"not installed; pip install {self.package}"
        return "measured" if self.has_side else "installed, but there is no side for it"

    @property
    def version(self) -> str | None:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


KINDS = (
    Kind("llama.cpp", "llama_cpp", "llama-cpp-python", has_side=True),
    Kind("transformers", "transformers", "transformers", has_side=True),
    Kind("vllm", "vllm", "vllm"),
    Kind("onnxruntime-genai", "onnxruntime_genai", "onnxruntime-genai"),
    Kind("openvino", "openvino_genai", "openvino-genai"),
)


@dataclass(frozen=True)
class Plan:
    """What to measure. `forks` 0 leaves the end-to-end comparison out."""

    rows: Sequence[int]
    contexts: Sequence[int]
    steps: int
    pairs: int
    forks: int
    fork_tokens: int
    seed: int

    def room_needed(self) -> tuple[int, int]:
        """Positions and KV slots of our side."""
        context = max(self.contexts)
        task = Task([0] * context, [[0] * max(self.rows)], self.steps)
        longest = max(task.num_positions, context + self.forks * self.fork_tokens + 1)
        return longest, max(task.num_slots, context + self.forks * (self.fork_tokens + 2))


def chosen_kinds(names: Sequence[str]) -> list[Kind]:
    """The kinds named; raises `UnknownName`, or `InvalidInput` for one that is not installed."""
    known = {kind.name: kind for kind in KINDS}
    for name in names:
        if name not in known:
            raise UnknownName("peer", name, list(known))
        if known[name].status != "measured":
            raise InvalidInput(f"peer {name!r} is {known[name].status}")
    return [known[name] for name in names]


def statuses(chosen: Sequence[Kind]) -> list[dict[str, Any]]:
    """Name, status and version of every known kind."""
    return [
        {
            "name": kind.name,
            "status": "left out" if kind.status == "measured" and kind not in chosen
            else kind.status,
            "version": kind.version,
        }
        for kind in KINDS
    ]  # fmt: skip


class Lineup:
    """The sides of all peers, made of one source's weights when first asked for, and kept."""

    def __init__(
        self, source: Source, kinds: Sequence[Kind], num_threads: int, report: Report
    ) -> None:
        self._source = source
        self._kinds = kinds
        self._num_threads = num_threads
        self._report = report
        self._models: dict[str, Any] = {}
        self._llama: dict[str, LlamaSide] = {}
        self._references: dict[tuple[int, tuple[int, ...]], NDArray[np.float32]] = {}
        names = {kind.name for kind in kinds}
        self.llama_precisions: Sequence[str] = ()
        if "llama.cpp" in names:
            from stretto.bench.gguf_file import PRECISIONS, check_writable

            check_writable(self.model("bfloat16").config)
            self.llama_precisions = PRECISIONS
        self._makers: dict[str, Callable[[], Side]] = {
            f"llama.cpp {precision}": partial(self.llama, precision)
            for precision in self.llama_precisions
        }
        if "transformers" in names:
            for dtype in ("bfloat16", "float32"):
                self._makers[f"transformers {dtype}"] = partial(self.transformers, dtype)

    @property
    def names(self) -> list[str]:
        return list(self._makers)

    def side(self, name: str) -> Side:
        return self._makers[name]()

    def model(self, dtype: str) -> Any:
        if dtype not in self._models:
            self._models[dtype] = self._source.hf_model(dtype)
        return self._models[dtype]

    def transformers(self, dtype: str) -> Side:
        from stretto.bench.peer_transformers import TransformersSide

        return TransformersSide(self.model(dtype))

    def llama(self, precision: str) -> LlamaSide:
        from stretto.bench.gguf_file import cached_gguf, weights_digest
        from stretto.bench.peer_llama import LlamaSide

        if precision not in self._llama:
            model = self.model("bfloat16")
            path = cached_gguf(model, precision, weights_digest(model), self._tell)
            self._llama[precision] = LlamaSide(path, precision, self._num_threads)
        return self._llama[precision]

    def facts(self) -> dict[str, Any]:
        """What the peers are: versions, threads, and what llama.cpp was built for."""
        versions: dict[str, Any] = {kind.name: kind.version for kind in self._kinds}
        if self.llama_precisions:
            from stretto.bench.peer_llama import system_info

            versions["llama.cpp built for"] = system_info()
        return versions | {"threads": self._num_threads}

    def _tell(self, task: str, done: int, total: int) -> None:
        if done == 0:
            self._report(task)

    def reference(self, task: Task) -> NDArray[np.float32]:
        """Logits of the task's first step in float32."""
        key = len(task.prompt), tuple(task.bursts[0])
        if key not in self._references:
            first = Task(task.prompt, task.bursts[:1], 0)
            with opened(self.transformers("float32"), first) as side:
                self._references[key] = side.run().first_logits
        return self._references[key]


def measure(
    targets: Sequence[Target], lineup: Lineup, plan: Plan, journal: Journal, report: Report
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row per context, number of rows, peer and target; and one record per side of each pair.

    Raises `StrettoError` for a side in full precision that computes something else.
    """
    cells = []
    for context, num_rows in product(plan.contexts, plan.rows):
        task = make_task(targets[0], plan, context, num_rows)
        for name, target in product(lineup.names, targets):
            key = f"decode/{context}/{num_rows}/{name}/{target.engine.name}/{target.dtype}"
            cells.append(journal.cell(key, partial(_decode_cell, target, lineup, name, task, plan)))
            report(_told(cells[-1]["row"]))
    return [c["row"] for c in cells], [r for c in cells for r in c["records"]]


def make_task(target: Target, plan: Plan, context: int, num_rows: int) -> Task:
    prompt = prompt_of(target, context, plan.seed)
    starts = starts_of(target, prompt, num_rows, plan.seed)
    return Task(prompt, [starts] * (plan.pairs + 1), plan.steps)


@contextmanager
def opened(side: Side, task: Task) -> Iterator[Side]:
    side.open(task)
    try:
        yield side
    finally:
        side.close()


def timed_pairs(ours: Side, peer: Side, task: Task) -> list[tuple[Decoded, Decoded]]:
    """All pairs of runs of a task, the first one being the warm-up."""

    def run(side: Side) -> Decoded:
        time.sleep(PAUSE_S)
        return side.run()

    with opened(ours, task), opened(peer, task):
        return [
            run_pair(pair, lambda: run(ours), lambda: run(peer))
            for pair in range(-1, len(task.bursts) - 1)
        ]


def _decode_cell(target: Target, lineup: Lineup, name: str, task: Task, plan: Plan) -> Cell:
    ours, peer = OwnSide(target), lineup.side(name)
    pairs, reference = timed_pairs(ours, peer, task), lineup.reference(task)
    errors = {}
    for side, decoded in zip((ours, peer), pairs[0], strict=True):
        errors[side.name] = error = logit_error(decoded.first_logits, reference)
        if side.name.split()[-1] in FULL_PRECISIONS and not error < MAX_LOGIT_ERROR:
            raise StrettoError(
                f"{side.name} does not compute these weights: its logits are off by {error:.3g} of "
                "their norm; leave it out, and report this"
            )
    agree = agreement(pairs[0][0].tokens, pairs[0][1].tokens, plan.steps)
    row = _decode_row(ours.name, peer.name, task, pairs[1:], plan.seed)
    row |= {
        "agree_tokens": agree,
        "steps": plan.steps,
        "ours_logit_error": errors[ours.name],
        "peer_logit_error": errors[peer.name],
    }
    place = {"context": len(task.prompt), "rows": task.num_rows}
    records = [
        {**place, "pair": i, "ours": ours.name, "peer": peer.name, "ours_s": a.seconds,
         "peer_s": b.seconds, "steps": plan.steps}
        for i, (a, b) in enumerate(pairs[1:])
    ]  # fmt: skip
    return {"row": rounded(row), "records": records}


def _decode_row(
    ours: str, peer: str, task: Task, pairs: list[tuple[Decoded, Decoded]], seed: int
) -> dict[str, Any]:
    ratio = bootstrap_median([b.seconds / a.seconds for a, b in pairs], seed)
    ours_s, peer_s = median(a.seconds for a, _ in pairs), median(b.seconds for _, b in pairs)
    num_tokens = task.num_rows * task.num_steps
    return {
        "context": len(task.prompt),
        "rows": task.num_rows,
        "peer": peer,
        "ours": ours,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "pairs": len(pairs),
        "ours_tokens_per_s": num_tokens / ours_s,
        "peer_tokens_per_s": num_tokens / peer_s,
        "ours_step_ms": 1000 * ours_s / task.num_steps,
        "peer_step_ms": 1000 * peer_s / task.num_steps,
    }


def logit_error(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """|logits - reference| / |reference - its mean per row|, over rows x vocab."""
    spread = reference - reference.mean(axis=1, keepdims=True)
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(spread))


def agreement(ours: list[list[int]], theirs: list[list[int]], limit: int) -> float:
    """Tokens from the first on, at most `limit`, that are the same; mean over rows."""
    lengths = []
    for a, b in zip(ours, theirs, strict=True):
        pairs = list(zip(a, b, strict=False))[:limit]
        lengths.append(next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs)))
    return fmean(lengths)


# -- forks end to end ------------------------------------------------------------------------------


def measure_forks(
    targets: Sequence[Target], lineup: Lineup, plan: Plan, journal: Journal, report: Report
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row per precision of llama.cpp and target, and one record per pair: our forks against the
    same number of tokens one after the other."""
    if not plan.forks:
        return [], []
    context = min(plan.contexts)
    cells = []
    for precision, target in product(lineup.llama_precisions, targets):
        key = f"forks/{context}/{precision}/{target.engine.name}/{target.dtype}"
        cells.append(
            journal.cell(key, partial(_forks_cell, target, lineup, precision, plan, context))
        )
        report(_told(cells[-1]["row"]))
    rows = [c["row"] for c in cells]
    least = min((row["sequential_s"] for row in rows), default=None)
    best = next((row["peer"] for row in rows if row["sequential_s"] == least), None)
    rows = [row | {"fastest": row["peer"] == best} for row in rows]
    return rows, [r for c in cells for r in c["records"]]


def _forks_cell(target: Target, lineup: Lineup, precision: str, plan: Plan, context: int) -> Cell:
    peer = lineup.llama(precision)
    task = make_task(target, plan, context, plan.forks)
    num_tokens = plan.forks * plan.fork_tokens

    def ours() -> float:
        time.sleep(PAUSE_S)
        return forks_s(target, task, plan.fork_tokens)

    def theirs() -> float:
        time.sleep(PAUSE_S)
        return peer.sequential(task.prompt, num_tokens)

    pairs = [run_pair(pair, ours, theirs) for pair in range(-1, plan.pairs)][1:]
    ratio = bootstrap_median([b / a for a, b in pairs], plan.seed)
    name = OwnSide(target).name
    row = {
        "context": context,
        "forks": plan.forks,
        "tokens": plan.fork_tokens,
        "peer": peer.name,
        "ours": name,
        "forks_ratio": ratio.median,
        "forks_low": ratio.low,
        "forks_high": ratio.high,
        "pairs": len(pairs),
        "forks_s": median(a for a, _ in pairs),
        "sequential_s": median(b for _, b in pairs),
    }
    records = [
        {"context": context, "pair": i, "ours": name, "peer": peer.name, "forks_s": a,
         "sequential_s": b, "forks": plan.forks, "tokens": plan.fork_tokens}
        for i, (a, b) in enumerate(pairs)
    ]  # fmt: skip
    return {"row": rounded(row), "records": records}


def forks_s(target: Target, task: Task, num_tokens: int) -> float:
    """Seconds of one request from submission to end: the prompt, then a thread per start token
    that draws `num_tokens` tokens."""
    last = task.prompt[-1]
    request = Request(
        task.prompt[:-1],
        ForkProgram(task.bursts[:1], num_tokens),
        SamplingParams(max_tokens=1 + task.num_rows * num_tokens),
        decode=target.decode,
        end_ids=frozenset(),
        max_positions=target.engine.max_positions,
        script=lambda thread, index: last if thread == MAIN else None,
    )
    scheduler = Scheduler(target.engine, Pool(target.engine.num_slots))
    start = time.perf_counter()
    scheduler.submit(request)
    while scheduler.step():
        pass
    seconds = time.perf_counter() - start
    if request.num_drawn != 1 + task.num_rows * num_tokens:
        raise AssertionError(f"{request.num_drawn} tokens were drawn")
    return seconds


def _told(row: dict[str, Any]) -> str:
    if "forks" in row:
        what, ratio = f"{row['forks']} forks", row["forks_ratio"]
    else:
        what, ratio = f"context {row['context']}, {row['rows']} rows", row["ratio"]
    return f"{what}: {row['ours']} at {ratio:.2f} times the speed of {row['peer']}"
