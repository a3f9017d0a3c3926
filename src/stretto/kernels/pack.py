"""Weights of linear layers laid out for the kernels: blocks of 32 outputs, one after the other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from stretto.kernels.memory import Arena

BLOCK = 32
"""Outputs in a block."""
PAD = 64
"""Inputs are padded to a multiple of this."""
GROUP = 32
"""Inputs that share a scale in int8."""
GROUP_BYTES = 2 * BLOCK + GROUP * BLOCK
INPUTS_TOGETHER = {"float32": 1, "bfloat16": 2}
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
INT8_ON_BFLOAT16 = 3
"""int8 weights in a pass whose attention uses bfloat16 instructions."""


class CLinear(ctypes.Structure):
    """`struct Linear` of csrc/linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False)
class Packed:
    """One linear layer's weights as the kernels read them.

    `weights` is float32, bfloat16 or int8. int8 rounds to the nearest multiple of a scale that an
    output has for each 32 inputs: their largest magnitude / 127, in bfloat16. Bias is float32.
    """

    weights: str
    data: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int

    @classmethod
    def pack(
        cls,
        weight: Float[Tensor, "outputs inputs"],
        bias: Float[Tensor, "outputs"] | None,
        weights: str,
        arena: Arena | None = None,
    ) -> Self:
        """Raises `MemoryError` if there is no room. `arena`: where the weights are to lie."""
        outputs, inputs = weight.shape
        pad = (0, padded(inputs) - inputs, 0, -outputs % BLOCK)
        full = torch.nn.functional.pad(weight, pad)
        wide = None if bias is None else torch.nn.functional.pad(bias.float(), (0, pad[3]))
        if weights == "int8":
            laid_out = _lay_out_int8(full.float())
        else:
            together = INPUTS_TOGETHER[weights]
            typed = full.to(getattr(torch, weights))
            blocks = typed.view(-1, BLOCK, full.shape[1] // together, together)
            laid_out = blocks.permute(0, 2, 1, 3)
        if arena is not None:
            data = arena.copy_of(laid_out)
        else:
            data = laid_out.clone(memory_format=torch.contiguous_format)
        return cls(weights, data.flatten(1), wide, inputs, outputs)

    def unpack(self) -> Float[Tensor, "outputs inputs"]:
        """The weights as they are multiplied with, in float32 (bfloat16 if packed so)."""
        if self.weights == "int8":
            groups = self.data.view(len(self.data), -1, GROUP_BYTES)
            scales = groups[..., : 2 * BLOCK].contiguous().view(torch.bfloat16)
            codes = groups[..., 2 * BLOCK :].view(*groups.shape[:2], GROUP // 4, BLOCK, 4)
            exact = (codes.float() - 128) * scales.float()[:, :, None, :, None]
            blocks = exact.permute(0, 3, 1, 2, 4)
        else:
            together = INPUTS_TOGETHER[self.weights]
            blocks = self.data.view(len(self.data), -1, BLOCK, together).permute(0, 2, 1, 3)
        full: Tensor = blocks.reshape(len(self.data) * BLOCK, -1)
        return full[: self.out_features, : self.in_features]

    @property
    def num_bytes(self) -> int:
        parts = (self.data, self.bias)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    @cached_property
    def padded_inputs(self) -> int:
        """Inputs that `data` has room for."""
        per_block = self.data.shape[1]
        return per_block // GROUP_BYTES * GROUP if self.weights == "int8" else per_block // BLOCK

    @cached_property  # asked for in every call
    def is_whole(self) -> bool:
        """Whether the kernels can read it without leaving its memory."""
        dtype = torch.uint8 if self.weights == "int8" else getattr(torch, self.weights)
        rows = len(self.data) * BLOCK
        bias = self.bias
        return bool(
            self.data.dtype == dtype
            and self.data.device.type == "cpu"
            and self.data.is_contiguous()
            and 0 <= self.out_features <= rows
            and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
            and (bias is None or bias.numel() >= rows)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied without the rest of the arena that the weights lie in."""
        parts = (self.weights, self.data.clone(), self.bias, self.in_features, self.out_features)
        return type(self), parts

    def struct(self) -> CLinear:
        """For the kernels; valid while `self` lives."""
        return CLinear(
            self.data.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.in_features,
            self.out_features,
        )


def padded(inputs: int) -> int:
    return inputs + -inputs % PAD


def _lay_out_int8(full: Float[Tensor, "outputs inputs"]) -> Tensor:
    """blocks x groups x bytes: a group's scales, then its numbers + 128."""
    groups = full.view(-1, BLOCK, full.shape[1] // GROUP, GROUP).transpose(1, 2)
    scales = (groups.abs().amax(-1) / 127).to(torch.bfloat16)
    steps = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups / steps[..., None]).round().clamp(-128, 127).add(128).to(torch.uint8)
    turned = codes.view(*codes.shape[:3], GROUP // 4, 4).transpose(2, 3).flatten(2)
    return torch.cat([scales.contiguous().view(torch.uint8), turned], dim=-1)
