"""Diffusion without a plan: the whole answer is one block, or blocks one after the other.

For models of a dialect that writes blocks, trained on answers in such windows (`stretto train sft
--window`). Every block has the same length; its schedule is that of `SamplingParams`. What is
written of earlier blocks is kept, as block caches of diffusion models keep it (Fast-dLLM, Wu et
al., arXiv 2505.22618), but of clean tokens: nothing in the pool is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.dialects.base import Issue, Legal
from stretto.dialects.masks import mask_of
from stretto.dialects.planned import PlannedSession, PlannedSettings
from stretto.dialects.planned_masks import PAD, PlannedMasks
from stretto.dialects.tags import SYNC
from stretto.effects import Close, Denoise, Join, Move, Place, Wait
from stretto.errors import InvalidInput, Unsupported
from stretto.recorder import OpenThread, Recorder

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.params import SamplingParams

NAME = "diffusion"


@dataclass(frozen=True, slots=True)
class Window:
    """An answer without a plan: `window` tokens at most, in blocks of `block` one after the other,
    each of which sees those before it. It ends with the first block that ends in a filler."""

    window: int
    block: int

    def __post_init__(self) -> None:
        if self.block < 1 or self.window < self.block or self.window % self.block:
            raise InvalidInput(
                f"a window of {self.window} tokens is no whole number of blocks of {self.block}; "
                "give a multiple"
            )

    @classmethod
    def of(cls, window: int, block: int | None) -> Window:
        """In one block if none is named."""
        return cls(window, window if block is None else block)

    @property
    def most_blocks(self) -> int:
        return self.window // self.block

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of an answer of so many tokens: the last has a filler, unless the window is full.
        Raises `InvalidInput` for an answer that is longer than the window."""
        if num_tokens > self.window:
            raise InvalidInput(
                f"the answer has {num_tokens} tokens and the window {self.window}; leave it out, "
                "or give a larger window"
            )
        return min(num_tokens // self.block + 1, self.most_blocks)


@dataclass(frozen=True)
class Diffusion:
    """Decodes an answer without a plan in a window; `block` None: all of it at once."""

    window: int
    block: int | None = None

    def __post_init__(self) -> None:
        Window.of(self.window, self.block)  # bad sizes are told at once

    @property
    def name(self) -> str:
        own = f"{NAME},window={self.window}"
        return own if self.block is None else f"{own},block={self.block}"

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], DiffusionSession]:
        """Raises `Unsupported` for a model that writes no blocks or has no end of sequence."""
        card = lm.card
        if card.variant is None or card.convention is None:
            raise Unsupported(
                f"method {NAME!r} needs a model that writes blocks; {lm.name} writes dialect "
                f"{card.dialect}"
            )
        if not lm.vocabulary.end_ids:
            raise Unsupported(f"{lm.name} has no end of sequence; method {NAME!r} needs one")
        settings = PlannedSettings(
            card.variant, card.convention, card.unit, lm.engine.max_positions
        )
        masks = PlannedMasks(lm.vocabulary, card.unit)
        return lm.encode(prompt), DiffusionSession(
            masks, settings, Window.of(self.window, self.block)
        )


class DiffusionSession:
    """One request's state; see `dialects.base.Session` for the contract.

    Main has no choice: it draws the end before the last block that there can be, else a `<sync/>`,
    which is placed once the next block is written.
    """

    main_role = PlannedSession.main_role

    def __init__(self, masks: PlannedMasks, settings: PlannedSettings, window: Window) -> None:
        self.budget: Callable[[], int] = lambda: sys.maxsize
        self._settings = settings
        self._window = window
        self._control = masks.vocabulary.control
        self._span = masks.span
        self._end = Legal(mask_of(masks.vocabulary, masks.vocabulary.end_ids))
        self._sync = Legal(mask_of(masks.vocabulary, [self._control[SYNC]]))
        self._last: str | None = None
        self._num_blocks = 0

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        block = self._block(recorder, thread)
        if block is None:
            return [Close("length")]
        rest = Join((block.child,)), Place(token, markup=True)
        return [block, Wait((block.child,)), *rest]

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        if thread.parent is not None or reason != "stop" or self._is_over(recorder):
            return [Close(reason)]
        block = self._block(recorder, thread)
        if block is None:
            return [Close("length")]
        return [block, Wait((block.child,)), Close("stop")]

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]] | None:
        return None

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        if thread.parent is not None:
            return self._span
        is_last = self._num_blocks + 1 >= self._window.most_blocks
        return self._end if is_last or self._is_over(recorder) else self._sync

    # -- internals -----------------------------------------------------------------------------

    def _is_over(self, recorder: Recorder) -> bool:
        """Whether all blocks are written, or the last one ends in a filler."""
        if self._last is None:
            return False
        tokens = recorder.segments[recorder.threads[self._last].segments[0]].tokens
        content = tokens[: len(tokens) - 1]  # the runtime writes the tag that ends it
        is_full = self._num_blocks >= self._window.most_blocks
        return is_full or content[-1] == self._control[PAD]

    def _block(self, recorder: Recorder, thread: OpenThread) -> Denoise | None:
        """The next block; None if the request or the model has no room for it."""
        length, position = self._window.block, thread.next_position
        limit = recorder.max_positions
        if length > self.budget() or (limit is not None and position + length + 2 > limit):
            return None
        self._num_blocks += 1
        block = self._settings.span(self._control, self._num_blocks, length, position, "")
        self._last = block.child
        return block
