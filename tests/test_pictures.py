"""Pictures: the matrix is `visible`, the marks are what happened, and any trace can be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import make_request, run_all, scheduler_for
from stubs import StubEngine

from stretto import pictures
from stretto.masks import dense_mask
from stretto.recorder import MAIN, Recorder
from stretto.runtime import events
from stretto.runtime.request import Request
from stretto.trace import derived_steps

DRAW = Path(__file__).parents[1] / "docs" / "draw.py"


def decoded(seed: int) -> Request:
    request = make_request(seed)
    run_all(scheduler_for(StubEngine(vocab_size=96), 1024), [request])
    return request


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_matrix_is_the_mask_a_model_is_trained_under(seed: int) -> None:
    trace = decoded(seed).recorder.freeze()
    assert np.array_equal(pictures.visibility(trace), dense_mask(trace).numpy())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_marks_are_the_forks_and_evictions_that_happened(seed: int) -> None:
    """What is read off the trace against the events of the run. An effect that is undone before
    the thread's next token leaves no mark, so there are at most as many marks as events."""
    request = decoded(seed)
    trace = request.recorder.freeze()
    found = pictures.marks(trace)
    forks = {(m.parent, m.child) for m in found if isinstance(m, pictures.ForkMark)}
    started = {(t.parent, t.name) for t in trace.threads if t.parent is not None}
    assert forks == started
    log = request.log.events
    evictions = [(m.thread, m.evicted) for m in found if isinstance(m, pictures.EvictMark)]
    happened = [e for e in log if isinstance(e, events.Evicted) and e.num_tokens]
    assert len(evictions) == len(set(evictions)) <= len(happened)
    joined = {(m.parent, m.child) for m in found if isinstance(m, pictures.JoinMark)}
    told = {(e.thread, child) for e in log if isinstance(e, events.Joined) for child in e.children}
    grandchildren = {(p, c) for p, c in joined if (p, c) not in told}
    assert all(any(c.startswith(k + ".") for _, k in told) for _, c in grandchildren)


def test_steps_are_measured_where_there_are_any() -> None:
    trace = decoded(3).recorder.freeze()
    assert pictures.step_rows(trace) == [list(s.steps) for s in trace.segments]
    draw = load_draw()
    parsed, _ = draw.tea()
    assert pictures.step_rows(parsed) == derived_steps(parsed)


def test_marks_of_a_known_trace() -> None:
    trace, _ = load_draw().tea()
    by_kind: dict[type, list[Any]] = {}
    for mark in pictures.marks(trace):
        by_kind.setdefault(type(mark), []).append(mark)
    steps = {f"{MAIN}.1": (11, 34), f"{MAIN}.2": (17, 39), f"{MAIN}.3": (23, 45)}
    assert {m.child: m.step for m in by_kind[pictures.ForkMark]} == {
        child: first for child, (first, _) in steps.items()
    }
    assert {m.child: m.step for m in by_kind[pictures.JoinMark]} == {
        child: last for child, (_, last) in steps.items()
    }
    assert {m.segment for m in by_kind[pictures.JoinMark]} == {8}
    assert pictures.EvictMark not in by_kind


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_any_trace_can_be_drawn(tmp_path: Path, seed: int, suffix: str) -> None:
    trace = decoded(seed).recorder.freeze()
    labels = [str(t) for s in trace.segments for t in s.tokens]
    path = tmp_path / f"picture.{suffix}"
    draw = (pictures.lanes_figure, pictures.matrix_figure, pictures.overview_figure)[seed % 3]
    figure = draw(trace) if draw is pictures.lanes_figure else draw(trace, labels)
    pictures.save(figure, path)
    assert path.stat().st_size > 1000


def test_a_trace_without_tokens_can_be_drawn(tmp_path: Path) -> None:
    trace = Recorder([], "main").freeze()
    pictures.save(pictures.overview_figure(trace), tmp_path / "empty.png")


def test_colours_differ_and_main_has_its_own() -> None:
    trace, _ = load_draw().tea()
    colours = pictures.thread_colours(trace)
    assert len(set(colours.values())) == len(trace.threads) == 4
    assert colours[MAIN] == pictures.MAIN_COLOUR


def test_the_pictures_of_the_docs_are_all_drawn_by_docs_draw() -> None:
    committed = {path.stem for path in (DRAW.parent / "pictures").iterdir()}
    draw = load_draw()
    photographs = {"page-dark", "page-light"}  # by docs/photograph.py, of the page
    assert committed == set(draw.PICTURES) | photographs
    for figure in draw.PICTURES.values():
        figure()


def load_draw() -> Any:
    spec = importlib.util.spec_from_file_location("draw", DRAW)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
