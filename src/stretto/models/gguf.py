"""GGUF to a Hugging Face folder: config, bfloat16 safetensors and tokenizer.

transformers reads the config and the vocabulary. The weights are dequantised here, one tensor at a
time, because its loader needs accelerate and yields models that it refuses to save.
"""

import re
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import ModelUnavailable, Unsupported
from stretto.models.folder import SUPPORTED_MODEL_TYPES
from stretto.models.progress import Report

if TYPE_CHECKING:
    import numpy as np
    import torch

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# How `tokenizer.ggml.pre` values split text: only those whose splitting is known to be reproduced.
SPLIT_BY_TRANSFORMERS = frozenset({"llama3", "llama-v3", "llama-bpe", "qwen2", "gpt-2"})
SPLIT_BY_DIGIT = frozenset({"smollm"})

READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error)


def convert(source: Path, folder: Path, *, report: Report) -> None:
    """Fill the empty `folder` with the model in `source`, weights in bfloat16.

    Raises `ModelUnavailable` if the file is damaged and `Unsupported` for an architecture, a
    tokenizer or a tensor that would be converted into something else than the file means.
    """
    fields, tensors = _read(source)
    _check_supported(source, fields, [tensor.name for tensor in tensors])
    report(f"converting {source.name}: tokenizer", 0, 1)
    config = _save_config(source, folder)
    _read_tokenizer(source, fields, config).save_pretrained(folder)
    report(f"converting {source.name}: tokenizer", 1, 1)
    weights = _dequantise(source, tensors, config, report)
    _check_complete(source, weights, config)

    from safetensors.torch import save_file

    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", target)  # safetensors makes it the owner's alone


def _read(source: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the scalar metadata fields and the tensors (memory-mapped) of a GGUF file."""
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if field.types and field.types[0] != gguf.GGUFValueType.ARRAY
        }
    except READ_ERRORS as error:
        raise _damaged(source, error) from error
    return fields, list(reader.tensors)


def _damaged(source: Path, error: Exception) -> ModelUnavailable:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelUnavailable(f"{source} is not a complete GGUF file ({reason}); download it again")


def _check_supported(source: Path, fields: dict[str, Any], names: list[str]) -> None:
    architecture = fields.get("general.architecture")
    if architecture not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(SUPPORTED_MODEL_TYPES)
        raise Unsupported(f"{source} has architecture {architecture!r}; supported: {known}")
    refused = [
        (fields.get(f"{architecture}.expert_count", 0) > 0, "experts"),
        (fields.get("split.count", 1) > 1, "several shards"),
        ("rope_freqs.weight" in names, "scaled RoPE frequencies"),
        (fields.get(f"{architecture}.rope.scaling.type", "none") != "none", "RoPE scaling"),
    ]
    for found, what in refused:
        if found:
            raise Unsupported(
                f"{source} has {what}, which is not converted; use the model's safetensors folder"
            )
    splitting = fields.get("tokenizer.ggml.pre", "default")
    known_splits = SPLIT_BY_TRANSFORMERS | SPLIT_BY_DIGIT
    if fields.get("tokenizer.ggml.model") == "gpt2" and splitting not in known_splits:
        raise Unsupported(
            f"{source} splits text by rule {splitting!r}; known: {', '.join(sorted(known_splits))}"
        )


def _save_config(source: Path, folder: Path) -> Any:
    """Write config.json and generation_config.json; return the config."""
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(
            str(source.parent), gguf_file=source.name, local_files_only=True
        )
    except READ_ERRORS as error:
        raise _damaged(source, error) from error
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    return config


def _read_tokenizer(source: Path, fields: dict[str, Any], config: Any) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            local_files_only=True,
            model_max_length=config.max_position_embeddings,
            clean_up_tokenization_spaces=False,
        )
    except Exception as error:  # `tokenizers` raises bare Exception for a damaged vocabulary
        raise _damaged(source, error) from error
    if fields.get("tokenizer.ggml.pre") in SPLIT_BY_DIGIT:  # transformers drops this rule
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.init_kwargs.pop("local_files_only", None)  # of this call, not of the model
    return tokenizer


def _dequantise(
    source: Path, tensors: list[Any], config: Any, report: Report
) -> dict[str, "torch.Tensor"]:
    import gguf
    import torch

    weights: dict[str, torch.Tensor] = {}
    for index, tensor in enumerate(tensors):
        report(f"converting {source.name}: weights", index, len(tensors))
        name = _hf_name(source, tensor.name)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            values = _undo_interleaving(values, name, config)
        except (*READ_ERRORS, NotImplementedError) as error:
            raise _damaged(source, error) from error
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    report(f"converting {source.name}: weights", len(tensors), len(tensors))
    return weights


def _hf_name(source: Path, name: str) -> str:
    """Map `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is not None:
        layer, part, kind = match.groups()
        if layer is None and part in WHOLE:
            return f"{WHOLE[part]}.{kind}"
        if layer is not None and part in PARTS:
            return f"model.layers.{layer}.{PARTS[part]}.{kind}"
    raise Unsupported(f"{source} has a tensor {name!r} that no supported architecture has")


def _undo_interleaving(values: "np.ndarray", name: str, config: Any) -> "np.ndarray":
    """Put the rows of llama's q and k back in Hugging Face's order.

    GGUF interleaves the two halves of each rotary pair: [heads, dim/2, 2] instead of
    [heads, 2, dim/2]. Only architecture llama is stored so.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in heads:
        return values
    pairs = values.reshape(heads[part], -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _check_complete(source: Path, weights: dict[str, "torch.Tensor"], config: Any) -> None:
    """Compare names and shapes with a model of this config that has no storage."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for name in sorted(expected.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else None
        wanted = tuple(expected[name].shape) if name in expected else None
        if found != wanted:
            raise ModelUnavailable(
                f"{source} does not fit its own metadata: {name} has shape {found}, expected"
                f" {wanted}; use another file of this model"
            )
