"""Text to ids and back, control tokens, and the model card that says which ids they are."""

from stretto.tokens.card import CARD, ModelCard
from stretto.tokens.control import (
    add_control_tokens,
    control_content,
    find_control_tokens,
    fit_model,
)
from stretto.tokens.load import load_vocabulary, read_end_ids, read_tokenizer
from stretto.tokens.vocabulary import HFVocabulary

__all__ = [
    "CARD",
    "HFVocabulary",
    "ModelCard",
    "add_control_tokens",
    "control_content",
    "find_control_tokens",
    "fit_model",
    "load_vocabulary",
    "read_end_ids",
    "read_tokenizer",
]
