"""Packed linear layers against what they stand for, and the operator's contract."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import tiny_model
from orchestras import Recording, largest_gap, make_request, run_all, scheduler_for
from torch import nn

from stretto.engines.choose import make_engine
from stretto.engines.hf import HFEngine
from stretto.engines.packed import PackedEngine
from stretto.errors import InvalidInput, UnknownName, Unsupported
from stretto.kernels.library import WITHOUT, KernelsUnavailable, load
from stretto.kernels.linear import PackedLinear, pack_model
from stretto.kernels.pack import Packed

SHAPES = [(96, 32), (50, 72), (1, 1), (33, 200), (64, 576)]
WEIGHTS = ["float32", "bfloat16", "int8"]
DTYPES = [torch.float32, torch.bfloat16]


def why_not(weights: str) -> str | None:
    try:
        load(weights)
    except KernelsUnavailable as error:
        return str(error)
    return None


def kernels_for(weights: str, *, skip: bool = False) -> Any:
    """A mark that skips where the kernels cannot run weights of this kind; or skips at once."""
    reason = why_not(weights)
    if skip and reason is not None:
        pytest.skip(reason)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


pytestmark = [kernels_for("float32"), pytest.mark.usefixtures("instructions")]


def linear(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs * inputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_layer_is_the_layer(
    shape: tuple[int, int], weights: str, dtype: torch.dtype, bias: bool
) -> None:
    kernels_for(weights, skip=True)
    layer = linear(*shape, dtype, bias)
    x = torch.randn(5, 7, shape[1], dtype=dtype)
    packed = PackedLinear(layer, weights)
    own_weights = packed.packed.unpack().double()
    exact = x.double() @ own_weights.T + (layer.bias.double() if bias else 0)
    y = packed(x)
    assert y.shape == exact.shape
    assert y.dtype == dtype
    # What is rounded: float32 nothing but the sums; bfloat16 inputs; int8 inputs to 8 bits.
    inputs = {"float32": 4e-6, "bfloat16": 2**-8, "int8": 2**-8}[weights]
    output = 2**-8 if dtype == torch.bfloat16 else 4e-6
    reach = (x.double().abs() @ own_weights.abs().T).amax() + 1
    biggest = x.double().abs().amax() * own_weights.abs().sum(dim=1).amax()
    bound = (reach if weights != "int8" else biggest) * inputs + exact.abs().max() * output
    assert float((y.double() - exact).abs().max()) <= float(bound)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(weights: str) -> None:
    kernels_for(weights, skip=True)
    packed = PackedLinear(linear(70, 130, torch.float32), weights)
    x = torch.randn(40, 130)
    together = packed(x)
    alone = torch.cat([packed(row[None]) for row in x])
    assert torch.equal(together, alone)
    x[1:] = 1e30
    assert torch.equal(packed(x)[0], together[0])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sums_of_whole_numbers_are_exact(weights: str) -> None:
    """Of the largest too, whose products, two by two, do not fit in 16 bits."""
    kernels_for(weights, skip=True)
    generator = torch.Generator().manual_seed(0)
    layer, x = linear(70, 96, torch.float32, bias=False), torch.empty(9, 96)
    for numbers in (layer.weight, x):
        numbers.copy_(torch.randint(-127, 128, numbers.shape, generator=generator))
        numbers[:2] = torch.tensor([[127.0], [-127.0]])
        numbers[:, ::32] = 127  # so that a step is 1
    assert torch.equal(PackedLinear(layer, weights)(x), x @ layer.weight.T)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_weights_are_kept_exactly(weights: str) -> None:
    layer = linear(50, 72, getattr(torch, weights))
    assert torch.equal(Packed.pack(layer.weight, None, weights).unpack(), layer.weight)


def test_int8_rounds_to_the_nearest_of_255_steps() -> None:
    layer = linear(50, 96, torch.float32)
    layer.weight[:, 40] *= 100  # spoils its own 32 inputs, no others
    error = (Packed.pack(layer.weight, None, "int8").unpack() - layer.weight).abs()
    step = layer.weight.abs().unflatten(1, (3, 32)).amax(dim=2) / 127
    limit = step.repeat_interleave(32, dim=1) / 2 * (1 + 2**-7)
    assert bool((error <= limit).all())


def test_a_layer_of_zeros_stays_zero() -> None:
    kernels_for("int8", skip=True)
    layer = linear(8, 8, torch.float32, bias=False)
    layer.weight.data.zero_()
    assert not PackedLinear(layer, "int8")(torch.randn(3, 8)).any()
    nothing = torch.zeros(3, 8)
    assert not PackedLinear(linear(8, 8, torch.float32, bias=False), "int8")(nothing).any()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_operator_keeps_torchs_rules(weights: str) -> None:
    kernels_for(weights, skip=True)
    p = PackedLinear(linear(40, 64, torch.float32), weights).packed
    arguments = (torch.randn(3, 64), p.data, p.bias)
    settings = {"weights": weights, "outputs": 40}
    torch.library.opcheck(torch.ops.stretto.linear.default, arguments, settings)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row(rows: int) -> None:
    packed = PackedLinear(linear(40, 64, torch.float32), "float32")
    assert packed(torch.randn(rows, 64)).shape == (rows, 40)


@pytest.mark.parametrize(
    ("x", "word"),
    [(torch.zeros(2, 65), "65 inputs"), (torch.zeros(2, 64, dtype=torch.float64), "float64")],
)
def test_rows_that_do_not_fit_are_refused(x: torch.Tensor, word: str) -> None:
    p = PackedLinear(linear(40, 64, torch.float32), "float32")
    with pytest.raises(ValueError, match=word):
        p(x)
    with pytest.raises(ValueError, match=r"inputs|float64"):
        torch.ops.stretto.linear(x, p.packed.data, p.packed.bias, weights="float32", outputs=40)


def test_an_operator_call_that_would_leave_its_memory_is_refused() -> None:
    p = PackedLinear(linear(40, 64, torch.float32), "float32").packed
    x = torch.randn(2, 64)
    half = p.data.to(torch.bfloat16)
    for data, bias, outputs in (
        (p.data, p.bias, 10**7),
        (half, p.bias, 40),
        (p.data[:, ::2], p.bias, 40),
        (p.data, torch.zeros(8), 40),
    ):
        with pytest.raises(ValueError, match=r"Packed.pack|inputs"):
            torch.ops.stretto.linear(x, data, bias, weights="float32", outputs=outputs)
    with pytest.raises(ValueError, match="meta"):
        PackedLinear(linear(40, 64, torch.float32), "float32")(torch.zeros(2, 64, device="meta"))


def test_a_copy_holds_its_own_weights_alone() -> None:
    import pickle

    model = pack_model(copy.deepcopy(tiny_model("llama")), "float32")
    layer = model.model.layers[0].mlp.up_proj
    assert len(pickle.dumps(layer)) < 4 * layer.packed.num_bytes
    x = torch.randn(3, 32)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x), layer(x))
    assert again.packed.data.untyped_storage().nbytes() < 2 * layer.packed.num_bytes


def test_rows_that_are_not_contiguous() -> None:
    packed = PackedLinear(linear(40, 64, torch.float32), "float32")
    x = torch.randn(64, 6).T
    assert torch.equal(packed(x), packed(x.contiguous()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_engine_packed_equals_the_reference(kind: str) -> None:
    model = tiny_model(kind)
    engine = Recording(PackedEngine(copy.deepcopy(model), 512))
    assert engine.engine.name == "packed"
    requests = [make_request(7 + k) for k in range(3)]
    run_all(scheduler_for(engine, 512), requests)
    for request in requests:
        assert largest_gap(model, request, engine) < 1e-4


def test_a_packed_model_has_no_linear_layer_left() -> None:
    model = pack_model(copy.deepcopy(tiny_model("llama")), "float32")
    assert not [m for m in model.modules() if type(m) is nn.Linear]
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert model.get_output_embeddings().weight.shape == (96, 32)


def test_a_model_in_another_dtype_is_refused() -> None:
    with pytest.raises(InvalidInput, match="float16"):
        pack_model(copy.deepcopy(tiny_model("llama")).half(), "bfloat16")


@pytest.mark.parametrize(
    ("without", "lost"),
    [
        ("avx2,avx512_bf16", "bfloat16"),
        ("fma,avx512_vnni", "int8"),
        ("avx2,avx512f", "float32"),
        ("all", "int8"),
    ],
)
def test_an_older_cpu(monkeypatch: pytest.MonkeyPatch, without: str, lost: str) -> None:
    monkeypatch.setenv(WITHOUT, without)
    with pytest.raises(KernelsUnavailable):
        load(lost)
    model = copy.deepcopy(tiny_model("llama", head_dim=16)).to(torch.bfloat16)
    if without != "fma,avx512_vnni":
        assert make_engine("auto", model, 64, weights="bfloat16", owned=True).name == "hf"
        with pytest.raises(KernelsUnavailable):
            make_engine("fused", model, 64, weights="bfloat16")
    if lost != "bfloat16":
        with pytest.raises(KernelsUnavailable):
            make_engine("auto", model, 64, weights="int8", owned=True)


def test_int8_runs_where_bfloat16_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if load("int8").instructions != "avx512":
        pytest.skip("by AVX2 all kinds run, or none")
    monkeypatch.setenv(WITHOUT, "avx512_bf16,avx2")
    assert load("int8").weights == ("float32", "int8")
    model = copy.deepcopy(tiny_model("llama", head_dim=16))
    assert make_engine("auto", model, 64, weights="int8", owned=True).name == "fused"


@pytest.mark.parametrize(
    ("changes", "weights", "owned", "name"),
    [
        ({"head_dim": 16}, "bfloat16", True, "fused"),
        ({"head_dim": 16}, "int8", True, "fused"),
        ({"head_dim": 16}, "bfloat16", False, "fused"),
        ({"head_dim": 16}, "float32", True, "fused"),
        ({"head_dim": 16}, "float32", False, "fused"),
        ({}, "float32", True, "hf"),
        ({}, "bfloat16", True, "packed"),
        ({}, "bfloat16", False, "hf"),
    ],
)
def test_what_auto_takes(changes: dict[str, Any], weights: str, owned: bool, name: str) -> None:
    kernels_for("bfloat16", skip=True)
    kernels_for("int8", skip=True)
    model = copy.deepcopy(tiny_model("llama", **changes))
    if weights != "float32":
        model = model.to(torch.bfloat16)
    engine = make_engine("auto", model, 64, weights=weights, owned=owned)
    assert engine.name == name


def test_engines_by_name() -> None:
    model = copy.deepcopy(tiny_model("llama", head_dim=16))
    with pytest.raises(UnknownName, match="did you mean 'fused'"):
        make_engine("fussed", model, 64, weights="float32")
    with pytest.raises(Unsupported, match="int8"):
        make_engine("hf", model, 64, weights="int8")
    with pytest.raises(Unsupported, match="replaces the model's layers"):
        make_engine("packed", model, 64, weights="float32")
    assert isinstance(make_engine("hf", model, 64, weights="float32"), HFEngine)
