"""Log-probabilities of a batch's targets under the sampler's masks, in one masked pass.

The log-prob of a token is the float32 log-softmax, at temperature 1, of the raw logits with what
was illegal at -inf: what `runtime.chooser` records of a drawn token.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from stretto.train.batches import Batch, model_masks
from stretto.train.head import Head, masked_logprobs


def hidden_states(model: Any, batch: Batch) -> Float[Tensor, "tokens hidden"]:
    """The last hidden states of one pass over a batch, before the output head."""
    trunk = trunk_of(model)
    out = trunk(
        input_ids=batch.ids[None],
        position_ids=batch.positions[None],
        attention_mask=model_masks(batch, model.config, _dtype(model)),
        use_cache=False,
    )
    states: Tensor = out.last_hidden_state
    return states[0]


def token_logprobs(model: Any, batch: Batch) -> Float[Tensor, "targets"]:
    """The float32 log-prob of each target of a batch, in the order of `batch.rows`.

    `model`: a Hugging Face causal LM of a supported architecture, or a PEFT model of one. Its
    device must be the batch's. Gradients flow to what requires them.
    """
    states = hidden_states(model, batch)[batch.rows]
    return masked_logprobs(states, Head.of(model), batch.targets, batch.legal, batch.table)


def sequence_logprobs(model: Any, batch: Batch) -> Float[Tensor, "examples"]:
    """The log-prob of each example's response: the sum over its targets."""
    tokens = token_logprobs(model, batch)
    return torch.zeros(batch.num_examples, device=tokens.device).index_add(0, batch.owner, tokens)


def trunk_of(model: Any) -> Any:
    """The model without its output head; adapters in it stay in place."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.get_decoder()


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = trunk_of(model).get_input_embeddings().weight.dtype
    return dtype
