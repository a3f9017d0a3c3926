"""Two streams: an example, and copies of its blocks in which tokens are masked.

What is read is clean: plans, and the blocks of earlier rounds. A copy of a block has its positions
and sees what it sees, but where blocks see one another, copies see copies. No clean token sees a
copy. So a masked token is predicted from what a model reads when it has written the rest, and no
copy of it is in view.

A block's level t in (0, 1] is the probability with which each of its tokens is masked. The loss of
a masked token is weighed by 1/t, so that every token counts once on average, at every level.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stretto.train.examples import IGNORE, Example
from stretto.train.targets import CLASSES

LEAST_LEVEL: Final = 1e-3
"""Levels are uniform from here to 1: a weight is at most 1000."""


@dataclass(frozen=True, eq=False)
class Noise:
    """Which tokens of an example are masked, and the level of each token's block."""

    masked: Bool[Tensor, "tokens"]
    levels: Float[Tensor, "tokens"]


@dataclass(frozen=True, eq=False)
class Streams:
    """An example with copies of its blocks behind it. `weights`: of what a copy's token predicts,
    0 of what main predicts and of what predicts nothing; `is_copy`: which tokens are of copies;
    `num_span_tokens`: those of blocks, masked or not."""

    example: Example
    weights: Float[Tensor, "tokens"]
    is_copy: Bool[Tensor, "tokens"]
    num_span_tokens: int


def generator_of(seed: int, number: int) -> torch.Generator:
    """The random numbers of an example's turn: a function of the run's seed and the turn alone."""
    key = hashlib.blake2b(f"noise/{seed}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)


def groups_of(example: Example) -> Int[Tensor, "segments"]:
    """A number for each segment, the same for blocks that see one another."""
    mutual = _mutual(example)
    mutual |= torch.eye(len(mutual), dtype=torch.bool)
    return mutual.int().argmax(1)


def draw_noise(example: Example, generator: torch.Generator) -> Noise:
    """Draws levels, one for each block, or for blocks that see one another, and what they mask."""
    uniform = torch.rand(len(example.is_block), generator=generator)
    by_segment = LEAST_LEVEL + (1 - LEAST_LEVEL) * uniform[groups_of(example)]
    levels = by_segment[example.segment]
    chance = torch.rand(len(example), generator=generator)
    return Noise(example.in_span & (chance < levels), levels)


def with_copies(example: Example, noise: Noise, *, mask: int, shifted: bool) -> Streams:
    """The two streams of an example under some noise. `mask` stands for what is masked; `shifted`:
    a token is predicted by the row before it, else by its own.

    Raises `ValueError` if a token is masked that is not a block's to write.
    """
    if bool((noise.masked & ~example.in_span).any()):
        raise ValueError("what is masked must be a token that a block writes")
    blocks = example.is_block.nonzero()[:, 0]
    copied = example.is_block[example.segment].nonzero()[:, 0]
    masked = noise.masked[copied]
    ids = example.ids[copied]
    targets = torch.where(masked & _may_be_drawn(example, ids), ids, IGNORE)
    weights = 1 / noise.levels[copied]
    if shifted:  # a block begins with a token that is never masked
        targets = torch.cat([targets[1:], targets.new_full((1,), IGNORE)[: len(targets)]])
    number = torch.full((len(example.is_block),), -1)
    number[blocks] = len(example.is_block) + torch.arange(len(blocks))
    is_target = targets != IGNORE
    legal = torch.where(is_target, example.block_legal, -1)
    classes = torch.where(is_target, CLASSES.index("content"), -1)
    none = torch.zeros(len(copied), dtype=torch.bool)
    both = replace(
        example,
        ids=torch.cat([example.ids, torch.where(masked, mask, ids)]),
        positions=torch.cat([example.positions, example.positions[copied]]),
        segment=torch.cat([example.segment, number[example.segment[copied]]]),
        sees=_seen_by_copies(example, blocks),
        is_block=torch.cat([example.is_block, example.is_block[blocks]]),
        targets=torch.cat([example.targets, targets]),
        classes=torch.cat([example.classes, classes]),
        legal=torch.cat([example.legal, legal]),
        follows=torch.cat([example.follows, torch.full((len(copied),), -1)]),
        in_span=torch.cat([example.in_span, none]),
    )
    return Streams(
        both,
        torch.cat([torch.zeros(len(example)), torch.where(is_target, weights, 0.0)]),
        torch.cat([torch.zeros(len(example), dtype=torch.bool), ~none]),
        int(example.in_span.sum()),
    )


def without_main(example: Example) -> Example:
    """The example with nothing left for main to predict."""
    return replace(example, targets=torch.full_like(example.targets, IGNORE))


def pruned(streams: Streams) -> Streams:
    """Leaves out the segments that nothing predicted depends on, such as the clean blocks of a last
    round: losses and gradients stay the same. May leave nothing."""
    example = streams.example
    needed = torch.zeros(len(example.is_block), dtype=torch.bool)
    needed[example.segment[example.targets != IGNORE]] = True
    while True:
        more = needed | example.sees[needed].any(0)
        if bool((more == needed).all()):
            break
        needed = more
    kept = needed[example.segment]
    renumbered = needed.cumsum(0) - 1
    rows = {
        name: getattr(example, name)[kept]
        for name in ("ids", "positions", "targets", "classes", "legal", "in_span")
    }
    smaller = replace(
        example,
        **rows,
        segment=renumbered[example.segment[kept]],
        sees=example.sees[needed][:, needed],
        is_block=example.is_block[needed],
        follows=torch.full((int(kept.sum()),), -1),
    )
    return replace(
        streams, example=smaller, weights=streams.weights[kept], is_copy=streams.is_copy[kept]
    )


def most_tokens(example: Example) -> int:
    """The tokens of an example's two streams, everything masked."""
    noise = Noise(example.in_span, torch.ones(len(example)))
    return len(pruned(with_copies(example, noise, mask=0, shifted=False)).example)


# -- internals -------------------------------------------------------------------------------------


def _mutual(example: Example) -> Bool[Tensor, "segments segments"]:
    """Which blocks see one another."""
    both = example.is_block[:, None] & example.is_block[None, :]
    return both & example.sees & example.sees.t()


def _seen_by_copies(example: Example, blocks: Int[Tensor, "blocks"]) -> Bool[Tensor, "n n"]:
    """`sees` of all segments and, after them, of the copies of these blocks."""
    clean, count = len(example.is_block), len(blocks)
    mutual = _mutual(example)
    sees = torch.zeros(clean + count, clean + count, dtype=torch.bool)
    sees[:clean, :clean] = example.sees
    sees[clean:, :clean] = (example.sees & ~mutual)[blocks]
    sees[clean:, clean:] = mutual[blocks][:, blocks]
    return sees


def _may_be_drawn(example: Example, ids: Int[Tensor, "n"]) -> Bool[Tensor, "n"]:
    """Whether ids are legal in a block."""
    if example.block_legal < 0:
        return torch.ones(len(ids), dtype=torch.bool)
    return torch.from_numpy(example.table[example.block_legal].mask)[ids]
