"""What was legal at each draw of a finished response: the masks that the sampler would have used.

A response is fed to a fresh session of its dialect, token by token in document order, and the
session is asked for its mask before each draw, as the runtime asks. Nothing here knows a dialect.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from stretto.dialects.base import Legal, Session
from stretto.effects import Close, Fork, Move, Place, Resume, Reveal, Wait
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.trace import Origin, is_drawn

UNMASKED = -1
"""Stands for a draw at which everything was legal."""


class LegalTable:
    """The distinct masks of many draws, by number. A session shares its masks, so they are few."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._masks: list[Legal] = []

    def __len__(self) -> int:
        return len(self._masks)

    def __getitem__(self, number: int) -> Legal:
        return self._masks[number]

    def add(self, legal: Legal | None) -> int:
        """The number of a mask, `UNMASKED` for None; the same object always has the same one."""
        if legal is None:
            return UNMASKED
        number = self._numbers.get(id(legal))
        if number is None:
            number = self._numbers[id(legal)] = len(self._masks)
            self._masks.append(legal)  # keeps it alive, so that its id stays its own
        return number

    def allows(self, number: int, token: int) -> bool:
        """Whether a token may be drawn under a mask, and is a matter of choice there."""
        if number == UNMASKED:
            return True
        legal = self._masks[number]
        return not legal.forced and bool(legal.mask[token])

    def ids(self, number: int) -> tuple[NDArray[np.int64], bool]:
        """(ids, True): only these are legal. (ids, False): all but these are. The shorter list."""
        mask = self._masks[number].mask
        few_legal = 2 * int(mask.sum()) < len(mask)
        return np.flatnonzero(mask if few_legal else ~mask), few_legal

    def dense(self, numbers: Iterable[int], size: int) -> Bool[Tensor, "draws vocab"]:
        """The masks themselves, one row a draw, for a vocabulary of `size` ids."""
        rows = [np.ones(size, np.bool_) if n == UNMASKED else self._masks[n].mask for n in numbers]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, size, dtype=torch.bool)


class Replay:
    """Drives a session and a recorder through a response that is known already.

    Call `legal` before and `draw` after each drawn token of a thread, threads in document order.
    A thread that the response leaves open when another waits for it is closed. Lengths of threads
    are the response's own: no cap ends one.
    """

    def __init__(self, prompt: list[int], session: Session, max_positions: int | None) -> None:
        self.recorder = Recorder(prompt, session.main_role, max_positions)
        self._session = session

    @property
    def threads(self) -> dict[str, OpenThread]:
        return self.recorder.threads

    def legal(self, name: str) -> Legal | None:
        """What the thread may draw next."""
        return self._session.legal(self.recorder, self.threads[name])

    def draw(self, name: str, token: int) -> list[str]:
        """The thread draws a token; returns the threads that it forks."""
        thread = self.threads[name]
        thread.num_drawn += 1
        return self._carry_out(thread, self._session.feed(self.recorder, thread, token))

    def stop(self, name: str) -> None:
        """The runtime ends the thread, which may write a last, injected token."""
        thread = self.threads[name]
        self._carry_out(thread, self._session.stopped(self.recorder, thread, "length"))

    def _carry_out(self, thread: OpenThread, moves: list[Move]) -> list[str]:
        forked = []
        for move in moves:
            match move:
                case Place():
                    self.recorder.place(thread, move)
                case Reveal():
                    self.recorder.reveal(thread, move)
                case Fork():
                    self.recorder.fork(thread, move)
                    forked.append(move.child)
                case Wait():
                    for child in move.children:
                        self._close(self.threads[child], "length")
                case Close():
                    self._close(thread, move.reason)
                case Resume():
                    raise ValueError("what comes after a block that was written is not replayed")
                case _:
                    self.recorder.apply(thread, move)
        return forked

    def _close(self, thread: OpenThread, reason: str) -> None:
        self.recorder.close(thread, reason)
        self.recorder.fed(thread, len(thread.unfed))


def replay_ids(
    replay: Replay, ids: list[int], origins: list[Origin]
) -> list[tuple[str, Legal | None]]:
    """Feeds a response's ids in document order; each id's thread, and what was legal there.

    A forked thread's tokens come right after the token that forked it, up to its end. Raises
    `ValueError` where the ids and origins cannot be what a runtime has written.
    """
    stack, pending = [MAIN], 0
    draws: list[tuple[str, Legal | None]] = []
    for token, origin in zip(ids, origins, strict=True):
        name = stack[-1]
        own = replay.threads[name].own
        if pending:
            if origin != "injected" or own.tokens[-pending] != token:
                raise ValueError("a forked thread does not begin with what the runtime writes")
            pending -= 1
            draws.append((name, None))
        elif is_drawn(origin):
            draws.append((name, replay.legal(name)))
            for child in reversed(replay.draw(name, token)):
                stack.append(child)
                pending = len(replay.threads[child].own.tokens)
        else:
            replay.stop(name)
            if replay.threads[name].own.tokens[-1:] != [token]:
                raise ValueError(f"id {token} is said to be the runtime's, which writes another")
            draws.append((name, None))
        while len(stack) > 1 and not replay.threads[stack[-1]].is_open:
            stack.pop()
    if len(stack) > 1:
        raise ValueError(
            "the response was cut off inside a forked thread, or its dialect does not write where "
            "one ends"
        )
    return draws
