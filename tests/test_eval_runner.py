"""A run's rows: what is timed and in which order, what fails, what an answer's threads did."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forking import forking_lm
from tiny_lms import tiny_lm

from stretto import LM, Completion, SamplingParams
from stretto.data.store import Store
from stretto.errors import InvalidInput, StrettoError, UnknownName
from stretto.eval import metrics
from stretto.eval.answers import Contestant, Interrupted, answered
from stretto.eval.job import BASELINE, Job, Question
from stretto.eval.restricted import blind, without
from stretto.eval.rows import Answered, EvalRow
from stretto.eval.runner import Timer, evaluate, rotated, rows_of
from stretto.eval.task_instruct import INSTRUCT
from stretto.eval.tasks import Item, Prompts, Score, Task
from stretto.params import SamplingParams as Params

PROMPTS = Prompts(tuple(Item(text) for text in ("one", "two", "three")), {})


def never() -> bool:
    return False


def job(ours: Any, baseline: Any, **options: Any) -> Job:
    """`ours`: the arm of that name, or several by name."""
    arms = ours if isinstance(ours, dict) else {"ours": ours}
    params = SamplingParams(max_tokens=12, temperature=1.0)
    return Job(**{"task": INSTRUCT, "prompts": PROMPTS, "arms": arms, "baseline": baseline,
                  "params": params, **options})  # fmt: skip


def all_rows(run: Job, timer: Timer, number: int = 1) -> dict[str, EvalRow]:
    """The rows of prompt `number`, of every arm."""
    question = Question(number, run.prompts.items[number - 1], tuple(run.arms))
    return rows_of(run, question, timer.measure(question), dict.fromkeys(run.arms, 0))


def measure(run: Job, number: int = 1) -> EvalRow:
    return all_rows(run, Timer(run), number)["ours"]


def evaluated(
    run: Job, folder: Path, process: int = 0, until: int | None = None,
    is_interrupted: Callable[[], bool] = never,
) -> tuple[bool, dict[str, list[EvalRow]]]:  # fmt: skip
    """Whether `evaluate` did all, and the rows of each arm, by number."""
    with ExitStack() as opened:
        stores = {
            name: opened.enter_context(Store(folder / f"{name}.jsonl", EvalRow))
            for name in run.arms
        }
        is_done = evaluate(
            run, stores, processes=dict.fromkeys(run.arms, process), report=lambda _: None,
            is_interrupted=is_interrupted, until=until,
        )  # fmt: skip
        rows = {
            name: sorted(store.rows.values(), key=lambda row: row.number)
            for name, store in stores.items()
        }
    return is_done, rows


class Clock:
    """A contestant whose decodes take the seconds given, in order, and note who went when."""

    def __init__(self, name: str, seconds: list[float], log: list[str], fails: str = "") -> None:
        self.name, self.seconds, self.log, self.fails = name, seconds, log, fails
        self.lm = LM_PLAIN
        self.page_size = 1

    def answer(
        self, prompt: str, params: Params, is_interrupted: Callable[[], bool], sample: int = 0
    ) -> Completion:
        if is_interrupted():
            raise Interrupted
        self.log.append(self.name)
        if prompt == self.fails:
            raise StrettoError("this one fails")
        (completion,) = self.lm.generate(prompt, replace(params, max_tokens=4))
        decode_s = self.seconds[(self.log.count(self.name) - 1) % len(self.seconds)]
        return replace(
            completion, timing=replace(completion.timing, decode_s=decode_s, total_s=2 * decode_s)
        )


LM_PLAIN = tiny_lm()


# -- timing ----------------------------------------------------------------------------------------


def test_every_side_is_warmed_once_a_process_by_the_first_prompt() -> None:
    log: list[str] = []
    run = job(Clock("ours", [100.0, 2.0, 1.0], log), Clock("baseline", [0.1, 6.0, 4.0], log))
    timer = Timer(run)
    rows = [all_rows(run, timer, number)["ours"] for number in (1, 2)]
    assert [row.ours and row.ours.decode_s for row in rows] == [[2.0], [1.0]]
    assert [row.baseline and row.baseline.decode_s for row in rows] == [[6.0], [4.0]]
    assert [row.ours and row.ours.repeats for row in rows] == [True, None]
    figures = metrics.figures_of(rows[0])
    assert figures["realized"] == figures["end_to_end"] == 3.0
    assert figures["efficiency"] == 3.0 / figures["theoretical"]
    assert log.count("ours") == log.count("baseline") == 3


def test_every_prompt_is_a_warm_up_of_its_own_if_asked_for() -> None:
    log: list[str] = []
    sides = Clock("ours", [100.0, 2.0], log), Clock("baseline", [0.1, 6.0], log)
    run = job(*sides, warm="every")
    timer = Timer(run)
    rows = [all_rows(run, timer, number)["ours"] for number in (1, 2)]
    assert [row.ours and row.ours.decode_s for row in rows] == [[2.0], [2.0]]
    assert [row.baseline and row.baseline.decode_s for row in rows] == [[6.0], [6.0]]


def test_a_side_that_failed_is_not_warm() -> None:
    log: list[str] = []
    run = job(Clock("ours", [9.0, 2.0], log, fails="one"), Clock("baseline", [6.0], log))
    timer = Timer(run)
    first, second = (all_rows(run, timer, number)["ours"] for number in (1, 2))
    assert first.errors == {"ours": "this one fails"}
    assert log.count("ours") == 3  # failed once, then a warm-up and a timed decode
    assert second.ours is not None
    assert second.ours.decode_s == [9.0]  # the third of the clock's


def test_who_goes_first_alternates_over_pairs_and_prompts() -> None:
    log: list[str] = []
    run = job(Clock("ours", [1.0], log), Clock("baseline", [1.0], log), num_pairs=2, warm="every")
    measure(run, 1)
    first = log.copy()
    log.clear()
    measure(run, 2)
    assert first == ["baseline", "ours", "ours", "baseline", "baseline", "ours"]
    assert log == ["ours", "baseline", "baseline", "ours", "ours", "baseline"]


def test_realized_is_the_median_over_pairs() -> None:
    log: list[str] = []
    run = job(Clock("ours", [9, 1, 2, 4], log), Clock("baseline", [9, 8, 8, 8], log), num_pairs=3)
    assert metrics.figures_of(measure(run))["realized"] == statistics.median([8.0, 4.0, 2.0])


def test_without_pairs_nothing_is_timed_and_each_side_decodes_once() -> None:
    log: list[str] = []
    run = job(Clock("ours", [1.0], log), Clock("baseline", [1.0], log), num_pairs=0)
    figures = metrics.figures_of(measure(run))
    assert sorted(log) == ["baseline", "ours"]
    assert figures["realized"] is None
    assert figures["theoretical"] == 1.0


# -- several arms ----------------------------------------------------------------------------------


def test_all_arms_are_held_against_one_decode_of_the_baseline() -> None:
    log: list[str] = []
    arms = {name: Clock(name, [s], log) for name, s in (("a", 1.0), ("b", 2.0), ("baseline", 4.0))}
    run = job(arms, Clock("the baseline", [9.0, 8.0, 6.0], log))
    timer = Timer(run)
    rows = [all_rows(run, timer, number) for number in (1, 2)]
    assert log.count("the baseline") == 3  # a warm-up and once a prompt
    for found, seconds in zip(rows, (8.0, 6.0), strict=True):
        assert [row.baseline and row.baseline.decode_s for row in found.values()] == [[seconds]] * 3
        realized = {name: metrics.figures_of(row)["realized"] for name, row in found.items()}
        assert realized == {"a": seconds, "b": seconds / 2, "baseline": seconds / 4}


def test_every_side_goes_first_as_often_as_any_other() -> None:
    log: list[str] = []
    run = job({name: Clock(name, [1.0], log) for name in "ab"}, Clock("baseline", [1.0], log))
    timer = Timer(run)
    all_rows(run, timer)
    orders = []
    for number in (1, 2, 3):
        log.clear()
        all_rows(run, timer, number)
        orders.append("".join(name[0] for name in log))
    assert sorted(order[0] for order in orders) == ["a", "b", "b"]
    assert len(set(orders)) == 3
    assert rotated(["a", "b", BASELINE], 4) == ["b", BASELINE, "a"]


def test_an_arm_that_fails_disturbs_no_other(tmp_path: Path) -> None:
    log: list[str] = []
    arms = {"a": Clock("a", [1.0], log, fails="two"), "b": Clock("b", [2.0], log)}
    is_done, rows = evaluated(job(arms, Clock("baseline", [4.0], log)), tmp_path)
    assert is_done
    assert [row.errors for row in rows["a"]] == [{}, {"ours": "this one fails"}, {}]
    assert [metrics.figures_of(row)["realized"] for row in rows["a"]] == [4.0, None, 4.0]
    assert [metrics.figures_of(row)["realized"] for row in rows["b"]] == [2.0, 2.0, 2.0]


def test_only_missing_arms_are_measured_again_with_the_baseline_beside_them(tmp_path: Path) -> None:
    log: list[str] = []

    def run(*names: str, baseline_s: float) -> Job:
        arms = {name: Clock(name, [1.0], log) for name in names}
        return job(arms, Clock("baseline", [baseline_s], log))

    assert evaluated(run("a", baseline_s=4.0), tmp_path, until=2)[0]
    log.clear()
    is_done, rows = evaluated(run("a", "b", baseline_s=8.0), tmp_path, process=1)
    assert is_done
    assert (log.count("a"), log.count("b"), log.count("baseline")) == (2, 4, 4)
    assert [metrics.figures_of(row)["realized"] for row in rows["a"]] == [4.0, 4.0, 8.0]
    assert [metrics.figures_of(row)["realized"] for row in rows["b"]] == [8.0, 8.0, 8.0]
    assert [row.process for row in rows["a"]] == [0, 0, 1]


# -- untimed answers, many at once -----------------------------------------------------------------


def many(num: int) -> Prompts:
    return Prompts(tuple(Item(f"{'long ' * (n % 5)}question {n}") for n in range(num)), {})


def fused_lm(dialect: str = "plain") -> LM:
    return tiny_lm(dialect, head_dim=16, engine="fused")


def one_by_one(run: Job) -> dict[str, list[EvalRow]]:
    timer = Timer(run)
    found = [all_rows(run, timer, n) for n in range(1, len(run.prompts.items) + 1)]
    return {name: [rows[name] for rows in found] for name in run.arms}


def test_many_at_once_gives_what_one_by_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a batch-invariant engine: texts, threads, steps and all, whoever shares the passes."""
    forking = forking_lm(head_dim=16)
    lm = LM.wrap(forking.model, forking.tokenizer, card=forking.card, engine="fused")
    other = fused_lm("apar")
    assert lm.engine.batch_invariant
    arms = {
        "pasta": Contestant(lm, "pasta"),
        "other": Contestant(other, "auto"),
        "sequential": Contestant(lm, "sequential"),
        "blind": Contestant(blind(lm), "pasta"),
    }
    params = SamplingParams(max_tokens=40, temperature=1.0)
    run = job(arms, Contestant(lm, "sequential"), num_pairs=0, prompts=many(24), params=params)
    whole = one_by_one(run)
    forward, passes = lm.engine.forward, []
    monkeypatch.setattr(lm.engine, "forward", lambda runs: passes.append(runs) or forward(runs))
    is_done, rows = evaluated(run, tmp_path)
    assert is_done
    assert rows == whole
    assert any(len(row.ours.threads) > 1 for row in rows["pasta"] if row.ours)
    steps = sum(row.baseline.sequential_steps for row in rows["pasta"] if row.baseline)
    assert len(passes) < steps / 4  # of one side alone
    for one in (lm, other):
        assert one.scheduler.pool.num_free_pages == one.scheduler.pool.num_pages


