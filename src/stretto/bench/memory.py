"""How much memory threads over one prefix take, measured in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from stretto.bench.sides import OwnSide, Side, Task
from stretto.bench.source import Source, prompt_of, starts_of
from stretto.errors import InvalidInput, StrettoError

Kind = Literal["own", "copying"]

SAMPLE_S = 0.002
STATM = Path("/proc/self/statm")
TOUCHED_AT_ONCE = 256
WARM_TOKENS = 512
"""Tokens of a prompt that is read first, so that scratch memory does not count as growth."""

DEFINITIONS = {
    "own_tokens": "tokens that each thread feeds besides the prefix, its start token included",
    "kv_bytes": "keys and values: most slots that the pool handed out at once x bytes of a slot",
    "kv_ratio": "kv_bytes / (kv_bytes of one thread + the other threads' own tokens)",
    "rss_bytes": "growth of the process's resident memory from before the prompt to its peak in "
    f"decoding, sampled every {1000 * SAMPLE_S:.0f} ms, in a process of its own after a warm-up; "
    "the pool is resident from the start, so on our side kv_bytes are added",
    "rss_ratio": "rss_bytes / (rss_bytes of one thread + the other threads' own tokens); null "
    "where one thread was not measured",
    "copy_*": "the same of a batch in transformers with the prefix's keys and values repeated for "
    "each row; null where that is more than --copy-limit",
}


@dataclass(frozen=True)
class Spec:
    """What a process of its own is to measure; numbers of threads in ascending order."""

    kind: Kind
    source: Source
    dtype: str
    engine: str
    num_compute_threads: int | None
    context: int
    threads: Sequence[int]
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of keys and values at their most, growth of resident memory, and bytes of a slot."""

    kv_bytes: int
    rss_bytes: int | None
    slot_bytes: int


def measure_apart(spec: Spec) -> list[Usage]:
    """The usage per number of threads, measured in a fresh process.

    Raises the other process's `StrettoError` with the same text, one of its own where memory ran
    out or the process was killed, and `RuntimeError` with the traceback of what is a bug.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(spec, sender), daemon=True)
    process.start()
    sender.close()
    try:
        kind, found = receiver.recv()
    except EOFError:
        process.join()
        kind, found = _ended(process.exitcode)
    finally:
        process.join()
        receiver.close()
    if kind == "usage":
        return [Usage(*usage) for usage in found]
    if kind in ERRORS:
        raise ERRORS[kind](found)
    what = f"measuring memory with a prefix of {spec.context} tokens failed: {found}"
    if kind == "memory":
        raise StrettoError(f"{what}; ask for less")
    raise RuntimeError(what)


def _run(spec: Spec, sender: Any) -> None:
    try:
        usages = measure_here(spec)
        sender.send(("usage", [(u.kv_bytes, u.rss_bytes, u.slot_bytes) for u in usages]))
    except Exception as error:  # told by the process that asked
        sender.send(_failure(error))
    finally:
        sender.close()


ERRORS = {"input": InvalidInput, "user": StrettoError}
OUT_OF_MEMORY = re.compile(r"out of memory|(can't|cannot) allocate memory", re.IGNORECASE)
"""torch's own words; its allocator for CPUs raises a plain RuntimeError."""


def _failure(error: Exception) -> tuple[str, str]:
    """The kind of a failure, and what is told of it."""
    if isinstance(error, StrettoError):
        return "input" if isinstance(error, InvalidInput) else "user", str(error)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        return "memory", f"out of memory ({' '.join(str(error).split())[:200]})"
    return "bug", "".join(traceback.format_exception(error))


def _ended(status: int | None) -> tuple[str, str]:
    """The same of a process that ended with this status and said nothing."""
    if status == -signal.SIGKILL:
        return "memory", "its process was killed, which is what happens when memory runs out"
    return "bug", f"its process ended with status {status}"


def measure_here(spec: Spec) -> list[Usage]:
    """The usage per number of threads, in this process."""
    if spec.kind == "own":
        return _measure_own(spec)
    return _measure_copying(spec)


