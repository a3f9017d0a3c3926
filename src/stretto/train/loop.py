"""The training loop: for every objective, one process or several, and resumable at any moment."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from stretto.data.store import line_of
from stretto.errors import InvalidInput, StrettoError
from stretto.files import parse_json, write_atomically
from stretto.train.checkpoints import Checkpoint, Checkpoints
from stretto.train.objective import Objective, Tally, Validation
from stretto.train.optimizer import MasterAdamW
from stretto.train.packing import Steps
from stretto.train.randomness import random_state_kept
from stretto.train.schedule import Schedule
from stretto.train.workers import Workers

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class LoopSettings:
    """How a loop steps. `valid_every` and `checkpoint_every` are in steps, None for the end only.

    `fingerprint` names all that a resumed run must have in common with the one it goes on from.
    """

    schedule: Schedule
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    valid_every: int | None = None
    checkpoint_every: int | None = 50
    seed: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InvalidInput(f"max_grad_norm is {self.max_grad_norm}; it must be more than 0")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidInput(f"weight_decay is {self.weight_decay}; it must be at least 0")


@dataclass(frozen=True)
class Finished:
    """How a run ended. `is_complete` is False if it was stopped; the same command goes on."""

    num_steps: int
    is_complete: bool
    metrics: Mapping[str, float]
    valid: Mapping[str, float] | None


Report = Callable[[Mapping[str, Any]], None]
"""Told each line of `metrics.jsonl` as it is written."""


class Loop:
    """Minimises an objective over the steps of a run, in a folder of its own.

    Trains the parameters of `model` that require gradients, in place. The folder gets
    `metrics.jsonl` and `checkpoints/`; the same loop over the same folder goes on from the last
    checkpoint and writes the same lines, but for times. Every process of `workers` makes the same
    loop; only the first writes.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        steps: Steps,
        settings: LoopSettings,
        folder: Path,
        *,
        validation: Validation | None = None,
        workers: Workers | None = None,
        report: Report | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._model = model
        self._objective = objective
        self._steps = steps
        self._settings = settings
        self._validation = validation
        self._workers = Workers() if workers is None else workers
        self._report = report
        self._should_stop = should_stop
        self._journal = Journal(folder / METRICS, writes=self._workers.is_first)
        self._checkpoints = Checkpoints(folder / "checkpoints")
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise InvalidInput("the model has no parameter to train; choose full training or LoRA")
        self.optimizer = MasterAdamW(
            trained, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )

    def run(self) -> Finished:
        """Trains to the end, or until told to stop. Raises `StrettoError` if the loss is no number
        any more or the disk is full, and `InvalidInput` for a folder that another run has left or
        another process trains in. Torch's own random state is as it was afterwards."""
        with random_state_kept(self._model.device), self._journal.held():
            return self._run()

    def _run(self) -> Finished:
        start, num_steps = self._resume(), self._steps.num_steps
        metrics: Mapping[str, float] = {}
        valid = self._validate(0) if start == 0 else None
        for step in range(start, num_steps):
            if self._stopped():
                if step > start:  # else all that there is has been saved
                    self._save(step)
                return Finished(step, False, metrics, valid)
            metrics = self._step(step)
            done = step + 1
            if done == num_steps or _is_due(done, self._settings.valid_every):
                valid = self._validate(done)
            if done == num_steps or _is_due(done, self._settings.checkpoint_every):
                self._save(done)
        if start == num_steps:
            metrics, valid = self._journal.last("train"), self._journal.last("valid") or None
        return Finished(num_steps, True, metrics, valid)

    # -- one step ------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, float]:
        began = time.perf_counter()
        self._model.train()
        tally = Tally()
        packs = self._steps.packs(step)
        for number, pack in self._workers.share(packs):
            torch.manual_seed(_seed_of(self._settings.seed, step, number))
            batch = self._objective.batch(pack).to(self._model.device)
            outcome = self._objective.outcome(self._model, batch)
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.collect()
            tally.add(outcome)
            tally.num_tokens += getattr(batch, "num_tokens", 0)
        self._workers.sum_tensors(list(self.optimizer.gradients.values()))
        tally = self._workers.sum_tally(tally)
        if not tally.num_terms:
            raise StrettoError(f"step {step + 1} has nothing to learn from; check the data")
        norm = self.optimizer.normalise(tally.num_terms, self._settings.max_grad_norm)
        metrics = tally.report()
        if not all(map(_is_number, (metrics["loss"], norm))):
            raise StrettoError(
                f"the loss of step {step + 1} is {metrics['loss']} and its gradient's norm {norm}; "
                "lower the learning rate and start anew"
            )
        lr = self._settings.schedule.lr_at(step, self._steps.num_steps)
        self.optimizer.update(lr, step)
        seconds = time.perf_counter() - began
        line = {"step": step + 1, "of": self._steps.num_steps, **metrics}
        line |= {"lr": lr, "grad_norm": norm, "num_packs": len(packs)}
        self._write("train", {**line, "tokens": tally.num_tokens, "seconds": round(seconds, 4)})
        return metrics

    @torch.no_grad()
    def _validate(self, step: int) -> dict[str, float] | None:
        if self._validation is None or not self._validation.packs:
            return None
        self._model.eval()
        tally = Tally()
        for number, pack in self._workers.share(self._validation.packs):
            torch.manual_seed(_seed_of(self._settings.seed, -1, number))
            batch = self._validation.objective.batch(pack).to(self._model.device)
            tally.add(self._validation.objective.outcome(self._model, batch))
        metrics = self._workers.sum_tally(tally).report()
        self._write("valid", {"step": step, **metrics})
        return metrics

    # -- files ---------------------------------------------------------------------------------

    def _write(self, kind: str, line: Mapping[str, Any]) -> None:
        whole = {"kind": kind, **line}
        self._journal.add(whole)
        if self._report is not None and self._workers.is_first:
            self._report(whole)

    def _save(self, step: int) -> None:
        if self._workers.is_first:
            facts = {"fingerprint": self._settings.fingerprint}
            self._checkpoints.save(Checkpoint(step, self.optimizer.state(), facts))
        self._workers.wait()

    def _resume(self) -> int:
        """Goes back to the last checkpoint; the number of steps that are done."""
        found = self._checkpoints.latest()
        if found is None:
            self._journal.cut(None)
            return 0
        if found.facts.get("fingerprint") != self._settings.fingerprint:
            raise InvalidInput(
                f"{self._checkpoints.folder} is of a run with other settings or data; "
                "name another folder, or run the command that began it"
            )
        try:
            self.optimizer.restore(found.tensors)
        except (KeyError, RuntimeError) as error:
            raise InvalidInput(
                f"{self._checkpoints.folder} is of another model ({error}); name another folder"
            ) from None
        self._journal.cut(found.step)
        return found.step

    def _stopped(self) -> bool:
        """Whether to stop before the next step; all processes agree."""
        wanted = self._should_stop is not None and self._should_stop()
        if self._workers.count == 1:
            return wanted
        flag = torch.tensor([int(wanted)], device=self._model.device)
        self._workers.sum_tensors([flag])
        return bool(flag.item())


