"""`stretto run` and `doctor`: one-line errors, prompts, streaming, JSON, Ctrl-C, the live view."""

from __future__ import annotations

import errno
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny_lms import tiny_lm

import stretto
from stretto.cli import main
from stretto.cli.answer import PlainView, num_held
from stretto.cli.inputs import read_prompt
from stretto.cli.live import REFRESH_S, LiveView, tail
from stretto.cli.output import escaped, is_live, write_file
from stretto.errors import InvalidInput, StrettoError
from stretto.runtime.events import Evicted, ThreadEnd, ThreadStart, Token

STRETTO = str(Path(sys.executable).with_name("stretto"))
KEYS = [
    "text", "finish_reason", "method", "model", "engine", "seed",
    "threads", "usage", "live_kv", "timing", "speedup", "issues",
]  # fmt: skip


@pytest.fixture(scope="module")
def lm():
    """One CPU thread is quickest for a tiny model."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_lm("pasta")
    torch.set_num_threads(num_threads)


@pytest.fixture
def run(lm, monkeypatch, capsys):
    """`run(*arguments)`: the verb on a tiny model; returns (exit status, stdout, stderr)."""
    monkeypatch.setattr("stretto.cli.answer.load", lambda model, **_: lm)

    def invoke(*arguments):
        code = main(["run", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


def interrupt_at(monkeypatch, lm, number):
    """Ctrl-C is pressed during the pass of this number."""
    passes = iter(range(1, 10_000))
    step = lm.step

    def stepping(request):
        step(request)
        if next(passes) == number:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(lm, "step", stepping)


# --- bad input -----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin").write_bytes(b"caf\xe9")
    Path("binary").write_bytes(b"\x7fELF\0\1")
    Path("blank").write_bytes(b" \n\n")
    Path("folder").mkdir()
    return tmp_path


BAD = {
    "temperature must be a finite number, got nan": ["hi", "--temperature", "nan"],
    "temperature must be at least 0, got -1.0": ["hi", "--temperature", "-1"],
    "max_tokens must be at least 1, got 0": ["hi", "--max-tokens", "0"],
    "max_tokens must be at least 1, got -3": ["hi", "--max-tokens", "-3"],
    "'--max-tokens'": ["hi", "--max-tokens", "many"],
    "top_p must be above 0": ["hi", "--top-p", "0"],
    "top_k must be at least 0, got -1": ["hi", "--top-k", "-1"],
    "stop string '' is empty": ["hi", "--stop", ""],
    "--threads must be at least 1, got 0": ["hi", "--threads", "0"],
    "--pairs must be at least 1, got 0": ["hi", "--compare", "--pairs", "0"],
    "--page-size 9 exceeds --pool-slots 8": ["hi", "--page-size", "9", "--pool-slots", "8"],
    "'sequentail'; did you mean 'sequential'?": ["hi", "--method", "sequentail"],
    "unknown method 'zzz'; known: apar, auto, dense": ["hi", "--method", "zzz"],
    "unknown dtype 'float16'": ["hi", "--dtype", "float16"],
    "the prompt is empty": [""],
    "the prompt 'caf\\udce9' is not UTF-8": ["caf\udce9"],
    "standard input is empty": ["-"],
    "'blank' is empty": ["--file", "blank"],
    "'latin' is not UTF-8 at byte 3": ["--file", "latin"],
    "'binary' is binary": ["--file", "binary"],
    "'folder' (Is a directory)": ["--file", "folder"],
    "'missing' (No such file or directory)": ["--file", "missing"],
    "larger than": ["--file", "/dev/zero"],
    "leave one out": ["hi", "--file", "latin"],
    "--system needs the chat template": ["hi", "--system", "x", "--raw"],
    "'folder' is a folder": ["hi", "--trace", "folder"],
    "no folder 'nowhere'": ["hi", "--trace", "nowhere/t.json"],
    "No such option: --nope": ["hi", "--nope"],
}


@pytest.mark.parametrize(("message", "arguments"), BAD.items(), ids=list(BAD))
def test_bad_input_is_told_on_one_line_before_anything_is_loaded(
    message, arguments, files, monkeypatch, capsys
):
    monkeypatch.setattr("stretto.cli.answer.load", lambda *_, **__: pytest.fail("loaded a model"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("stretto: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_errors_and_help_need_no_torch():
    tried = [["--help"], ["run", "--help"], ["nope"], *BAD.values()]
    script = (
        "import sys; from stretto.cli import main\n"
        f"for arguments in {tried!r}: print(main(arguments), file=sys.stderr)\n"
        "main(['run', 'hi', '--model', '/nowhere'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_the_script_tells_unknown_verbs_and_models():
    for arguments, message in [
        (["runn"], b"No such command 'runn'. Did you mean 'run'?"),
        (["run", "hi", "--model", "nowhere"], b"unknown model or folder 'nowhere'"),
        (["trace", "show", "/nowhere", "--dialect", "pasta"], b"cannot read '/nowhere'"),
        (["trace", "show", "-", "--dialect", "pastaa"], b"did you mean 'pasta'?"),
    ]:
        done = subprocess.run([STRETTO, *arguments], capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (2, b"")
        assert message in done.stderr
        assert done.stderr.count(b"\n") == 1


def test_help_is_quick():
    """Under 0.3 s; on a slow machine, under three times what it takes to import the libraries
    that parse and draw it."""
    libraries = [sys.executable, "-c", "import pydantic, typer.main, typer.rich_utils"]
    limit = max(0.3, 3 * min(cpu_seconds(libraries) for _ in range(3)))
    assert min(cpu_seconds([STRETTO, "--help"]) for _ in range(5)) < limit
    done = subprocess.run([STRETTO, "--help"], capture_output=True, check=True)
    for verb in (b"run", b"trace", b"model", b"bench", b"doctor"):
        assert verb in done.stdout


def test_a_reader_that_went_away_ends_it_quietly(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("word " * 30_000)
    command = [STRETTO, "trace", "show", str(path), "--dialect", "pasta", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a folder", "x.tmp", None, "x.png"), "'x.png': Is a"),
        (PermissionError(errno.EACCES, "Permission denied", b"x\xff"), "Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "y" * 9), "'yyyyyyyyy': File name"),
        (OSError(errno.ENOSPC, "No space left on device", "z"), "cannot use 'z'"),
    ],
)
def test_what_the_system_refuses_of_a_file_is_one_line(
    error: OSError, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("stretto.eval.folder.load_run", fails)
    assert main(["eval", "compare", "run"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stretto: error: cannot use ")
    assert told in captured.err
    assert captured.err.count("\n") == 1


def test_an_error_of_the_system_that_is_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "ours")

    monkeypatch.setattr("stretto.eval.folder.load_run", fails)
    with pytest.raises(FileNotFoundError, match="ours"):
        main(["eval", "compare", "run"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [STRETTO, "--version"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"stretto: error: cannot write to standard output: No space")
    assert done.stderr.count(b"\n") == 1


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stretto {stretto.__version__}\n"


def test_ctrl_c_before_decoding(monkeypatch, capsys):
    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.cli.answer.load", load)
    assert main(["run", "hi"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_prompt_longer_than_the_context_is_told_with_both_numbers(run):
    code, out, err = run("word " * 600)
    assert (code, out) == (2, "")
    assert "but the model has 512 positions" in err
    assert err.count("\n") == 1


# --- prompts -------------------------------------------------------------------------------------


def stdin(data):
    return io.TextIOWrapper(io.BytesIO(data))


@pytest.mark.parametrize("argument", [None, "-"])
@pytest.mark.parametrize(
    ("data", "prompt"), [(b"a\nb\n", "a\nb"), (b"a\r\n", "a"), ("é\n\n".encode(), "é\n")]
)
def test_the_prompt_from_stdin_less_one_line_end(data, prompt, argument, monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin(data))
    assert read_prompt(argument, None) == prompt


def test_the_prompt_from_a_file_and_from_an_argument(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin(b"unread"))
    (tmp_path / "p.txt").write_text("from a file\n")
    assert read_prompt(None, tmp_path / "p.txt") == "from a file"
    assert read_prompt("as it is\n", None) == "as it is\n"


def test_a_terminal_is_not_read_as_a_prompt(monkeypatch):
    terminal = stdin(b"typed")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(InvalidInput, match="no prompt"):
        read_prompt(None, None)


# --- answers -------------------------------------------------------------------------------------


def test_json_is_one_object_with_the_documented_keys(run):
    code, out, err = run("hello", "--json", "--max-tokens", "30", "--seed", "7", "--system", "Be.")
    answer = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert list(answer) == KEYS
    assert answer["seed"] == 7
    assert answer["speedup"].keys() == {"parallelism", "theoretical", "realized"}
    assert answer["speedup"]["realized"] is None
    assert answer["threads"][0]["parent"] is None


def test_plain_output_is_the_text_of_the_json(run):
    arguments = ("hello", "--max-tokens", "25", "--method", "sequential")
    text = json.loads(run(*arguments, "--json")[1])["text"]
    code, out, err = run(*arguments)
    assert (code, out) == (0, text + "\n")
    assert err.startswith("sequential: 25 tokens by 1 thread in 25 steps (1.00 a step), ")
    assert "cut at --max-tokens 25" in err
    assert run(*arguments, "--quiet") == (0, text + "\n", "")


def test_compare_fills_in_the_speedups(run):
    arguments = ("hello", "--compare", "--pairs", "2", "--max-tokens", "12")
    answer = json.loads(run(*arguments, "--json")[1])
    assert answer["speedup"]["theoretical"] > 0
    assert answer["speedup"]["realized"] > 0
    code, out, err = run(*arguments)
    assert (code, out) == (0, answer["text"] + "\n")
    assert "realized (median of 2 pairs)" in err
    told = re.search(r"speed-up (.+) theoretical \((.+) tokens a step, an answer (.+) times", err)
    assert told is not None
    theoretical, a_step, length = map(float, told.groups())
    assert theoretical == pytest.approx(a_step / length, abs=0.2)  # all but the end's own token


def test_the_trace_file(run, lm, tmp_path):
    path = tmp_path / "t.json"
    path.write_text("old")
    code, out, _ = run("hello", "--trace", str(path), "--json", "--max-tokens", "20")
    document, answer = json.loads(path.read_text()), json.loads(out)
    assert code == 0
    assert (document["format"], document["version"]) == ("stretto-trace", 1)
    assert (document["dialect"], document["method"]) == ("pasta", "pasta")
    assert document["text"] == answer["text"]
    assert document["prompt_tokens"] == len(document["segments"][0]["tokens"])
    for segment in document["segments"]:
        assert segment["tokens"] == [lm.vocabulary.piece(i) for i in segment["token_ids"]]
    assert [e["type"] for e in document["events"]][:: len(document["events"]) - 1] == [
        "thread_start",
        "done",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_trace_that_cannot_be_written_after_all_leaves_the_old_one(tmp_path):
    path = tmp_path / ("x" * 300)
    with pytest.raises(StrettoError, match="cannot write"):
        write_file(path, b"new")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_keeps_what_there_is(run, lm, monkeypatch, tmp_path):
    arguments = ("hello", "--max-tokens", "40", "--method", "sequential")
    whole = json.loads(run(*arguments, "--json")[1])
    path = tmp_path / "t.json"
    interrupt_at(monkeypatch, lm, 9)
    code, out, _ = run(*arguments, "--json", "--trace", str(path))
    partial = json.loads(out)
    assert code == 130
    assert list(partial) == KEYS
    assert partial["finish_reason"] == "cancelled"
    assert partial["usage"]["sequential_steps"] == 9
    assert whole["text"].startswith(partial["text"].rstrip("\ufffd"))
    assert json.loads(path.read_text())["finish_reason"] == "cancelled"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    lm.scheduler.check_integrity()


def test_ctrl_c_while_comparing_keeps_the_whole_answer(run, lm, monkeypatch):
    arguments = ("hello", "--max-tokens", "10", "--method", "sequential", "--compare")
    interrupt_at(monkeypatch, lm, 25)
    code, out, _ = run(*arguments, "--json")
    assert code == 130
    assert json.loads(out)["usage"]["sequential_steps"] == 10


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a bug")])
def test_a_failure_keeps_what_there_is(error, run, lm, monkeypatch, capsys):
    forward, passes = lm.engine.forward, iter(range(100))

    def failing(runs):
        if next(passes) == 5:
            raise error
        return forward(runs)

    monkeypatch.setattr(lm.engine, "forward", failing)
    if isinstance(error, MemoryError):
        code, out, err = run("hello", "--json")
        assert code == 1
        assert err.startswith("stretto: error: decoding failed: out of memory")
    else:
        with pytest.raises(RuntimeError, match="a bug"):
            run("hello", "--json")
        out = capsys.readouterr().out
    assert json.loads(out)["finish_reason"] == "error"
    lm.scheduler.check_integrity()


def test_sigint_in_the_real_program(tmp_path):
    """Ctrl-C while text streams: exit 130, and what was written stays."""
    folder = tmp_path / "model"
    save_tiny(folder)
    command = [STRETTO, "run", "hello", "--model", str(folder), "--max-tokens", "4000"]
    command += ["--threads", "1", "--temperature", "1", "--offline"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert len(begun) == 20
    assert rest.endswith(b"\n")
    assert b"interrupted" in err
    assert err.count(b"\n") == 1


def save_tiny(folder):
    """A plain model without an end of sequence and with room for a long answer."""
    from tiny_lms import tiny_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- streaming -----------------------------------------------------------------------------------


def test_plain_text_streams_but_not_what_a_stop_string_may_cut(capsysbinary):
    view = PlainView(("STOP",))
    written = []
    for text in ("One", "One S", "One ST", "One STone", "One STone ST"):
        view.update([], text)
        written.append(capsysbinary.readouterr().out)
    assert written == [b"One", b" ", b"", b"STone", b" "]
    view.finish("One STone ")
    assert capsysbinary.readouterr().out == b"\n"


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_held_back_is_the_longest_possible_beginning_of_a_stop(text, stop):
    held = num_held(text, stop)
    ends = [
        n
        for n in range(1, len(text) + 1)
        if any(s.startswith(text[-n:]) and len(s) > n for s in stop)
    ]
    assert held >= max(ends, default=0)
    assert held == 0 or any(s.startswith(text[-held:]) for s in stop)


# --- the live view -------------------------------------------------------------------------------


def token(thread, index, text, step, *, markup=False, origin="sampled", segment=0):
    return Token(thread, index, index, text, markup, origin, index, step, None, segment)


SCENE = [
    ThreadStart("main", None, None, 0, 0),
    token("main", 0, "Before. ", 1),
    token("main", 1, "", 2, markup=True),
    ThreadStart("main.1", "main", "a \x1b[31mtopic", 8, 2),
    token("main.1", 0, "", 2, markup=True, origin="injected"),
    token("main", 2, "After.", 3),
    token("main.1", 1, "Child\x1b[2J", 3),
]


def live_view(**options):
    options = {"force_terminal": True, "width": 72, "height": 10, "_environ": {}} | options
    console = Console(file=io.StringIO(), highlight=False, **options)
    ticks = iter(range(0, 10_000))
    return console, LiveView(
        console,
        lambda ids: f"<{ids}>",
        method="pasta",
        model="tiny",
        clock=lambda: next(ticks) * REFRESH_S,
    )


def shown(console, view):
    with console.capture() as capture:
        console.print(view.render())
    return capture.get()


def test_the_live_view_puts_children_in_their_place():
    console, view = live_view(color_system=None)
    for event in SCENE:
        view.document.take(event)
    view.update([], "")
    lines = shown(console, view).splitlines()
    assert lines[0].startswith("pasta · 2 of 2 threads open · 4 tokens in 3 steps · ")
    assert lines[1].split() == ["●", "main", "●", "a", "\\x1b[31mtopic"]
    assert lines[2] == "Before. Child\\x1b[2J▌After.▌"
    view.update([ThreadEnd("main.1", "stop", "!", 4)], "")
    assert "✓ a" in shown(console, view)


def test_what_a_thread_lets_go_of_is_struck_out_while_it_decodes():
    console, view = live_view(color_system="standard")
    steps = [token("main", n, f"step{n} ", n + 1, segment=n) for n in range(3)]
    view.update([SCENE[0], *steps, Evicted("main", 1, 7, 3)], "")
    drawn = shown(console, view)
    assert "3 tokens in 3 steps · 7 let go" in drawn
    assert [word for word in ("step0", "step1", "step2") if f"\x1b[2;9m{word}" in drawn] == [
        "step1"
    ]
    pieces = list(view.document.pieces(final=True))
    assert {style for text, style in pieces if text} == {""}


def test_siblings_that_follow_each_other_grow_in_lines_of_their_own():
    console, view = live_view(color_system=None)
    children = [ThreadStart(f"main.{n}", "main", f"t{n}", 0, 2) for n in (1, 2)]
    for event in (SCENE[0], *children, token("main.1", 5, "One", 3), token("main.2", 6, "Two", 3)):
        view.document.take(event)
    assert shown(console, view).splitlines()[2:] == ["One▌", "Two▌▌"]
    view.update([ThreadEnd("main.1", "stop", ".\n", 4)], "One.\n")
    assert shown(console, view).splitlines()[2:] == ["One.", "Two▌▌"]
    assert "".join(text for text, _ in view.document.pieces(final=True)) == "One.\nTwo"


def test_the_live_view_passes_and_leaves_the_answer_once():
    console, view = live_view(color_system=None)
    with view:
        view.update(SCENE[:3], "Before. ")
        view.update(SCENE[3:], "Before. ")
        assert "threads open" in console.file.getvalue()
    drawn = len(console.file.getvalue())
    view.finish("Before. Child\x1b[2JAft")
    assert console.file.getvalue()[drawn:] == "Before. Child\\x1b[2JAft\n"


def test_threads_have_colours_unless_no_color():
    console, view = live_view(color_system="standard")
    view.document.take(SCENE[0])
    for event in SCENE[1:]:
        view.document.take(event)
    assert "\x1b[36mChild" in shown(console, view)
    console, view = live_view(_environ={"NO_COLOR": "1"})
    for event in SCENE:
        view.document.take(event)
    assert "\x1b[36m" not in shown(console, view)


def test_annotations_show_until_there_is_text():
    console, view = live_view(color_system=None)
    view.document.take(SCENE[0])
    view.document.take(token("main", 5, "", 1, markup=True))
    assert "<[5]>▌" in shown(console, view)


def test_a_dumb_terminal_gets_plain_text(monkeypatch):
    terminal = stdin(b"")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_live(terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(terminal)
    assert not is_live(stdin(b""))


@given(
    st.lists(st.tuples(st.text("ab \n", max_size=60), st.sampled_from(["", "red"])), max_size=6),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_the_live_view_shows_the_last_screenful(pieces, width, rows):
    whole = "".join(text for text, _ in pieces)
    part = tail(pieces, width, rows).plain
    assert whole.endswith(part)
    assert part == whole or len(part) >= rows * width


def test_a_long_answer_stays_on_the_screen():
    console, view = live_view(color_system=None)
    view.document.take(SCENE[0])
    for number in range(300):
        view.document.take(token("main", number, f"line {number}\n", number + 1))
    lines = shown(console, view).rstrip("\n").splitlines()
    assert len(lines) < console.height
    assert lines[-2:] == ["line 299", "▌"]


def test_escaping_keeps_text_and_defuses_control_characters():
    assert escaped("é 👩‍👧\n\tx") == "é 👩‍👧\n\tx"
    assert escaped("a\x1b[31m\x9b\x07\r") == "a\\x1b[31m\\x9b\\x07\\r"


# --- doctor --------------------------------------------------------------------------------------


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path):
    """`doctor()` with an empty cache of its own; returns (exit status, checks by name)."""
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STRETTO_KERNELS", "off")  # an empty cache would have them compiled
    for name in ("STRETTO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("stretto.bench.machine.read_bandwidth", lambda: 2e10)

    def invoke():
        code = main(["doctor", "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert answer["ok"] is (code == 0)
        return code, {check["name"]: check for check in answer["checks"]}

    return invoke


def test_doctor_finds_all_well(doctor):
    code, checks = doctor()
    assert code == 0
    assert checks["versions"]["value"]["stretto-lm"] == stretto.__version__
    assert checks["bandwidth"]["value"]["read_bytes_per_s"] == 2e10
    assert checks["engine float32"]["status"] == checks["engine bfloat16"]["status"] == "ok"
    assert checks["model"]["value"]["state"] == "absent"
    assert "stretto model pull" in checks["model"]["remedy"]


def test_doctor_tells_what_is_broken(doctor, monkeypatch, tmp_path):
    (tmp_path / "cache" / "models" / "smollm2-135m-instruct-v1").mkdir(parents=True)
    monkeypatch.setattr(
        "stretto.cli.probes.check_engine", lambda _: (_ for _ in ()).throw(ValueError("no\nmask"))
    )
    code, checks = doctor()
    assert code == 1
    assert checks["model"]["value"]["state"] == "damaged"
    assert checks["engine float32"]["text"] == "hf: no mask"
    problems = [check for check in checks.values() if check["status"] == "problem"]
    assert all(check["remedy"] for check in problems)


def test_doctor_when_offline_without_a_model(doctor, monkeypatch):
    monkeypatch.setenv("STRETTO_OFFLINE", "1")
    code, checks = doctor()
    assert code == 1
    assert checks["model"]["remedy"].startswith("unset STRETTO_OFFLINE and run")


def test_doctor_reads_well(doctor, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    versions ")
    assert lines[-1] == "no problems"


@pytest.mark.embedded
def test_the_embedded_model_answers(capsys):
    assert main(["run", "Say hello.", "--max-tokens", "3", "--json", "--offline"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["model"] == "smollm2-135m-pasta"
