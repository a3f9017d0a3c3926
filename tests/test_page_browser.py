"""The page as people meet it: in a browser, with a mouse, a keyboard, and files that are broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from browsing import TOLD, browser, page_at, story_server
from planned_kit import planned_lm
from serving import CHAT, Served, serving, slowed, wait_until

from stretto import SamplingParams
from stretto.cli.trace_file import trace_document

pytestmark = pytest.mark.browser

GROWTH = """() => {
  const cards = [...document.querySelectorAll('.card')];
  return Object.fromEntries(cards.map((card) => [
    card.children[0].textContent, card.children[2].textContent.length]));
}"""

RECORD = f"""() => {{
  const look = {GROWTH};
  window.seen = [];
  setInterval(() => window.seen.push([performance.now(), look()]), 100);
}}"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def served(opened: Any) -> Iterator[Served]:
    with story_server() as running:
        yield running


@pytest.fixture
def page(opened: Any, served: Served) -> Iterator[Any]:
    with page_at(opened, served) as shown:
        shown.locator("#send:enabled").wait_for()
        yield shown


def ask(page: Any, question: str = "Why walk?") -> None:
    page.locator("#question").fill(question)
    page.locator("#send").click()


def wait_for_answer(page: Any, nth: int = 0) -> str:
    page.locator('.answer[aria-busy="false"]').nth(nth).wait_for()
    page.locator("#send:visible").wait_for()
    text = page.locator(".answer").nth(nth).text_content()
    assert isinstance(text, str)
    return text


def test_threads_grow_side_by_side_and_join(page: Any, served: Served) -> None:
    page.evaluate(RECORD)
    ask(page)
    assert wait_for_answer(page) == TOLD
    seen = page.evaluate("window.seen")
    pairs = [(a, b) for (at, a), (then, b) in combinations(seen, 2) if then - at <= 1000]
    assert any(sum(b[name] > a[name] for name in a) >= 2 for a, b in pairs), seen
    _, _, body = served.ask(CHAT, served.chat("Why walk?", temperature=0, max_tokens=400))
    assert body["choices"][0]["message"]["content"] == TOLD
    lanes = page.locator("svg.lanes")
    assert "4 threads" in lanes.get_attribute("aria-label")
    assert lanes.locator("path.mark.head").count() == 3
    joined = lanes.locator("path.mark.line").first.get_attribute("d")
    assert joined.count("M") == 2  # the fork's and the join's
    assert "dense tokens (" in page.locator('[data-part="live"]').text_content()
    assert page.locator("#status").text_content().startswith("The answer is complete")
    served.check_idle()


