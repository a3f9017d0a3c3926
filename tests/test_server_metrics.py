"""The metrics that the docs name are those that the endpoint gives."""

from __future__ import annotations

import re
from pathlib import Path

from serving import CHAT, serving
from tiny_lms import tiny_lm

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "serving.md"
NAME = re.compile(r"\bstretto_[a-z_]+")


def given() -> dict[str, str]:
    """Names and kinds, after an answer. When counting began, `_created`, is left out."""
    with serving(tiny_lm()) as served:
        assert served.ask(CHAT, served.chat())[0] == 200
        text = served.ask("/metrics")[2].decode()
    found = re.findall(r"^# TYPE (stretto_\w+) (\w+)$", text, re.MULTILINE)
    return {name: kind for name, kind in found if not name.endswith("_created")}


def test_the_docs_name_the_metrics_that_there_are() -> None:
    metrics, page = given(), PAGE.read_text(encoding="utf-8")
    section = page.partition("### Metrics\n")[2].partition("\n```")[0]
    assert set(NAME.findall(section)) == set(metrics)
    gauges = section[section.index("gauges") :]
    histograms = section[section.index("histograms") :].partition(";")[0]
    for part, kind in ((gauges, "gauge"), (histograms, "histogram")):
        assert set(NAME.findall(part)) == {n for n, k in metrics.items() if k == kind}
    for name, kind in metrics.items():
        assert name.endswith("_total") == (kind == "counter"), name
    series = {f"{n}{end}" for n, k in metrics.items() if k == "histogram" for end in SERIES}
    for path in (PAGE, ROOT / "CHANGELOG.md"):
        named = set(NAME.findall(path.read_text(encoding="utf-8")))
        assert named <= {*metrics, *series}, path


SERIES = ("_bucket", "_sum", "_count")