def test_what_fails_among_many_fails_alone(tmp_path: Path) -> None:
    """A prompt too long is refused; a banned token that must come breaks a pass, which is then
    nobody else's fault."""
    plain, broken = tiny_lm(), without(tiny_lm("pasta"), ["tokens"])
    prompts = Prompts((Item("word " * 600), *many(6).items), {})
    run = job(
        {"plain": Contestant(plain, "auto"), "broken": Contestant(broken, "auto")},
        Contestant(plain, "sequential"),
        num_pairs=0, prompts=prompts, params=SamplingParams(max_tokens=60, temperature=1.0, seed=4),
    )  # fmt: skip
    whole = one_by_one(run)
    is_done, rows = evaluated(run, tmp_path)
    assert is_done
    assert rows == whole
    assert [bool(row.errors) for row in rows["plain"]] == [True] + [False] * 6
    reasons = [row.errors.get("ours", "") for row in rows["broken"][1:]]
    assert any("ban another one" in reason for reason in reasons)


def test_ctrl_c_among_many_keeps_what_is_done(tmp_path: Path) -> None:
    lm = fused_lm()
    run = job(Contestant(lm, "auto"), None, num_pairs=0, prompts=many(40))
    whole = one_by_one(run)["ours"]
    presses = iter([False] * 16 + [True] * 100)
    is_done, rows = evaluated(run, tmp_path, is_interrupted=lambda: next(presses))
    assert not is_done
    assert 0 < len(rows["ours"]) < 40
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages
    is_done, rows = evaluated(run, tmp_path)
    assert is_done
    assert rows["ours"] == whole


