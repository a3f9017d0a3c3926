"""Engine `fused`: a whole pass of a Llama-shaped model in one call of the CPU kernels.

Its specification is `hf`. With float32 weights it agrees with it to 1e-4; with bfloat16 weights
its logits are nearer to float32's than those of torch's bfloat16. Keys and values lie in one pool
of slots, and a row's attention reads only the slots it sees, in trace order: so a row's bits
depend on nothing else, and what is evicted is not read.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.engines.hf import REFUSED_ROPE_TYPES, sliding_window
from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.kernels import library
from stretto.kernels.linear import check_weights
from stretto.kernels.memory import Arena, zeros
from stretto.kernels.pack import BLOCK, INT8_ON_BFLOAT16, KINDS, CLinear, Packed
from stretto.runtime.views import ListCursor, Run

MODEL_TYPES = ("llama", "qwen2", "qwen3")
MAX_HEAD_DIM = 256
HALF = BLOCK // 2


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


class FusedEngine:
    """The CPU engine for models of the Llama and Qwen layer shape.

    `model`: a Hugging Face causal LM on the CPU; the engine holds a packed copy of its weights,
    `weights` being float32, bfloat16 or int8, and is not touched by later changes of the model.
    With `consume` the model's own linear weights are freed as they are packed, and the model is of
    no use afterwards. Raises `Unsupported` for a model or a CPU that it cannot run.
    """

    name = "fused"
    batch_invariant = True
    device = "cpu"

    def __init__(
        self, model: Any, num_slots: int, *, weights: str | None = None, consume: bool = False
    ) -> None:
        config = model.config
        check_supported(model)
        self.weights = weights or str(model.dtype).removeprefix("torch.")
        check_weights(self.weights)
        self.dtype = self.weights
        self.num_slots = num_slots
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.max_positions = config.max_position_embeddings
        self._kernels = library.load().library
        self._kept: list[Any] = []  # what the kernels read through pointers
        self._arena = Arena()
        self._consume = consume
        self.weight_bytes = 0
        self._heads = CHeads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=head_dim(config),
            num_slots=num_slots,
            scale=model.base_model.layers[0].self_attn.scaling,
        )
        self.keys, self.values = self._allocate(config, num_slots)
        self._model = self._describe(model)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        check_canary(self)

    def forward(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        num_rows = sum(len(run.tokens) for run in runs)
        views = np.empty((num_rows, 2), dtype=np.int64)
        keep: list[int] = []
        cursors: list[ListCursor] = []
        at = 0
        for run in runs:
            cursor = run.view.cursor
            if not isinstance(cursor, ListCursor) or cursor.epoch != run.view.memory.epoch:
                cursor = run.view.cursor = ListCursor(run.view.memory.epoch)
            cursor.advance(run.view, run.version, run.segment.handle, run.start)
            before, n = cursor.length, len(run.tokens)
            cursor.extend(run.slots)
            cursors.append(cursor)
            views[at : at + n, 0] = cursor.hand_out()
            is_block = run.segment.kind == "block"
            views[at : at + n, 1] = before + n if is_block else np.arange(before, before + n) + 1
            at += n
            keep += range(at - run.num_logits, at)
        logits = self._pass(
            np.array([t for run in runs for t in run.tokens], dtype=np.int64),
            np.array([p for run in runs for p in run.positions], dtype=np.int64),
            np.array([s for run in runs for s in run.slots], dtype=np.int64),
            views,
            np.array(keep, dtype=np.int64),
        )
        for cursor in cursors:
            cursor.take_back()
        return logits

    def copy_out(self, slots: list[int]) -> Any:
        index = torch.tensor(slots, dtype=torch.long)
        return self.keys[:, :, index].clone(), self.values[:, :, index].clone()

    def copy_in(self, slots: list[int], kept: Any) -> None:
        index = torch.tensor(slots, dtype=torch.long)
        keys, values = kept
        self.keys.index_copy_(2, index, keys)
        self.values.index_copy_(2, index, values)

    def _pass(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        views: NDArray[np.int64],
        keep: NDArray[np.int64],
        *,
        only_linear_layers: bool = False,
    ) -> Float[Tensor, "logit_rows vocab"]:
        """One pass over explicit rows; a view is (address of int32 slots, their number)."""
        threads = torch.get_num_threads()
        longest = int(views[:, 1].max())
        need = self._kernels.stretto_pass_bytes(
            ctypes.byref(self._model),
            ctypes.c_int64(len(tokens)),
            ctypes.c_int64(longest),
            ctypes.c_int32(threads),
        )
        if need > self._scratch.numel():
            self._scratch = torch.empty(need + need // 4, dtype=torch.uint8)
        logits = torch.empty(len(keep), self.vocab_size)
        self._kernels.stretto_pass(
            ctypes.byref(self._model),
            ctypes.byref(
                CPass(
                    len(tokens),
                    len(keep),
                    tokens.ctypes.data,
                    positions.ctypes.data,
                    slots.ctypes.data,
                    views.ctypes.data,
                    keep.ctypes.data,
                    logits.data_ptr(),
                    self._scratch.data_ptr(),
                    threads,
                )
            ),
            ctypes.c_int32(only_linear_layers),
        )
        return logits

    def multiply_only(self, num_rows: int) -> None:
        """The linear layers of a pass of `num_rows` rows, output head included, on zeros; nothing
        else of the pass. For measuring: a pass cannot be quicker. Writes no keys and values."""
        rows = np.zeros(num_rows, dtype=np.int64)
        views = np.ones((num_rows, 2), dtype=np.int64)
        self._pass(rows, rows, rows, views, np.arange(num_rows), only_linear_layers=True)

    # -- the model, as the kernels read it -----------------------------------------------------

    def _allocate(self, config: Any, num_slots: int) -> tuple[Tensor, Tensor]:
        """Zero-filled keys and values: layers x kv_heads x slots x head_dim."""
        dtype = torch.float32 if self.weights == "float32" else torch.bfloat16
        heads = self._heads
        shape = (config.num_hidden_layers, heads.kv_heads, num_slots, heads.dim)
        try:
            return zeros(shape, dtype), zeros(shape, dtype)
        except MemoryError as error:
            size = 2 * shape[0] * shape[1] * shape[2] * shape[3] * dtype.itemsize
            raise InvalidInput(
                f"a pool of {num_slots} slots takes {size / 2**30:.1f} GiB of KV, which do not "
                "fit; ask for fewer pool slots"
            ) from error

    @torch.no_grad()
    def _describe(self, model: Any) -> CModel:
        base, config = model.base_model, model.config
        table = base.embed_tokens.weight
        if table.dtype not in (torch.float32, torch.bfloat16):
            table = table.float()
        head = self._pack([model.get_output_embeddings()], free=False)
        layers = (CLayer * config.num_hidden_layers)(
            *(self._layer(layer, i) for i, layer in enumerate(base.layers))
        )
        rope = base.rotary_emb
        return CModel(
            kind=self._kind(),
            embedding_is_bf16=table.dtype == torch.bfloat16,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            heads=self._heads,
            norm_eps=config.rms_norm_eps,
            rope_scaling=rope.attention_scaling,
            inverse_frequencies=self._floats(rope.inv_freq),
            embedding=self._keep(table.detach().contiguous()),
            final_norm=self._floats(base.norm.weight),
            head=head,
            layers=layers,
        )

    def _kind(self) -> int:
        has_bfloat16 = "bfloat16" in library.load().weights
        return INT8_ON_BFLOAT16 if self.weights == "int8" and has_bfloat16 else KINDS[self.weights]

    def _layer(self, layer: Any, index: int) -> CLayer:
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
            keys=self.keys[index].data_ptr(),
            values=self.values[index].data_ptr(),
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
        return self._keep(values.detach().float().contiguous())

    def _keep(self, values: Tensor) -> int:
        self._kept.append(values)
        return values.data_ptr()


def head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def check_supported(model: Any) -> None:
    """Raises `Unsupported`, naming what it is about, for a model that the kernels cannot run."""
    config = model.config
    way_out = "use engine 'hf'"
    if config.model_type not in MODEL_TYPES:
        raise Unsupported(
            f"model type {config.model_type!r} is not of the layer shape of engine 'fused' "
            f"({', '.join(MODEL_TYPES)}); {way_out}"
        )
    if model.device.type != "cpu":
        raise Unsupported(f"engine 'fused' runs on the CPU, the model is on {model.device}")
    rope = getattr(config, "rope_parameters", None) or {}
    dim, inner = head_dim(config), config.intermediate_size
    refused = {
        f"a sliding window of {sliding_window(config)}": sliding_window(config) is not None,
        f"activation {config.hidden_act!r}": config.hidden_act != "silu",
        f"RoPE type {rope.get('rope_type')!r}": rope.get("rope_type") in REFUSED_ROPE_TYPES,
        "partial rotary embeddings": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"a head dimension of {dim}, which must be a multiple of 16 and at most {MAX_HEAD_DIM}": (
            dim % 16 != 0 or dim > MAX_HEAD_DIM
        ),
        f"an intermediate size of {inner}, which must be a multiple of {HALF}": inner % HALF != 0,
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise Unsupported(f"engine 'fused' does not run models with {what}; {way_out}")


def check_canary(engine: FusedEngine) -> None:
    """Hides one slot from a row: its logits must change, and be finite."""
    two = np.arange(2, dtype=np.int64)
    lists = np.array([0, 0, 1], dtype=np.int32)
    first, both, own = lists.ctypes.data, lists.ctypes.data + 4, lists.ctypes.data + 8
    seen = engine._pass(two, two, two, np.array([[first, 1], [both, 2]]), two[1:])
    hidden = engine._pass(two, two, two, np.array([[first, 1], [own, 1]]), two[1:])
    for tensor in (engine.keys, engine.values):
        tensor[:, :, :2].zero_()
    if not (seen.isfinite().all() and hidden.isfinite().all()):
        raise ModelUnavailable(
            "the model's logits are not finite: its weights or its config.json are damaged; "
            "copy or download the model again"
        )
    if torch.equal(seen, hidden):
        raise Unsupported("hiding a slot left the logits unchanged; use engine 'hf'")
