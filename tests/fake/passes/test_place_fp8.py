"""Which matmuls of a training step run in fp8. No code is generated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_fx.passes.keyed import MARK
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.plan import Plan
from amp_fx.plans.summary import summary
from amp_fx.reports import Report
from fp8 import FP8_CPU, MLP, Step, calls, lowered, options

aten = torch.ops.aten

FP8 = torch.float8_e4m3fn


def mlp(folder: Path, *sizes: int, tokens: int = 32, recipe: str = "rowwise", **others: Any) -> Step:
    return lowered(MLP(*sizes), [torch.randn(tokens, sizes[0])], options(folder, recipe, **others))


def in_fp8(step: Step) -> list[bool]:
    """Of each linear's forward, in order."""
    return [row.multiplied is FP8 for row in step.plan.nodes if row.flops]


def test_forward_and_both_gradients_run_in_fp8_but_the_last_linear_does_not(tmp_path: Path) -> None:
    step = mlp(tmp_path, 32, 64, 48, 16)
    forward, backward = step.scaled()
    # the input of the first requires no gradient
    assert (len(forward), len(backward)) == (2, 3)
    assert in_fp8(step) == [True, True, False]
    assert "the last linear stays in the low dtype" in step.reasons()["layers.2"]
    assert len(calls(step.backward, aten.mm.default)) == 2


def test_a_linear_that_ends_in_a_residual_sum_is_not_the_last_of_a_model(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.down(self.up(x).relu())).float().square().mean()

    step = lowered(Block(), [torch.randn(16, 32)], options(tmp_path))
    assert in_fp8(step) == [True, True]


@pytest.mark.parametrize(
    ("sizes", "tokens", "forward", "backward"),
    [
        ((32, 64, 32), 32, 1, 1),
        # tokens count where they are contracted: in gradients of weights
        ((32, 64, 64, 32), 24, 2, 1),
        # contracted or columns: 40 is no multiple of 16
        ((40, 64, 32), 32, 0, 0),
        ((32, 40, 32), 32, 0, 0),
        ((32, 64, 40, 32), 32, 1, 1),
        ((32, 64, 64, 40), 32, 2, 3),
        ((8, 8, 8), 32, 0, 0),
    ],
    ids=["all", "tokens", "contracted", "columns", "one of them", "the last", "small"],
)
def test_sizes_that_16_does_not_divide_stay_low_matmul_by_matmul(
    tmp_path: Path, sizes: tuple[int, ...], tokens: int, forward: int, backward: int
) -> None:
    step = mlp(tmp_path, *sizes, tokens=tokens)
    assert tuple(map(len, step.scaled())) == (forward, backward)


def test_the_reason_names_the_sizes(tmp_path: Path) -> None:
    assert "forward: 16 does not divide its sizes 40 x 64" in mlp(tmp_path, 40, 64, 32).reasons()["layers.0"]


def test_gradients_of_weights_stay_low_where_the_number_of_tokens_is_not_known(tmp_path: Path) -> None:
    model, x = MLP(32, 64, 64, 32), torch.randn(48, 32)
    torch._dynamo.mark_dynamic(x, 0)
    step = lowered(model, [x], options(tmp_path))
    assert tuple(map(len, step.scaled())) == (2, 1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"module": r"layers\.1", "precision": "low"}, torch.bfloat16),
        ({"module": r"layers\.1", "precision": "fp32"}, torch.float32),
    ],
)
def test_a_rule_keeps_a_linear_and_its_gradients_from_fp8(
    tmp_path: Path, rule: dict[str, str], expected: torch.dtype
) -> None:
    given = options(tmp_path)
    step = lowered(
        MLP(32, 32, 48, 32, 16), [torch.randn(32, 32)], {**given, "policy": {"base": "fp8", "rules": [rule]}}
    )
    assert in_fp8(step) == [True, False, True, False]
    assert [row.dtype for row in step.plan.nodes if row.flops][1] is expected
    # the gradients of layer 1 are the matmuls in the backward of its name that are not scaled
    of_rule = [
        node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        for node in calls(step.backward, aten.mm.default)
        if "layers.1" in str(node.meta.get("fwd_nn_module_stack"))
        or "layers.1" in str(node.meta.get("nn_module_stack"))
        or "layers', '1" in str(node.meta.get("fwd_nn_module_stack"))
        or "['1']" in str(node.meta.get("fwd_nn_module_stack"))
    ]
    assert of_rule == [expected, expected]
    assert len(step.scaled()[1]) == 3


def test_a_rule_by_op_holds_for_all_calls(tmp_path: Path) -> None:
    rules = [{"op": "linear", "precision": "low"}]
    given = {**options(tmp_path), "policy": {"base": "fp8", "rules": rules}}
    step = lowered(MLP(32, 64, 64, 16), [torch.randn(32, 32)], given)
    assert step.scaled() == ([], [])


