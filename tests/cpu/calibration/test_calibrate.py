"""``amp_fx.calibrate`` on whole programs: blame, frontier, plans and files; nothing is compiled by Inductor here."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import AmpFxError, OptionsError, Plan, PlanError
from amp_fx.cli import main
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.label import Kind
from amp_fx.plans.plan import dtype_name
from amp_fx.plans.sensitivity import Sensitivity
from amp_fx.viz import html
from amp_fx.viz.model import drawing
from graphs import known, low_calls, without_inductor
from small_models import GPT, Parts, SpreadNorm, tokens, train

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
def cal(gpt: nn.Module) -> amp_fx.Calibration:
    return amp_fx.calibrate(gpt, [tokens(0), tokens(1)], profile=RATES)


def seconds(point: amp_fx.Point) -> float:
    assert point.time is not None
    return point.time


def test_the_frontier_trades_time_for_error_and_knows_the_usual_placements(cal: amp_fx.Calibration) -> None:
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


def test_plans_keep_their_budget(cal: amp_fx.Calibration) -> None:
    for plan, limit in (
        (cal.plan(verify=False), cal.autocast_error),
        (cal.plan(0.5, verify=False), 0.5 * cal.autocast_error),
        (cal.plan(error=1e-3, verify=False), 1e-3),
    ):
        assert plan.point.error <= limit * (1 + 1e-6)
        assert cal.predict(plan) == pytest.approx(plan.point.error)
        assert plan.budget == pytest.approx(limit)
    autocast = known(cal, "autocast")
    cheap = cal.plan(verify=False).point
    assert seconds(cheap) <= seconds(autocast)
    within = cal.plan(time=seconds(autocast) * 20, verify=False).point
    assert within.error <= cheap.error
    assert seconds(within) <= 20 * seconds(autocast)
    assert low_calls(cal.plan(0.0, verify=False).plans) == []


def test_what_is_minimised_is_time_or_bytes(cal: amp_fx.Calibration) -> None:
    fast, small = cal.plan(verify=False).point, cal.plan(minimise="bytes", verify=False).point
    # by these rates, casts of small weights take longer than they gain
    assert seconds(fast) < seconds(small)
    assert small.bytes_moved < fast.bytes_moved
    assert small.error <= cal.autocast_error * (1 + 1e-6)
    autocast = known(cal, "autocast")
    assert small.bytes_moved <= autocast.bytes_moved
    moved = [point.bytes_moved for point in cal.frontier("bytes")]
    assert moved == sorted(moved)


def test_a_saved_plan_is_replayed_and_predicted_alike(
    cal: amp_fx.Calibration, gpt: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan = cal.plan(0.7, verify=False)
    plan.save(path)
    assert cal.predict(path) == pytest.approx(plan.point.error)
    assert cal.predict(plan.plans[0]) == cal.predict(plan.plans) == cal.predict(plan)
    # as many tokens, and fewer
    for batch in (tokens(0), tokens(3, rows=2, length=16)):
        with amp_fx.record() as recording, without_inductor():
            torch.compile(gpt, backend="amp_fx", options={"plan": str(path), "strict": True})(*batch)
        assert low_calls(recording.plans) == low_calls(plan.plans)
        torch.compiler.reset()


def test_a_policy_with_sensitivity_places_as_the_plan_of_the_same_budget(
    gpt: nn.Module, tmp_path: Path
) -> None:
    path = str(tmp_path / "sensitivity.json")
    cal = amp_fx.calibrate(gpt, tokens(0), profile="off")
    cal.save(path)
    assert Sensitivity.load(path) == cal.sensitivity
    options = {
        "policy": {"base": "autocast", "sensitivity": path, "budget": 0.5},
        "profile": "off",
        "strict": True,
    }
    with amp_fx.record() as recording, without_inductor():
        compiled = torch.compile(gpt, backend="amp_fx", options=options)
        # another batch size and length
        compiled(*tokens(3, rows=2, length=16))
    torch.compiler.reset()
    (plan,) = recording.plans
    assert low_calls([plan])
    assert any(row.is_because(Kind.ROUNDING_WOULD_ADD) for row in plan.nodes)
    with amp_fx.record() as recording, without_inductor():
        torch.compile(gpt, backend="amp_fx", options=options)(*tokens(0))
    torch.compiler.reset()
    assert low_calls(recording.plans) == low_calls(cal.plan(0.5, verify=False).plans)


def test_calibration_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model: Any = Parts(
        lambda m, x: m.out(m.drop(m.norm(x))).square().mean(),
        norm=nn.BatchNorm1d(8),
        drop=nn.Dropout(0.5),
        out=nn.Linear(8, 1),
    )
    model.out.weight.grad = torch.ones(1, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    amp_fx.calibrate(model, torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), profile="off")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.out.weight.grad, torch.ones(1, 8))
    assert model.norm.weight.grad is None


def test_graph_breaks_and_a_loss_of_the_caller_are_measured_as_one_model(tmp_path: Path) -> None:
    def broken(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(m.first(x))
        torch._dynamo.graph_break()
        return {"logits": m.second(h)}

    model, x = Parts(broken, first=nn.Linear(16, 16), second=nn.Linear(16, 4)), torch.randn(32, 16)
    cal = amp_fx.calibrate(model, (x,), lambda out: out["logits"].square().mean(), profile="off")
    assert len(cal.sensitivity.graphs) == 2
    assert all(any(call.value for call in graph.calls) for graph in cal.sensitivity.graphs)
    plan = cal.plan(0.5, verify=False)
    plan.save(tmp_path / "plan.json")
    assert cal.predict(tmp_path / "plan.json") == pytest.approx(plan.point.error)
    with amp_fx.record() as recording, without_inductor():
        options = {"plan": str(tmp_path / "plan.json"), "strict": True}
        torch.compile(model, backend="amp_fx", options=options)(x)["logits"].sum().backward()
    torch.compiler.reset()
    assert low_calls(recording.plans) == low_calls(plan.plans)


def test_blame_fits_one_screen_and_names_op_operand_module_and_line() -> None:
    torch.manual_seed(0)
    cal = amp_fx.calibrate(train(SpreadNorm(), features, 5), features(0), profile="off")
    lines = str(cal).splitlines()
    assert len(lines) <= 30
    assert all(len(line) <= 160 for line in lines)
    worst = next(line for line in lines if "%" in line)
    assert "linear result" in worst
    assert "up" in worst
    assert "small_models.py" in worst
    # every share is of the whole
    shares = [float(line.split("%")[0]) for line in lines if "%" in line]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_relus_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    text = str(amp_fx.calibrate(model, torch.randn(8, 16), lambda out: out.square().mean(), profile="off"))
    assert "1 calls have a derivative that jumps" in text
    assert "calibrate a trained checkpoint" in text


def test_fp16_where_autocast_overflows_has_a_finite_plan() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.up(x)
        return m.down((h - h.mean(-1, keepdim=True)).tanh()).square().mean()

    torch.manual_seed(0)
    hot = Parts(program, up=nn.Linear(64, 64), down=nn.Linear(64, 1))
    nn.init.constant_(hot.up.bias, 1e5)  # type: ignore[union-attr, arg-type]  # a linear
    cal = amp_fx.calibrate(hot, torch.randn(32, 64), dtype="float16", scale=1024.0, profile="off")
    assert math.isinf(known(cal, "autocast").error)
    assert math.isinf(cal._verifier.compiled({"policy": "autocast", "profile": "off"}))
    plan = cal.plan()
    assert plan.point.error < 1e-2
    # op by op, more is rounded than in fused kernels
    assert plan.measured is not None
    assert plan.measured < 2e-2
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
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(8, 16)
    cal = amp_fx.calibrate(model, x, lambda out: out.square().mean(), profile="off")
    path = tmp_path / "sensitivity.json"
    cal.save(path)
    for given in (cal, str(path)):
        report = amp_fx.explain(model, x, options={"profile": "off"}, sensitivity=given)
        assert all(row.is_because(Kind.ROUNDING_ADDS_UP_TO) for row in report.plan.nodes)
        assert report.sensitivities[report.plan.graph].keys() == {row.name for row in report.plan.nodes}
        assert "to the error" in html.render(drawing(report))
    with pytest.raises(PlanError, match="relu"):
        amp_fx.explain(nn.Sequential(model[0], nn.ReLU(), model[2]), x, sensitivity=cal)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_the_frontier_is_drawn(cal: amp_fx.Calibration, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = cal.save(tmp_path / f"frontier{suffix}")
    data = path.read_bytes()
    assert len(data) > 5_000
    if suffix == ".html":
        assert b"<svg" in data
        assert b"what torch.autocast&#x27;s error is made of" in data


def test_wrong_arguments_are_named(gpt: nn.Module, cal: amp_fx.Calibration, tmp_path: Path) -> None:
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


MODELS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(32, 16)

def batches():
    return [(torch.randn(32, 16),) for _ in range(2)]

def loss(out):
    return out.square().mean()
"""


