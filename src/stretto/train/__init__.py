"""Training of self-orchestrating models: examples, log-probs, objectives, one loop.

Names are loaded when they are first used: importing this loads no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.train.batches import Batch
    from stretto.train.config import SftConfig
    from stretto.train.examples import Example, ExampleMaker
    from stretto.train.logprobs import sequence_logprobs, token_logprobs
    from stretto.train.loop import Finished, Loop, LoopSettings
    from stretto.train.lora import Lora
    from stretto.train.objective import Objective, Outcome, Validation
    from stretto.train.packing import BatchSize, PackedSteps
    from stretto.train.schedule import Schedule
    from stretto.train.sft import train_sft
    from stretto.train.supervised import Supervised
    from stretto.train.trainee import Trainee, make_trainee, open_trainee

_HOMES = {
    "Batch": "batches",
    "BatchSize": "packing",
    "Example": "examples",
    "ExampleMaker": "examples",
    "Finished": "loop",
    "Loop": "loop",
    "LoopSettings": "loop",
    "Lora": "lora",
    "Objective": "objective",
    "Outcome": "objective",
    "PackedSteps": "packing",
    "Schedule": "schedule",
    "SftConfig": "config",
    "Supervised": "supervised",
    "Trainee": "trainee",
    "Validation": "objective",
    "make_trainee": "trainee",
    "open_trainee": "trainee",
    "sequence_logprobs": "logprobs",
    "token_logprobs": "logprobs",
    "train_sft": "sft",
}

__all__ = [
    "Batch",
    "BatchSize",
    "Example",
    "ExampleMaker",
    "Finished",
    "Loop",
    "LoopSettings",
    "Lora",
    "Objective",
    "Outcome",
    "PackedSteps",
    "Schedule",
    "SftConfig",
    "Supervised",
    "Trainee",
    "Validation",
    "make_trainee",
    "open_trainee",
    "sequence_logprobs",
    "token_logprobs",
    "train_sft",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.train' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"stretto.train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
