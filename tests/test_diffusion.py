"""Method `diffusion`: what is fed, and which models are run by it and by nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_model
from hypothesis import given, settings
from orchestras import run_all, scheduler_for
from planned_kit import PROMPT, planned_lm
from plans import (
    CONTROL,
    MASKS,
    NUM_SLOTS,
    TOLERANCE,
    VOCABULARY,
    Snapshots,
    conventions,
    counted,
    knobs,
    seeds,
    worst_gap,
)
from tiny_lms import tiny_lm

from stretto import LM, SamplingParams, compare
from stretto.dialects.planned import PlannedSettings
from stretto.engines.hf import HFEngine
from stretto.errors import InvalidInput, Unsupported
from stretto.methods import Method
from stretto.methods.diffusion import Diffusion, DiffusionSession, Window
from stretto.methods.sequential import Sequential
from stretto.runtime.request import Request
from stretto.tokens import ModelCard
from stretto.train.config import SftConfig
from stretto.train.sft import open_for


def request_of(
    window: Window, num_tokens: int = 10**6, *, convention: str = "shifted", **params: Any
) -> Request:
    """One whose answer has so many tokens, or is as long as the window; the rest is filler."""

    def script(thread: str, index: int) -> int | None:
        if thread == "main":
            return None
        at = (int(thread.rpartition(".")[2]) - 1) * window.block + index
        return CONTROL["pad"] if at >= num_tokens else None

    shape = PlannedSettings("sparse", convention, unit=1)
    return Request(
        [5, 6, 7],
        DiffusionSession(MASKS, shape, window),
        SamplingParams(**{"max_tokens": 500, **params}),
        decode=VOCABULARY.decode,
        end_ids=VOCABULARY.end_ids,
        max_positions=512,
        script=script,
    )


# -- what is fed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 1), (3, 1), (4, 2), (7, 2), (11, 3), (12, 3), (10**6, 3)]
)
def test_no_pass_is_fed_but_those_that_write(num_tokens: int, num_blocks: int) -> None:
    """The prompt, and a pass a token: a block that is written is fed once more with the sync and
    the first masks of the next one; after the last one nothing is fed."""
    request = request_of(Window(12, 4), num_tokens)
    engine = counted(request)
    assert request.finish_reason == "stop"
    assert engine.num_passes == 1 + 4 * num_blocks
    assert engine.num_logit_rows == 1 + (4 + 3 + 2 + 1) * num_blocks
    commits = num_blocks - 1
    assert engine.num_rows == 3 + 4 * 6 * num_blocks + (6 + 1) * commits
    trace = request.recorder.freeze()
    assert trace.critical_path_steps == 4 * num_blocks
    assert max(s for x in trace.response for s in x.steps if s is not None) == 4 * num_blocks
    syncs = [x for x in trace.response if x.tokens == (CONTROL["sync"],)]
    assert [x.origins for x in syncs] == [("injected",)] * commits
    assert request.num_drawn == 4 * num_blocks


@settings(max_examples=8, deadline=None)
@given(seed=seeds, convention=conventions)
def test_every_state_is_one_masked_pass(seed: int, convention: str) -> None:
    model = tiny_model("llama")
    engine = Snapshots(HFEngine(model, NUM_SLOTS))
    engine.request = request = request_of(
        Window(12, 4), seed=seed, convention=convention, **knobs(seed) | {"early_finish": False}
    )
    run_all(scheduler_for(engine, NUM_SLOTS), [request])
    kinds = [sorted(run.segment.kind for run in runs) for _, _, runs, _ in engine.passes]
    is_whole = len([s for s in request.recorder.segments if s.kind == "block"]) == 3
    assert kinds.count(["block", "block", "causal"]) == 2 or not is_whole
    assert worst_gap(model, engine) < TOLERANCE


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(3, 0), (4, 1), (7, 1), (8, 2), (12, 3)])
def test_blocks_are_paid_for_and_syncs_are_not(max_tokens: int, num_blocks: int) -> None:
    request = request_of(Window(12, 4), max_tokens=max_tokens)
    counted(request)
    assert request.finish_reason == ("stop" if num_blocks == 3 else "length")
    assert request.num_drawn == 4 * num_blocks


# -- which models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm() -> LM:
    return planned_lm(window=24, block=8)


@pytest.mark.parametrize("method", ["auto", "diffusion,window=24,block=8", Diffusion(24, 8)])
def test_a_model_of_windows_answers_in_them(lm: LM, method: str | Method) -> None:
    (found,) = lm.generate(PROMPT, SamplingParams(threshold=0.0), method=method)
    assert found.method == "diffusion,window=24,block=8"
    blocks = [s for s in found.trace.segments if s.kind == "block"]
    assert {len(s) for s in blocks} == {8 + 2}
    assert found.usage.sequential_steps == len(blocks) <= 3


@pytest.mark.parametrize(
    "method",
    [
        "planned", "sequential", "dense", "sot", "window,budget=64", "diffusion,window=24",
        "diffusion,window=48,block=8", Diffusion(16, 8), Sequential(),
    ],
)  # fmt: skip
def test_a_model_of_windows_is_run_in_no_other_way(lm: LM, method: str | Method) -> None:
    with pytest.raises(Unsupported, match=r"trained for 'diffusion,window=24,block=8'"):
        lm.prepare(PROMPT, method=method)


@pytest.mark.parametrize("method", ["diffusion,window=24", Diffusion(24, 8)])
def test_a_model_that_plans_is_not_run_in_windows(method: str | Method) -> None:
    with pytest.raises(Unsupported, match="tiny was trained to plan"):
        planned_lm().prepare(PROMPT, method=method)


def test_a_window_of_one_block_is_one_however_it_is_written() -> None:
    for card in ({"window": 24}, {"window": 24, "block": 24}):
        own = planned_lm(**card)
        assert own.find_method().name == "diffusion,window=24"
        own.prepare(PROMPT, method=Diffusion(24, 24))


def test_a_saved_model_keeps_its_window(lm: LM, tmp_path: Path) -> None:
    again = LM.load(lm.save(tmp_path / "m"), dtype="float32", pool_slots=256)
    assert (again.card.window, again.card.block) == (24, 8)
    assert again.find_method("auto") == Diffusion(24, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 8}, "block 8 is the part of a window"),
        ({"window": 10, "block": 4}, "no whole number of blocks of 4"),
        ({"window": 0}, "window is 0"),
        ({"window": 24, "dialect": "plain", "control": {}, "tokens": {}, "variant": None,
          "convention": None}, "dialect plain writes no blocks"),
    ],
)  # fmt: skip
def test_a_window_that_makes_no_sense_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    card = planned_lm().card.model_copy(update=change)
    with pytest.raises(InvalidInput, match=message):
        ModelCard.load(card.save(tmp_path).parent)


def test_training_writes_the_window_into_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "stretto.train.sft.open_trainee", lambda name, **options: asked.append(options["settings"])
    )
    open_for(SftConfig(dialect="planned", window=24, block=8))
    open_for(SftConfig(dialect="planned"))
    open_for(SftConfig(dialect="pasta"))
    found = [(own.get("window", "unset"), own.get("block", "unset")) for own in asked]
    assert found == [(24, 8), (None, None), ("unset", "unset")]


# -- settings that nobody reads --------------------------------------------------------------------

THREADS = {"max_thread_tokens": 5, "max_forks": 3}
WRITING = {"steps_ratio": 0.5, "threshold": 0.5, "order": "margin", "early_finish": True}
PLANNING = {"max_rounds": 2, "length_scale": 2.0}
EVERY = {**THREADS, **WRITING, **PLANNING}
READ: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"auto": {}, "sequential": {}, "dense": {}, "sot": THREADS}
    | {f"{name},budget=64": {} for name in ("window", "streaming_llm", "random_evict")},
    "pasta": {"auto": THREADS, "pasta": THREADS, "sequential": {}},
    "apar": {"auto": THREADS},
    "tip": {"auto": {}},
    "pasta+tip": {"auto": THREADS},
    "planned": {"auto": EVERY, "sequential": {}, "sot": THREADS},
}


@pytest.mark.parametrize("dialect", READ)
def test_a_setting_that_a_method_does_not_read_is_refused(dialect: str) -> None:
    own = tiny_lm(dialect)
    for method, read in READ[dialect].items():
        name = re.escape(own.find_method(method).name)
        for field, value in EVERY.items():
            params = SamplingParams(**{field: value})
            if field in read:
                own.prepare("hi", params, method=method)
            else:
                with pytest.raises(Unsupported, match=rf"^{field} .* by method '{name}', but by"):
                    own.prepare("hi", params, method=method)


def test_so_is_one_of_plans_where_nothing_is_planned(lm: LM) -> None:
    lm.prepare(PROMPT, SamplingParams(order="margin", early_finish=True, threshold=0.5))
    for field, value in (THREADS | PLANNING).items():
        with pytest.raises(Unsupported, match=rf"^{field} .*'diffusion,window=24,block=8', but by"):
            lm.prepare(PROMPT, SamplingParams(**{field: value}))


def test_a_method_of_ones_own_says_what_it_reads() -> None:
    class Own(Sequential):
        reads = ("max_forks",)

    own, params = tiny_lm(), SamplingParams(max_forks=2)
    own.prepare("hi", params, method=Own())
    with pytest.raises(Unsupported, match="max_forks 2 is not read by method 'sequential'"):
        own.prepare("hi", params, method=Sequential())


def test_a_comparison_keeps_the_settings_of_the_method_to_it() -> None:
    params = SamplingParams(max_tokens=20, steps_ratio=0.5, max_forks=2)
    ours, baseline = compare(planned_lm(unit=1), PROMPT, params)
    assert (ours.method, baseline.method) == ("planned", "sequential")
