"""`stretto train sft`: rows in, a folder that `LM.load` takes out, or one line on what is wrong."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from tiny_lms import tiny_lm, tiny_tokenizer
from train_job import annotated_rows, register_rows, write_rows

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.data.sample import Task, answer_of
from stretto.dialects import get_dialect
from stretto.errors import InvalidInput
from stretto.train import Lora, SftConfig, Supervised, make_trainee, train_sft
from stretto.train.estimate import Shape, estimate
from stretto.train.lengths import relabel
from stretto.train.rows import split_rows

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lm("plain").save(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", annotated_rows())


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    """(exit status, what stdout has as JSON or text, stderr)."""
    code = main(["train", "sft", *map(str, arguments)])
    out, err = capsys.readouterr()
    try:
        return code, json.loads(out), err
    except ValueError:
        return code, out, err


def quick(base: Path, rows: Path, out: Path, *more: object) -> list[object]:
    return [
        "--model", base, "--data", rows, "--out", out, "--dtype", "float32", "--batch", 4,
        "--lr", 0.01, "--json", "--quiet", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["--lora", "--full"])
def test_a_run_leaves_what_can_be_loaded_and_looked_into(
    base: Path, rows: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    more = (how, "--rank", 2) if how == "--lora" else (how,)
    code, summary, _ = run(capsys, *quick(base, rows, out, *more, "--epochs", 2))
    assert code == 0
    assert summary["is_complete"]
    assert summary["train"]["examples"] == 12
    assert {p.name for p in out.iterdir() if p.name[0] != "."} == {
        "checkpoints", "config.json", "environment.json", "metrics.jsonl", "model",
        "rejects.jsonl", "summary.json",
    }  # fmt: skip
    assert json.loads((out / "summary.json").read_text()) == summary
    place = json.loads((out / "environment.json").read_text())
    assert {"versions", "revision", "cpu", "torch_threads"} <= place["machine"].keys()
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["how"] == how.strip("-")
    assert how == "--full" or settings["rank"] == 2
    lm = LM.load(summary["model"], dtype="float32")
    assert lm.card.dialect == "pasta"
    assert lm.generate("question 1", SamplingParams(max_tokens=20))[0].trace.num_tokens
    before = (out / "metrics.jsonl").read_bytes()
    code, again, _ = run(capsys, *quick(base, rows, out, *more, "--epochs", 2))
    assert (code, again["last"]) == (0, summary["last"])
    assert (out / "metrics.jsonl").read_bytes() == before
    code, _, err = run(capsys, *quick(base, rows, out, *more, "--epochs", 3))
    assert code == 2
    assert "was begun with epochs 2.0, not 3.0" in err


def test_training_teaches_the_language(base: Path, tmp_path: Path) -> None:
    """A few rows by heart: the model promises, and its threads say what they were taught."""
    data = write_rows(tmp_path / "rows.jsonl", annotated_rows(1))
    config = SftConfig(
        model=str(base), data=[str(data)], out=str(tmp_path / "run"), how="full", lr=1e-2,
        schedule="constant", warmup=0, epochs=120, batch=1, dtype="float32", checkpoint_every=500,
    )  # fmt: skip
    summary = train_sft(config)
    assert summary["last"]["loss"] < 0.1
    completion = LM.load(summary["model"]).generate("question 0", SamplingParams(max_tokens=200))[0]
    assert completion.text == annotated_rows(1)[0]["response"]
    assert len(completion.threads) == 3


@pytest.mark.parametrize("how", ["--lora", "--full"])
def test_a_model_with_registers_is_trained_loaded_and_run(
    base: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "steps.jsonl", register_rows())
    sizes = ("--epochs", 16) if how == "--full" else ("--epochs", 40, "--rank", 8)
    more = (how, "--dialect", "tip", "--registers", 3, "--grace", *sizes)
    code, summary, _ = run(capsys, *quick(base, rows, tmp_path / "run", *more))
    assert code == 0
    assert summary["train"]["illegal_targets"] == 0
    assert summary["last"]["loss_register"] < 1.0
    lm = LM.load(summary["model"], dtype="float32")
    assert (lm.card.dialect, lm.card.num_registers, lm.card.grace) == ("tip", 3, True)
    main(["run", "question 1", "--model", summary["model"], "--dtype", "float32", "--json",
          "--max-tokens", "60", "--quiet", "--page-size", "2"])  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    (thread,), live = told["threads"], told["live_kv"]
    assert told["method"] == "tip"
    assert told["usage"]["control_tokens"] >= 4
    assert thread["num_tokens"] > told["usage"]["completion_tokens"]
    assert live["generated_mean"] < live["dense_mean"] - told["usage"]["prompt_tokens"]
    assert live["generated_peak"] <= live["peak"] <= live["pool_peak_slots"]
    assert live["pool_peak_slots"] < told["usage"]["prompt_tokens"] + thread["num_tokens"]


def test_registers_are_kept_or_refused_by_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "steps.jsonl", register_rows(2))
    first = ("--full", "--dialect", "tip", "--registers", 3)
    _, summary, _ = run(capsys, *quick(base, rows, tmp_path / "one", *first))
    further = ("--full", "--dialect", "tip", "--strict")
    _, again, _ = run(capsys, *quick(summary["model"], rows, tmp_path / "two", *further))
    card = LM.load(again["model"], dtype="float32").card
    assert (card.num_registers, card.grace) == (3, False)
    for more, message in (
        (("--full", "--dialect", "tip", "--registers", 4), "has 3 registers, not 4"),
        (("--dialect", "pasta", "--registers", 4), "dialect pasta has no registers"),
        (("--dialect", "tip", "--registers", 0), "registers is 0"),
        (("--dialect", "tip", "--lengths", "tens"), "dialect tip promises nothing"),
        (("--dialect", "tip", "--baseline", "--grace"), "a baseline has no registers"),
    ):
        code, _, err = run(capsys, *quick(summary["model"], rows, tmp_path / "three", *more))
        assert code != 0
        assert message in err
        assert err.count("\n") == 1


def test_a_baseline_is_the_same_rows_without_annotations(
    base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, summary, _ = run(capsys, *quick(base, rows, tmp_path / "run", "--baseline"))
    assert code == 0
    assert LM.load(summary["model"]).card.dialect == "plain"
    assert set(summary["last"]) == {"loss", "num_terms", "loss_content", "loss_end"}


def test_answers_are_learnt_by_their_ids(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = tiny_lm("pasta")
    folder = lm.save(tmp_path / "pasta")
    params = SamplingParams(max_tokens=30, temperature=1.0)
    answers = [
        answer_of(Task("hello", k), completion)
        for k, completion in enumerate(lm.generate("hello", params, n=4))
    ]
    data = write_rows(tmp_path / "a.jsonl", [a.model_dump() for a in answers])
    code, summary, _ = run(capsys, *quick(folder, data, tmp_path / "run"))
    assert code == 0
    drawn = sum(a.origins.count("s") + (a.finish_reason == "stop") for a in answers)
    assert summary["train"]["targets"] == drawn


def cut_answer(base: Path, folder: Path) -> tuple[Path, Any]:
    """A file with one answer that its budget has cut."""
    params = SamplingParams(max_tokens=9, temperature=1.0)
    (completion,) = LM.load(base, dtype="float32").generate("hello", params)
    answer = answer_of(Task("hello"), completion)
    assert answer.finish_reason == "length"
    return write_rows(folder / "cut.jsonl", [answer.model_dump()]), answer


def test_a_baseline_does_not_learn_to_end_where_an_answer_was_cut(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, answer = cut_answer(base, tmp_path)
    more = ("--baseline", "--max-steps", 1)
    code, summary, _ = run(capsys, *quick(base, data, tmp_path / "run", *more))
    assert code == 0
    assert "loss_content" in summary["last"]
    assert "loss_end" not in summary["last"]
    ended = [answer.model_copy(update={"finish_reason": "stop"}).model_dump()]
    whole = write_rows(tmp_path / "whole.jsonl", ended)
    assert "loss_end" in run(capsys, *quick(base, whole, tmp_path / "b", *more))[1]["last"]


def test_lengths_of_answers_cannot_be_rewritten(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, answer = cut_answer(base, tmp_path)
    code, _, err = run(capsys, *quick(base, data, tmp_path / "run", "--lengths", "exact"))
    assert code == 2
    assert f"row {answer.key} is a sampled answer" in err


def test_another_base_under_the_same_name_does_not_go_on(
    base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LoRA's checkpoint holds nothing of the frozen weights."""
    own = tmp_path / "base"
    shutil.copytree(base, own)
    assert run(capsys, *quick(own, rows, tmp_path / "run", "--max-steps", 1))[0] == 0
    shutil.rmtree(own)
    lm = tiny_lm("plain")
    with torch.no_grad():
        lm.model.model.layers[0].mlp.up_proj.weight.add_(0.1)
    lm.save(own)
    code, _, err = run(capsys, *quick(own, rows, tmp_path / "run", "--max-steps", 1))
    assert code == 2
    assert "other settings or data" in err


