"""Inference in 8-bit integers on a CPU: accuracy, packed weights that may change, and what stays in 16 bits."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx.compiler.compiling
from amp_fx._torch import make_fx, multiplies_int8, quantised_ops
from amp_fx.passes import PassContext, ReadScales
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import ReasonKind
from support.checks.below_16_bits import error
from support.checks.held_memory import Held
from support.models.small import Parts
from support.tracing.captured_graphs import default_dtype, without_inductor

#: all that may run in int8 does, whether it pays or not
OPTIONS = {"policy": "int8", "profile": "off", "strict": True}


@pytest.fixture(scope="module")
def model() -> Any:
    """Odd sizes, linears that share what they read, a tied embedding, and a head."""
    torch.manual_seed(0)
    embed, out = nn.Embedding(24, 35), nn.Linear(35, 24, bias=False)
    out.weight = embed.weight
    parts = {"gate": nn.Linear(35, 67), "up": nn.Linear(35, 67), "down": nn.Linear(67, 35)}

    def call(m: Any, ids: Tensor) -> Tensor:
        x = m.embed(ids)
        return m.out(m.down(F.silu(m.gate(x)) * m.up(x)))

    return Parts(call, embed=embed, out=out, **parts).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 24, (4, 9), generator=torch.Generator().manual_seed(1))


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="amp_fx", options={**OPTIONS, **options})


@pytest.fixture(scope="module")
def run(model: Any) -> Callable[..., Tensor]:
    return compiled(model)


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def wrong(got: Tensor, model: nn.Module, *args: Tensor) -> float:
    """Relative distance from fp64."""
    given = [arg.double() if arg.is_floating_point() else arg for arg in args]
    return error([got], [copy.deepcopy(model).double()(*given)])


def small(**options: Any) -> tuple[nn.Sequential, Callable[..., Tensor]]:
    """A model with one linear in int8, and what is compiled of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    return model, compiled(model, **options)


def planned(run: Callable[..., Any], *args: Tensor) -> dict[str, str]:
    """How every matmul is computed, by module: the implementation below 16 bits, or the dtype."""
    with without_inductor(), amp_fx.record() as recording:
        run(*args)
    rows = [row for plan in recording.plans for row in plan.nodes if row.flops]
    ways = {
        row.module_path: [r.values["level"] for r in row.reasons if r.kind is ReasonKind.LEVEL]
        for row in rows
    }
    return {row.module_path: str((ways[row.module_path] or [row.dtype])[0]) for row in rows}


@pytest.mark.slow
def test_results_are_as_near_to_fp64_as_8_bits_let_them_and_follow_weights_and_sizes(
    model: Any, ids: Tensor, run: Callable[..., Tensor]
) -> None:
    with torch.autocast("cpu"):
        low = wrong(model(ids), model, ids)
    first = run(ids)
    assert first.dtype is torch.float32
    assert low < wrong(first, model, ids) < 0.03
    for change in (lambda p: p.mul_(1.5), lambda p: p.data.mul_(0.5)):
        with torch.no_grad():
            change(model.up.weight)
        assert wrong(run(ids), model, ids) < 0.03
    assert wrong(run(ids[:, :5]), model, ids[:, :5]) < 0.03


def test_linears_but_the_last_run_in_int8_and_rules_are_followed(model: Any, ids: Tensor) -> None:
    packed, low = "int8_packed", "torch.bfloat16"
    assert planned(compiled(model), ids) == {"gate": packed, "up": packed, "down": packed, "out": low}
    wanted = {"up": "fp32", "down": "low", "out": "int8"}
    rules = [{"module": module, "precision": precision} for module, precision in wanted.items()]
    found = planned(compiled(model, policy={"base": "int8", "rules": rules}), ids)
    assert found == {"gate": packed, "up": "torch.float32", "down": low, "out": packed}


@pytest.mark.usefixtures("op_by_op")
def test_a_single_row_is_multiplied_without_packing() -> None:
    for options, rows in (({}, 1), ({"dtype": "float16"}, 1), ({"int8": "int8_unpacked"}, 6)):
        model, run = small(**options)
        x = torch.randn(rows, 32)
        assert planned(run, x)["0"] == "int8_unpacked"
        assert wrong(run(x), model, x) < 0.03
        x[0, 3] = torch.inf
        assert run(x)[0].isnan().all()


