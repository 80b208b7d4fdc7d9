"""Programs that are hard to export (autocast inside and around, writes, branches), in fp8, and by a plan."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import amp_fx
from amp_fx import Plan
from support.checks.below_16_bits import FP8_CPU, calls, error_of
from support.models.small import Parts, UpDown

aten = torch.ops.aten
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


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
    assert error_of(ep.module()(x), model(x)) < 0.02


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
        assert error_of(result, expected) < 1e-3
        assert ep.state_dict["up.weight"].dtype is FP16
    plain = torch.export.export(model, (x,))
    with torch.autocast("cpu", FP16):
        ep = amp_fx.convert(plain, profile="off")
    assert ep.state_dict["up.weight"].dtype is BF16, "what surrounds convert says nothing"


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
    assert calls(ep.graph_module, aten.to.dtype), "something runs low"
    exact = copy.deepcopy(model).double()
    module = ep.module()
    for _ in range(2):  # what the first call wrote, the second reads
        assert error_of(module(x), exact(x.double())) < 0.01
    for name, value in exact.state_dict().items():
        assert error_of(module.state_dict()[name], value) < 0.01


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
    for name, parameter in exact.named_parameters():
        ours, true = module.get_parameter(name).grad, parameter.grad
        assert (ours is None) == (true is None)
        assert ours is None or true is None or error_of(ours, true) < 0.01


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
    assert error_of(ep.module()(x), model(x)) < 0.02
    assert torch.equal(ep.module()(-x), (-x).sin())


# --- in fp8, and by a plan ---


class Net(nn.Module):
    """A linear whose weight is a buffer, two that share one, one whose columns are multiplied, and a tied head."""

    up: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 32)
        self.register_buffer("up", torch.randn(64, 32) / 6)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.columns = nn.Parameter(torch.randn(64, 32) / 8)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y = F.gelu(F.linear(x, self.up))
        y = self.second(F.gelu(self.first(y)))
        return F.linear(self.norm(x + y @ self.columns), self.table.weight)


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


TOKENS = torch.randint(48, (3, 5), generator=torch.Generator().manual_seed(1))


def exported(model: nn.Module, folder: Path, **options: Any) -> ExportedProgram:
    FP8_CPU.save(folder / "profile.json")
    batch = {"tokens": {0: Dim("batch", min=1, max=64)}}
    options = {"policy": "fp8", "profile": str(folder / "profile.json"), **options}
    return amp_fx.export(model, (TOKENS,), dynamic_shapes=batch, **options)


@pytest.mark.parametrize(("recipe", "dtype"), [("rowwise", "bfloat16"), ("tensorwise", "float16")])
def test_a_program_computes_what_the_model_computes_and_is_saved(
    model: Net, tmp_path: Path, recipe: str, dtype: str
) -> None:
    program = exported(model, tmp_path, fp8=recipe, dtype=dtype)
    found = program.module()(TOKENS)
    assert found.dtype is FP32
    assert 0.005 < error_of(found, copy.deepcopy(model).double()(TOKENS)) < 0.06
    files, path = {"amp_fx.json": ""}, tmp_path / "program.pt2"
    torch.export.save(program, path, extra_files=amp_fx.extra_files(program))
    again = torch.export.load(path, extra_files=files)
    assert torch.equal(again.module()(TOKENS), found)
    more = torch.cat([TOKENS, TOKENS.flip(0)])
    assert error_of(again.module()(more), copy.deepcopy(model).double()(more)) < 0.06
    plan = Plan.from_json(files["amp_fx.json"])
    assert plan.meaning == recipe
    assert [row.computed is FP8 for row in plan.nodes if row.flops] == [True] * 4 + [False]


def test_weights_are_stored_in_fp8_with_their_factors(model: Net, tmp_path: Path) -> None:
    program = exported(model, tmp_path)
    stored = {name: (tuple(value.shape), value.dtype) for name, value in program.state_dict.items()}
    assert stored == {
        # what is contracted comes last
        "up": ((64, 32), FP8), "up_fp8_scale": ((64, 1), FP32),
        # of tied weights, the scale has the name that the graph reads
        "first.weight": ((64, 64), FP8), "second.weight": ((64, 64), FP8), "second.weight_fp8_scale": ((64, 1), FP32),
        "columns": ((32, 64), FP8), "columns_fp8_scale": ((32, 1), FP32),
        "first.bias": ((64,), BF16), "second.bias": ((64,), BF16), "table.weight": ((48, 32), BF16),
        "norm.weight": ((32,), FP32), "norm.bias": ((32,), FP32),
    }  # fmt: skip
    first, second = (program.state_dict[f"{name}.weight"] for name in ("first", "second"))
    assert first.data_ptr() == second.data_ptr()
    kept = program.state_dict["columns"].float() * program.state_dict["columns_fp8_scale"]
    assert error_of(kept.t(), model.columns.detach().double()) < 0.03
    # nothing is converted but what is not stored
    converted = [node.all_input_nodes[0].op for node in calls(program.graph_module, aten.abs.default)]
    assert "placeholder" not in converted
    names = [spec.target for spec in program.graph_signature.input_specs if spec.target]
    assert sorted(names) == sorted(stored)


def test_what_reads_a_weight_otherwise_keeps_it_as_it_is(tmp_path: Path) -> None:
    class Read(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * self.columns.sum()

    model = Read().eval().requires_grad_(False)
    program = exported(model, tmp_path)
    assert program.state_dict["columns"].dtype is FP32
    assert "columns_fp8_scale" not in program.state_dict
    assert len(calls(program.graph_module, aten._scaled_mm.default)) == 4
    assert error_of(program.module()(TOKENS), copy.deepcopy(model).double()(TOKENS)) < 0.1


def test_a_device_without_fp8_has_the_program_of_policy_autocast(model: Net) -> None:
    fp8, low = (amp_fx.export(model, (TOKENS,), policy=policy) for policy in ("fp8", "autocast"))
    assert torch.equal(fp8.module()(TOKENS), low.module()(TOKENS))
    assert report(fp8).meaning.startswith("as autocast: cpu ")


def _dtypes(plan: Plan) -> list[tuple[str, torch.dtype | None]]:
    """Of all calls; in Dynamo's graph of attention, ``contiguous`` stands where a program has none."""
    return [(row.op, row.dtype) for row in plan.nodes if row.op != "contiguous"]


@torch.no_grad()
def test_a_plan_of_the_compiled_model_is_followed_by_its_export() -> None:
    parts = {"attend": nn.MultiheadAttention(64, 4, batch_first=True), "out": nn.Linear(64, 64)}
    model = Parts(lambda m, x: m.out(m.attend(x, x, x, need_weights=False)[0]), **parts).eval()
    x = torch.randn(2, 16, 64)
    plan = amp_fx.explain(model, x, options={"profile": "off"}).plan
    program = amp_fx.export(model, (x,), plan=plan)
    followed = report(program)
    assert _dtypes(followed) == _dtypes(plan)
    assert dict(_dtypes(followed))["scaled_dot_product_attention"] is BF16
    back = amp_fx.explain(model, x, options={"profile": "off", "plan": (followed,)}).plan
    assert [(row.op, row.dtype) for row in back.nodes] == [(row.op, row.dtype) for row in plan.nodes]
    assert error_of(program.module()(x), model.double()(x.double())) < 4 * torch.finfo(BF16).eps