def test_recipes_differ_in_gradients_of_weights_and_in_their_dtype(tmp_path: Path) -> None:
    def dtypes(recipe: str) -> list[tuple[torch.dtype, ...]]:
        step = mlp(tmp_path, 32, 64, 48, 16, recipe=recipe)
        nodes = step.scaled()[1]
        return [tuple(arg.meta["val"].dtype for arg in node.args[:2]) for node in nodes]  # type: ignore[union-attr]

    e5 = torch.float8_e5m2
    assert dtypes("rowwise") == [(FP8, FP8)] * 3
    assert dtypes("rowwise_gw_hp") == [(FP8, FP8)]
    assert dtypes("tensorwise") == [(e5, FP8)] * 3


def test_no_matmul_has_gradients_on_both_sides_in_e5m2(tmp_path: Path) -> None:
    class Square(nn.Module):
        """Its backward multiplies a gradient by what another gradient becomes: twice the same value."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return (self.b(y) + y @ y.t() @ y).float().square().mean()

    step = lowered(Square(), [torch.randn(32, 32)], options(tmp_path, "tensorwise"))
    every = [node for nodes in step.scaled() for node in nodes]
    assert every
    for node in every:
        assert [a.meta["val"].dtype for a in node.args[:2]].count(torch.float8_e5m2) < 2  # type: ignore[union-attr]


def test_a_device_without_a_rate_runs_nothing_in_fp8(tmp_path: Path) -> None:
    rates = {name: rate for name, rate in FP8_CPU.peak.items() if "float8" not in name}
    step = mlp(tmp_path, 32, 64, 64, 16, profile=replace(FP8_CPU, peak=rates))
    assert step.scaled() == ([], [])
    assert step.plan.fp8 == "as autocast: cpu a CPU with fp8 has no fp8 rate"
    assert "policy fp8 (as autocast: cpu a CPU with fp8 has no fp8 rate)" in str(Report([step.plan]))


@pytest.mark.parametrize("profile", ["auto", "off"])
def test_a_cpu_has_no_fp8(profile: str, caplog: pytest.LogCaptureFixture) -> None:
    from amp_fx.placement.fp8_device import _say_once

    _say_once.cache_clear()
    given = {"policy": "fp8", "profile": profile, "strict": True}
    for _ in range(2):
        step = lowered(MLP(32, 64, 64, 16), [torch.randn(32, 32)], given)
        assert step.scaled() == ([], [])
    said = [
        record.message
        for record in caplog.records
        if "fp8" in record.message and record.levelname == "WARNING"
    ]
    assert len(said) == 1
    assert said[0].startswith("policy 'fp8' means 'autocast' here: cpu ")


def test_the_cut_keeps_what_does_not_pay(tmp_path: Path) -> None:
    rates = {"float32": 1e9, "bfloat16": 1e12, "float16": 1e12, "float8_e4m3fn": 2e12}
    device = DeviceProfile("a device", "cpu", rates, bandwidth=1e11, launch=1e-5)
    step = mlp(tmp_path, 16, 32, 1024, 1024, 16, tokens=256, profile=device)
    assert in_fp8(step) == [False, False, True, False]
    assert "forward: converting would cost more than fp8 saves on this device" in step.reasons()["layers.0"]


def test_a_model_that_is_low_as_a_whole_runs_in_fp8_too(tmp_path: Path) -> None:
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    step = lowered(MLP(32, 64, 64, 16).bfloat16(), [x], options(tmp_path))
    assert in_fp8(step) == [True, True, False]
    assert tuple(map(len, step.scaled())) == (2, 3)


def test_what_the_program_keeps_from_autocast_is_kept_from_fp8(tmp_path: Path) -> None:
    class Island(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.layers[0](x)
            return self.layers[2](self.layers[1](x)).float().mean()

    x = torch.randn(32, 32, dtype=torch.bfloat16)
    step = lowered(Island(32, 64, 64, 16).bfloat16(), [x], options(tmp_path))
    assert in_fp8(step) == [False, True, False]


def test_calls_inside_a_checkpoint_are_chosen_as_others_are(tmp_path: Path) -> None:
    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda y: self.layers[1](self.layers[0](y)).relu(), x, use_reentrant=False)
            return self.layers[2](x).float().mean()

    step = lowered(Checkpointed(32, 64, 64, 16), [torch.randn(32, 32)], options(tmp_path))
    assert in_fp8(step) == [True, True, False]
    # the forward of both, recomputed or not, and their gradients
    forward, backward = step.scaled()
    assert len(forward) == 2
    assert len(backward) >= 3


def test_marks_do_not_stay_in_the_users_graph(tmp_path: Path) -> None:
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        result = torch._dynamo.lookup_backend("amp_fx")(gm, inputs, options=options(tmp_path))  # type: ignore[attr-defined]
        found.extend(node.meta.get("custom") or {} for node in gm.graph.nodes)
        return result

    torch.compile(MLP(32, 64, 16), backend=backend)(torch.randn(32, 32))
    assert found
    assert not any(MARK in custom for custom in found)


def test_the_log_says_how_many_matmuls_are_in_fp8(tmp_path: Path) -> None:
    assert summary(mlp(tmp_path, 32, 64, 64, 16).plan) == (
        "3 matmuls, 2 in fp8 and 1 in bf16, 8 casts; fp8: rowwise"
    )


def test_a_plan_with_fp8_is_kept_and_read_again(tmp_path: Path) -> None:
    plan = mlp(tmp_path, 32, 64, 64, 16).plan
    assert Plan.from_json(plan.to_json()) == plan
