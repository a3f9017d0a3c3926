"""Adapter folders: what is loaded is the base with the adapter in it, or is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file, save_file
from tiny_lms import tiny_lm, tiny_tokenizer

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.errors import InvalidInput, ModelUnavailable, StrettoError, Unsupported
from stretto.models import load_hf, resolve
from stretto.models.adapters import Base
from stretto.models.fingerprint import weights_fingerprint
from stretto.models.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from stretto.train import Batch, Lora, Trainee, open_trainee, token_logprobs
from stretto.train.batches import model_masks

TIED = [True, False]


def save_base(folder: Path, kind: str = "llama", *, tied: bool = False, seed: int = 0) -> Path:
    tokenizer = tiny_tokenizer()
    settings = {"vocab_size": len(tokenizer), "tie_word_embeddings": tied, "eos_token_id": None}
    model = copy.deepcopy(tiny_model(kind, **settings))
    with torch.no_grad():
        model.lm_head.weight.add_(seed)
    LM.wrap(model, tokenizer).save(folder)
    return folder


def stir(trainee: Trainee, seed: int = 0) -> None:
    """As if it had been trained: all that would be is random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainee.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, Trainee]:
    """(base, adapter, the trainee that was saved)."""
    base = save_base(tmp_path / "base")
    trainee = open_trainee(base, lora=Lora(rank=3), dtype="float32")
    stir(trainee)
    return base, trainee.save(tmp_path / "adapter"), trainee


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0]


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_merged_logits_are_those_of_the_peft_model(tmp_path: Path, kind: str, tied: bool) -> None:
    base = save_base(tmp_path / "base", kind, tied=tied)
    trainee = open_trainee(base, lora=Lora(rank=3, alpha=5), dtype="float32")
    before = logits_of(trainee.model.eval())
    stir(trainee)
    mine = logits_of(trainee.model.eval())
    assert float((mine - before).abs().max()) > 0.1
    model, tokenizer = load_hf(trainee.save(tmp_path / "adapter"), dtype="float32")
    merged = logits_of(model)
    assert merged.shape == mine.shape
    assert float((merged - mine).abs().max()) < 1e-4
    assert len(tokenizer) == len(tiny_tokenizer()) + 6
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is table) == tied
    new = list(trainee.card.control.values())
    stirred = trainee.model.get_base_model().get_input_embeddings().token_adapter
    assert torch.equal(table[new], stirred.trainable_tokens_delta["default"])


