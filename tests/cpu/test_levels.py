"""fp8 on a CPU, which emulates it: gradients against fp64, zeros, infinities, loss scaling; copies of weights."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import amp_fx
from amp_fx.passes import PlaceLevels
from amp_fx.precision.placement.level_cost import LevelCost
from amp_fx.precision.policy.levels import LEVELS, levels_of
from benchmarks.learning import TASKS
from support.checks.below_16_bits import FP8_CPU, MLP, error, exact_gradients, gpt, gradients, llama, options
from support.checks.held_memory import Held
from support.models import zoo
from support.models.small import Parts
from support.tracing.captured_graphs import op_by_op, without_inductor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "by_row", "whole"),
    [
        pytest.param(lambda: gpt(layers=1), 0.115, 0.14, id="gpt"),
        pytest.param(llama, 0.17, 0.20, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_small_transformer_are_as_near_to_fp64_as_e4m3_lets_them(
    tmp_path: Path, make: Any, by_row: float, whole: float
) -> None:
    model, args = make()
    exact = exact_gradients(model, args)
    in_bf16 = error(gradients(model, args, {"profile": "off", "strict": True}), exact)
    assert in_bf16 < 0.015
    # without gradients of weights a level has the arithmetic of another
    for name, level in levels_of("fp8").items():
        if level.weight_gradients:
            found = error(gradients(model, args, options(tmp_path, name)), exact)
            # e4m3 has 3 bits after the point: far above the error of bf16, or nothing ran in fp8
            assert 5 * in_bf16 < found < (by_row if level.by_row else whole), name


@pytest.mark.parametrize("level", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.slow)])
def test_generated_code_gives_what_its_graphs_give(tmp_path: Path, level: str) -> None:
    model, x = MLP(32, 64, 16), torch.randn(32, 32)
    exact = exact_gradients(model, [x])
    by_op, by_code = (
        gradients(model, [x], options(tmp_path, level), generate=generate) for generate in (False, True)
    )
    assert error(by_code, exact) < 1.2 * error(by_op, exact) < 0.12
    assert error(by_code, [g.double() for g in by_op]) < 0.05


@pytest.mark.parametrize("level", ["rowwise", "tensorwise"])
def test_one_graph_takes_any_number_of_tokens(tmp_path: Path, level: str) -> None:
    model = MLP(32, 64, 64, 16)
    given = options(tmp_path, level)
    with amp_fx.record() as recording, op_by_op():
        compiled = torch.compile(model, backend="amp_fx", options=given, dynamic=True, fullgraph=True)
        for tokens in (48, 80, 33):
            x = torch.randn(tokens, 32)
            model.zero_grad()
            compiled(x).backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            assert 0.01 < error(found, exact_gradients(model, [x])) < 0.12
    (plan,) = recording.plans
    assert sum(bool(row.levels_below) for row in plan.nodes) == 2


#: rowwise_gw_hp has the arithmetic of rowwise, and zeros in blocks are test_scaled.py's
@pytest.mark.slow
@pytest.mark.parametrize("level", ["rowwise", "tensorwise"])
def test_zeros_stay_zeros_and_neither_magnitude_nor_what_is_not_finite_is_lost(
    tmp_path: Path, level: str
) -> None:
    class Sum(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x))).float().sum() * 1e-3

    given = options(tmp_path, level)
    model, x = MLP(32, 64, 64, 16), torch.randn(32, 32)
    for bad in (torch.inf, torch.nan):
        wrong = x.clone()
        wrong[3, 5] = bad
        exact = exact_gradients(model, [wrong])
        for ours, theirs in zip(gradients(model, [wrong], given), exact, strict=True):
            assert not ours[~theirs.isfinite()].isfinite().any()
    total = Sum(32, 64, 64, 16, bias=False)
    for batch in (x * 1e-30, x * 1e15):
        assert error(gradients(total, [batch], given), exact_gradients(total, [batch])) < 0.12
    x[::2] = 0
    with torch.no_grad():
        model.layers[0].weight[:8] = 0  # type: ignore[union-attr, operator]
        model.layers[1].weight.zero_()  # type: ignore[union-attr, operator]
    found = gradients(model, [x], given)
    assert error(found, exact_gradients(model, [x])) < 0.12
    # nothing reaches the first layer through weights of zero
    assert all(g.isfinite().all() for g in found)
    assert not gradients(model, [torch.zeros_like(x)], given)[0].any()


def test_a_loss_scaler_skips_the_step_of_an_overflow(tmp_path: Path) -> None:
    scaler = amp_fx.GradScaler("cpu", init_scale=2.0**10)
    model = MLP(32, 64, 64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = options(tmp_path, "tensorwise", dtype="float16", scaler="default")
    compiled = torch.compile(model, backend="amp_fx", options=given)
    x = torch.randn(32, 32)
    exact = exact_gradients(model, [x])
    for place, batch in enumerate((x, x * 1e30, torch.full_like(x, torch.inf))):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        with op_by_op():
            scaler.scale(compiled(batch)).backward()
        if place == 0:
            assert error([p.grad for p in model.parameters() if p.grad is not None], exact) < 0.12
        scaler.step(optimizer)
        scaler.update()
        kept = [torch.equal(before[name], value) for name, value in model.state_dict().items()]
        assert not any(kept) if place == 0 else all(kept)
    assert scaler.get_scale() == 2.0**8


def test_a_listener_is_told_what_runs_in_fp8_though_the_graph_comes_from_the_cache(tmp_path: Path) -> None:
    model, x, given = MLP(32, 64, 16), torch.randn(32, 32), options(tmp_path, "rowwise")
    for _ in range(2):
        torch._dynamo.reset()
        with amp_fx.record() as recording:
            torch.compile(model, backend="amp_fx", options=given)(x)
        found = [bool(row.levels_below) for row in recording.plans[0].nodes if row.flops]
        assert found == [True, False]


def test_level_and_costs_are_part_of_the_key_of_the_caches() -> None:
    cost = LevelCost.of(FP8_CPU, torch.bfloat16, LEVELS["rowwise"])
    keys = [str(PlaceLevels(LEVELS[name], "cpu", cost)) for name in ("rowwise", "tensorwise", "rowwise")]
    assert keys[0] == keys[2] != keys[1]
    assert keys[0] != str(PlaceLevels(LEVELS["rowwise"], "cpu"))
    # of another process, too
    assert " at 0x" not in keys[0]


@pytest.mark.slow
def test_a_small_gpt_learns_the_standard_library_as_well_as_in_bf16(tmp_path: Path) -> None:
    task, in_fp8 = TASKS["text_gpt"](), ("rowwise", "tensorwise")
    arms = {"bf16": {"profile": "off"}, **{name: options(tmp_path, name) for name in in_fp8}}
    losses: dict[str, list[float]] = {}
    for arm, given in arms.items():
        torch._dynamo.reset()
        model = task.make()
        compiled = torch.compile(model, backend="amp_fx", options=given)
        for seed in range(2):
            torch.manual_seed(seed)
            model.load_state_dict(task.make().state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
            for step in range(200):
                compiled(*task.batch(step, seed)).backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.setdefault(arm, []).append(task.measure(model))
    for arm in in_fp8:
        assert fmean(losses[arm]) < 1.01 * fmean(losses["bf16"])
        # it is not the same arithmetic
        assert losses[arm] != losses["bf16"]


# ---- without gradients ----


def net() -> Any:
    """Linears that share what they read, one whose columns are multiplied, a residual, and a head."""

    def program(m: Any, x: Tensor) -> Tensor:
        x = F.gelu(m.first(x))
        x = x + F.silu(m.gate(x)) * m.up(x)
        x = x + torch.addmm(m.columns.bias, x.view(-1, 64), m.columns.weight).view(x.shape)
        return m.head(x)

    square = {name: nn.Linear(64, 64) for name in ("gate", "up", "columns")}
    return Parts(program, first=nn.Linear(32, 64), **square, head=nn.Linear(64, 16)).eval()


#: bytes of the weights of its matmuls in fp8, and of their factors
IN_FP8, FACTORS = 32 * 64 + 3 * 64 * 64, 4 * 4 * 64


@pytest.mark.quick_rows("auto-inference_mode")
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(
    ("weights", "mode"), [("cache", torch.no_grad), ("auto", torch.inference_mode), ("freeze", torch.no_grad)]
)
def test_copies_of_weights_take_half_of_what_they_take_in_bf16_and_follow_their_weights(
    tmp_path: Path, weights: str, mode: type[AbstractContextManager[None]]
) -> None:
    model, x, held = net(), torch.randn(4, 8, 32), Held()
    # strict, what is frozen may not change
    given = (
        options(tmp_path, "rowwise", weights=each, strict=each != "freeze") for each in (weights, "cast")
    )
    run, in_each_call = (torch.compile(model, backend="amp_fx", options=each) for each in given)
    with mode():
        before = run(x).clone()
        assert torch.equal(before, in_each_call(x))
        # how else weights change is test_defaults.py's
        for weight in (model.gate.weight, model.columns.weight):
            weight.data.mul_(4)
            found = run(x).clone()
            assert torch.equal(found, in_each_call(x))
            assert not torch.equal(found, before)
            before = found
    if weights != "freeze":
        # biases and the head's weight are bf16
        assert held.bytes() == IN_FP8 + FACTORS + 2 * (4 * 64 + 16 + 16 * 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_public_architectures_are_as_near_to_fp32_as_e4m3_lets_them(name: str, tmp_path: Path) -> None:
    case = zoo.make(name)
    model, batch = copy.deepcopy(case.model).eval(), case.inputs(0)
    errors = []
    with torch.no_grad():
        wide = _floating(case.run(model, batch))
        for given in ({"profile": "off", "weights": "cast"}, options(tmp_path, "rowwise", weights="cast")):
            torch._dynamo.reset()
            with without_inductor():
                compiled: Any = torch.compile(model, backend="amp_fx", options={**given, "strict": True})
                found = _floating(case.run(compiled, batch))
            assert [value.dtype for value in found] == [value.dtype for value in wide]
            errors.append(error(found, [value.double() for value in wide]))
    in_bf16, in_fp8 = errors
    assert 5 * in_bf16 < in_fp8 < 0.06


def _floating(outputs: Any) -> list[Tensor]:
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
