"""`stretto chat`: history, commands, pipes, Ctrl-C, and the same answers as the server's."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from serving import serving
from test_cli import KEYS, interrupt_at
from tiny_lms import tiny_lm

from stretto import LM, SamplingParams
from stretto.cli import main
from stretto.cli.chat_loop import Chat, Settings
from stretto.cli.chat_turns import Turn

Chatting = Callable[..., tuple[int, str, str]]
SHORT = ("--max-tokens", "12")


@pytest.fixture(scope="module")
def lm() -> Iterator[LM]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_lm("pasta", prefix_cache=True)
    torch.set_num_threads(num_threads)


@pytest.fixture
def chat(lm: LM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chatting:
    """`chat(piped, *options)`: the verb on a tiny model; (exit status, stdout, stderr)."""
    loaded: dict[str, Any] = {}

    def load(model: str, **options: Any) -> LM:
        loaded.update(options)
        return lm

    monkeypatch.setattr("stretto.cli.answer.load", load)

    def invoke(piped: str | bytes, *options: str) -> tuple[int, str, str]:
        data = piped.encode() if isinstance(piped, str) else piped
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main(["chat", *options])
        captured = capsys.readouterr()
        assert loaded["prefix_cache"] is ("--no-prefix-cache" not in options)
        lm.scheduler.check_integrity()
        assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages
        return code, captured.out, captured.err

    return invoke


def answers(lm: LM, *questions: str, method: str = "auto", system: str | None = None) -> list[str]:
    """What a client gets who sends the history along, from a model that shares nothing."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    lm.forget_prefixes()
    texts = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        params = SamplingParams(max_tokens=12)
        texts.append(lm.generate(messages, params, method=method)[0].text)
        messages.append({"role": "assistant", "content": texts[-1]})
        lm.forget_prefixes()
    return texts


def printed(texts: list[str]) -> str:
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def test_settings_that_another_method_does_not_read_stay_with_the_first(
    chat: Chatting, lm: LM
) -> None:
    code, out, err = chat("hello\n/method sequential\nhello", "--max-forks", "3", *SHORT)
    assert code == 0
    assert "method sequential, without max_forks" in err
    assert answers(lm, "hello")[0] in out
    code, _, err = chat("hello", "--method", "sequential", "--max-forks", "3", *SHORT)
    assert code != 0
    assert "max_forks 3 is not read by method 'sequential'" in err


@pytest.mark.parametrize("method", ["auto", "sequential"])
def test_piped_messages_are_answered_with_the_history(chat: Chatting, lm: LM, method: str) -> None:
    expected = answers(lm, "hello", "and then?", "why?", method=method, system="Be brief.")
    options = ("--method", method, "--system", "Be brief.", *SHORT)
    code, out, err = chat("hello\nand then?\n\nwhy?", *options)
    assert (code, out) == (0, printed(expected))
    assert len(err.splitlines()) == 3  # a summary of each
    assert "\x1b" not in out + err


