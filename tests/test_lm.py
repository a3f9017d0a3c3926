"""`LM` as a Python user meets it: wrap, save, load, generate, stream."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from tiny_lms import tiny_lm, tiny_tokenizer

from stretto import LM, SamplingParams, compare
from stretto.errors import InvalidInput, PromptTooLong, UnknownName
from stretto.runtime import events


def test_a_saved_model_loads_with_its_dialect_and_gives_the_same_answer(tmp_path: Path) -> None:
    lm = tiny_lm("pasta")
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    before = lm.generate("hello there", params)[0]
    folder = lm.save(tmp_path / "model")
    loaded = LM.load(folder, dtype="float32", pool_slots=1024)
    after = loaded.generate("hello there", params)[0]
    assert loaded.card == lm.card
    assert after.annotated == before.annotated
    assert after.method == "pasta"
    with pytest.raises(InvalidInput, match="not an empty folder"):
        lm.save(folder)
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_the_pasta_models_baseline_never_draws_a_control_token() -> None:
    lm = tiny_lm("pasta")
    control = set(lm.vocabulary.control.values())
    params = SamplingParams(max_tokens=200, temperature=3.0)
    answers = lm.generate("hello", params, method="sequential", n=3)
    drawn = {t for a in answers for s in a.trace.response for t in s.tokens}
    assert not drawn & control
    assert len({a.text for a in answers}) == 3


def test_events_tell_the_whole_story() -> None:
    lm = tiny_lm("pasta")
    stream = lm.stream("hello", SamplingParams(max_tokens=120, temperature=2.0, seed=1))
    seen = list(stream)
    assert [e.type for e in seen[-2:]] == ["usage", "done"]
    done = seen[-1]
    assert isinstance(done, events.Done)
    assert done.text == stream.completion.text
    started = [e.thread for e in seen if isinstance(e, events.ThreadStart)]
    assert started == [t.id for t in stream.completion.threads]
    assert document(seen) == done.text
    for event in seen:
        assert events.to_json(event)["type"] == event.type


def document(seen: list[events.Event]) -> str:
    """Document order from events alone: each thread's text where its parent stood."""
    texts: dict[str, str] = {}
    children: dict[str, list[tuple[int, str]]] = {}
    for event in seen:
        if isinstance(event, events.ThreadStart):
            texts[event.thread] = ""
            if event.parent is not None:
                children.setdefault(event.parent, []).append((event.at, event.thread))
        elif isinstance(event, events.Token | events.ThreadEnd):
            texts[event.thread] += event.text

    def whole(thread: str) -> str:
        text, at = "", 0
        for place, child in children.get(thread, []):
            text += texts[thread][at:place] + whole(child)
            at = place
        return text + texts[thread][at:]

    return whole("main")


def test_leaving_a_stream_early_frees_everything() -> None:
    lm = tiny_lm()
    with lm.stream("hello", SamplingParams(max_tokens=500)) as stream:
        for event in stream:
            if isinstance(event, events.Token) and event.index >= 5:
                break
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.usage.completion_tokens >= 1
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def test_compare_fills_in_both_speedups() -> None:
    lm = tiny_lm("pasta")
    params = SamplingParams(max_tokens=24, temperature=1.0)
    ours, baseline = compare(lm, "hello", params, pairs=2)
    assert baseline.method == "sequential"
    assert baseline.speedup.parallelism == 1.0
    tokens = sum(t.num_tokens for t in baseline.threads)
    assert ours.speedup.theoretical == tokens / ours.usage.sequential_steps
    assert ours.speedup.realized is not None
    assert ours.speedup.realized > 0


def test_json_has_the_keys_of_the_interface() -> None:
    completion = tiny_lm().generate("hello", SamplingParams(max_tokens=5))[0]
    answer = completion.to_json()
    parts = ("usage", "live_kv", "timing", "speedup")
    assert {name: answer[name] for name in parts} == {
        name: asdict(getattr(completion, name)) for name in parts
    }
    assert answer["threads"] == [asdict(thread) for thread in completion.threads]
    assert list(answer)[:6] == ["text", "finish_reason", "method", "model", "engine", "seed"]
    assert set(answer["usage"]) >= {
        "prompt_tokens",
        "completion_tokens",
        "control_tokens",
        "sequential_steps",
    }
    assert answer["speedup"] == {"parallelism": 1.0, "theoretical": None, "realized": None}


def test_bad_requests_are_refused_before_anything_is_decoded() -> None:
    lm = tiny_lm()
    with pytest.raises(InvalidInput, match="empty"):
        lm.generate(" \n ")
    with pytest.raises(InvalidInput, match="empty"):
        lm.generate([{"role": "user", "content": ""}])
    with pytest.raises(UnknownName, match="sequential"):
        lm.generate("hi", method="sequentiall")
    with pytest.raises(UnknownName):
        lm.generate("hi", method="pasta")
    with pytest.raises(PromptTooLong, match="512 positions"):
        lm.generate("word " * 600)
    with pytest.raises(InvalidInput, match="n must be"):
        lm.generate("hi", n=0)
    assert lm.generate([]) == []
    assert not lm.scheduler.running
    assert not lm.scheduler.waiting


def test_wrap_refuses_what_does_not_fit() -> None:
    import copy

    from conftest import tiny_model

    tokenizer = tiny_tokenizer()
    model = copy.deepcopy(tiny_model("llama", vocab_size=len(tokenizer)))
    with pytest.raises(UnknownName):
        LM.wrap(model, tokenizer, dialect="pastaa")
    with pytest.raises(InvalidInput, match="pool_slots"):
        LM.wrap(model, tokenizer, pool_slots=0)
    with pytest.raises(InvalidInput, match="page_size"):
        LM.wrap(model, tokenizer, page_size=0)
    with pytest.raises(InvalidInput, match="GiB"):
        LM.wrap(model, tokenizer, pool_slots=10**14)
