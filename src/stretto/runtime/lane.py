"""What a request keeps for one thread that is under way, and the events it gives rise to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from stretto.effects import Move, Place
from stretto.recorder import OpenThread
from stretto.runtime import events
from stretto.runtime.denoiser import Denoiser
from stretto.runtime.quick import Rows
from stretto.runtime.text import ThreadText
from stretto.runtime.views import View
from stretto.trace import is_drawn


@dataclass(slots=True, eq=False)
class Lane:
    """One thread's view, text, held-back moves, and the logits of its newest row, or of the rows
    of its block that were asked for.

    `block` writes the thread's block, if it is one. `drawn_at` and `logprob` are of the token drawn
    last: one that a wait holds back is placed later and keeps them. `end_logprob` is of the id
    that ends the thread, if it drew one; that is
    never placed. `unsettled` are placed tokens that may yet turn out to be text.
    """

    thread: OpenThread
    view: View
    text: ThreadText
    log: events.EventLog
    moves: deque[Move] = field(default_factory=deque)
    block: Denoiser | None = None
    logits: Rows | None = None
    drawn_at: int = 0
    logprob: float | None = None
    end_logprob: float | None = None
    num_placed: int = 0
    unsettled: list[events.Token] = field(default_factory=list)

    def announce(self, move: Place, position: int, step: int) -> None:
        """Emits a placed token, once it is settled whether it is text."""
        drawn = is_drawn(move.origin)
        is_settled = not (move.tentative or self.unsettled)
        event = events.Token(
            thread=self.thread.name,
            index=self.num_placed,
            token=move.token,
            text=self.text.push(move.token, move.markup) if is_settled else "",
            markup=move.markup,
            origin=move.origin,
            position=position,
            step=self.drawn_at if drawn else step,
            logprob=self.logprob if drawn else None,
            segment=self.thread.own.handle,
        )
        self.num_placed += 1
        if is_settled:
            self.log.emit(event)
            return
        self.unsettled.append(event)
        if not move.tentative:
            self.settle()

    def reveal(self) -> None:
        """What was unsettled is text."""
        self.unsettled = [replace(token, markup=False) for token in self.unsettled]
        self.settle()

    def settle(self) -> None:
        for token in self.unsettled:
            text = self.text.push(token.token, token.markup)
            self.log.emit(replace(token, text=text) if text else token)
        self.unsettled = []

    def end(self, reason: str, step: int) -> None:
        """Emits the thread's end, with what was left of its last character. Of a block the tokens
        come first, as it has them now."""
        if self.block is not None:
            self._announce_block(self.block, step)
        self.settle()
        name, text = self.thread.name, self.text.flush()
        self.log.emit(events.ThreadEnd(name, reason, text, step, self.end_logprob))

    def _announce_block(self, block: Denoiser, step: int) -> None:
        own = self.thread.own
        for index, (token, origin, markup, position, drawn_at) in enumerate(
            zip(own.tokens, own.origins, own.markup, own.positions, own.steps, strict=True)
        ):
            self.drawn_at = step if drawn_at is None else drawn_at
            self.logprob = block.logprobs.get(index)
            self.announce(Place(token, origin, markup), position, step)
