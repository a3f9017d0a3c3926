"""Engine `packed`: the reference engine over a model whose linear layers run on the CPU kernels.

For any architecture that `hf` runs, on a CPU that the kernels run on. Its specification is `hf`;
its tolerance is that of its weights.
"""

from __future__ import annotations

from typing import Any

from stretto.engines.hf import HFEngine
from stretto.kernels.linear import PackedLinear, pack_model


class PackedEngine(HFEngine):
    """`model`: a Hugging Face causal LM on the CPU. Its linear layers are replaced in place by
    packed ones, `weights` being float32, bfloat16 or int8: it can no longer be trained or saved.

    Raises what `HFEngine` and `pack_model` raise.
    """

    name = "packed"

    def __init__(self, model: Any, num_slots: int, *, weights: str | None = None) -> None:
        own = str(model.dtype).removeprefix("torch.")
        self.weights = own if weights is None else weights
        super().__init__(pack_model(model, self.weights), num_slots)
        layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
        self.weight_bytes = sum(layer.packed.num_bytes for layer in layers)
