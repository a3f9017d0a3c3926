"""The results page is what the committed results say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def page() -> Any:
    path = ROOT / "benchmarks" / "render_results.py"
    spec = importlib.util.spec_from_file_location("render_results", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["render_results"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_is_rendered(page: Any) -> None:
    shown = page.PAGE.read_text(encoding="utf-8")
    assert shown == page.render(), "run `python benchmarks/render_results.py`"


def make(folder: Path, kind: str, run: dict[str, Any], **tables: str) -> None:
    folder.mkdir(parents=True)
    machine = {"cpu": "a CPU", "cores": 2, "torch_threads": 2, "revision": "abc"}
    machine |= {"versions": {"torch": "2"}, **run.pop("machine", {})}
    whole = {"benchmark": kind, "command": f"stretto bench {kind}", "machine": machine}
    whole |= {"engine": "fused", "dtype": "bfloat16", "settings": {}, **run}
    (folder / "run.json").write_text(json.dumps(whole))
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)


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
