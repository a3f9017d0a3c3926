"""`stretto doctor`: whether everything here is fit to run, and what to do where it is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import typer

Status = Literal["ok", "note", "problem"]
MARKS = {"ok": "ok  ", "note": "note", "problem": "FAIL"}
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Check:
    """One thing looked at. `value` is for programs, `text` says the same to people; `remedy` is
    the way out of a problem (or what a note suggests)."""

    name: str
    status: Status
    text: str
    value: Any = None
    remedy: str | None = None


@dataclass
class Machine:
    """Whether torch could be imported, so that one broken installation is told once."""

    has_torch: bool = field(default=False)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check versions, CPU, memory, GPUs, the engine, the CPU kernels and the model cache.

    Exits with 0 if all is usable, and with 1 if something is broken; each problem has a way out.
    """
    from stretto.cli.output import write_json

    checks = []
    for check in all_checks():
        checks.append(check)
        if not as_json:
            _print(check)
    problems = sum(check.status == "problem" for check in checks)
    if as_json:
        write_json({"ok": not problems, "checks": [asdict(check) for check in checks]})
    else:
        typer.echo(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    raise typer.Exit(1 if problems else 0)


def all_checks() -> Iterator[Check]:
    """Every check in turn; one that raises is a problem of its own, and the next goes on."""
    machine = Machine()
    plan: list[tuple[str, Callable[[Machine], Iterator[Check]]]] = [
        ("versions", _versions),
        ("torch", _torch),
        ("cpu", _cpu),
        ("memory", _memory),
        ("cuda", _cuda),
        ("bandwidth", _bandwidth),
        ("engine", _engine),
        ("kernels", _kernels),
        ("engine auto", _automatic_engine),
        ("offline", _offline),
        ("cache", _cache),
        ("model", _model),
    ]
    for name, check in plan:
        try:
            yield from check(machine)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Check(name, "problem", f"check failed: {reason}", None, "reinstall stretto-lm")


def _versions(_: Machine) -> Iterator[Check]:
    from stretto.cli.probes import unmet_requirements, versions

    found = versions()
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    yield Check("versions", "ok", text, found)
    for unmet in unmet_requirements():
        yield Check("requirements", "problem", unmet, None, "run `pip install -U stretto-lm`")


def _torch(machine: Machine) -> Iterator[Check]:
    try:
        import torch
    except Exception as error:
        reason = " ".join(str(error).split())
        remedy = "reinstall torch (https://pytorch.org/get-started)"
        yield Check("torch", "problem", f"cannot be imported: {reason}", None, remedy)
        return
    from stretto.cli.summary import count

    machine.has_torch = True
    threads = torch.get_num_threads()
    yield Check("torch", "ok", count(threads, "thread"), {"threads": threads})


def _cpu(_: Machine) -> Iterator[Check]:
    from stretto.bench.machine import cpu

    facts = cpu()
    features = " ".join(facts["features"]) or "no features known"
    yield Check("cpu", "ok", f"{facts['name']}, {facts['cores']} cores, {features}", facts)


def _memory(_: Machine) -> Iterator[Check]:
    from stretto.cli.probes import free_memory_bytes
    from stretto.models.embedded import PEAK_BYTES

    free = free_memory_bytes()
    if free is None:
        yield Check("memory", "note", "free memory is not known on this system")
        return
    text = f"{free / 1e9:.1f} GB free"
    if free < 2 * PEAK_BYTES:
        remedy = "end other programs; the default model needs about 1 GB"
        yield Check("memory", "problem", text, {"free_bytes": free}, remedy)
    else:
        yield Check("memory", "ok", text, {"free_bytes": free})


def _cuda(machine: Machine) -> Iterator[Check]:
    from stretto.cli.probes import cuda_devices

    if not machine.has_torch:
        return
    found = cuda_devices()
    names = [f"{device['name']} ({device['memory_bytes'] / 1e9:.0f} GB)" for device in found]
    yield Check("cuda", "ok", ", ".join(names) or "no device; the CPU is used", found)


def _bandwidth(machine: Machine) -> Iterator[Check]:
    from stretto.bench.machine import read_bandwidth

    if not machine.has_torch:
        return
    rate = read_bandwidth()
    text = f"memory is read at {rate / 1e9:.1f} GB/s by all threads"
    yield Check("bandwidth", "ok", text, {"read_bytes_per_s": rate})


def _engine(machine: Machine) -> Iterator[Check]:
    from stretto.cli.probes import check_engine

    if not machine.has_torch:
        return
    for dtype in ("float32", "bfloat16"):
        try:
            check_engine(dtype)
        except Exception as error:
            reason = " ".join(str(error).split())
            remedy = "reinstall torch and transformers in the versions that stretto-lm asks for"
            yield Check(f"engine {dtype}", "problem", f"hf: {reason}", None, remedy)
        else:
            text = "hf honours masks on a tiny random model"
            yield Check(f"engine {dtype}", "ok", text, {"engine": "hf", "dtype": dtype})


def _kernels(machine: Machine) -> Iterator[Check]:
    """Loads the CPU kernels, which may compile them. Where they cannot be had that is a note:
    everything runs without them, if more slowly."""
    from stretto.cli.probes import check_kernels
    from stretto.errors import UnknownName
    from stretto.kernels import library
    from stretto.models.progress import shown_on_stderr

    if not machine.has_torch:
        return
    try:
        with shown_on_stderr() as report:
            found = library.load_all(report)
    except library.KernelsUnavailable as error:
        nothing: dict[str, Any] = {"weights": [], "libraries": []}
        yield Check("kernels", "note", f"not used: {error.reason}", nothing, error.way_out)
        return
    except UnknownName as error:
        yield Check("kernels", "problem", str(error), None, "correct the variable, or unset it")
        return
    libraries = [
        {"instructions": k.instructions, "origin": k.origin, "path": str(k.path)} for k in found
    ]
    value = {"weights": library.supported_weights(), "libraries": libraries}
    try:
        check_kernels(library.supported_weights())
    except ValueError as error:
        remedy = f"set {library.SWITCH}=off and report it"
        yield Check("kernels", "problem", str(error), value, remedy)
        return
    origin = {"package": "built with the package", "cache": "compiled on first use"}
    words = [
        f"{', '.join(k.weights)} weights by {library.NAMES[k.instructions]}, "
        f"{origin[k.origin]}: {k.path}"
        for k in found
    ]
    words += [f"no {kind}: no {', '.join(names)}" for kind, names in library.lacking().items()]
    yield Check("kernels", "ok", "; ".join(words), value)


def _automatic_engine(machine: Machine) -> Iterator[Check]:
    from stretto.cli.probes import automatic_engine
    from stretto.errors import UnknownName

    if not machine.has_torch:
        return
    try:
        found = {dtype: automatic_engine(dtype) for dtype in ("float32", "bfloat16")}
    except UnknownName:  # told with the kernels already
        return
    except Exception as error:
        reason = " ".join(str(error).split())
        yield Check("engine auto", "problem", reason, None, "use `--engine hf`, and report it")
        return
    text = ", ".join(f"{name} for {dtype}" for dtype, name in found.items())
    yield Check("engine auto", "ok", f"{text} weights of a Llama on the CPU", found)


def _offline(_: Machine) -> Iterator[Check]:
    from stretto.models.offline import variables_on

    names = variables_on()
    text = f"on ({', '.join(names)})" if names else "off"
    yield Check("offline", "ok", text, {"offline": bool(names), "variables": names})


def _cache(_: Machine) -> Iterator[Check]:
    from stretto.models.cache import cache_root

    root = cache_root()
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    value = {"path": str(root)}
    if existing.is_dir() and os.access(existing, os.W_OK):
        yield Check("cache", "ok", str(root), value)
    else:
        remedy = "point STRETTO_CACHE to a folder that you can write"
        yield Check("cache", "problem", f"{root} cannot be written", value, remedy)


def _model(_: Machine) -> Iterator[Check]:
    from stretto.errors import ModelUnavailable
    from stretto.models import embedded, is_offline
    from stretto.models.offline import way_online

    path = embedded.folder()
    name, value = embedded.EMBEDDED_MODEL, {"path": str(path)}
    pull = "`stretto model pull`"
    if not path.exists():
        status: Status = "problem" if is_offline() else "note"
        remedy = f"{way_online()}run {pull}"
        yield Check(
            "model", status, f"{name} is not pulled yet", {**value, "state": "absent"}, remedy
        )
        return
    try:
        embedded.verified()
    except (ModelUnavailable, OSError) as error:
        broken = {**value, "state": "damaged"}
        yield Check("model", "problem", str(error), broken, f"{way_online()}run {pull}")
    else:
        yield Check("model", "ok", f"{name} is intact in {path}", {**value, "state": "intact"})


def _print(check: Check) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    line = Text(f"{MARKS[check.status]}  ", style=STYLES[check.status])
    line.append(f"{check.name:<16} ", style="bold").append(check.text, style="not bold default")
    console.print(line)
    if check.remedy is not None:
        console.print(Text(f"{'':<23}{check.remedy}"))
