"""Diffusion without a plan: the whole answer is one block, or blocks one after the other.

For models of a dialect that writes blocks, trained on answers in such windows (`stretto train sft
--window`), which are kept in the model card: a model of other windows is refused. Every block has
the same length; its schedule is that of `SamplingParams`. Blocks one after the other are block
diffusion: the model was trained so, and a block is blind to those that follow. That is not
Fast-dLLM (Wu et al., arXiv 2505.22618), which decodes a model of one window by blocks and caches
what then is stale; here what is written is fed once more, clean, with the first pass of the next
block. No pass is fed for anything else, and the last block is not fed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stretto.dialects.base import Issue, Legal
from stretto.dialects.masks import mask_of
from stretto.dialects.planned import PlannedSession, PlannedSettings
from stretto.dialects.planned_masks import PAD, PlannedMasks
from stretto.dialects.tags import SYNC
from stretto.effects import Close, Join, Move, Place, Resume, Wait
from stretto.errors import InvalidInput, Unsupported
from stretto.recorder import OpenThread, Recorder

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.methods import Method
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

    reads: ClassVar[tuple[str, ...]] = ("steps_ratio", "threshold", "order", "early_finish")

    window: int
    block: int | None = None

    def __post_init__(self) -> None:
        Window.of(self.window, self.block)  # bad sizes are told at once

    @classmethod
    def of(cls, window: Window) -> Diffusion:
        return cls(window.window, window.block if window.most_blocks > 1 else None)

    @property
    def name(self) -> str:
        own = f"{NAME},window={self.window}"
        return own if self.block is None else f"{own},block={self.block}"

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], DiffusionSession]:
        """Raises `Unsupported` for a model that was not trained in these windows, or has no end of
        sequence."""
        card, window = lm.card, Window.of(self.window, self.block)
        if card.variant is None or card.convention is None:
            raise Unsupported(
                f"method {NAME!r} needs a model that writes blocks; {lm.name} writes dialect "
                f"{card.dialect}"
            )
        if card.own_window is None:
            raise Unsupported(
                f"method {self.name!r} needs a model trained in windows; {lm.name} was trained to "
                "plan: leave the method out"
            )
        check_window(self, card.own_window)
        if not lm.vocabulary.end_ids:
            raise Unsupported(f"{lm.name} has no end of sequence; method {NAME!r} needs one")
        settings = PlannedSettings(
            card.variant, card.convention, card.unit, lm.engine.max_positions
        )
        masks = PlannedMasks(lm.vocabulary, card.unit)
        return lm.encode(prompt), DiffusionSession(masks, settings, window)


def check_window(method: Method, window: Window) -> None:
    """Raises `Unsupported` unless a method is what a model of this window is trained for."""
    if isinstance(method, Diffusion) and Window.of(method.window, method.block) == window:
        return
    own = Diffusion.of(window)
    raise Unsupported(
        f"method {method.name!r} is asked for, but the model was trained for {own.name!r} and "
        "means nothing otherwise; leave it out"
    )


class DiffusionSession:
    """One request's state; see `dialects.base.ResumingSession` for the contract.

    Main writes nothing of its own: what it draws is the end. Then come the blocks, and between two
    of them a `<sync/>` that the runtime writes, fed with the first pass of the next one.
    """

    main_role = PlannedSession.main_role

    def __init__(self, masks: PlannedMasks, settings: PlannedSettings, window: Window) -> None:
        self.budget: Callable[[], int] = lambda: sys.maxsize
        self._settings = settings
        self._window = window
        self._control = masks.vocabulary.control
        self._span = masks.span
        self._end = Legal(mask_of(masks.vocabulary, masks.vocabulary.end_ids))
        self._last: str | None = None
        self._num_blocks = 0

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        raise ValueError(f"thread {thread.name!r} draws token {token}; it may only end")

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        if thread.parent is not None or reason != "stop":
            return [Close(reason)]
        return self._block(recorder, thread.next_position)

    def resumed(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        """The block under way is written: the next one, or the end of the answer."""
        assert self._last is not None
        if self._is_over(recorder, self._last):
            return [Close("stop")]
        between = Join((self._last,)), Place(self._control[SYNC], "injected", markup=True)
        block = self._block(recorder, thread.next_position + 1)
        return [*between, *block] if len(block) > 1 else block

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return []

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]] | None:
        return None

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        return self._end if thread.parent is None else self._span

    # -- internals -----------------------------------------------------------------------------

    def _is_over(self, recorder: Recorder, last: str) -> bool:
        """Whether all blocks are written, or the last one ends in a filler."""
        tokens = recorder.threads[last].own.tokens
        content = tokens[: len(tokens) - 1]  # the runtime writes the tag that ends it
        is_full = self._num_blocks >= self._window.most_blocks
        return is_full or content[-1] == self._control[PAD]

    def _block(self, recorder: Recorder, position: int) -> list[Move]:
        """The next block, and what follows; the end if the request or the model has no room."""
        length, limit = self._window.block, recorder.max_positions
        if length > self.budget() or (limit is not None and position + length + 2 > limit):
            return [Close("length")]
        self._num_blocks += 1
        block = self._settings.span(self._control, self._num_blocks, length, position, "")
        self._last = block.child
        return [block, Wait((block.child,)), Resume()]
