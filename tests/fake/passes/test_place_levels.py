"""Which matmuls run below 16 bits, in training and without gradients. No code is generated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx.graphs.calls import output_nodes
from amp_fx.graphs.keys import MARK
from amp_fx.instruments.reports import Report
from amp_fx.passes.levels.level_problem import product_before
from amp_fx.precision.placement.level_cost import as_autocast
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.policy.levels import FORWARD
from amp_fx.viz.words import summary
from support.checks.below_16_bits import (
    FP8_CPU,
    MLP,
    Attention,
    Step,
    calls,
    evaluated,
    lowered,
    options,
    scaled,
)
from support.models.small import Parts
from support.tracing.captured_graphs import op_by_op

aten = torch.ops.aten

FP8 = torch.float8_e4m3fn


def mlp(folder: Path, *sizes: int, tokens: int = 32, level: str = "rowwise", **others: Any) -> Step:
    return lowered(MLP(*sizes), [torch.randn(tokens, sizes[0])], options(folder, level, **others))


def below(plan: Plan) -> list[bool]:
    """Of each linear's forward, in order."""
    return [row.computed is FP8 for row in plan.nodes if row.flops]


def test_forward_and_both_gradients_run_below_but_the_last_linear_does_not(tmp_path: Path) -> None:
    step = mlp(tmp_path, 32, 64, 48, 16)
    # the input of the first requires no gradient
    assert step.counts() == (2, 3)
    assert below(step.plan) == [True, True, False]
    assert (ReasonKind.LAST_LINEAR, FORWARD) in step.reasons()["layers.2"]
    assert len(calls(step.backward, aten.mm.default)) == 2
    # the plan is kept, and told in the log
    assert Plan.from_json(step.plan.to_json()) == step.plan
    assert "2 in fp8 and 1 in bf16" in summary(step.plan)
    assert summary(step.plan).endswith("rowwise")


def test_a_linear_that_ends_in_a_residual_sum_is_not_the_last_of_a_model(tmp_path: Path) -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        return (x + m.down(m.up(x).relu())).float().square().mean()

    model = Parts(block, up=nn.Linear(32, 64), down=nn.Linear(64, 32))
    found = lowered(model, [torch.randn(16, 32)], options(tmp_path))
    assert below(found.plan) == [True, True]


@pytest.mark.quick_rows("the last")
@pytest.mark.parametrize(
    ("sizes", "tokens", "forward", "backward"),
    [
        # tokens count where they are contracted: in gradients of weights
        ((32, 64, 64, 32), 24, 2, 1),
        # contracted or columns: 40 is no multiple of 16
        ((40, 64, 32), 32, 0, 0),
        ((32, 40, 32), 32, 0, 0),
        ((32, 64, 64, 40), 32, 2, 3),
    ],
    ids=["tokens", "contracted", "columns", "the last"],
)
def test_sizes_that_16_does_not_divide_stay_low_matmul_by_matmul(
    tmp_path: Path, sizes: tuple[int, ...], tokens: int, forward: int, backward: int
) -> None:
    found = mlp(tmp_path, *sizes, tokens=tokens)
    assert found.counts() == (forward, backward)
    assert forward or (ReasonKind.INDIVISIBLE, FORWARD) in found.reasons()["layers.0"]


def test_gradients_of_weights_stay_low_where_the_number_of_tokens_is_not_known(tmp_path: Path) -> None:
    model, x = MLP(32, 64, 64, 32), torch.randn(48, 32)
    torch._dynamo.mark_dynamic(x, 0)
    assert lowered(model, [x], options(tmp_path)).counts() == (2, 1)


@pytest.mark.parametrize(
    ("rule", "dtype", "count"),
    [
        ({"module": r"layers\.1", "precision": "low"}, torch.bfloat16, 3),
        ({"module": r"layers\.1", "precision": "fp32"}, torch.float32, 3),
        ({"op": "linear", "precision": "low"}, torch.bfloat16, 0),
    ],
)
def test_a_rule_keeps_calls_and_their_gradients_from_the_level(
    tmp_path: Path, rule: dict[str, str], dtype: torch.dtype, count: int
) -> None:
    given = {**options(tmp_path), "policy": {"base": "fp8", "rules": [rule]}}
    found = lowered(MLP(32, 32, 48, 32, 16), [torch.randn(32, 32)], given)
    assert below(found.plan)[1] is False
    assert [row.computed for row in found.plan.nodes if row.flops][1] is dtype
    # a low linear between others would have two gradients more
    assert len(found.scaled()[1]) == count


def test_levels_differ_in_gradients_of_weights_and_in_their_dtype(tmp_path: Path) -> None:
    def dtypes(level: str) -> list[tuple[torch.dtype, ...]]:
        nodes = mlp(tmp_path, 32, 64, 48, 16, level=level).scaled()[1]
        return [tuple(arg.meta["val"].dtype for arg in node.args[:2]) for node in nodes]  # type: ignore[union-attr]

    assert dtypes("rowwise_gw_hp") == [(FP8, FP8)]
    assert dtypes("tensorwise") == [(torch.float8_e5m2, FP8)] * 3


def test_no_matmul_has_gradients_on_both_sides(tmp_path: Path) -> None:
    def squared(m: Any, x: Tensor) -> Tensor:
        """Its backward multiplies a gradient by what another gradient becomes: twice the same value."""
        y = m.a(x)
        return (m.b(y) + y @ y.t() @ y).float().square().mean()

    model = Parts(squared, a=nn.Linear(32, 32, bias=False), b=nn.Linear(32, 32, bias=False))
    found = lowered(model, [torch.randn(32, 32)], options(tmp_path, "tensorwise"))
    assert any(found.counts())
    for node in itertools.chain(*found.scaled()):
        assert [a.meta["val"].dtype for a in node.args[:2]].count(torch.float8_e5m2) < 2  # type: ignore[union-attr]


