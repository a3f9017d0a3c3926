"""Training of dialect planned, run: it computes what decoding computes, resumes, and teaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_kit import (
    CONVENTIONS,
    PROMPT,
    TWO_ROUNDS,
    VARIANTS,
    example_of,
    hide,
    logits_of,
    maker_of,
    objective,
    planned_lm,
    planned_rows,
    planned_text,
    prompt_ids,
    span,
    streams_of,
)
from tiny_lms import tiny_lm
from train_job import write_rows

from stretto import LM, SamplingParams
from stretto.cli.train_parts import estimate_of
from stretto.data.rows import Answer, prompt_id
from stretto.errors import InvalidInput, UnknownName, Unsupported
from stretto.masks import dense_mask, flat_positions, flat_tokens
from stretto.methods import get_method
from stretto.methods.diffusion import Diffusion, Window
from stretto.models.tiny import make_tiny
from stretto.train import SftConfig, train_sft
from stretto.train.batches import Batch
from stretto.train.examples import IGNORE
from stretto.train.loop import Loop, LoopSettings
from stretto.train.noise import generator_of, most_tokens
from stretto.train.packing import BatchSize, PackedSteps
from stretto.train.planned import Planned
from stretto.train.prefer import pair_examples
from stretto.train.renewed import Renewed, Turns, lengthened
from stretto.train.schedule import Schedule
from stretto.train.sft import prepare
from stretto.train.unusable import WindowTooSmall

TOLERANCE = 1e-4

# -- trained = run ---------------------------------------------------------------------------------


class Passes:
    """An engine that keeps, of each pass, what blocks hold and the logits of its rows, each by its
    thread and its number there."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.recorder: Any = None
        self.seen: list[tuple[dict[str, list[int]], dict[tuple[str, int], torch.Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, runs: list[Any]) -> torch.Tensor:
        logits: torch.Tensor = self.engine.forward(runs)
        held = {s.thread: list(s.tokens) for s in self.recorder.segments if s.kind == "block"}
        rows: dict[tuple[str, int], torch.Tensor] = {}
        at = 0
        for run in runs:
            for index in run.kept:
                segment = self.recorder.segments[run.segment.handle]
                own = self.recorder.threads[segment.thread].segments
                earlier = own[: own.index(segment.handle)]
                num_before = sum(len(self.recorder.segments[handle].tokens) for handle in earlier)
                rows[segment.thread, num_before + run.start + index] = logits[at].clone()
                at += 1
        self.seen.append((held, rows))
        return logits


def forced(lm: LM, text: str, method: Any = "auto", **params: Any) -> Passes:
    """A run that is made to write a text, its spans in the order the model likes best."""
    trace = maker_of(lm).parse(prompt_ids(lm), text).trace
    plan = [t for s in trace.response if s.thread == "main" for t in s.tokens]
    pad, spans = lm.card.control["pad"], {}
    for s in trace.segments:
        if s.kind == "block":
            content = [t for t, o in zip(s.tokens, s.origins, strict=True) if o == "sampled"]
            spans[s.thread] = [*content, *[pad] * (s.num_passes - len(content))]
    end = min(lm.vocabulary.end_ids)

    def script(thread: str, index: int) -> int | None:
        if thread == "main":
            return plan[index] if index < len(plan) else end
        return spans[thread][index]

    passes = Passes(lm.scheduler.engine)
    lm.scheduler.engine = passes
    stream = lm.submit(PROMPT, SamplingParams(max_tokens=900, **params), script=script)
    passes.recorder = stream.request.recorder
    completion = stream.finish()
    assert completion.finish_reason == "stop"
    return passes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_training_pass_computes_what_decoding_computes_in_that_state(
    variant: str, convention: str
) -> None:
    """In every state of every round, spans of a round being done at different steps; and every
    row of main that predicts something."""
    lm = planned_lm(variant, convention)
    text = planned_text(lm, 11)
    passes = forced(lm, text, steps_ratio=0.3)
    example = example_of(lm, text)
    threads = [
        s.thread for s in maker_of(lm).parse(prompt_ids(lm), text).trace.segments
        if s.kind == "block"
    ]  # fmt: skip
    blocks = dict(zip(threads, example.is_block.nonzero()[:, 0].tolist(), strict=True))
    of_main = (~example.is_block[example.segment]).nonzero()[:, 0]
    mask, worst, checked, of_plan = lm.card.control["mask"], 0.0, set(), set()
    for held, rows in passes.seen:
        masked = torch.zeros_like(example.in_span)
        for thread, tokens in held.items():
            of_block = (example.segment == blocks[thread]).nonzero()[:, 0]
            masked[of_block] = torch.tensor([t == mask for t in tokens])
        streams = streams_of(lm, example, hide(example, masked))
        logits = logits_of(lm.model, streams.example)
        for (thread, index), theirs in rows.items():
            if thread == "main":
                row = int(of_main[index])
                of_plan.add(row)
            else:
                copy = len(example.is_block) + threads.index(thread)
                row = int((streams.example.segment == copy).nonzero()[index, 0])
                checked.add(thread)
            worst = max(worst, float((logits[row] - theirs).abs().max()))
            assert int(streams.example.targets[row]) != IGNORE
    assert checked == set(threads)
    assert of_plan == set((example.targets != IGNORE).nonzero()[:, 0].tolist())
    assert worst < TOLERANCE


# -- turns, lengths, runs --------------------------------------------------------------------------


def test_a_turn_has_noise_of_its_own_whatever_it_is_packed_with() -> None:
    steps = PackedSteps([5] * 4, BatchSize(groups=3), pack_tokens=10, epochs=3, seed=1)
    turns = [
        t for s in range(steps.num_steps) for p in Turns(steps, [5] * 4, 10).packs(s) for t in p
    ]
    assert sorted(turns) == list(range(12))
    wide = Turns(steps, [5] * 4, 100)
    assert sorted(t for s in range(wide.num_steps) for p in wide.packs(s) for t in p) == sorted(
        turns
    )
    lm = planned_lm()
    made = objective(lm, [example_of(lm, TWO_ROUNDS)])
    ids = [made.streams(turn).example.ids for turn in (0, 1, 0)]
    assert torch.equal(ids[0], ids[2])
    assert ids[0].shape != ids[1].shape or not torch.equal(ids[0], ids[1])


def test_promises_are_lengthened_anew_in_each_epoch() -> None:
    lm = planned_lm()
    example = example_of(lm, TWO_ROUNDS)
    renewed = Renewed([example], maker_of(lm), slack=0.5)
    sizes = [int(renewed.of_turn(t, generator_of(0, t)).in_span.sum()) for t in range(8)]
    assert sizes == [int(renewed.of_turn(t, generator_of(0, t)).in_span.sum()) for t in range(8)]
    assert min(sizes) >= 40
    assert len(set(sizes)) > 2
    assert all(size % 10 == 0 for size in sizes)
    longer = lengthened(TWO_ROUNDS, 10, lambda: 2)
    assert longer.count('tokens="30"') == 2
    assert 'tokens="40"' in longer
    assert Renewed([example], maker_of(lm)).of_turn(5, generator_of(0, 5)) is example


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lm("plain").save(tmp_path_factory.mktemp("models") / "base")


def config_of(base: Path, rows: Path, out: Path, **changes: Any) -> SftConfig:
    own = {
        "model": str(base), "data": [str(rows)], "out": str(out), "dialect": "planned",
        "how": "full", "dtype": "float32", "batch": 4, "epochs": 2, "checkpoint_every": 1,
    }  # fmt: skip
    return SftConfig(**{**own, **changes})


def metrics_of(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_a_resumed_run_has_the_noise_that_it_would_have_had(base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", planned_rows())
    whole = train_sft(config_of(base, rows, tmp_path / "whole", slack=0.3))
    asked = iter(range(99))
    parts = config_of(base, rows, tmp_path / "parts", slack=0.3)
    assert not train_sft(parts, should_stop=lambda: next(asked) == 2)["is_complete"]
    assert train_sft(parts)["is_complete"]
    lines = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "parts") == lines
    assert {"loss_plan", "loss_spans", "loss_masked", "loss_sync"} <= lines[0].keys()
    assert whole["train"]["illegal_targets"] == 0
    assert LM.load(whole["model"]).card.variant == "sparse"


@pytest.mark.parametrize("how", ["lora", "full"])
def test_a_run_leaves_a_model_that_plans(base: Path, tmp_path: Path, how: str) -> None:
    bad = {**planned_rows(1)[0], "annotated": span("one", "much too long a text", 10), "sample": 1}
    rows = write_rows(tmp_path / "rows.jsonl", [*planned_rows(4), bad])
    made = {"variant": "dense", "convention": "aligned", "max_steps": 1}
    summary = train_sft(config_of(base, rows, tmp_path / how, how=how, **made))
    assert summary["train"]["rejected"] == {"span-too-long": 1}
    assert "span-too-long" in (tmp_path / how / "rejects.jsonl").read_text()
    lm = LM.load(summary["model"], dtype="float32")
    assert (lm.card.variant, lm.card.convention) == ("dense", "aligned")
    completion = lm.generate("question 0", SamplingParams(max_tokens=40))[0]
    assert completion.method == "planned"


def test_an_estimate_counts_both_streams(base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", planned_rows(4))
    config = config_of(base, rows, tmp_path / "run")
    prepared = prepare(config)
    examples = prepared.train.examples
    assert prepared.num_tokens == sum(most_tokens(e) for e in examples)
    assert prepared.num_tokens > 1.3 * sum(len(e) for e in examples)
    found = estimate_of(config)
    assert found["tokens_per_epoch"] == prepared.num_tokens
    assert found["num_tokens"] == 2 * prepared.num_tokens


def test_answers_are_not_learnt_from_by_their_ids() -> None:
    """Whoever wrote them: nothing tells in which order a block was written."""
    lm = planned_lm()
    answer = Answer(
        prompt_id=prompt_id(PROMPT), text="", finish_reason="stop", ids=[], origins="",
        num_prompt_tokens=1, sequential_steps=0, completion_tokens=0, control_tokens=0,
    )  # fmt: skip
    with pytest.raises(Unsupported, match="planned writes blocks, which are learnt from annotated"):
        maker_of(lm).from_answer(prompt_ids(lm), answer)
    with pytest.raises(Unsupported, match="give annotated rows"):
        pair_examples([], [], maker_of(lm), lambda answer: [])
    maker_of(tiny_lm("pasta")).check_answers()


def test_what_does_not_fit_is_refused_by_name() -> None:
    for settings, message in (
        ({"dialect": "pasta", "variant": "dense"}, "dialect pasta writes no spans, so variant"),
        ({"dialect": "planned", "baseline": True, "slack": 0.1}, "a baseline writes no spans"),
        ({"dialect": "planned", "block": 8}, "give window too"),
        ({"dialect": "planned", "window": 8, "slack": 0.1}, "leave slack out"),
        ({"dialect": "planned", "lengths": "exact"}, "planned has tens alone"),
    ):
        with pytest.raises(ValueError, match=message):
            SftConfig(**settings)
    assert "slack" not in SftConfig(dialect="pasta").resolved
    assert SftConfig(dialect="planned", slack=0.2).resolved["slack"] == 0.2


# -- answers without a plan ------------------------------------------------------------------------


def test_windows_hold_answers_in_blocks() -> None:
    lm = planned_lm()
    made = maker_of(lm)
    ids = lm.vocabulary.encode("Paris is")
    example = made.from_window(prompt_ids(lm), "Paris is", "row", Window(24, 4))
    assert int(example.is_block.sum()) == len(ids) // 4 + 1
    assert int((example.ids == lm.card.control["sync"]).sum()) == len(ids) // 4
    assert not (example.targets != IGNORE).any()
    with pytest.raises(WindowTooSmall, match="the window 4"):
        made.from_window(prompt_ids(lm), "Paris is", "row", Window(4, 4))
    with pytest.raises(InvalidInput, match="no whole number of blocks"):
        Window(10, 4)
    with pytest.raises(Unsupported, match="writes no blocks"):
        maker_of(tiny_lm("plain")).from_window([1], "a", "row", Window(4, 4))
    assert Window(12, 4).num_blocks(12) == 3
    assert Window(16, 4).num_blocks(12) == 4


@pytest.mark.parametrize("block", [None, 8])
def test_a_window_decodes_under_the_visibility_it_is_trained_under(block: int | None) -> None:
    lm = planned_lm(window=24, block=block)
    window = Window.of(24, block)
    text = "Paris is the"
    example = maker_of(lm).from_window(prompt_ids(lm), text, "row", window)
    content = example.ids[example.in_span].tolist()

    def script(thread: str, index: int) -> int | None:
        if thread == "main":
            return None
        return content[(int(thread.rpartition(".")[2]) - 1) * window.block + index]

    method = Diffusion(24, block)
    assert method.name == "diffusion,window=24" + ("" if block is None else f",block={block}")
    params = SamplingParams(max_tokens=100)
    completion = lm.submit(PROMPT, params, method=method, script=script).finish()
    assert (completion.text, completion.finish_reason) == (text, "stop")
    trace = completion.trace
    steps = completion.usage.sequential_steps
    assert steps == trace.critical_path_steps == len(content)  # a pass a token, and no other
    ids, positions = flat_tokens(trace), flat_positions(trace)
    assert torch.equal(ids, example.ids)
    assert torch.equal(positions, example.positions)
    assert torch.equal(dense_mask(trace), Batch.of([example]).visible())


def test_diffusion_is_spelt_like_other_methods() -> None:
    method = get_method("diffusion,window=24,block=8", "planned")
    assert (method, method.name) == (Diffusion(24, 8), "diffusion,window=24,block=8")
    for text, message in (
        ("diffusion", "needs a window"),
        ("diffusion,window=8,window=8", "each once"),
        ("diffusion,window=x", "window=N"),
        ("diffusion,budget=8", "window=N"),
        ("diffusion,window=10,block=4", "no whole number"),
    ):
        with pytest.raises(InvalidInput, match=message):
            get_method(text, "planned")
    with pytest.raises(UnknownName, match="diffusion"):
        get_method("diffusion,window=8", "pasta")


def test_a_model_that_writes_no_blocks_has_no_diffusion() -> None:
    lm = tiny_lm("plain")
    with pytest.raises(Unsupported, match="needs a model that writes blocks"):
        lm.submit(PROMPT, method=Diffusion(8))
    short = SamplingParams(max_tokens=4)
    assert planned_lm(window=8).generate(PROMPT, short)[0].finish_reason == "length"


# -- it learns -------------------------------------------------------------------------------------


def test_training_teaches_to_plan_and_to_fill(tmp_path: Path) -> None:
    """A model from scratch has a row by heart, and writes all its spans at once."""
    text = f"{span('one', 'part', 10)}{span('two', 'second', 20)}<sync/>{span('sum', 'done', 10)}"
    trainee = make_tiny(
        "tiny-1m", sorted(set("question 0 part of it second done")), dialect="planned"
    )
    maker = trainee.maker()
    example = maker.from_annotated(trainee.encode_prompt("question 0"), text)
    made = Planned(Renewed([example] * 4), mask=trainee.card.control["mask"], shifted=True, seed=0)
    packed = PackedSteps([len(example)] * 4, BatchSize(groups=4), pack_tokens=900, epochs=130)
    settings = LoopSettings(schedule=Schedule(3e-3, warmup=5), checkpoint_every=None)
    Loop(trainee.model, made, Turns(packed, [len(example)] * 4, 900), settings, tmp_path).run()
    lm = LM.wrap(trainee.model, trainee.tokenizer, card=trainee.card, pool_slots=512)
    completion = lm.generate("question 0", SamplingParams(max_tokens=200))[0]
    assert completion.text == "partseconddone"
    assert [t.topic for t in completion.threads] == [None, "one", "two", "sum"]
    assert completion.usage.sequential_steps == completion.threads[0].num_tokens + 20 + 10