# -- one runtime -----------------------------------------------------------------------------------


def test_both_sides_run_in_one_runtime_and_the_model_against_itself_gives_1() -> None:
    lm = tiny_lm()
    run = job(Contestant(lm, "auto"), Contestant(lm, "sequential"))
    row = measure(run)
    assert row.ours is not None
    assert row.baseline is not None
    assert row.ours.text == row.baseline.text
    assert row.ours.repeats is True
    figures = metrics.figures_of(row)
    assert (figures["theoretical"], figures["parallelism"]) == (1.0, 1.0)
    assert figures["realized"] > 0


# -- failures --------------------------------------------------------------------------------------


def test_a_failed_side_is_counted_and_scores_the_worst_there_is(tmp_path: Path) -> None:
    log: list[str] = []
    scored = Task("scored", 1, INSTRUCT.load, lambda item, text: Score(1.0))
    run = job(Clock("ours", [1.0], log, fails="two"), Clock("baseline", [2.0], log), task=scored)
    rows = evaluated(run, tmp_path)[1]["ours"]
    verdicts = {rows[0].prompt_id: 1.0, rows[2].prompt_id: None}
    figures = [metrics.figures_of(row, verdicts, has_scores=True) for row in rows]
    assert rows[1].errors == {"ours": "this one fails"}
    assert rows[1].ours is None
    assert rows[1].baseline is not None
    assert [f["score"] for f in figures] == [1.0, 0.0, 1.0]
    assert [f["preference"] for f in figures] == [1.0, 0.0, None]
    assert [f["realized"] for f in figures] == [2.0, None, 2.0]
    assert metrics.counts_of(figures)["failures"] == 1
    assert metrics.shares_of(figures)["failed"] == pytest.approx(1 / 3)
    mean = metrics.means_of(figures, 0)["realized"]
    assert (mean["prompts"], mean["left_out"], mean["geometric_mean"]) == (2, 1, 2.0)
    assert metrics.accuracy(figures, "score", 0).value == pytest.approx(200 / 3)
    assert metrics.win_rate(figures, 0).value == 50.0