def test_a_turn_goes_on_behind_the_last_one(chat: Chatting, lm: LM) -> None:
    lm.forget_prefixes()
    _, out, _ = chat("hello\nand then?\n", "--json", "--method", "sequential", *SHORT)
    first, second = map(json.loads, out.splitlines())
    assert list(first) == ["prompt", *KEYS]
    assert [first["prompt"], second["prompt"]] == ["hello", "and then?"]
    assert first["usage"]["cached_tokens"] == 0
    # All of the first prompt; but its last token may have merged with what was answered.
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_server_gives_the_same_answers(chat: Chatting, lm: LM, prefix_cache: bool) -> None:
    questions = ["hello", "and then?", "why?"]
    options = [*SHORT, "--temperature", "1", "--seed", "4", "--json"]
    lm.forget_prefixes()
    chatted = [json.loads(line) for line in chat("\n".join(questions), *options)[1].splitlines()]
    lm.forget_prefixes()
    other = lm if prefix_cache else tiny_lm("pasta")
    messages: list[dict[str, str]] = []
    with serving(other) as served:
        for question, mine in zip(questions, chatted, strict=True):
            messages.append({"role": "user", "content": question})
            body = {
                "model": other.name, "messages": messages, "max_tokens": 12, "temperature": 1,
                "seed": 4, "stretto": {},
            }  # fmt: skip
            status, _, answer = served.ask("/v1/chat/completions", body)
            assert status == 200
            text = answer["choices"][0]["message"]["content"]
            assert text == mine["text"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (mine["usage"]["cached_tokens"] if prefix_cache else 0)
            messages.append({"role": "assistant", "content": text})
        metrics = served.ask("/metrics")[2].decode()
        served.check_idle()
    assert ("stretto_cached_prompt_tokens_total 0.0" in metrics) is not prefix_cache
    assert ("stretto_pool_cached_slots 0.0" in metrics) is not prefix_cache


BAD_LINES = {
    b"/metod": "unknown command '/metod'; did you mean '/method'?",
    b"/method no_such": "unknown method 'no_such'",
    b"/method window": "budget",
    b"/clear all": "/clear takes nothing, got 'all'; leave it out",
    b"/save": "/save needs the name of a file",
    b"/save /no/such/folder/x.json": "there is no folder",
    b"/compare": "there is no answer to compare yet; ask something first",
    b"\xff\xfe": "line 1 of standard input is not UTF-8 at byte 0",
    b"a\0b": "line 1 of standard input is binary",
    b"x" * 3000: "512 positions",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_what_cannot_be_done_is_told_on_one_line_and_the_chat_goes_on(
    line: bytes, chat: Chatting, lm: LM
) -> None:
    code, out, err = chat(line + b"\nhello\n", *SHORT, "--quiet")
    assert code == 3
    assert out == printed(answers(lm, "hello"))
    assert err.startswith("stretto: error: ")
    assert BAD_LINES[line] in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--method", "no_such"], "unknown method"),
        (["--pool-slots", "1"], "--pool-slots must be at least 2"),
        (["--temperature", "-1"], "temperature"),
        (["--system", "\udcff"], "--system"),
    ],
)
def test_bad_options_are_told_before_anything_is_loaded(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("stretto.cli.answer.load", None)
    assert main(["chat", *options]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_a_model_without_a_chat_template_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plain = tiny_lm(chat=False)
    monkeypatch.setattr("stretto.cli.answer.load", lambda model, **_: plain)
    assert main(["chat"]) == 2
    assert "has no chat template; use `stretto run --raw`" in capsys.readouterr().err


def test_commands_change_what_comes_after_them(chat: Chatting, lm: LM) -> None:
    first = answers(lm, "hello")
    plain = answers(lm, "hello", method="sequential")
    asked = "hello\n/clear\nhello\n/clear\n/method sequential\nhello\n/quit\nnever\n"
    code, out, err = chat(asked, *SHORT)
    assert (code, out) == (0, printed([*first, *first, *plain]))
    assert "method sequential" in err
    summaries = [line.split(":")[0] for line in err.splitlines() if " by " in line]
    assert summaries == ["pasta", "pasta", "sequential"]


def test_a_message_may_have_several_lines_or_begin_with_a_slash(chat: Chatting, lm: LM) -> None:
    expected = answers(lm, "one\ntwo", "/help")
    code, out, _ = chat("one\\\ntwo\r\n//help\n", *SHORT, "--quiet")
    assert (code, out) == (0, printed(expected))
    assert chat("end\\", *SHORT, "--quiet")[1] == printed(answers(lm, "end"))


def test_help_lists_every_command(chat: Chatting) -> None:
    code, out, err = chat("/help\n")
    assert (code, out) == (0, "")
    for name in ("/help", "/method [NAME]", "/compare", "/save FILE", "/clear", "/quit"):
        assert name in err


def test_save_writes_messages_and_figures(chat: Chatting, lm: LM, tmp_path: Any) -> None:
    path = tmp_path / "chat.json"
    texts = answers(lm, "hello", "why?", system="Be brief.")
    piped = f"hello\n/save {path}\nwhy?\n/save {path}\n"
    assert chat(piped, *SHORT, "--system", "Be brief.")[0] == 0
    saved = json.loads(path.read_text())
    assert saved["model"] == lm.name
    assert [m["role"] for m in saved["messages"]] == ["system"] + ["user", "assistant"] * 2
    assert [m["content"] for m in saved["messages"]][2::2] == texts
    assert [list(turn) for turn in saved["turns"]] == [["prompt", *KEYS]] * 2
    code, _, err = chat(f"hi\n/save {path}\n", *SHORT)
    assert code == 3
    assert "exists and is not of this chat; name another file" in err
    assert json.loads(path.read_text()) == saved


def test_compare_answers_the_last_question_sequentially(chat: Chatting, lm: LM) -> None:
    first, second = answers(lm, "hello", "why?")
    lm.forget_prefixes()
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "why?"},
    ]
    plain = lm.generate(history, SamplingParams(max_tokens=12), method="sequential")[0].text
    code, out, err = chat("hello\nwhy?\n/compare\n", *SHORT)
    assert (code, out) == (0, printed([first, second, plain]))
    assert "speed-up" in err.splitlines()[-1]
    line = chat("hello\n/compare\n", *SHORT, "--json")[1].splitlines()[-1]
    compared = json.loads(line)["compared"]
    assert [compared[side]["method"] for side in ("answer", "sequential")] == [
        "pasta",
        "sequential",
    ]
    code, _, err = chat("hello\n/compare\n", *SHORT, "--method", "sequential")
    assert code == 3
    assert "sequential already" in err


