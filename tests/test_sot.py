"""Skeleton-of-Thought: reading outlines, threads over one prefix, the fallback to plain answers."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import Recording, largest_gap
from tiny_lms import tiny_tokenizer

from stretto import LM, SamplingParams
from stretto.errors import InvalidInput, Unsupported
from stretto.methods.outline import MAX_TITLE_WORDS, OutlineReader, outline_points
from stretto.methods.sot import MAX_POINTS, MIN_POINT_TOKENS, SkeletonOfThought
from stretto.recorder import MAIN
from stretto.runtime import events
from stretto.trace import is_drawn

QUESTION = "How?"
THREE = "1. Warm up\n2. Go slow\n3. Rest"
LONG = "of this there is much more to say."  # more tokens than a point must have
EIGHT = "one two three four five six seven eight"

OUTLINES = [
    ("1. a\n2. b\n3. c", ["a", "b", "c"]),
    ("1) a\n2) b", ["a", "b"]),
    ("- a\n* b\n+ c\n• d", ["a", "b", "c", "d"]),
    ("1.a\n2.  b", ["a", "b"]),
    ("1. **Bold**\n2. __Under__: why\n3. **Set off:** more", ["Bold", "Under", "Set off"]),
    ("**1. Bold line**\n### 2. Heading", ["Bold line", "Heading"]),
    ("1. a 2. b 3. c", ["a", "b", "c"]),
    ("1. a\n2. b 3. c\n4. d", ["a", "b", "c", "d"]),
    ("1. version 5. of it", ["version 5. of it"]),
    ("1. a\n1.1 sub\n2. b\n2.1. sub", ["a", "b"]),
    ("1. a\n   - sub\n\tsub\n2. b", ["a", "b"]),
    ("1.\nb\n2. c", []),
    ("1. a\n2.\n3. c", ["a", "c"]),
    ("1. a\n2. ***\n3. c", ["a", "c"]),
    ("1. a\n2. A\n3. c", ["a"]),
    ("1. a\n\n2. b\n\n3. c", ["a", "b", "c"]),
    ("1. a\n2. b\n\n\n3. c", ["a", "b"]),
    ("1. a\n2. b\n\n1. c", ["a", "b"]),
    ("1. a\n2. b\nThat is all.\n3. c", ["a", "b"]),
    ("Here is the outline:\n\n1. a\n2. b", ["a", "b"]),
    ("Paris.\n1. a\n2. b", []),
    ("1. Mix: stir it well\n2. Step 2: go", ["Mix", "Step 2: go"]),
    ("1. one two three four five six seven eight nine ten\n2. b", []),
    ("1. a\n2. one two three four five six seven eight nine", ["a", EIGHT]),
    ("1. Straße 😀\r\n2. 準備する\r\n3. <|im_end|>", ["Straße 😀", "準備する", "<|im_end|>"]),
    ("1. Why?\n2. Is it safe!", ["Why?", "Is it safe!"]),
    ("-5 degrees\n", []),
    ("1.5 litres", []),
    ("", []),
    ("\n\n", []),
]  # fmt: skip


@pytest.mark.parametrize(("outline", "points"), OUTLINES)
def test_points_of_an_outline(outline: str, points: list[str]) -> None:
    assert outline_points(outline) == points
    reader = OutlineReader()
    for character in outline:
        reader.push(character)
    assert reader.finish() == points


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(list("12.)-*•# \n\tab:é_")), max_size=60) | st.text(max_size=60))
def test_reading_an_outline_is_total(outline: str) -> None:
    points = outline_points(outline)
    assert len({p.casefold() for p in points}) == len(points)
    for point in points:
        assert "\n" not in point
        assert any(c.isalnum() for c in point)
        assert len(point.split()) <= MAX_TITLE_WORDS


@pytest.mark.parametrize(
    ("outline", "used"),
    [
        ("1. a\n2. b\n3. a\nxxxx", "1. a\n2. b\n3. a\n"),
        ("1. a\n2. b\nThat is all", "1. a\n2. b\nT"),
        ("1. a\n2. b\n\nThat is all", "1. a\n2. b\n\nT"),
        ("1. a\n2. b\n\n\nxxxx", "1. a\n2. b\n\n\n"),
        ("1. a\n2. b\n3. c\n4. d\n5. e", "1. a\n2. b\n3. c\n4. d\n"),
        ("The answer is\nxxxx", "The answer is\n"),
        ("x" * 100, "x" * 81),
    ],
)
def test_an_outline_is_over_early(outline: str, used: str) -> None:
    reader = OutlineReader(max_points=4)
    read = ""
    for character in outline:
        if reader.is_over:
            break
        reader.push(character)
        read += character
    assert read == used


def test_a_line_holds_a_whole_title() -> None:
    reader = OutlineReader()
    reader.push("1. Mix")
    assert not reader.has_title
    reader.push(":")
    assert reader.has_title
    reader.push("\n2. one two three four five six seven eight")
    assert not reader.has_title
    reader.push(" nine")
    assert reader.has_title


def test_an_incomplete_last_line_counts_only_alone() -> None:
    for outline, points in [("1. a\n2. b\n3. hal", ["a", "b"]), ("1. a", ["a"])]:
        reader = OutlineReader()
        reader.push(outline)
        assert reader.finish(is_complete=False) == points


# -- on a model --------------------------------------------------------------------------------


@cache
def shared_lm() -> LM:
    return make_lm()


def make_lm(*, chat: bool = True, positions: int = 4096, slots: int = 4096) -> LM:
    tokenizer = tiny_tokenizer(chat)
    model = tiny_model(
        "llama",
        vocab_size=len(tokenizer),
        eos_token_id=None,
        max_position_embeddings=positions,
    )
    return LM.wrap(copy.deepcopy(model), tokenizer, name="tiny", pool_slots=slots)


class Play:
    """A script: what each thread writes, then the end of the sequence."""

    def __init__(self, lm: LM, texts: dict[str, str]) -> None:
        self.end = min(lm.vocabulary.end_ids)
        self.ids = {name: lm.vocabulary.encode(text) for name, text in texts.items()}

    def __call__(self, thread: str, index: int) -> int | None:
        ids = self.ids.get(thread, [])
        return ids[index] if index < len(ids) else self.end


def play(texts: dict[str, str], lm: LM | None = None, prompt: Any = QUESTION, **params: Any) -> Any:
    lm = lm or shared_lm()
    params = {"max_tokens": 1000, **params}
    stream = lm.submit(prompt, SamplingParams(**params), method="sot", script=Play(lm, texts))
    completion = stream.finish()
    check_empty(lm)
    return completion


def check_empty(lm: LM) -> None:
    lm.scheduler.check_integrity()
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def points(**texts: str) -> dict[str, str]:
    return {f"main.{name[1:]}": text for name, text in texts.items()}


def test_points_are_threads_and_the_outline_is_no_text() -> None:
    answer = play({MAIN: THREE} | points(p1=" A " + LONG, p2=" B " + LONG, p3=" C " + LONG))
    assert answer.text == f"1. Warm up: A {LONG}\n2. Go slow: B {LONG}\n3. Rest: C {LONG}"
    assert answer.finish_reason == "stop"
    main, *threads = answer.threads
    assert main.text == ""
    assert [t.topic for t in threads] == ["Warm up", "Go slow", "Rest"]
    assert [t.parent for t in threads] == [MAIN] * 3
    assert {t.finish_reason for t in answer.threads} == {"stop"}


def test_counts_and_steps_follow_the_definitions() -> None:
    lm = shared_lm()
    answer = play({MAIN: THREE} | points(p1=" A " + LONG, p2=" BB " + LONG, p3=" C " + LONG))
    outline = len(lm.vocabulary.encode(THREE))
    drawn = [len(lm.vocabulary.encode(f" {x} {LONG}")) for x in ("A", "BB", "C")]
    assert answer.usage.control_tokens == outline == answer.threads[0].num_tokens
    assert answer.usage.completion_tokens == sum(drawn)
    assert answer.usage.cut_tokens == answer.usage.capped_threads == 0
    # The step at which main draws its end of sequence counts nothing and is still taken.
    assert answer.usage.sequential_steps == outline + 1 + max(drawn)
    for thread, count in zip(answer.threads[1:], drawn, strict=True):
        assert (thread.num_tokens, thread.start_step) == (count, outline + 2)
        assert thread.end_step == outline + 1 + count
    assert answer.speedup.parallelism == sum(drawn) / answer.usage.sequential_steps


def test_the_prefix_is_computed_once() -> None:
    lm = make_lm()
    rows: list[int] = []
    forward = lm.engine.forward

    def counting(runs: list[Any]) -> Any:
        rows.append(sum(len(run.tokens) for run in runs))
        return forward(runs)

    lm.engine.forward = counting  # type: ignore[method-assign]
    answer = play({MAIN: THREE} | points(p1=LONG, p2=LONG, p3=LONG), lm)
    injected = sum(t.injected_tokens for t in answer.threads)
    separators = 2 * len(lm.vocabulary.encode("\n"))
    drawn = sum(t.num_tokens for t in answer.threads)
    expected = answer.usage.prompt_tokens + injected + drawn
    # A thread's last token, and what is injected after it, is fed only if others still run.
    assert expected - separators - 3 <= sum(rows) <= expected


def test_points_do_not_see_one_another() -> None:
    lm = make_lm()
    recording = lm.engine = lm.scheduler.engine = Recording(lm.engine)  # type: ignore[assignment]
    params = SamplingParams(max_tokens=60)
    main_only = Play(lm, {MAIN: THREE})
    stream = lm.submit(
        QUESTION, params, method="sot", script=lambda t, i: main_only(t, i) if t == MAIN else None
    )
    answer = stream.finish()
    trace = answer.trace
    for segment in trace.segments:
        others = {trace.segments[k].thread for k in segment.sees}
        assert others <= {MAIN, segment.thread}
    assert any(is_drawn(o) for s in trace.of_thread("main.3") for o in s.origins)
    model = lm.engine.engine.model  # type: ignore[attr-defined]
    assert largest_gap(model, stream.request, recording) < 1e-4  # type: ignore[arg-type]


def test_a_long_title_and_a_colon_end_their_line() -> None:
    answer = play({MAIN: "1. Mix:2. one two three four five six seven eight nine"})
    assert [t.topic for t in answer.threads[1:]] == ["Mix", EIGHT]
    assert answer.threads[0].injected_tokens == 2 * len(shared_lm().vocabulary.encode("\n"))


def test_a_point_is_one_line() -> None:
    more = f" {LONG}\n2. next\n3. next"
    answer = play({MAIN: "1. a\n2. b"} | points(p1=more, p2=more))
    assert answer.text == f"1. a: {LONG}\n2. b: {LONG}"
    assert answer.usage.completion_tokens == 2 * len(shared_lm().vocabulary.encode(f" {LONG}"))


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (" One is 1.5 long. Two is e.g this! Three goes on.", " One is 1.5 long. Two is e.g this!"),
        (' He said "no." She did not. More.', ' He said "no." She did not.'),
        (" Only one sentence without an end", " Only one sentence without an end"),
        (" Ends. Here.", " Ends. Here."),
    ],
)
def test_a_point_ends_where_a_third_sentence_would_begin(said: str, kept: str) -> None:
    answer = play({MAIN: "1. a\n2. b"} | points(p1=said, p2=said))
    assert answer.text == f"1. a:{kept}\n2. b:{kept}"
    assert answer.usage.capped_threads == 0


def test_a_point_says_something_first() -> None:
    lm = shared_lm()
    only_main = Play(lm, {MAIN: THREE})
    stream = lm.submit(
        QUESTION,
        SamplingParams(max_tokens=400),
        method="sot",
        script=lambda t, i: only_main(t, i) if t == MAIN else None,
    )
    answer = stream.finish()
    line_break = lm.vocabulary.encode("\n")[0]
    for thread in answer.threads[1:]:
        assert thread.num_tokens >= MIN_POINT_TOKENS
        (own,) = answer.trace.of_thread(thread.id)
        start = own.origins.index("sampled")
        assert line_break not in own.tokens[start : start + MIN_POINT_TOKENS]


def test_points_are_capped_and_counted() -> None:
    lm = shared_lm()
    answer = play({MAIN: "1. a\n2. b"} | points(p1=LONG * 20, p2=LONG), max_thread_tokens=20)
    assert answer.usage.capped_threads == 2
    assert answer.finish_reason == "stop"
    assert answer.text.count("\n") == 1
    assert all(t.num_tokens == 20 for t in answer.threads[1:])
    check_empty(lm)


def test_max_forks_bounds_the_points() -> None:
    answer = play({MAIN: THREE} | points(p1=LONG, p2=LONG), max_forks=2)
    assert [t.topic for t in answer.threads[1:]] == ["Warm up", "Go slow"]
    many = "\n".join(f"{n}. item {chr(96 + n)}" for n in range(1, 20))
    assert len(play({MAIN: many}).threads) == 1 + MAX_POINTS


@pytest.mark.parametrize("title", ["<|im_end|> x", "Straße 準備 😀", 'a "quoted" {title}'])
def test_odd_titles_are_only_text(title: str) -> None:
    answer = play({MAIN: f"1. {title}\n2. b"} | points(p1=f" {LONG}", p2=f" {LONG}"))
    assert answer.text == f"1. {title}: {LONG}\n2. b: {LONG}"
    assert answer.threads[1].topic == title


def test_text_settles_point_by_point() -> None:
    lm = shared_lm()
    texts = {MAIN: "1. a\n2. b"} | points(p1=f" {LONG} And more.", p2=f" {LONG}")
    script = Play(lm, texts)
    seen = []
    with lm.stream(QUESTION, SamplingParams(), method="sot", script=script) as stream:
        for event in stream:
            if isinstance(event, events.Token):
                seen.append(stream.text)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert any(text.startswith("1. a: of") and "2." not in text for text in seen)
    assert stream.text == f"1. a: {LONG} And more.\n2. b: {LONG}"


def test_a_stop_string_inside_a_point_ends_the_answer() -> None:
    answer = play({MAIN: THREE} | points(p1=f" {LONG}", p2=" halt! " + LONG), stop=("halt!",))
    assert answer.text == f"1. Warm up: {LONG}\n2. Go slow: "
    assert answer.finish_reason == "stop"


def test_the_budget_may_end_in_the_points() -> None:
    outline = len(shared_lm().vocabulary.encode(THREE))
    answer = play({MAIN: THREE} | points(p1=LONG, p2=LONG, p3=LONG), max_tokens=2 * outline + 5)
    assert answer.finish_reason == "length"
    assert sum(t.num_tokens for t in answer.threads) == 2 * outline + 5


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_small_budget_never_goes_to_the_outline_alone(max_tokens: int) -> None:
    answer = play({MAIN: THREE} | points(p1=LONG, p2=LONG, p3=LONG), max_tokens=max_tokens)
    assert answer.finish_reason == "length"
    assert answer.usage.control_tokens <= max(1, max_tokens // 2)


def test_cancelling_frees_everything() -> None:
    lm = shared_lm()
    texts = {MAIN: THREE} | points(p1=LONG, p2=LONG, p3=LONG)
    for steps in (1, 5, 40):
        stream = lm.submit(
            QUESTION, SamplingParams(max_tokens=500), method="sot", script=Play(lm, texts)
        )
        for _ in range(steps):
            lm.step(stream.request)
        stream.close()
        lm.scheduler.step()
        check_empty(lm)
        assert stream.completion.finish_reason == "cancelled"


# -- the fallback ------------------------------------------------------------------------------

LIST_FREE = [
    "",
    "Paris.\n",
    "1. Paris",
    "1.\n\n\n",
    "x" * 200,
    "1. " + "word " * 12,
    "1. a\n2. a\n",
]


@pytest.mark.parametrize("outline", LIST_FREE)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_list_free_outline_equals_plain_decoding(outline: str, penalty: float) -> None:
    lm = shared_lm()
    params = SamplingParams(max_tokens=200, repetition_penalty=penalty)
    (plain,) = lm.generate(QUESTION, SamplingParams(max_tokens=40, repetition_penalty=penalty))
    script = Play(lm, {MAIN: outline})
    stream = lm.submit(
        QUESTION,
        params,
        method="sot",
        script=lambda t, i: None if is_answering(stream.request) else script(t, i),
    )
    answer = stream.finish()
    assert [t.id for t in answer.threads] == [MAIN]
    theirs = [t for s in plain.trace.response for t in s.tokens]
    ours = [t for s in answer.trace.response if s.role == "answer" for t in s.tokens]
    # Both run on one engine in float32; the gap rule covers steps whose best logits are a tie.
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    assert first is None or gap_at(lm, plain, first) < 1e-3
    assert first is not None or ours[: len(theirs)] == theirs
    direct = [s for s in answer.trace.segments if s.role == "direct prompt"]
    assert [t for s in direct for t in s.tokens] == lm.encode(lm.chat(QUESTION))
    assert all(
        s.role != "outline" for a in direct for s in map(answer.trace.segments.__getitem__, a.sees)
    )
    check_empty(lm)


def is_answering(request: Any) -> bool:
    return request.recorder.threads[MAIN].role == "answer"


def gap_at(lm: LM, plain: Any, index: int) -> float:
    """Difference of the two best logits where plain decoding drew its token `index`."""
    tokens = [t for s in plain.trace.response for t in s.tokens][:index]
    ids = [t for s in plain.trace.prompt for t in s.tokens] + tokens
    with torch.inference_mode():
        logits = lm.engine.model(input_ids=torch.tensor([ids])).logits[0, -1]  # type: ignore[attr-defined]
    best, second = logits.topk(2).values.tolist()
    return float(best - second)


def test_no_forks_or_no_room_is_plain_decoding() -> None:
    params, lm = SamplingParams(max_tokens=20), shared_lm()
    (plain,) = lm.generate(QUESTION, params, method="sequential")
    (answer,) = lm.generate(QUESTION, replace(params, max_forks=1), method="sot")
    assert answer.text == plain.text
    small = make_lm(positions=200, slots=200)
    (plain,) = small.generate(QUESTION, SamplingParams(max_tokens=20), method="sequential")
    (answer,) = small.generate(QUESTION, SamplingParams(max_tokens=20), method="sot")
    assert answer.text == plain.text
    assert answer.usage == plain.usage


def test_points_that_do_not_fit_the_positions_fall_back() -> None:
    lm = shared_lm()
    method = SkeletonOfThought()
    ids, _ = method.start(lm, lm.chat(QUESTION), SamplingParams())
    tight = make_lm(positions=len(ids) + method.outline_cap + method.point_cap + 4)
    answer = play({MAIN: THREE + "\n" + "4. " + "x" * 60}, tight)
    assert len(answer.threads) == 1


def test_what_cannot_be_asked_in_turns_is_refused_before_decoding() -> None:
    params = SamplingParams(max_tokens=5)
    bare = make_lm(chat=False)
    lm = shared_lm()
    for model, prompt, raw in [
        (lm, QUESTION, True),
        (bare, QUESTION, False),
        (bare, [{"role": "user", "content": QUESTION}], False),
        (lm, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False),
    ]:
        with pytest.raises(Unsupported, match="sequential"):
            model.submit(prompt, params, method="sot", raw=raw)
    with pytest.raises(InvalidInput):
        lm.submit(" ", params, method="sot")


def test_history_and_system_prompts_stay_in_order() -> None:
    lm = shared_lm()
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": QUESTION},
    ]
    ids, _ = SkeletonOfThought().start(lm, chat, SamplingParams())
    text = lm.vocabulary.decode(ids)
    places = [text.index(s) for s in ("Be brief.", "lighthouses", "Hello", "Hi.", "Question: How?")]
    assert places == sorted(places)
    answer = play({MAIN: "1. a\n2. b"} | points(p1=LONG, p2=LONG), prompt=chat)
    assert len(answer.threads) == 3


@settings(max_examples=25, deadline=None)
@given(st.text(st.sampled_from(list("12.- \nab:")), max_size=24), st.integers(1, 60))
def test_any_outline_ends_and_leaks_nothing(outline: str, max_tokens: int) -> None:
    answer = play(
        {MAIN: outline} | {f"main.{n}": " ok" for n in range(1, 9)}, max_tokens=max_tokens
    )
    assert answer.finish_reason in ("stop", "length")
    assert sum(t.num_tokens for t in answer.threads) <= max_tokens


@pytest.mark.embedded
def test_the_fallback_equals_plain_decoding_on_the_embedded_model() -> None:
    lm = LM.load(dtype="float32", pool_slots=2048)
    prompt = "What is the capital of France?"
    (plain,) = lm.generate(prompt, SamplingParams(max_tokens=24), method="sequential")
    end = min(lm.vocabulary.end_ids)
    stream = lm.submit(
        prompt,
        SamplingParams(max_tokens=24),
        method="sot",
        script=lambda _, index: end if index == 0 and not is_answering(stream.request) else None,
    )
    answer = stream.finish()
    assert answer.text == plain.text
    assert answer.usage.completion_tokens == plain.usage.completion_tokens
