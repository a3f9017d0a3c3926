"""Takes the pictures of the web page in `docs/pictures`, in a headless Chromium.

    python docs/photograph.py

A tiny model tells the story of `tests/browsing.py`; playwright and a Chromium must be installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
SIZE = {"width": 1200, "height": 760}


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from browsing import browser, page_at, story_server

    with browser() as opened, story_server() as served:
        with page_at(opened, served, color_scheme="dark", reduced_motion="reduce") as page:
            _ask(page)
            page.locator(".card").nth(3).wait_for()
            page.locator(".card-text", has_text="sleep").wait_for()
            page.screenshot(path=PICTURES / "page-dark.png")
            page.locator("#send:visible").wait_for()
        with page_at(opened, served, color_scheme="light", reduced_motion="reduce") as page:
            page.locator("#compare").check()
            _ask(page)
            page.locator('.answer[aria-busy="false"]').wait_for()
            page.locator("#send:visible").wait_for()
            page.wait_for_timeout(500)
            page.screenshot(path=PICTURES / "page-light.png")


def _ask(page: object) -> None:
    page.set_viewport_size(SIZE)
    page.locator("#send:enabled").wait_for()
    page.locator("#question").fill("Why should I walk?")
    page.locator("#send").click()


if __name__ == "__main__":
    main()