@pytest.mark.usefixtures("op_by_op")
def test_rows_of_zeros_stay_zeros_and_an_infinity_makes_nan_of_its_row() -> None:
    model, run = small()
    x = torch.randn(4, 32)
    x[0], x[1, 3], x[2, 1] = 0, torch.inf, torch.nan
    model[0].weight.data[5] = 0  # type: ignore[operator]  # a linear
    got = run(x)
    assert got.isnan().all(1).tolist() == [False, True, True, False]
    fine = [0, 3]
    assert wrong(got[fine], model, x[fine]) < 0.03
    assert run(torch.empty(0, 32)).shape == (0, 16), "of no rows"


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"weights": "cast"}], ids=str)
def test_with_fp16_and_with_weights_that_are_quantised_in_each_call(options: dict[str, str]) -> None:
    (model, run), x = small(**options), torch.randn(6, 32)
    assert wrong(run(x), model, x) < 0.03
    # nothing is cast in a model that is low as a whole, and its matmuls run in int8 all the same
    low = torch.float16 if "dtype" in options else torch.bfloat16
    model, x = model.to(low), x.to(low)
    assert 3e-3 < error([run(x)], [model(x)]) < 0.03


@pytest.mark.int8
@pytest.mark.usefixtures("op_by_op")
def test_a_packed_weight_takes_one_byte_an_element() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)).eval()
    held = Held()
    compiled(model)(torch.randn(8, 512))
    # of each column a factor, two numbers that oneDNN wants, and a low bias; and the last linear is low, and oneDNN
    # may pad its 16 columns to 64
    assert 512 * 512 < held.bytes() < 512 * 512 + 512 * 24 + 2 * 512 * 64


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, 6), ({"max_autotune": True}, 6), ({}, 1)],
    ids=["many", "max_autotune", "a row"],
)
def test_where_sums_of_bytes_would_overflow_floats_are_multiplied(options: dict[str, Any], rows: int) -> None:
    (model, run), x = small(**options), torch.randn(rows, 32)
    seen = mock.Mock(wraps=amp_fx.compiler.compiling.compile_with_inductor)
    with mock.patch.multiple(
        "amp_fx.compiler.compiling", multiplies_int8=lambda: False, compile_with_inductor=seen
    ):
        assert wrong(run(x), model, x) < 0.03
    code = str(seen.call_args.args[0].graph)
    assert ("dequantize_per_tensor" in code) == (rows > 1)
    assert not re.search("dequantize_per_channel|qlinear|int_mm", code)


@pytest.mark.usefixtures("op_by_op")
def test_so_are_weights_that_are_quantised_in_each_call() -> None:
    (model, run), x = small(), torch.randn(32, 32)
    model.requires_grad_(False)
    seen = mock.Mock(wraps=amp_fx.compiler.compiling.compile_with_inductor)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        mock.patch.multiple(
            "amp_fx.compiler.compiling", multiplies_int8=lambda: False, compile_with_inductor=seen
        ),
    ):
        assert wrong(run(x), model, x) < 0.03
    code = str(seen.call_args.args[0].graph)
    assert "int8" in code
    assert "int_mm" not in code


def test_what_is_added_to_a_product_stays_the_programs_own() -> None:
    with torch.inference_mode(False):
        model = Parts(lambda m, x: x.add(m.up(x), alpha=2), up=nn.Linear(32, 32)).eval()
        profile = DeviceProfile("test", "cpu", {"float32": 1e9, "bfloat16": 2e9, "int8": 8e9}, 1e12, 0.0)
        cal = amp_fx.calibrate(model, x := torch.randn(8, 32), of="outputs", policy="int8", profile=profile)
    options: Any = {"plan": cal.plan(budget=100, verify=False), "strict": True}
    run, given = torch.compile(model, backend="amp_fx", options=options), x.clone()
    assert wrong(run(given), model, x) < 0.01
    assert torch.equal(given, x)


