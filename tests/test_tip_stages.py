"""The TIP experiment: stages whose commands parse and find what they read; controls that hide what
they say; budgets; figures of tables."""

from __future__ import annotations

import csv
import importlib.util
import itertools
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
from stretto.problems import ALPHABET, Problem, parse_sizes, problem, problems
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
    assert all(stage.minutes <= 40 for stage in found)
    assert sum(stage.minutes for stage in found) <= 340 or sizes == "FULL"
    made: set[str] = set()
    for stage in found:
        for command in stage.commands:
            if command[0] == "stretto":
                node: Any = typer.main.get_command(cli.app)
                args = list(command[1:])
                while hasattr(node, "commands"):
                    node = node.commands[args.pop(0)]
                node.make_context("stretto", args)
            else:
                assert (TIP / command[1]).is_file()
            assert read_by(command) <= made
            own = made_by(command)
            assert {path.partition("/")[0] for path in own} == {stage.folder}
            made |= own
        kept = {f"{stage.folder}/{name}" for name in stage.keeps if name != "."}
        assert kept <= made


def read_by(command: tuple[str, ...]) -> set[str]:
    """The files and folders of other commands that one needs, all but those of the report."""
    names = ("--model", "--data", "--config", "--budgets", "--plain", "--dense", "--tip", "--held")
    given = list(itertools.pairwise(command))
    found = {value for name, value in given if name in names}
    for value in (value for name, value in given if name == "--weight"):
        file, run = value.partition("=")[2].split(":")
        found |= {file, f"{run}/model", f"{run}/metrics.jsonl"}
    if command[1] == "gate.py":
        found |= {part for part in command[2:] if part.endswith(".jsonl")}
    return found


def made_by(command: tuple[str, ...]) -> set[str]:
    out = option(command, "--out")
    if command[1] == "prepare.py":
        given = list(itertools.pairwise(command))
        phases, base = (
            [v.partition(":")[0] for k, v in given if k == name] for name in ("--phase", "--base")
        )
        labels = [v.partition("=")[0] for k, v in given if k == "--labels"]
        rows = {f"{out}/{phase}-{label}.jsonl" for phase in phases for label in labels}
        return rows | {f"{out}/{phase}.jsonl" for phase in base} | {f"{out}/start"}
    if command[0] == "stretto":
        files = ("model", "metrics.jsonl", "summary.json", "config.json", "environment.json")
        return {f"{out}/{name}" for name in files}
    if command[1] == "answers.py":
        stem = out.removesuffix(".jsonl")
        return {out, f"{stem}.times.jsonl", f"{stem}.settings.json"}
    if command[1] == "choose.py":
        return {f"{out}/{n}" for n in ("kv.toml", "choice.json", "metrics.jsonl", "model")}
    return {out}


def test_the_first_seed_is_looked_at_before_the_others_are_trained(stages: Any) -> None:
    found = [stage.name for stage in stages.stages_of(stages.NORMAL)]
    assert found[:5] == ["data", "base", "tip-sft-0", "dense-sft-0", "valid-sft"]
    assert found.index("choose") < min(i for i, n in enumerate(found) if n.endswith(("-1", "-2")))
    assert found.index("valid-sft") < min(i for i, n in enumerate(found) if n.startswith("answers"))
    assert stages.NORMAL.gate >= 50


def test_weights_are_kept_of_those_that_the_repository_has(stages: Any) -> None:
    """A stage of which a fresh checkout lacks something is trained again."""
    found = stages.stages_of(stages.NORMAL)
    kept = {f"{s.name}/{n}" for s in found for n in s.keeps if n.endswith("model")}
    ignored = (TIP.parent / "results" / "tip" / ".gitignore").read_text().splitlines()
    assert kept == {line[2:-1] for line in ignored if line.startswith("!")}