def test_a_place_that_is_no_folder_is_refused_in_one_line(
    base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, *quick(base, rows, tmp_path / "file"))
    assert code == 2
    assert err.count("\n") == 1


# -- lengths ---------------------------------------------------------------------------------------


def test_lengths_are_relabelled_by_the_models_own_tokens() -> None:
    vocabulary = tiny_lm("pasta").vocabulary
    text = (
        'a <promise topic="x" tokens="70"/><async>one two three</async>'
        '<promise tokens=20 topic=\'a"b\'/><async></async><promise topic="none" tokens="40"/>'
    )
    n = len(vocabulary.encode("one two three"))
    assert relabel(text, vocabulary, 1) == (
        f'a <promise topic="x" tokens="{n}"/><async>one two three</async>'
        '<promise topic=\'a"b\' tokens="1"/><async></async><promise topic="none" tokens="40"/>'
    )
    text = text.replace("three", "three four")
    n = len(vocabulary.encode("one two three four"))
    assert 10 < n < 20
    assert 'topic="x" tokens="20"' in relabel(text, vocabulary, 10)


@pytest.mark.parametrize(
    ("lengths", "card"),
    [
        ("exact", (1, "predicted", 50)),
        ("tens", (10, "predicted", 50)),
        ("fixed", (10, "fixed", 30)),
        ("overlap", (10, "overlap", 50)),
    ],
)
def test_the_variant_of_lengths_is_in_the_card(  # noqa: PLR0917
    base: Path, rows: Path, tmp_path: Path, lengths: str, card: tuple[int, str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    more = ("--lengths", lengths, "--fixed-length", 30, "--max-steps", 1)
    code, summary, _ = run(capsys, *quick(base, rows, tmp_path / "run", *more))
    assert code == 0
    found = LM.load(summary["model"]).card
    assert (found.unit, found.policy, found.fixed_length) == card


# -- data ------------------------------------------------------------------------------------------


def test_rows_that_are_too_long_are_counted_and_kept(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = annotated_rows(3)
    own[1]["annotated"] = own[1]["response"] = "word " * 300
    data = write_rows(tmp_path / "rows.jsonl", own)
    out = tmp_path / "run"
    code, summary, _ = run(capsys, *quick(base, data, out, "--max-steps", 1))
    assert code == 3
    assert summary["train"]["rejected"] == {"too-long": 1}
    (reject,) = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert reject["prompt_id"] == own[1]["prompt_id"]
    more = ("--max-steps", 1, "--max-tokens", 80)
    code, summary, _ = run(capsys, *quick(base, data, tmp_path / "b", *more))
    assert (code, summary["train"]["rejected"]["too-long"]) == (3, 1)


def test_a_row_with_nothing_to_learn_stops_the_run_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_lm("pasta").save(tmp_path / "pasta")
    row = {
        "prompt_id": annotated_rows(1)[0]["prompt_id"], "prompt": "question 0", "text": "a",
        "finish_reason": "length", "ids": [65], "origins": "f", "num_prompt_tokens": 1,
        "sequential_steps": 1, "completion_tokens": 1, "control_tokens": 0,
    }  # fmt: skip
    data = write_rows(tmp_path / "rows.jsonl", [row])
    code, _, err = run(capsys, *quick(folder, data, tmp_path / "run"))
    assert code == 2
    assert f"row {row['prompt_id']}/0 has no token to learn from" in err
    assert not (tmp_path / "run").exists()


def test_prompts_come_from_the_original_data(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = annotated_rows(4)
    prompts = write_rows(tmp_path / "p.jsonl", [{"q": row.pop("prompt")} for row in own])
    data = write_rows(tmp_path / "rows.jsonl", own)
    code, _, err = run(capsys, *quick(base, data, tmp_path / "run"))
    assert code == 2
    assert "is in no file given" in err
    more = ("--prompts", prompts, "--prompt-field", "q", "--max-steps", 1)
    assert run(capsys, *quick(base, data, tmp_path / "run", *more))[0] == 0


def test_validation_prompts_are_never_trained_on(
    base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--valid", rows, "--max-steps", 1)
    code, _, err = run(capsys, *quick(base, rows, tmp_path / "run", *more))
    assert code == 2
    assert "12 prompts are in the training and the validation data" in err
    more = ("--valid-share", 0.3, "--max-steps", 1)
    code, summary, _ = run(capsys, *quick(base, rows, tmp_path / "run", *more))
    counts = summary["train"]["examples"], summary["valid"]["examples"]
    assert code == 0
    assert sum(counts) == 12
    assert min(counts) > 0
    assert summary["valid_loss"]["loss"] > 0
    own = list(read_rows(rows))
    assert split_rows(own, 0.3, 0) == split_rows(own, 0.3, 0)


def read_rows(path: Path) -> Any:
    from stretto.train.rows import read_training_rows

    return read_training_rows([path])


# -- settings --------------------------------------------------------------------------------------


def test_a_file_of_settings_with_flags_over_it(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('model = "m"\nlr = 0.5\nbatch = 8\ndata = ["a"]\n')
    config = SftConfig.read(file, {"lr": 0.25, "batch_tokens": 100, "out": None})
    assert (config.model, config.lr, config.batch, config.batch_tokens) == ("m", 0.25, None, 100)
    assert config.data == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "unknown setting 'epoch'; did you mean 'epochs'?"),
        ("lr = -1.0", "lr is -1.0"),
        ('how = "half"', "how is 'half'"),
        ("batch = 4\nbatch_tokens = 8", "batch and batch_tokens are both given"),
        ('baseline = true\nlengths = "tens"', "a baseline promises nothing"),
        ("lr = ", "is no TOML"),
        ("seed = -1", "seed is -1"),
        (f"seed = {1 << 63}", f"seed is {1 << 63}"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.toml"
    file.write_text(text)
    code, _, err = run(capsys, "--config", file)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_what_is_missing_is_asked_for(
    base: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--model", base, "--data", rows], "no folder for the run"),
        (["--model", base, "--out", "x"], "no data to train on"),
        (["--lora", "--full"], "--lora and --full are both given"),
        (["--full", "--rank", "4"], "--rank is of a LoRA, and all weights are trained; leave it"),
        (["--full", "--dropout", "0.0"], "--dropout is of a LoRA, and all weights are trained"),
        (["--config", "nowhere.toml"], "no file nowhere.toml"),
        (["--lr", "0"], "lr is 0.0"),
        (["--epochs", "inf"], "epochs is inf"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert message in err


# -- recipes and estimates -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipes_are_estimated_from_their_shape_alone(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tomllib.loads(recipe.read_text())
    if "architecture" not in settings:
        SftConfig.read(recipe, {})
        return
    code, found, _ = run(capsys, "--config", recipe, "--dry-run", "--json")
    assert code == 0
    known = {"gemma": 8_537_680_896, "qwen3": 4_022_468_096}
    assert found["num_parameters"] == known[settings["architecture"]["model_type"]]
    assert found["weights_bytes"] == 2 * found["num_parameters"]
    if settings["how"] == "full":
        assert found["trained_parameters"] == found["num_parameters"]
        assert found["optimizer_bytes"] == 12 * found["num_parameters"]
    assert found["peak_bytes"] > found["weights_bytes"]
    assert found["h100_hours"] > 0


TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipes_train_tiny_models_of_their_architecture(recipe: Path, tmp_path: Path) -> None:
    """The recipe's own settings but for size, place and steps."""
    config = SftConfig.read(recipe, {})
    kind = (config.architecture or {"model_type": "llama"})["model_type"]
    tokenizer = tiny_tokenizer()
    tied = {"tie_word_embeddings": True, "eos_token_id": None}
    model = tiny_model(kind, vocab_size=len(tokenizer), **tied, **TINY)
    folder = LM.wrap(model, tokenizer).save(tmp_path / "base")
    data = write_rows(tmp_path / "rows.jsonl", annotated_rows())
    own = {"model": str(folder), "data": [str(data)], "out": str(tmp_path / "run")}
    changes = {**own, "device": "cpu", "max_steps": 2, "valid_share": 0.3}
    summary = train_sft(config.model_copy(update=changes))
    assert summary["steps"] == 2
    assert summary["is_complete"]
    lm = LM.load(summary["model"], engine="hf", pool_slots=512)
    assert lm.generate("question 1", SamplingParams(max_tokens=8))[0].trace.num_tokens


def test_an_estimate_counts_what_is_trained() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    shape = Shape.of_model(model)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    settings = {"num_tokens": 1000, "target_share": 0.5, "pack_tokens": 128}
    lora = Lora(rank=2, targets="attention")
    found = estimate(shape, lora=lora, new_rows=6, **settings)
    trainee = make_trainee(*fresh_llama(), lora=lora)
    assert found.trained_parameters == trainee.num_trained
    full = estimate(shape, lora=None, new_rows=6, **settings)
    assert full.total_flops > found.total_flops
    with pytest.raises(InvalidInput, match="no layer 'fc'"):
        estimate(shape, lora=Lora(targets="fc"), new_rows=0, **settings)
    with pytest.raises(InvalidInput, match="architecture of type 'no'"):
        Shape.of_config({"model_type": "no"})


def fresh_llama() -> tuple[Any, Any]:
    import copy

    model = copy.deepcopy(tiny_model("llama", tie_word_embeddings=True))
    tokenizer = tiny_tokenizer()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model, tokenizer


def test_a_dry_run_counts_the_data_and_writes_nothing(
    base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, _ = run(capsys, *quick(base, rows, tmp_path / "run", "--dry-run"))
    assert code == 0
    assert found["is_counted"]
    assert (found["steps"], found["num_tokens"]) == (3, found["tokens_per_epoch"])
    assert not (tmp_path / "run").exists()
    code, text, _ = run(capsys, "--model", base, "--data", rows, "--dry-run")
    assert code == 0
    assert "peak_bytes" in text


def test_the_embedded_models_adapter_is_small() -> None:
    """SmolLM2-135M: 30 layers of 576; a LoRA of rank 4 on all layers stays below 3 MB."""
    shape = Shape.of_config(
        {
            "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
            "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    found = estimate(
        shape, lora=Lora(rank=4), new_rows=len(get_dialect("pasta").control_forms),
        num_tokens=1, target_share=1.0, pack_tokens=2048,
    )  # fmt: skip
    assert found.adapter_bytes is not None
    assert found.adapter_bytes < 3_000_000


def test_the_supervised_objective_is_the_mean_over_all_targets() -> None:
    lm = tiny_lm("pasta")
    trainee = make_trainee(lm.model, lm.tokenizer, card=lm.card, how="full")
    made = trainee.maker()
    prompt = trainee.encode_prompt("question")
    assert prompt == lm.encode(lm.chat("question"))
    objective = Supervised([made.from_annotated(prompt, "one"), made.from_annotated(prompt, "two")])
    with torch.no_grad():
        outcome = objective.outcome(trainee.model, objective.batch((0, 1)))
        parts = [objective.outcome(trainee.model, objective.batch((k,))) for k in (0, 1)]
    assert float(outcome.loss) == pytest.approx(sum(float(p.loss) for p in parts), rel=1e-5)
    assert outcome.num_terms == sum(p.num_terms for p in parts)
