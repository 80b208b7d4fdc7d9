"""Agreement with torch.autocast: torch's own lists and cases, run through capture and passes.

The whole table is made by ``python tests/conformance.py --write``; here runs all of torch's lists and a sample of
the rows of amp_fx.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import _scoped_library

import conformance
from amp_fx import FallbackWarning
from support.checks.whole_program import agree
from support.torch_versions import fails_in

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: one rounding more is fine
CLOSE: dict[str, Any] = {"reference": FP32, "tolerance": 1e-2}
#: every how many-th row of the op lists is asked here
STEP = 16


@pytest.fixture(scope="module")
def answers() -> list[conformance.Answer]:
    asked = list(conformance.calls())
    own = [call for call in asked if call.source == "amp_fx"]
    found = [*(call for call in asked if call.source == "torch"), *own[::STEP]]
    return [each for call in found if (each := conformance.answer(call)) is not None]


@pytest.mark.xdist_group("conformance")
def test_every_disagreement_with_autocast_is_explained(answers: list[conformance.Answer]) -> None:
    unexplained = [
        (each.call.name, each.differences)
        for each in answers
        if each.differences and (each.call.device, each.call.name) not in conformance.EXPLAINED
    ]
    assert unexplained == []


@pytest.mark.xdist_group("conformance")
@pytest.mark.parametrize("source", [("torch", "cpu"), ("torch", "cuda"), ("amp_fx", "cpu")], ids=" ".join)
def test_nearly_all_of_a_source_agree(answers: list[conformance.Answer], source: tuple[str, str]) -> None:
    own = [each for each in answers if (each.call.source, each.call.device) == source]
    assert len(own) >= {"torch": 90, "amp_fx": 20}[source[0]]
    assert sum(not each.differences for each in own) >= conformance.REQUIRED * len(own)


def test_the_documented_table_has_no_row_below_the_bar_and_explains_the_rest() -> None:
    text = conformance.DOCUMENT.read_text(encoding="utf-8")
    table = text.split(conformance.START)[1].split(conformance.END)[0]
    totals = [line for line in table.splitlines() if line.startswith("| all |")]
    assert len(totals) == 1
    *_, asked, agreed, _, _ = totals[0].split("|")
    assert int(agreed) >= conformance.REQUIRED * int(asked)
    assert "unexplained" not in table
    named = {line.split("`")[1] for line in table.splitlines() if line.startswith("- `")}
    assert named <= {name for _, name in conformance.EXPLAINED}


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(call for call in conformance.calls() if call.name == "matmul" and call.device == "cpu")

    def as_written(call: conformance.Call, args: Any, kwargs: Any) -> Callable[..., Any]:
        return lambda *tensors: (call.function(*tensors),)

    monkeypatch.setattr(conformance, "as_rewritten", as_written)
    found = conformance.answer(call)
    assert found is not None
    assert len(found.differences) == 3  # dtypes, kernels and values
    assert "**unexplained**" in conformance.table([found])


# ---- the cases of torch's test_ctx_manager.py ----


def square(requires_grad: bool = False) -> Tensor:
    return torch.randn(8, 8, requires_grad=requires_grad)


SETTINGS: list[dict[str, Any]] = [
    {"dtype": FP16},
    {},
    {"enabled": False},
    {"dtype": BF16, "cache_enabled": False},
    {"dtype": BF16, "enabled": True, "cache_enabled": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ambient", [None, FP16], ids=["plain", "ambient"])
def test_arguments_of_autocast_mean_the_same_as_eagerly(settings: Any, ambient: torch.dtype | None) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", **settings):
            inside = torch.mm(x, y)
        return inside, torch.mm(x, y)

    agree(program, square(), square(), ambient=ambient, reference=FP32)


def test_autocast_as_a_decorator_and_with_fp64_inputs() -> None:
    @torch.autocast("cpu", dtype=BF16)
    def inner(x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, x) * y

    agree(lambda x: (inner(x, x), torch.mm(x, x)), square(), reference=FP32)
    agree(inner, square().double(), square())


@pytest.mark.parametrize("where", ["here", "in a function called from it", "in a method called from it"])
def test_a_graph_break_inside_a_region(where: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(8, 8))

        def method(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return torch.mm(x, self.bias) + self.bias

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", dtype=BF16):
                c = torch.mm(a, b)
                if where == "here":
                    torch._dynamo.graph_break()
                    d = torch.mm(c, self.bias)
                elif where == "in a function called from it":
                    d = broken(c, self.bias)
                else:
                    d = self.method(c)
            return c, d, torch.mm(a, b)

    def broken(x: Tensor, y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.mm(x, y)

    agree(Model(), square(), square(), fullgraph=False, **CLOSE)


def test_nested_regions_of_two_dtypes() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=BF16):
            a = torch.mm(x, x)
            with torch.autocast("cpu", dtype=FP16), torch.no_grad():
                b = torch.mm(x, x)
            c = torch.mm(a, b)
        return a, b, c

    # no gradient for x: eagerly, autocast would return its cached bf16 copy of a leaf within the fp16 region
    agree(program, square(), **CLOSE)


# ---- custom_fwd, custom_bwd, register_autocast ----


class CastToFp32(torch.autograd.Function):
    """Asks autocast for fp32 inputs."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return torch.matmul(x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return gradient @ w.mT, x.mT @ gradient