def test_a_prompt_too_long_fails_alone(tmp_path: Path) -> None:
    prompts = Prompts((Item("word " * 600), Item("two")), {})
    run = job(Contestant(LM_PLAIN, "auto"), Contestant(LM_PLAIN, "sequential"), prompts=prompts)
    long, short = evaluated(run, tmp_path)[1]["ours"]
    assert set(long.errors) == {"ours", "baseline"}
    assert "512 positions" in long.errors["ours"]
    assert short.ours is not None


def test_ctrl_c_gives_up_one_prompt_and_keeps_the_others(tmp_path: Path) -> None:
    lm = tiny_lm()
    run = job(Contestant(lm, "auto"), None)
    presses = iter([False] * 30 + [True] * 100)
    is_done, rows = evaluated(run, tmp_path, is_interrupted=lambda: next(presses))
    assert not is_done
    assert [row.number for row in rows["ours"]] == [1]
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages
    is_done, rows = evaluated(run, tmp_path, process=1)
    assert is_done
    assert [row.process for row in rows["ours"]] == [0, 1, 1]


def test_no_prompts_keeps_ids_alone() -> None:
    run = job(Contestant(LM_PLAIN, "auto"), None, keeps_prompts=False)
    row = measure(run, 2)
    assert row.prompt is None
    assert row.prompt_id == PROMPTS.items[1].prompt_id
    assert row.baseline is None
    assert metrics.figures_of(row)["theoretical"] is None


