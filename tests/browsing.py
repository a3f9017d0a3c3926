"""The page in a real browser, over a tiny model whose answers are scripted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from forking import forking_lm
from serving import SYNC, Served, serving, slowed

from stretto import LM
from stretto.runtime.request import Script

PASS_S = 0.04
TIMEOUT_MS = 60_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Promise:
    topic: str


HEALTH = "it keeps your heart strong, your joints supple, and helps you sleep through the night;"
MOOD = "it clears the head \N{EN DASH} half an hour is enough \N{EN DASH} and lifts your mood;"
COST = "and it is free: you need no tools and no room, only shoes and a door."
END = "So walk a little every day."
STORY: dict[str, list[Any]] = {
    "main": [
        "Three good reasons: ", Promise("health"), " ", Promise("mood"), " ", Promise("cost"),
        "\n\n", SYNC, END,
    ],
    "main.1": [HEALTH],
    "main.2": [MOOD],
    "main.3": [COST],
}  # fmt: skip
TOLD = f"Three good reasons: {HEALTH} {MOOD} {COST}\n\n{END}"


def told(lm: LM, story: dict[str, list[Any]] = STORY) -> Script:
    """Each thread says its parts, and ends."""
    control, encode = lm.vocabulary.control, lm.vocabulary.encode

    def ids(part: Any) -> list[int]:
        if isinstance(part, Promise):
            return [
                control["promise"], *encode(part.topic), control["tokens"], *encode("9"),
                control["promise_end"],
            ]  # fmt: skip
        return [control["sync"]] if part is SYNC else encode(part)

    end = {True: control["async_end"], False: min(lm.vocabulary.end_ids)}
    scripts = {
        name: [*(i for part in parts for i in ids(part)), end["." in name]]
        for name, parts in story.items()
    }
    return lambda thread, index: scripts[thread][index]


@contextmanager
def storytelling(lm: LM) -> Iterator[None]:
    """All that is asked is answered by `STORY`; sequentially, by its text in one thread."""
    prepare = lm.prepare
    scripts = {"sequential": told(lm, {"main": [TOLD]})}
    own = told(lm)

    def forced(prompt: Any, params: Any, *, method: str = "auto", **options: Any) -> Any:
        script = scripts.get(method, own)
        return prepare(prompt, params, method=method, script=script, **options)

    lm.prepare = forced  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del lm.prepare


@contextmanager
def story_server(pass_s: float = PASS_S, **settings: Any) -> Iterator[Served]:
    """A server that tells the story, a step each `pass_s`."""
    lm = forking_lm(max_positions=2048)
    with storytelling(lm), slowed(lm, pass_s), serving(lm, **settings) as served:
        yield served


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium. Skips the test where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no browser tests: pip install playwright"
    )
    path = os.environ.get("STRETTO_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), "")
    if not path:
        pytest.skip("no browser tests: no Chromium on PATH; install it, or set STRETTO_BROWSER")
    with playwright.sync_playwright() as running:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        opened = running.chromium.launch(executable_path=path, args=options)
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def page_at(
    opened: Any, served: Served, *, errors: list[str] | None = None, **options: Any
) -> Iterator[Any]:
    """The page of a server in a fresh context; at the end, it has logged no error but `errors`."""
    context = opened.new_context(viewport={"width": 1280, "height": 800}, **options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    found: list[str] = []
    page.on("console", lambda m: found.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.goto(f"http://127.0.0.1:{served.port}/")
    try:
        yield page
        expected = errors or []
        assert len(found) == len(expected), found
        assert all(part in text for part, text in zip(expected, found, strict=True)), found
    finally:
        context.close()
