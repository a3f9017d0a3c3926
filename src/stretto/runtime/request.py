"""One request: threads under a recorder, with their views, slots, clock, budget and events.

A request has its own clock: its ready threads advance together or not at all, so what it answers
does not depend on scheduling.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor

from stretto.dialects.base import ResumingSession, Session
from stretto.effects import Close, Denoise, Evict, Fork, Join, Move, Place, Resume, Reveal, Wait
from stretto.errors import Unsupported
from stretto.params import SamplingParams
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.runtime import events
from stretto.runtime.attention import AttentionTotals
from stretto.runtime.blocks import Blocks
from stretto.runtime.chooser import Chooser, Script
from stretto.runtime.denoiser import Denoiser
from stretto.runtime.feed import Feed
from stretto.runtime.lane import Lane
from stretto.runtime.memory import RequestMemory
from stretto.runtime.policy import Policy
from stretto.runtime.pool import Pool
from stretto.runtime.quick import Row
from stretto.runtime.text import Decode, Document, Pieces, ThreadText
from stretto.runtime.views import Run, View
from stretto.trace import is_drawn

__all__ = ["Request", "Script", "Timing"]


@dataclass(slots=True)
class Timing:
    """Wall-clock instants of a request, in seconds of `time.perf_counter`."""

    submitted: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None


class Request:
    """A prompt being answered. Driven by the scheduler; readers use `log`, `text` and `recorder`.

    `end_ids` are the model's end-of-sequence ids. `sample` numbers the samples of one prompt. A
    `policy` hides what it will, besides what the session says.
    """

    def __init__(
        self,
        prompt: list[int],
        session: Session,
        params: SamplingParams,
        *,
        decode: Decode,
        end_ids: frozenset[int],
        max_positions: int,
        sample: int = 0,
        script: Script | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.session = session
        self.policy = policy
        self.params = params
        self.script = script
        self.log = events.EventLog()
        self.timing = Timing()
        self.num_prompt_tokens = len(prompt)
        self.num_drawn = 0
        self.step = 0
        self.memory = RequestMemory()
        self.finish_reason: str | None = None
        self.failure: Exception | None = None
        self._has_written = self._has_new_blocks = False  # in the step under way
        self.is_abandoned = False  # nobody will read the answer: to be cancelled by the next pass
        cuts = () if policy is None else policy.cuts(len(prompt))
        self.recorder = Recorder(prompt, session.main_role, max_positions, cuts)
        self._decode = Pieces(decode)  # for the events and for the document
        self.document = Document(self.recorder, self._decode)
        self._stop_ids = end_ids | params.stop_ids
        self._chooser = Chooser(params, sample, script)
        session.budget = lambda: self.remaining_budget
        self._lanes: dict[str, Lane] = {}  # of threads that are open or have something unfed
        self.feed = Feed(self.recorder, self.memory, self._lanes)
        self._blocks = Blocks(self.recorder, self._lanes, self.log)
        self._open_lane(self.recorder.threads[MAIN], at=0)

    # -- reading -------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def error(self) -> str | None:
        """What the request failed with, in words; None if it did not."""
        return None if self.failure is None else str(self.failure) or type(self.failure).__name__

    def check(self) -> None:
        """Raises what the request failed with, if it did."""
        if self.failure is not None:
            raise self.failure

    @property
    def remaining_budget(self) -> int:
        return self.params.max_tokens - self.num_drawn

    @property
    def text(self) -> str:
        """The settled text, cut at a stop string."""
        return self.document.text[: self.document.cut]

    # -- one pass ------------------------------------------------------------------------------

    def fed(self, runs: list[Run], logits: Float[Tensor, "logit_rows vocab"], pool: Pool) -> None:
        """The pass has run: keeps its logits, and once every thread is fed, takes a step."""
        self.feed.fed(runs, logits)
        if not self.recorder.num_unfed:
            self._take_step()
            if not self.is_done and not self.recorder.num_unfed:
                raise AssertionError("a request is neither done nor has anything to feed")
        self._free_released(pool)

    # -- ending --------------------------------------------------------------------------------

    def end(self, reason: str, pool: Pool, failure: Exception | None = None) -> None:
        """Ends the request now, all open threads with `reason`, and frees its slots."""
        if self.is_done:
            return
        self.failure = failure
        self._cut_off(reason)
        self._finish(reason)
        self._free_released(pool)

    def abort(self, failure: Exception) -> None:
        """Ends the request with "error", whatever state it was left in, and leaves its slots to the
        pool's `reset`. Its text is what had been settled."""
        if not self.is_done:
            self.recorder.mend()
            self.failure = failure
            self.finish_reason = "error"
            self.timing.finished = time.perf_counter()

    # -- internals: one step of the clock ------------------------------------------------------

    def _take_step(self) -> None:
        self.step += 1
        if self.timing.first_token is None:
            self.timing.first_token = time.perf_counter()
        self._has_new_blocks = is_short = False
        self._has_written = self._blocks.write(self.session, step=self.step)
        for lane in list(self._lanes.values()):
            logits, lane.logits = lane.logits, None
            if logits is None:
                continue
            if self.remaining_budget <= 0:
                is_short = True
            else:
                self._draw(lane, logits[0])
        for lane in self._blocks.go_on():
            self._close(lane, "stop")
        self._pump_all()
        if self._has_new_blocks and not self._has_written:
            self.step -= 1  # an end of sequence is in no count: blocks take the step of its draw
        self._check_end(is_short)

    def _draw(self, lane: Lane, logits: Row) -> None:
        thread = lane.thread
        legal = self.session.legal(self.recorder, thread)
        token, lane.logprob = self._chooser.choose(self.recorder, thread, logits, legal)
        lane.drawn_at = self.step
        if token in self._stop_ids and not (legal is not None and legal.forced):
            lane.end_logprob = lane.logprob
            lane.moves.extend(self.session.stopped(self.recorder, thread, "stop"))
        else:
            self.num_drawn += 1
            thread.num_drawn += 1
            moves = self.session.feed(self.recorder, thread, token)
            self._has_written |= any(isinstance(m, Place) and is_drawn(m.origin) for m in moves)
            lane.moves.extend(moves)
        self._pump(lane)

    # -- internals: moves ----------------------------------------------------------------------

    def _pump_all(self) -> None:
        """Carries out what waits have held back, until nothing moves any more."""
        progress = True
        while progress:
            progress = False
            for lane in list(self._lanes.values()):
                before = lane.moves.copy()
                if before:
                    self._pump(lane)
                    progress = progress or lane.moves != before

    def _pump(self, lane: Lane) -> None:
        thread = lane.thread
        while lane.moves:
            move = lane.moves[0]
            if isinstance(move, Wait):
                if any(self.recorder.threads[c].is_open for c in move.children):
                    return
                lane.moves.popleft()
                continue
            lane.moves.popleft()
            if isinstance(move, Resume):
                lane.moves.extendleft(reversed(self._resumed(thread)))
            else:
                self._carry_out(lane, move)
        if not thread.is_open:
            return
        is_capped = thread.remaining is not None and thread.remaining <= 0
        if is_capped or self.recorder.at_last_position(thread):
            self._stop_short(lane)

    def _resumed(self, thread: OpenThread) -> list[Move]:
        if not isinstance(self.session, ResumingSession):
            raise TypeError(f"{type(self.session).__name__} cannot be resumed")
        return self.session.resumed(self.recorder, thread)

    def _stop_short(self, lane: Lane) -> None:
        """The thread has no token or no position left."""
        lane.moves.extend(self.session.stopped(self.recorder, lane.thread, "length"))
        self._pump(lane)

    def _carry_out(self, lane: Lane, move: Move) -> None:
        recorder, thread = self.recorder, lane.thread
        match move:
            case Place():
                self._hide(lane)
                recorder.place(thread, move, lane.drawn_at if is_drawn(move.origin) else None)
                lane.announce(move, thread.next_position - 1, self.step)
            case Reveal():
                recorder.reveal(thread, move)
                lane.reveal()
            case Fork():
                lane.settle()
                child = self._open_lane(recorder.fork(thread, self._capped(move)), lane.text.length)
                if recorder.at_last_position(child.thread):
                    self._stop_short(child)
            case Denoise():
                lane.settle()
                self.num_drawn += move.length
                self._has_new_blocks = True
                block = Denoiser(move, self.params, self._chooser)
                self._open_lane(recorder.denoise(thread, move), lane.text.length, block)
            case Close():
                self._close(lane, move.reason)
            case Join():
                recorder.apply(thread, move)
                self.log.emit(events.Joined(thread.name, move.children, self.step))
            case Evict():
                num_tokens = len(recorder.segments[move.segment].tokens)
                recorder.apply(thread, move)
                event = events.Evicted(thread.name, move.segment, num_tokens, self.step)
                self.log.emit(event)
            case Wait() | Resume():
                raise AssertionError(f"{move!r} is honoured before its turn comes")
            case _:
                try:
                    recorder.apply(thread, move)
                except TypeError as error:
                    raise Unsupported(f"this runtime cannot carry out {move!r}") from error

    def _hide(self, lane: Lane) -> None:
        """What the policy does before the thread's next token is placed."""
        if self.policy is not None:
            for effect in self.policy.act(self.recorder, lane.thread, lane.view.attention):
                self._carry_out(lane, effect)

    def _capped(self, fork: Fork) -> Fork:
        """The fork with the request's own cap on threads applied, if it is the lower one."""
        cap = self.params.max_thread_tokens
        if cap is None or (fork.cap is not None and fork.cap <= cap):
            return fork
        return replace(fork, cap=cap)

    def _open_lane(self, thread: OpenThread, at: int, block: Denoiser | None = None) -> Lane:
        view = View(thread, self.memory)
        if self.policy is not None:
            view.attention = AttentionTotals() if self.policy.wants_attention else None
            view.is_reindexed = self.policy.is_reindexed
        lane = Lane(thread, view, ThreadText(self._decode), self.log, block=block)
        self._lanes[thread.name] = lane
        start = events.ThreadStart(thread.name, thread.parent, thread.topic, at, self.step)
        self.log.emit(start)
        if block is not None:
            self._blocks.announce(lane, block, [], self.step)
        elif thread.name != MAIN:
            own = thread.own
            for token, markup, position in zip(own.tokens, own.markup, own.positions, strict=True):
                lane.announce(Place(token, "injected", markup), position, self.step)
        return lane

    def _close(self, lane: Lane, reason: str) -> None:
        self.recorder.close(lane.thread, reason)
        lane.end(reason, self.step)

    # -- internals: the end --------------------------------------------------------------------

    def _check_end(self, is_short: bool) -> None:
        threads = self.recorder.threads.values()
        if self.params.stop and self.document.settle_to(self.params.stop):
            self._cut_off("stop")
            self._finish("stop")
        elif not any(t.is_open for t in threads):
            self._finish(self.recorder.threads[MAIN].finish_reason or "stop")
        elif (is_short or self.remaining_budget <= 0) and not self._blocks.open_lanes:
            self._cut_off("length")
            self._finish("length")

    def _cut_off(self, reason: str) -> None:
        """Ends all open threads. A drawn token that a wait has held back is still placed."""
        lanes = [lane for lane in self._lanes.values() if lane.thread.is_open]
        waiting = [lane for lane in lanes if lane.moves]  # a child, which is younger, ends first
        for lane in [*(lane for lane in lanes if not lane.moves), *reversed(waiting)]:
            held = [move for move in lane.moves if isinstance(move, Join | Place)]
            lane.moves.clear()
            for late in held:
                self._carry_out(lane, late)
            for move in self.session.cut_off(self.recorder, lane.thread):
                self._carry_out(lane, move)
            self._close(lane, reason)

    def _finish(self, reason: str) -> None:
        self.document.settle()
        # The end has settled the rest of the text, which may hold a stop string too.
        is_whole = reason in ("stop", "length") and self.document.cut is None
        if is_whole and self.document.find(self.params.stop, 0):
            reason = "stop"
        self.finish_reason = reason
        self.timing.finished = time.perf_counter()

    def _free_released(self, pool: Pool) -> None:
        released = self.recorder.take_released()
        self.memory.free(pool, None if self.is_done else released)
