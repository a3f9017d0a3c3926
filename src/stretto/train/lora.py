"""LoRA by PEFT: put on a model, written as a folder, taken up again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import InvalidInput, Unsupported
from stretto.models.adapters import Base
from stretto.models.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json_object

TARGETS: Mapping[str, tuple[str, ...]] = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Sets of linear layers by name; layers may also be listed one by one."""

_SETS = ", ".join(TARGETS)


@dataclass(frozen=True)
class Lora:
    """LoRA (Hu et al. 2021): each target layer W becomes W + (alpha / rank) B A.

    `alpha` None is twice the rank. `targets`: a name of `TARGETS`, or layer names with commas.
    """

    rank: int = 4
    alpha: float | None = None
    targets: str = "all"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidInput(f"rank is {self.rank}; it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise InvalidInput(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def layers(self) -> list[str]:
        """Names of the target layers."""
        own = [name.strip() for name in self.targets.split(",") if name.strip()]
        return list(TARGETS.get(self.targets, own))

    def check_layers(self, known: Collection[str]) -> None:
        """Raises `InvalidInput` if a target is none of a model's layers."""
        if not self.layers:
            raise InvalidInput(f"targets {self.targets!r} name no layer; take one of {_SETS}")
        if odd := [name for name in self.layers if name not in known]:
            raise InvalidInput(f"the model has no layer {odd[0]!r} to adapt; take one of {_SETS}")

    def check_adapter(self, folder: Path, names: Collection[str]) -> None:
        """Raises `Unsupported` if an adapter was made with other settings than these, of those
        that are named: it keeps its own."""
        config = read_json_object(folder / ADAPTER_CONFIG)
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        layers = sorted(map(str, config.get("target_modules") or ()))
        own = {
            "rank": (config.get("r"), self.rank),
            "alpha": (config.get("lora_alpha"), alpha),
            "targets": (layers, sorted(self.layers)),
            "dropout": (config.get("lora_dropout"), self.dropout),
        }
        for name in names:
            there, wanted = own[name]
            if there != wanted:
                raise Unsupported(
                    f"{folder} was made with {name} {there!r}, not {wanted!r}, and an adapter "
                    f"keeps its settings; leave {name} out, or begin with its base"
                )


def with_lora(model: Any, lora: Lora, rows: Iterable[int], seed: int) -> Any:
    """A PEFT model: the layers of `lora` are adapted, and the rows of new tokens trained."""
    import torch
    from peft import LoraConfig, get_peft_model

    from stretto.train.randomness import random_state_kept

    lora.check_layers({name.rsplit(".", 1)[-1] for name, _ in model.named_modules()})
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        target_modules=lora.layers,
        lora_dropout=lora.dropout,
        bias="none",
        trainable_token_indices=_tables(model, list(rows)),
    )
    with random_state_kept(model.device), _quietly():
        torch.manual_seed(seed)
        return get_peft_model(model, config, autocast_adapter_dtype=False)


def _tables(model: Any, rows: list[int]) -> dict[str, list[int]] | list[int] | None:
    """The rows to train: of the embedding, and of the head where that is another table."""
    if not rows:
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight:
        return rows
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(module)].rsplit(".", 1)[-1]: rows for module in (embedding, head)}


@contextmanager
def _quietly() -> Iterator[None]:
    """PEFT warns of what is meant, such as tied tables that stay tied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_adapter(model: Any, base: Base, folder: Path) -> None:
    """Writes a PEFT model's adapter, in the dtype it has, and what its base is."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()},
              folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})  # fmt: skip
    config = model.peft_config["default"]
    config.base_model_name_or_path = base.name
    config.inference_mode = True
    config.save_pretrained(str(folder))
    config.inference_mode = False
    written = read_json_object(folder / ADAPTER_CONFIG)
    written["target_modules"] = sorted(written["target_modules"])  # PEFT keeps a set of them
    data = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (folder / ADAPTER_CONFIG).write_text(data, encoding="utf-8")
    base.save(folder)


def reopened(model: Any, folder: Path) -> Any:
    """A base, with rows for the control tokens, as a PEFT model that goes on with an adapter."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    config = LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    with _quietly():
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
        found: Any = set_peft_model_state_dict(peft_model, load_file(folder / ADAPTER_WEIGHTS))
    if found.unexpected_keys:
        raise Unsupported(f"{folder} has tensor {found.unexpected_keys[0]!r}, which is not trained")
    return peft_model