def test_the_command_writes_sensitivity_plan_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calibrated_models.py").write_text(MODELS)
    arguments: list[Any] = ["calibrate", "calibrated_models:build", "--loss", "calibrated_models:loss"]
    arguments += ["--batches", "calibrated_models:batches", "--profile", "off", "--budget", "0.5"]
    arguments += ["-o", "sensitivity.json", "--plan", "plan.json", "--figure", "frontier.svg", "--no-verify"]
    arguments += ["--minimise", "bytes"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "Sequential in bfloat16: 3 calls, graphs: 1, batches: 2" in out
    assert "predicted gradient error" in out
    assert "wrote plan.json" in err
    assert dtype_name(Sensitivity.load("sensitivity.json").dtype) == "bfloat16"
    assert json.loads(Path("plan.json").read_text())["nodes"]
    assert Path("frontier.svg").stat().st_size > 5_000
    assert main(["calibrate", "calibrated_models:build"]) == 1
    assert "no loss" in capsys.readouterr().err
    arguments += ["--policy", "fp8", "--fp8", "rowwise", "-o", "fp8.json"]
    assert main(arguments) == 0
    assert "what policy fp8 adds (rowwise)" in capsys.readouterr().out
    assert Sensitivity.load("fp8.json").level == "rowwise"
