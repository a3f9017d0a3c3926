"""What ends an answer in the middle, and values nobody should give: everything stays whole."""

from __future__ import annotations

import copy
import json
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from conftest import tiny_model
from tiny_lms import tiny_lm, tiny_tokenizer

import stretto
from stretto import LM, SamplingParams
from stretto.cli import main, output
from stretto.cli.answer import PlainView
from stretto.errors import InvalidInput, ModelUnavailable, PromptTooLong
from stretto.stream import Stream
from stretto.tokens import ModelCard

PACKAGE = str(Path(stretto.__file__).parent)


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th line of Stretto's own code.

    Not in lm.py: a tracer, unlike Ctrl-C, can strike where `with` has yet to release its lock.
    """

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE) or path.endswith("/lm.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_anywhere_leaves_the_model_usable() -> None:
    lm = tiny_lm("pasta", pool_slots=128)
    params = SamplingParams(max_tokens=6, temperature=1.0)
    prompts = ["hello", "good bye"]
    expected = [answer.text for answer in lm.generate(prompts, params)]
    before = sys.gettrace()
    never = Interrupt(sys.maxsize)
    sys.settrace(never)
    lm.generate(prompts, params)
    sys.settrace(before)
    num_lines = sys.maxsize - never.left
    for at in range(1, num_lines, max(1, num_lines // 150)):
        neighbour = lm.submit("neighbour", params)
        sys.settrace(Interrupt(at))
        try:
            with pytest.raises(KeyboardInterrupt):
                lm.generate(prompts, params)
        finally:
            sys.settrace(before)
        assert [answer.text for answer in lm.generate(prompts, params)] == expected
        lm.scheduler.check_integrity()
        neighbour.close()
        assert neighbour.request.is_done
        assert neighbour.completion.timing.total_s >= 0
        assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def test_a_prompt_far_too_long_is_refused_at_once() -> None:
    lm = tiny_lm()
    started = time.perf_counter()
    for prompt in ("x" * 15_000_000, [{"role": "user", "content": "a " * 5_000_000}]):
        with pytest.raises(PromptTooLong, match=r"at least .* tokens but the model has 512"):
            lm.generate(prompt)
    assert time.perf_counter() - started < 20  # encoding them takes minutes
    longest = max(lm.vocabulary.piece(i) for i in range(lm.vocabulary.size))
    assert lm.vocabulary.least_tokens(longest * 3) <= len(lm.vocabulary.encode(longest * 3))


def test_text_may_be_read_while_another_thread_decodes() -> None:
    lm = tiny_lm()
    errors: list[BaseException] = []

    def read(stream: Stream) -> None:
        try:
            while not stream.request.is_done:
                assert stream.text is not None
                time.sleep(1e-5)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(2):
            params = SamplingParams(max_tokens=80, temperature=1.0, seed=seed, stop=("zzz",))
            stream = lm.submit("hello", params)
            readers = [threading.Thread(target=read, args=(stream,)) for _ in range(3)]
            for reader in readers:
                reader.start()
            stream.finish()
            for reader in readers:
                reader.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"x", [5], [None], [b"x"], [{}], [{"role": "user"}], [{"content": "x"}], [{1: 2}],
     [{"role": ["user"], "content": "x"}], [{"role": "user", "content": None}], [], [[]],
     [{"role": "user", "content": "x"}, "x"], "\ud800", "\0"[:0]],
)  # fmt: skip
def test_a_prompt_of_no_known_kind_is_refused(prompt: Any) -> None:
    lm = tiny_lm()
    prompts = prompt or [prompt]
    with pytest.raises(InvalidInput):
        lm.generate(prompts)
    assert not lm.scheduler.waiting


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 10**400), ("repetition_penalty", 10**400), ("top_p", -(10**400)),
     ("stop", None), ("stop", 5), ("stop", [b"x"]), ("stop_ids", None), ("stop_ids", 5),
     ("stop", "\udcff"), ("stop_ids", [[1]]), ("stop_ids", "ab"), ("seed", None),
     ("max_tokens", float("nan"))],
)  # fmt: skip
def test_a_parameter_of_no_known_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=name.replace("stop_ids", "stop.id")):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "options",
    [{"pool_slots": 10**15}, {"pool_slots": 10**30}, {"pool_slots": 5.5}, {"page_size": 2000},
     {"page_size": 0}, {"page_size": None}],
)  # fmt: skip
def test_a_pool_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        tiny_lm(**options)
    with pytest.raises(InvalidInput, match="n must be a whole number"):
        tiny_lm().generate("x", n=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="unknown method None"):
        tiny_lm().generate("x", method=None)


@pytest.mark.parametrize("arguments", [["run", "hi"], ["bench", "forks"], ["bench", "step"]])
def test_threads_that_would_take_the_process_down_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for threads in ("999999", "99999999999999999999"):
        assert main([*arguments, "--model", "tests", "--threads", threads]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("stretto: error: Invalid value for '--threads'")
        assert "1024" in err
        assert err.count("\n") == 1


LONG = "a" * 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "hi", "--model", LONG], "unknown model or folder"),
        (["run", "hi", "--model", f"./{LONG}"], "no model at"),
        (["run", "hi", "--model", f"{LONG}.gguf"], "no file"),
        (["run", "hi", "--trace", LONG], "cannot be written"),
        (["run", "hi", "--trace", f"{LONG}/x"], "there is no folder"),
        (["run", "--file", LONG], "File name too long"),
        (["trace", "show", "--dialect", "plain", LONG], "File name too long"),
        (["trace", "show", "--dialect", "plain", "x", "--tokenizer", LONG], "does not exist"),
        (["bench", "forks", "--out", LONG], "cannot write"),
        (["model", "info", LONG], "unknown model or folder"),
    ],
)
def test_a_name_too_long_to_be_a_path_is_told_on_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("stretto: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["meta", "mps", "xla", "hpu", "nope", "", "cuda:99"])
def test_a_device_that_is_not_supported_is_refused(name: str) -> None:
    from stretto.models.loading import _device

    with pytest.raises(InvalidInput, match=r"cannot be used \(.{,200}\); try 'cpu'$"):
        _device(name)


def test_a_stop_id_that_no_token_has_is_refused() -> None:
    lm = tiny_lm()
    with pytest.raises(InvalidInput, match=f"stop id {lm.vocabulary.size} is outside"):
        lm.submit("hi", SamplingParams(stop_ids=frozenset({0, lm.vocabulary.size})))


def test_a_model_whose_logits_are_not_finite_is_refused() -> None:
    from stretto.engines.hf import HFEngine

    model = copy.deepcopy(tiny_model("llama"))
    model.config.layer_types = ["sliding_attention", "full_attention"]  # llama does not read it
    HFEngine(model, num_slots=8)
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ModelUnavailable, match="not finite"):
        HFEngine(model, num_slots=8)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", DEEP),
        ("generation_config.json", DEEP),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [1, {}]}'),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("stretto.json", DEEP),
        ("model.safetensors", DEEP),
        ("model.safetensors", '{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 0]}}'),
        ("model.safetensors", '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": ["x"]}}'),
        ("chat_template.jinja", "{{ 1/0 }}"),
        ("chat_template.jinja", "{{ 'a' + 5 }}"),
        ("chat_template.jinja", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
        ("chat_template.jinja", "{{ messages.nothing }}"),
    ],
)
def test_a_folder_with_a_file_of_rubbish_is_refused_on_one_line(
    name: str, content: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    data = content.encode()
    if name == "model.safetensors":
        data = struct.pack("<Q", len(data)) + data
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(data)
    assert main(["run", "hi", "--model", str(folder), "--offline"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("stretto: error: ")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lm("pasta").save(tmp_path_factory.mktemp("saved") / "model")


def test_a_token_beyond_the_models_rows_is_refused_before_it_is_fed() -> None:
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_tokens([AddedToken(f"word{i}") for i in range(99)])
    lm = LM.wrap(copy.deepcopy(tiny_model("llama", vocab_size=420)), tokenizer, pool_slots=64)
    with pytest.raises(InvalidInput, match="but the model has 420 rows"):
        lm.generate("word98")
    assert lm.generate("word", SamplingParams(max_tokens=2))


def test_a_card_with_an_id_that_no_tokenizer_can_have() -> None:
    control = tiny_lm("pasta").card.control
    with pytest.raises(InvalidInput, match="above 2147483647"):
        ModelCard.describe("pasta", {**control, "sync": 10**30}, tiny_tokenizer().backend_tokenizer)


def test_closed_and_full_streams_change_no_status(saved: Path) -> None:
    """A closed stderr gets its number back before a file does; no message is worth a failure."""
    command = f"{sys.executable} -m stretto run hi --model {saved} --max-tokens 4 --offline"
    ends = {"2>&-": 0, "2>/dev/full": 0, "<&- >&- 2>&-": 0, "--method zzz 2>/dev/full": 2}
    for end, expected in ends.items():
        done = subprocess.run(f"{command} {end}", shell=True, stdout=subprocess.PIPE, check=False)
        assert done.returncode == expected
        assert bool(done.stdout) == (expected == 0 and ">&- " not in end)


def test_a_size_of_zero_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "0")
    example = Path(__file__).parents[1] / "examples" / "tea.txt"
    assert main(["trace", "show", "--dialect", "pasta", str(example)]) == 0
    assert "who sees whom" in capsys.readouterr().out


def test_what_is_written_cannot_steer_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = "a\x1b[31m\x9b2J\x7f\tb\n"
    view = PlainView((), is_terminal=True)
    view.finish(text)
    output.write_json({"text": text})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.write_line("model\x1b[31m\udcff")
    shown = capsysbinary.readouterr().out
    assert shown.splitlines()[0] == rb"a\x1b[31m\x9b2J\x7f" + b"\tb"
    assert not set(shown) & {0x1B, 0x7F}
    assert b"\xc2\x9b" not in shown
    assert json.loads(shown.splitlines()[1]) == {"text": text}
    assert shown.splitlines()[2] == rb"model\x1b[31m" + b"\xff"


def test_an_endless_annotated_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", "--dialect", "pasta", "/dev/zero"]) == 2
    assert "'/dev/zero' is larger than 67,108,864 bytes; shorten it" in capsys.readouterr().err


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto import __main__

    monkeypatch.setitem(sys.modules, "stretto.cli", Interrupting("stretto.cli"))
    assert __main__.main() == 130


class Interrupting(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("root", ["~nobody-of-this-name/x", "a" * 300, "/dev/null", "/dev/zero/x"])
def test_a_cache_folder_that_cannot_be(
    root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", root)
    assert main(["model", "list"]) == (2 if root == "a" * 300 else 0)
    assert main(["model", "info"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 2
    assert "Traceback" not in err