def test_labels_hold_little_enough_for_what_is_to_be_shown(stages: Any) -> None:
    """Against dense text, without registers; and registers in turn hold no less, nor much more."""
    size = stages.NORMAL
    tip, turn, dense = [], [], []
    for task in ("program", "tree"):
        for one in problems(task, parse_sizes(size.sizes), 18, split="valid"):
            for into, labels in (
                (tip, Labels("liveness", size.registers, slack=size.slack)),
                (turn, Labels("round-robin", size.in_turn)),
            ):
                found = one.labelled(labels)
                assert found is not None
                into.append(found.details["mean_live"])
            dense.append((len(one.response()) + 1) / 2)
    assert 100 * (1 - sum(tip) / sum(dense)) > 59 + 5
    assert sum(tip) < sum(turn) < sum(tip) * 1.1


def test_no_other_seed_needs_a_model_of_one(stages: Any) -> None:
    """So that seeds can be run one at a time, in checkouts without models but of the first."""
    found = stages.stages_of(stages.NORMAL)
    made = {s.folder: {path for c in s.commands for path in made_by(c)} for s in found}
    for seed in stages.NORMAL.seeds[1:]:
        own = [s for s in found if s.name.endswith(f"-{seed}")]
        there = {f"{s.folder}/{name}" for s in found if s not in own for name in s.keeps}
        there |= made["data"].union(*(made[s.folder] for s in own))
        assert {p for s in own for c in s.commands for p in read_by(c)} <= there


@pytest.mark.parametrize("sizes", SIZES)
def test_arms_differ_in_nothing_but_what_they_are_named_for(sizes: str, stages: Any) -> None:
    size = getattr(stages, sizes)
    commands = [c for _, c in commands_of(stages.stages_of(size))]
    own = ("--model", "--data", "--out", "--seed", "--dialect", "--registers", "--baseline")
    for verb in ("sft", "grpo"):
        kinds = set()
        for command in commands:
            if command[:3] == ("stretto", "train", verb) and option(command, "--out") != "base":
                changed = {*own, "--kv-weight", "--config"}
                rest, skip = [], False
                for part in command:
                    if skip or part in changed:
                        skip = part in changed - {"--baseline"}
                        continue
                    rest.append(part)
                kinds.add(tuple(rest))
        assert len(kinds) == 1


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
    assert kept.live_kv.generated_mean == (sum(map(len, kept.trace.response)) + 1) / 2
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

    found = [problem("chain", 5, 1)]
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
        assert smallest(low, high, lambda _: False, rng.randint(1, 60)) == high
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
        "slots": {str(p): (16.0, 24, 6.0, 8) for p in (4, 8, 16)},
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


def arm(name: str, wrong: int = 0, **changes: Any) -> Any:
    """Forty answers, so many of them wrong."""
    from compared import Arm

    return Arm(name, {"0": [row(f"p{k}", is_right=k >= wrong, **changes) for k in range(40)]})


def arms_of(**changes: Any) -> dict[str, Any]:
    found = {
        "dense-grpo": arm("dense-grpo", wrong=4, generated_mean=10.0),
        "tip-kv": arm("tip-kv", wrong=4, generated_mean=4.0),
        "tip-grpo": arm("tip-grpo", wrong=4),
        "tip-sft": arm("tip-sft", wrong=4),
        "in-turn-grpo": arm("in-turn-grpo", wrong=30, generated_mean=4.0),
    }
    return found | changes


def verdicts(arms: dict[str, Any], baselines: dict[str, Any]) -> list[Any]:
    """Of: not below; less; lowers; longer; each baseline; in turn; ties."""
    from claims import claims

    found = claims(arms, arms, baselines)
    assert all(claim.get("reason") for claim in found if claim["holds"] is None)
    return [claim["holds"] for claim in found]


def test_claims_hold_and_fail_by_their_figures() -> None:
    baselines = {"window": arm("window", wrong=32), "random_evict": arm("random_evict", wrong=9)}
    assert verdicts(arms_of(), baselines) == [True, True, True, True, True, False, True, None]
    worse = arms_of(**{"tip-kv": arm("tip-kv", wrong=16, generated_mean=4.2)})
    found = verdicts(worse, baselines)
    assert found == [False, False, False, False, True, False, None, None]  # in turn holds less


