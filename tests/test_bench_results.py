"""The results page is what the committed results say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page() -> Any:
    return loaded("render_results", ROOT / "benchmarks" / "render_results.py")


def test_the_page_is_what_is_rendered(page: Any) -> None:
    shown = page.PAGE.read_text(encoding="utf-8")
    assert shown == page.render(), "run `python benchmarks/render_results.py`"


def test_the_page_of_pasta_is_what_is_rendered() -> None:
    page = loaded("render_pasta", ROOT / "benchmarks" / "pasta" / "render.py")
    shown = page.PAGE.read_text(encoding="utf-8")
    assert shown == page.render(), "run `python benchmarks/pasta/render.py`"


def make(folder: Path, kind: str, run: dict[str, Any], **tables: str) -> None:
    folder.mkdir(parents=True)
    machine = {"cpu": "a CPU", "cores": 2, "torch_threads": 2, "revision": "abc"}
    machine |= {"versions": {"torch": "2"}, **run.pop("machine", {})}
    whole = {"benchmark": kind, "command": f"stretto bench {kind}", "machine": machine}
    whole |= {"engine": "fused", "dtype": "bfloat16", "settings": {}, **run}
    (folder / "run.json").write_text(json.dumps(whole))
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)


@pytest.mark.parametrize(
    ("figures", "pairs", "expected"),
    [
        ("1.2 1.1 1.3", "7", False),
        ("1.2 1.1 1.3", "6", True),
        ("1.2 0.99 1.3", "9", True),
        ("0.81 0.8 0.85", "5", True),
        ("0.79 0.75 0.85", "5", False),
        ("1.02 1.01 1.03", None, False),
        ("1.02 0.99 1.03", None, True),
        ("1.47 0.93 2.18", None, True),
        ("1.47 0.93 2.18", "9", True),
    ],
)
def test_ties(page: Any, figures: str, pairs: str | None, expected: bool) -> None:
    row = dict(zip(("r", "p_low", "p_high"), figures.split(), strict=True))
    assert page.is_tie(row if pairs is None else row | {"pairs": pairs}, "r", "p_") is expected


def test_ties_are_called_ties(page: Any, tmp_path: Path) -> None:
    make(
        tmp_path / "step", "step", {},
        summary="context,rows,step_ratio,step_low,step_high,pairs\n128,4,1.01,0.9,1.1,7\n"
        "128,8,1.1,1.05,1.15,7\n",
    )  # fmt: skip
    make(
        tmp_path / "forks", "forks", {},
        summary="forks,tokens,theoretical,realized,low,high,pairs\n4,64,4,1.2,1.1,1.3,3\n",
    )  # fmt: skip
    make(
        tmp_path / "peers", "peers", {},
        summary="context,rows,ours,peer,ratio,low,high,pairs\n"
        "128,4,stretto fused int8,llama.cpp Q8_0,1.1,0.9,1.2,9\n"
        "128,8,stretto fused int8,llama.cpp Q8_0,1.1,1.05,1.2,9\n",
        forks="forks,tokens,ours,peer,forks_ratio,forks_low,forks_high,pairs,forks_s,sequential_s,"
        "fastest\n4,128,stretto fused int8,llama.cpp Q4_0,1.2,1.1,1.3,5,1,1.2,True\n",
    )  # fmt: skip
    make(
        tmp_path / "own", "e2e", {"settings": {"method": "sot"}}, summary="prompt\n1\n",
        means="group,figure,prompts,geometric_mean,low,high\nall,realized,5,1.5,0.9,2\n",
    )  # fmt: skip
    make(
        tmp_path / "weights", "weights", {},
        summary="side,windows,to_bf16,to_bf16_low,to_bf16_high,agreement\n"
        "fused int8,9,1.001,0.999,1.003,0.97\n",
    )  # fmt: skip
    text = page.render(tmp_path)
    for words in (
        "takes 1.01 (0.9–1.1) times that of one, no longer as far as can be told, at 128 tokens",
        "takes 1.1 (1.05–1.15) times that of one, at 128 tokens",
        "as the same tokens one after the other, a tie (4 is possible)",
        "4 sequences at 128 tokens of context, a tie.",
        "8 sequences at 128 tokens of context.",
        "a ratio of 1.2 (1.1–1.3), a tie.",
        "geometric mean of 5 prompts, a tie.",
        "perplexity is 1.001 (0.999–1.003) times that of bfloat16, a tie, and",
    ):
        assert words in text


def test_a_result_of_the_reference_is_measured_again_on_it(page: Any, tmp_path: Path) -> None:
    make(tmp_path / "old", "forks", {"engine": "hf"}, summary="forks\n1\n")
    make(tmp_path / "auto", "step", {"engine": "fused"}, summary="rows\n1\n")
    named = {"engine": "hf", "command": "stretto bench scale --engine hf"}
    make(tmp_path / "all", "weights", {"engine": "hf"}, summary="side\nhf float32\n")
    make(tmp_path / "named", "scale", named, summary="threads\n1\n")
    text = page.render(tmp_path)
    assert "\nstretto bench forks --engine hf\n" in text
    assert "\nstretto bench step\n" in text
    assert "\nstretto bench weights\n" in text
    assert "\nstretto bench scale --engine hf\n" in text


def test_what_a_peer_was_built_for_is_told(page: Any, tmp_path: Path) -> None:
    found = [{"name": "llama.cpp", "status": "measured", "version": "9", "built_for": "AVX2 = 1"}]
    found += [{"name": "vllm", "status": "not installed", "version": None, "built_for": None}]
    make(tmp_path / "peers", "peers", {"peers": found}, summary="ours,peer\na,b\n")
    text = page.render(tmp_path)
    assert "llama.cpp (9) says that it was built for: `AVX2 = 1`." in text
    assert "vllm" not in text


def test_findings_are_taken_from_the_tables(page: Any, tmp_path: Path) -> None:
    linear = {"linear_share": 0.876, "linear_low": 0.86, "linear_high": 0.88}
    make(
        tmp_path / "step", "step", {"machine": {"linear": linear}},
        summary="context,rows,step_ratio,step_low,step_high,odd\n"
        "128,1,1.0,0.9,1.1,1\n128,8,1.23456,1.1,1.3,\n",
    )  # fmt: skip
    make(
        tmp_path / "peers", "peers", {"dtype": "bfloat16,int8", "model": "random-0.5b"},
        summary="context,rows,ours,peer,ratio,low,high\n"
        "128,4,stretto fused int8,llama.cpp Q8_0,1.5,1.4,1.6\n"
        "128,4,stretto fused int8,llama.cpp BF16,9.5,9,10\n",
        forks="forks,tokens,ours,peer,forks_ratio,forks_low,forks_high,forks_s,sequential_s,"
        "fastest\n4,128,stretto fused int8,llama.cpp Q4_0,2.5,2,3,1,2.5,True\n"
        "4,128,stretto fused int8,llama.cpp BF16,7.5,7,8,1,7.5,False\n",
    )  # fmt: skip
    make(
        tmp_path / "scale", "scale", {}, summary="threads,token_ms\n1,0.00001\n",
        memory="context,threads,kv_ratio,rss_ratio,copy_kv_over_own\n2000,8,1.0,1.05,7.7\n",
    )  # fmt: skip
    make(
        tmp_path / "own", "e2e", {"settings": {"method": "sot"}}, summary="prompt\n1\n",
        means="group,figure,prompts,geometric_mean,low,high\nall,realized,5,1.2,1.1,1.3\n",
    )  # fmt: skip
    make(tmp_path / "unknown", "unknown", {}, summary="a,b\nx,\n")
    (tmp_path / "under way").mkdir()
    text = page.render(tmp_path)
    for words in (
        "a step of 8 rows takes 1.235 (1.1–1.3) times",
        "at 87.6% of the measured bandwidth (86.0%–88.0%)",
        "random weights of a 0.5B shape: 1.5 (1.4–1.6) times the tokens per second of llama.cpp Q8",
        "take 1 s; as many tokens one after the other take 2.5 s in llama.cpp Q4_0",
        "hold 1 times the keys and values of one thread",
        "a batch of copies holds 7.7 times ours",
        "1.2 (1.1–1.3) times the decode time of method sot, geometric mean of 5 prompts",
        "| a | b |",
        "| x | – |",
        "| 128 | 8 | 1.235 | 1.1 | 1.3 |",
    ):
        assert words in text
    assert "a step of 1 rows" not in text
    assert "odd" not in text
    glance = text.partition("## At a glance")[2].partition("\n## ")[0]
    assert "9.5" not in glance
    assert "7.5" not in glance
    assert "under way" not in text
    assert page.render(tmp_path / "nothing") == page.INTRO
