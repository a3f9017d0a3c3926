"""Drawing tokens: order of the filters, ties, and random numbers that depend on nothing else."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.dialects.base import Legal
from stretto.effects import Cut, Evict, Fork, Place, Reveal
from stretto.errors import InvalidInput
from stretto.params import SamplingParams
from stretto.recorder import MAIN, Recorder
from stretto.runtime import chooser
from stretto.runtime import quick as quick_module
from stretto.runtime.chooser import Chooser, SeenIds
from stretto.runtime.quick import quick_draw
from stretto.runtime.sampler import Sampling, draw, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, -math.inf, 0.0])
TEMPERATURES = st.sampled_from([0.0, 1.0, 0.8, 0.01, 100.0, 1e-300, 1e300]) | st.floats(0.01, 5)
TOP_PS = st.sampled_from([1.0, 0.9, 0.5, 1e-9, 1 - 1e-12]) | st.floats(1e-6, 1)
NUMBERS = st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True)


def random_row(seed: int, size: int, spread: float) -> torch.Tensor:
    """Logits like a model's, some of them illegal and, as in bfloat16, many of them equal."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    row = torch.randn(size, generator=generator) * spread
    if rng.random() < 0.5:
        row = row.bfloat16().float()
    if rng.random() < 0.5:
        row[torch.rand(size, generator=generator) < rng.random()] = -math.inf
        row[rng.randrange(size)] = spread
    return row


def quick(row: torch.Tensor, how: Sampling, number: float) -> int | None:
    return quick_draw(row.numpy(), int(row.numpy().argmax()), how, number)


def test_greedy_takes_the_best_and_the_lowest_id_of_ties() -> None:
    assert draw(LOGITS, Sampling(), 0.99) == 1
    assert draw(torch.tensor([0.0, 5.0, 5.0]), Sampling(), 0.5) == 1


def test_an_illegal_token_is_never_drawn() -> None:
    hot = Sampling(temperature=100.0)
    drawn = {draw(LOGITS, hot, k / 1000) for k in range(1000)}
    assert drawn == {0, 1, 2, 4}
    assert draw(torch.tensor([-math.inf, 0.0, -math.inf]), hot, 0.999999999) == 1
    assert draw(torch.tensor([-math.inf, 0.0, -math.inf]), hot, 0.0) == 1


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-309, 1.0, 1e300])
@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1.0, 1e39, 1e308])
@pytest.mark.parametrize("legal", [[5.0, 3.0], [-5.0, -3.0], [0.0, 2.0], [0.0, 0.0]])
def test_no_extreme_makes_an_illegal_token_drawable(
    temperature: float, penalty: float, legal: list[float]
) -> None:
    logits = torch.tensor([-math.inf, *legal, -math.inf])
    for cut in ({}, {"top_k": 1}, {"top_p": 0.5}):
        how = Sampling(temperature, repetition_penalty=penalty, **cut)
        for number in (0.0, 0.5, 0.999):
            assert draw(logits, how, number, {0, 1, 2}) in (1, 2)


def test_frequencies_are_the_softmax() -> None:
    counts = Counter(draw(LOGITS, Sampling(1.0), uniform(1, 0, "main", k)) for k in range(20_000))
    for token, probability in enumerate(torch.softmax(LOGITS.double(), 0).tolist()):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=0.012)


def test_top_k_and_top_p() -> None:
    hot = 50.0
    assert {draw(LOGITS, Sampling(hot, top_k=2), k / 100) for k in range(100)} == {1, 2}
    # probabilities .643 .237 .087 .032 : the first reaches .6, the first two .7
    assert {draw(LOGITS, Sampling(1.0, top_p=0.6), k / 100) for k in range(100)} == {1}
    assert {draw(LOGITS, Sampling(1.0, top_p=0.7), k / 100) for k in range(100)} == {1, 2}
    assert {draw(LOGITS, Sampling(1.0, top_p=1e-9), k / 100) for k in range(100)} == {1}
    even = torch.tensor([0.0, 0.0])  # the first has exactly half, which is enough
    assert {draw(even, Sampling(1.0, top_p=0.5), k / 100) for k in range(100)} == {0}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0, -1.5])
    assert draw(logits, Sampling(repetition_penalty=2.0), 0.0, {0}) == 1
    assert draw(logits[2:], Sampling(repetition_penalty=2.0), 0.0, {0}) == 1
    assert logits.tolist() == [2.0, 1.5, -1.0, -1.5]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-50, 50) | st.just(-math.inf), min_size=1, max_size=40),
    number=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.01, 100),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.001, 1),
)
def test_what_is_drawn_is_always_legal(
    logits: list[float], number: float, temperature: float, top_k: int, top_p: float
) -> None:
    tensor = torch.tensor(logits)
    if not torch.isfinite(tensor).any():
        return
    token = draw(tensor, Sampling(temperature, top_k, top_p), number)
    assert math.isfinite(logits[token])


