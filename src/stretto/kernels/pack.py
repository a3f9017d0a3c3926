"""Weights of linear layers laid out for the kernels: blocks of 32 outputs, one after the other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 32
"""Outputs in a block."""
PAD = 64
"""Inputs are padded to a multiple of this."""
INPUTS_TOGETHER = {"float32": 1, "bfloat16": 2, "int8": 4}
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}


class CLinear(ctypes.Structure):
    """`struct Linear` of csrc/linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False)
class Packed:
    """One linear layer's weights as the kernels read them.

    `weights` is float32, bfloat16 or int8; int8 has one `scale` per output, round-to-nearest of
    the largest magnitude / 127, and is stored as w + 128. Bias and scale are float32.
    """

    weights: str
    data: Tensor
    scale: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int

    @classmethod
    def pack(
        cls,
        weight: Float[Tensor, "outputs inputs"],
        bias: Float[Tensor, "outputs"] | None,
        weights: str,
    ) -> Self:
        outputs, inputs = weight.shape
        pad = (0, -inputs % PAD, 0, -outputs % BLOCK)
        scale = None
        if weights == "int8":
            exact = weight.float()
            scale = (exact.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            codes = (exact / scale[:, None]).round().clamp(-127, 127)
            full = (torch.nn.functional.pad(codes, pad) + 128).to(torch.uint8)
            scale = torch.nn.functional.pad(scale, (0, pad[3]))
        else:
            full = torch.nn.functional.pad(weight.to(getattr(torch, weights)), pad)
        together = INPUTS_TOGETHER[weights]
        blocks = full.view(-1, BLOCK, full.shape[1] // together, together)
        padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, pad[3]))
        data = _aligned(blocks.permute(0, 2, 1, 3))
        return cls(weights, data, scale, padded, inputs, outputs)

    def unpack(self) -> Float[Tensor, "outputs inputs"]:
        """The weights as they are multiplied with, in float32 (bfloat16 if packed so)."""
        blocks = self.data.permute(0, 2, 1, 3)
        full = blocks.reshape(blocks.shape[0] * BLOCK, -1)
        if self.scale is not None:
            full = (full.float() - 128) * self.scale[:, None]
        return full[: self.out_features, : self.in_features]

    @property
    def num_bytes(self) -> int:
        parts = (self.data, self.scale, self.bias)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    def struct(self) -> CLinear:
        """For the kernels; valid while `self` lives."""
        return CLinear(
            self.data.data_ptr(),
            None if self.scale is None else self.scale.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.in_features,
            self.out_features,
        )


def _aligned(values: Tensor) -> Tensor:
    """A contiguous copy (torch aligns its memory to 64 bytes: a cache line)."""
    copy = torch.empty(values.shape, dtype=values.dtype)
    return copy.copy_(values)