class AsAutocast(CastToFp32):
    """Runs in whatever autocast says."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return torch.matmul(x, w).float()


LOST = fails_in("2.11", fault="a gradient is lost where the forward ends in a float() that does nothing")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::amp_fx.FallbackWarning")
@pytest.mark.parametrize(
    ("function", "ambient"),
    [
        pytest.param(CastToFp32, None, id="plain-CastToFp32"),
        pytest.param(AsAutocast, None, id="plain-AsAutocast", marks=LOST),
        pytest.param(CastToFp32, BF16, id="ambient-CastToFp32"),
        pytest.param(AsAutocast, BF16, id="ambient-AsAutocast"),
    ],
)
def test_functions_with_custom_fwd_and_bwd(function: Any, ambient: torch.dtype | None) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return function.apply(x, w) * 2

    given = {"options": {"strict": False}, "fullgraph": False, **CLOSE}
    agree(program, square(True), square(True), ambient=ambient, **given)


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "ambient"])
def test_custom_ops_with_an_autocast_rule(ambient: torch.dtype | None) -> None:
    with _scoped_library("amp_fx_conformance", "FRAGMENT"):

        @torch.library.custom_op("amp_fx_conformance::product", mutates_args=())
        def product(x: Tensor, w: Tensor) -> Tensor:
            return x @ w

        product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
        product.register_autocast("cpu", BF16)

        def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            y = product(x, w)
            return y, torch.matmul(x, w) + y

        # where the rule counts, the graph is autocast's
        falls_back = pytest.warns(FallbackWarning, match="product.default")
        with falls_back if ambient is not None else contextlib.nullcontext():
            agree(program, square(), square(), ambient=ambient, options={"strict": ambient is None}, **CLOSE)


# ---- a part of torch's databases of ops and modules; with ``DATABASES=1`` in the environment, all of them ----

#: found by asking all: no tensor goes in, or autocast rounds some shapes only
NAMED = ("arange", "full", "signal.windows.hann", "inner", "tensordot", "addcdiv", "einsum")


#: every how many-th op and module
STEPS = [40, pytest.param(int(os.environ.get("DATABASES", "4")), marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("step", STEPS)
def test_calls_of_torchs_databases_agree_with_autocast(step: int) -> None:
    # the databases take seconds to import
    from support.ops.torch_databases import EXPLAINED, modules, ops, outcome

    samples = [*ops(step), *modules(step)]
    samples += [sample for sample in ops() if sample.name.rpartition(" ")[0] in NAMED]
    found = {sample.name: outcome(sample) for sample in samples}
    asked = {name: said for name, said in found.items() if not said.startswith("not asked")}
    others = {name: said for name, said in asked.items() if said != "agrees"}
    assert [name for name in others if name.rpartition(" ")[0] not in EXPLAINED] == [], others
    assert len(asked) - len(others) > 30
