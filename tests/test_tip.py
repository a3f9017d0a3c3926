"""Dialects tip and pasta+tip as languages: golden cases, what texts mean, what sessions make."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import END, REASONING_END, Alphabet, Writer
from typer.testing import CliRunner

from stretto.cli.trace import app
from stretto.dialects import DialectSettings, get_dialect
from stretto.dialects.base import Parsed
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.pasta_text import to_text as pasta_to_text
from stretto.dialects.pasta_tip_text import parse_ids as parse_both_ids
from stretto.dialects.registers import register_forms, register_tags
from stretto.dialects.tip import TipSettings, death_vector
from stretto.dialects.tip_text import parse_ids, to_text
from stretto.dialects.words import WordsVocabulary
from stretto.errors import InvalidInput
from stretto.masks import dense_mask, flat_tokens
from stretto.params import SamplingParams
from stretto.recorder import MAIN, OpenThread, Recorder
from stretto.trace import Trace, deaths, is_drawn, live_tokens
from stretto.train.legal import Replay

GOLDEN = sorted((Path(__file__).parent / "golden").glob("tip_*.json"))
PIECES = [
    *(f"<reg_{i}>" for i in range(5)), "<reg_01>", "<Reg_0>", "<reg_0", "a", " b", "\n", "7",
    '<promise topic="a" tokens="10"/>', '<promise topic="<reg_1>" tokens="20">', "<async>",
    "</async>", "<sync/>", "</think>", '<promise topic="<reg_0>"/>',
]  # fmt: skip
NUM = 3
TIP = TipSettings(NUM)
ALPHABET = Alphabet(register_forms(NUM))
REGISTERS = [ALPHABET.control[f"reg_{i}"] for i in range(NUM)]
texts = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
graces = st.booleans()
responses = st.lists(
    st.one_of(st.sampled_from(REGISTERS), st.integers(0, 59)), max_size=40
)  # fmt: skip


def words(text: str, dialect: str = "tip", prompt: str = "", **changes: object) -> Parsed:
    """What a text means under tokenizer `words`."""
    given_settings = DialectSettings(**{"num_registers": NUM, **changes})
    chosen = get_dialect(dialect)
    vocabulary = WordsVocabulary(chosen.forms(given_settings))
    return chosen.parse_text(text, vocabulary, given_settings, prompt)


def of_ids(ids: list[int], prompt: list[int] | None = None, *, grace: bool = False) -> Trace:
    return parse_ids(prompt or [], ids, ALPHABET, TipSettings(NUM, grace)).trace


def simulated(ids: list[int], num_prompt: int, *, grace: bool) -> torch.Tensor:
    """Who sees whom, from registers that hold sets of tokens, token by token."""
    held: dict[int, set[int]] = {}
    dead: set[int] = set()
    step: set[int] | None = None
    rows = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    is_over = False
    for q, token in enumerate(ids):
        killed: set[int] = set()
        if q >= num_prompt and token in REGISTERS and not is_over:
            killed = held.pop(token, set())
            held[token] = step = set()
        if step is not None and not is_over:
            step.add(q)
        is_over = is_over or (q >= num_prompt and token == REASONING_END)
        visible = set(range(q + 1)) - dead - (set() if grace else killed)
        dead |= killed
        rows[q, sorted(visible)] = True
    return rows


# -- golden ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_golden(golden: Path) -> None:
    case = json.loads(golden.read_text(encoding="utf-8"))
    args = ["show", "--json", *case["args"], "-"]
    result = CliRunner().invoke(app, args, input=case["input"], catch_exceptions=False)
    assert json.loads(result.stdout) == case["output"]


def test_there_are_golden_cases_of_both_dialects() -> None:
    assert {json.loads(g.read_text())["output"]["dialect"] for g in GOLDEN} == {"tip", "pasta+tip"}


# -- text ------------------------------------------------------------------------------------------


def test_what_reads_like_a_register_and_is_none() -> None:
    text = "<reg_3><reg_01><Reg_0><reg_-1><reg_0 /><reg_9999999999><reg_2>"
    tags, issues = register_tags(text, NUM)
    assert [(tag.number, text[tag.start : tag.end]) for tag in tags] == [(2, "<reg_2>")]
    assert [issue.at for issue in issues] == [0, text.index("<reg_9")]
    assert words(text).text == text[: -len("<reg_2>")]


def test_an_illegal_tag_joins_the_text_around_it() -> None:
    (segment,) = words("a<reg_3>b c").trace.segments
    assert (segment.role, len(segment)) == ("pre", 2)


def test_a_text_without_registers_is_dense() -> None:
    trace = words("a b c\n", prompt="x y").trace
    assert [s.role for s in trace.segments] == ["prompt", "pre"]
    assert torch.equal(dense_mask(trace), torch.ones(6, 6).tril().bool())
    assert live_tokens(trace).mean == live_tokens(trace).dense_mean


@settings(max_examples=100, deadline=None)
@given(text=texts, grace=graces, dialect=st.sampled_from(["tip", "pasta+tip"]))
def test_any_text_has_a_meaning(text: str, grace: bool, dialect: str) -> None:
    parsed = words(text, dialect, "<reg_0> a", grace=grace)
    assert all(0 <= issue.at < len(text) for issue in parsed.issues)
    assert parsed.text.count("<reg_") >= sum(i.code == "unknown-register" for i in parsed.issues)
    if dialect == "tip":
        legal = ["<reg_0>", "<reg_1>", "<reg_2>"]
        plain = text
        for tag in legal:
            plain = plain.replace(tag, "")
        assert parsed.text == plain


@settings(max_examples=100, deadline=None)
@given(text=texts.map(lambda t: t.replace("<reg", "<rag")))
def test_without_registers_both_is_pasta(text: str) -> None:
    both, pasta = words(text, "pasta+tip", "p"), words(text, "pasta", "p")
    assert (both.text, both.issues) == (pasta.text, pasta.issues)
    assert [(s.thread, s.sees, len(s), s.positions) for s in both.trace.segments] == [
        (s.thread, s.sees, len(s), s.positions) for s in pasta.trace.segments
    ]


@settings(max_examples=100, deadline=None)
@given(text=texts.map(lambda t: t.replace("async>", "osync>").replace("<promise", "<premise")))
def test_without_promises_both_is_tip(text: str) -> None:
    text = text.replace("<sync/>", "<osync/>")
    both, tip = words(text, "pasta+tip", "p"), words(text, "tip", "p")
    assert (both.text, both.issues) == (tip.text, tip.issues)
    assert [(s.role, s.sees, len(s)) for s in both.trace.segments] == [
        (s.role, s.sees, len(s)) for s in tip.trace.segments
    ]


# -- who sees whom ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(prompt=responses, ids=responses, grace=graces, end=st.integers(0, 60))
def test_deaths_say_who_sees_whom(prompt: list[int], ids: list[int], grace: bool, end: int) -> None:
    """The O(T) vector, that of the trace, `visible` and a simulation of registers agree."""
    ids = [*ids[:end], REASONING_END, *ids[end:]] if end < 40 else ids
    trace = of_ids(ids, prompt, grace=grace)
    found = death_vector(
        [*prompt, *ids], REGISTERS, num_prompt=len(prompt), reasoning_end=REASONING_END, grace=grace
    )
    assert found == deaths(trace)
    mask = dense_mask(trace)
    if found:
        q, k = torch.arange(len(found))[:, None], torch.arange(len(found))[None, :]
        assert torch.equal(mask, (k <= q) & (q < torch.tensor(found)[None, :]))
    assert torch.equal(mask, simulated([*prompt, *ids], len(prompt), grace=grace))
    positions = [p for s in trace.segments for p in s.positions]
    assert positions == list(range(len(prompt) + len(ids)))


@settings(max_examples=40, deadline=None)
@given(ids=responses.filter(bool), grace=graces, order=st.permutations(range(NUM)))
def test_what_a_mask_depends_on(ids: list[int], grace: bool, order: list[int]) -> None:
    """Not on registers' names, nor on what comes later; at most N steps are seen."""
    mask = dense_mask(of_ids(ids, grace=grace))
    renamed = [REGISTERS[order[REGISTERS.index(i)]] if i in REGISTERS else i for i in ids]
    assert torch.equal(dense_mask(of_ids(renamed, grace=grace)), mask)
    for t in range(1, len(ids), 7):
        assert torch.equal(dense_mask(of_ids(ids[:t], grace=grace)), mask[:t, :t])
    step = torch.tensor([i in REGISTERS for i in ids]).cumsum(0)
    for q, row in enumerate(mask):
        assert row[q]
        assert len({int(step[k]) for k in row.nonzero()[:, 0]} - {0}) <= NUM + grace


