"""Methods with a budget as users meet them: names and text, Python, `stretto run`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_lms import tiny_lm

from stretto import LM, SamplingParams, compare
from stretto.cli import main
from stretto.errors import InvalidInput, UnknownName
from stretto.methods import EVICTING, METHODS, check_method, get_method, is_for_any_model
from stretto.methods.evicting import EvictingMethod
from stretto.methods.paged_h2o import PagedH2O
from stretto.methods.random_evict import RandomEvict
from stretto.methods.streaming_llm import StreamingLLM
from stretto.methods.window import SlidingWindow

SPELLED = [
    ("window,budget=8", SlidingWindow(budget=8)),
    ("random_evict,budget=0.5,pin_prompt", RandomEvict(budget=0.5, pin_prompt=True)),
    ("paged_h2o,budget=64,page_tokens=4", PagedH2O(budget=64, page_tokens=4)),
    (
        "streaming_llm,budget=64,pin_prompt,page_tokens=4,sinks=0,reindexed",
        StreamingLLM(budget=64, pin_prompt=True, page_tokens=4, sinks=0, reindexed=True),
    ),
]


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny_lm("pasta")


@pytest.mark.parametrize(("text", "method"), SPELLED)
def test_a_method_is_its_text(text: str, method: EvictingMethod) -> None:
    assert method.name == text
    assert get_method(text, "plain") == method
    assert get_method(method, "plain") is method
    assert is_for_any_model(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window", "'window' needs a budget .* 'window,budget=256'"),
        ("window,pin_prompt", "needs a budget"),
        ("window,budget=8,sinks=4", "'window' has no setting 'sinks'; streaming_llm may have it"),
        ("sot,budget=8", "'sot' has no setting 'budget'; streaming_llm, .* may have it"),
        ("sequential,pin_prompt", "has no setting 'pin_prompt'"),
        ("window,budget=8,budget=9", "'budget' twice"),
        ("window,budget", "a part 'budget'"),
        ("window,budget=8,pin_prompt=yes", "a part 'pin_prompt=yes'"),
        ("window,budget=8,size=3", "a part 'size=3'"),
        ("window,budget=8,page_tokens=x", "page_tokens is 'x'"),
        ("window,budget=8,page_tokens=0", "page_tokens must be at least 1"),
        ("window,budget=8,", "a part ''"),
        ("window,budget=none", "budget of 'none' is no number"),
    ],
)
def test_what_is_no_method_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        check_method(text)


def test_an_unknown_method_is_told_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="windo"):
        check_method("windo,budget=8")


@pytest.mark.parametrize("name", ["dense", *EVICTING])
def test_every_method_answers_with_control_tokens_masked(lm: LM, name: str) -> None:
    assert name in METHODS
    text = name if name == "dense" else f"{name},budget=64,page_tokens=8"
    params = SamplingParams(max_tokens=90, temperature=3.0)
    answers = lm.generate("hello", params, method=text, n=2)
    control = set(lm.vocabulary.control.values())
    for answer in answers:
        assert answer.method == text
        assert len(answer.threads) == 1
        assert not {t for s in answer.trace.response for t in s.tokens} & control
        drawn = answer.threads[0].num_tokens
        assert answer.live_kv.peak <= (64 if name != "dense" else 10**9)
        assert answer.live_kv.dense_mean == answer.usage.prompt_tokens + (drawn + 1) / 2
    lm.scheduler.check_integrity()
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def test_dense_is_sequential_decoding(lm: LM) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0)
    (dense,) = lm.generate("hello", params, method="dense")
    (sequential,) = lm.generate("hello", params, method="sequential")
    assert dense.text == sequential.text
    assert dense.live_kv.mean == dense.live_kv.dense_mean


def test_a_large_budget_changes_nothing(lm: LM) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0)
    texts = {
        lm.generate("hello", params, method=f"{name},budget=500")[0].text
        for name in ("window", "streaming_llm", "random_evict")
    }
    assert texts == {lm.generate("hello", params, method="dense")[0].text}


def test_a_budget_is_refused_before_anything_is_decoded(lm: LM) -> None:
    with pytest.raises(InvalidInput, match="budget of 4 cannot hold"):
        lm.generate("a prompt that is pinned", method="window,budget=4,pin_prompt")
    assert not lm.scheduler.waiting


def test_a_method_is_compared_with_sequential_decoding(lm: LM) -> None:
    params = SamplingParams(max_tokens=20)
    ours, other = compare(lm, "hello", params, method=SlidingWindow(budget=16))
    assert (ours.method, other.method) == ("window,budget=16", "sequential")
    assert ours.speedup.realized is not None


# --- stretto run ---------------------------------------------------------------------------------


@pytest.fixture
def run(lm: LM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`run(*arguments)` on a tiny model: status, stdout, stderr, and what was asked of `load`."""
    asked: dict[str, Any] = {}

    def load(model: str, **options: Any) -> LM:
        asked.update(options)
        return lm

    monkeypatch.setattr("stretto.cli.answer.load", load)

    def invoke(*arguments: str) -> tuple[int, str, str, dict[str, Any]]:
        code = main(["run", "hello", "--max-tokens", "40", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, asked

    return invoke


def test_run_takes_a_budget(run: Any) -> None:
    code, out, _, asked = run("--method", "streaming_llm", "--budget", "32", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["method"] == "streaming_llm,budget=32"
    assert answer["live_kv"]["peak"] == 32
    assert asked["extras"] == ()


def test_run_takes_all_settings(run: Any) -> None:
    shared = ["--budget", "50%", "--pin-prompt", "--policy-page", "2"]
    own = ["--method", "streaming_llm", "--sinks", "2", "--reindexed"]
    code, out, _, asked = run(*own, *shared, "--json")
    assert code == 0
    expected = "streaming_llm,budget=0.5,pin_prompt,page_tokens=2,sinks=2,reindexed"
    assert json.loads(out)["method"] == expected
    assert asked["extras"] == ("re-indexed positions",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--method window", "needs a budget"),
        ("--budget 32", "method 'auto' has no setting 'budget'"),
        ("--method window --budget 32 --sinks 3", "has no setting 'sinks'"),
        ("--method window --budget many", "budget of 'many'"),
        ("--method window --budget 0", "budget of 0"),
        ("--method paged_h2o --budget 63", "63 cannot hold the 64"),
        ("--method window --budget 3 --pin-prompt", "3 cannot hold the"),
        ("--method window,budget=3 --budget 4", "'budget' twice"),
    ],
)
def test_run_refuses_in_one_line(run: Any, arguments: str, words: str) -> None:
    code, out, err, _ = run(*arguments.split())
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
