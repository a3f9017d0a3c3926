"""How the CPU kernels come to be: with the package, on first use, or not at all, and why not.

Compilers are stand-ins that copy a library or fail, so that nothing here takes long.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from stretto.cli.doctor import Machine, _automatic_engine, _kernels
from stretto.errors import UnknownName
from stretto.kernels import library, recipe
from stretto.kernels.first_use import compiled, library_path
from stretto.kernels.linear import multiply
from stretto.kernels.pack import Packed

ROOT = Path(__file__).parent.parent
SET = "avx2"
FIRST_USE = (
    f"from stretto.kernels.first_use import compiled; print(compiled({SET!r}, lambda path: None))"
)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stand-ins are shell scripts")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and nothing in the environment that the kernels look at."""
    for name in (library.SWITCH, library.WITHOUT, "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    library._outcomes.clear()
    yield tmp_path / "cache"
    library._outcomes.clear()


@pytest.fixture(scope="module")
def real():
    """The kernels as this machine has them: those for float32 weights."""
    try:
        return library.load()
    except library.KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes $CXX a script: `does` with $out, the file that is asked for. It writes down how it
    was called; `.calls()` has that."""

    def make(does, arguments=""):
        script, calls = tmp_path / "cxx", tmp_path / "calls"
        calls.unlink(missing_ok=True)
        script.write_text(
            f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {calls}; done\necho >> {calls}\n'
            'for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done\n' + does
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", f"{script} {arguments}")
        make.calls = lambda: calls.read_text().split("\n\n")[:-1]

    return make


def loads(path):
    return None if path.read_text() == "good\n" else f"{path.name} is bad"


GOOD = 'echo good > "$out"\n'


def wait_for(found):
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def only_library_and_lock():
    path = library_path(SET)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert {file.name for file in path.parent.parent.iterdir()} == {
        path.parent.name,
        f".{path.parent.name}.lock",
    }


# --- on first use --------------------------------------------------------------------------------


def test_compiled_once_and_found_again(cache, stand_in):
    stand_in(GOOD, "-march=native 'two words'")
    told = []
    assert compiled(SET, loads, lambda *report: told.append(report)) == library_path(SET)
    assert [done for _, done, _ in told] == [0, 1]
    compile_call, link_call = (call.split("\n") for call in stand_in.calls())
    assert compile_call[:2] == ["-march=native", "two words"]
    assert set(recipe.flags_for(SET)) <= set(compile_call)
    assert f'-DSTRETTO_SOURCE="{recipe.source_hash(SET)}"' in compile_call
    assert f'-DSTRETTO_VECTORS="{SET}.h"' in compile_call
    assert "-shared" in link_call
    assert not {"-fopenmp", "-lgomp"} & set(link_call)  # torch's OpenMP, not one of its own
    only_library_and_lock()

    stand_in("exit 1\n")
    assert compiled(SET, loads).read_text() == "good\n"


def test_two_processes_compile_once(cache, stand_in):
    stand_in("sleep 0.3\n" + GOOD)
    started = [
        subprocess.Popen([sys.executable, "-c", FIRST_USE], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate()[0] for process in started]
    assert answers == [f"{library_path(SET)}\n"] * 2
    assert len(stand_in.calls()) == 2  # compiled and linked
    only_library_and_lock()


def test_what_a_killed_process_left_is_removed(cache, stand_in, tmp_path):
    stand_in(f"echo $$ > {tmp_path / 'pid'}\nexec sleep 60\n")
    process = subprocess.Popen([sys.executable, "-c", FIRST_USE])
    pid = tmp_path / "pid"
    wait_for(lambda: pid.is_file() and pid.read_text())
    process.kill()
    process.wait()
    os.kill(int(pid.read_text()), signal.SIGKILL)  # only now: it outlives its parent
    assert list(library_path(SET).parent.parent.glob(".*.tmp-*"))

    stand_in(GOOD)
    compiled(SET, loads)
    only_library_and_lock()


def test_a_library_that_does_not_load_is_made_again(cache, stand_in):
    library_path(SET).parent.mkdir(parents=True)
    library_path(SET).write_text("from another machine\n")
    stand_in(GOOD)
    assert compiled(SET, loads).read_text() == "good\n"
    only_library_and_lock()


def test_a_compiler_whose_library_does_not_load(cache, stand_in):
    stand_in('echo bad > "$out"\n')
    with pytest.raises(recipe.CompileFailed, match=r"made by .*cxx cannot be loaded: .* is bad"):
        compiled(SET, loads)
    assert not library_path(SET).exists()


def test_a_compiler_that_fails_is_quoted_in_one_line(cache, stand_in):
    stand_in(
        'for i in $(seq 500); do echo "note $i" >&2; done\n'
        "echo \"x.h:1: error: unrecognized option '-mavx512bf16' $(seq -s' ' 999)\" >&2\n"
        'echo "compilation terminated" >&2; exit 1\n'
    )
    with pytest.raises(recipe.CompileFailed) as caught:
        compiled(SET, loads)
    message = str(caught.value)
    assert "x.h:1: error: unrecognized option '-mavx512bf16'" in message
    assert "\n" not in message
    log = library_path(SET).parent.with_suffix(".log")
    assert len(message) < 250 + len(f"{cache}{log}")
    assert message.endswith(f"(all of it: {log})")
    assert log.read_text().startswith("note 1\nnote 2\n")
    assert caught.value.way_out == "install g++ 10 or newer"

    stand_in(GOOD)
    compiled(SET, loads)
    only_library_and_lock()  # the log is gone


def test_the_next_compiler_is_tried(cache, monkeypatch, tmp_path):
    for name, does in (("c++", "exit 1"), ("g++", 'for out in "$@"; do :; done; echo good > $out')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled(SET, loads).read_text() == "good\n"


@pytest.mark.parametrize(
    ("cxx", "reason"),
    [
        (None, "there is no C++ compiler"),
        ("no-such-compiler -O2", "CXX='no-such-compiler -O2' is not found"),
        ("g++ 'open", 'CXX="g++ \'open" cannot be parsed'),
        ("/", "CXX='/' is not found"),
    ],
)
def test_no_compiler(cache, monkeypatch, tmp_path, cxx, reason):
    monkeypatch.setenv("PATH", str(tmp_path))
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    with pytest.raises(recipe.CompileFailed, match="^" + re.escape(reason)):
        compiled(SET, loads)


def test_a_script_that_cannot_be_run(cache, monkeypatch, tmp_path):
    script = tmp_path / "cxx"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(recipe.CompileFailed, match="cxx cannot be run: No such file"):
        compiled(SET, loads)


def test_a_compiler_that_hangs_is_ended_with_its_children(stand_in, tmp_path):
    stand_in(f"sleep 60 &\necho $! > {tmp_path / 'pid'}\nwait\n")
    pid = tmp_path / "pid"
    with pytest.raises(recipe.CompileFailed, match=r"took more than 0.5 s"):
        recipe.compile_library(recipe.compilers()[0], SET, tmp_path / "x.so", tmp_path / "log", 0.5)
    wait_for(lambda: not is_running(int(pid.read_text())))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.is_file() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_cache_that_cannot_be_written(cache, stand_in):
    cache.write_text("a file, not a folder")
    stand_in(GOOD)
    with pytest.raises(recipe.CompileFailed, match=r"^cannot write .*: Not a directory$") as caught:
        compiled(SET, loads)
    assert caught.value.way_out == "point STRETTO_CACHE to a folder that you can write"


def test_a_full_disk(cache, stand_in, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 0))
    stand_in(GOOD)
    with pytest.raises(recipe.CompileFailed, match=r"^no space left for"):
        compiled(SET, loads)


# --- which library is loaded ---------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch, tmp_path, real):
    """Where the package's own library would be: an empty folder."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(library, "__file__", str(folder / "library.py"))
    return folder / recipe.library_name(real.instructions)


def test_the_packages_library_is_used_if_it_is_of_these_sources(
    cache, package, real, stand_in, monkeypatch
):
    shutil.copy(real.path, package)
    stand_in("exit 1\n")
    kernels = library.load()
    assert (kernels.path, kernels.origin) == (package, "package")
    assert library.load() is kernels  # kept: every packed layer asks
    assert kernels.library.stretto_pass_bytes.restype is not None

    library._outcomes.clear()
    monkeypatch.setattr(recipe, "COMPILE_FLAGS", (*recipe.COMPILE_FLAGS, "-g"))
    with pytest.raises(library.KernelsUnavailable, match=r"cannot be compiled: .*cxx failed"):
        library.load()


def test_a_stale_library_of_the_package_is_passed_over(cache, package, real, stand_in):
    own_hash = recipe.source_hash(real.instructions).encode()
    stale = real.path.read_bytes().replace(own_hash, b"0" * 16)
    package.write_bytes(stale)
    stand_in(f'cp {real.path} "$out"\n')
    kernels = library.load()
    assert (kernels.path, kernels.origin) == (library_path(real.instructions), "cache")


def test_what_is_no_library_is_passed_over(cache, tmp_path):
    (tmp_path / "junk").write_bytes(b"no ELF" * 99 + recipe.source_hash(SET).encode())
    assert "invalid ELF header" in library._why_not(SET, tmp_path / "junk")
    assert "No such file" in library._why_not(SET, tmp_path / "none")
    assert "other sources" in library._why_not(SET, Path(__file__))


def test_sources_and_flags_are_in_the_hash(monkeypatch, tmp_path):
    before = recipe.source_hash(SET)
    assert len({recipe.source_hash(name) for name in recipe.INSTRUCTIONS}) == 2
    shutil.copytree(recipe.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(recipe, "SOURCES", tmp_path / "csrc")
    assert recipe.source_hash(SET) == before
    with (tmp_path / "csrc" / "team.h").open("a") as file:
        file.write("//\n")
    assert recipe.source_hash(SET) != before


# --- the CPU, and the switch ---------------------------------------------------------------------


@pytest.fixture
def full_cpu(cache, monkeypatch):
    monkeypatch.setattr(library, "_machine_features", lambda: frozenset(library.FEATURES))
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-x86_64")


@pytest.mark.parametrize(
    ("without", "by"),
    [
        ("", ("avx512", "avx512", "avx512")),
        ("avx512_bf16", ("avx512", "avx2", "avx512")),
        ("avx512_bf16, avx512_vnni", ("avx512", "avx2", "avx2")),
        ("avx512dq", ("avx2", "avx2", "avx2")),
        ("avx512_bf16, avx2", ("avx512", None, "avx512")),
        ("avx512f, fma", (None, None, None)),
        ("all", (None, None, None)),
    ],
)
def test_an_older_cpu(full_cpu, monkeypatch, without, by):
    monkeypatch.setenv(library.WITHOUT, without)
    assert tuple(library.instructions_for(kind) for kind in library.WEIGHTS) == by
    lost = [kind for kind, name in zip(library.WEIGHTS, by, strict=True) if name is None]
    assert list(library.lacking()) == lost
    assert list(library.supported_weights()) == [k for k in library.WEIGHTS if k not in lost]
    told = "this CPU has no .*" if len(lost) == 3 else "weights need avx2, which this CPU lacks.*"
    for kind in lost:
        with pytest.raises(library.KernelsUnavailable, match=told + r"STRETTO_CPU.*'hf'$"):
            library.load(kind)


def test_unknown_values_are_refused(full_cpu, monkeypatch):
    monkeypatch.setenv(library.WITHOUT, "avx512_vnn")
    with pytest.raises(UnknownName, match="did you mean 'avx512_vnni'"):
        library.load()
    monkeypatch.setenv(library.SWITCH, "offf")
    with pytest.raises(UnknownName, match="unknown STRETTO_KERNELS 'offf'; did you mean 'off'"):
        library.load()


@pytest.mark.parametrize("value", ["off", "OFF", "0", "no", "false"])
def test_the_switch(full_cpu, monkeypatch, value):
    monkeypatch.setenv(library.SWITCH, value)
    with pytest.raises(library.KernelsUnavailable, match=f"switched off by .*={value}; unset"):
        library.load()


def test_other_platforms(full_cpu, monkeypatch):
    for platform in ("macosx-11.0-arm64", "linux-aarch64", "win-amd64"):
        monkeypatch.setattr("sysconfig.get_platform", lambda platform=platform: platform)
        library._outcomes.clear()
        with pytest.raises(library.KernelsUnavailable, match=f"and this is {platform}"):
            library.load()


def test_rounds_to_bfloat16_as_torch_does(real):
    """Outputs of a layer with one input, 1: its weights, rounded. Halfway cases, their
    neighbours, denormal numbers and what is not finite."""
    patterns = torch.arange(0, 2**16, 3, dtype=torch.int32) << 16
    tails = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (patterns[:, None] | tails).flatten().view(torch.float32)
    values = values[values != 0]  # a sum turns -0 to 0
    packed = Packed.pack(values[:, None], None, "float32")
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    rounded = multiply(one, packed)[0]
    right = values.to(torch.bfloat16)
    assert torch.equal(rounded.isnan(), right.isnan())
    numbers = ~right.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), right[numbers].view(torch.int16))


