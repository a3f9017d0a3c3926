"""Drawing from a large vocabulary in a fraction of the time of `sampler.draw`: the same token.

`draw` is the specification. Here a row is summed in float32, and a filter looks only at the few
tokens that can pass it. Where rounding could make the token another one, a nucleus is found in the
very probabilities that `draw` has, and anything else is left to `draw`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.runtime.sampler import Sampling

Row = NDArray[np.float32]
"""One number per id of the vocabulary."""
Rows = NDArray[np.float32]
"""Several of them, one below the other."""
Ids = NDArray[np.intp]
Floats = NDArray[np.floating]
Doubles = NDArray[np.float64]

TEMPERATURES = (0.01, 100.0)
"""Temperatures for which the margins are known to hold."""
ROUGH = 5e-6
"""How far a sum of float32 probabilities may be off: with z = (logit - largest) / temperature a
term is off by about 2e-7 (|z| + 3) of itself, and the mean of |z| is at most ln(vocabulary)."""
EXACT = 1e-9
"""How far a sum in double precision may be off, with room to spare."""
LIKELY = (1e-3, 3e-5)
"""A nucleus is looked for among tokens more likely than this."""
BLOCK = 256


def quick_draw(logits: Row, best: int, sampling: Sampling, number: float) -> int | None:
    """What `draw` draws from the row, its penalty already applied; None where it is uncertain.

    `best` is the lowest id with the largest logit.
    """
    temperature, top_p = sampling.temperature, sampling.top_p
    if temperature == 0:
        return best
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1] or not math.isfinite(logits[best]):
        return None
    if 0 < sampling.top_k < len(logits):
        ids, z = _largest(logits, best, sampling)
        share = 1 / float(np.exp(z).sum())
        return _from_few(ids, z, share, top_p, number, least=0.0, margin=EXACT)
    with np.errstate(over="ignore"):
        probabilities = _softmax((logits - logits[best]) / np.float32(temperature))
    if top_p == 1:
        return _from_all(probabilities, number)
    for least in LIKELY:
        ids = np.flatnonzero(probabilities > least)
        if probabilities[ids].sum() > top_p + ROUGH:
            z = _scaled(logits[ids], logits[best], temperature)
            share = float(probabilities[best])
            token = _from_few(ids, z, share, top_p, number, least=least, margin=ROUGH)
            if token is not None:
                return token
    return _from_nucleus(_softmax(_scaled(logits, logits[best], temperature)), top_p, number)


def _softmax(z: Floats) -> Floats:
    return torch.softmax(torch.from_numpy(z), dim=-1).numpy()


def _scaled(logits: Row, largest: np.float32, temperature: float) -> Doubles:
    """The z of some logits, bit for bit those of `draw`."""
    return (logits.astype(np.float64) - float(largest)) / temperature


def _largest(logits: Row, best: int, sampling: Sampling) -> tuple[Ids, Doubles]:
    """The rising ids that top-k keeps, and their z: the largest, and what equals the last one."""
    kth = float(np.partition(logits, -sampling.top_k)[-sampling.top_k])
    nearly = kth - 1e-6 * max(1.0, abs(kth), abs(float(logits[best])))
    ids = np.flatnonzero(logits >= np.float32(max(nearly, torch.finfo(torch.float32).min)))
    z = _scaled(logits[ids], logits[best], sampling.temperature)
    kept = z >= (kth - float(logits[best])) / sampling.temperature
    return ids[kept], z[kept]


def _from_few(
    ids: Ids, z: Doubles, share: float, top_p: float, number: float, *, least: float, margin: float
) -> int | None:
    """From rising ids, all whose probability is above `least`. That of the token whose z is 0 is
    `share`, and sums are off by up to `margin`. None if it is uncertain which token it is, or where
    the nucleus ends."""
    if top_p < 1:
        order = np.argsort(-z, kind="stable")
        gaps = -np.diff(z[order])
        shares = np.exp(z[order]) * share
        sums = shares.cumsum()
        before = sums - shares
        last = max(0, int(np.searchsorted(before, top_p)) - 1)
        is_last = sums[last] > top_p + margin and (not last or before[last] < top_p - margin)
        is_ordered = shares[last] > 1.001 * least and not ((gaps > 0) & (gaps < EXACT)).any()
        if not (is_last and is_ordered):
            return None
        inside = np.sort(order[: last + 1])
        ids, z = ids[inside], z[inside]
    cumulative = np.exp(z).cumsum()
    place = _place(cumulative, number * float(cumulative[-1]), EXACT)
    return None if place is None else int(ids[place])


def _from_all(probabilities: Floats, number: float) -> int | None:
    """Finds the block of ids in which the sum passes the number, then the id in the block."""
    split = len(probabilities) - len(probabilities) % BLOCK
    blocks = torch.from_numpy(probabilities[:split]).view(-1, BLOCK).sum(dim=-1).numpy()
    sums = np.append(blocks, probabilities[split:].sum()).cumsum(dtype=np.float64)
    target = number * float(sums[-1])
    block = int(np.searchsorted(sums, target, side="right"))
    target -= float(sums[block - 1]) if block else 0.0
    own = probabilities[block * BLOCK : (block + 1) * BLOCK]
    place = _place(own.cumsum(dtype=np.float64), target, ROUGH)
    return None if place is None else block * BLOCK + place


def _place(cumulative: Doubles, target: float, margin: float) -> int | None:
    """The first place where the sum passes `target`; None if `margin` could make it another."""
    place = int(np.searchsorted(cumulative, target, side="right"))
    if place == len(cumulative):
        return None
    before = float(cumulative[place - 1]) if place else 0.0
    is_certain = target - before > margin and float(cumulative[place]) - target > margin
    return place if is_certain else None


def _from_nucleus(probabilities: Floats, top_p: float, number: float) -> int | None:
    """As `draw` does from these probabilities, but for the least likely that no nucleus holds."""
    ids = np.flatnonzero(probabilities > (1 - top_p) / (2 * len(probabilities)))
    shares = probabilities[ids]
    if shares.sum() < top_p + EXACT:
        return None
    order = np.argsort(-shares, kind="stable")
    ordered = shares[order]
    inside = ordered.cumsum() - ordered < top_p
    inside[0] = True
    ids = np.sort(ids[order[inside]])
    cumulative = probabilities[ids].cumsum()
    place = int(np.searchsorted(cumulative, number * float(cumulative[-1]), side="right"))
    return int(ids[min(place, len(ids) - 1)])