def _measure_own(spec: Spec) -> list[Usage]:
    rows = max(spec.threads)
    room = Task([0] * spec.context, [[0] * rows], spec.steps)
    target = spec.source.target(
        dtype=spec.dtype,
        engine=spec.engine,
        device="cpu",
        threads=spec.num_compute_threads,
        room=(max(room.num_positions, WARM_TOKENS), max(room.num_slots, WARM_TOKENS + 3 * rows)),
    )
    _touch(target.engine)
    side = OwnSide(target)
    warm_tokens = min(WARM_TOKENS, target.engine.max_positions - 4)
    prompt = prompt_of(target, warm_tokens, spec.seed)
    warm = Task(prompt, [starts_of(target, prompt, rows, spec.seed)], 1)
    _decode(side, warm)
    slot_bytes = bytes_of_slot(target.engine)
    prompt = prompt_of(target, spec.context, spec.seed)
    bursts = [starts_of(target, prompt, n, spec.seed) for n in spec.threads]
    peaks = Peak()
    side.open(Task(prompt, bursts, spec.steps))
    found = []
    for _ in bursts:
        with peaks:
            side.run()
        kv_bytes = side.peak_slots * slot_bytes
        growth = peaks.growth
        rss_bytes = None if growth is None else growth + kv_bytes
        found.append(Usage(kv_bytes, rss_bytes, slot_bytes))
    side.close()
    return found


def _measure_copying(spec: Spec) -> list[Usage]:
    import torch

    from stretto.bench.peer_transformers import TransformersSide

    if spec.num_compute_threads is not None:
        torch.set_num_threads(spec.num_compute_threads)
    model = spec.source.hf_model("float32" if spec.dtype == "float32" else "bfloat16")
    side = TransformersSide(model)
    most = model.config.max_position_embeddings
    tokens = [i % model.config.vocab_size for i in range(max(spec.context, WARM_TOKENS))]
    for warm in (Task(tokens[: min(WARM_TOKENS, most - 4)], [[1]], 1),
                 Task(tokens[:2], [[1] * max(spec.threads)], 1)):  # fmt: skip
        _decode(side, warm)
    peaks = Peak()
    side.open(Task(tokens[: spec.context], [[1] * n for n in spec.threads], spec.steps))
    found = []
    for num_rows in spec.threads:
        with peaks:
            side.run()
        slots = num_rows * (spec.context + spec.steps + 1)
        slot_bytes = side.cache_bytes // (num_rows * spec.context)
        found.append(Usage(slots * slot_bytes, peaks.growth, slot_bytes))
    side.close()
    return found


def _decode(side: Side, task: Task) -> None:
    side.open(task)
    for _ in task.bursts:
        side.run()
    side.close()


def _touch(engine: Any) -> None:
    """Writes to all slots of the pool what is in them, so that all are resident."""
    for at in range(0, engine.num_slots, TOUCHED_AT_ONCE):
        slots = list(range(at, min(at + TOUCHED_AT_ONCE, engine.num_slots)))
        engine.copy_in(slots, engine.copy_out(slots))


def bytes_of_slot(engine: Any) -> int:
    """Bytes of the keys and values of one slot, as the engine copies them out."""
    two, one = (_num_bytes(engine.copy_out(list(range(n)))) for n in (2, 1))
    return two - one


def _num_bytes(kept: Any) -> int:
    if isinstance(kept, list | tuple):
        return sum(map(_num_bytes, kept))
    return int(getattr(kept, "nbytes", 0))


class Peak:
    """The peak of the process's resident memory inside `with`, over what it was when made."""

    def __init__(self) -> None:
        gc.collect()
        _trim()
        self._before = resident_bytes()
        self._most = 0

    @property
    def growth(self) -> int | None:
        return None if self._before is None else max(0, self._most - self._before)

    def __enter__(self) -> Self:
        self._most = 0
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._sampler.join()
        self._note()

    def _sample(self) -> None:
        while not self._done.is_set():
            self._note()
            time.sleep(SAMPLE_S)

    def _note(self) -> None:
        self._most = max(self._most, resident_bytes() or 0)


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system does not say."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def available_bytes() -> int:
    """Memory that can be had without swapping; all of it where the system does not say how much."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _trim() -> None:
    """Gives freed memory back to the system, where the C library can."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
