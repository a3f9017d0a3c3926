"""Tiny random models with a real byte-level tokenizer, wrapped as `LM`s."""

from __future__ import annotations

from typing import Any

from conftest import tiny_model
from test_tokens import CHATML, byte_level

from stretto import LM


def tiny_tokenizer(chat: bool = True) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML if chat else None
    return tokenizer


def tiny_lm(
    dialect: str = "plain", kind: str = "llama", *, chat: bool = True, seed: int = 0,
    head_dim: int = 8, **options: Any,
) -> LM:  # fmt: skip
    """A fresh `LM`; its model is not shared, since wrapping may grow the embeddings."""
    import copy

    tokenizer = tiny_tokenizer(chat)
    model = copy.deepcopy(
        tiny_model(kind, vocab_size=len(tokenizer), eos_token_id=None, head_dim=head_dim)
    )
    options = {"pool_slots": 1024, **options}
    return LM.wrap(model, tokenizer, dialect=dialect, name=f"tiny-{kind}", **options)
