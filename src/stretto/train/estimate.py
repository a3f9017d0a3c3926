"""What a run will take, in memory and time, from a model's shape alone: no weights are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stretto.errors import InvalidInput
from stretto.train.lora import Lora

MASTER_BYTES = 4
MOMENTS_BYTES = 8
SUM_BYTES = 4
"""Of each trained parameter: its float32 master, two moments, and sum of gradients."""

H100_FLOPS = 989e12
"""Dense bfloat16 rate of an H100 SXM, by its data sheet."""

UTILISATION = 0.4
"""The share of a device's matrix rate that training is taken to reach; measured on CPUs here."""


@dataclass(frozen=True)
class Shape:
    """What of a model's shape matters: parameters of the layers, of one embedding table, and of
    the linear layers that a LoRA may adapt, by name: (inputs + outputs) summed over layers."""

    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    body_parameters: int
    table_parameters: int
    is_tied: bool
    adaptable: Mapping[str, int]

    @classmethod
    def of_config(cls, settings: Mapping[str, Any]) -> Shape:
        """The shape of a Hugging Face config, given as what its `config.json` says."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        own = dict(settings)
        kind = own.pop("model_type", None)
        try:
            config = AutoConfig.for_model(kind, **own)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # a config of wrong types raises almost anything
            raise InvalidInput(f"architecture of type {kind!r} cannot be built: {error}") from None
        return cls.of_model(model)

    @classmethod
    def of_model(cls, model: Any) -> Shape:
        """The shape of a model, on whatever device, as it is before any LoRA."""
        import torch

        table = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        total = sum(p.numel() for p in model.parameters())
        tied = head is table or bool(model.config.tie_word_embeddings)
        adaptable: dict[str, int] = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                last = name.rsplit(".", 1)[-1]
                size = module.in_features + module.out_features
                adaptable[last] = adaptable.get(last, 0) + size
        counted = table.numel() if head is table else 2 * table.numel()
        config = model.config
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            vocab=table.shape[0],
            body_parameters=total - counted,
            table_parameters=table.numel(),
            is_tied=tied,
            adaptable=adaptable,
        )

    @property
    def num_parameters(self) -> int:
        return self.body_parameters + self.table_parameters * (1 if self.is_tied else 2)


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device and floating-point operations of a whole run. Estimates, not promises."""

    num_parameters: int
    trained_parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    adapter_bytes: int | None
    num_tokens: int
    total_flops: float
    h100_hours: float
    this_machine_hours: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate(
    shape: Shape,
    *,
    lora: Lora | None,
    new_rows: int,
    num_tokens: int,
    target_share: float,
    pack_tokens: int,
    weight_bytes: int = 2,
    flops_per_s: float | None = None,
) -> Estimate:
    """What training on `num_tokens` (all epochs together) takes; `lora` None is full training.

    A pass costs 2 operations a parameter and token, its way back 2 for the inputs and, where
    weights are trained, 2 for them; the head only on the `target_share` of tokens that predict
    something (Kaplan et al. 2020, section 2.1). Attention's own products are added.
    """
    tables = 1 if shape.is_tied else 2
    if lora is None:
        trained = shape.num_parameters
        per_token, per_target = 6.0 * shape.body_parameters, 6.0 * shape.table_parameters
        adapter_bytes = None
    else:
        missing = [name for name in lora.layers if name not in shape.adaptable]
        if missing:
            raise InvalidInput(f"the model has no layer {missing[0]!r} to adapt")
        trained = lora.rank * sum(shape.adaptable[name] for name in lora.layers)
        trained += new_rows * shape.hidden * tables
        per_token = 4.0 * shape.body_parameters + 6.0 * trained
        per_target = 4.0 * shape.table_parameters
        adapter_bytes = trained * weight_bytes
    per_token += 12.0 * shape.num_layers * shape.hidden * pack_tokens / 2
    total = num_tokens * (per_token + target_share * per_target)
    weights = shape.num_parameters * weight_bytes
    gradients = trained * (weight_bytes + SUM_BYTES)
    optimizer = trained * (MOMENTS_BYTES + (MASTER_BYTES if weight_bytes < 4 else 0))
    activations = _activation_bytes(shape, pack_tokens, target_share, weight_bytes)
    return Estimate(
        num_parameters=shape.num_parameters,
        trained_parameters=trained,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        peak_bytes=weights + gradients + optimizer + activations,
        adapter_bytes=adapter_bytes,
        num_tokens=num_tokens,
        total_flops=total,
        h100_hours=total / (H100_FLOPS * UTILISATION) / 3600,
        this_machine_hours=None if flops_per_s is None else total / flops_per_s / 3600,
    )


def _activation_bytes(shape: Shape, tokens: int, target_share: float, width: int) -> int:
    """What a pass keeps for its way back: per layer and token some ten hidden vectors and five of
    the MLP's, half of all attention weights, and the probabilities of the targets."""
    layer = tokens * (10 * shape.hidden + 5 * shape.intermediate)
    attention = shape.heads * min(tokens, 1024) * tokens // 2
    head = int(target_share * tokens) * shape.vocab
    return width * (shape.num_layers * (layer + attention) + head)


def measure_flops(dtype: str) -> float:
    """What training on this machine is taken to reach, in operations a second: `UTILISATION` of
    its matrix products' rate."""
    from stretto.bench.machine import matmul_peak

    return matmul_peak(dtype) * UTILISATION