def test_a_device_without_a_rate_runs_nothing_below(tmp_path: Path) -> None:
    rates = {name: rate for name, rate in FP8_CPU.peak.items() if "float8" not in name}
    found = mlp(tmp_path, 32, 64, 64, 16, profile=replace(FP8_CPU, peak=rates))
    assert found.scaled() == ([], [])
    assert all(name in found.plan.meaning for name in ("autocast", FP8_CPU.name, "fp8"))
    assert f"policy fp8 ({found.plan.meaning})" in str(Report([found.plan]))


@pytest.mark.parametrize("profile", ["auto", "off"])
def test_a_cpu_means_autocast_and_says_so_once(profile: str, caplog: pytest.LogCaptureFixture) -> None:
    as_autocast.cache_clear()
    given = {"policy": "fp8", "profile": profile, "strict": True}
    assert lowered(MLP(32, 64, 64, 16), [torch.randn(32, 32)], given).scaled() == ([], [])
    found = evaluated(Attention(), torch.randn(4, 32), {**given, "weights": "cast"})
    assert not scaled(found)
    assert "autocast" in found.plan.meaning
    said = [r.message for r in caplog.records if "fp8" in r.message and r.levelname == "WARNING"]
    assert ["'fp8'" in text and "'autocast'" in text for text in said] == [True]


def test_the_cut_keeps_what_does_not_pay(tmp_path: Path) -> None:
    rates = {"float32": 1e9, "bfloat16": 1e12, "float16": 1e12, "float8_e4m3fn": 2e12}
    device = DeviceProfile("a device", "cpu", rates, bandwidth=1e11, launch=1e-5)
    found = mlp(tmp_path, 16, 32, 1024, 1024, 16, tokens=256, profile=device)
    assert below(found.plan) == [False, False, True, False]
    assert (ReasonKind.LEVEL_DEARER, FORWARD) in found.reasons()["layers.0"]
    device = replace(device, launch=1e-6)
    given = options(tmp_path, "rowwise", device)
    small = evaluated(Attention(32), torch.randn(4, 32), given)
    large = evaluated(Attention(512), torch.randn(2048, 512), given)
    assert not scaled(small)
    assert small.plan.nodes[1].is_because(ReasonKind.LEVEL_DEARER)
    assert len(scaled(large)) == 4


def test_a_low_model_runs_below_but_not_where_the_program_keeps_it_from_autocast(tmp_path: Path) -> None:
    class Island(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.layers[0](x)
            return self.layers[2](self.layers[1](x)).float().mean()

    x = torch.randn(32, 32, dtype=torch.bfloat16)
    for model, expected in ((MLP, [True, True, False]), (Island, [False, True, False])):
        assert below(lowered(model(32, 64, 64, 16).bfloat16(), [x], options(tmp_path)).plan) == expected


def test_marks_do_not_stay_in_the_users_graph(tmp_path: Path) -> None:
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        result = torch._dynamo.lookup_backend("amp_fx")(gm, inputs, options=options(tmp_path))  # type: ignore[attr-defined]
        found.extend(node.meta.get("custom") or {} for node in gm.graph.nodes)
        return result

    with op_by_op():
        torch.compile(MLP(32, 64, 16), backend=backend)(torch.randn(32, 32))
    assert found
    assert not any(MARK in custom for custom in found)


# --- without gradients ---


@pytest.mark.parametrize(
    ("width", "columns", "reason"),
    [
        (24, 32, Reason.of(ReasonKind.INDIVISIBLE, role=FORWARD, grain=16, sizes="24 x 32")),
        (32, 40, Reason.of(ReasonKind.INDIVISIBLE, role=FORWARD, grain=16, sizes="32 x 40")),
        (32, 32, Reason.of(ReasonKind.LAST_LINEAR, role=FORWARD)),
    ],
)
def test_without_gradients_some_stay_low(tmp_path: Path, width: int, columns: int, reason: Reason) -> None:
    found = evaluated(nn.Linear(width, columns), torch.randn(4, width), options(tmp_path))
    assert not scaled(found)
    assert found.one("linear").reasons[-1] == reason


def test_without_gradients_a_rule_keeps_a_call_from_the_level(tmp_path: Path) -> None:
    rules = [{"module": "^q$", "precision": "low"}, {"module": "^k$", "precision": "fp32"}]
    given = {**options(tmp_path), "policy": {"base": "fp8", "rules": rules}}
    found = evaluated(Attention(), torch.randn(4, 32), given)
    dtypes = {row.module_path: row.computed for row in found.plan.nodes if row.flops}
    assert dtypes == {"q": torch.bfloat16, "k": torch.float32, "v": FP8, "o": FP8}


def test_the_product_before_a_value_is_found_behind_one_addition_however_long_the_chain() -> None:
    def branching(x: Tensor, w: Tensor) -> list[Tensor]:
        y = x @ w
        chain = y
        for _ in range(1000):
            chain = chain.relu() + chain.sigmoid()
        return [y.relu(), x + y.relu().t(), (x + y) * x, chain]

    x = torch.randn(4, 4)
    graph = make_fx(branching, tracing_mode="fake")(x, x)
    found = [product_before(node) is not None for node in output_nodes(graph)]
    assert found == [True, True, False, False]
