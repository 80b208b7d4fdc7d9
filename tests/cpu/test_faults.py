"""What torch computes wrongly without an error, shown of stock torch.compile, and right numbers from amp_fx.

A test of stock that fails says that torch is right: the row of ``amp_fx/_torch/faults.py`` can go with the last version
that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx._torch.faults import FAULTS, mended
from amp_fx.compiler import backend
from amp_fx.errors import CaptureError
from support.models.small import Parts

IS_2_13 = torch.__version__.startswith("2.13.")
#: bf16 on any CPU
LOW = {"profile": "off"}

Named = dict[str, Tensor]


def gradients(loss: Tensor, model: nn.Module) -> Named:
    """The loss, and of each parameter the gradient."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return {"loss": loss.detach(), **dict(zip(names, (g.to_dense() for g in found), strict=True))}


def errors(got: Named, exact: Named) -> dict[str, float]:
    """Of each value by itself; a gradient of zero where there is one has error 1."""
    assert got.keys() == exact.keys()
    return {name: ((got[name].double() - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def exact_gradients(model: nn.Module, *inputs: Tensor) -> Named:
    """In fp64."""
    model.double()
    doubles = [x.double() if x.is_floating_point() else x for x in inputs]
    try:
        return gradients(model(*doubles).square().mean(), model)
    finally:
        model.float()


def compiled_errors(
    model: nn.Module,
    *inputs: Tensor,
    backend: str,
    options: Mapping[str, Any] | None = None,
    low: bool = False,
) -> dict[str, float]:
    """Of each gradient of a compiled model; stock torch.compile in 16 bits is under autocast."""
    exact = exact_gradients(model, *inputs)
    torch._dynamo.reset()
    run = torch.compile(model, backend=backend, options=dict(options or {}))
    with torch.autocast("cpu", torch.bfloat16, enabled=low and backend == "inductor"):
        result = run(*inputs)
    return errors(gradients(result.float().square().mean(), model), exact)


def wrong(found: dict[str, float], over: float = 0.1) -> set[str]:
    return {name for name, error in found.items() if not error < over}


def named(thread: str) -> str:
    """What a plan says where the row is met."""
    (fault,) = (fault for fault in FAULTS if fault.thread == thread)
    return str(fault)


# ---- gradients that are added up in place (torch 2.13) ----

BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "nearest-exact": lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "smaller": lambda x: F.interpolate(x, scale_factor=0.5),
}


def decoder(between: Callable[[Tensor], Tensor]) -> nn.Module:
    convs = [nn.Conv2d(a, b, 3, padding=1) for a, b in ((4, 32), (32, 32), (32, 3))]

    def call(m: Any, x: Tensor) -> Tensor:
        return m.last(torch.relu(m.middle(between(m.first(x)))))

    return Parts(call, first=convs[0], middle=convs[1], last=convs[2])


@pytest.mark.slow
@pytest.mark.skipif(not IS_2_13, reason="a fault of torch 2.13")
def test_stock_loses_gradients_in_front_of_an_interpolation() -> None:
    found = compiled_errors(
        decoder(BETWEEN["nearest"]), torch.randn(1, 4, 16, 16), backend="inductor", low=True
    )
    assert wrong(found) == {"first.weight", "first.bias"}


@pytest.mark.quick_rows("nearest")
@pytest.mark.parametrize(
    "between",
    [
        name if name in ("nearest", "max_pool") else pytest.param(name, marks=pytest.mark.slow)
        for name in BETWEEN
    ],
)
def test_gradients_in_front_of_a_scatter_are_those_behind_it(between: str) -> None:
    model, x = decoder(BETWEEN[between]), torch.randn(1, 4, 16, 16)
    # the second finds both graphs in the caches; the backward is lowered when it is first called
    for _ in range(2):
        torch._dynamo.reset()
        with amp_fx.record() as recorded:
            found = compiled_errors(model, x, backend="amp_fx", options=LOW)
        assert not wrong(found)
        assert [plan.faults for plan in recorded.plans] == [[named("pytorch#185509")] if IS_2_13 else []]


# ---- calls of which torch has a wrong form, in fp32 ----

LABELS = torch.tensor([[3, 0, -1, 1], [0, 1, 2, -1], [-1, 0, 0, 0], [2, 2, 1, 0]])


def interpolated(dims: int, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x.view(1, 2, *(4,) * dims), **options).square()


#: of 32 elements each; the first ones are wrong in stock
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "pool_1d": lambda x: F.avg_pool1d(x.view(1, 2, 16), 3, 2, ceil_mode=True).square(),
    "pool_2d": lambda x: F.avg_pool2d(x.view(1, 2, 4, 4), 3, 2, ceil_mode=True).square(),
    "pool_padded": lambda x: F.avg_pool2d(x.view(1, 2, 4, 4), 3, 2, 1, ceil_mode=True).square(),
    "pool_larger": lambda x: F.avg_pool2d(x.view(1, 8, 2, 2), 384, ceil_mode=True).square(),
    "pool_3d": lambda x: F.avg_pool3d(x.view(1, 1, 2, 4, 4), (1, 3, 3), 2, ceil_mode=True).square(),
    "labels": lambda x: F.multilabel_margin_loss(x.view(8, 4)[::2], LABELS),
    "labels_each": lambda x: F.multilabel_margin_loss(x.view(8, 4)[:4], LABELS, reduction="none").square(),
    "labels_sum": lambda x: F.multilabel_margin_loss(x[:4], LABELS[0], reduction="sum"),
    "kept_nearest": interpolated(2, scale_factor=(1.2, 2.0)),
    "doubled_nearest": interpolated(2, scale_factor=(2.2, 1.5)),
    "kept_linear": interpolated(2, scale_factor=(1.2, 1.5), mode="bilinear"),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "pool_fits": lambda x: F.avg_pool2d(x.view(1, 2, 4, 4), 2, 2, ceil_mode=True).square(),
    "pool_divisor": lambda x: F.avg_pool2d(
        x.view(1, 2, 4, 4), 3, 2, ceil_mode=True, divisor_override=5
    ).square(),
    "pool_uncounted": lambda x: F.avg_pool2d(
        x.view(1, 2, 4, 4), 3, 2, 1, ceil_mode=True, count_include_pad=False
    ).square(),
    "resized": interpolated(2, size=(4, 8), mode="bilinear"),
    "corners": interpolated(2, scale_factor=(1.2, 1.5), mode="bilinear", align_corners=True),
}


class Calls(nn.Module):
    """The sum of all calls, each of a parameter of its name."""

    def __init__(self, calls: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.calls = calls
        for name in calls:
            self.register_parameter(name, nn.Parameter(torch.randn(32)))

    def forward(self) -> Tensor:
        return torch.stack([call(getattr(self, name)).sum() for name, call in self.calls.items()])


# compiles all calls once more; that rows are still needed is asked when a version of torch is added
@pytest.mark.slow
def test_stock_has_wrong_gradients_of_these_calls() -> None:
    assert wrong(compiled_errors(Calls(CALLS | RIGHT), backend="inductor"), over=1e-3) - {"loss"} == set(
        CALLS
    )


@pytest.mark.slow
def test_these_calls_have_right_values_and_gradients() -> None:
    with amp_fx.record() as recorded:
        found = compiled_errors(Calls(CALLS | RIGHT), backend="amp_fx")
    assert not wrong(found, over=1e-5)
    met = [fault for plan in recorded.plans for fault in plan.faults]
    assert {text for text in met if "margin" in text or "interp" in text or "pool" in text} == set(met)
    assert len(met) == 3


@pytest.mark.usefixtures("op_by_op")
def test_they_are_right_with_torch_autocasts_semantics_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CaptureError("for the test")

    monkeypatch.setattr(backend, "rewrite", fail)
    traced = {name: call for name, call in CALLS.items() if not name.startswith("pool")}
    with pytest.warns(amp_fx.FallbackWarning), amp_fx.record() as recorded:
        assert not wrong(compiled_errors(Calls(traced), backend="amp_fx"), over=1e-5)
    assert [len(plan.faults) for plan in recorded.plans] == [2]


@pytest.mark.usefixtures("op_by_op")
def test_calls_that_torch_has_right_meet_no_row() -> None:
    with amp_fx.record() as recorded:
        compiled_errors(Calls(RIGHT), backend="amp_fx")
    assert [plan.faults for plan in recorded.plans] == [[]]


# ---- sparse gradients ----


def tables() -> tuple[nn.Module, Tensor]:
    """The first table's gradient is there before products of its size are, of the second's."""

    def call(m: Any, ids: Tensor) -> Tensor:
        hidden = torch.tanh(m.linear(torch.tanh(m.second(ids))))
        return m.first(ids) * hidden

    first, second = (nn.Embedding(50, 16, sparse=True) for _ in range(2))
    return Parts(call, first=first, second=second, linear=nn.Linear(16, 16)), torch.randint(0, 50, (64,))


def test_stock_writes_over_a_sparse_gradient() -> None:
    model, ids = tables()
    assert wrong(compiled_errors(model, ids, backend="inductor")) == {"first.weight"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float16", "scaler": "tables", "profile": "off"}], ids=["", "scaled"]
)
def test_each_sparse_gradient_keeps_its_memory(options: dict[str, Any]) -> None:
    scaler = amp_fx.GradScaler("cpu", 128.0, name="tables") if options else None
    model, ids = tables()
    with amp_fx.record() as recorded:
        assert not wrong(compiled_errors(model, ids, backend="amp_fx", options=options))
    assert scaler is None or scaler.get_scale() == 128.0
    assert [len(plan.faults) for plan in recorded.plans] == [1]


def test_every_row_is_of_a_supported_version_and_is_undone() -> None:
    from torch._inductor import lowering, scheduler

    op = torch.ops.aten.avg_pool2d_backward.default
    before = lowering.lowerings[op], scheduler.SchedulerNode._compute_attrs
    with mended([]):
        assert (lowering.lowerings[op] is before[0]) is not any(f.thread == "pytorch#198119" for f in FAULTS)
    assert (lowering.lowerings[op], scheduler.SchedulerNode._compute_attrs) == before
    assert {version for fault in FAULTS for version in fault.versions} <= {
        "2.11",
        "2.12",
        "2.13",
        "2.14",
        "2.15",
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_next_number_of_16_bits_is_another_number(dtype: torch.dtype) -> None:
    def program(x: Tensor, far: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        nexts = (
            torch.nextafter(y, far),
            y.nextafter(y),
            torch.nextafter(y, far[:1]),
            torch.nextafter(y.t(), -far),
        )
        return *nexts, torch.nextafter(nexts[0], far), torch.nextafter(y.float(), far.float())

    x, far = torch.randn(4, 4).to(dtype), torch.full((4, 4), 8.0, dtype=dtype)
    right = program(x, far)
    # as soon as stock is right, the row of the table can go
    assert not torch.equal(torch.compile(program)(x, far)[0], right[0])
    for numerics in ("compiled", "eager"):
        torch._dynamo.reset()
        got = torch.compile(program, backend="amp_fx", options={**LOW, "numerics": numerics})(x, far)
        assert [value.dtype for value in got] == [value.dtype for value in right]
        assert all(map(torch.equal, got, right))
