"""Matmuls below 16 bits in graphs without gradients: what they read, and what they compute. No code is generated."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing._internal.two_tensor import TwoTensor

from amp_fx import Plan, explain, record
from amp_fx.compiler import rewriting
from amp_fx.compiler.settings import Options
from amp_fx.graphs.keys import KEPT_META
from amp_fx.graphs.regions import ambient_regions
from amp_fx.instruments.reports import Report
from amp_fx.passes import PassContext, PassSelection, PlaceLevels, captured_passes, run_passes
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.policy.levels import LEVELS
from amp_fx.runtime.weights.lift import kept_copies, steps_to, weights_of
from amp_fx.viz.model import drawing
from support.checks.below_16_bits import (
    Attention,
    calls,
    error,
    evaluated,
    exact,
    lies_right,
    options,
    scaled,
)
from support.models.small import Parts
from support.tracing.captured_graphs import (
    Rewritten,
    captured,
    casts_of,
    dynamo_graph,
    rewrite,
    without_inductor,
)

aten = torch.ops.aten

FP8 = torch.float8_e4m3fn


class Columns(nn.Module):
    """A weight whose columns are multiplied, as transformers' ``Conv1D`` has it."""

    def __init__(self, *bias: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 48) / 6), nn.Parameter(torch.randn(bias or 48))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, 32), self.weight).view(*x.shape[:-1], 48)
        return y.sigmoid() @ torch.ones(48, 1, dtype=y.dtype)


def chain(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32, bias=False), nn.Linear(32, 16, bias=False))


def in_int8(gm: fx.GraphModule, **how: Any) -> Plan:
    """Multiplies in int8 all that may be, by weights of which copies are kept."""
    levels = PlaceLevels(LEVELS["int8"], "cpu", joint=False, **{"keeps_weights": True, **how})
    context = PassContext(folded=frozenset(node.name for node in gm.graph.find_nodes(op="placeholder")))
    return run_passes(gm, captured_passes(PassSelection(levels=levels)), context)


def run(model: nn.Module, x: Tensor, folder: Path, level: str = "rowwise", **others: Any) -> Rewritten:
    dynamic = others.pop("dynamic", None)
    return evaluated(model, x, options(folder, level, **others), dynamic)


@pytest.mark.parametrize(("level", "dtype"), [("rowwise", "bfloat16"), ("tensorwise", "float16")])
def test_results_are_as_near_to_fp64_as_e4m3_lets_them(tmp_path: Path, level: str, dtype: str) -> None:
    model, x = Attention().eval(), torch.randn(2, 5, 32)
    found = run(model, x, tmp_path, level, dtype=dtype)
    assert len(scaled(found)) == 4
    low = rewrite(model, x, options={"dtype": dtype})
    right = [exact(model, x) - x.double()]
    wrong, wrong_low = (error([result.outputs.detach() - x], right) for result in (found, low))
    assert 5 * wrong_low < wrong < 0.07
    assert found.outputs.dtype is torch.float32