class Journal:
    """The lines of `metrics.jsonl`, which a resumed run cuts back to where it goes on from."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path
        self._writes = writes

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises `InvalidInput` while another process writes this file: two that train in one
        folder would mix their steps."""
        if not self._writes:
            yield
            return
        lock = FileLock(self._path.with_name(f".{self._path.name}.lock"))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise InvalidInput(
                f"{self._path.parent} is being trained in by another process; wait for it or name "
                "another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises `StrettoError` where the disk takes no more; what it took is cut off later."""
        if not self._writes:
            return
        try:
            with self._path.open("ab") as file:
                file.write(line_of(line))
        except OSError as error:
            raise StrettoError(
                f"cannot write to {self._path}: {error.strerror}; make room there and run the same "
                "command again"
            ) from None

    def cut(self, step: int | None) -> None:
        """Leaves the lines up to a step; None leaves none."""
        if self._writes and self._path.exists():
            kept = [] if step is None else [e for e in self._lines() if e["step"] <= step]
            write_atomically(self._path, b"".join(map(line_of, kept)))

    def last(self, kind: str) -> dict[str, float]:
        """The numbers of the last line of a kind; none if there is none."""
        found = [line for line in self._lines() if line["kind"] == kind]
        return {k: v for k, v in found[-1].items() if _is_real(v)} if found else {}

    def _lines(self) -> list[dict[str, Any]]:
        return lines_of(self._path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics; a kill may have torn the last one. Raises `InvalidInput`
    for one that is none."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    try:
        lines = [parse_json(line) for line in whole if line.strip()]
        return [{**line, "step": int(line["step"]), "kind": str(line["kind"])} for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path} has a line that no training wrote ({error}); take it out, or the whole file"
        ) from None


def _is_due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number(value: float) -> bool:
    return value - value == 0


def _seed_of(seed: int, step: int, number: int) -> int:
    """The seed of a pack's randomness."""
    key = f"{seed}/{step}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