def added_late(a: Tensor, z: Tensor, convolve: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Adds to a wide value in place."""
    y, total = convolve(a), z * 1.0
    total += a
    return y, total * 2.0


def added_and_written(a: Tensor, z: Tensor, convolve: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Adds to an input, and writes to it again."""
    y = convolve(a)
    z += a
    z.mul_(2.0)
    return y, z + 1.0


def added_early(a: Tensor, z: Tensor, convolve: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Adds before it convolves."""
    total = a + z.mean(1, keepdim=True)
    return total + convolve(a), z * 2.0


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("program", [added_late, added_and_written, added_early])
def test_what_is_convolved_in_int8_may_be_added_to_anything_anywhere(program: Any) -> None:
    def call(m: Any, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        y, total = program(m.stem(x).relu(), z, m.body)
        return m.head(y), total

    with torch.inference_mode(False):
        # large beside what is added: rounded to 16 bits it is far off
        x, z = torch.randn(2, 3, 8, 8), 100 * torch.rand(2, 8, 8, 8)
        body, stem = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        model = Parts(call, stem=stem, body=body, head=nn.Conv2d(8, 8, 1)).eval()
        batches = [(x, z.clone())]
        cal = amp_fx.calibrate(model, batches, of="outputs", policy="int8", profile="off")
    plan = cal.plan(budget=100, verify=False)
    assert [row.module_path for row in plan.plans[0].nodes if row.scales] == ["stem", "body"]
    options: Any = {"plan": plan, "strict": True}
    run = torch.compile(model, backend="amp_fx", options=options)
    ours, theirs = z.clone(), z.clone()
    got, want = run(x, ours), model(x, theirs)
    assert [value.dtype for value in got] == [torch.float32] * 2
    assert error([got[0]], [want[0].double()]) < 0.05
    for value, wanted in ((got[1], want[1]), (ours, theirs)):
        assert error([value], [wanted.double()]) < 1e-4


@pytest.mark.int8_rate
def test_by_default_only_what_pays_is_quantised() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    with torch.device("meta"):
        head = nn.Linear(4096, 8)
    model.extend([nn.ReLU(), head.to_empty(device="cpu")])
    run = torch.compile(model.eval(), backend="amp_fx", options={"policy": "int8"})
    levels = planned(run, torch.randn(64, 16))
    assert levels["4"] == "int8_packed"
    assert "int8_packed" not in (levels["0"], levels["6"])


def test_with_gradients_the_policy_means_autocast_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _, run = small()
    with torch.inference_mode(False), torch.enable_grad(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert set(planned(run, torch.randn(4, 32)).values()) == {"torch.bfloat16"}
            torch._dynamo.reset()
    assert len([row for row in caplog.records if "int8" in row.getMessage()]) <= 1


# what contradicts it among options is in the table of option_pairs.py, and that it has no gradients to calibrate, in
# calibration/test_outputs.py
# without VNNI torch clamps sums of the full range
@pytest.mark.parametrize("int8_range", [pytest.param("full", marks=pytest.mark.int8), "reduced"])
def test_an_exported_program_multiplies_integers_without_amp_fx(int8_range: str) -> None:
    with torch.inference_mode(False), torch.no_grad():
        model, _ = small()
        x = torch.randn(5, 32)
        program = amp_fx.export(model, (x,), policy="int8", profile="off", int8_range=int8_range)
        assert [node for node in program.graph.nodes if node.target is torch.ops.aten._int_mm.default]
        assert torch.int8 in {weight.dtype for weight in program.state_dict.values()}
        assert wrong(program.module()(x), model, x) < 0.03


@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
def test_what_explain_reports_is_counted_and_followed(model: Any, ids: Tensor, run: Any) -> None:
    report = amp_fx.explain(model, ids, options={**OPTIONS, "weights": "cache"})
    plan = report.plan
    below = [row.levels for row in plan.nodes if row.levels_below]
    assert below == [{"forward": "int8"}] * 3
    assert (report.costs["amp_fx"].moved or 0) > 0
    # as plans had it when a level was one implementation
    packed = {"forward": "int8_packed"}
    nodes = [replace(row, levels=packed if row.levels_below else row.levels) for row in plan.nodes]
    for followed in (report, replace(plan, nodes=nodes)):
        torch._dynamo.reset()
        options: Any = {"plan": followed, "weights": "cache", "strict": True}
        assert torch.equal(torch.compile(model, backend="amp_fx", options=options)(ids), run(ids))


def test_the_programs_default_dtype_is_not_that_of_what_onednn_reads() -> None:
    def rounded(x: Tensor) -> Tensor:
        return quantised_ops().quantize_per_tensor(x, 0.1, 3, 0, 255, torch.uint8)

    amp_fx.reset()
    with default_dtype(torch.float64):
        multiplies_int8()
        gm = make_fx(rounded, tracing_mode="fake")(x := torch.randn(4, 16, dtype=torch.float32))
        ReadScales().call(gm, PassContext())
    assert {scale.dtype for scale in gm.buffers()} == {torch.float32}
    gm.recompile()
    assert torch.equal(gm(x), rounded(x))


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("dim", "zero"), [(0, 9), (1, 0), (1, 9)])
def test_weights_that_a_program_has_quantised_otherwise_are_multiplied_as_they_are(
    dim: int, zero: int
) -> None:
    torch.manual_seed(0)
    data, zeros = torch.randint(-99, 99, (32, 32), dtype=torch.int8), torch.full((32,), zero)
    weight = data, torch.rand(32), zeros, dim, -128, 127, torch.int8
    ops, span = quantised_ops(), (0.03, 128, 0, 255, torch.uint8)

    def call(m: Any, x: Tensor) -> Tensor:
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *span), *span)
        return F.linear(x, ops.dequantize_per_channel(m.data, m.scales, m.zeros, *weight[3:]))

    model = Parts(call)
    for name, value in zip(("data", "scales", "zeros"), weight[:3], strict=True):
        model.register_buffer(name, value)
    x = torch.randn(6, 32)
    run = torch.compile(model, backend="amp_fx", options={"weights": "cache", "strict": True})
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-3)
