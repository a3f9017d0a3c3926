"""Drawing from a large vocabulary in a fraction of the time of `sampler.draw`: the same token.

`draw` is the specification. A filtered row has the very same probabilities here, but of them only
the few are sorted and summed that can pass. A row without filters is summed in float32: where
rounding could make the token another one, nothing is drawn, and the caller asks `draw`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.runtime.sampler import Sampling

Row = NDArray[np.float32]
"""One number per id of the vocabulary."""
Ids = NDArray[np.intp]
Doubles = NDArray[np.float64]

TEMPERATURES = (0.01, 100.0)
"""Temperatures for which MARGIN is known to hold."""
MARGIN = 5e-6
"""How far a sum of float32 probabilities may be off: with z = (logit - largest) / temperature a
term is off by about 2e-7 (|z| + 3) of itself, and the mean of |z| is at most ln(vocabulary)."""
BLOCK = 256
LIKELY = (1e-3, 3e-5)
"""A nucleus is looked for among tokens more likely than this, before it is in all it may hold."""


def quick_draw(logits: Row, best: int, sampling: Sampling, number: float) -> int | None:
    """What `draw` draws from the row, its penalty already applied; None where it is uncertain.

    `best` is the lowest id with the largest logit.
    """
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if temperature == 0:
        return best
    if not math.isfinite(logits[best]):
        return None
    if not 0 < top_k < len(logits) and top_p == 1:
        return _from_all(logits, best, temperature, number)
    with np.errstate(over="ignore"):
        z = (logits.astype(np.float64) - float(logits[best])) / temperature
    if 0 < top_k < len(logits):
        kth = float(np.partition(logits, -top_k)[-top_k])
        beyond = z < (kth - float(logits[best])) / temperature
        z[beyond] = -np.inf
    probabilities = torch.softmax(torch.from_numpy(z), dim=-1).numpy()
    ids = _nucleus(probabilities, top_p) if top_p < 1 else np.flatnonzero(probabilities > 0)
    cumulative = probabilities[ids].cumsum()
    place = int(np.searchsorted(cumulative, number * float(cumulative[-1]), side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _nucleus(probabilities: Doubles, top_p: float) -> Ids:
    """The ids that top-p keeps, rising."""
    for least in (*LIKELY, (1 - top_p) / (2 * len(probabilities))):
        ids = np.flatnonzero(probabilities > least)
        shares = probabilities[ids]
        if shares.sum() > top_p + 1e-9:  # what is less likely is beyond the nucleus
            break
    else:
        ids, shares = np.arange(len(probabilities)), probabilities
    order = np.argsort(-shares, kind="stable")
    ordered = shares[order]
    inside = ordered.cumsum() - ordered < top_p
    inside[0] = True
    return np.sort(ids[order[inside]])


def _from_all(logits: Row, best: int, temperature: float, number: float) -> int | None:
    """Finds the block of ids in which the sum passes the number, then the id in the block."""
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        return None
    with np.errstate(over="ignore"):
        z = (logits - logits[best]) / np.float32(temperature)
    probabilities = torch.softmax(torch.from_numpy(z), dim=-1)
    split = len(z) - len(z) % BLOCK
    blocks = probabilities[:split].view(-1, BLOCK).sum(dim=-1).numpy()
    rest = float(probabilities[split:].sum())
    sums = np.append(blocks, rest).cumsum(dtype=np.float64)
    target = number * float(sums[-1])
    block = int(np.searchsorted(sums, target, side="right"))
    target -= float(sums[block - 1]) if block else 0.0
    own = probabilities[block * BLOCK : (block + 1) * BLOCK].numpy()
    cumulative = own.cumsum(dtype=np.float64)
    place = int(np.searchsorted(cumulative, target, side="right"))
    if place == len(cumulative):
        return None
    before = float(cumulative[place - 1]) if place else 0.0
    is_certain = target - before > MARGIN and float(cumulative[place]) - target > MARGIN
    return block * BLOCK + place if is_certain else None
