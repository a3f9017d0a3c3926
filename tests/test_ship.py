"""Trained models become models that come with the package: files, cards, checksums."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stretto import LM
from stretto.bench.shipping import ship
from stretto.errors import InvalidInput
from stretto.models.manifest import MANIFEST, is_intact, read_manifest
from stretto.models.shipped import shipped
from stretto.models.tiny import new_tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SUMMARY = {"trained_parameters": 900_000, "train": {"examples": 12_000}}


@contextmanager
def scripts(experiment: str) -> Iterator[None]:
    """The scripts of an experiment can be imported; their names are other experiments' too."""
    folder = BENCHMARKS / experiment
    names = {path.stem for path in folder.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_a_model_is_shipped_whole_and_anew(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "shipped" / "small"
    new_tiny(model, "tiny-1m", ["a"], dialect="tip")
    (model / "README.md").write_text("of the run")
    ship(model, folder, "# first\n", source={"arm": "x"})
    (folder / "left over").write_text("")
    ship(model, folder, "# small\n", source={"arm": "x"})
    assert is_intact(folder)
    assert {path.name for path in folder.iterdir()} == {
        *(path.name for path in model.iterdir()), MANIFEST,
    }  # fmt: skip
    assert (folder / "README.md").read_text() == "# small\n"
    told = read_manifest(folder, remedy="")
    assert (told["name"], told["source"]) == ("small", {"arm": "x"})
    assert "README.md" in told["files"]
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() == (model / weights).read_bytes()
    assert LM.load(folder, pool_slots=64, engine="hf").card.dialect == "tip"
    assert [path.name for path in folder.parent.iterdir()] == ["small"]
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InvalidInput, match="train the model first"):
            ship(path, folder, "", source={})
    assert is_intact(folder)


def test_what_comes_with_the_package_is_as_it_was_shipped() -> None:
    for name, folder in shipped().items():
        assert (folder / "README.md").read_text(encoding="utf-8").startswith(f"# {name}\n")
        if (folder / MANIFEST).is_file():
            assert is_intact(folder), name


# -- pasta -----------------------------------------------------------------------------------------


def measured(run: str, **figures: float) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run, "well_formed": 1.0, "two_at_once": 0.9, "redundant": None}
    row |= {"win_rate": 45.0, "win_rate_low": 35.0, "win_rate_high": 55.0, "parallelism": 2.0}
    return row | {"theoretical": 2.0, "theoretical_low": 1.8, "theoretical_high": 2.2} | figures


def test_the_pasta_adapter_that_validation_favours_is_shipped(tmp_path: Path) -> None:
    results, out = tmp_path / "results", tmp_path / "smollm2-135m-pasta"
    runs = [
        measured("pasta-bon-1", theoretical=9.0, well_formed=0.5),
        measured("pasta-bon-4", theoretical=8.0, win_rate_high=49.0),
        measured("pasta-sft"),
    ]
    write(results / "validation" / "compared" / "compare.json", {"runs": runs})
    write(results / "sft-pasta" / "summary.json", SUMMARY)
    with scripts("pasta"):
        import ship as pasta

        for name in (*pasta.WANTED, "notes.txt"):
            write(results / "sft-pasta" / "model" / name, {"of": name})
        given = ["--results", str(results), "--out", str(out)]
        assert pasta.main(given) == 0
        assert {path.name for path in out.iterdir()} == {*pasta.WANTED, "README.md", MANIFEST}
        (results / "sft-pasta" / "model" / pasta.WANTED[0]).unlink()
        with pytest.raises(InvalidInput, match="train the model first"):
            pasta.main(given)
        assert pasta.favoured(runs[:2])["run"] == "pasta-bon-4"
        with pytest.raises(SystemExit, match="no well-formed arm"):
            pasta.favoured(runs[:1])
    assert is_intact(out)
    assert read_manifest(out, remedy="")["source"] == {"experiment": "pasta", "arm": "pasta-sft"}
    card = " ".join((out / "README.md").read_text().split())
    assert "arm `pasta-sft` of `make reproduce-pasta`" in card
    assert "win rate 45 (35 to 55; 50 is a tie), theoretical speed-up 2.00 (1.80 to 2.20)" in card


# -- planned ---------------------------------------------------------------------------------------


def decoded(cell: str, number: int, right: float, parts: float) -> dict[str, Any]:
    return {
        "cell": cell, "prompt_id": f"p{number}", "text": "", "finish": "stop",
        "right": right, "parts": parts, "sums": 1.0, "steps": 9, "completion_tokens": 20,
        "control_tokens": 5, "seconds": 0.1, "decode_s": 0.1, "peak_slots": 30, "issues": [],
    }  # fmt: skip


