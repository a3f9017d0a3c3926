"""A Hugging Face model as a GGUF file that llama.cpp runs: the same weights, tokens in and out.

The inverse of `stretto.models.gguf`. No tokenizer is written, so such a file takes token ids only.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.engines.pool_cache import head_dim
from stretto.errors import Unsupported
from stretto.models import cache
from stretto.models.gguf import PARTS, WHOLE
from stretto.models.manifest import is_intact, write_manifest

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from stretto.models.progress import Report

PRECISIONS = ("BF16", "Q8_0", "Q4_0")
"""Of all matrices, embeddings and output head included; vectors are float32."""

ARCHITECTURES = ("llama", "qwen2", "qwen3")
WRITING = 1  # raise it when the files change, so that older ones are left alone
FILE = "model.gguf"


def cached_gguf(model: Any, precision: str, digest: str, report: Report) -> Path:
    """The path of the model's file in the cache, written now unless it is there and intact.

    `digest`: `weights_digest(model)`. Raises `Unsupported` for what would be written wrongly, and
    `ModelUnavailable` if the disk is full.
    """
    name = f"{digest[:16]}-{precision.lower()}-v{WRITING}"
    folder = cache.cache_root() / "peers" / name

    def build(scratch: Path) -> None:
        report(f"writing {precision} weights for llama.cpp", 0, 1)
        write_gguf(model, scratch / FILE, precision)
        write_manifest(scratch, name=name, source={"weights_sha256": digest})
        report(f"writing {precision} weights for llama.cpp", 1, 1)

    cache.build_once(
        folder,
        build,
        is_good=lambda: is_intact(folder),
        needed_bytes=sum(p.numel() * 2 for p in model.parameters()),
        report=report,
    )
    return folder / FILE


def weights_digest(model: Any) -> str:
    """SHA-256 of the config and of all weights with their names."""
    import torch

    seen = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in sorted(_weights(model).items()):
        seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        seen.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return seen.hexdigest()


def write_gguf(model: Any, path: Path, precision: str) -> None:
    """Writes a model of a supported architecture, its matrices in `precision`."""
    import gguf

    config = model.config
    check_writable(config)
    writer = gguf.GGUFWriter(path, config.model_type)
    _add_metadata(writer, config, precision)
    for name, tensor in _weights(model).items():
        values = tensor.detach().float().cpu().numpy()
        values = _interleaved(values, name, config)
        kind = gguf.GGMLQuantizationType[precision if values.ndim > 1 else "F32"]
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_writable(config: Any) -> None:
    """Raises `Unsupported` unless a file would mean what the config means."""
    rope = getattr(config, "rope_parameters", None) or {}
    layers = getattr(config, "layer_types", None) or []
    refused = [
        (config.model_type not in ARCHITECTURES, f"model type {config.model_type!r}"),
        (rope.get("rope_type", "default") != "default", f"RoPE {rope.get('rope_type')!r}"),
        ("sliding_attention" in layers, "sliding windows"),
        (config.hidden_act not in ("silu", "swish"), f"activation {config.hidden_act!r}"),
    ]
    for found, what in refused:
        if found:
            raise Unsupported(
                f"the model has {what}, which is not written to GGUF; "
                "leave llama.cpp out of --peers"
            )


def _add_metadata(writer: Any, config: Any, precision: str) -> None:
    import gguf

    writer.add_name("weights for a comparison")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{precision}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _weights(model: Any) -> dict[str, Tensor]:
    """All weights by name, a tied output head left out."""
    weights: dict[str, Tensor] = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def _gguf_name(name: str) -> str:
    """Maps `model.layers.3.self_attn.q_proj.weight` to `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    for theirs, ours in WHOLE.items():
        if stem == ours:
            return f"{theirs}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    for theirs, ours in PARTS.items():
        if match is not None and match[2] == ours:
            return f"blk.{match[1]}.{theirs}.{kind}"
    raise Unsupported(f"the model has a tensor {name!r}, which is not written to GGUF")


def _interleaved(values: np.ndarray, name: str, config: Any) -> np.ndarray:
    """The rows of llama's q and k in GGUF's order: [heads, dim/2, 2] for [heads, 2, dim/2]."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in heads:
        return values
    pairs = values.reshape(heads[part], 2, -1, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