def listing(path):
    """The library's instructions, each with the function that it is in."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name = ""
    for line in text.splitlines():
        head = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if head:
            name = head[1]
        elif "\t" in line:
            yield name, line.partition("\t")[2]


def test_each_kind_has_only_its_own_instructions(real):
    """int8 runs on CPUs without AVX512_BF16, float32 on those without AVX512_VNNI too."""
    if real.instructions != "avx512":
        pytest.skip("the library for AVX-512 is not loaded here")
    of_bfloat16 = re.compile(  # bfloat16 queries over bfloat16 keys, demangled or not
        r"Bfloat16|ChunkOfHead<unsigned short, unsigned short>|ChunkOfHeadItt"
        r"|(dot|score|weigh)<.*unsigned short const\*|store_exp\(unsigned short"
    )
    num_bf16 = num_vnni = 0
    for name, instruction in listing(real.path):
        if re.match(r"vdpbf16|vcvtne", instruction):
            num_bf16 += 1
            assert of_bfloat16.search(name), name
        elif instruction.startswith("vpdp"):
            num_vnni += 1
            assert "Int8" in name, name
    assert num_bf16 > 0
    assert num_vnni > 0


def test_the_library_for_avx2_has_nothing_of_avx512(real, monkeypatch):
    """No register or mask that only AVX-512 has, and so no instruction of its encoding."""
    if not library.cpu_features().issuperset(library.AVX2):
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setenv(library.WITHOUT, "avx512f")
    num_wide = 0
    for name, instruction in listing(library.load().path):
        assert not re.search(r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k[0-7]", instruction), name
        num_wide += "%ymm" in instruction
    assert num_wide > 0


# --- the package ---------------------------------------------------------------------------------

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('out'))"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project that may be built in."""
    pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools is too old or missing")
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    junk = shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT / "src", folder / "src", ignore=junk)
    return folder