def test_with_one_register_a_step_sees_the_prompt_and_itself() -> None:
    trace = words("a <reg_0>b <reg_0>c", prompt="p", num_registers=1).trace
    assert [(s.role, sorted(s.sees)) for s in trace.segments] == [
        ("prompt", []), ("pre", [0]), ("step", [0, 1]), ("step", [0, 1]),
    ]  # fmt: skip


def test_the_answer_is_pinned_and_has_no_registers() -> None:
    ids = [REGISTERS[0], 20, REASONING_END, 21, REGISTERS[0], 22]
    parsed = parse_ids([30], ids, ALPHABET, TIP)
    assert [(s.role, len(s)) for s in parsed.trace.segments] == [
        ("prompt", 1), ("step", 3), ("answer", 3),
    ]  # fmt: skip
    assert [(i.code, i.at) for i in parsed.issues] == [("register-in-answer", 4)]
    text = ALPHABET.decode(ids)
    of_text = get_dialect("tip").parse_text(text, ALPHABET, DialectSettings(num_registers=NUM), "")
    assert [(i.code, i.at) for i in of_text.issues] == [("register-in-answer", text.rindex("<reg"))]
    assert of_text.text == text.removeprefix("<reg_0>")


def test_a_number_of_registers_that_cannot_be() -> None:
    for number in (0, 1001, True, "3"):
        with pytest.raises(InvalidInput, match=r"num_registers is .*from 1 to 1000"):
            register_forms(number)  # type: ignore[arg-type]


