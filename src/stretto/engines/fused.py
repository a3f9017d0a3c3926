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
from torch import Tensor

from stretto.engines.fused_layout import CHeads, CPass, Layout, check_supported
from stretto.engines.hf import DAMAGED
from stretto.engines.pool_cache import head_dim, pool_too_large
from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.kernels import library
from stretto.kernels.memory import zeros
from stretto.params import check_int
from stretto.runtime.views import ListCursor, Run


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
        check_int("num_slots", num_slots, 2)
        check_supported(model)
        own = str(model.dtype).removeprefix("torch.")
        self.weights = own if weights is None else weights
        self._kernels = library.load(self.weights).library
        self.dtype = self.weights
        self.num_slots = num_slots
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self._num_embeddings = model.get_input_embeddings().weight.shape[0]
        self.max_positions = config.max_position_embeddings
        self._heads = CHeads(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=head_dim(config),
            num_slots=num_slots,
            scale=model.base_model.layers[0].self_attn.scaling,
        )
        self.keys, self.values = self._allocate(config, num_slots)
        layout = Layout(
            model, self._heads, self.keys, self.values, weights=self.weights, consume=consume
        )
        self._layout, self._model = layout, layout.model
        self.weight_bytes = layout.weight_bytes
        self._scratch = torch.empty(0, dtype=torch.uint8)
        check_canary(self)

    def forward(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        tokens = np.array([t for run in runs for t in run.tokens], dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= self._num_embeddings:
            raise InvalidInput(
                f"token ids go from {tokens.min()} to {tokens.max()}, but the model has "
                f"{self._num_embeddings}; its tokenizer is of another model"
            )
        views = np.empty((len(tokens), 2), dtype=np.int64)
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
            keep += [at + row for row in run.kept]
            at += n
        positions = np.array([p for run in runs for p in run.positions], dtype=np.int64)
        slots = np.array([s for run in runs for s in run.slots], dtype=np.int64)
        try:
            logits = self._pass(tokens, positions, slots, views, np.array(keep, dtype=np.int64))
        finally:
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

    def _allocate(self, config: Any, num_slots: int) -> tuple[Tensor, Tensor]:
        """Zero-filled keys and values: layers x kv_heads x slots x head_dim."""
        dtype = torch.float32 if self.weights == "float32" else torch.bfloat16
        heads = self._heads
        shape = (config.num_hidden_layers, heads.kv_heads, num_slots, heads.dim)
        try:
            return zeros(shape, dtype), zeros(shape, dtype)
        except MemoryError as error:
            raise pool_too_large(config, num_slots, dtype, self.device) from error


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
        raise ModelUnavailable(DAMAGED)
    if torch.equal(seen, hidden):
        raise Unsupported("hiding a slot left the logits unchanged; use engine 'hf'")
