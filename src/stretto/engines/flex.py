"""Engine `flex`: attention by FlexAttention, which reads only the blocks of slots that a row sees.

Its specification is `hf`; logits agree to 1e-4 in float32. Rows attend in tiles: a tile is a batch
entry of FlexAttention over the one pool, with its own list of blocks.

Unmeasured: written and tested on CPU. On CUDA `flex_attention` is compiled, and all shapes are a
few static sizes so that nothing recompiles, but nothing of it has been run or timed on a GPU, and
no CUDA graph is captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from stretto.engines.blocks import TILE_ROWS, BlockList, Tables, page_size_error
from stretto.engines.hf import DAMAGED, check_rope, sliding_window
from stretto.engines.pool_cache import PoolCache
from stretto.errors import InvalidInput, ModelUnavailable, Unsupported
from stretto.runtime.views import Cursor, Run

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass. `places`: where each stands in the flattened tiles."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    places: list[int]


class FlexEngine:
    """`model`: a Hugging Face Llama, Qwen2 or Qwen3 in eval mode, whatever its attention backend.

    `page_size`: the pool's, a multiple of `block_size`, the slots of a key/value block. `compiled`:
    whether `flex_attention` is compiled (None: on CUDA). Uncompiled it materialises all scores.

    Raises `Unsupported` for other architectures, sliding windows, RoPE types that do not isolate
    rows, and pages that do not fit the blocks, here or when a pass brings them; `InvalidInput` for
    blocks that the kernels do not take.
    """

    name = "flex"
    batch_invariant = False

    def __init__(
        self,
        model: Any,
        num_slots: int,
        page_size: int = 128,
        *,
        block_size: int = 128,
        compiled: bool | None = None,
    ) -> None:
        self.model = model
        self.device = model.device
        check_supported(model.config)
        check_sizes(page_size, block_size, self.device.type)
        self.num_slots = num_slots
        self.block_size = block_size
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.max_positions = model.config.max_position_embeddings
        num_blocks = -(-num_slots // block_size) + 1  # the last is scratch, for padding
        width = num_blocks * block_size
        self.cache = PoolCache(model.config, width, model.dtype, self.device)
        self.cache.width = width
        self.tables = Tables(64, num_blocks, block_size, self.device)
        is_compiled = self.device.type == "cuda" if compiled is None else compiled
        self._flex = torch.compile(flex_attention, dynamic=False) if is_compiled else _uncompiled
        check_canary(self)

    def forward(self, runs: list[Run]) -> Float[Tensor, "logit_rows vocab"]:
        tile_rows = 1 if all(len(run.tokens) == 1 for run in runs) else TILE_ROWS
        self._make_room(sum(-(-len(run.tokens) // tile_rows) for run in runs))
        self.tables.start()
        rows = Rows([], [], [], [])
        keep: list[int] = []
        num_tiles = 0
        for run in runs:
            self._stage(run, tile_rows)
            keep += [len(rows.tokens) + row for row in run.kept]
            rows.tokens.extend(run.tokens)
            rows.positions.extend(run.positions)
            rows.slots.extend(run.slots)
            first = num_tiles * tile_rows
            rows.places.extend(range(first, first + len(run.tokens)))
            num_tiles += -(-len(run.tokens) // tile_rows)
        self.tables.upload(padded(num_tiles), tile_rows)
        return self.forward_rows(rows, keep, tile_rows)

    @torch.inference_mode()
    def forward_rows(
        self, rows: Rows, keep: list[int], tile_rows: int
    ) -> Float[Tensor, "logit_rows vocab"]:
        """One pass under the tables as uploaded. Rows, tiles and logits are padded."""
        num_tiles = padded(rows.places[-1] // tile_rows + 1)
        mask = self.tables.mask(num_tiles, tile_rows)
        places = self._padded(rows.places, 0)
        in_tiles = torch.zeros(num_tiles * tile_rows, dtype=torch.long, device=self.device)
        num_rows = len(rows.places)
        in_tiles[places[:num_rows]] = torch.arange(num_rows, device=self.device)
        in_tiles = in_tiles.view(num_tiles, tile_rows)
        self.cache.slots = self._padded(rows.slots, self.cache.width - self.block_size)

        def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            """(1, heads, rows, head_dim) -> (1, rows, heads * head_dim), by way of tiles."""
            tiles = q[0][:, in_tiles].transpose(0, 1)  # (tiles, heads, tile_rows, head_dim)
            out = self._flex(tiles, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1).flatten(1)[places][None]

        tokens, positions = self._padded(rows.tokens, 0), self._padded(rows.positions, 0)
        hidden = self._hidden(tokens, positions, attention)
        if not keep:
            return torch.zeros(0, self.vocab_size)
        logits: Tensor = self.model.get_output_embeddings()(hidden[self._padded(keep, 0)])
        return logits[: len(keep)].float().cpu()

    def _hidden(
        self,
        tokens: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        attention: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    ) -> Float[Tensor, "rows hidden"]:
        """The decoder of these architectures, layer by layer."""
        decoder = self.model.base_model
        hidden = decoder.embed_tokens(tokens)[None]
        cos, sin = decoder.rotary_emb(hidden, positions[None])
        for index, layer in enumerate(decoder.layers):
            of, x = layer.self_attn, layer.input_layernorm(hidden)
            shape = (1, len(tokens), -1, of.head_dim)
            q, k = of.q_proj(x).view(shape), of.k_proj(x).view(shape)
            v = of.v_proj(x).view(shape).transpose(1, 2)
            if hasattr(of, "q_norm"):  # qwen3
                q, k = of.q_norm(q), of.k_norm(k)
            q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            keys, values = self.cache.update(k, v, index)  # (1, kv_heads, slots, head_dim)
            hidden = hidden + of.o_proj(attention(q, keys, values, of.scaling))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return cast(Tensor, decoder.norm(hidden)[0])

    def copy_out(self, slots: list[int]) -> Any:
        return self.cache.copy_out(torch.tensor(slots, device=self.device))

    def copy_in(self, slots: list[int], kept: Any) -> None:
        self.cache.copy_in(torch.tensor(slots, device=self.device), kept)

    def _stage(self, run: Run, tile_rows: int) -> None:
        """Brings the run's view forward and stages its tiles."""
        memory, n = run.view.memory, len(run.tokens)
        own = memory.slots[run.segment.handle].slots
        self.tables.describe(own, run.start, run.start + n)
        cursor = run.view.cursor
        if cursor is None or cursor.epoch != memory.epoch:
            cursor = run.view.cursor = Cursor(
                cast("NDArray[np.bool_]", BlockList(self.block_size)), memory.epoch
            )
            if memory.epoch:  # its slots have moved
                for each in memory.slots.values():
                    self.tables.describe(each.slots, 0, len(each.slots))
        blocks = cast(BlockList, cursor.bitmap)
        cursor.advance(run.view, run.version, run.segment.handle, run.start)
        is_block = run.segment.kind == "block"
        if is_block:
            cursor.extend(run.slots)
        for at in range(0, n, tile_rows):
            stop = min(at + tile_rows, n)
            if not is_block:
                cursor.extend(run.slots[at:stop])
            lasts = [run.start + (n - 1 if is_block else i) for i in range(at, stop)]
            self.tables.stage(blocks, own[0] // self.block_size, lasts)

    def _make_room(self, num_tiles: int) -> None:
        if padded(num_tiles) > self.tables.num_tiles:
            old = self.tables
            self.tables = Tables(padded(num_tiles), old.num_blocks, self.block_size, self.device)
            self.tables.block_facts.copy_(old.block_facts)

    def _padded(self, values: list[int], filler: int) -> Int[Tensor, "n"]:
        filled = values + [filler] * (padded(len(values)) - len(values))
        return torch.tensor(filled, dtype=torch.long, device=self.device)


def padded(count: int) -> int:
    """The next power of two: few sizes, so that a compiled kernel is not compiled again."""
    return 1 << (count - 1).bit_length()


def _uncompiled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return cast(Tensor, flex_attention(q, k, v, **options))


def check_supported(config: Any) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise Unsupported(
            f"model type {config.model_type!r} is not tested with engine 'flex'; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}; others may run with engine 'hf'"
        )
    if sliding_window(config) is not None:
        raise Unsupported(
            f"engine 'flex' has no sliding windows, and the model's is {sliding_window(config)}; "
            "use engine 'hf'"
        )
    check_rope(config)


def check_sizes(page_size: int, block_size: int, device_type: str) -> None:
    if block_size < 1 or (device_type == "cuda" and block_size % 128):
        raise InvalidInput(
            f"a block of {block_size} slots is not one that FlexAttention's kernels take; "
            "take 128 or a multiple of it"
        )
    if page_size % block_size:
        raise page_size_error(block_size, f"but the page size is {page_size}")


def check_canary(engine: FlexEngine) -> None:
    """Unlists one block of a row: its logits must change, or the kernel does not honour lists.

    Raises `ModelUnavailable` if logits are not finite.
    """
    size = engine.block_size
    first, second = BlockList(size), BlockList(size)
    slots = [0, engine.cache.width - size]  # in two blocks, the second being scratch
    first[slots[:1]], second[slots] = True, True
    logits = []
    for shown in (True, False):
        second[slots[:1]] = shown
        engine.tables.describe(slots[:1], 0, 1)
        engine.tables.stage(first, 0, [0])
        engine.tables.stage(second, engine.tables.scratch, [0])
        engine.tables.upload(2, 1)
        logits.append(engine.forward_rows(Rows([0, 1], [0, 0], slots, [0, 1]), [1], 1))
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor.zero_()
    if not all(each.isfinite().all() for each in logits):
        raise ModelUnavailable(DAMAGED)
    if torch.equal(*logits):
        raise Unsupported(
            "FlexAttention ignores block masks here: hiding a block left the logits unchanged; "
            "use engine 'hf'"
        )