# -- what threads did ------------------------------------------------------------------------------


def scripted(lm: LM, main: list[int], children: list[list[int]]) -> Completion:
    """An answer with every drawn token given; a child that is not closed goes on with its last."""
    texts = {"main": main, **{f"main.{i}": c for i, c in enumerate(children, 1)}}

    def script(thread: str, index: int) -> int:
        return texts[thread][min(index, len(texts[thread]) - 1)]

    return lm.submit("hi", SamplingParams(max_tokens=60), script=script).finish()


@pytest.fixture(scope="module")
def pasta() -> LM:
    return tiny_lm("pasta")


def promise(lm: LM, topic: str = "a") -> list[int]:
    c, encode = lm.vocabulary.control, lm.vocabulary.encode
    return [c["promise"], *encode(topic), c["tokens"], *encode("1"), c["promise_end"]]


def answer_with(lm: LM, texts: list[str], *, sync: bool = True) -> Completion:
    """An answer of promises, then maybe a sync, then the end."""
    c, encode = lm.vocabulary.control, lm.vocabulary.encode
    main = [t for _ in texts for t in promise(lm)]
    main += [c["sync"]] if sync else []
    end = next(iter(lm.vocabulary.end_ids))
    return scripted(lm, [*main, *encode("x"), end], [[*encode(t), c["async_end"]] for t in texts])


def row_of(completion: Completion) -> Answered:
    return answered([completion, completion], 1)


def test_a_joined_answer(pasta: LM) -> None:
    row = row_of(answer_with(pasta, ["abcdefgh", "ijklmnop"]))
    assert row.well_formed is True
    assert row.most_at_once == 3
    assert (row.redundant, row.unjoined) == (0, 0)
    assert [t.id for t in row.threads] == ["main", "main.1", "main.2"]
    assert row.annotated is not None
    assert "<sync/>" in row.annotated
    assert row.text == "abcdefghijklmnopx"


def test_threads_that_main_never_reads_are_counted(pasta: LM) -> None:
    row = row_of(answer_with(pasta, ["abcdefgh", "ijklmnop"], sync=False))
    assert row.unjoined == 2
    assert row.well_formed is True


def test_a_redundant_branch_raises_parallelism_but_not_the_speedup(pasta: LM) -> None:
    """The pathology that PASTA reports (thesis 3.5): why speedup is the score."""
    (baseline,) = pasta.generate("hi", SamplingParams(max_tokens=30), method="sequential")
    text = "abcdefghijklmnopqrstuvwxyz"
    figures = {}
    for name, texts in (("lean", [text]), ("redundant", [text, text])):
        ours = row_of(answer_with(pasta, texts))
        row = EvalRow(prompt_id="x", number=1, ours=ours, baseline=row_of(baseline))
        figures[name] = metrics.figures_of(row)
    assert [f["redundant"] for f in figures.values()] == [0, 1]
    assert figures["redundant"]["parallelism"] > 1.2 * figures["lean"]["parallelism"]
    assert figures["redundant"]["theoretical"] <= figures["lean"]["theoretical"]


def test_a_child_that_was_cut_is_not_well_formed(pasta: LM) -> None:
    encode = pasta.vocabulary.encode
    endless = scripted(pasta, [*promise(pasta), *encode("x" * 80)], [encode("y")])
    assert endless.finish_reason == "length"
    assert row_of(endless).well_formed is False


def test_only_methods_with_annotations_are_well_formed_or_not() -> None:
    (completion,) = LM_PLAIN.generate("hi", SamplingParams(max_tokens=5))
    row = row_of(completion)
    assert row.well_formed is None
    assert row.annotated is None
    assert row.most_at_once == 1
    figures = [metrics.figures_of(EvalRow(prompt_id="x", number=1, ours=row))]
    assert metrics.shares_of(figures)["well_formed"] is None