@settings(max_examples=600, deadline=None)
@given(
    logits=st.lists(
        st.floats(-50, 50, width=32)
        | st.sampled_from([-math.inf, 0.0, -0.0, 3.0, 3e38, -3e38, 1e-45, 2e-45, 1e-30]),
        min_size=1,
        max_size=40,
    ),
    copies=st.integers(1, 30),
    how=st.builds(Sampling, TEMPERATURES, st.integers(0, 50), TOP_PS),
    number=NUMBERS,
)
def test_the_quick_draw_is_the_draw(
    logits: list[float], copies: int, how: Sampling, number: float
) -> None:
    row = torch.tensor(logits * copies)
    if torch.isfinite(row).any():
        assert quick(row, how, number) in (None, draw(row, how, number))


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 255, 256, 257, 3000]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    how=st.builds(Sampling, TEMPERATURES, st.sampled_from([0, 0, 1, 40]), TOP_PS),
    number=NUMBERS,
)
def test_the_quick_draw_is_the_draw_in_rows_like_a_models(
    seed: int, size: int, spread: float, how: Sampling, number: float
) -> None:
    row = random_row(seed, size, spread)
    assert quick(row, how, number) in (None, draw(row, how, number))


def test_a_number_next_to_a_boundary_is_left_to_the_draw() -> None:
    """Where the sums of `draw` step from one token to the next, float32 cannot tell which."""
    row, how = random_row(3, 3000, 3.0), Sampling(0.7)
    cumulative = torch.softmax((row.double() - row.max()) / 0.7, dim=-1).cumsum(dim=-1)
    edges = [float(c / cumulative[-1]) for c in cumulative[::50]]
    for number in (e + d for e in edges for d in (-1e-12, 0.0, 1e-12)):
        if 0 <= number < 1:
            assert quick(row, how, number) in (None, draw(row, how, number))


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}]
)
def test_the_quick_draw_rarely_gives_up(filters: dict[str, float]) -> None:
    rows = [random_row(seed, 20_000, 3.0) for seed in range(20)]
    drawn = [quick(row, Sampling(0.8, **filters), k / 20) for row in rows for k in range(1, 20)]
    assert drawn.count(None) <= (0 if filters else len(drawn) // 20)


def a_thread(tokens: list[int]) -> Recorder:
    recorder = Recorder([0, 1], "main")
    for token in tokens:
        recorder.place(recorder.threads[MAIN], Place(token))
    recorder.threads[MAIN].num_drawn = len(tokens)
    return recorder


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([5, 300]),
    how=st.builds(Sampling, TEMPERATURES, st.sampled_from([0, 3]), TOP_PS, st.floats(0.1, 3)),
    mask=st.sampled_from(["none", "few illegal", "few legal", "short", "long"]),
    tokens=st.lists(st.integers(0, 4), max_size=4),
)
def test_what_is_chosen_is_the_draw_under_mask_and_penalty(
    seed: int, size: int, how: Sampling, mask: str, tokens: list[int]
) -> None:
    row, rng = random_row(seed, size, 4.0), np.random.default_rng(seed)
    row[2] = 1.0
    legal = None
    if mask != "none":
        is_legal = rng.random(size) < (0.1 if mask == "few legal" else 0.9)
        is_legal[2] = True
        shorter, longer = is_legal[: size - 2], np.append(is_legal, [True])
        legal = Legal({"short": shorter, "long": longer}.get(mask, is_legal))
    params = SamplingParams(
        temperature=how.temperature, top_k=how.top_k, top_p=how.top_p,
        repetition_penalty=how.repetition_penalty, seed=seed,
    )  # fmt: skip
    recorder, before = a_thread(tokens), row.clone()
    main = recorder.threads[MAIN]
    token, logprob = Chooser(params, 1, None).choose(recorder, main, row.numpy(), legal)
    assert torch.equal(row, before)
    if legal is not None:
        is_legal = np.resize(legal.mask, size) & (np.arange(size) < len(legal.mask))
        row = row.masked_fill(torch.from_numpy(~is_legal), -math.inf)
    assert token == draw(row, how, uniform(seed, 1, MAIN, len(tokens)), set(tokens))
    expected = torch.log_softmax(row.double(), dim=-1)[token]
    assert logprob == pytest.approx(float(expected), abs=2e-6)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_what_a_penalty_is_about_is_the_response_in_view(seed: int) -> None:
    rng, recorder = random.Random(seed), a_thread([])
    main = recorder.threads[MAIN]
    recorder.fork(main, Fork("main.1", (7,)))
    known = {name: SeenIds() for name in recorder.threads}
    for index in range(40):
        thread = recorder.threads[rng.choice(["main", "main.1"])]
        moves = ["place", "place", "tentative", "reveal", "cut", "evict", "prompt", "look", "look"]
        move = rng.choice(moves)
        if move == "cut":
            recorder.apply(thread, Cut())
        elif move == "evict" and thread.sees:
            recorder.apply(thread, Evict(rng.choice(list(thread.sees))))
        elif move == "prompt" and not thread.own.tokens:
            recorder.place(thread, Place(100 + index, "prompt"))
        elif move == "place":
            recorder.place(thread, Place(200 + index, markup=rng.random() < 0.3))
        elif move == "tentative":
            recorder.place(thread, Place(300 + index, markup=True, tentative=True))
        elif move == "reveal" and thread.num_tentative:
            recorder.reveal(thread, Reveal(thread.num_tentative))
        elif move == "look":
            segments = [recorder.segments[h] for h in (*thread.sees, thread.own.handle)]
            response = [s for s in segments if s.tokens and s.origins[0] != "prompt"]
            text = {t for s in response for t, m in zip(s.tokens, s.markup, strict=True) if not m}
            assert known[thread.name].of(recorder, thread) == text


