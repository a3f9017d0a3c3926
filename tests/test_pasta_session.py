"""Dialect pasta while decoding: a tiny driver feeds tokens to a session, as a scheduler would."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.dialects.pasta import PastaSession, PastaSettings
from stretto.dialects.pasta_masks import MAX_TOPIC_TOKENS, PastaMasks
from stretto.dialects.pasta_text import parse_ids, parse_text, to_text
from stretto.dialects.tags import TAG_FORMS
from stretto.effects import Close, Fork, Move, Place, Reveal, Wait
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.trace import Trace, derived_steps

P, TOK, PE, A, AE, S = range(6)
EOS = 6
TEXTS = [*TAG_FORMS.values(), "</s>", " a", " b", '"', "x\n", *"0123456789", "10", " 😀", "", "?"]
WORD, OTHER, QUOTE, NEWLINE = 7, 8, 9, 10
DIGIT = {str(d): TEXTS.index(str(d)) for d in [*range(10), 10]}
EMPTY, SPARE = TEXTS.index(""), TEXTS.index("?")
DRAWABLE = [i for i in range(len(TEXTS)) if i not in (EMPTY, SPARE)]


class TestVocabulary:
    """A closed vocabulary; encoding takes the longest piece that fits."""

    __test__ = False
    control = {name: i for i, name in enumerate(TAG_FORMS)}  # noqa: RUF012
    end_ids = frozenset({EOS})
    spare_ids = frozenset({SPARE})
    reasoning_end = None
    size = len(TEXTS)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            fits = [i for i in range(7, EMPTY) if text.startswith(TEXTS[i])]
            ids.append(max(fits, key=lambda i: len(TEXTS[i])))
            text = text[len(TEXTS[ids[-1]]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(TEXTS[i] for i in ids)


VOCABULARY = TestVocabulary()
Choose = Callable[[OpenThread, np.ndarray], int | None]


class Driver:
    """Draws one token a step in every thread that can, and carries out the moves.

    `choose(thread, mask)` gives the token, None for nothing more to feed: the run stops there.
    """

    def __init__(
        self,
        choose: Choose,
        policy: PastaSettings,
        *,
        budget: int = 10_000,
        prompt: Sequence[int] = (WORD, OTHER),
        masks: PastaMasks | None = None,
        **options: int,
    ) -> None:
        self.choose = choose
        self.recorder = Recorder(list(prompt), "main", policy.max_positions)
        masks = masks or PastaMasks(VOCABULARY, policy.unit)
        self.session = PastaSession(masks, policy, **options)
        self.session.budget = lambda: budget - self.num_drawn
        self.budget = budget
        self.num_drawn = 0
        self.step = 0
        self.drawn_at: dict[str, int] = {}
        self.moves: dict[str, list[Move]] = {}

    def run(self) -> Trace:
        threads = self.recorder.threads
        while any(t.is_open for t in threads.values()):
            self.step += 1
            ready = [t for t in threads.values() if t.is_open and not self.moves.get(t.name)]
            assert ready, "deadlock"
            if not all(self.draw(thread) for thread in ready):
                for thread in [t for t in threads.values() if t.is_open]:
                    self.pump(thread, self.session.cut_off(self.recorder, thread))
                    self.recorder.close(thread, "length")
                break
            waiting = True
            while waiting:
                before = sum(map(len, self.moves.values()))
                for thread in list(threads.values()):
                    self.pump(thread, [])
                waiting = sum(map(len, self.moves.values())) < before
        return self.recorder.freeze()

    def draw(self, thread: OpenThread) -> bool:
        if self.num_drawn >= self.budget:
            return False
        self.drawn_at[thread.name] = self.step
        legal = self.session.legal(self.recorder, thread)
        assert legal.mask.any()
        token = self.choose(thread, legal.mask)
        if token is None:
            return False
        if token == EOS:
            self.pump(thread, self.session.stopped(self.recorder, thread, "stop"))
        else:
            self.num_drawn += 1
            thread.num_drawn += 1
            self.pump(thread, self.session.feed(self.recorder, thread, token))
        return True

    def pump(self, thread: OpenThread, moves: list[Move]) -> None:
        queue = self.moves.setdefault(thread.name, [])
        queue.extend(moves)
        while queue:
            move = queue[0]
            if isinstance(move, Wait) and any(
                self.recorder.threads[c].is_open for c in move.children
            ):
                return
            queue.pop(0)
            match move:
                case Wait():
                    pass
                case Place():
                    is_drawn = move.origin in ("sampled", "forced")
                    step = self.drawn_at[thread.name] if is_drawn else None
                    self.recorder.place(thread, move, step)
                case Reveal():
                    self.recorder.reveal(thread, move)
                case Close(reason):
                    self.recorder.close(thread, reason)
                case _:
                    self.recorder.apply(thread, move)
        if thread.is_open and (
            (thread.remaining is not None and thread.remaining <= 0)
            or self.recorder.at_last_position(thread)
        ):
            self.pump(thread, self.session.stopped(self.recorder, thread, "length"))


def scripted(**scripts: list[int]) -> Choose:
    """Feeds each thread its script (`c1` is main.1), whatever is legal; then end or `</async>`."""
    queues = {MAIN if k == "main" else f"main.{k[1:]}": list(v) for k, v in scripts.items()}

    def choose(thread: OpenThread, mask: np.ndarray) -> int:
        queue = queues.get(thread.name, [])
        if queue:
            return queue.pop(0)
        return EOS if thread.name == MAIN else AE

    return choose


def promise(units: str, *topic: int) -> list[int]:
    return [P, *topic, TOK, *(DIGIT[d] for d in units), PE]


def at(trace: Trace, thread: str) -> list[tuple[str, int]]:
    """Tokens of a thread with their positions."""
    return [
        (TEXTS[token], position)
        for s in trace.of_thread(thread)
        if s.role != "prompt"
        for token, position in zip(s.tokens, s.positions, strict=True)
    ]


def shape(trace: Trace) -> list[tuple[object, ...]]:
    return [(s.thread, s.role, s.sees, s.tokens, s.positions, s.markup) for s in trace.segments]


def response_ids(trace: Trace) -> list[int]:
    return [token for s in trace.response for token in s.tokens]


# -- visibility and positions ------------------------------------------------------------------


def test_a_child_sees_its_promise_and_the_sync_sees_the_child() -> None:
    main = [WORD, *promise("2", OTHER), WORD, *promise("1"), OTHER, S, WORD]
    driver = Driver(scripted(main=main, c1=[WORD, AE], c2=[OTHER, OTHER, AE]), PastaSettings())
    trace = driver.run()
    assert [(s.thread, sorted(s.sees)) for s in trace.segments] == [
        ("main", []),
        ("main", [0]),
        ("main.1", [0, 1]),
        ("main", [0, 1]),
        ("main.2", [0, 1, 3]),
        ("main", [0, 1, 3]),
        ("main", [0, 1, 2, 3, 4, 5]),
    ]
    assert at(trace, "main.1") == [("<async>", 8), (" a", 9), ("</async>", 10)]
    assert [p for _, p in at(trace, "main")][:7] == [2, 3, 4, 5, 6, 7, 28]
    assert [(t.name, t.topic, t.finish_reason) for t in trace.threads] == [
        ("main", None, "stop"),
        ("main.1", " b", "stop"),
        ("main.2", "", "stop"),
    ]
    assert not driver.session.issues


def test_the_sync_waits_and_what_was_measured_is_what_structure_says() -> None:
    main = [*promise("1"), S, WORD]
    trace = Driver(scripted(main=main, c1=[WORD] * 7), PastaSettings()).run()
    measured = [list(s.steps) for s in trace.segments]
    assert measured == derived_steps(trace)
    # PROMISE_END at step 4; the child's 7 words and its end take 5..12; the sync is drawn at 5.
    assert trace.critical_path_steps == 13
    assert trace.segments[-1].steps == (5, 13)


def test_overlap_rebases_the_sync_beyond_all_it_sees() -> None:
    main = [*promise("1"), WORD, S, WORD]
    child = [WORD] * 4
    trace = Driver(scripted(main=main, c1=child), PastaSettings(policy="overlap")).run()
    assert at(trace, "main.1")[0] == ("<async>", 6)
    assert at(trace, "main")[4:] == [(" a", 6), ("<sync/>", 12), (" a", 13)]


@pytest.mark.parametrize(("policy", "resumed"), [("predicted", 26), ("fixed", 13), ("overlap", 6)])
def test_where_main_goes_on(policy: str, resumed: int) -> None:
    settings = PastaSettings(policy=policy, fixed_length=7)  # type: ignore[arg-type]
    trace = Driver(scripted(main=[*promise("2"), WORD]), settings).run()
    assert at(trace, "main")[-1] == (" a", resumed)


def test_main_is_kept_from_skipping_past_the_models_positions() -> None:
    settings = PastaSettings(max_positions=100)
    driver = Driver(scripted(main=[*promise("5"), WORD]), settings)
    trace = driver.run()
    # PROMISE_END stands at 5, so main goes on at 6 + min(50, 100 - 64 - 6) = 36.
    assert at(trace, "main")[-1] == (" a", 36)
    assert [code for code, _, _ in driver.session.issues] == ["clamped-tokens"]
    assert driver.recorder.threads["main.1"].cap == 4 * 50 + 32
    parsed = parse_ids([WORD, OTHER], response_ids(trace), VOCABULARY, settings)
    assert [(i.code, i.at) for i in parsed.issues] == [("clamped-tokens", 0)]
    assert shape(parsed.trace) == shape(trace)


@pytest.mark.parametrize(("room", "codes"), [(49, ["clamped-tokens"]), (50, []), (51, [])])
def test_a_promise_that_just_fits_is_not_clamped(room: int, codes: list[str]) -> None:
    settings = PastaSettings(max_positions=6 + room + 64)
    driver = Driver(scripted(main=[*promise("5"), WORD]), settings)
    trace = driver.run()
    assert at(trace, "main")[-1] == (" a", 6 + min(50, room))
    assert [code for code, _, _ in driver.session.issues] == codes


def test_a_child_at_the_last_position_gets_its_end_written() -> None:
    settings = PastaSettings(max_positions=12)
    driver = Driver(scripted(main=[*promise("1"), S], c1=[WORD] * 50), settings)
    trace = driver.run()
    (child,) = trace.of_thread("main.1")
    assert child.positions == (6, 7, 8, 9, 10, 11, 11)
    assert child.origins[-1] == "injected"
    assert driver.recorder.threads["main.1"].finish_reason == "length"


# -- ends --------------------------------------------------------------------------------------


def test_the_caps_last_token_is_a_forced_end() -> None:
    seen = []

    def choose(thread: OpenThread, mask: np.ndarray) -> int:
        if thread.name == MAIN:
            return ([*promise("1"), EOS])[thread.num_drawn]
        seen.append(mask.sum())
        return WORD if mask[WORD] else AE

    driver = Driver(choose, PastaSettings())
    trace = driver.run()
    (child,) = trace.of_thread("main.1")
    cap = 4 * 10 + 32
    assert len(child) == 1 + cap
    assert child.origins == ("injected", *["sampled"] * (cap - 1), "forced")
    assert seen[-1] == 1
    assert all(count > 1 for count in seen[:-1])
    assert driver.recorder.threads["main.1"].finish_reason == "length"
    assert driver.recorder.threads[MAIN].finish_reason == "stop"


def test_a_cap_never_exceeds_the_budget_left() -> None:
    driver = Driver(scripted(main=[*promise("1"), S], c1=[WORD] * 90), PastaSettings(), budget=20)
    driver.run()
    assert driver.recorder.threads["main.1"].cap == 16


def test_a_stop_id_in_a_child_gets_an_end_that_costs_no_step() -> None:
    trace = Driver(scripted(main=[*promise("1"), S, WORD], c1=[WORD, EOS]), PastaSettings()).run()
    (child,) = trace.of_thread("main.1")
    assert child.tokens == (A, WORD, AE)
    assert child.origins == ("injected", "sampled", "injected")
    assert trace.threads[1].finish_reason == "stop"


def test_the_end_on_main_waits_for_children() -> None:
    driver = Driver(scripted(main=promise("1"), c1=[WORD] * 9), PastaSettings())
    trace = driver.run()
    assert [len(s) for s in trace.segments] == [2, 4, 11]
    assert all(t.finish_reason == "stop" for t in trace.threads)


def test_a_spent_budget_feeds_nothing_more_and_the_text_form_closes_the_block() -> None:
    driver = Driver(
        scripted(main=[*promise("1"), P, WORD], c1=[WORD] * 9), PastaSettings(), budget=7
    )
    trace = driver.run()
    text, offsets = to_text(trace, VOCABULARY, PastaSettings())
    assert text == '<promise topic="" tokens="10"/><async> a</async><promise topic=" a'
    assert driver.session.placed_issues(driver.recorder, offsets)[0].at == text.rindex("<promise")
    assert [code for code, _, _ in driver.session.issues] == ["unfinished-promise"]
    assert trace.segments[-1].markup == (False, False)


def test_syncs_with_nothing_to_wait_for_are_legal() -> None:
    trace = Driver(scripted(main=[S, S, *promise("1"), S, S]), PastaSettings()).run()
    assert trace.critical_path_steps == 8
    assert [s.tokens[0] for s in trace.segments if S in s.tokens] == [S] * 4


# -- masks -------------------------------------------------------------------------------------


def legal_ids(script: list[int], thread: str = MAIN, **options: int) -> set[int]:
    """What is legal after a script on main."""
    masks = PastaMasks(VOCABULARY, options.pop("unit", 10))
    found: set[int] = set()

    def choose(t: OpenThread, mask: np.ndarray) -> int | None:
        if t.name == thread and (thread != MAIN or t.num_drawn == len(script)):
            found.update(np.flatnonzero(mask).tolist())
            return None
        return [*script, EOS][t.num_drawn] if t.name == MAIN else AE

    Driver(choose, PastaSettings(), masks=masks, **options).run()
    return found


TEXT_IDS = set(range(7, EMPTY))
DIGITS = {DIGIT[str(d)] for d in range(10)}


def test_what_is_legal_in_each_state() -> None:
    assert legal_ids([]) == TEXT_IDS | {EOS, P, S}
    assert legal_ids(promise("1"), thread="main.1") == TEXT_IDS | {AE}
    assert legal_ids([P]) == TEXT_IDS - {QUOTE, NEWLINE} | {TOK}
    assert legal_ids([P, *[WORD] * (MAX_TOPIC_TOKENS - 1)]) >= {WORD, TOK}
    assert legal_ids([P, *[WORD] * MAX_TOPIC_TOKENS]) == {TOK}
    assert legal_ids(promise("1"), max_forks=1) == TEXT_IDS | {EOS, S}


def test_a_number_is_valid_at_every_digit() -> None:
    """Unit 10 allows 1..205; the vocabulary also has "10" as a single id."""
    start, ten = [P, TOK], DIGIT["10"]
    assert legal_ids(start) == DIGITS - {DIGIT["0"]} | {ten}
    assert legal_ids([*start, DIGIT["1"]]) == DIGITS | {ten, PE}
    assert legal_ids([*start, DIGIT["2"]]) == DIGITS | {PE}
    assert legal_ids([*start, DIGIT["2"], DIGIT["0"]]) == {DIGIT[str(d)] for d in range(6)} | {PE}
    assert legal_ids([*start, DIGIT["2"], DIGIT["1"]]) == {PE}
    assert legal_ids([*start, ten], unit=2048) == {PE}
    assert legal_ids(start, unit=2048) == {DIGIT["1"]}


# -- what holds for every run ------------------------------------------------------------------


def chooser(seed: int, p_illegal: float) -> Choose:
    """Random tokens that favour tags; legal ones but for a share of `p_illegal`."""
    rng = random.Random(seed)

    def choose(thread: OpenThread, mask: np.ndarray) -> int:
        legal = [i for i in np.flatnonzero(mask).tolist() if i in DRAWABLE]
        if rng.random() < p_illegal:
            return rng.choice(DRAWABLE)
        favoured = [i for i in legal if i < EOS]
        if thread.name == MAIN and thread.num_drawn > 60 and mask[EOS]:
            return EOS
        return rng.choice(favoured if favoured and rng.random() < 0.5 else legal)

    return choose


POLICIES = st.builds(
    PastaSettings,
    policy=st.sampled_from(["predicted", "overlap", "fixed"]),
    unit=st.sampled_from([1, 10, 30]),
    fixed_length=st.integers(1, 60),
    max_positions=st.sampled_from([None, 90, 300]),
)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**6), POLICIES, st.integers(1, 200))
def test_legal_runs_have_no_issues_and_parse_to_the_same_trace(
    seed: int, policy: PastaSettings, budget: int
) -> None:
    driver = Driver(chooser(seed, 0), policy, budget=budget)
    trace = driver.run()
    cut = {c for c, _, _ in driver.session.issues} - {"clamped-tokens"}
    assert cut <= {"unfinished-promise"}
    assert [list(s.steps) for s in trace.segments] == derived_steps(trace)
    if all(s.tokens[-1] == AE for s in trace.segments if s.role == "child"):
        check_same_as_parsed(trace, policy, driver)
        if not cut:
            text, _ = to_text(trace, VOCABULARY, policy)
            reread = parse_text(text, VOCABULARY, policy, VOCABULARY.decode((WORD, OTHER)))
            assert {i.code for i in reread.issues} <= {"clamped-tokens"}


def check_same_as_parsed(trace: Trace, policy: PastaSettings, driver: Driver) -> None:
    parsed = parse_ids((WORD, OTHER), response_ids(trace), VOCABULARY, policy)
    assert shape(parsed.trace) == shape(trace)
    assert parsed.text == "".join(
        TEXTS[t]
        for s in trace.response
        for t, markup in zip(s.tokens, s.markup, strict=True)
        if not markup
    )

    def codes(found: list[str]) -> list[str]:
        return sorted(c for c in found if c != "async-without-promise")

    assert codes([c for c, _, _ in driver.session.issues]) == codes([i.code for i in parsed.issues])


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**6), POLICIES, st.sampled_from([0.1, 0.5, 1.0]))
def test_illegal_ids_are_text_and_never_an_error(
    seed: int, policy: PastaSettings, p_illegal: float
) -> None:
    driver = Driver(chooser(seed, p_illegal), policy, budget=300, max_forks=10**6)
    trace = driver.run()
    text, offsets = to_text(trace, VOCABULARY, policy)
    placed = driver.session.placed_issues(driver.recorder, offsets)
    tags = ("<promise topic=", *TAG_FORMS.values())
    assert all(text.startswith(tags, issue.at) for issue in placed)
    if all(s.tokens[-1] == AE for s in trace.segments if s.role == "child"):
        check_same_as_parsed(trace, policy, driver)


def test_forks_beyond_the_limit_are_text() -> None:
    driver = Driver(
        scripted(main=[*promise("1"), *promise("1"), WORD]), PastaSettings(), max_forks=1
    )
    trace = driver.run()
    assert [t.name for t in trace.threads] == ["main", "main.1"]
    assert trace.segments[-1].markup == (False,) * 5
    assert [code for code, _, _ in driver.session.issues] == ["too-many-promises"]


def test_the_child_of_a_fork_never_draws_its_opening_tag() -> None:
    trace = Driver(scripted(main=promise("1")), PastaSettings()).run()
    (child,) = trace.of_thread("main.1")
    assert child.tokens == (A, AE)
    assert child.origins == ("injected", "sampled")
    assert child.steps == (None, 5)


def test_the_moves_of_a_promise() -> None:
    """PROMISE_END is placed first and forks then."""
    recorder = Recorder([], "main")
    session = PastaSession(PastaMasks(VOCABULARY, 10), PastaSettings())
    main = recorder.threads[MAIN]
    for token in promise("3")[:-1]:
        (move,) = session.feed(recorder, main, token)
        assert move == Place(token, markup=True, tentative=True)
        recorder.place(main, move)
    place, fork = session.feed(recorder, main, PE)
    assert place == Place(PE, markup=True)
    assert fork == Fork("main.1", inject=(A,), cap=4 * 30 + 32, resume=34, topic="")
