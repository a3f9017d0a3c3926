"""Models: the embedded default, folders, GGUF files, hub names. Importing this loads no torch."""

from stretto.models.embedded import EMBEDDED_MODEL
from stretto.models.folder import ModelFacts, inspect_folder
from stretto.models.loading import load_hf
from stretto.models.offline import is_offline
from stretto.models.registry import ResolvedModel, pull, resolve
from stretto.models.shipped import DEFAULT_MODEL

__all__ = [
    "DEFAULT_MODEL",
    "EMBEDDED_MODEL",
    "ModelFacts",
    "ResolvedModel",
    "inspect_folder",
    "is_offline",
    "load_hf",
    "pull",
    "resolve",
]
