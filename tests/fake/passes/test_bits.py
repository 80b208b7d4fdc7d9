"""What a program reads of the representation of numbers: bits, quantisation, complex pairs, sizes of results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx import VerifyError
from amp_fx._torch import quantised_ops
from amp_fx.graphs.fallback import under_autocast
from amp_fx.graphs.keys import TRACED_META
from amp_fx.graphs.regions import Region
from amp_fx.passes import FuseCasts, PassContext, Verify
from amp_fx.precision.plans.label import ReasonKind
from support.checks.whole_program import agree
from support.tracing.captured_graphs import DEFAULTS, dynamo_graph, rewrite, run_until

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X, W = torch.randn(16, 16), torch.randn(16, 16)
SCALES, ZEROS = torch.full((16,), 0.1), torch.zeros(16, dtype=torch.int64)
QUANTISED = quantised_ops()

pytestmark = [
    pytest.mark.usefixtures("without_inductor"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


@torch.library.custom_op("amp_fx_bits::as_bits", mutates_args=())
def as_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype).clone()


as_bits.register_fake(lambda x, dtype: x.view(dtype).clone())


@torch.library.custom_op("amp_fx_bits::rounded", mutates_args=())
def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is not FP32:
        raise RuntimeError(f"takes fp32, not {x.dtype}")
    return (10 * x).round().to(dtype)


rounded.register_fake(lambda x, dtype: torch.empty_like(x, dtype=dtype))


#: programs whose result has to be that of the fp32 program, to the bit: the value whose bits are read is not rounded
EXACT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "signs": lambda x, w: (x @ w).view(torch.int32) >> 31,
    "bytes": lambda x, w: (x @ w).view(torch.uint8).float().mean(),
    "halves": lambda x, w: (x @ w).view(torch.int16),
    "pairs as integers": lambda x, w: (x @ w).view(torch.int64),
    "exponents": lambda x, w: ((x @ w).relu().view(torch.int32) >> 23) & 255,
    "a hash": lambda x, w: ((x @ w).relu().view(torch.int32) * 40503).sum(),
    "bits of a view": lambda x, w: (x @ w).mT.contiguous()[2:].view(torch.int32),
    "bits of a bias added": lambda x, w: F.linear(x, w, w[0]).view(torch.int32) & 1,
    "pairs as halves": lambda x, w: (x @ w).view(FP16).isnan(),
    "as double": lambda x, w: (x @ w).view(torch.float64).isnan(),
    "as complex": lambda x, w: torch.view_as_real((x @ w).view(torch.complex64)),
    "a hash of torch's": lambda x, w: torch.hash_tensor(x @ w),
    "rounding by hand": lambda x, w: ((x @ w).view(torch.int32) & -65536).view(FP32),
}


@pytest.mark.parametrize("numerics", ["compiled", "eager"])
@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("name", EXACT)
def test_bits_that_are_read_are_those_of_the_traced_dtype(name: str, low: torch.dtype, numerics: str) -> None:
    program = EXACT[name]
    options = {**DEFAULTS, "dtype": low, "numerics": numerics}
    got = torch.compile(program, backend="amp_fx", fullgraph=True, options=options)(X, W)
    expected = program(X, W)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    # "eager" rounds the product, as autocast does
    assert torch.equal(got, expected) or numerics == "eager"


def test_what_a_program_rounds_itself_before_it_reads_bits_stays_low() -> None:
    rewritten = rewrite(lambda x, w: (x @ w).to(BF16).view(torch.int16), X, W)
    assert rewritten.one("matmul").dtype is BF16
    assert not rewritten.one("matmul").is_because(ReasonKind.BITS)
    assert rewritten.outputs.shape == X.shape


#: programs that quantise, or are asked for a dtype by another name: they run, and are as near as autocast
NEAR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "quantize_per_tensor": lambda x, w: torch.quantize_per_tensor(x @ w, 0.1, 0, torch.qint8).dequantize(),
    "fake quantisation": lambda x, w: torch.fake_quantize_per_tensor_affine(x @ w, 0.1, 0, -128, 127),
    "fake quantisation of channels": lambda x, w: torch.fake_quantize_per_channel_affine(
        x @ w, SCALES, ZEROS.int(), 0, -128, 127
    ),
    "decomposed": lambda x, w: QUANTISED.dequantize_per_tensor(
        QUANTISED.quantize_per_tensor(x @ w, 0.1, 0, -128, 127, torch.int8), 0.1, 0, -128, 127, torch.int8
    ),
    "decomposed channels": lambda x, w: QUANTISED.dequantize_per_channel(
        QUANTISED.quantize_per_channel(x @ w, SCALES, ZEROS, 0, -128, 127, torch.int8),
        SCALES, ZEROS, 0, -128, 127, torch.int8,
    ),
    "decomposed parameters": lambda x, w: QUANTISED.choose_qparams.tensor(x @ w, -128, 127, 1e-5, torch.int8)[0],
    "a custom op": lambda x, w: rounded(x @ w, FP32),
    "the next number": lambda x, w: torch.nextafter(x @ w, torch.ones(16, 16)),
    "a norm in a dtype": lambda x, w: torch.linalg.vector_norm(x @ w, dtype=torch.float64),
    "a sum in a dtype": lambda x, w: (x @ w).sum(-1, dtype=FP32),
    "a softmax in a dtype": lambda x, w: torch.softmax(x @ w, -1, dtype=torch.float64),
    "a product in a dtype": lambda x, w: torch.prod((x @ w)[:2], 0, dtype=torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("name", NEAR)
def test_what_asks_for_a_dtype_gets_it(name: str, low: torch.dtype) -> None:
    # a step of the quantisation may fall the other way
    agree(NEAR[name], X, W, options={"dtype": low}, tolerance=0.02, reference=FP32)


def test_an_op_of_another_library_gets_what_was_traced_whatever_its_argument_is_called() -> None:
    product = (X.to(BF16) @ W.to(BF16)).float()
    program: Any = lambda x, w: as_bits(x @ w, torch.int32)  # noqa: E731
    assert torch.equal(rewrite(program, X, W).outputs, product.view(torch.int32))
    row = rewrite(program, X, W).one("amp_fx_bits::as_bits")
    assert (row.takes, row.op_class.value) == ("traced", "keep")


def test_a_rule_for_a_whole_module_changes_no_bits_and_no_complex_numbers() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            y = x @ w
            return y.view(torch.int32), (1j * y).imag, torch.fft.rfft(y).abs(), torch.nextafter(y, x)

    options = {"dtype": FP16, "policy": {"rules": [{"module": ".*", "precision": "low"}]}}
    got, expected = rewrite(Mixed(), X, W, options=options).outputs, Mixed()(X, W)
    assert [(value.shape, value.dtype) for value in got] == [(value.shape, value.dtype) for value in expected]


@pytest.mark.parametrize("dynamic", [True, False])
def test_gradients_pass_by_what_reads_bits(dynamic: bool) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return torch.where(y.view(torch.int32) < 0, -y, 2 * y)

    for rows in (16, 12):
        x, w = X[:rows].clone().requires_grad_(), W.clone().requires_grad_()
        # autocast raises: its view has other sizes
        agree(program, x, w, dynamic=dynamic, reference=FP32, tolerance=0.01)


def test_what_is_exported_reads_the_bits_of_fp32() -> None:
    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).view(torch.int32) >> 31

    model = Signs()
    program = amp_fx.export(model, (X,), profile="off")
    assert torch.equal(program.module()(X), model(X))


# ---- complex numbers ----

#: programs that make complex numbers of real ones
COMPLEX: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an imaginary factor": lambda x, w: (1j * (x @ w)).imag,
    "a phase": lambda x, w: torch.exp(1j * (x @ w)).real,
    "an imaginary part added": lambda x, w: (x @ w + 1j).abs(),
    "a complex exponent": lambda x, w: torch.pow(x.abs() @ w.abs() + 1, 0.5 + 0.5j).imag,
    "divided": lambda x, w: ((x @ w) / (1 + 2j)).real,
    "a complex factor without dimensions": lambda x, w: (torch.tensor(2j) * (x @ w)).imag,
    "a complex matrix": lambda x, w: torch.view_as_real(torch.complex(x, w) * (x @ w)),
    "joined with complex ones": lambda x, w: torch.cat([torch.complex(x, w), x @ w]).real,
    "chosen": lambda x, w: torch.where(x > 0, torch.complex(x, w), x @ w).abs(),
    "rotary": lambda x, w: torch.view_as_real(torch.view_as_complex((x @ w).view(-1, 2)) * torch.exp(1j * x[0, 0])),
    "converted": lambda x, w: torch.view_as_real((x @ w).to(torch.complex64) * 1j),
    "a spectrum": lambda x, w: torch.fft.rfft(x @ w).abs(),
    "written into": lambda x, w: torch.view_as_real(torch.complex(x, w).mul_(x @ w)),
}  # fmt: skip


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_those_of_the_program(name: str, low: torch.dtype) -> None:
    program = COMPLEX[name]
    got = rewrite(program, X, W, options={"dtype": low}).outputs
    exact = program(X.double(), W.double()) if name != "converted" else program(X, W)
    assert got.dtype is program(X, W).dtype
    # autocast makes half complex numbers, or raises: the product's own rounding is what there is
    allowed = 8 * torch.finfo(low).eps
    assert (got - exact).norm() <= allowed * exact.norm()


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")  # autocast's
@pytest.mark.parametrize("low", [BF16, FP16])
def test_gradients_through_complex_numbers_are_those_of_the_program(low: torch.dtype) -> None:
    agree(
        lambda x, w: torch.exp(1j * (x @ w)).imag.sum(-1), X.clone().requires_grad_(), W.clone().requires_grad_(),
        options={"dtype": low}, tolerance=0.05, reference=FP32,
    )  # fmt: skip


# ---- the net below ----


def bits_read_low() -> Any:
    """A rewritten graph in which a view reads the bits of a product in bf16."""
    gm = run_until(
        FuseCasts, lambda x, w: (x @ w).view(torch.int32).sum(), X, W, options={"numerics": "eager"}
    ).gm
    (view,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    (matmul,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    view.replace_input_with(view.all_input_nodes[0], matmul)
    return gm, view


def test_a_kept_call_that_reads_another_dtype_than_traced_is_named() -> None:
    gm, view = bits_read_low()
    view.meta["val"] = view.meta["val"][:, :8]
    with pytest.raises(VerifyError, match=rf"{view.name} gives .*8\].* traced .*16, 16\]"):
        Verify().call(gm, PassContext())


def test_sizes_of_outputs_are_compared_without_a_guard() -> None:
    gm = run_until(FuseCasts, lambda x, w: (x @ w).relu(), X, W, dynamic=True).gm
    environment = gm.graph.output_node().all_input_nodes[0].meta["val"].fake_mode.shape_env
    guards = len(environment.guards)
    Verify().call(gm, PassContext())
    assert len(environment.guards) == guards
    output = gm.graph.output_node()
    output.meta[TRACED_META] = [[(FP32, [16, 8])]]
    with pytest.raises(VerifyError, match=r"output .*16, 16.*16, 8"):
        Verify().call(gm, PassContext())


@pytest.mark.parametrize(
    ("program", "low"),
    [
        (lambda x, w: (x @ w).view(torch.int32).sum(), BF16),
        (lambda x, w: (x @ w).view(torch.uint8).sum(), FP16),
        (lambda x, w: 1j * (x @ w), FP16),
        (lambda x, w: torch.exp(1j * (x @ w)).real, FP16),
        (lambda x, w: torch.sin((x @ w) * 1j).abs(), FP16),
    ],
)
def test_a_fallback_in_which_autocast_makes_another_program_is_fp32(program: Any, low: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf")
        gm = dynamo_graph(program, X, W)
        assert under_autocast(gm, {"cpu": Region(True, low, by_user=False)}) is gm