def build(project, what):
    """Returns what is built and what was said meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return project / "out" / done.stdout.split()[-1], done.stdout


def sources():
    return {f"stretto/kernels/csrc/{path.name}" for path in recipe.SOURCES.iterdir()}


def libraries():
    return {f"stretto/kernels/{recipe.library_name(name)}" for name in recipe.INSTRUCTIONS}


def needs_platform():
    if not recipe.is_for(library.sysconfig.get_platform()):
        pytest.skip("no library is built for this platform")


def test_a_wheel_has_the_library_and_its_sources(cache, project, real, stand_in, tmp_path):
    needs_platform()
    stand_in(f'cp {real.path} "$out"\n')
    wheel, _ = build(project, "build_wheel")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert len(stand_in.calls()) == 2 * len(recipe.INSTRUCTIONS)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert sources() | libraries() <= names

    stand_in("exit 1\n")
    code = (
        "from pathlib import Path; from stretto.kernels import library\n"
        "kernels = library.load(); print(kernels.origin, kernels.path)\n"
        "library._outcomes.clear()\n"
        "with open(Path(library.__file__).parent / 'csrc' / 'simd.h', 'a') as f: f.write('//')\n"
        "try: library.load()\n"
        "except library.KernelsUnavailable as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    name = recipe.library_name(real.instructions)
    assert lines[0] == f"package {tmp_path / 'site' / 'stretto' / 'kernels' / name}"
    assert lines[1].startswith("the CPU kernels cannot be compiled: ")
    assert done.stderr == ""


@pytest.mark.parametrize("how", ["fails", "is missing"])
def test_a_package_is_built_where_the_compiler(cache, project, stand_in, monkeypatch, how):
    needs_platform()
    if how == "fails":
        stand_in("echo 'error: no such flag'; exit 1\n")
    else:
        monkeypatch.setenv("PATH", str(cache))
    wheel, said = build(project, "build_wheel")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert sources() <= names
    assert not libraries() & names
    reason = "error: no such flag" if how == "fails" else "there is no C++ compiler"
    assert re.search(f"the CPU kernels are left out: .*{re.escape(reason)}", said)


def test_a_source_distribution_has_all_to_build_from(cache, project):
    archive, _ = build(project, "build_sdist")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"setup.py", "src/stretto/kernels/recipe.py"} <= names
    assert {f"src/{name}" for name in sources()} <= names
    assert not any(name.endswith((".so", ".o")) for name in names)


# --- doctor --------------------------------------------------------------------------------------


def kernels_check():
    (check,) = _kernels(Machine(has_torch=True))
    assert check.name == "kernels"
    return check


def test_doctor_says_what_runs_and_where_from(cache, package, real, monkeypatch):
    shutil.copy(real.path, package)
    check = kernels_check()
    assert check.status == "ok"
    assert check.text.startswith(
        f"{', '.join(real.weights)} weights by {library.NAMES[real.instructions]}, built with the "
        f"package: {package}"
    )
    assert check.value["weights"] == library.supported_weights()
    assert check.value["libraries"][0] == {
        "instructions": real.instructions,
        "origin": "package",
        "path": str(package),
    }
    monkeypatch.setenv(library.WITHOUT, "avx2, avx512_bf16")
    if real.instructions == "avx512":
        check = kernels_check()
        assert "bfloat16" not in check.value["weights"]
        assert "; no bfloat16: no avx2" in check.text
    else:
        assert kernels_check().value == {"weights": [], "libraries": []}


def test_doctor_compiles(cache, package, real, stand_in, capfd):
    stand_in(f'cp {real.path} "$out"\n')
    check = kernels_check()
    assert "compiled on first use" in check.text
    assert check.value["libraries"][0]["origin"] == "cache"
    assert "compiling the CPU kernels, once" in capfd.readouterr().err


def test_doctor_takes_no_kernels_for_a_note(full_cpu, package, stand_in, monkeypatch):
    stand_in("exit 1\n")
    check = kernels_check()
    assert check.status == "note"
    assert check.value == {"weights": [], "libraries": []}
    assert check.text.startswith("not used: the CPU kernels cannot be compiled: ")
    assert check.remedy == "install g++ 10 or newer, or use engine 'hf'"
    monkeypatch.setenv(library.SWITCH, "off")
    assert kernels_check().remedy == "unset STRETTO_KERNELS, or use engine 'hf'"
    monkeypatch.setenv(library.SWITCH, "maybe")
    assert kernels_check().status == "problem"


def test_doctor_finds_wrong_results(cache, package, real, monkeypatch):
    shutil.copy(real.path, package)
    monkeypatch.setattr("stretto.cli.probes.KERNEL_ERRORS", dict.fromkeys(library.WEIGHTS, 1e-12))
    check = kernels_check()
    assert (check.status, check.value["libraries"][0]["origin"]) == ("problem", "package")
    assert "layer is wrong by" in check.text


def test_doctor_tells_which_engine_is_automatic(cache, package, real, monkeypatch):
    shutil.copy(real.path, package)
    machine = Machine(has_torch=True)
    (check,) = _automatic_engine(machine)
    here = library.supported_weights()
    expected = {dtype: "fused" if dtype in here else "hf" for dtype in ("float32", "bfloat16")}
    assert check.value == expected
    monkeypatch.setenv(library.SWITCH, "off")
    (check,) = _automatic_engine(machine)
    assert check.value == {"float32": "hf", "bfloat16": "hf"}
    assert check.text == "hf for float32, hf for bfloat16 weights of a Llama on the CPU"
    monkeypatch.setenv(library.SWITCH, "maybe")
    assert list(_automatic_engine(machine)) == []
