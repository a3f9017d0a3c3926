"""Tiny models of Llama's shape, with random weights and a vocabulary of their own.

For experiments that begin at nothing: trained on a CPU in minutes to hours. What is made here is
a model like any other, for `LM`, `train sft` and all engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stretto.errors import UnknownName
from stretto.models.tiny_tokens import END, checked_symbols, make_tokenizer
from stretto.params import check_seed

if TYPE_CHECKING:
    from stretto.train.trainee import Trainee

HEAD_DIM: Final = 32
MAX_POSITIONS: Final = 2048


@dataclass(frozen=True)
class TinyShape:
    """Layers, width, and width within an MLP; heads of `HEAD_DIM`, each with its own keys."""

    num_layers: int
    hidden: int
    inner: int

    @property
    def num_heads(self) -> int:
        return self.hidden // HEAD_DIM

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of all layers, norms included; the vocabulary's rows come on top."""
        matrices = 4 * self.hidden**2 + 3 * self.hidden * self.inner
        return self.num_layers * (matrices + 2 * self.hidden) + self.hidden


SHAPES: Final[Mapping[str, TinyShape]] = {
    "tiny-1m": TinyShape(4, 128, 352),
    "tiny-2m": TinyShape(4, 192, 512),
    "tiny-3m": TinyShape(6, 192, 512),
    "tiny-5m": TinyShape(6, 256, 672),
}
"""By name: about 0.8, 1.8, 2.7 and 4.7 million parameters."""


def shape_of(name: str) -> TinyShape:
    """The shape of a name; raises `UnknownName`."""
    if name not in SHAPES:
        raise UnknownName("tiny model", name, list(SHAPES))
    return SHAPES[name]


def make_tiny(
    shape: str,
    symbols: Sequence[str],
    *,
    dialect: str = "plain",
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Trainee:
    """A float32 model with random weights, a function of the arguments alone; `save` writes it.

    `symbols` are its tokens besides bytes. A `dialect`'s control tokens have rows of their own from
    the beginning; `settings` are other fields of its card. Torch's random state stays as it is.
    Raises `InvalidInput` and its kinds.
    """
    from stretto.dialects import DialectSettings, get_dialect
    from stretto.tokens import ModelCard, add_control_tokens
    from stretto.train.trainee import Trainee

    check_seed(seed)
    chosen = shape_of(shape)
    tokenizer = make_tokenizer(checked_symbols(symbols, "the vocabulary"))
    given = dict(settings or {})
    forms = get_dialect(dialect).forms(DialectSettings.given(given))
    control = add_control_tokens(tokenizer, forms) if forms else {}
    fields = {"notes": f"{shape}, random weights of seed {seed}", **given}
    card = ModelCard.describe(dialect, control, tokenizer.backend_tokenizer, **fields)
    model = _random_model(chosen, len(tokenizer), tokenizer.convert_tokens_to_ids(END), seed)
    return Trainee(model, tokenizer, card)


def new_tiny(folder: Path, shape: str, symbols: Sequence[str], **options: Any) -> Trainee:
    """Makes a model as `make_tiny` does and writes it into a new folder, whole or not at all."""
    made = make_tiny(shape, symbols, **options)
    made.save(folder)
    return made


def _random_model(shape: TinyShape, num_rows: int, end: int, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=num_rows,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=shape.hidden**-0.5,  # 0.02 is for widths of a thousand
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()
