"""The page as files: served with the right headers, complete, and with nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, serving
from tiny_lms import tiny_lm

import stretto
from stretto.server.page_files import PAGE

ROOT = Path(stretto.__file__).parents[2]
NAMES = sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
TYPES = {
    ".html": {"text/html; charset=utf-8"},
    ".css": {"text/css; charset=utf-8"},
    ".js": {"text/javascript; charset=utf-8", "application/javascript"},
    ".svg": {"image/svg+xml"},
}
REFERENCE = re.compile(r"""(?:\bsrc|\bhref|\bfrom|\bimport)\s*[=(]?\s*["']([^"'#]+)["']""")
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_lm(), keys=("a-long-secret",)) as running:
        yield running


@pytest.mark.parametrize("name", ["", *NAMES])
def test_each_file_is_served_without_a_key(served: Served, name: str) -> None:
    status, headers, body = served.ask(f"/{name}")
    kind = Path(name or "index.html")
    assert status == 200
    assert headers["content-type"] in TYPES[kind.suffix]
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert body == (PAGE / kind).read_bytes()


def test_other_paths_are_the_apis(served: Served) -> None:
    for path in ("/nothing.js", "/../app.py", "/page/index.html", "/%2e%2e/app.py"):
        status, _, body = served.ask(path)
        assert status == 404
        assert body["error"]["type"] == "not_found_error"
    status, _, body = served.ask("/main.js", {}, method="POST")
    assert status == 405
    assert "not allowed" in body["error"]["message"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_loaded_from_elsewhere_and_all_that_is_loaded_is_there(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8")
    assert re.findall(r"\w+://[^\s\"'`]*|[\"'(]//\w", text.replace(NAMESPACE, "")) == []
    assert len(text.splitlines()) <= 300
    for reference in REFERENCE.findall(text):
        assert (PAGE / reference).is_file(), reference


def test_text_never_becomes_markup_and_nothing_is_inline() -> None:
    for name in NAMES:
        text = (PAGE / name).read_text(encoding="utf-8")
        unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|localStorage"
        assert re.findall(unsafe, text) == [], name
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page) == []
    assert re.findall(r"<script[^>]*>([^<]+)", page) == []


def test_modules_use_only_elements_that_the_page_has() -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    there = set(re.findall(r'\bid="([^"]+)"', page))
    parts = set(re.findall(r'\bdata-part="([^"]+)"', page))
    scripts = "".join((PAGE / n).read_text(encoding="utf-8") for n in NAMES if n.endswith(".js"))
    assert set(re.findall(r'(?:byId|copyOf)\("([^"]+)"\)', scripts)) <= there
    assert set(re.findall(r'#part\("([^"]+)"\)', scripts)) <= parts
    assert len(there) == len(re.findall(r'\bid="', page))
    described = re.findall(r'(?:aria-labelledby|aria-describedby|\bfor)="([^"]+)"', page)
    assert described
    assert set(described) <= there


def test_an_installed_package_has_the_page(tmp_path: Path) -> None:
    build = (
        "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    )
    source = tmp_path / "source"
    (source / "src/stretto/server").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for path in (PAGE.parent.parent / "__init__.py", *PAGE.parent.glob("*.py")):
        target = source / "src" / path.relative_to(ROOT / "src")
        target.write_bytes(path.read_bytes())
    (source / "src/stretto/server/page").mkdir()
    for name in NAMES:
        (source / "src/stretto/server/page" / name).write_bytes((PAGE / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    wheel = next(tmp_path.glob("*.whl"))
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"stretto/server/page/{name}" for name in NAMES} <= packed