def test_a_choice_takes_no_more_work_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy one computes no random number and no distribution but the log-probability's; the
    ids that a mask is about are found once."""
    calls: Counter[str] = Counter()

    def counting(module: object, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: object, **kw: object) -> object:
            calls[name] += 1
            return real(*args, **kw)

        monkeypatch.setattr(module, name, counted)

    for module, name in ((chooser, "uniform"), (chooser, "draw"), (chooser, "peak")):
        counting(module, name)
    counting(quick_module, "_softmax")
    counting(np, "flatnonzero")
    recorder, legal = a_thread([3]), Legal(np.arange(300) > 7)
    for params, want in (
        (SamplingParams(), {"peak": 10, "flatnonzero": 1}),
        (
            SamplingParams(temperature=0.8),
            {"peak": 10, "_softmax": 10, "flatnonzero": 1, "uniform": 10},
        ),
    ):
        calls.clear()
        chooses = Chooser(params, 0, None)
        for seed in range(10):
            recorder.threads[MAIN].num_drawn = seed
            row = random_row(1, 300, 0.5).numpy()
            chooses.choose(recorder, recorder.threads[MAIN], row, legal)
        assert calls == want


def test_random_numbers_depend_on_the_counter_alone() -> None:
    assert uniform(0, 0, "main", 0) == uniform(0, 0, "main", 0)
    keys = [
        (s, n, t, i) for s in (0, 1) for n in (0, 1) for t in ("main", "main.1") for i in (0, 1)
    ]
    assert len({uniform(*key) for key in keys}) == len(keys)
    mean = sum(uniform(3, 0, "main", k) for k in range(10_000)) / 10_000
    assert mean == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("repetition_penalty", 0),
        ("seed", 1.5),
        ("stop", ("",)),
        ("stop_ids", (-1,)),
        ("max_thread_tokens", 0),
        ("max_forks", -1),
    ],
)
def test_bad_parameters_are_named_with_their_value(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field.removesuffix("_ids")) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_zero_temperature_is_a_temperature_and_one_stop_string_is_one() -> None:
    params = SamplingParams(temperature=0, stop="END", stop_ids=[3])
    assert params.temperature == 0
    assert params.stop == ("END",)
    assert params.stop_ids == frozenset({3})
