"""A Hugging Face model of the Llama layer shape as the kernels read it: structures of pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engines.hf import REFUSED_ROPE_TYPES, sliding_window
from stretto.engines.pool_cache import head_dim
from stretto.errors import InvalidInput, Unsupported
from stretto.kernels import library
from stretto.kernels.memory import Arena
from stretto.kernels.pack import BLOCK, INT8_ON_BFLOAT16, KINDS, CLinear, Packed

MODEL_TYPES = ("llama", "qwen2", "qwen3")
MAX_HEAD_DIM = 256
HALF = BLOCK // 2
WAY_OUT = "use engine 'auto' or 'hf'"
KNOWN_CODE = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
"""Modules from here compute what their weights and the config say."""


class CHeads(ctypes.Structure):
    """`struct Heads` of csrc/attention.h."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class CLayer(ctypes.Structure):
    """`struct Layer` of csrc/api.cpp."""

    _fields_ = (
        ("qkv", CLinear),
        ("o", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


class CModel(ctypes.Structure):
    """`struct Model` of csrc/api.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("embedding_is_bf16", ctypes.c_int32),
        ("hidden", ctypes.c_int64),
        ("intermediate", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("heads", CHeads),
        ("norm_eps", ctypes.c_float),
        ("rope_scaling", ctypes.c_float),
        ("inverse_frequencies", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("head", CLinear),
        ("layers", ctypes.POINTER(CLayer)),
    )


class CPass(ctypes.Structure):
    """`struct Pass` of csrc/api.cpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("views", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
    )


class Layout:
    """Packed weights of a model, and `model`, the structure that points to them; valid while this
    object lives. All is copied: the model may change afterwards.

    `weights` is float32, bfloat16 or int8. With `consume` the model's own linear weights are freed
    as they are packed. Raises `InvalidInput` if memory runs out.
    """

    def __init__(
        self, model: Any, heads: CHeads, keys: Tensor, values: Tensor, *, weights: str,
        consume: bool,
    ) -> None:  # fmt: skip
        self.weights = weights
        self.weight_bytes = 0
        self._kept: list[Any] = []  # what is pointed to
        self._arena = Arena()
        self._consume = consume
        try:
            self.model = self._describe(model, heads, keys, values)
        except MemoryError as error:
            raise InvalidInput(
                f"the packed weights do not fit in memory ({error}); use a smaller model, or "
                "int8 weights"
            ) from error

    @torch.no_grad()
    def _describe(self, model: Any, heads: CHeads, keys: Tensor, values: Tensor) -> CModel:
        base, config = model.base_model, model.config
        table = base.embed_tokens.weight
        if table.dtype not in (torch.float32, torch.bfloat16):
            table = table.float()
        head = self._pack([model.get_output_embeddings()], free=False)
        layers = (CLayer * config.num_hidden_layers)(
            *(
                self._layer(layer, keys[i].data_ptr(), values[i].data_ptr())
                for i, layer in enumerate(base.layers)
            )
        )
        rope = base.rotary_emb
        return CModel(
            kind=self._kind(),
            embedding_is_bf16=table.dtype == torch.bfloat16,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            heads=heads,
            norm_eps=config.rms_norm_eps,
            rope_scaling=rope.attention_scaling,
            inverse_frequencies=self._floats(rope.inv_freq),
            embedding=self._keep(table),
            final_norm=self._floats(base.norm.weight),
            head=head,
            layers=layers,
        )

    def _kind(self) -> int:
        beside_bfloat16 = "bfloat16" in library.load(self.weights).weights
        is_int8 = self.weights == "int8"
        return INT8_ON_BFLOAT16 if is_int8 and beside_bfloat16 else KINDS[self.weights]

    def _layer(self, layer: Any, keys: int, values: int) -> CLayer:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return CLayer(
            qkv=self._pack([attention.q_proj, attention.k_proj, attention.v_proj]),
            o=self._pack([attention.o_proj]),
            gate_up=self._pack([mlp.gate_proj, mlp.up_proj], in_turns=True),
            down=self._pack([mlp.down_proj]),
            attention_norm=self._floats(layer.input_layernorm.weight),
            mlp_norm=self._floats(layer.post_attention_layernorm.weight),
            q_norm=None if q_norm is None else self._floats(q_norm.weight),
            k_norm=None if k_norm is None else self._floats(k_norm.weight),
            keys=keys,
            values=values,
        )

    def _pack(self, linears: list[nn.Linear], *, in_turns: bool = False, free: bool = True) -> Any:
        """One packed layer of several side by side; `in_turns`: 16 outputs of each."""

        def join(parts: list[Tensor]) -> Tensor:
            if in_turns:
                turns = [part.view(-1, HALF, *part.shape[1:]) for part in parts]
                parts = [torch.stack(turns, 1).flatten(0, 2)]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        has_bias = linears[0].bias is not None
        packed = Packed.pack(
            join([linear.weight for linear in linears]),
            join([linear.bias for linear in linears]) if has_bias else None,
            self.weights,
            self._arena,
        )
        if self._consume and free:
            for linear in linears:
                linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.weight_bytes += packed.num_bytes
        self._kept.append(packed)
        return packed.struct()

    def _floats(self, values: Tensor) -> int:
        return self._keep(values.float())

    def _keep(self, values: Tensor) -> int:
        kept = values.detach().clone(memory_format=torch.contiguous_format)
        self._kept.append(kept)
        return kept.data_ptr()


def check_supported(model: Any) -> None:
    """Raises `Unsupported`, naming what it is about, for a model that the kernels cannot run."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise Unsupported(
            f"model type {config.model_type!r} is not of the layer shape of engine 'fused' "
            f"({', '.join(MODEL_TYPES)}); {WAY_OUT}"
        )
    if model.device.type != "cpu":
        raise Unsupported(
            f"engine 'fused' runs on the CPU, the model is on {model.device}; load it with device "
            "'cpu', or use engine 'hf'"
        )
    if (other := first_unknown(model)) is not None:
        raise Unsupported(f"engine 'fused' reads weights and nothing else, and {other}; {WAY_OUT}")
    rope = getattr(config, "rope_parameters", None) or {}
    dim, inner = head_dim(config), config.intermediate_size
    frequencies = model.base_model.rotary_emb.inv_freq.numel()
    refused = {
        f"a sliding window of {sliding_window(config)}": sliding_window(config) is not None,
        f"activation {config.hidden_act!r}": config.hidden_act != "silu",
        f"RoPE type {rope.get('rope_type')!r}": rope.get("rope_type") in REFUSED_ROPE_TYPES,
        "partial rotary embeddings": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"{frequencies} rotary frequencies for a head dimension of {dim}": (
            frequencies != dim // 2
        ),
        f"a head dimension of {dim}, which must be a multiple of 16 and at most {MAX_HEAD_DIM}": (
            dim % 16 != 0 or dim > MAX_HEAD_DIM
        ),
        f"an intermediate size of {inner}, which must be a multiple of {HALF}": inner % HALF != 0,
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise Unsupported(f"engine 'fused' does not run models with {what}; {WAY_OUT}")
    _check_shapes(model)


def _check_shapes(model: Any) -> None:
    """The kernels read as much as the config says: the weights must have it."""
    config, base = model.config, model.base_model
    hidden, inner, dim = config.hidden_size, config.intermediate_size, head_dim(config)
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    if len(base.layers) != config.num_hidden_layers or len(base.layers) == 0:
        raise Unsupported(
            f"the model has {len(base.layers)} layers and its config says "
            f"{config.num_hidden_layers}; set the config right"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise Unsupported(
            f"{config.num_attention_heads} heads are no multiple of the "
            f"{config.num_key_value_heads} of keys and values; {WAY_OUT}"
        )
    table = base.embed_tokens.weight.shape
    _check_shape("embed_tokens", table, (table[0], hidden))
    head = model.get_output_embeddings().weight.shape
    _check_shape("the output head", head, (min(head[0], table[0]), hidden))
    _check_shape("norm", base.norm.weight.shape, (hidden,))
    for number, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        expected = {
            attention.q_proj: (q, hidden),
            attention.k_proj: (kv, hidden),
            attention.v_proj: (kv, hidden),
            attention.o_proj: (hidden, q),
            mlp.gate_proj: (inner, hidden),
            mlp.up_proj: (inner, hidden),
            mlp.down_proj: (hidden, inner),
            layer.input_layernorm: (hidden,),
            layer.post_attention_layernorm: (hidden,),
        }
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        expected |= {norm: (dim,) for norm in norms if norm is not None}
        for part, shape in expected.items():
            _check_shape(f"a part of layer {number}", part.weight.shape, shape)
        for group in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        ):
            if len({part.bias is None for part in group}) > 1:
                raise Unsupported(f"in layer {number} some projections have a bias; {WAY_OUT}")


def _check_shape(what: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise Unsupported(
            f"{what} has shape {tuple(shape)}, the config says {tuple(expected)}; {WAY_OUT}"
        )


def first_unknown(model: Any) -> str | None:
    """What of a model computes in a way of its own, in words: an adapter, a quantised layer, a
    hook. None if all of its modules are torch's and transformers' own."""
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return f"{name or 'the model'} has a hook"
        if not type(part).__module__.startswith(KNOWN_CODE):
            return f"{name or 'the model'} is a {type(part).__module__}.{type(part).__name__}"
    return None