# -- without a control token -----------------------------------------------------------------------


def legal_ids(lm: LM, written: list[int]) -> set[int]:
    """What main may draw after these tokens."""
    seen: list[set[int]] = []
    session_of = lm.session

    def session(params: SamplingParams) -> Any:
        made = session_of(params)
        right = made.legal

        def legal(recorder: Any, thread: Any) -> Any:
            found = right(recorder, thread)
            seen.append(set(found.mask.nonzero()[0].tolist()))
            return found

        made.legal = legal
        return made

    lm.session = session  # type: ignore[method-assign]
    try:
        script = dict(enumerate(written)).get
        lm.submit(
            "hi", SamplingParams(max_tokens=len(written) + 1), script=lambda _, i: script(i)
        ).finish()
    finally:
        del lm.session
    return seen[-1]


def test_a_banned_control_token_is_legal_nowhere_and_nothing_else_changes(pasta: LM) -> None:
    control = pasta.vocabulary.control
    restricted = without(pasta, ["sync"])
    assert legal_ids(pasta, []) - legal_ids(restricted, []) == {control["sync"]}
    assert legal_ids(restricted, []) <= legal_ids(pasta, [])
    inside = [control["promise"], *pasta.vocabulary.encode("a")]
    assert legal_ids(pasta, inside) == legal_ids(restricted, inside)
    both = legal_ids(without(pasta, ["sync", "promise"]), [])
    assert not both & {control["sync"], control["promise"]}
    assert control["sync"] in legal_ids(pasta, [])
    assert restricted.scheduler is pasta.scheduler


def test_without_sync_main_goes_on_blind_after_its_promises(pasta: LM) -> None:
    """The same script but for the sync: what follows sees no child, and nothing waits."""
    encode, control = pasta.vocabulary.encode, pasta.vocabulary.control
    main = [*promise(pasta), *encode("xyz"), next(iter(pasta.vocabulary.end_ids))]
    row = row_of(scripted(without(pasta, ["sync"]), main, [[*encode("ab"), control["async_end"]]]))
    assert (row.unjoined, row.text, row.well_formed) == (1, "abxyz", True)


def test_without_joins_main_writes_its_sync_and_goes_on_blind(pasta: LM) -> None:
    lm = blind(pasta)
    whole, unread = (answer_with(m, ["abcdefghijklmnop", "q"]) for m in (pasta, lm))
    assert unread.text == whole.text
    assert unread.annotated == whole.annotated
    assert (row_of(whole).unjoined, row_of(unread).unjoined) == (0, 2)
    (main_whole, *_), (main_unread, *_) = whole.threads, unread.threads
    assert main_unread.num_tokens == main_whole.num_tokens
    assert main_unread.end_step == main_unread.num_tokens  # it never waited
    assert main_whole.end_step > main_whole.num_tokens  # type: ignore[operator]
    assert unread.trace.critical_path_steps == unread.usage.sequential_steps
    assert row_of(unread).well_formed is True
    assert pasta.scheduler.pool.num_free_pages == pasta.scheduler.pool.num_pages
    assert row_of(answer_with(pasta, ["ab"])).unjoined == 0


def test_what_cannot_be_banned_is_refused(pasta: LM) -> None:
    assert without(pasta, []) is pasta
    with pytest.raises(UnknownName, match="sync"):
        without(pasta, ["synk"])
    with pytest.raises(InvalidInput, match="no control tokens"):
        without(LM_PLAIN, ["sync"])
    with pytest.raises(InvalidInput, match="forks no threads"):
        blind(LM_PLAIN)


def test_banning_what_must_come_fails_the_answer_by_name() -> None:
    lm = without(tiny_lm("pasta"), ["tokens"])
    topic = [lm.vocabulary.control["promise"], *lm.vocabulary.encode("a") * 16]
    script = dict(enumerate(topic)).get
    stream = lm.submit("hi", SamplingParams(max_tokens=40), script=lambda _, i: script(i))
    with pytest.raises(InvalidInput, match="ban another one"):
        stream.finish()
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages
