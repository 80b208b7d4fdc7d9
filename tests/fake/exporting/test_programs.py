"""Programs that are hard to export: autocast inside and around, writes, regions without gradients, branches."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import amp_fx
from amp_fx import CaptureError, Plan
from small_models import Parts, UpDown

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: torch.export copies its own call graph by deepcopy, which warns
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


def linears(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(16, 16) for name in names}


def saved(ep: ExportedProgram) -> ExportedProgram:
    """What comes back from a file."""
    file = io.BytesIO()
    torch.export.save(ep, file)
    file.seek(0)
    return torch.export.load(file)


def report(ep: ExportedProgram) -> Plan:
    return Plan.from_json(amp_fx.extra_files(ep)["amp_fx.json"])


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


def regions(m: Any, x: Tensor) -> Tensor:
    """Autocast and no_grad inside forward, nested."""
    with torch.no_grad():
        x = m.a(x)
    with torch.autocast("cpu", enabled=False):
        x = m.b(x)
    with torch.autocast("cpu", dtype=torch.float16):
        y = m.c(x)
        with torch.autocast("cpu", enabled=False):
            y = m.b(y.float())
    return x + y


def test_autocast_inside_forward_is_honoured_and_leaves_no_higher_order_op() -> None:
    x, model = torch.randn(4, 16), Parts(regions, **linears("a", "b", "c"))
    stock = torch.export.export(model.eval(), (x,))
    names = {str(node.target) for node in stock.graph.nodes}
    assert {"wrap_with_autocast", "wrap_with_set_grad_enabled"} <= names, "or there is nothing to test"
    ep = amp_fx.convert(stock, profile="off")
    assert all(str(node.target).startswith("aten.") for node in ep.graph.nodes if node.op == "call_function")
    assert [row.dtype for row in report(ep).nodes if row.op == "linear"] == [BF16, FP32, FP16, FP32]
    assert ep.state_dict["b.weight"].dtype is ep.state_dict["b.bias"].dtype is FP32
    assert error(ep.module()(x), model(x)) < 0.02


def test_an_export_under_autocast_computes_what_the_model_computes_there() -> None:
    x, model = torch.randn(4, 16), UpDown(16, 32, 8).eval()
    with torch.autocast("cpu", FP16):
        expected = model(x)
        ours = amp_fx.export(model, (x,), profile="off")
        stock = torch.export.export(model, (x,))
    assert stock.module()(x).dtype is FP32, "stock torch loses the autocast, or there is nothing to test"
    for ep in (ours, amp_fx.convert(stock, profile="off")):
        result = ep.module()(x)
        assert result.dtype is expected.dtype is FP16
        assert error(result, expected) < 1e-3
        assert ep.state_dict["up.weight"].dtype is FP16
    plain = torch.export.export(model, (x,))
    with torch.autocast("cpu", FP16):
        ep = amp_fx.convert(plain, profile="off")
    assert ep.state_dict["up.weight"].dtype is BF16, "what surrounds convert says nothing"


def test_metadata_that_no_autocast_explains_is_refused_with_the_fix() -> None:
    ep = torch.export.export(UpDown(16, 32, 8).eval(), (torch.randn(4, 16),))
    relu = next(node for node in ep.graph.nodes if node.target is aten.relu.default)
    relu.meta["val"] = relu.meta["val"].to(BF16)
    with pytest.raises(CaptureError, match=r"relu .*torch.bfloat16.*amp_fx\.export"):
        amp_fx.convert(ep)


def counting(m: Any, x: Tensor) -> Tensor:
    """Writes to a buffer, and reads a constant and a buffer that is not saved."""
    m.calls.add_(1)
    return m.linear(x) @ m.constant + torch.tensor([2.0]) + m.calls


def test_buffers_constants_and_what_is_not_saved_survive() -> None:
    x = torch.randn(4, 16)
    buffers = {"calls": torch.zeros(1), "constant": torch.full((16, 16), 0.3)}
    model = Parts(counting, **linears("linear"), **buffers)
    model._non_persistent_buffers_set.add("constant")
    ep = amp_fx.export(model.eval(), (x,), profile="off")
    assert ep.state_dict["calls"].dtype is FP32
    # a constant that a matmul reads is stored low, too
    assert getattr(ep.constants["constant"], "dtype", None) is BF16
    module = saved(ep).module()
    first, second = module(x), module(x)
    torch.testing.assert_close(second - first, torch.ones_like(first))
    assert module.get_buffer("calls").item() == 2


def static_key_value_cache(m: Any, x: Tensor) -> Tensor:
    m.cache[torch.arange(2)] = m.linear(x[:2])
    return m.cache @ x.T


def accumulate(m: Any, x: Tensor) -> Tensor:
    m.cache.add_(m.linear(x))
    return m.linear(m.cache)


def overwrite(m: Any, x: Tensor) -> Tensor:
    m.cache.copy_(m.linear(x))
    m.cache.mul_(0.5)
    return m.linear(m.cache)


def slices(m: Any, x: Tensor) -> Tensor:
    m.cache[1:3] += m.linear(x)[1:3]
    return m.linear(m.cache)


def rows_by_index(m: Any, x: Tensor) -> Tensor:
    m.cache.index_copy_(0, torch.tensor([0, 1]), m.linear(x)[:2])
    return m.linear(m.cache)


def weight_without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.mul_(0.5)
    return m.linear(x) + m.cache


def views(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    y[:, :8].add_(1)
    y[0].mul_(2)
    return y @ y.T + m.cache[:, :4]


def shape_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x) + 1
    y.t_()
    y.unsqueeze_(0).transpose_(1, 2)
    return y[0] @ m.cache.T


WRITES = (
    static_key_value_cache, accumulate, overwrite, slices, rows_by_index, weight_without_gradients, views,
    shape_in_place,
)  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_model_that_writes_is_exported_with_gradients(write: Callable[..., Tensor], strict: bool) -> None:
    x = torch.randn(4, 16)
    model = Parts(write, **linears("linear"), cache=torch.ones(4, 16))
    stock = torch.export.export(model, (x,), strict=strict)
    # in a file, what a program writes to is named otherwise
    ep = amp_fx.convert(saved(stock) if write is views else stock, profile="off")
    casts = ep.graph.find_nodes(op="call_function", target=aten.to.dtype)
    assert casts, "something runs low"
    exact = copy.deepcopy(model).double()
    module = ep.module()
    for _ in range(2):  # what the first call wrote, the second reads
        assert error(module(x), exact(x.double())) < 0.01
    for name, value in exact.state_dict().items():
        assert error(module.state_dict()[name], value) < 0.01


def partly(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x)
        m.c.bias.mul_(0.5)
        with torch.enable_grad():
            z = m.b(x)
    return m.c(y) + z


def test_no_gradient_leaves_a_region_without_gradients() -> None:
    model, x = Parts(partly, **linears("a", "b", "c")), torch.randn(4, 16)
    module = amp_fx.export(model, (x,), profile="off").module()
    exact = copy.deepcopy(model).double()
    module(x).sum().backward()
    exact(x.double()).sum().backward()
    both = ([(n, p.grad) for n, p in of.named_parameters() if p.grad is not None] for of in (module, exact))
    ours, true = map(dict, both)
    assert ours.keys() == true.keys()
    assert all(error(ours[name], true[name]) < 0.01 for name in true)


def test_a_dynamic_batch_stays_dynamic_and_bounded() -> None:
    x = torch.randn(4, 3, 16)
    batch = Dim("batch", min=2, max=32)
    stock = torch.export.export(nn.Linear(16, 8, bias=False), (x,), dynamic_shapes=({0: batch},))
    ep = amp_fx.convert(stock, profile="off")
    assert ep.range_constraints == stock.range_constraints
    assert len(ep.range_constraints) == 1
    assert ep.module()(torch.randn(7, 3, 16)).shape == (7, 3, 8)
    with pytest.raises(AssertionError, match="32"):
        ep.module()(torch.randn(33, 3, 16))


def branches(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: m.linear(x), lambda x: x.sin(), (x,))


def test_branches_of_cond_are_rewritten_and_return_their_dtypes() -> None:
    x, model = torch.rand(4, 16), Parts(branches, **linears("linear"))
    ep = amp_fx.export(model.eval(), (x,), profile="off")
    assert [row.dtype for row in report(ep).nodes if row.op == "linear"] == [BF16]
    assert ep.module()(x).dtype is FP32
    assert error(ep.module()(x), model(x)) < 0.02
    assert torch.equal(ep.module()(-x), (-x).sin())
