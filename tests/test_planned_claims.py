"""What the planned experiment claims: by intervals, of ways chosen on other problems, and of
nothing that is as good as guessing; its report, from made-up answers to files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_scripts import all_but, loaded, made_up, measured

from stretto.data.store import line_of
from stretto.eval.multipart import problems

TRAINED = {
    "autoregressive": {"tokens": 100}, "autoregressive-longer": {"tokens": 180},
    "sparse": {"tokens": 190},
}  # fmt: skip
ALL = all_but(range(0), 200)
CHOOSE = (
    "choose.py --answers answers/valid.jsonl --costly answers/valid-costly.jsonl "
    "--out chosen/chosen.json"
)


@pytest.fixture
def scripts() -> Iterator[dict[str, Any]]:
    with loaded() as found:
        yield found


def claimed(scripts: dict[str, Any], own: str, ways: dict[str, Any]) -> dict[str, Any]:
    """Claims on right totals by their words, where one planned way is chosen for everything."""
    tested, module = measured(scripts, ways), scripts["claims"]
    chosen = {
        "goals": {"right": {module.goal_name(*goal): own for goal in module.TO_BEAT}},
        "rivals": {"right": dict.fromkeys(ways, own)},
    }
    return {c["claim"]: c for c in module.claims(tested, chosen, "right", TRAINED)}


GOAL = (
    "1.27 times as fast as autoregressive, at most 1.0 points worse, after 1.90 times its "
    "training tokens"
)


def test_a_goal_is_reached_where_intervals_are_beyond_it(scripts: dict[str, Any]) -> None:
    told = claimed(scripts, "sparse", {"autoregressive": (ALL, 1.0), "sparse": (ALL, 0.7)})
    goal = told.pop(GOAL)
    assert goal["holds"] is True
    assert goal["speedup"] == pytest.approx(1 / 0.7)
    assert goal["decode_speedup"] == pytest.approx(1 / 0.7)
    assert (goal["points"], goal["points_low"], goal["problems"]) == (0, 0, 200)
    slower = GOAL.replace("1.27", "1.81").replace("1.0 points", "5.4 points")
    assert told.pop(slower)["holds"] is False
    assert len(told) == 6  # no answers of the longer reference, of rivals, of ablations
    assert all(claim["holds"] is None for claim in told.values())
    assert all("no answers of" in claim["reason"] for claim in told.values())


def test_a_mean_within_the_points_is_not_enough(scripts: dict[str, Any]) -> None:
    """Both are right as often, but not on the same problems: ten points less are possible."""
    own, other = all_but(range(8), 80), all_but(range(40, 48), 80)
    told = claimed(scripts, "sparse", {"autoregressive": (other, 1.0), "sparse": (own, 0.1)})
    assert told[GOAL]["points"] == 0
    assert told[GOAL]["points_low"] < -1
    assert told[GOAL]["holds"] is False


def test_the_cost_of_a_larger_model_decides_times_alone(scripts: dict[str, Any]) -> None:
    """Points are of all answers; where it was timed, texts that differ are counted."""
    module = scripts["claims"]
    tested = measured(scripts, {"autoregressive": (ALL, 1.0), "sparse tau=0.9": (ALL, 1.0)})
    few = {"autoregressive": (all_but(range(9), 9), 1.0), "sparse tau=0.9": (ALL[:9], 0.5)}
    costly = measured(scripts, few)
    rows = costly["sparse tau=0.9"].rows
    changed = {**rows, "3": rows["3"].model_copy(update={"text": "other"})}
    costly["sparse tau=0.9"] = replace(costly["sparse tau=0.9"], rows=changed)
    goals = {module.goal_name(*goal): "sparse tau=0.9" for goal in module.TO_BEAT}
    chosen = {"costly": {"right": goals}}
    told = module.costly_claims(tested, costly, chosen, "right", TRAINED)
    assert [claim["holds"] for claim in told] == [True, True]
    assert [claim["speedup"] for claim in told] == pytest.approx([2.0, 2.0])
    assert (told[0]["points"], told[0]["timed"], told[0]["same_texts"]) == (0, 9, [8, 9])
    missing = module.costly_claims(tested, {}, chosen, "right", TRAINED)
    assert [claim["holds"] for claim in missing] == [None, None]


def test_a_longer_reference_is_compared_too(scripts: dict[str, Any]) -> None:
    ways = {
        "autoregressive": (all_but(range(40), 200), 1.0), "sparse": (ALL, 0.5),
        "autoregressive-longer": (ALL, 1.1),
    }  # fmt: skip
    told = claimed(scripts, "sparse", ways)
    claim = GOAL.replace("autoregressive", "autoregressive-longer").replace("1.90", "1.06")
    assert told[claim]["training_tokens_ratio"] == pytest.approx(190 / 180)
    assert told[claim]["speedup"] == pytest.approx(2.2)
    assert told[GOAL]["points"] == pytest.approx(20)


def test_nothing_holds_where_answers_may_be_guesses(scripts: dict[str, Any]) -> None:
    few = [k % 25 == 0 for k in range(200)]
    ways = {
        "autoregressive": (few, 1.0), "sparse": (few, 0.1), "diffusion": (few, 4.0),
        "diffusion tau=0.9": (few, 2.0), "no-topics": (all_but(range(200), 200), 0.1),
    }  # fmt: skip
    told = claimed(scripts, "sparse", ways)
    assert len(told) == 8
    assert all(claim["holds"] is None for claim in told.values())
    assert all("20.0 %" in c["reason"] or "no answers" in c["reason"] for c in told.values())


def test_the_floor_is_above_guessing(scripts: dict[str, Any]) -> None:
    """Of one who knows which results and totals are common, and for parts their kind too."""
    found, floors = problems(5, 400, "test"), scripts["claims"].FLOORS
    totals = Counter(problem.total for problem in found)
    assert 100 * max(totals.values()) / totals.total() < floors["right"]
    kinds: dict[str, Counter[int]] = {}
    for part in (part for problem in found for part in problem.parts):
        kinds.setdefault(part.kind, Counter())[part.result] += 1
    guessed = sum(max(results.values()) for results in kinds.values())
    assert 100 * guessed / sum(results.total() for results in kinds.values()) < floors["parts"]


def test_verdicts_on_rivals_need_both_intervals(scripts: dict[str, Any]) -> None:
    half = all_but(range(100), 200)
    ways = {
        "autoregressive": (ALL, 1.0), "sparse": (all_but(range(3), 200), 0.7),
        "blocks": (half, 2.0), "blocks tau=0.99": (all_but(range(4, 8), 200), 2.0),
        "blocks tau=0.5": (half, 0.3), "blocks tau=0.9": (ALL, 0.9),
    }  # fmt: skip
    told = claimed(scripts, "sparse", ways)["planned is as fast and as good as each way of blocks"]
    verdicts = {name: against["verdict"] for name, against in told["against"].items()}
    assert verdicts == {
        "blocks": "beaten", "blocks tau=0.99": "tie", "blocks tau=0.5": "not beaten",
        "blocks tau=0.9": "tie",
    }  # fmt: skip
    assert told["holds"] is False
    assert (told["of"], told["beaten"], told["tie"], told["not beaten"]) == (4, 1, 2, 1)
    few = {name: ways[name] for name in ("autoregressive", "sparse", "blocks")}
    told = claimed(scripts, "sparse", few)["planned is as fast and as good as each way of blocks"]
    assert told["holds"] is True


def test_an_ablation_is_worse_if_its_interval_is(scripts: dict[str, Any]) -> None:
    ways = {
        "autoregressive": (ALL, 1.0), "sparse": (all_but(range(2), 200), 0.7),
        "no-topics": (all_but(range(20), 200), 0.7), "one-round": (all_but(range(3), 200), 0.7),
    }  # fmt: skip
    told = claimed(scripts, "sparse", ways)
    assert told["no-topics is worse than sparse"]["holds"] is True
    assert told["no-topics is worse than sparse"]["points"] == pytest.approx(9)
    assert told["one-round is worse than sparse"]["points"] == pytest.approx(0.5)
    assert told["one-round is worse than sparse"]["holds"] is False


def test_the_best_of_the_fast_enough_is_chosen(scripts: dict[str, Any]) -> None:
    ways = {
        "autoregressive": (all_but(range(0), 20), 1.0), "sparse": (all_but(range(1), 20), 0.75),
        "sparse tau=0.9": (all_but(range(3), 20), 0.4), "dense": (all_but(range(3), 20), 0.35),
        "diffusion": (all_but(range(0), 20), 2.0), "blocks": (all_but(range(0), 20), 0.1),
    }  # fmt: skip
    slower = {"autoregressive": (ALL[:20], 1.0), "sparse tau=0.9": (all_but(range(3), 20), 0.6)}
    told = scripts["choose"].choose(measured(scripts, ways), measured(scripts, slower))
    assert told["problems"] == 20
    assert set(told["costly"]["right"].values()) == {"sparse tau=0.9"}
    assert told["goals"]["right"] == {"1.27 within 1.0": "sparse", "1.81 within 5.4": "dense"}
    assert told["rivals"]["parts"] == {"diffusion": "sparse", "blocks": "dense"}


def test_threads_are_claimed_by_steps_and_by_what_is_lost_without_reading_them(
    scripts: dict[str, Any],
) -> None:
    module, half = scripts["claims"], all_but(range(90), 200)
    blind = all_but(range(190), 200)
    ways = {"autoregressive": (half, 1.0), "pasta": (half, 0.4), "no-sync": (blind, 0.4)}
    tested = measured(scripts, ways)
    tested["no-sync"] = sums_of(tested["no-sync"], lambda k: float(k % 20 == 0))
    saved, lost = module.thread_claims(tested)
    assert saved["claim"] == (
        "pasta has right totals within 2.0 points of autoregressive, in at least 2.0 times fewer "
        "steps"
    )
    assert saved["holds"] is True
    assert saved["fewer_steps"] == pytest.approx(2.5)
    assert (saved["points"], saved["problems"]) == (0, 200)
    assert lost["holds"] is True
    assert [lost[name] for name in ("sums", "sums_without", "points")] == pytest.approx(
        [100, 5, 95]
    )
    assert lost["parts_points"] == pytest.approx(25)


def test_threads_that_save_too_little_or_lose_too_much(scripts: dict[str, Any]) -> None:
    module, half = scripts["claims"], all_but(range(90), 200)
    worse = all_but(range(94), 200)
    for way in ((half, 0.52), (worse, 0.4)):
        tested = measured(scripts, {"autoregressive": (half, 1.0), "pasta": way})
        saved, lost = module.thread_claims(tested)
        assert saved["holds"] is False
        assert (lost["holds"], lost["reason"]) == (None, "there are no answers of ['no-sync']")
    few = {"autoregressive": (all_but(range(170), 200), 1.0), "pasta": (ALL, 0.2)}
    assert module.thread_claims(measured(scripts, few))[0]["holds"] is None
    both = measured(scripts, {"pasta": (half, 0.5), "no-sync": (half, 0.5)})
    both["no-sync"] = sums_of(both["no-sync"], lambda k: float(k % 2))
    lost = module.thread_claims(both)[1]
    assert lost["points"] == pytest.approx(50)
    assert lost["holds"] is False  # its low end is below


def sums_of(way: Any, sums: Callable[[int], float]) -> Any:
    """The same answers, other ones of which add up their own results."""
    rows = {k: row.model_copy(update={"sums": sums(int(k))}) for k, row in way.rows.items()}
    return replace(way, rows=rows)


def test_a_throughput_is_claimed_at_its_low_end(scripts: dict[str, Any]) -> None:
    rows = [
        {"cell": cell, "group": group, "ratio": 3.0, "ratio_low": low, "ratio_high": 4, "sets": 9}
        for cell, group, low in (
            ("autoregressive", "autoregressive", 1.0), ("sparse", "sparse", 2.5),
            ("dense", "dense", 2.49),
        )
    ]  # fmt: skip
    told = scripts["claims"].throughput_claims({"ways": rows})
    assert [claim["holds"] for claim in told] == [True, False]


# -- table and report ------------------------------------------------------------------------------


def test_rows_of_arms_that_learnt_less_have_no_times(scripts: dict[str, Any]) -> None:
    figures, cells = scripts["figures"], scripts["cells"]
    less = cells.compute_cells(("0.5",))[1]
    rows = made_up(scripts, less.name, ALL, 0.5)
    own = figures.by_cell([less], rows)[less.name]
    reference = measured(scripts, {"autoregressive": (ALL, 1.0)})["autoregressive"]
    row = figures.table_row(own, reference, {less.arm: {"tokens": 7, "seconds": 2.0}})
    none = ("seconds", "speedup", "speedup_low", "decode_speedup")
    assert all(row[name] is None for name in none)
    assert (row["training_tokens"], row["training_seconds"]) == (7, 2.0)
    assert row["fewer_steps"] == pytest.approx(2.0)
    assert row["right"] == 100


def test_cells_that_lack_problems_are_left_out(scripts: dict[str, Any]) -> None:
    ways = {"autoregressive": (ALL, 1.0), "sparse": (ALL, 0.5), "dense": (ALL[1:], 0.5)}
    cells = {cell.name: cell for cell in scripts["cells"].CELLS}
    rows = [row for name, way in ways.items() for row in made_up(scripts, name, *way)]
    found = scripts["figures"].of_cells(list(cells.values()), rows)
    assert [m.cell.name for m in found] == ["autoregressive", "sparse"]


def test_frontier_is_what_nothing_beats(scripts: dict[str, Any]) -> None:
    rows = [
        {"cell": "a", "seconds": 1.0, "right": 50}, {"cell": "b", "seconds": 2.0, "right": 40},
        {"cell": "c", "seconds": 3.0, "right": 60}, {"cell": "d", "seconds": 3.0, "right": 55},
    ]  # fmt: skip
    assert scripts["figures"].on_frontier(rows, "right") == ["a", "c"]


def experiment(scripts: dict[str, Any], folder: Path) -> None:
    """Made-up answers and runs in a work folder, as the stages leave them."""
    cells = scripts["cells"]
    less = cells.compute_cells(("0.5",))
    took = {"autoregressive": 1.0, "autoregressive-longer": 1.1, "pasta": 0.6, "diffusion": 4.0}
    rights = all_but(range(2), 12)
    files = {"valid": rights, "part-0": rights, "more": [True] * 16, "compute-0.5": rights}
    files |= {"valid-costly": rights, "costly": rights[:9]}
    for name, right in files.items():
        of = less if name.startswith("compute") else cells.CELLS
        if name.endswith("costly"):
            of = scripts["answers"].cells_of("costly")
        if name == "more":
            of = [
                c
                for c in cells.CELLS
                if c.arm in ("autoregressive", "autoregressive-longer", "pasta", "sparse", "dense")
                and c.joins
            ]
        rows = [row for c in of for row in made_up(scripts, c.name, right, took.get(c.arm, 0.5))]
        path = folder / "answers" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(line_of(row.model_dump()) for row in rows))
    for number, arm in enumerate(dict.fromkeys(c.arm for c in (*cells.CELLS, *less))):
        line = {"kind": "train", "step": 1, "loss": 1.5, "tokens": 100 * (number + 1)}
        for run, tokens in ((cells.BASE, 10), (arm, line["tokens"])):
            (folder / run).mkdir(parents=True, exist_ok=True)
            told = line_of({**line, "tokens": tokens, "seconds": 2.0})
            (folder / run / "metrics.jsonl").write_bytes(told * 3)
    way = {"cell": "sparse", "group": "sparse", "ratio": 3.0, "ratio_low": 2.6, "ratio_high": 4.0}
    (folder / "throughput").mkdir()
    (folder / "throughput" / "result.json").write_text(json.dumps({"ways": [{**way, "sets": 9}]}))


def test_the_report_is_made_of_what_stages_leave(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    experiment(scripts, tmp_path)
    for module, line in (
        ("choose", CHOOSE),
        ("report", "report.py --out report"),
    ):
        monkeypatch.setattr("sys.argv", line.split())
        assert scripts[module].main() == 0
    made = {path.name for path in Path("report").iterdir()}
    tables = {f"{name}.{end}" for name in ("table", "costly") for end in ("json", "csv", "md")}
    qualities = ("right", "parts")
    pictures = {f"{kind}-{q}.png" for kind in ("frontier", "compute") for q in qualities}
    pictures |= {f"frontier-{q}-costly.png" for q in qualities}
    assert made == {"claims.json", *tables, *pictures}
    table = {row["cell"]: row for row in json.loads(Path("report/table.json").read_text())}
    cells = scripts["cells"]
    every = [*cells.CELLS, *cells.compute_cells(("0.5",))]
    assert set(table) == {cell.name for cell in every}
    assert table["sparse"]["training_tokens"] > table["autoregressive"]["training_tokens"] == 330
    assert table["autoregressive-longer"]["training_tokens"] == 30 + 600  # with the base
    assert table["sparse 0.5"]["training_seconds"] == 12
    assert table["no-sync"]["sums"] == 100
    assert table["sparse 0.5"]["seconds"] is None
    text = Path("report/table.md").read_text().splitlines()
    assert len(text) == len(table) + 2
    assert "| sparse 0.5 |" in "\n".join(text)
    told = json.loads(Path("report/claims.json").read_text())
    assert told["left_out"] == []
    assert told["throughput"][0]["holds"] is True
    threads = told["threads"]
    assert [claim["problems"] for claim in threads] == [16, 12]
    assert [claim["holds"] for claim in threads] == [False, False]  # as made up: 1.7 times, no loss
    goals = [claim for claim in told["claims"]["right"] if "times as fast" in claim["claim"]]
    assert {goal["problems"] for goal in goals} == {16}  # those of `more` too
    assert [goal["holds"] for goal in goals] == [True] * 4
    slower = json.loads(Path("report/costly.json").read_text())
    assert [row["cell"] for row in slower] == [
        c.name for c in cells.CELLS if c.name in cells.COSTLY
    ]
    assert {row["problems"] for row in slower} == {9}
    for goal in told["costly"]["right"]:
        assert (goal["problems"], goal["timed"], goal["holds"]) == (16, 9, True)
        assert goal["same_texts"] == [9, 9]
    assert set(told["trained"]) == {cell.arm for cell in every}
    own = told["trained"]["sparse"]
    assert own["tokens_over_reference"] == pytest.approx(own["tokens"] / 330, abs=1e-3)
