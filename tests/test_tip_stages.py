"""The TIP experiment: stages whose commands parse and find what they read; controls that hide what
they say; budgets; figures of tables."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from stretto import LM, SamplingParams, cli
from stretto.data.labels import Labels
from stretto.data.registers import last_uses
from stretto.models.tiny import make_tiny
from stretto.problems import ALPHABET, Problem, problem
from stretto.trace import visible

TIP = Path(__file__).resolve().parents[1] / "benchmarks" / "tip"
SIZES = ("NORMAL", "FULL", "QUICK")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("stages", TIP / "stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stages", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TIP))


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def commands_of(stages: list[Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    return ((stage, command) for stage in stages for command in stage.commands)


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
def test_commands_parse_and_read_what_stages_before_them_made(sizes: str, stages: Any) -> None:
    found = stages.stages_of(getattr(stages, sizes))
    assert len({stage.name for stage in found}) == len(found)
    assert all(stage.minutes <= 40 for stage in found) or sizes == "FULL"
    made = {"choose/model", *(f"data/start-{s}{end}" for s in range(3) for end in ("", "-plain"))}
    for stage, command in commands_of(found):
        if command[0] == "stretto":
            node: Any = typer.main.get_command(cli.app)
            args = list(command[1:])
            while hasattr(node, "commands"):
                node = node.commands[args.pop(0)]
            node.make_context("stretto", args)
        else:
            assert (TIP / command[1]).is_file()
        if "--model" in command:
            assert option(command, "--model") in made
            if option(command, "--model") == "choose/model":
                assert "choose" in made
        out = option(command, "--out")
        assert out.partition("/")[0] in (stage.folder, "data")
        made |= {out, f"{out}/model"}


@pytest.mark.parametrize("sizes", SIZES)
def test_arms_differ_in_nothing_but_what_they_are_named_for(sizes: str, stages: Any) -> None:
    size = getattr(stages, sizes)
    commands = [c for _, c in commands_of(stages.stages_of(size))]
    own = ("--model", "--data", "--out", "--seed", "--dialect", "--registers", "--baseline")
    for verb in ("sft", "grpo"):
        kinds = set()
        for command in commands:
            if command[:3] == ("stretto", "train", verb):
                changed = {*own, "--kv-weight", "--config"}
                rest, skip = [], False
                for part in command:
                    if skip or part in changed:
                        skip = part in changed - {"--baseline"}
                        continue
                    rest.append(part)
                kinds.add(tuple(rest))
        assert len(kinds) == (len(size.phases) if verb == "sft" else 1)


def test_nothing_is_chosen_on_the_test_split(stages: Any) -> None:
    for stage, command in commands_of(stages.stages_of(stages.NORMAL)):
        if "--split" in command:
            chosen = stage.name.startswith(("valid", "budgets"))
            training = command[:2] == ("stretto", "train")
            split = "train" if training else "valid" if chosen else "test"
            assert option(command, "--split") == split


# -- caches ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lms() -> dict[str, LM]:
    """Random weights, a dense model and one with eight registers."""
    found = {}
    for dialect, settings in (("plain", {}), ("tip", {"num_registers": 8})):
        made = make_tiny("tiny-1m", list(ALPHABET), dialect=dialect, settings=settings)
        found[dialect] = LM.wrap(made.model, made.tokenizer, card=made.card, pool_slots=1024)
    return found


def forced(lm: LM, one: Problem, text: str, **options: Any) -> Any:
    """The completion of a text that the model is made to write."""
    control = {f"<{name}>": token for name, token in lm.card.control.items()}
    ids: list[int] = []
    while text:
        tag = next((form for form in control if text.startswith(form)), None)
        ids += lm.vocabulary.encode(text[0]) if tag is None else [control[tag]]
        text = text[1 if tag is None else len(tag) :]
    ids.append(min(lm.vocabulary.end_ids))
    params = SamplingParams(max_tokens=len(ids))
    return lm.submit(one.prompt, params, script=lambda _, k: ids[k], **options).finish()


def test_oracle_sees_the_steps_that_are_still_read_and_no_others(lms: dict[str, LM]) -> None:
    from caches import Oracle

    one = problem("program", 12, 3)
    completion = forced(lms["plain"], one, one.response(), method=Oracle(one))
    steps = completion.trace.response
    assert [lms["plain"].vocabulary.decode(s.tokens) for s in steps] == [s.text for s in one.steps]
    last = last_uses(one.reads)
    for k, step in enumerate(steps):
        for j in range(k):
            assert visible(step, 0, steps[j], 0) == (last[j] >= k)
    assert completion.finish_reason == "stop"
    assert completion.text == one.response()


def test_remembering_registers_let_go_of_nothing(lms: dict[str, LM]) -> None:
    from caches import remembering

    one = problem("program", 12, 3)
    labelled = one.labelled(Labels("liveness", 8))
    assert labelled is not None
    usual = forced(lms["tip"], one, labelled.annotated)
    kept = forced(remembering(lms["tip"]), one, labelled.annotated)
    assert usual.annotated == kept.annotated == labelled.annotated
    assert usual.live_kv.generated_mean == pytest.approx(labelled.details["mean_live"])
    assert kept.live_kv.generated_mean == (len(kept.trace.response) * 8 - 3 + 1) / 2
    again = forced(lms["tip"], one, labelled.annotated)  # the first one is as it was
    assert again.live_kv == usual.live_kv


def test_restart_sees_what_the_runtime_sees(lms: dict[str, LM]) -> None:
    from restart import Writer

    one = problem("tree", 13, 1)
    labelled = one.labelled(Labels("liveness", 8))
    assert labelled is not None
    trace = forced(lms["tip"], one, labelled.annotated).trace
    control = frozenset(lms["tip"].card.control.values())
    prompt = [(t, p) for s in trace.prompt for t, p in zip(s.tokens, s.positions, strict=True)]
    writer = Writer(list(prompt), len(prompt), limit=1000)
    for segment in trace.response:
        seen = [
            (t, p)
            for k in sorted(segment.sees)
            for t, p in zip(trace.segments[k].tokens, trace.segments[k].positions, strict=True)
        ]
        for token, position in zip(segment.tokens, segment.positions, strict=True):
            writer.place(token, control)
            seen.append((token, position))
            assert writer.seen == seen


def test_restart_loses_what_survivors_had_taken_from_steps_that_are_gone() -> None:
    """In a model of one layer they take nothing: its keys and values are of their own tokens."""
    from answers import decode
    from restart import restarted

    found = [problem("chain", 5, 0)]
    same = []
    for num_layers in (1, 4):
        lm = talkative(num_layers)
        usual, _ = decode(lm, found, lambda _: "auto", "x")
        assert usual[0].generated_mean < usual[0].dense_generated_mean / 1.5
        again, _ = restarted(lm, found, "x", lambda p: 10 * len(p.steps))
        same.append([row.text for row in again] == [row.text for row in usual])
    assert same == [True, False]


def talkative(num_layers: int) -> LM:
    """Random weights, so large that what is seen matters, and that write registers."""
    made = make_tiny("tiny-1m", list(ALPHABET), dialect="tip", settings={"num_registers": 8})
    model = made.model
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    for weight in model.model.layers.parameters():
        weight.data *= 6 if weight.ndim == 2 else 1
    head = torch.randn(made.vocabulary.size, 128, generator=torch.Generator().manual_seed(0))
    head[len(ALPHABET) + 2 : -8] = 0  # bytes
    head[-8:] *= 2
    model.lm_head.weight = torch.nn.Parameter(head)
    return LM.wrap(model, made.tokenizer, card=made.card, pool_slots=1024)


def test_a_pinned_prompt_is_not_counted_in_its_budget(lms: dict[str, LM]) -> None:
    from caches import Budgeted

    one = problem("chain", 8, 0)
    for rule in ("window", "streaming_llm", "paged_h2o", "random_evict"):
        method = Budgeted(rule, 12, pin_prompt=True)
        live = forced(lms["plain"], one, one.response(), method=method).live_kv
        assert live.generated_peak == 12
        length = len(one.response())
        assert live.generated_mean == pytest.approx(12 - 12 * 11 / (2 * length))


# -- budgets and figures ---------------------------------------------------------------------------


def enough(asked: list[int], wanted: int, budget: int) -> bool:
    asked.append(budget)
    return budget >= wanted


def test_the_smallest_budget_is_found_from_any_guess() -> None:
    from budgets import smallest, window_budget

    rng = random.Random(0)
    for _ in range(200):
        low, high = sorted(rng.sample(range(1, 60), 2))
        wanted = rng.randint(low, high)
        asked: list[int] = []
        is_enough = partial(enough, asked, wanted)
        assert smallest(low, high, is_enough, rng.randint(1, 60)) == wanted
        assert len(asked) == len(set(asked))
    budget = window_budget(26.0, 150)
    assert budget - budget * (budget - 1) / 300 == pytest.approx(26.0)
    assert window_budget(75.5, 150) == pytest.approx(150)  # dense


def row(problem_id: str, label: str = "native", **changes: Any) -> Any:
    from answered import Solved

    fields: dict[str, Any] = {
        "label": label, "problem": problem_id, "task": "program", "size": 12, "method": "x",
        "is_right": True, "is_exact": True, "finish": "stop", "num_prompt_tokens": 10,
        "num_tokens": 19, "live_mean": 15.0, "live_peak": 20, "generated_mean": 5.0,
        "generated_peak": 8, "text": "",
        "slots": {str(p): (16.0, 24, 6.0, 8) for p in (1, 4, 8, 16)},
    }  # fmt: skip
    return Solved(**(fields | changes))


def test_a_problem_counts_once_however_many_seeds_answered_it() -> None:
    from compared import Arm, accuracy, table_row

    arm = Arm("a", {"0": [row("p"), row("q", is_right=False)], "1": [row("p"), row("q")]})
    assert arm.by_problem(accuracy) == {"p": 100.0, "q": 50.0}
    found = table_row(arm, Arm("b", {"0": [row("p", is_right=False), row("q")]}))
    assert (found["accuracy"], found["problems"], found["seeds"]) == (75.0, 2, 2)
    assert (found["accuracy_least"], found["accuracy_most"]) == (50.0, 100.0)
    assert found["accuracy_over_dense"] == 25.0
    assert found["saved"] == 50.0  # 5 of (19 + 1) / 2
    assert found["reserved_mean"] is None  # rows from before it was kept
    held = [
        row("p", reserved_mean=20.0, reserved_peak=24),
        row("q", reserved_mean=30.0, reserved_peak=40),
    ]
    found = table_row(Arm("a", {"0": held}), None)
    assert (found["reserved_mean"], found["reserved_peak"]) == (25.0, 32.0)


def test_claims_hold_and_fail_by_their_figures() -> None:
    from compared import Arm, claims

    def arm(name: str, wrong: int = 0, **changes: Any) -> Arm:
        rows = [row(f"p{k}", is_right=k >= wrong, **changes) for k in range(20)]
        return Arm(name, {"0": rows})

    dense = {"generated_mean": 10.0}
    arms = {
        "dense-grpo": arm("dense-grpo", wrong=2, **dense),
        "tip-kv": arm("tip-kv", wrong=2, generated_mean=4.0),
        "tip-grpo": arm("tip-grpo", wrong=2),
        "tip-sft": arm("tip-sft", wrong=2),
    }
    baselines = {"window": arm("window", wrong=6), "random_evict": arm("random_evict", wrong=5)}
    held = [claim["holds"] for claim in claims(arms, baselines)]
    assert held == [True, True, True, False, True]
    arms["tip-kv"] = arm("tip-kv", wrong=9, generated_mean=4.2)
    held = [claim["holds"] for claim in claims(arms, baselines)]
    assert held == [False, False, False, False, False]


def test_the_weight_that_holds_least_is_chosen_among_the_accurate() -> None:
    from choose import choice

    def rows(wrong: int, held: float) -> list[Any]:
        return [row(f"p{k}", is_right=k >= wrong, generated_mean=held) for k in range(100)]

    weights = {"0.3": rows(6, 30.0), "1": rows(6, 20.0), "3": rows(8, 10.0)}
    assert choice(rows(5, 40.0), weights, 0.01) == "1"
    assert choice(rows(0, 40.0), weights, 0.01) == "0.3"


def test_slots_are_whole_pages_of_each_segment(lms: dict[str, LM]) -> None:
    from answered import slots_of

    one = problem("program", 12, 3)
    labelled = one.labelled(Labels("liveness", 8))
    assert labelled is not None
    completion = forced(lms["tip"], one, labelled.annotated)
    live = completion.live_kv
    assert slots_of(completion.trace, 1) == pytest.approx(
        (live.mean, live.peak, live.generated_mean, live.generated_peak)
    )
    steps = [s.tokens for s in completion.trace.response]
    assert all(len(tokens) in (8, 5) for tokens in steps)
    _, _, mean, peak = slots_of(completion.trace, 8)  # a step is a page
    assert peak % 8 == 0
    assert live.generated_mean <= mean <= live.generated_mean + 7


def test_rows_of_all_labels_are_of_the_same_problems(tmp_path: Path) -> None:
    from prepare import drawn, labels_of, write_models, write_rows

    found, left_out = drawn("6-8", "program=3,tree=3", registers=3)
    assert len(found) + left_out == 6
    assert left_out
    texts = []
    for text in ("tip=liveness-8-4", "in-turn=round-robin-4", "random=random-8"):
        name, labels = labels_of(text)
        write_rows(tmp_path / name, found, labels)
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        texts.append([(r["prompt"], r["response"]) for r in rows])
    assert texts[0] == texts[1] == texts[2]
    write_models(tmp_path, "tiny-1m", 8, seed=3)
    tip, plain = (LM.load(tmp_path / f"start-3{end}", dtype="float32") for end in ("", "-plain"))
    assert plain.card.dialect == "plain"
    for name, weight in plain.model.state_dict().items():
        assert weight.equal(tip.model.state_dict()[name][: len(weight)])