def test_a_plan_is_followed_where_nothing_reads_a_view_any_more() -> None:
    def program(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
        y = x @ w.t()
        return (y + y.topk(2)[1].sum()) @ head

    given = program, torch.randn(32, 64), torch.randn(64, 64), torch.randn(64, 8)
    made = rewrite(*given, options={"policy": "int8", "profile": "off"})
    rows = [row.name for row in made.plan.nodes]
    # of ``t`` and ``values``
    assert len({*rows} - {node.name for node in made.gm.graph.nodes}) == 2
    followed = rewrite(*given, options={"plan": made.plan, "profile": "off"})
    assert torch.equal(followed.outputs, made.outputs)
    assert [row.name for row in followed.plan.nodes] == rows


def test_a_plan_is_followed_where_a_copy_stands_for_a_cast_of_the_program() -> None:
    net = Parts(lambda m, x: x.bfloat16() @ m.only.weight.bfloat16(), only=nn.Linear(32, 32)).eval()
    x = torch.randn(4, 32)
    with without_inductor(), torch.inference_mode():
        plan = explain(net, x).plan
        assert [row.op for row in plan.nodes] == ["to.dtype", "to.dtype", "matmul"]
        torch._dynamo.reset()
        given: Any = {"plan": plan, "strict": True}
        followed = torch.compile(net, backend="amp_fx", options=given)
        assert torch.equal(followed(x), net(x))


@pytest.mark.parametrize(
    ("level", "means"), [("mxfp8", "as autocast"), ("rowwise_gw_hp", "rowwise"), ("tensorwise", "tensorwise")]
)
def test_what_a_level_means_without_gradients(tmp_path: Path, level: str, means: str) -> None:
    found = run(Attention(), torch.randn(4, 32), tmp_path, level)
    assert found.plan.meaning.startswith(means)
    assert bool(scaled(found)) is (means != "as autocast")


@pytest.mark.parametrize("level", ["rowwise", "tensorwise"])
def test_operands_lie_as_library_kernels_want_them(tmp_path: Path, level: str) -> None:
    # the rows of the first lie apart
    class Turned(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.t())

    for model, x in (
        (Attention(), torch.randn(2, 5, 32)),
        (Turned(), torch.randn(32, 5)),
        (Columns(), torch.randn(3, 32)),
    ):
        found = run(model, x, tmp_path, level)
        assert scaled(found)
        for node in scaled(found):
            assert {arg.meta["val"].dtype for arg in node.args[:2]} == {FP8}  # type: ignore[union-attr]  # nodes
            assert lies_right(node, level == "rowwise")
            assert node.args[7]  # fast sums


@pytest.mark.parametrize(("bias", "count"), [((48,), 1), ((1,), 0), ((3, 48), 0), ((3, 1), 0)], ids=str)
def test_what_is_added_is_one_number_for_each_column_or_the_matmul_stays_low(
    tmp_path: Path, bias: tuple[int, ...], count: int
) -> None:
    assert len(scaled(run(Columns(*bias), torch.randn(3, 32), tmp_path))) == count


@pytest.mark.parametrize(
    ("keeps", "way", "dtypes"),
    [(True, "int8_packed", {torch.uint8, torch.int8}), (False, "int8_signed", {torch.int8})],
)
def test_only_where_copies_live_across_calls_a_weight_is_packed_and_values_are_unsigned(
    keeps: bool, way: str, dtypes: set[torch.dtype]
) -> None:
    with torch.no_grad():
        gm = captured(chain(64), torch.randn(6, 64))
    plan = in_int8(gm, keeps_weights=keeps)
    assert [r.values["level"] for row in plan.nodes for r in row.reasons if r.kind is ReasonKind.LEVEL] == [
        way
    ]
    made = {node.meta["val"].dtype for node in calls(gm, aten.to.dtype)}
    assert made & {torch.uint8, torch.int8} == dtypes


@pytest.mark.parametrize(
    ("contracted", "way"),
    [(66_304, "int8_packed"), (66_312, "int8_signed"), (133_144, "int8_signed"), (133_152, "")],
)
def test_sums_of_bytes_that_may_overflow_are_not_made(contracted: int, way: str) -> None:
    with torch.no_grad():
        gm = captured(chain(contracted), torch.randn(6, contracted))
    plan = in_int8(gm)
    first = next(row for row in plan.nodes if row.flops)
    assert [r.values["level"] for r in first.reasons if r.kind is ReasonKind.LEVEL] == [way] * bool(way)
    values = {"level": "int8_signed", "most": 133_144, "contracted": contracted, "role": "forward"}
    assert [r.values for r in first.reasons if r.kind is ReasonKind.LONG_SUM] == [values] * (not way)


@pytest.mark.parametrize(("channels", "fits"), [(1036, True), (1037, False)])
def test_a_convolution_contracts_the_window_of_the_channels_of_a_group(channels: int, fits: bool) -> None:
    layers = nn.Conv2d(2 * channels, 2, 8, groups=2), nn.Conv2d(2, 4, 1)
    with torch.no_grad():
        gm = captured(nn.Sequential(*layers).eval(), torch.randn(1, 2 * channels, 8, 8))
    plan = in_int8(gm, scales=(("conv2d", (0.1, 128)),))
    first = next(row for row in plan.nodes if row.flops)
    assert first.is_because(ReasonKind.LEVEL) is fits
    assert first.is_because(ReasonKind.LONG_SUM) is not fits


def test_a_value_is_converted_once_for_all_that_read_it(tmp_path: Path) -> None:
    found = run(Attention(), torch.randn(2, 2, 32), tmp_path)
    conversions = [n for n in calls(found.gm, aten.to.dtype) if n.meta["val"].dtype is FP8]
    # two values and four weights
    assert len(conversions) == 6
    # a weight is rounded once
    sources = {n.all_input_nodes[0] for n in calls(found.gm, aten.abs.default)}
    assert sum(n.op == "placeholder" and n.meta["val"].dtype is torch.float32 for n in sources) == 4


class Written(Attention):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).relu()
        first = self.q(y)
        y.mul_(2)
        return x + first + self.k(y)


class Shifted(Attention):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[1:] = x[:-1]
        y.masked_fill_(y > 2, 2)
        return super().forward(y)


@pytest.mark.parametrize(
    ("make", "shape", "count", "how"),
    [
        (Attention, (1, 32), 4, {}),
        (Attention, (32,), 4, {}),
        (Attention, (2, 3, 5, 32), 4, {}),
        (Attention, (3, 5, 32), 4, {"dynamic": True}),
        (Attention, (3, 5, 32), 4, {"dynamic": True, "level": "tensorwise"}),
        # a value that is written to is converted again, and no write goes
        (Written, (16, 32), 2, {}),
        (Shifted, (16, 32), 4, {}),
    ],
    ids=["one row", "no rows", "many", "symbols", "symbols, tensorwise", "written", "shifted"],
)
def test_any_number_of_rows_runs_below_also_of_values_that_are_written_to(
    tmp_path: Path, make: Callable[[], nn.Module], shape: tuple[int, ...], count: int, how: dict[str, Any]
) -> None:
    model, x = make(), torch.randn(shape)
    found = run(model, x, tmp_path, **how)
    assert len(scaled(found)) == count
    assert found.outputs.shape == x.shape
    assert error([found.outputs], [exact(model, x)]) < 0.03


