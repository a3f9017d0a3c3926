"""A model made ready to be trained, whole or by a LoRA, and saved as what `LM.load` takes."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from stretto.dialects import DialectSettings, get_dialect
from stretto.errors import InvalidInput, StrettoError, Unsupported
from stretto.eval.judges.base import keep_judges
from stretto.models.adapters import Base
from stretto.models.loading import quiet
from stretto.models.merging import prepare_tokens
from stretto.models.weights import is_adapter
from stretto.tokens import HFVocabulary, ModelCard, add_control_tokens, fit_model
from stretto.tokens.control import NOISE
from stretto.train.config import Init
from stretto.train.examples import ExampleMaker
from stretto.train.lora import Lora, reopened, save_adapter, with_lora

if TYPE_CHECKING:
    from stretto.models.registry import ResolvedModel

How = Literal["lora", "full"]


@dataclass(eq=False)
class Trainee:
    """A model in training, its tokenizer and card; `base` says what an adapter is of, `source` is
    the folder that training starts from: who scored what that model learnt from goes on with it.

    `model` is a Hugging Face causal LM, or a PEFT model of one. What requires gradients is what is
    trained.
    """

    model: Any
    tokenizer: Any
    card: ModelCard
    base: Base | None = None
    how: How = "full"
    source: Path | None = None
    vocabulary: HFVocabulary = field(init=False)

    def __post_init__(self) -> None:
        self.vocabulary = HFVocabulary.from_tokenizer(
            self.tokenizer,
            control=self.card.control,
            forms=get_dialect(self.card.dialect).forms(self.card),
            size=self.plain_model.get_output_embeddings().weight.shape[0],
            end_ids=end_ids_of(self.plain_model, self.tokenizer),
        )

    @property
    def plain_model(self) -> Any:
        """The model without PEFT around it; adapters stay in its layers."""
        return self.model.get_base_model() if self.how == "lora" else self.model

    @property
    def num_trained(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def maker(self) -> ExampleMaker:
        """A maker of examples for this model."""
        limit = self.plain_model.config.max_position_embeddings
        own = self.tokenizer.eos_token_id
        end = own if own in self.vocabulary.end_ids else None
        return ExampleMaker(self.vocabulary, self.card, limit, end_id=end)

    def encode_prompt(self, prompt: str) -> list[int]:
        """A prompt's ids by the model's chat template, exactly as `LM.submit` encodes it."""
        return self.vocabulary.encode_chat([{"role": "user", "content": prompt}])

    def _named_base(self) -> Base:
        if self.base is None:
            raise InvalidInput("the adapter's base has no name; give `make_trainee` its `base`")
        return self.base

    def save(self, folder: Path, add: Callable[[Path], None] | None = None) -> Path:
        """Writes an adapter's folder, or for full training a model's, whole or not at all; `add`
        puts more into it before. What an earlier call that was killed has left is removed.

        Raises `InvalidInput` if the folder exists and is not empty, `StrettoError` where the disk
        takes no more.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInput(f"{folder} exists and is not an empty folder; name a new one")
        from safetensors import SafetensorError

        scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        try:
            for left in folder.parent.glob(f".{folder.name}.????????.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            scratch.mkdir(parents=True)
            self._write(scratch)
            if add is not None:
                add(scratch)
            scratch.replace(folder)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StrettoError(
                f"cannot write {folder}: {reason}; make room there and run the same command again"
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return folder

    def _write(self, folder: Path) -> None:
        if self.how == "lora":
            save_adapter(self.model, self._named_base(), folder)
        else:
            with quiet():
                self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        self.card.save(folder)
        if self.source is not None:
            keep_judges(self.source, folder)


def end_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    from stretto.lm import _end_ids

    return _end_ids(model, tokenizer)


# -- making one ------------------------------------------------------------------------------------


def open_trainee(
    name: str | Path,
    *,
    dialect: str = "pasta",
    settings: Mapping[str, Any] | None = None,
    how: How = "lora",
    lora: Lora | None = None,
    asked: Collection[str] = (),
    init: str = "forms",
    dtype: str = "bfloat16",
    device: str = "cpu",
    offline: bool | None = None,
    seed: int = 0,
) -> Trainee:
    """Loads a model and makes it ready to be trained; see `make_trainee` for the settings.

    An adapter's folder is trained further as the adapter it is, if `how` is lora; `lora` is then
    of no use, but for the settings in it that were `asked` for: `Unsupported` if the adapter has
    others. With full training it is merged first.
    """
    from stretto.models import load_hf, resolve

    if dtype == "int8":
        raise Unsupported("weights of int8 cannot be trained; take bfloat16")
    resolved = resolve(name, offline=offline)
    if is_adapter(resolved.path) and how == "lora":
        if lora is not None:
            lora.check_adapter(resolved.path, asked)
        return _open_adapter(resolved, dialect, settings, dtype=dtype, device=device)
    model, tokenizer = load_hf(resolved.path, dtype=dtype, device=device)
    made = make_trainee(
        model, tokenizer, dialect=dialect, settings=settings, how=how, lora=lora, init=init,
        card=ModelCard.load(resolved.path), base=_base_of(resolved), seed=seed,
    )  # fmt: skip
    made.source = resolved.path
    return made


def make_trainee(
    model: Any,
    tokenizer: Any,
    *,
    dialect: str = "pasta",
    settings: Mapping[str, Any] | None = None,
    how: How = "lora",
    lora: Lora | None = None,
    init: str = "forms",
    card: ModelCard | None = None,
    base: Base | None = None,
    seed: int = 0,
) -> Trainee:
    """Makes a Hugging Face model ready to be trained; it and its tokenizer are changed in place.

    A `card` of the same dialect is kept but for `settings` (policy, unit, fixed_length, grace).
    Otherwise the dialect's control tokens are added, with rows that the model has to spare or new
    ones: `init` forms gives each the mean of the tokens of its text form, mean that of all rows,
    random a row of its own, spread as the others are. Tied embeddings stay tied.
    """
    if init not in get_args(Init):
        raise InvalidInput(f"init is {init!r}; known: {', '.join(get_args(Init))}")
    if get_dialect(dialect).is_foreign:
        raise Unsupported(
            f"dialect {dialect} is of models that others have trained, and is not trained here; "
            "begin with a plain model and another dialect"
        )
    own = dict(settings or {})
    if card is None or card.dialect != dialect:
        if card is not None and card.dialect != "plain":
            raise InvalidInput(
                f"the model writes dialect {card.dialect}, and is to learn {dialect}; begin with "
                "a plain model"
            )
        card = _add_tokens(model, tokenizer, dialect, own, init=init, seed=seed)
    else:
        if own.get("num_registers", card.num_registers) != card.num_registers:
            raise InvalidInput(
                f"the model has {card.num_registers} registers, not {own['num_registers']}; begin "
                "with a plain model, or keep its number"
            )
        card = ModelCard.model_validate({**card.model_dump(), **own})
        fit_model(model, max(card.control.values(), default=-1) + 1, seed=seed)
    trained = list(card.control.values())
    if how == "lora":
        model = with_lora(model, Lora() if lora is None else lora, trained, seed)
    else:
        model.requires_grad_(True)
    return Trainee(model, tokenizer, card, base=base, how=how)


def _base_of(resolved: ResolvedModel) -> Base:
    name = resolved.name if resolved.source in ("embedded", "hub") else str(resolved.path)
    return Base.of(name, resolved.path, resolved.facts)


def _add_tokens(
    model: Any, tokenizer: Any, dialect: str, settings: Mapping[str, Any], *, init: str, seed: int
) -> ModelCard:
    """Adds a dialect's control tokens and initialises their rows; the card of it all.

    The rows of tokens that the tokenizer had already stay as they are.
    """
    forms = get_dialect(dialect).forms(DialectSettings.given(settings))
    first = max(tokenizer.backend_tokenizer.get_vocab().values(), default=-1) + 1
    ids = add_control_tokens(tokenizer, forms) if forms else {}
    card = ModelCard.describe(dialect, ids, tokenizer.backend_tokenizer, **settings)
    num_rows = int(model.get_input_embeddings().weight.shape[0])
    fit_model(model, max(ids.values(), default=-1) + 1, seed=seed)
    added = {i: forms[name] for name, i in ids.items() if i >= first}
    if init == "forms":
        _init_rows(model, tokenizer, added)
    elif init == "mean":
        _draw_rows(model, [i for i in added if i < num_rows], first, seed, NOISE)
    else:
        _draw_rows(model, list(added), first, seed, 1.0)
    return card


def _tables_of(model: Any) -> list[Any]:
    """The weights of embedding and head: one, if they are tied."""
    weights = [model.get_input_embeddings().weight]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not weights[0]:
        weights.append(head.weight)
    return weights


def _draw_rows(model: Any, rows: list[int], num_known: int, seed: int, noise: float) -> None:
    """These rows become the mean of the known ones, with so many of their standard deviations of
    noise; `NOISE` is what `fit_model` gives new ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in _tables_of(model):
            known = weight[:num_known].float()
            drawn = torch.randn(len(rows), weight.shape[1], generator=generator).to(weight.device)
            weight[rows] = (known.mean(0) + noise * known.std() * drawn).to(weight.dtype)


def _init_rows(model: Any, tokenizer: Any, forms: Mapping[int, str]) -> None:
    """Each of these rows becomes the mean of its text form's rows, in embedding and head."""
    import torch

    weights, backend = _tables_of(model), tokenizer.backend_tokenizer
    with torch.no_grad():
        for new, form in forms.items():
            ids = backend.encode(form, add_special_tokens=False).ids
            if ids and max(ids) < min(forms):
                for weight in weights:
                    weight[new] = weight[ids].float().mean(0).to(weight.dtype)


def _open_adapter(
    resolved: ResolvedModel, dialect: str, settings: Mapping[str, Any] | None,
    *, dtype: str, device: str,
) -> Trainee:  # fmt: skip
    """A trainee that goes on with an adapter, on the base that it is of."""
    from stretto.models import load_hf, resolve
    from stretto.models.adapters import base_of, scaling_of

    folder = resolved.path
    scaling_of(folder)
    card = ModelCard.load(folder)
    if card.dialect != dialect:
        raise InvalidInput(f"{folder} writes dialect {card.dialect}, not {dialect}; begin anew")
    changed = {k: v for k, v in (settings or {}).items() if getattr(card, k) != v}
    if changed:
        raise Unsupported(
            f"{folder} was trained with {next(iter(changed))} = "
            f"{getattr(card, next(iter(changed)))!r}; an adapter keeps its settings"
        )
    base = base_of(folder, lambda name: resolve(name, offline=True))
    model, tokenizer = load_hf(base.path, dtype=dtype, device=device)
    prepare_tokens(model, tokenizer, card, folder)
    peft_model = reopened(model, folder)
    return Trainee(peft_model, tokenizer, card, _base_of(base), how="lora", source=folder)
