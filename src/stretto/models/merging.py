"""An adapter's folder into memory: its base with the adapter merged into it, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import ModelUnavailable, Unsupported
from stretto.models.adapters import base_of, scaling_of
from stretto.models.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json_object
from stretto.tokens.card import ModelCard

if TYPE_CHECKING:
    from stretto.models.registry import ResolvedModel

PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
ROWS = ".token_adapter.trainable_tokens_delta"


def load_adapter(
    folder: Path,
    load_base: Callable[[Path], tuple[Any, Any]],
    resolve_base: Callable[[str], ResolvedModel],
) -> tuple[Any, Any]:
    """(model, tokenizer) of an adapter's folder: its base with the adapter merged into it.

    The base's tokenizer gets the control tokens of the card, its model their rows. Products are
    added in float32 and then cast to the model's dtype.
    """
    model, tokenizer = load_base(base_of(folder, resolve_base).path)
    prepare_tokens(model, tokenizer, ModelCard.load(folder), folder)
    merge(model, folder)
    return model, tokenizer


def prepare_tokens(model: Any, tokenizer: Any, card: ModelCard, folder: Path) -> None:
    """Gives a base's tokenizer the control tokens that a card names, and its model rows for them.

    Both are changed in place. Raises `InvalidInput` if the tokens do not get the card's ids.
    """
    from stretto.tokens.control import add_control_tokens, control_content, fit_model

    own = [n for n, text in card.tokens.items() if text == control_content(n)]
    add_control_tokens(tokenizer, sorted(own, key=lambda name: card.control[name]))
    card.check_tokenizer(tokenizer.backend_tokenizer, folder)
    fit_model(model, max(card.control.values(), default=-1) + 1)


def merge(model: Any, folder: Path) -> None:
    """Adds an adapter to a model's weights, in place.

    Raises `ModelUnavailable`, naming the tensor, if it does not fit the model.
    """
    import torch

    tensors, scaling = _read_weights(folder), scaling_of(folder)
    rank = read_json_object(folder / ADAPTER_CONFIG)["r"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name in sorted(tensors):
            if name.endswith(LORA_A):
                module = name.removeprefix(PREFIX).removesuffix(LORA_A)
                weight = _target(folder, parameters, f"{module}.weight")
                up, down = _pair(folder, tensors, name)
                if down.shape[0] != rank:
                    raise _misfit(folder, name, down.shape, (rank, down.shape[1]))
                if weight.shape != (up.shape[0], down.shape[1]):
                    raise _misfit(folder, name, (up.shape[0], down.shape[1]), weight.shape)
                product = (up.float() @ down.float()).to(weight.device)
                weight.copy_(weight.float() + scaling * product)
            elif name.endswith(ROWS):
                module = name.removeprefix(PREFIX).removesuffix(ROWS)
                weight = _target(folder, parameters, f"{module}.weight")
                _set_rows(folder, name, weight, tensors[name])
            elif name.endswith(LORA_B):
                _pair(folder, tensors, name.removesuffix(LORA_B) + LORA_A)
            else:
                raise Unsupported(f"{folder} has tensor {name!r}, which no LoRA of ours has")


def _read_weights(folder: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_WEIGHTS
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(f"{path} cannot be read ({error}); copy it again") from None


def _pair(folder: Path, tensors: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    other = name.removesuffix(LORA_A) + LORA_B
    if missing := [each for each in (name, other) if each not in tensors]:
        raise ModelUnavailable(f"{folder} lacks {missing[0]!r}; copy the adapter again")
    down, up = tensors[name], tensors[other]
    if down.shape[0] != up.shape[1]:
        raise _misfit(folder, other, up.shape, down.shape)
    return up, down


def _target(folder: Path, parameters: Mapping[str, Any], name: str) -> Any:
    if name not in parameters:
        raise ModelUnavailable(
            f"{folder} has weights for {name!r}, which its base has not; it is of another model"
        )
    return parameters[name]


def _set_rows(folder: Path, name: str, weight: Any, rows: Any) -> None:
    import torch

    listed = read_json_object(folder / ADAPTER_CONFIG).get("trainable_token_indices")
    layer = name.removesuffix(ROWS).rsplit(".", 1)[-1]
    ids = listed.get(layer, []) if isinstance(listed, dict) else listed or []
    if not all(isinstance(i, int) and 0 <= i < weight.shape[0] for i in ids):
        raise ModelUnavailable(
            f"{folder / ADAPTER_CONFIG} lists rows of {layer} that the base has not; copy it again"
        )
    if rows.shape != (len(ids), weight.shape[1]):
        raise _misfit(folder, name, rows.shape, (len(ids), weight.shape[1]))
    weight[torch.tensor(ids, device=weight.device)] = rows.to(weight)


def _misfit(folder: Path, name: str, found: Any, expected: Any) -> ModelUnavailable:
    return ModelUnavailable(
        f"{folder} does not fit its base: {name!r} is of shape {tuple(found)}, the base needs "
        f"{tuple(expected)}; it is of another model"
    )