def test_the_plan_knows_the_calls_as_before(tmp_path: Path) -> None:
    model, x = Attention(), torch.randn(2, 5, 32)
    rules = {"base": "fp8", "rules": [{"op": "linear", "precision": "low"}]}
    low, found = (run(model, x, tmp_path, policy=policy) for policy in (rules, "fp8"))
    assert found.plan.meaning == "rowwise"
    before, after = (
        [(row.name, row.flops, row.shape, row.bytes, row.dtype) for row in each.plan.nodes]
        for each in (low, found)
    )
    assert before == after
    linears = [row for row in found.plan.nodes if row.flops]
    assert [row.levels for row in linears] == [{"forward": "rowwise"}] * 4
    assert {row.computed for row in linears} == {FP8}
    assert all(row.is_because(ReasonKind.LEVEL) for row in linears)
    # so that a call that follows the plan multiplies as it says
    assert found.plan.decides_levels
    names = {row.name for row in (*found.plan.nodes, *found.plan.casts, *found.plan.inputs)}
    assert all(set(row.inputs) <= names for row in found.plan.nodes)
    # a step of a copy is no cast of the graph
    assert len(found.plan.casts) == len(low.plan.casts) - 4
    assert all({*cast.users} <= names | {"output"} for cast in found.plan.casts)


def test_subclasses_of_tensors_stay_as_they_are(tmp_path: Path) -> None:
    model = Parts(lambda m, x: m.head(m.plain(x) @ m.weight), plain=nn.Linear(32, 32), head=nn.Linear(32, 16))
    model.weight = nn.Parameter(TwoTensor(torch.randn(32, 32), torch.randn(32, 32)))
    x = torch.randn(4, 32)
    with torch.no_grad(), without_inductor(), record() as recording:
        compiled = torch.compile(model, backend="amp_fx", options=options(tmp_path, weights="cast"))
        got, expected = compiled(x), model(x)
    assert type(got) is type(expected)
    assert error([got.a], [expected.a.double()]) < 0.05
    (plan,) = recording.plans
    assert [row.computed for row in plan.nodes if row.flops] == [FP8]
    assert [row.computed for row in plan.nodes if row.op in ("matmul", "linear")][1:] == [torch.float32] * 2


@pytest.mark.parametrize("make", [Attention, Columns])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32", "bf16"])
def test_copies_of_weights_are_inputs_with_their_factors(tmp_path: Path, make: Any, wide: bool) -> None:
    dtype = torch.float32 if wide else torch.bfloat16
    model, x = make().eval().to(dtype), torch.randn(4, 32, dtype=dtype)
    with torch.no_grad():
        found = dynamo_graph(model, x)
        opts = Options.parse(None, options(tmp_path, "rowwise", weights="cache"))
        gm, plan = rewriting.rewrite(found, ambient_regions({"cpu": torch.bfloat16}), opts)
    copies = kept_copies(gm.graph)
    in_fp8 = [n.meta["val"] for n in copies if n.meta["val"].dtype is FP8]
    factors = [n.meta["val"] for n in copies if n.meta[KEPT_META].suffix == "_fp8_scale"]
    shapes = [(32, 32)] * 4 if make is Attention else [(48, 32)]
    assert [tuple(value.shape) for value in in_fp8] == shapes
    assert [tuple(value.shape) for value in factors] == [(rows, 1) for rows, _ in shapes]
    assert all(value.is_contiguous() for value in in_fp8)
    # no weight of a matmul below 16 bits is read by anything else
    steps = {*steps_to(copies)}
    assert all(user in steps for weight in weights_of(copies) for user in weight.users)
    assert ("float32", "float8_e4m3fn") not in casts_of(gm)
    if make is Attention and wide:
        report = Report([plan])
        # four weights, four biases
        assert re.search(r"\b8, 4\.86 kB", str(report))
        assert sum(given.bytes for given in report.held) == 4 * (32 * 32 + 4 * 32 + 2 * 32)
        labels = [node.label for node in drawing(report).graphs[0].nodes]
        assert labels.count("weight") == labels.count("weight scales") == 4


@pytest.mark.parametrize("level", ["rowwise", "tensorwise"])
def test_a_graph_in_fp16_does_not_overflow_before_its_scales(tmp_path: Path, level: str) -> None:
    model, x = chain(512), torch.ones(4, 512) * 100
    # in fp8 the weights are 448 times this
    nn.init.constant_(model.get_parameter("0.weight"), 2e-3)
    found = run(model, x, tmp_path, level, dtype="float16")
    # all weights are rounded alike
    assert error([found.outputs], [exact(model, x)]) < 0.1