# -- sessions --------------------------------------------------------------------------------------


class Drawn(Replay):
    """A replay of a writer's dialect, with its session at hand."""

    def __init__(self, writer: Writer) -> None:
        made = get_dialect(writer.dialect).sessions(writer.vocabulary, writer.settings, 512)
        self.session = made(SamplingParams())
        self.session.budget = lambda: 10_000
        super().__init__([20, 21], self.session, 1 << 16)

    def close(self) -> Trace:
        """The request ends; what there is then."""
        for move in self.session.cut_off(self.recorder, self.threads[MAIN]):
            self.recorder.reveal(self.threads[MAIN], move)
        return self.recorder.freeze()

    @property
    def issues(self) -> list[str]:
        return [issue.code for issue in self.session.annotated(self.recorder)[1]]


def read_back(writer: Writer, trace: Trace) -> list[Parsed]:
    """The trace's response as text and as ids, parsed again."""
    vocabulary, given_settings = writer.vocabulary, writer.settings
    ids = [token for s in trace.response for token in s.tokens]
    tip, pasta = TipSettings(writer.num_registers, writer.grace), PastaSettings()
    if writer.dialect == "tip":
        text, by_ids = to_text(trace, vocabulary)[0], parse_ids([20, 21], ids, vocabulary, tip)
    else:
        text = pasta_to_text(trace, vocabulary, pasta)[0]
        by_ids = parse_both_ids([20, 21], ids, vocabulary, pasta, tip)
    prompt = vocabulary.decode([20, 21])
    parse = get_dialect(writer.dialect).parse_text
    return [by_ids, parse(text, vocabulary, given_settings, prompt)]


def views(trace: Trace) -> list[object]:
    return [(s.thread, s.role, s.sees, s.tokens, s.positions, s.markup) for s in trace.segments]


@pytest.mark.parametrize("dialect", ["tip", "pasta+tip"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), grace=graces)
def test_what_a_session_makes_under_its_masks_reads_back(
    dialect: str, seed: int, grace: bool
) -> None:
    """Drawn under the masks alone: no issue, and the same trace from its text and its ids."""
    writer, rng = Writer(dialect, seed, grace=grace), random.Random(seed)
    replay = Drawn(writer)
    draw_legally(replay, MAIN, rng, 40)
    trace = replay.close()
    if replay.issues:  # the end has cut a promise short
        assert replay.issues == ["unfinished-promise"]
        return
    for parsed in read_back(writer, trace):
        assert not parsed.issues
        assert views(parsed.trace) == views(trace)


def draw_legally(replay: Replay, name: str, rng: random.Random, limit: int) -> None:
    """Draws so many legal tokens on a thread, children's to their ends where they fork."""
    for _ in range(limit):
        legal = replay.legal(name).mask.nonzero()[0].tolist()
        control = [i for i in legal if i > REASONING_END]
        token = rng.choice(control if control and rng.random() < 0.4 else legal)
        if token == END or (token == REASONING_END and rng.random() < 0.9):
            continue
        for child in replay.draw(name, token):
            draw_legally(replay, child, rng, 8)
        if not replay.threads[name].is_open:
            return
    if name != MAIN:
        replay.stop(name)