def test_nothing_is_claimed_where_little_is_right_or_too_little_is_held() -> None:
    baselines = {"window": arm("window", wrong=40, generated_mean=3.8)}
    assert verdicts(arms_of(), baselines)[4] is None  # less than TIP
    poor = {name: arm(name, wrong=30) for name in arms_of()}
    assert verdicts(poor, {"window": arm("window", wrong=40)}) == [None] * 7
    lacking = arms_of()
    del lacking["in-turn-grpo"], lacking["tip-sft"]
    assert verdicts(lacking, {}) == [True, True, None, True, None, None]


def test_grpo_lowers_live_tokens_at_the_same_length_alone() -> None:
    tip = {"generated_mean": 4.0}
    for changes, holds in (
        ({"num_tokens": 19}, True),
        ({"num_tokens": 20}, False),  # five percent longer
        ({"num_tokens": 18}, False),
        ({"generated_mean": 5.0}, False),
        ({"wrong": 12}, False),
    ):
        own = arm("tip-kv", **({"wrong": 4} | tip | changes))
        assert verdicts(arms_of(**{"tip-kv": own}), {})[2] is holds


def test_a_window_ties_on_chains_by_its_interval() -> None:
    def chains(wrong: int) -> Any:
        return arm("window+prompt", wrong, task="chain")

    arms = arms_of(**{"tip-kv": arm("tip-kv", 4, task="chain")})
    found = [verdicts(arms, {"window+prompt": chains(n)})[-1] for n in (4, 5, 20)]
    assert found == [True, None, False]


def test_answers_that_are_empty_have_no_ratio_and_are_counted() -> None:
    from compared import live, ratio

    some, none = arm("a", generated_mean=4.0), arm("b", generated_mean=0.0)
    found = ratio(some, none, live)
    assert (found.estimate.value, found.problems, found.left_out) == (None, 40, 40)
    assert ratio(some, some, live).estimate.value == pytest.approx(1.0)


def test_speed_is_claimed_by_the_worse_end() -> None:
    from claims import speed_claims

    def measured(name: str, low: float) -> dict[str, Any]:
        return {"ratios": [{"ratio": f"{name} of dense / tip", "median": low + 1, "low": low}]}

    for low, holds in ((1.31, True), (1.29, False)):
        crowd, context = measured("seconds", low), measured("step_ms", low - 0.3)
        assert [c["holds"] for c in speed_claims(crowd, context)] == [holds, holds]


def test_the_weight_that_holds_least_is_chosen_among_the_accurate() -> None:
    from choose import choice

    weights = {"0.3": arm("a", 6, generated_mean=30.0), "1": arm("b", 6, generated_mean=20.0)}
    weights["3"] = arm("c", 16, generated_mean=10.0)
    found, facts = choice(arm("0", 5), weights)
    assert found == "1"
    assert [facts[name].get("is_as_right") for name in facts] == [None, True, True, False]
    assert choice(arm("0", 0), weights)[0] == "0.3"


def test_the_gate_tells_wrong_values_from_lost_places() -> None:
    from gate import faults, figures

    one = problem("program", 8, 3, split="valid")
    text = one.response()
    start, end = one.spans[2]
    value = text[: end - 1] + str((int(text[end - 1]) + 1) % 7) + text[end:]
    place = text[:start] + text[one.spans[3][0] :]
    rows = [row(one.id, text=t, is_right=t == text) for t in (text, text, value, place)]
    assert faults(rows) == {
        "wrong_value": 25.0, "wrong_line": 25.0, "steps_right": pytest.approx(50 + 50 * 2 / 9),
    }  # fmt: skip
    assert figures(rows)["program+tree"]["accuracy"] == 50.0
    assert set(figures(rows)) == {"program+tree", "program"}


