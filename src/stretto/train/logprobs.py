"""Log-probabilities of a batch's targets under the sampler's masks, in one masked pass.

The log-prob of a token is the float32 log-softmax, at temperature 1, of the raw logits with what
was illegal at -inf: what `runtime.chooser` records of a drawn token.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stretto.train.attention import ExampleMasks, by_example, suits
from stretto.train.batches import Batch, model_masks
from stretto.train.head import Head, masked_logprobs, rows_of


def hidden_states(
    model: Any, batch: Batch, *, plain: bool = False
) -> Float[Tensor, "tokens hidden"]:
    """The last hidden states of one pass over a batch, before the output head.

    `plain` computes them under the dense mask, which is the reference, where `train.attention`
    would be used.
    """
    trunk = trunk_of(model)
    dtype = trunk.get_input_embeddings().weight.dtype
    inputs = {
        "inputs_embeds": _embedded(trunk.get_input_embeddings(), batch.ids)[None],
        "position_ids": batch.positions[None],
        "use_cache": False,
    }
    if plain or not suits(model, batch):
        mask = model_masks(batch, model.config, dtype)
        states: Tensor = trunk(attention_mask=mask, **inputs).last_hidden_state
        return states[0]
    with by_example(trunk.config, ExampleMasks.of(batch, model.config, dtype)) as attention:
        states = trunk(**attention, **inputs).last_hidden_state
    return states[0]


def _embedded(layer: Any, ids: Int[Tensor, "tokens"]) -> Float[Tensor, "tokens hidden"]:
    """The embeddings of ids. Of PEFT's trainable tokens only their own rows are looked up anew;
    its own way copies the whole table in each pass."""
    weight, new_ids, new_rows = rows_of(layer)
    if new_ids is None or new_rows is None:
        embedded: Tensor = layer(ids)
        return embedded
    base = layer.token_adapter.get_base_layer()
    scale = getattr(base, "embed_scale", None)
    with torch.no_grad():
        known: Tensor = base(ids)
    if scale is not None:
        new_rows = new_rows * scale.to(weight.dtype)
    is_new = ids[:, None] == new_ids[None, :]
    return torch.where(is_new.any(1)[:, None], new_rows[is_new.int().argmax(1)], known)


def token_logprobs(model: Any, batch: Batch, *, plain: bool = False) -> Float[Tensor, "targets"]:
    """The float32 log-prob of each target of a batch, in the order of `batch.rows`.

    `model`: a Hugging Face causal LM of a supported architecture, or a PEFT model of one. Its
    device must be the batch's. Gradients flow to what requires them.
    """
    states = hidden_states(model, batch, plain=plain)[batch.rows]
    return masked_logprobs(states, Head.of(model), batch.targets, batch.legal, batch.table)


def sequence_logprobs(model: Any, batch: Batch) -> Float[Tensor, "examples"]:
    """The log-prob of each example's response: the sum over its targets."""
    tokens = token_logprobs(model, batch)
    return torch.zeros(batch.num_examples, device=tokens.device).index_add(0, batch.owner, tokens)


def trunk_of(model: Any) -> Any:
    """The model without its output head; adapters in it stay in place."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.get_decoder()
