"""Stretto: train and run self-orchestrating language models.

Names are loaded when they are first used, so importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.comparison import compare
    from stretto.completion import Completion
    from stretto.lm import LM
    from stretto.params import SamplingParams
    from stretto.stream import Stream
    from stretto.trace import Segment, Trace, visible

__version__ = "0.1.0"

_HOMES = {
    "LM": "stretto.lm",
    "Stream": "stretto.stream",
    "compare": "stretto.comparison",
    "Completion": "stretto.completion",
    "SamplingParams": "stretto.params",
    "Segment": "stretto.trace",
    "Trace": "stretto.trace",
    "visible": "stretto.trace",
}

__all__ = [
    "LM",
    "Completion",
    "SamplingParams",
    "Segment",
    "Stream",
    "Trace",
    "__version__",
    "compare",
    "visible",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
