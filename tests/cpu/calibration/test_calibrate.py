"""``amp_fx.calibrate`` on whole programs: blame, frontier, plans and files; nothing is compiled by Inductor here."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import amp_fx
from amp_fx import AmpFxError, Calibration, OptionsError, Plan, PlanError
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.sensitivity import Sensitivity
from amp_fx.viz import html
from amp_fx.viz.model import drawing
from benchmarks.memory import allocated_peak
from support.models.small import GPT, Parts, SpreadNorm, tokens, train
from support.tracing.captured_graphs import known, low_calls, without_inductor

#: rates at which small matmuls gain
RATES = DeviceProfile("test", "cpu", {"float32": 1e9, "bfloat16": 1e11, "float16": 1e11}, 1e11, 1e-9)


def features(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(128, 64, generator=generator)
    return x, x[:, :16].argmax(-1)


@pytest.fixture(scope="module")
def gpt() -> nn.Module:
    torch.manual_seed(0)
    return train(GPT(layers=1), tokens, 20)


@pytest.fixture(scope="module")
def cal(gpt: nn.Module) -> Calibration:
    return amp_fx.calibrate(gpt, [tokens(0), tokens(1)], profile=RATES)


def seconds(point: amp_fx.Point) -> float:
    assert point.time is not None
    return point.time


def followed(model: nn.Module, *batch: Tensor, **options: Any) -> list[Plan]:
    """The plans by which a model is compiled, op by op as it is captured."""
    torch.compiler.reset()
    with amp_fx.record() as recording, without_inductor():
        result = torch.compile(model, backend="amp_fx", options={"strict": True, **options})(*batch)
        tree_leaves(result)[0].sum().backward()
    return recording.plans


def test_the_frontier_trades_time_for_error_and_knows_the_usual_placements(cal: Calibration) -> None:
    points = cal.frontier()
    named = {point.name: point for point in points if point.name}
    assert named.keys() == {"autocast", "fast", "fp32"}
    assert named["fp32"].error == 0
    assert 0 < named["autocast"].error < named["fast"].error < 5e-2
    corners = [point for point in points if point.name is None]
    assert len(corners) > 3
    for cheap, exact in itertools.pairwise(corners):
        assert seconds(cheap) < seconds(exact)
        assert cheap.error > exact.error
    assert named["autocast"].error == pytest.approx(cal.autocast_error)
    # no corner is beaten by a placement that is not one
    for point, corner in itertools.product(named.values(), corners):
        assert not (seconds(point) < seconds(corner) and point.error < corner.error)


def test_plans_keep_their_budget(cal: Calibration) -> None:
    for plan, limit in (
        (cal.plan(verify=False), cal.autocast_error),
        (cal.plan(0.5, verify=False), 0.5 * cal.autocast_error),
        (cal.plan(error=1e-3, verify=False), 1e-3),
    ):
        assert plan.point.error <= limit * (1 + 1e-6)
        assert cal.predict(plan) == pytest.approx(plan.point.error)
        assert plan.budget == pytest.approx(limit)
    autocast, cheap = known(cal, "autocast"), cal.plan(verify=False).point
    assert seconds(cheap) <= seconds(autocast)
    within = cal.plan(time=seconds(autocast) * 20, verify=False).point
    assert within.error <= cheap.error
    assert seconds(within) <= 20 * seconds(autocast)
    assert low_calls(cal.plan(0.0, verify=False).plans) == []


def test_what_is_minimised_is_time_or_bytes(cal: Calibration) -> None:
    fast, small = cal.plan(verify=False).point, cal.plan(minimise="bytes", verify=False).point
    # by these rates, casts of small weights take longer than they gain
    assert seconds(fast) < seconds(small)
    assert small.bytes_moved < fast.bytes_moved
    assert small.error <= cal.autocast_error * (1 + 1e-6)
    assert small.bytes_moved <= known(cal, "autocast").bytes_moved
    moved = [point.bytes_moved for point in cal.frontier("bytes")]
    assert moved == sorted(moved)


def test_a_saved_plan_is_followed_and_predicted_alike(cal: Calibration, gpt: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = cal.plan(0.7, verify=False)
    plan.save(path)
    assert cal.predict(path) == pytest.approx(plan.point.error)
    assert cal.predict(plan.plans[0]) == cal.predict(plan.plans) == cal.predict(plan)
    # as many tokens, and fewer
    for batch in (tokens(0), tokens(3, rows=2, length=16)):
        assert low_calls(followed(gpt, *batch, plan=str(path))) == low_calls(plan.plans)


def test_a_policy_with_sensitivity_places_as_a_plan_of_its_budget(gpt: nn.Module, tmp_path: Path) -> None:
    cal = amp_fx.calibrate(gpt, tokens(0), profile="off")
    path = str(cal.save(tmp_path / "sensitivity.json"))
    assert Sensitivity.load(path) == cal.sensitivity
    policy = {"base": "autocast", "sensitivity": path, "budget": 0.5}
    # another batch size and length
    (plan,) = followed(gpt, *tokens(3, rows=2, length=16), policy=policy, profile="off")
    assert low_calls([plan])
    assert any(row.is_because(ReasonKind.ROUNDING_WOULD_ADD) for row in plan.nodes)
    found = followed(gpt, *tokens(0), policy=policy, profile="off")
    assert low_calls(found) == low_calls(cal.plan(0.5, verify=False).plans)


def test_calibration_leaves_no_trace() -> None:
    parts = {"norm": nn.BatchNorm1d(8), "drop": nn.Dropout(0.5), "out": nn.Linear(8, 1)}
    model: Any = Parts(lambda m, x: m.out(m.drop(m.norm(x))).square().mean(), **parts)
    x, model.out.weight.grad = torch.randn(16, 8), torch.ones(1, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    amp_fx.calibrate(model, x, profile="off")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.out.weight.grad, torch.ones(1, 8))
    assert model.norm.weight.grad is None


def test_a_default_device_of_another_kind_changes_nothing() -> None:
    model, x = nn.Linear(16, 16), torch.randn(4, 16)

    def error() -> float:
        cal = amp_fx.calibrate(model, x, lambda y: y.square().mean(), profile="off")
        return cal.autocast_error

    alone = error()
    with torch.device("meta"):
        assert error() == alone


def test_graph_breaks_and_a_loss_of_the_caller_are_measured_as_one_model(tmp_path: Path) -> None:
    def broken(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(m.first(x))
        torch._dynamo.graph_break()
        return {"logits": m.second(h)}

    model, x = Parts(broken, first=nn.Linear(16, 16), second=nn.Linear(16, 4)), torch.randn(32, 16)
    cal = amp_fx.calibrate(model, (x,), lambda out: out["logits"].square().mean(), profile="off")
    assert len(cal.sensitivity.graphs) == 2
    assert all(any(call.value for call in graph.calls) for graph in cal.sensitivity.graphs)
    plan, path = cal.plan(0.5, verify=False), tmp_path / "plan.json"
    plan.save(path)
    assert cal.predict(path) == pytest.approx(plan.point.error)
    assert low_calls(followed(model, x, plan=str(path))) == low_calls(plan.plans)


def test_blame_fits_one_screen_and_names_op_operand_module_and_line() -> None:
    cal = amp_fx.calibrate(train(SpreadNorm(), features, 5), features(0), profile="off")
    lines = str(cal).splitlines()
    assert len(lines) <= 30
    assert all(len(line) <= 160 for line in lines)
    worst = next(line for line in lines if "%" in line)
    assert all(named in worst for named in ("linear result", "up", "small.py"))
    # every share is of the whole
    shares = [float(line.split("%")[0]) for line in lines if "%" in line]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_relus_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    text = str(amp_fx.calibrate(model, torch.randn(8, 16), lambda out: out.square().mean(), profile="off"))
    assert re.search(r"^1 calls\b", text, re.M)


# op by op, more is rounded than in fused kernels
@pytest.mark.parametrize("most", [2e-2, pytest.param(5e-3, marks=pytest.mark.slow)], ids=["op by op", "code"])
def test_fp16_where_autocast_overflows_has_a_finite_plan(most: float) -> None:
    def program(m: Any, x: Tensor, target: Tensor) -> Tensor:
        h = m.up(x)
        return F.mse_loss(m.down((h - h.mean(-1, keepdim=True)).tanh()).squeeze(-1), target)

    hot: Any = Parts(program, up=nn.Linear(64, 64), down=nn.Linear(64, 1))
    nn.init.constant_(hot.up.bias, 1e5)
    batch = torch.randn(128, 64), torch.randn(128)
    cal = amp_fx.calibrate(hot, batch, dtype="float16", scale=1024.0, profile="off")
    assert math.isinf(known(cal, "autocast").error)
    autocast: Any = {"policy": "autocast", "profile": "off", "dtype": "float16"}
    assert not torch.compile(hot, backend="amp_fx", options=autocast)(*batch).isfinite()
    plan = cal.plan()
    assert plan.point.error < 1e-2
    assert plan.measured is not None
    assert plan.measured < most
    assert low_calls(plan.plans)
    assert "linear" not in low_calls(plan.plans)
    assert "overflow" in str(cal)


def test_batches_are_averaged(gpt: nn.Module) -> None:
    each = [amp_fx.calibrate(gpt, tokens(s), profile="off", seed=s).autocast_error ** 2 for s in range(2)]
    both = amp_fx.calibrate(gpt, (tokens(s) for s in range(2)), profile="off").autocast_error ** 2
    assert both == pytest.approx(sum(each) / 2, rel=1e-3)
    named = {"ids": tokens(0)[0], "targets": tokens(0)[1]}
    assert amp_fx.calibrate(gpt, named, profile="off").autocast_error ** 2 == pytest.approx(each[0], rel=1e-3)


def test_a_report_says_what_every_rounding_costs(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(8, 16)
    cal = amp_fx.calibrate(model, x, lambda out: out.square().mean(), profile="off")
    for given in (cal, str(cal.save(tmp_path / "sensitivity.json"))):
        report = amp_fx.explain(model, x, options={"profile": "off"}, sensitivity=given)
        assert all(row.is_because(ReasonKind.ROUNDING_ADDS_UP_TO) for row in report.plan.nodes)
        assert report.sensitivities[report.plan.graph].keys() == {row.name for row in report.plan.nodes}
        assert "to the error" in html.render(drawing(report))
    other = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))
    with pytest.raises(PlanError, match="a weight of"):
        amp_fx.explain(other, x, sensitivity=cal)


@pytest.mark.parametrize(
    ("suffix", "parts"),
    [(".png", []), (".svg", []), (".html", [b"<svg", b"what torch.autocast&#x27;s error is made of"])],
)
def test_the_frontier_is_drawn(cal: Calibration, tmp_path: Path, suffix: str, parts: list[bytes]) -> None:
    pytest.importorskip("matplotlib")
    data = cal.save(tmp_path / f"frontier{suffix}").read_bytes()
    assert len(data) > 5_000
    assert all(part in data for part in parts)


def test_wrong_arguments_are_named(gpt: nn.Module, cal: Calibration, tmp_path: Path) -> None:
    batch = tokens(0)
    for given, message in (
        ({"dtype": "bf17"}, "'bf17'"),
        ({"profile": "of"}, "'of'.*'off'"),
        ({"target": "cuda:h1000"}, "'cuda:h1000'.*'cuda:h100'"),
        ({"target": "cuda:h100", "profile": "off"}, "profile"),
        ({"dtype": "float16", "scale": -1.0}, "scale .*-1.0"),
        ({"probes": 0}, "probes .*0"),
        ({"policy": {"sensitivity": "sensitivity.json"}}, "sensitivity"),
    ):
        with pytest.raises(AmpFxError, match=message):
            str(amp_fx.calibrate(gpt, batch, **given))  # pyright: ignore[reportArgumentType]
    for arguments, message in (
        ((lambda x: x, batch), "function"),
        ((gpt, []), "batch"),
        ((nn.Linear(4, 4), torch.randn(2, 4)), "loss"),
        ((nn.Linear(4, 1), torch.zeros(1, 4), lambda out: (out * 0).sum()), "0"),
    ):
        with pytest.raises(AmpFxError, match=message):
            amp_fx.calibrate(*arguments)  # pyright: ignore[reportArgumentType]
    for given, message in (
        ({"budget": 0.5, "error": 1e-3}, "budget"),
        ({"minimise": "byte"}, r"minimise 'byte'.*'time'.*'bytes'"),
        ({"time": 1.0, "minimise": "bytes"}, "'bytes'"),
        *(({"budget": bad}, r"budget .*'autocast'") for bad in (-1.0, math.inf, math.nan, "autocas", True)),
    ):
        with pytest.raises(OptionsError, match=message):
            cal.plan(**given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError):
        cal.predict(Plan())
    with pytest.raises(OptionsError, match=r"plan must be .*7"):
        cal.predict(7)
    with pytest.raises(AmpFxError, match=r"\.json, \.html"):
        cal.save(tmp_path / "frontier.docx")


# ---- what it takes, in training steps ----


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=4, width=128, heads=4, length=128)


def step(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    model(*tokens(0, 8, 128)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(model: nn.Module, batches: int = 1) -> None:
    amp_fx.calibrate(model, [tokens(0, 8, 128)] * batches, profile="off")


@pytest.mark.slow
def test_a_calibration_holds_five_times_what_a_training_step_does(model: nn.Module) -> None:
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    measure(model)
    ours, theirs = (allocated_peak(run) + parameters for run in (lambda: measure(model), lambda: step(model)))
    print(f"{ours / 1e6:.0f} MB, a training step {theirs / 1e6:.0f} MB: {ours / theirs:.2f}")
    # two derivatives of a loss keep 3.4 times as much, whoever takes them
    assert ours <= 5.4 * theirs


@pytest.mark.slow
def test_a_batch_multiplies_at_most_as_much_as_seven_training_steps() -> None:
    model = GPT(layers=1, width=64, length=128)

    def flops(run: Callable[[], None]) -> int:
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as found:
            run()
        return sum(event.flops for event in found.key_averages())

    # what Dynamo has run is the same with one batch and with two
    runs = (lambda: step(model), lambda: measure(model), lambda: measure(model, 2))
    once, single, double = map(flops, runs)
    print(f"{(double - single) / once:.1f} steps a batch")
    assert 0 < double - single <= 7 * once
