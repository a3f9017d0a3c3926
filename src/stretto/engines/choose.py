"""Engines by name, and the one that suits a model and a machine."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stretto.errors import UnknownName, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.engines.base import Engine, Extra
    from stretto.kernels.library import KernelsUnavailable

AUTO = "auto"
ENGINES = (AUTO, "hf", "packed", "fused", "flex")


def check_engine(name: str) -> None:
    """Raises `UnknownName` for a name that is no engine's."""
    if name not in ENGINES:
        raise UnknownName("engine", name, list(ENGINES))


def make_engine(
    name: str, model: Any, num_slots: int, *, weights: str, page_size: int = 1,
    owned: bool = False, extras: Sequence[Extra] = (),
) -> Engine:  # fmt: skip
    """The engine `name` over a Hugging Face causal LM, with `weights` float32, bfloat16 or int8.

    `auto` is, on a CPU that the kernels run on, `fused` for models of its layer shape and, unless
    weights are float32, `packed` for others; else `hf`. With `extras` it is never `fused`, which
    has none. `owned`: the model is nobody else's, and may be used up. Raises `UnknownName`, and
    `Unsupported` naming what does not go together.
    """
    check_engine(name)
    if name == AUTO:
        name = _automatic(model, weights, owned, may_fuse=not extras)
    if name in ("fused", "packed"):
        _prepare_kernels(weights)
        return _on_kernels(name, model, num_slots, weights, owned)
    _check_plain(name, model, weights)
    if name == "flex":
        from stretto.engines.flex import FlexEngine

        return FlexEngine(model, num_slots, page_size=page_size)
    from stretto.engines.hf import HFEngine

    return HFEngine(model, num_slots)


def _on_kernels(name: str, model: Any, num_slots: int, weights: str, owned: bool) -> Engine:
    from stretto.engines.fused import FusedEngine
    from stretto.engines.packed import PackedEngine
    from stretto.kernels.library import KernelsUnavailable

    if name == "packed" and not owned:
        raise Unsupported(
            "engine 'packed' replaces the model's layers; load the model by its path, or replace "
            "them yourself by stretto.kernels.linear.pack_model(model), and wrap that with 'hf'"
        )
    try:
        if name == "packed":
            return PackedEngine(model, num_slots, weights=weights)
        return FusedEngine(model, num_slots, weights=weights, consume=owned)
    except KernelsUnavailable as error:
        raise (_without_int8(error) if weights == "int8" else error) from error


def _without_int8(error: KernelsUnavailable) -> KernelsUnavailable:
    """The error with a way out that leads somewhere: no other engine has int8 weights."""
    return type(error)(error.reason, "use dtype 'bfloat16'")


def _prepare_kernels(weights: str) -> None:
    """Compiles the kernels if they are not built, and says so, also if that fails. Whoever needs
    them is refused later."""
    from stretto.kernels import library
    from stretto.kernels.recipe import CompileFailed
    from stretto.models.progress import shown_on_stderr

    with shown_on_stderr() as report, suppress(library.KernelsUnavailable):
        try:
            library.load(weights, report)
        except library.KernelsUnavailable as error:
            if isinstance(error.__cause__, CompileFailed):
                report(f"{error.reason}; engine 'hf' is used, which is slower", 0, 0)
            raise


def _automatic(model: Any, weights: str, owned: bool, *, may_fuse: bool) -> str:
    """The engine that `auto` is. Kernels are compiled only where one of them is to use them."""
    from stretto.engines.fused_layout import check_supported
    from stretto.kernels.library import KernelsUnavailable, load

    if model.device.type != "cpu":
        return "hf"
    name = "packed" if owned and weights != "float32" else "hf"
    with suppress(Unsupported):
        check_supported(model)
        name = "fused" if may_fuse else name
    if name == "hf" and weights == "float32":
        return name
    _prepare_kernels(weights)
    try:
        load(weights)
    except KernelsUnavailable as error:
        if weights == "int8":
            raise _without_int8(error) from error
        return "hf"
    return name


def _check_plain(name: str, model: Any, weights: str) -> None:
    if weights != str(model.dtype).removeprefix("torch."):
        own = str(model.dtype).removeprefix("torch.")
        raise Unsupported(
            f"engine {name!r} has no {weights} weights for a model in {own}; use engine 'fused' or "
            f"'packed', or dtype {own!r}"
        )