def way(arm: str, knob: str, right: float, speedup: float) -> dict[str, Any]:
    row = {"cell": f"{arm} {knob}".strip(), "group": arm, "knob": knob, "problems": 500}
    for name, value in (("right", right), ("speedup", speedup)):
        row |= {name: value, f"{name}_low": 0.9 * value, f"{name}_high": 1.1 * value}
    return row


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "m"
    settings = {"variant": "dense"}
    new_tiny(folder, "tiny-1m", ["a"], dialect="planned", settings=settings)
    return folder


def test_the_planned_arm_with_more_right_answers_is_shipped(trained: Path, tmp_path: Path) -> None:
    from stretto.data.store import line_of

    results, out = tmp_path / "results", tmp_path / "tiny-planned"
    shutil.copytree(trained, results / "dense" / "model")
    write(results / "dense" / "summary.json", SUMMARY)
    write(results / "base" / "summary.json", {"train": {"examples": 30_000}})
    write(results / "base" / "config.json", {"settings": {"epochs": 2.0}})
    write(results / "dense" / "config.json", {"settings": {"epochs": 1.0}})
    table = [
        way("autoregressive", "", 95.0, 1.0), way("sparse", "", 80.0, 1.2),
        way("dense", "", 90.0, 1.2), way("dense", "tau=0.9", 89.6, 2.5),
        way("dense", "r=0.1", 60.0, 5.0),
        way("dense", "compute=0.5", 89.0, 1.0) | {"speedup": None},
    ]  # fmt: skip
    write(results / "report" / "table.json", table)
    valid = results / "answers-valid" / "valid.jsonl"
    valid.parent.mkdir()
    with scripts("planned"):
        import ship as planned
        from answers import Decoded

        def answered(*rows: dict[str, Any]) -> list[Any]:
            return [Decoded(**row) for row in rows]

        rows = answered(
            decoded("sparse", 0, 1, 1.0), decoded("sparse", 1, 0, 0.8), decoded("dense", 0, 1, 1.0),
            decoded("dense", 1, 0, 0.9), decoded("dense tau=0.9", 0, 0, 0.0),
        )  # fmt: skip
        assert planned.favoured(rows) == "dense"
        assert (
            planned.favoured(answered(*(decoded(arm, 0, 1, 1) for arm in ("dense", "sparse"))))
            == "sparse"
        )
        with pytest.raises(SystemExit, match="no answers of dense"):
            planned.favoured(rows[:2])
        valid.write_bytes(b"".join(line_of(row.model_dump()) for row in rows))
        assert planned.main(["--results", str(results), "--out", str(out)]) == 0
    assert is_intact(out)
    card = " ".join((out / "README.md").read_text().split())
    assert card.startswith("# tiny-planned A model of 0.9 million parameters")
    assert "arm `dense` of `make reproduce-planned` (variant `dense`, convention `shifted`)" in card
    assert "30,000 problems of one to five parts for 2 epochs; this one went on" in card
    assert "90 % (81 to 99) of totals right, 1.20 (1.08 to 1.32) times as fast" in card
    assert "with tau=0.9, its fastest way within 1 point of that, 90 % (81 to 99)" in card
    assert "500 test problems" in card
    assert LM.load(out, pool_slots=64, engine="hf").card.variant == "dense"


# -- tip -------------------------------------------------------------------------------------------


def arm(name: str, accuracy: float, live: float) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name}
    for key, value in (("accuracy", accuracy), ("live", live), ("saved", 100 - live)):
        row |= {key: value, f"{key}_low": value - 1, f"{key}_high": value + 1}
    return row


def test_the_tip_model_that_was_chosen_is_shipped(tmp_path: Path) -> None:
    results, out = tmp_path / "results", tmp_path / "tiny-tip"
    new_tiny(results / "choose" / "model", "tiny-1m", ["a"], dialect="tip")
    write(results / "choose" / "choice.json", {"chosen": "0.3"})
    rows = [arm("dense-grpo", 96.0, 80.0), arm("tip-kv", 97.0, 30.0)]
    (results / "report").mkdir()
    with scripts("tip"):
        import ship as tip

        sizes = tip.NORMAL
        for run in ("base", f"tip-sft-{sizes.seeds[0]}"):
            write(results / run / "summary.json", SUMMARY)
        with (results / tip.TABLE).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        assert tip.main(["--results", str(results), "--out", str(out)]) == 0
        with pytest.raises(SystemExit, match="no arm tip-kv"):
            tip.measured(rows[:1])
    assert is_intact(out)
    card = " ".join((out / "README.md").read_text().split())
    assert card.startswith("# tiny-tip A model of 0.9 million parameters")
    rows_told = "on 12,000 problems without registers and 12,000 with registers by liveness"
    assert f"{rows_told}, then {sizes.grpo.steps} steps of GRPO with weight 0.3" in card
    assert (
        "97.0 (96.0 to 98.0) % right, the same training without registers 96.0 (95.0 to 97.0) %"
        in card
    )
    assert (
        "30.0 (29.0 to 31.0) live generated tokens on average, 70.0 (69.0 to 71.0) % less" in card
    )
