"""Text to ids and back, control tokens, and the model card that says which ids they are."""

from stretto.tokens.control import add_control_tokens, control_content, fit_model
from stretto.tokens.vocabulary import HFVocabulary

__all__ = ["HFVocabulary", "add_control_tokens", "control_content", "fit_model"]
