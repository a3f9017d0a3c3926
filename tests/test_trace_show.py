"""`stretto trace show`: golden outputs, its errors, and the view for people."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.trace import app
from stretto.errors import InvalidInput, StrettoError

GOLDEN = sorted((Path(__file__).parent / "golden").glob("pasta_*.json"))
PROMISE = '<promise topic="x" tokens="10"/>'


def show(*args: str, text: str | bytes = "") -> str:
    """What `trace show --dialect pasta` prints for a text on standard input."""
    result = CliRunner().invoke(
        app, ["show", "--dialect", "pasta", *args, "-"], input=text, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def shown(*args: str, text: str | bytes = "") -> dict[str, object]:
    found = json.loads(show("--json", *args, text=text))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_golden(golden: Path) -> None:
    case = json.loads(golden.read_text(encoding="utf-8"))
    assert shown(*case["args"], text=case["input"].encode()) == case["output"]


def test_both_layouts_and_any_quotes_show_the_same() -> None:
    one = f"a {PROMISE}<async>b</async> c <promise tokens=7 topic='y' /><async>d</async><sync />e"
    two = f'a {PROMISE} c <promise topic=y tokens="10"/><async>b</async><async>d</async><sync/>e'
    assert shown(text=one) == shown(text=two)


def test_an_empty_text_has_no_segments_and_no_cost() -> None:
    assert shown() == {
        "dialect": "pasta",
        "segments": [],
        "num_tokens": 0,
        "critical_path_steps": 0,
        "parallelism": 0.0,
        "live_tokens": {"mean": 0.0, "peak": 0, "generated_mean": 0.0, "generated_peak": 0},
        "text": "",
        "issues": [],
    }


def test_line_ends_and_a_byte_order_mark_stay() -> None:
    text = "\ufeffa\r\nb\rc\n"
    assert shown(text=text.encode())["text"] == text


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_bytes(b"a\r\n</async>")
    args = ["show", "--dialect", "pasta", "--json", str(file)]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert json.loads(result.stdout)["issues"] == [{"code": "async-without-promise", "at": 3}]


def test_options_of_both_parts_of_a_dialect_are_taken() -> None:
    own = ["show", "--dialect", "pasta+tip", "--unit", "7", "--registers", "3", "--grace", "-"]
    result = CliRunner().invoke(app, own, input=PROMISE + "x", catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_the_unit_rounds_lengths() -> None:
    segments = shown("--unit", "7", text=PROMISE + "x")["segments"]
    assert isinstance(segments, list)
    assert segments[0]["tokens"][3] == "2"
    assert segments[1]["positions"] == [5 + 14]


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dialect", "planed", "-"], r"did you mean 'planned'"),
        (["--dialect", "tip", "--registers", "0", "-"], r"--registers is 0; .* 1 to 1000"),
        (["--dialect", "pesto", "-"], r"unknown dialect 'pesto'"),
        (["--dialect", "pasta", "--policy", "fixd", "-"], r"did you mean 'fixed'"),
        (["--dialect", "pasta", "--unit", "0", "-"], r"--unit is 0; .* 1 to 2048"),
        (["--dialect", "pasta", "--unit", "2049", "-"], r"--unit is 2049"),
        (["--dialect", "pasta", "--fixed-length", "0", "-"], r"--fixed-length is 0"),
        (["--dialect", "pasta", "--fixed-length", "9", "-"], r"of policy fixed"),
        (["--dialect", "pasta", "--registers", "4", "-"], r"--registers is of dialect tip, not of"),
        (["--dialect", "pasta", "--strict", "-"], r"--grace/--strict is of dialect tip"),
        (["--dialect", "tip", "--policy", "fixed", "-"], r"--policy is of dialect pasta, not of"),
        (["--dialect", "tip", "--unit", "10", "-"], r"--unit is of .* pasta and planned, not of"),
        (["--dialect", "pasta+tip", "--dense", "-"], r"--dense/--sparse is of dialect planned"),
        (["--dialect", "planned", "--policy", "fixed", "-"], r"--policy is of dialect pasta, not"),
        (["--dialect", "plain", "--unit", "3", "-"], r"--unit is of .*, not of plain"),
        (["--dialect", "pasta", "no-such-file"], r"cannot read 'no-such-file' \(No such file"),
        (["--dialect", "pasta", "."], r"cannot read '\.' \(Is a directory"),
        (["--dialect", "pasta", "--prompt", "\udcff", "-"], r"--prompt '\\udcff' is not UTF-8"),
        (["--dialect", "pasta", "--tokenizer", "no-such-file", "-"], r"no-such-file"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as raised:
        CliRunner().invoke(app, ["show", *args], catch_exceptions=False)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_input_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(StrettoError, match="not UTF-8 at byte 1"):
        show(text=b"a\xff")


# -- the view ----------------------------------------------------------------------------------


def test_the_view_is_plain_text_when_piped() -> None:
    text = f"😀 é\x1b[31m {PROMISE}<async>one two</async>\n a</async>"
    view = show("--prompt", "why?", text=text)
    assert "\x1b" not in view
    assert "é" in view
    assert re.search(r"^main    #", view, re.MULTILINE)
    assert re.search(r"^main\.1 +###?\+", view, re.MULTILINE)
    assert "async-without-promise at 66 (line 2, column 3)" in view
    excerpt, caret = view.splitlines()[-2:]
    assert excerpt[caret.index("^") :] == "</async>"


def test_the_view_of_anything_is_printed() -> None:
    assert "0 tokens" in show()
    many = show(text=f"{PROMISE}<async>a</async>" * 120 + "</async>" * 60)
    assert "and 81 more threads" in many
    assert "and 141 more segments" in many
    assert "and 10 more issues" in many


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from stretto.cli.trace import app;"
        "app(['show', '--dialect', 'pasta', '-'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"a", check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
