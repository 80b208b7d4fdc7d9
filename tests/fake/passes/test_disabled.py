"""Passes that are left out by name, what the log says of those that run, and what holds between them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

import amp_fx
from amp_fx.compiler.compiling import hook
from amp_fx.passes import OPTIONAL, PASSES, PassContext, PinDtypes, PlaceLevels, run_in_order
from support.checks.option_runs import INT8_CPU
from support.tracing.captured_graphs import PIPELINE, Block, captured, rewrite

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention behind a linear, a vmapped linear, and a product with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        q = self.block(x).view(1, 4, 16, 8)
        attended = nn.functional.scaled_dot_product_attention(q, q, q).view(64, 8)
        return torch.vmap(self.block.up)(attended) @ self.block.up.weight


def gradients(model: nn.Module, program: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    result = program(x)
    result.float().square().mean().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.usefixtures("op_by_op")
def test_without_all_that_may_be_left_out_a_step_is_as_exact_as_autocast() -> None:
    model, options = Attention(), {"profile": "off", "strict": True, "disable_passes": OPTIONAL}
    ran: list[str] = []
    for kind in PASSES.values():
        call = kind.call

        def noted(self: Any, *given: Any, call: Any = call) -> Any:
            ran.append(self.name)
            return call(self, *given)

        mock.patch.object(kind, "call", noted).start()
    try:
        ours = gradients(model, torch.compile(model, backend="amp_fx", options=options), X)
    finally:
        mock.patch.stopall()
    assert {"insert-casts", "verify", "attend"} <= {*ran}
    assert not {*ran} & {*OPTIONAL}
    with torch.autocast("cpu", torch.bfloat16):
        theirs = gradients(model, model, X)
    exact = gradients(model.double(), model, X.double())
    assert error(ours, exact) < 1.1 * error(theirs, exact)


def test_what_is_left_out_is_in_the_keys_of_the_caches() -> None:
    keys = [hook("joint", (), {}, disabled=frozenset(names)) for names in ((), ("attend",), ("fuse-casts",))]
    assert len({str(key["joint_custom_pre_pass"].uuid()) for key in keys}) == 3
    again = hook("joint", (), {}, disabled=frozenset(("fuse-casts",)))
    assert again["joint_custom_pre_pass"].uuid() == keys[2]["joint_custom_pre_pass"].uuid()


@pytest.mark.parametrize("training", [False, True])
def test_without_place_levels_nothing_runs_below_16_bits_and_the_plan_says_why(
    training: bool, tmp_path: Path
) -> None:
    INT8_CPU.save(tmp_path / "cpu.json")
    options = {"profile": str(tmp_path / "cpu.json"), "policy": "fp8" if training else "int8"}
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    for names in ([], [PlaceLevels.name]):
        with torch.set_grad_enabled(training):
            report = amp_fx.explain(
                model, torch.randn(256, 256), options={**options, "disable_passes": names}
            )
        (plan,) = (plan for plan in report.plans if plan.phase == "forward")
        assert (PlaceLevels.name in plan.meaning) is bool(names)
        assert not names or not any(row.levels_below for row in plan.nodes)


def test_attention_is_left_to_the_kernel_and_transforms_stay_in_fp32() -> None:
    def text(names: list[str]) -> list[tuple[str, str]]:
        rows = rewrite(Attention(), X, options={"disable_passes": names}).plan.nodes
        return [(row.op, row.computed_by) for row in rows if row.computed_by]

    assert {how for _, how in text([])} >= {"autocast"}
    assert text(["choose-attention", "lower-transforms"]) == []


def test_the_log_has_what_each_pass_changed_as_a_diff(caplog: pytest.LogCaptureFixture) -> None:
    gm = captured(Block(), X)
    with caplog.at_level(logging.DEBUG, "amp_fx.passes.base"):
        run_in_order(gm, PIPELINE, PassContext(disabled=frozenset({"fuse-casts"})))
    lines = [record.getMessage() for record in caplog.records if record.name == "amp_fx.passes.base"]
    said = {line.partition(":")[0]: line for line in lines}
    assert list(said) == [step.name for step in PIPELINE]
    assert said["fuse-casts"] == "fuse-casts: disabled"
    added = [line for line in said["insert-casts"].splitlines() if line.startswith("+ ")]
    assert sum("aten.to.dtype(" in line and "bf16[" in line for line in added) == 5
    assert "\n" not in said["verify"]


def test_no_text_of_a_graph_is_made_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = captured(Block(), X)
    readable = mock.Mock(return_value="")
    monkeypatch.setattr(fx.GraphModule, "print_readable", readable)
    run_in_order(gm, PIPELINE, PassContext())
    readable.assert_not_called()


def test_a_graph_in_which_a_stage_does_not_hold_is_refused_by_name() -> None:
    gm = captured(Block(), X)
    run_in_order(gm, PIPELINE, PassContext())
    with pytest.raises(AssertionError, match=r"pin-dtypes.*no_inserted_cast.*'to_dtype'"):
        PinDtypes().call(gm, PassContext())