class Typed:
    """Somebody at a terminal, who presses Ctrl-C where a message is None."""

    is_terminal = True

    def __init__(self, *messages: str | None) -> None:
        self._messages = iter(messages)

    def read(self) -> str | None:
        for message in self._messages:
            if message is None:
                raise KeyboardInterrupt
            return message
        return None


def test_ctrl_c_cancels_the_answer_and_not_the_chat(
    lm: LM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    interrupt_at(monkeypatch, lm, 6)
    settings = Settings(SamplingParams(max_tokens=12), "sequential")
    chat = Chat(lm, settings, Typed("hello", None, "why?"))
    assert chat.run() == 0
    monkeypatch.undo()
    cut, whole = (turn.completion for turn in chat.conversation.turns)
    assert (cut.finish_reason, whole.finish_reason) == ("cancelled", "length")
    assert cut.usage.sequential_steps == 6
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": cut.text},
        {"role": "user", "content": "why?"},
    ]
    lm.forget_prefixes()
    again = lm.generate(history, SamplingParams(max_tokens=12), method="sequential")[0]
    assert whole.text == again.text
    captured = capsys.readouterr()
    assert captured.out == printed([cut.text, whole.text])
    assert "interrupted" in captured.err
    assert "/quit or the end of input" in captured.err
    lm.scheduler.check_integrity()
    assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def test_ctrl_c_ends_a_chat_that_is_piped(
    chat: Chatting, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, lm, 6)
    code, out, _ = chat("hello\nwhy?\n", *SHORT, "--json")
    assert code == 130
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["cancelled"]


def test_ctrl_c_cancels_a_comparison_and_says_so(
    lm: LM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    interrupt_at(monkeypatch, lm, 20)  # the first answer has at most 13 passes
    chat = Chat(lm, Settings(SamplingParams(max_tokens=12)), Typed("hello", "/compare", "why?"))
    assert chat.run() == 0
    assert [turn.prompt for turn in chat.conversation.turns] == ["hello", "why?"]
    assert "interrupted; there is nothing to compare" in capsys.readouterr().err


def test_ctrl_c_after_the_last_token_loses_nothing(
    lm: LM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def pressed(*args: Any) -> Turn:
        signal.raise_signal(signal.SIGINT)
        return Turn(*args)

    monkeypatch.setattr("stretto.cli.chat_loop.Turn", pressed)
    chat = Chat(lm, Settings(SamplingParams(max_tokens=12)), Typed("hello"))
    assert chat.run() == 0
    (turn,) = chat.conversation.turns
    assert turn.completion.finish_reason != "cancelled"
    assert capsys.readouterr().out == printed([turn.completion.text])


FAILURES: dict[str, tuple[Exception, str]] = {
    "limit": (MemoryError(), "decoding failed: out of memory; try fewer --pool-slots"),
    "bug": (RuntimeError("no such\nkernel"), "decoding failed: RuntimeError: no such kernel;"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_an_answer_that_fails_is_no_part_of_the_chat(
    chat: Chatting, lm: LM, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: str
) -> None:
    error, told = FAILURES[kind]
    forward, passes = lm.engine.forward, iter(range(1000))

    def failing(runs: Any) -> torch.Tensor:
        if next(passes) == 3:
            raise error
        return forward(runs)

    expected = answers(lm, "why?")
    monkeypatch.setattr(lm.engine, "forward", failing)
    code, out, err = chat("hello\nwhy?\n", *SHORT, "--quiet")
    assert code == 3
    assert out.endswith(printed(expected))
    assert f"stretto: error: {told}" in err
    assert ("no such\nkernel" in caplog.text) is (kind == "bug")  # with its traceback
    assert ("Traceback" in caplog.text) is (kind == "bug")


def test_a_terminal_sees_threads_live(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.cli.answer import PlainView
    from stretto.cli.live import LiveView

    monkeypatch.setattr("stretto.cli.answer.is_live", lambda stream: stream is sys.stdout)
    settings = Settings(SamplingParams())
    view = Chat(lm, settings, Typed())._view("hi", "sequential")
    assert isinstance(view, LiveView)
    assert view._method == "sequential"  # of what it shows, whatever answers the next question
    piped = Typed()
    piped.is_terminal = False
    assert isinstance(Chat(lm, settings, piped)._view("hi", "auto"), PlainView)