def test_the_report_is_of_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from report import main

    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    for folder, name, labels in (
        ("answers-tip-kv-0", "tip-kv-0", ["native"]),
        ("answers-tip-kv-1", "tip-kv-1", ["native"]),
        ("answers-dense-grpo-0", "dense-grpo-0", ["native"]),
        ("policies-dense-grpo-0", "dense-grpo-0", ["window", "window+prompt"]),
        ("caches-tip-kv-0", "tip-kv-0", ["restart"]),
    ):
        write_answers(tmp_path / folder / f"{name}.jsonl", labels, rng)
    for name in ("throughput", "crowd", "long-context"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(speed_result(name)))
    (tmp_path / "tip-kv-1").mkdir()
    figures = {"accuracy": 0.5, "live": 30.0, "length": 100.0}
    lines = [{"kind": kind, "step": 1, **figures} for kind in ("train", "valid")]
    metrics = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "tip-kv-1" / "metrics.jsonl").write_text(metrics)
    wanted = ["--sizes", "6-7", "--longer", "8-9", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["report.py", *wanted])
    assert main() == 0
    table = (tmp_path / "out" / "program+tree-6-7.csv").read_text().splitlines()
    names = ["tip-kv", "dense-grpo", "dense-grpo as window", "dense-grpo as window+prompt"]
    assert {line.partition(",")[0] for line in table[1:]} == {*names, "tip-kv as restart"}
    by_arm = {row["arm"]: row for row in csv.DictReader(table)}
    assert by_arm["tip-kv"]["seeds"] == "2"
    assert by_arm["tip-kv"]["tokens_per_s"] == "50.0"
    assert by_arm["tip-kv"]["decode_s"] == "4.0"  # two tasks, two seconds each
    assert by_arm["dense-grpo as window"]["slots_9"] == ""
    told = json.loads((tmp_path / "out" / "figures.json").read_bytes())
    assert set(told["other_caches"]) == {"tip-kv as restart"}
    assert told["books_share"]["throughput"] == {"small pool, tip": 0.25}
    assert len(json.loads((tmp_path / "out" / "claims.json").read_bytes())) == 10
    assert {"tables.md", "speeds.csv", "tradeoff.png", "lengths.png", "grpo.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


def write_answers(path: Path, labels: list[str], rng: random.Random) -> None:
    from answered import Solved, Timed

    from stretto.data.store import Store

    times = path.with_name(path.name.removesuffix(".jsonl") + ".times.jsonl")
    with Store(path, Solved) as rows, Store(times, Timed) as timed:
        for label in labels:
            for task, sizes in itertools.product(("program", "tree", "chain"), ("6-7", "8-9")):
                for one in problems(task, parse_sizes(sizes), 4, split="test"):
                    changes = {"task": task, "size": one.size, "is_right": rng.random() < 0.8}
                    pages = {} if label.startswith("window") else {"9": (16.0, 24, 6.0, 8)}
                    rows.add(row(one.id, label, slots=pages, **changes))
                part = f"{task}/{sizes}/{one.id}"
                fields = {"num_answers": 4, "num_tokens": 100, "seconds": 2.0}
                timed.add(Timed(label=label, part=part, **fields))


def speed_result(name: str) -> dict[str, Any]:
    figure = "step_ms" if name == "long-context" else "seconds"
    ratios = [{"ratio": f"{figure} of dense / tip", "median": 2.0, "low": 1.5, "high": 3.0}]
    found = {"ratios": ratios, "sides": {"tip": [{"books_share": 0.25}]}}
    return {"small": found} if name == "throughput" else found


# -- rows ------------------------------------------------------------------------------------------


def test_what_is_drawn_to_hide_is_another_in_each_problem() -> None:
    from answers import params_of

    found = list(problems("chain", (8, 8), 4))
    assert len({params_of(one).seed for one in found}) == 4
    assert params_of(found[0]).seed == params_of(problem("chain", 8, 0)).seed


def test_rows_of_one_model_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    from answers import hold

    from stretto.errors import InvalidInput, ModelUnavailable

    models = [tmp_path / name for name in ("a", "b")]
    for model in models:
        model.mkdir()
        (model / "config.json").write_text(model.name)
    budgets = tmp_path / "budgets.json"
    budgets.write_text("1")
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        hold(out, models[0], budgets)
    with pytest.raises(InvalidInput, match="model"):
        hold(out, models[1], budgets)
    budgets.write_text("2")
    with pytest.raises(InvalidInput, match="budgets"):
        hold(out, models[0], budgets)
    with pytest.raises(ModelUnavailable, match="stage"):
        hold(out, tmp_path / "c", None)
    out.write_text("")
    (tmp_path / "rows.settings.json").unlink()
    with pytest.raises(InvalidInput, match=r"no rows\.settings"):
        hold(out, models[0], budgets)


def test_pages_are_told_of_pools_that_have_them(lms: dict[str, LM]) -> None:
    from answers import PAGE_SIZE, decode

    one = problem("chain", 4, 0)
    made = lms["tip"]
    paged = LM.wrap(
        made.model, made.tokenizer, card=made.card, pool_slots=1024, page_size=PAGE_SIZE
    )
    for lm, has_pages in ((lms["tip"], False), (paged, True)):
        ((found,), _) = decode(lm, [one], lambda _: "auto", "x")
        assert bool(found.slots) is (found.reserved_mean is not None) is has_pages
        assert not has_pages or found.reserved_peak % PAGE_SIZE == 0


def test_slots_are_whole_pages_of_each_segment(lms: dict[str, LM]) -> None:
    from answered import slots_of

    one = problem("program", 12, 3)
    labelled = one.labelled(Labels("liveness", 8))
    assert labelled is not None
    completion = forced(lms["tip"], one, labelled.annotated)
    live = completion.live_kv
    steps = [s.tokens for s in completion.trace.response]
    assert {len(tokens) for tokens in steps[:-1]} == {7, 8, 9}  # by the names that are read
    _, _, mean, peak = slots_of(completion.trace, 9)  # a step is a page
    assert peak % 9 == 0
    assert live.generated_mean <= mean


def prepared(monkeypatch: pytest.MonkeyPatch, out: Path, *, labels: str) -> None:
    from prepare import main

    given = ["--phase", "whole:6-8:program=3,tree=3", "--base", "short:3-4:tree=2,recall=2"]
    given += ["--shape", "tiny-1m", "--registers", "3"]
    given += [part for text in labels.split() for part in ("--labels", text)]
    command = ["prepare.py", *given, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0


def test_rows_of_all_labels_are_of_the_same_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stretto.errors import InvalidInput

    labels = "tip=liveness-3-1 in-turn=round-robin-2 random=random-3"
    prepared(monkeypatch, tmp_path, labels=labels)
    told = json.loads((tmp_path / "rows.json").read_bytes())
    texts = []
    for name in ("tip", "in-turn", "random"):
        lines = (tmp_path / f"whole-{name}.jsonl").read_text().splitlines()
        texts.append([(r["prompt"], r["response"]) for r in map(json.loads, lines)])
        assert told[f"whole-{name}"]["left_out"] == 6 - len(lines) > 0
    assert texts[0] == texts[1] == texts[2]
    assert len((tmp_path / "short.jsonl").read_text().splitlines()) == 4
    assert LM.load(tmp_path / "start", dtype="float32").card.dialect == "plain"
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in files]
    prepared(monkeypatch, tmp_path, labels=labels)
    assert [path.read_bytes() for path in files] == before
    with pytest.raises(InvalidInput, match="labels"):
        prepared(monkeypatch, tmp_path, labels="tip=liveness-3-2")


def test_words_that_are_no_labels_or_phases_are_refused() -> None:
    from prepare import labels_of, phase_of

    from stretto.errors import InvalidInput

    assert labels_of("a=liveness-8-1") == ("a", Labels("liveness", 8, slack=1))
    assert labels_of("a=liveness-8-0-shifted") == ("a", Labels("liveness", 8, shifted=True))
    assert phase_of("short:6-8:program=3,tree=3") == ("short", "6-8", "program=3,tree=3")
    for text in (
        "tip",
        "tip=liveness-",
        "tip=liveness-8-",
        "tip=liveness-8-x",
        "tip=other-8",
        "=liveness-8",
    ):
        with pytest.raises(InvalidInput, match="labels"):
            labels_of(text)
    for text in ("x", "a:b", "a:6-8:program", "a:6-8:program=x"):
        with pytest.raises(InvalidInput, match="phase"):
            phase_of(text)