@pytest.mark.parametrize("dialect", ["tip", "pasta+tip"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), grace=graces)
def test_a_session_fed_with_nonsense_makes_what_its_ids_mean(
    dialect: str, seed: int, grace: bool
) -> None:
    """Total: any ids, on main and in children, as the parser of ids reads them."""
    writer = Writer(dialect, seed, grace=grace, nonsense=0.3)
    replay = Drawn(writer)
    line = writer.line(MAIN)
    for token in line:
        for child in replay.draw(MAIN, token):
            for own in writer.line(child):
                if replay.threads[child].is_open:
                    replay.draw(child, own)
    trace = replay.close()
    by_ids, by_text = read_back(writer, trace)
    if REASONING_END not in line:
        assert views(by_ids.trace) == views(trace)
    assert replay.issues == [issue.code for issue in by_ids.issues]
    assert all(is_drawn(o) for s in by_text.trace.response for o in s.origins if o != "injected")


def test_registers_are_legal_while_thinking_alone() -> None:
    replay = Drawn(Writer("tip", 0))
    legal = replay.legal(MAIN).mask
    assert legal[REGISTERS].all()
    assert legal[END]
    assert not legal[sorted(ALPHABET.spare_ids)].any()
    replay.draw(MAIN, REASONING_END)
    legal = replay.legal(MAIN).mask
    assert not legal[REGISTERS].any()
    assert legal[END]


def test_in_a_child_registers_are_legal_and_promises_are_not() -> None:
    writer = Writer("pasta+tip", 0)
    control, replay = writer.vocabulary.control, Drawn(writer)
    registers = [control[f"reg_{i}"] for i in range(3)]
    assert replay.legal(MAIN).mask[[*registers, control["promise"], control["sync"], END]].all()
    for token in (control["promise"], control["tokens"], 2):
        replay.draw(MAIN, token)
        assert not replay.legal(MAIN).mask[registers].any()
    (child,) = replay.draw(MAIN, control["promise_end"])
    legal = replay.legal(child).mask
    assert legal[[*registers, control["async_end"]]].all()
    assert not legal[[control["promise"], control["sync"], END]].any()
    replay.draw(MAIN, REASONING_END)
    assert not replay.legal(MAIN).mask[registers].any()
    assert replay.legal(MAIN).mask[control["promise"]]
    assert replay.legal(child).mask[registers].all()


def test_a_child_kills_its_own_steps_alone() -> None:
    writer = Writer("pasta+tip", 0)
    control, replay = writer.vocabulary.control, Drawn(writer)
    zero, one = control["reg_0"], control["reg_1"]
    for token in (zero, 20, one, 21, control["promise"], control["tokens"], 2):
        replay.draw(MAIN, token)
    (child,) = replay.draw(MAIN, control["promise_end"])
    for token in (zero, 22, zero, 23, one, 24, control["async_end"]):
        replay.draw(child, token)
    for token in (zero, 25, control["sync"], 26, one, 27):
        replay.draw(MAIN, token)
    assert seen_by(replay.recorder, replay.threads[MAIN]) == {25, 26, 23, 24, 27}
    joined = [s for s in replay.recorder.freeze().segments if s.thread == child]
    assert [s.tokens[1:2] for s in joined] == [(), (22,), (23,), (24,)]
    assert [len(s.sees) for s in joined] == [3, 4, 4, 5]


def seen_by(recorder: Recorder, thread: OpenThread) -> set[int]:
    """Text tokens of the response that a thread's next token would see."""
    segments = [recorder.segments[h] for h in [*thread.sees, thread.own.handle]]
    return {t for s in segments if s.role != "prompt" for t in s.tokens if 20 <= t < 60}


def test_ids_of_flat_traces_are_the_response() -> None:
    ids = [20, REGISTERS[1], 21, REGISTERS[1], REGISTERS[1]]
    assert flat_tokens(of_ids(ids, [5])).tolist() == [5, *ids]


def test_an_empty_trace_has_an_empty_mask() -> None:
    assert dense_mask(of_ids([], [])).shape == (0, 0)
