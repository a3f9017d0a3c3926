"""A checked model folder into memory."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import InvalidInput, ModelUnavailable, UnknownName
from stretto.models.folder import inspect_folder
from stretto.models.weights import is_adapter

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "int8")
DEVICES = ("cpu", "cuda")
HARMLESS_LEFTOVER = "rotary_emb.inv_freq"  # computed, but stored by old checkpoints


def load_hf(path: Path, *, dtype: str = "auto", device: str = "cpu") -> tuple[Any, Any]:
    """Return (model, tokenizer) of the folder `path`, in eval mode on `device`.

    An adapter's folder gives its base, which must be on this disk, with the adapter merged into it.

    `dtype` is float32, bfloat16 or auto, the stored one; int8 is of weights that an engine packs,
    in a model of bfloat16. Attention is the one that the architecture needs; code in the folder is
    never run and nothing is fetched. Raises `ModelUnavailable` if files are missing, damaged or do
    not fit the config (a model is never completed with random weights), `Unsupported` for a kind
    of model that is not run, and `InvalidInput` for an unknown dtype or device.
    """
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, list(DTYPES))
    if is_adapter(path):
        return _load_adapter(path, dtype, device)
    facts = inspect_folder(path)
    place = _device(device)
    from stretto.engines.hf import attention_for

    with quiet():
        model = _load_model(path, dtype, place, attention_for(facts.model_type))
        tokenizer = _load_tokenizer(path)
    return model, tokenizer


def _load_adapter(path: Path, dtype: str, device: str) -> tuple[Any, Any]:
    from stretto.models.merging import load_adapter
    from stretto.models.registry import resolve

    return load_adapter(
        path,
        lambda base: load_hf(base, dtype=dtype, device=device),
        lambda name: resolve(name, offline=True),
    )


def _device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.device(name)
        if device.type in DEVICES:
            torch.empty(0, device=device)
            return device
        reason = f"known: {', '.join(DEVICES)}"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
    raise InvalidInput(f"device {name!r} cannot be used ({reason}); try 'cpu'")


def _load_model(path: Path, dtype: str, device: "torch.device", attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype="bfloat16" if dtype == "int8" else dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # a config of wrong types raises almost anything
        raise _unloadable(path, error) from error
    _check_all_used(path, found)
    try:
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise InvalidInput(
            f"{path} does not fit on device {str(device)!r} as {model.dtype}; try 'cpu'"
        ) from error


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # `tokenizers` raises bare Exception for a damaged file
        raise _unloadable(path, error) from error


def _unloadable(path: Path, error: Exception) -> ModelUnavailable:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if "ignore_mismatched_sizes" in reason:  # transformers logs which, and raises a riddle
        reason = "its tensors are of other shapes than its config.json says"
    return ModelUnavailable(f"cannot load {path}: {reason}; copy or download the model again")


def _check_all_used(path: Path, found: dict[str, Any]) -> None:
    """Refuse a folder whose tensors are not exactly those of its config."""
    unexpected = {name for name in found["unexpected_keys"] if HARMLESS_LEFTOVER not in name}
    problems = {
        "lacks": set(found["missing_keys"]),
        "has unknown": unexpected,
        "has misshapen": {str(key) for key in found["mismatched_keys"]},
    }
    for what, names in problems.items():
        if names:
            raise ModelUnavailable(
                f"{path} does not fit its config.json: it {what} tensors, e.g. {min(names)}"
                f" ({len(names)} in all); copy or download the model again"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, transformers' log and its progress bars, and restore them."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
