"""Packed linear layers for any model: a torch operator, and the layer that calls it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import InvalidInput
from stretto.kernels import library
from stretto.kernels.memory import Arena
from stretto.kernels.pack import KINDS, Packed, padded


@torch.library.custom_op("stretto::linear", mutates_args=(), device_types="cpu")
def packed_linear(
    x: Tensor, data: Tensor, bias: Tensor | None, *, weights: str,
    outputs: int,
) -> Tensor:  # fmt: skip
    """x W^T + b over packed weights. x: [..., inputs] in float32 or bfloat16, as is the result.

    A row's bits do not depend on the other rows. Sums are in float32; with int8 weights the rows
    are quantised to int8 in groups of 32 inputs.
    """
    return multiply(x, Packed(weights, data, bias, x.shape[-1], outputs))


def multiply(x: Tensor, layer: Packed) -> Tensor:
    """What the operator computes. Raises `ValueError` for an `x` that the weights do not fit."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"rows are {x.dtype} on {x.device}; the kernels take float32 and bfloat16")
    if not layer.is_whole:
        raise ValueError("the weights are not what `Packed.pack` makes")
    if x.shape[-1] != layer.in_features or layer.padded_inputs != padded(x.shape[-1]):
        raise ValueError(f"rows of {x.shape[-1]} inputs, the layer takes {layer.in_features}")
    kernels = library.handle(layer.weights)
    rows = x.resolve_neg().reshape(-1, x.shape[-1]).contiguous()
    num_rows, threads = rows.shape[0], torch.get_num_threads()
    y = x.new_empty(num_rows, layer.out_features)
    need = kernels.stretto_linear_bytes(
        ctypes.c_int64(num_rows), ctypes.c_int64(layer.in_features), ctypes.c_int32(threads)
    )
    scratch = torch.empty(need, dtype=torch.uint8)
    kernels.stretto_linear(
        ctypes.byref(layer.struct()),
        ctypes.c_int32(KINDS[layer.weights]),
        ctypes.c_int32(x.dtype == torch.bfloat16),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_int64(num_rows),
        ctypes.c_void_p(y.data_ptr()),
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_int32(threads),
    )
    return y.view(*x.shape[:-1], layer.out_features)


@packed_linear.register_fake
def _(x: Tensor, *_: Any, outputs: int, **__: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU. `weight` has shape and dtype but no data; `packed.unpack`
    gives it back."""

    def __init__(self, linear: nn.Linear, weights: str, arena: Arena | None = None) -> None:
        super().__init__()
        with torch.inference_mode(False), torch.no_grad():
            self.packed = Packed.pack(linear.weight, linear.bias, weights, arena)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = None if linear.bias is None else torch.empty_like(linear.bias, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        p = self.packed
        if not torch.compiler.is_compiling():  # spare torch's dispatch, layer after layer
            return multiply(x, p)
        result: Tensor = packed_linear(x, p.data, p.bias, weights=p.weights, outputs=p.out_features)
        return result

    def extra_repr(self) -> str:
        p = self.packed
        return f"in_features={p.in_features}, out_features={p.out_features}, weights={p.weights}"


def pack_model(model: Any, weights: str = "bfloat16") -> Any:
    """Replaces all linear layers of a CPU model, the output head included, and returns it.

    `weights`: float32, bfloat16 or int8. The model is changed in place, and can no longer be
    trained or saved. Raises `InvalidInput` for a model that is not on the CPU in float32 or
    bfloat16, and `KernelsUnavailable` where the kernels cannot run.
    """
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        raise InvalidInput(
            f"the model is {model.dtype} on {model.device}; the CPU kernels take a model in "
            "float32 or bfloat16 on the CPU"
        )
    library.load(weights)
    arena = Arena()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                if child._forward_hooks or child._forward_pre_hooks:
                    raise InvalidInput(
                        f"{name} has a hook, which a packed layer would drop; remove it first"
                    )
                setattr(module, name, PackedLinear(child, weights, arena))
    return model