def test_the_conversation_goes_on_and_is_scrubbed(page: Any, served: Served) -> None:
    ask(page, "Why walk?")
    assert wait_for_answer(page) == TOLD
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And why run?")
    messages = json.loads(sent.value.post_data)["messages"]
    assert messages == [
        {"role": "user", "content": "Why walk?"},
        {"role": "assistant", "content": TOLD},
        {"role": "user", "content": "And why run?"},
    ]
    assert wait_for_answer(page, 1) == TOLD
    page.get_by_role("button", name="Show its threads").first.click()
    scrubber = page.locator("#scrubber")
    last = int(scrubber.get_attribute("max"))
    scrubber.fill(str(last // 2))
    page.locator("path.playhead").wait_for(state="attached")
    half = page.evaluate(GROWTH)
    scrubber.fill(str(last))
    page.locator("path.playhead").wait_for(state="detached")
    whole = page.evaluate(GROWTH)
    assert 0 < sum(half.values()) < sum(whole.values())


def test_sequential_runs_beside_it(page: Any) -> None:
    page.locator("#compare").check()
    ask(page)
    assert wait_for_answer(page) == TOLD
    assert page.locator(".stage").count() == 2
    assert page.locator("svg.lanes").nth(1).get_attribute("aria-label").startswith("1 thread ")
    speedup = page.locator('[data-part="speedup"]').first.text_content()
    steps, in_steps, seconds = speedup.split()[:3]
    assert in_steps == "in"
    assert float(steps.rstrip("×")) > 1.2, speedup
    assert seconds == "steps,"


def test_the_keyboard_alone_is_enough(page: Any, served: Served) -> None:
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "question":
            break
    page.keyboard.type("Why")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("walk?")
    with slowed(served.lm, 0.15, least_runs=3):  # so that it is not over before it is stopped
        page.keyboard.press("Enter")
        page.locator(".card").nth(3).wait_for()
        assert page.locator(".question").text_content() == "Why\nwalk?"
        page.keyboard.press("Escape")
        page.locator("#send:visible").wait_for()
    assert page.locator(".turn .note").text_content() == "Stopped."
    assert TOLD.startswith(page.locator(".answer").text_content())
    assert page.evaluate("document.activeElement.id") == "question"
    served.check_idle()
    page.locator("#play").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    assert page.locator("#at").text_content().startswith("step 0 of")
    page.keyboard.press("ArrowRight")
    assert page.locator("#scrubber").get_attribute("aria-valuetext").startswith("step 1 of")


def test_a_trace_file_is_played_again(page: Any, served: Served, tmp_path: Path) -> None:
    lm, params = served.lm, SamplingParams(max_tokens=400)
    stream = lm.prepare([{"role": "user", "content": "hi"}], params)
    lm.queue(stream)
    while not stream.request.is_done:
        lm.step(stream.request)
    document = trace_document(stream.completion, params, "pasta", lm.vocabulary)
    path = tmp_path / "walk.json"
    path.write_text(json.dumps(document))
    page.locator("#file").set_input_files(path)
    page.locator("#player:visible").wait_for()
    assert page.locator(".document div").text_content() == TOLD
    assert "walk.json" in page.locator(".stage h3").first.text_content()
    steps = document["usage"]["sequential_steps"]
    assert page.locator("#scrubber").get_attribute("max") == str(steps)
    live = page.locator('[data-part="live"]').text_content()
    placed = sum(len(s["tokens"]) for s in document["segments"])
    assert f"of {placed} dense tokens" in live
    page.locator("#scrubber").fill("0")
    page.locator("#play").click()
    wait_until(lambda: int(page.locator("#scrubber").input_value()) > steps // 8)
    page.locator("#play").click()
    assert page.locator("#play").text_content() == "Play"


DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  window.dispatchEvent(new DragEvent('drop', {dataTransfer: data, cancelable: true}));
}"""


def test_a_broken_file_is_named_and_nothing_else_happens(page: Any) -> None:
    start = {"type": "thread_start", "thread": "main", "parent": None, "at": 0, "step": 0}
    broken = {
        "no.json": ("{", "it is not JSON."),
        "show.json": ('{"segments": []}', "what “stretto run --trace FILE” writes"),
        "null.json": ("null", "what “stretto run --trace FILE” writes"),
        "new.json": (trace(version=7), "its version is 7"),
        "empty.json": (trace(events=[]), "it has no events"),
        "lost.json": (trace(events=[start | {"parent": "x"}]), "event 1 forks main from nowhere"),
        "odd.json": (trace(events=[start, {"type": "token"}]), "event 2 (token) has a bad thread"),
        "sees.json": (trace(events=[start], segments=[{"sees": [9]}]), "segments are incomplete"),
    }
    for name, (text, reason) in broken.items():
        page.evaluate(DROP, [name, text])
        problem = page.locator("#file-problem:visible", has_text=name)
        problem.wait_for()
        assert reason in problem.text_content()
    assert page.locator(".stage").count() == 0


def trace(**fields: Any) -> str:
    return json.dumps({"format": "stretto-trace", "version": 1, "segments": [], **fields})


def test_a_busy_server_is_asked_again_and_one_that_is_gone_is_named(
    opened: Any, served: Served
) -> None:
    failures = ["429", "Failed to load resource", "504"]
    with page_at(opened, served, errors=failures) as page:
        page.locator("#send:enabled").wait_for()
        page.route("**/v1/chat/completions", lambda r: refuse(r, 429, "queue_full", "60"), times=1)
        ask(page)
        page.locator(".note", has_text="Trying again in 60 s").wait_for()
        page.get_by_role("button", name="Try now").click()
        assert wait_for_answer(page) == TOLD
        page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
        ask(page, "Again?")
        page.locator(".note", has_text="The server does not answer").wait_for()
        page.route("**/v1/chat/completions", lambda r: refuse(r, 504, "deadline_exceeded"), times=1)
        page.get_by_role("button", name="Try again").click()
        page.locator(".note", has_text="Ask for fewer tokens").wait_for()
        assert page.locator(".turn").count() == 2


def refuse(route: Any, status: int, code: str, retry_after: str | None = None) -> None:
    headers = {"Retry-After": retry_after} if retry_after else {}
    error = {"message": "no", "type": "x", "param": None, "code": code}
    route.fulfill(status=status, headers=headers, json={"error": error})


def test_a_key_is_asked_for_where_one_is_wanted(opened: Any) -> None:
    with (
        story_server(0.0, keys=("a-long-secret",)) as served,
        page_at(opened, served, errors=["401", "401"]) as page,
    ):
        assert page.locator("#banner").text_content().strip().startswith("This server wants a key.")
        page.locator("#key").fill("a-wrong-secret")
        page.keyboard.press("Enter")
        page.locator("#banner", has_text="key is wrong").wait_for()
        page.locator("#key").fill("a-long-secret")
        page.keyboard.press("Enter")
        page.locator("#send:enabled").wait_for()
        assert page.locator("#key-form").is_hidden()
        ask(page)
        assert wait_for_answer(page) == TOLD
        assert "secret" not in page.url


def test_what_a_model_writes_is_text_and_nothing_else(page: Any) -> None:
    found = page.evaluate("""async () => {
      const { Lanes } = await import('./lanes.js');
      const { setPieces } = await import('./dom.js');
      const lanes = new Lanes();
      const start = { type: 'thread_start', parent: null, topic: null, at: 0, step: 0 };
      const token = { type: 'token', markup: false, origin: 'sampled', segment: 0 };
      lanes.take({ ...start, thread: 'main' });
      lanes.take({ ...token, thread: 'main', text: '😀<b>x</b>', step: 1 });
      lanes.take({ ...start, thread: 'main.1', parent: 'main', at: 1, step: 1 });
      lanes.take({ ...token, thread: 'main.1', text: '<img src=x onerror=alert(1)>', step: 2 });
      lanes.take({ type: 'evict', thread: 'main', segment: 0, num_tokens: 1, step: 2 });
      lanes.take({ type: 'not_known_yet', thread: 'nobody' });
      const node = document.createElement('div');
      setPieces(node, lanes.pieces());
      const gone = [...node.querySelectorAll('.gone')].map((span) => span.textContent);
      return [node.textContent, node.querySelectorAll('b, img').length, gone, lanes.numSteps];
    }""")
    assert found == ["😀<img src=x onerror=alert(1)><b>x</b>", 0, ["😀", "<b>x</b>"], 2]


def test_a_block_fills_in_pass_by_pass(page: Any) -> None:
    start = {"type": "thread_start", "parent": None, "topic": None, "at": 0, "step": 0}
    token = {"type": "token", "markup": False, "origin": "sampled", "segment": 1}
    block = {"type": "denoise", "thread": "main.1", "segment": 1, "length": 4, "tokens": []}
    events = [
        start | {"thread": "main"},
        start | {"thread": "main.1", "parent": "main", "step": 1},
        block | {"pass_number": 0, "indices": [], "num_left": 4, "step": 1},
        block | {"pass_number": 1, "indices": [2], "num_left": 3, "step": 2},
        block | {"pass_number": 2, "indices": [0, 1, 3], "num_left": 0, "step": 3},
        *(
            token | {"thread": "main.1", "text": t, "step": s}
            for t, s in zip("abcd", (3, 3, 2, 3), strict=True)
        ),
        {"type": "thread_end", "thread": "main.1", "reason": "stop", "text": "", "step": 3},
    ]
    text = trace(events=events, model="m")
    page.evaluate(DROP, ["block.json", text])
    page.locator(".card", has_text="4 tokens, done").wait_for()
    drawn = {
        kind: page.locator(f"g.lane-0 path.cells.{kind}").last.get_attribute("d").count("z")
        for kind in ("text", "masked")
    }
    assert drawn == {"text": 2, "masked": 2}  # pass 0 has nothing written, the last nothing left
    assert page.locator(".document div").text_content() == "abcd"


def test_a_model_of_one_method_is_offered_no_other(opened: Any) -> None:
    own = "diffusion,window=24,block=8"
    lm = planned_lm(window=24, block=8)
    with serving(lm) as served, page_at(opened, served) as page:
        page.locator("#send:enabled").wait_for()
        assert page.locator("#method option").all_text_contents() == ["auto", own]
        assert page.locator("#compare").is_disabled()
        page.evaluate("document.querySelector('details:has(#method)').open = true")
        for chosen in ("auto", own):
            page.locator("#method").select_option(chosen)
            ask(page)
            page.locator("#send:visible").wait_for()
            page.locator('.answer[aria-busy="false"]').first.wait_for()
            assert page.locator('[data-part="title"]').first.text_content() == own


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_readable_and_still(opened: Any, served: Served, scheme: Any) -> None:
    with page_at(opened, served, color_scheme=scheme, reduced_motion="reduce") as page:
        contrast = page.evaluate("""() => {
          const value = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
          const light = (hex) => {
            const parts = [1, 3, 5].map((at) => parseInt(hex.trim().slice(at, at + 2), 16) / 255);
            const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
            const [r, g, b] = parts.map(linear);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const ratio = (a, b) => {
            const [x, y] = [light(value(a)), light(value(b))];
            return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
          };
          const texts = ['--ink', '--quiet', '--alert', '--main'];
          const lanes = [0, 1, 2, 3, 4, 5, 6].map((n) => `--lane-${n}`);
          return {
            text: Math.min(...texts.flatMap((t) => [ratio(t, '--paper'), ratio(t, '--panel')])),
            button: ratio('--accent', '--on-accent'),
            lane: Math.min(...lanes.map((lane) => ratio(lane, '--paper'))),
          };
        }""")
        assert contrast["text"] >= 4.5
        assert contrast["button"] >= 4.5
        assert contrast["lane"] >= 3
        unnamed = page.evaluate("""() => {
          const isNamed = (e) =>
            e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label');
          const all = [...document.querySelectorAll('input, select, textarea, button')];
          return all.filter((e) => !isNamed(e)).map((e) => e.id);
        }""")
        assert unnamed == []
