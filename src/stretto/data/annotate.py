"""Runs an annotator over responses into a folder: append-only, resumable, nothing dropped."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stretto.data.annotators import Annotation, Annotator, Exhausted, Postponed, Refusal, Unanswered
from stretto.data.check import Checker, count_codes
from stretto.data.items import Item
from stretto.data.rows import Annotated, Reject
from stretto.data.store import Store
from stretto.data.wire import is_text
from stretto.errors import INTERRUPTED, SOME_FAILED, InvalidInput

ANNOTATED, REJECTS = "annotated.jsonl", "rejects.jsonl"
MAX_UNANSWERED = 10
"""So many responses in a row without a verdict end a run: the endpoint is down."""
POLL_S = 0.2
"""How soon Ctrl-C is noticed while replies are awaited."""


@dataclass
class Report:
    """What a run came to. Counts are of the items asked for, whichever run did them; `unanswered`
    is of this run. `stopped`: why it ended early, None if it did not."""

    num_items: int
    num_before: int
    annotated: list[Annotated] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    unanswered: Counter[str] = field(default_factory=Counter)
    stopped: str | None = None
    is_interrupted: bool = False

    @property
    def num_left(self) -> int:
        return self.num_items - len(self.annotated) - len(self.rejects)

    @property
    def exit_code(self) -> int:
        if self.is_interrupted:
            return INTERRUPTED
        return SOME_FAILED if self.num_left or self.rejects else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "items": self.num_items,
            "before": self.num_before,
            "annotated": len(self.annotated),
            "with_marks": sum(row.annotated != row.response for row in self.annotated),
            "rejected": len(self.rejects),
            "reasons": count_codes([row.reasons for row in self.rejects]),
            "left": self.num_left,
            "unanswered": dict(self.unanswered.most_common()),
            "stopped": self.stopped,
        }


@runtime_checkable
class Watcher(Protocol):
    """Told of the run as it goes on, from the thread that runs it."""

    def progress(self, num_done: int, num_todo: int, num_rejected: int) -> None: ...

    def is_interrupted(self) -> bool:
        """Whether to stop asking; what is asked already is still awaited and kept."""
        ...


def annotate_into(
    folder: Path,
    items: Sequence[Item],
    annotator: Annotator,
    checker: Checker,
    *,
    keep_prompts: bool = True,
    watcher: Watcher | None = None,
) -> Report:
    """Annotates what the folder has no row for yet, and appends the rows.

    Each verdict is on disk before the next one is read. An annotation that breaks a rule of
    `checker` becomes a reject, as does a response that none can be made of. Raises `InvalidInput`
    if another process writes into the folder, or if it has other responses under these keys.
    """
    with ExitStack() as stack:
        good = stack.enter_context(Store(folder / ANNOTATED, Annotated))
        bad = stack.enter_context(Store(folder / REJECTS, Reject))
        _check_same(folder, items, good, bad)
        todo = [item for item in items if item.key not in good and item.key not in bad]
        report = Report(len(items), len(items) - len(todo))
        run = _Run(annotator, checker, good, bad, keep_prompts, watcher, report)
        try:
            run.all_of(todo)
        finally:
            report.annotated = [good.rows[i.key] for i in items if i.key in good]
            report.rejects = [bad.rows[i.key] for i in items if i.key in bad]
    return report


def _check_same(
    folder: Path, items: Sequence[Item], good: Store[Annotated], bad: Store[Reject]
) -> None:
    for item in items:
        known, refused = good.rows.get(item.key), bad.rows.get(item.key)
        is_other = known is not None and known.response != item.response
        if refused is not None and refused.response_id is not None:
            is_other |= refused.response_id != item.response_id
        if is_other:
            raise InvalidInput(
                f"{folder} has another response {item.sample} of prompt {item.prompt_id}; name "
                "another folder"
            )


@dataclass
class _Run:
    annotator: Annotator
    checker: Checker
    good: Store[Annotated]
    bad: Store[Reject]
    keep_prompts: bool
    watcher: Watcher | None
    report: Report
    num_done: int = 0
    num_rejected: int = 0
    num_silent: int = 0

    def all_of(self, todo: Sequence[Item]) -> None:
        concurrency = getattr(self.annotator, "concurrency", None)
        verdicts = self._in_turn(todo) if concurrency is None else self._at_once(todo, concurrency)
        with closing(verdicts):
            for item, verdict in verdicts:
                self._take(item, verdict)
                if self.watcher is not None:
                    self.watcher.progress(self.num_done, len(todo), self.num_rejected)

    # -- asking --------------------------------------------------------------------------------

    def _in_turn(self, todo: Sequence[Item]) -> Generator[tuple[Item, _Verdict]]:
        for item in todo:
            if self._is_over():
                return
            yield item, self._ask(item)

    def _at_once(self, todo: Sequence[Item], concurrency: int) -> Generator[tuple[Item, _Verdict]]:
        """Verdicts as they come. However this ends, what is asked already is awaited and kept."""
        waiting = iter(todo)
        running: dict[Future[_Verdict], Item] = {}
        with ThreadPoolExecutor(concurrency, thread_name_prefix="annotate") as pool:
            try:
                while True:
                    num_free = 0 if self._is_over() else concurrency - len(running)
                    for item in itertools.islice(waiting, num_free):
                        running[pool.submit(self._ask, item)] = item
                    if not running:
                        return
                    done, _ = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield running.pop(future), future.result()
            finally:
                self._wake()
                for future in [f for f in wait(running).done if f.exception() is None]:
                    self._take(running.pop(future), future.result())

    def _ask(self, item: Item) -> _Verdict:
        """May run in any thread: touches no file and no count of the runner's."""
        if not is_text(item.prompt):
            return Refusal(["not-encodable: the prompt has a lone surrogate"])
        if reasons := self.checker.refusals(item.response):
            return Refusal(reasons)
        try:
            return self.annotator.annotate(item.prompt, item.response)
        except (Unanswered, Exhausted) as error:
            return error

    def _is_over(self) -> bool:
        if not self.report.is_interrupted and self.watcher is not None:
            self.report.is_interrupted = self.watcher.is_interrupted()
            if self.report.is_interrupted:
                self.report.stopped = "interrupted"
        if self.report.stopped is not None:
            self._wake()
        return self.report.stopped is not None

    def _wake(self) -> None:
        stop: Callable[[], None] | None = getattr(self.annotator, "stop", None)
        if stop is not None:
            stop()

    # -- keeping -------------------------------------------------------------------------------

    def _take(self, item: Item, verdict: _Verdict) -> None:
        if isinstance(verdict, Exhausted):
            self.report.stopped = self.report.stopped or str(verdict)
        elif isinstance(verdict, Unanswered):
            self.num_silent += not isinstance(verdict, Postponed)
            self.report.unanswered[str(verdict)] += 1
            if self.num_silent >= MAX_UNANSWERED and self.report.stopped is None:
                self.report.stopped = f"{self.num_silent} in a row had no verdict: {verdict}"
        else:
            self.num_silent = 0
            self._keep(item, verdict)

    def _keep(self, item: Item, verdict: Annotation | Refusal) -> None:
        self.num_done += 1
        reasons = (
            verdict.reasons
            if isinstance(verdict, Refusal)
            else self.checker.reasons(item.response, verdict.text)
        )
        name, sample = item.prompt_id, item.sample
        if reasons or isinstance(verdict, Refusal):
            self.num_rejected += 1
            self.bad.add(
                Reject(
                    prompt_id=name,
                    sample=sample,
                    response_id=item.response_id,
                    reasons=reasons,
                    text=verdict.text,
                )
            )
            return
        self.good.add(
            Annotated(
                prompt_id=name,
                sample=sample,
                prompt=item.prompt if self.keep_prompts else None,
                response=item.response,
                annotated=verdict.text,
                annotator=self.annotator.name,
                details=verdict.details,
            )
        )


_Verdict = Annotation | Refusal | Unanswered | Exhausted
