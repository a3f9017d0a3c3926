"""The largest logit of a row, and how likely it is: by the CPU kernels where they are loaded."""

from __future__ import annotations

import ctypes
import math

import torch

from stretto.kernels import library
from stretto.runtime.quick import Row


def peak(logits: Row) -> tuple[int, float]:
    """The lowest id with the largest logit, and its log-probability at temperature 1.

    `plain_peak` is the specification; log-probabilities agree to 1e-5.
    """
    kernels = library.loaded()
    if kernels is None or not logits.flags.c_contiguous:
        return plain_peak(logits)
    place = ctypes.c_int64()
    total = kernels.stretto_peak(
        ctypes.c_void_p(logits.ctypes.data), ctypes.c_int64(len(logits)), ctypes.byref(place)
    )
    return plain_peak(logits) if math.isnan(total) else (place.value, -math.log(total))


def plain_peak(logits: Row) -> tuple[int, float]:
    best = int(logits.argmax())
    return best, math.log(float(torch.softmax(torch.from_numpy(logits), dim=-1)[best]))