@pytest.mark.parametrize("tied", TIED)
def test_tied_tables_train_one_set_of_rows(tmp_path: Path, tied: bool) -> None:
    trainee = open_trainee(save_base(tmp_path / "b", tied=tied), lora=Lora(rank=1), dtype="float32")
    rows = [n for n, p in trainee.model.named_parameters() if p.requires_grad and "tokens" in n]
    assert len(rows) == (1 if tied else 2)


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("kind", ["llama", "gemma", "gemma2", "gemma3_text"])
def test_losses_are_learnt_through_the_new_rows_as_peft_would(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    """The specification is the PEFT model's own pass, masked: log-probs, and slopes of all that
    is trained, the rows of control tokens in both tables among it."""
    base = save_base(tmp_path / "base", kind, tied=tied)
    trainee = open_trainee(base, lora=Lora(rank=2), dtype="float32")
    stir(trainee)
    text = 'a <promise topic="b" tokens="10"/><async>c</async><sync/>d'
    batch = Batch.of([trainee.maker().from_annotated(trainee.encode_prompt("Why?"), text)])
    weights, results = torch.linspace(-1, 1, batch.num_targets), []
    for own in (True, False):
        trainee.model.zero_grad()
        if own:
            masks = model_masks(batch, trainee.model.config, torch.float32)
            logits = trainee.model(
                input_ids=batch.ids[None], position_ids=batch.positions[None], attention_mask=masks
            ).logits[0][batch.rows]
            legal = batch.table.dense(batch.legal.tolist(), logits.shape[1])
            rows = logits.masked_fill(~legal, -torch.inf).log_softmax(-1)
            found = rows.gather(1, batch.targets[:, None])[:, 0]
        else:
            found = token_logprobs(trainee.model, batch)
        (found * weights).sum().backward()
        named = trainee.model.named_parameters()
        results.append((found.detach(), {n: p.grad for n, p in named if p.requires_grad}))
    (reference, expected), (mine, slopes) = results
    assert float((mine - reference).abs().max()) < 1e-4
    for name, slope in expected.items():
        assert float((slopes[name] - slope).abs().max()) < 1e-4 * (1 + float(slope.abs().max()))


def test_an_adapter_answers_like_its_model_and_describes_itself(
    saved: tuple[Path, Path, Trainee], capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, trainee = saved
    lm = LM.load(adapter, dtype="float32")
    assert (lm.card.dialect, lm.engine.name) == ("pasta", "hf")
    assert lm.vocabulary.control == trainee.card.control
    whole = trainee.model.merge_and_unload()
    wrapped = LM.wrap(whole, trainee.tokenizer, card=trainee.card, pool_slots=1024)
    params = SamplingParams(max_tokens=30)
    assert lm.generate("hi", params)[0].text == wrapped.generate("hi", params)[0].text
    facts = resolve(adapter).facts
    assert facts.dialect == "pasta"
    assert facts.vocab_size == len(tiny_tokenizer()) + 6
    assert facts.num_parameters == resolve(base).facts.num_parameters + 2 * 6 * 32
    assert main(["model", "info", str(adapter), "--json", "--verify"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == "adapter"
    assert list(told["sha256"]) == [ADAPTER_WEIGHTS]
    command = ["run", "hi", "--model", str(adapter), "--max-tokens", "5", "--json", "--quiet"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "pasta"


def test_training_goes_on_with_the_same_adapter(
    saved: tuple[Path, Path, Trainee], tmp_path: Path
) -> None:
    _, adapter, trainee = saved
    again = open_trainee(adapter, dtype="float32")
    assert torch.equal(logits_of(again.model.eval()), logits_of(trainee.model.eval()))
    assert again.num_trained == trainee.num_trained
    second = again.save(tmp_path / "second")
    assert (second / ADAPTER_WEIGHTS).read_bytes() == (adapter / ADAPTER_WEIGHTS).read_bytes()
    assert (second / ADAPTER_CONFIG).read_bytes() == (adapter / ADAPTER_CONFIG).read_bytes()
    with pytest.raises(Unsupported, match="unit = 10"):
        open_trainee(adapter, settings={"unit": 1})
    with pytest.raises(InvalidInput, match="dialect pasta, not plain"):
        open_trainee(adapter, dialect="plain")


@pytest.mark.parametrize(
    ("lora", "asked", "message"),
    [
        (Lora(rank=4), ["rank"], "was made with rank 3, not 4"),
        (Lora(rank=3, targets="mlp"), ["targets"], "was made with targets"),
        (Lora(rank=3, dropout=0.1), ["dropout"], "was made with dropout 0.0, not 0.1"),
    ],
)
def test_settings_that_an_adapter_has_not_are_refused_where_they_are_asked_for(
    saved: tuple[Path, Path, Trainee], lora: Lora, asked: list[str], message: str
) -> None:
    _, adapter, _ = saved
    with pytest.raises(Unsupported, match=message):
        open_trainee(adapter, lora=lora, asked=asked)
    open_trainee(adapter, lora=lora)
    open_trainee(adapter, lora=Lora(rank=3), asked=["rank", "targets", "alpha", "dropout"])


def test_an_adapter_may_be_the_base_of_another_or_of_full_training(
    saved: tuple[Path, Path, Trainee], tmp_path: Path
) -> None:
    _, adapter, trainee = saved
    full = open_trainee(adapter, how="full", dtype="float32")
    gap = logits_of(full.model.eval()) - logits_of(trainee.model.eval())
    assert float(gap.abs().max()) < 1e-4
    whole = LM.load(full.save(tmp_path / "whole"), dtype="float32")
    assert whole.card == trainee.card
    assert torch.equal(logits_of(whole.model), logits_of(full.model))


def test_a_folder_is_saved_whole_or_not_at_all(
    saved: tuple[Path, Path, Trainee], tmp_path: Path
) -> None:
    _, _, trainee = saved
    left = tmp_path / ".new.0123abcd.tmp"  # by a kill
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")

    def full(place: Path) -> None:
        assert (place / "stretto.json").is_file()
        raise OSError(28, "No space left on device")

    with pytest.raises(StrettoError, match=r"cannot write .*new: No space left .*make room"):
        trainee.save(tmp_path / "new", full)
    assert not [p for p in tmp_path.iterdir() if "new" in p.name]
    trainee.save(tmp_path / "new", lambda place: (place / "more").touch())
    assert {"more", "stretto.json", ADAPTER_WEIGHTS} < {
        p.name for p in (tmp_path / "new").iterdir()
    }


def test_bfloat16_adapters_are_small_and_merged_in_float32(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    trainee = open_trainee(base, lora=Lora(rank=3), dtype="bfloat16")
    stir(trainee)
    adapter = trainee.save(tmp_path / "adapter")
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    plain, _ = load_hf(base, dtype="float32")
    merged, _ = load_hf(adapter, dtype="float32")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{k}.weight"].float() for k in "AB")
    expected = plain.get_parameter(f"{name}.weight") + 2 * (b @ a)
    assert torch.allclose(merged.get_parameter(f"{name}.weight"), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_other_programs_load_without_our_files(
    saved: tuple[Path, Path, Trainee], tmp_path: Path
) -> None:
    """A plain LoRA as PEFT writes it: no card, no base.json."""
    from peft import LoraConfig, get_peft_model

    base, _, _ = saved
    model, _ = load_hf(base, dtype="float32")
    own = get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    own.peft_config["default"].base_model_name_or_path = "base"  # beside the adapter
    own.save_pretrained(tmp_path / "foreign")
    shutil.move(tmp_path / "foreign", base.parent / "foreign")
    (base.parent / "foreign" / "base").symlink_to(base)
    merged, _ = load_hf(base.parent / "foreign", dtype="float32")
    assert float((logits_of(merged) - logits_of(own)).abs().max()) < 1e-4


# -- refusals --------------------------------------------------------------------------------------


def test_a_missing_or_other_base_is_named(saved: tuple[Path, Path, Trainee]) -> None:
    base, adapter, _ = saved
    known = Base.load(adapter)
    assert known is not None
    assert known.fingerprint == weights_fingerprint(base)
    moved = base.rename(base.with_name("moved"))
    with pytest.raises(ModelUnavailable, match=r"is an adapter of '.*base': no model at"):
        LM.load(adapter)
    save_base(base, seed=1)
    with pytest.raises(ModelUnavailable, match="other weights"):
        LM.load(adapter)
    assert main(["model", "info", str(adapter)]) == 2
    shutil.rmtree(base)
    moved.rename(base)
    LM.load(adapter)


def change(folder: Path, **settings: Any) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"use_dora": True}, Unsupported, "use_dora"),
        ({"peft_type": "IA3"}, Unsupported, "type 'IA3'"),
        ({"bias": "all"}, Unsupported, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, Unsupported, "modules_to_save"),
        ({"r": None}, ModelUnavailable, "r = None"),
        ({"r": 6}, ModelUnavailable, "is of shape"),  # else merged at half its strength
    ],
)
def test_what_is_more_than_products_is_refused(
    saved: tuple[Path, Path, Trainee], settings: dict[str, Any], error: type, message: str
) -> None:
    _, adapter, _ = saved
    change(adapter, **settings)
    with pytest.raises(error, match=message):
        LM.load(adapter)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t | {(n := next(iter(t))): t[n][:, :5].contiguous()}, "is of shape"),
        (lambda t: dict(list(t.items())[1:]), "lacks"),
        (lambda t: {k.replace("layers.0", "layers.7"): v for k, v in t.items()}, "layers.7"),
        (lambda t: t | {"base_model.model.odd": torch.zeros(1)}, "'base_model.model.odd'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    saved: tuple[Path, Path, Trainee], edit: Any, message: str
) -> None:
    _, adapter, _ = saved
    tensors = dict(
        sorted(load_file(adapter / ADAPTER_WEIGHTS).items(), key=lambda e: "lora" not in e[0])
    )
    save_file(edit(tensors), adapter / ADAPTER_WEIGHTS)
    with pytest.raises((ModelUnavailable, Unsupported), match=message):
        LM.load(adapter)


def test_rows_for_other_tokens_are_refused(saved: tuple[Path, Path, Trainee]) -> None:
    _, adapter, _ = saved
    change(adapter, trainable_token_indices={"embed_tokens": [1], "lm_head": [1]})
    with pytest.raises(ModelUnavailable, match="trainable_tokens_delta"):
        LM.load(adapter)
    for odd in ([-1] * 6, ["a"] * 6, [10**6] * 6):
        change(adapter, trainable_token_indices={"embed_tokens": odd, "lm_head": odd})
        with pytest.raises(ModelUnavailable, match="lists rows of"):
            LM.load(adapter)


def test_damaged_files_are_named(saved: tuple[Path, Path, Trainee]) -> None:
    _, adapter, _ = saved
    (adapter / "base.json").write_text('{"format": 2}')
    with pytest.raises(ModelUnavailable, match=r"base\.json is damaged"):
        LM.load(adapter)
    (adapter / "base.json").unlink()
    change(adapter, base_model_name_or_path=None)
    with pytest.raises(ModelUnavailable, match="names no base model"):
        LM.load(adapter)
    change(adapter, base_model_name_or_path=str(adapter))
    with pytest.raises(ModelUnavailable, match="its own base"):
        LM.load(adapter)


def test_the_dialects_of_card_and_base_must_fit(
    saved: tuple[Path, Path, Trainee], tmp_path: Path
) -> None:
    pasta = tiny_lm("pasta").save(tmp_path / "pasta")
    trainee = open_trainee(pasta, dtype="float32")
    adapter = trainee.save(tmp_path / "on-pasta")
    LM.load(adapter)
    (adapter / "stretto.json").unlink()
    with pytest.raises(ModelUnavailable, match=r"has no stretto\.json"):
        LM.load(adapter)
    with pytest.raises(InvalidInput, match="is to learn plain"):
        open_trainee(pasta, dialect="plain")


def test_a_rank_or_layer_that_is_none_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    with pytest.raises(InvalidInput, match="rank is 0"):
        Lora(rank=0)
    with pytest.raises(InvalidInput, match="'c_attn'"):
        open_trainee(base, lora=Lora(targets="q_proj,c_attn"))
    with pytest.raises(InvalidInput, match="not an empty folder"):
        open_trainee(base).save(base)
