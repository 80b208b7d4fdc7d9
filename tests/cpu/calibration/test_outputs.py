"""Calibration of what a model returns: predictions beside compiled calls, range, and plans that are followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import AmpFxError, OptionsError, PlanError
from amp_fx.precision.plans.sensitivity import Sensitivity
from support.checks.below_16_bits import error, exact
from support.models.small import Beyond, Parts
from support.tracing.captured_graphs import known


def images(seed: int) -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> Any:
    """A convolution with running statistics, attention, a norm, ReLU, and a head; it returns integers as well."""

    def program(m: Any, images: Tensor) -> dict[str, Tensor]:
        x = F.relu(m.norm(m.patch(images))).flatten(2).mT
        q, k, v = m.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + m.mix(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + m.down(F.relu(m.up(m.scale(x))))
        scores = m.head(x.mean(1))
        return {"scores": scores, "states": x, "best": scores.argmax(-1)}

    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {"patch": nn.Conv2d(3, 64, 4, stride=4), "norm": nn.BatchNorm2d(64)}
    parts |= {"qkv": nn.Linear(64, 192), "mix": nn.Linear(64, 64), "up": nn.Linear(64, 128)}
    parts |= {"down": nn.Linear(128, 64), "scale": nn.LayerNorm(64), "head": nn.Linear(64, 16)}
    net = Parts(program, **parts)
    with torch.no_grad():
        for seed in range(8):
            net(images(seed))
    return net.eval()


def measured(model: nn.Module, run: Callable[..., Any], batches: list[Tensor]) -> float:
    """Root of the mean square of the relative errors of both floating outputs."""
    errors: list[float] = []
    with torch.no_grad():
        for batch in batches:
            wanted: Any = exact(model, batch)
            got = run(batch)
            errors += [error([got[name]], [wanted[name]]) for name in ("scores", "states")]
    return torch.tensor(errors).square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("policy", "dtype", "budget"),
    [("autocast", "bf16", 0.5), ("autocast", "fp16", 1.0), ("int8", "bf16", 2.0)],
)
def test_predictions_are_what_calls_measure(model: Any, policy: str, dtype: str, budget: float) -> None:
    batches = [(images(10),), (images(11),)]
    found = amp_fx.calibrate(model, batches, of="outputs", policy=policy, dtype=dtype, profile="off")
    plan = found.plan(budget=budget, verify=False)
    assert 0 < plan.point.error <= budget * found.autocast_error * (1 + 1e-6)
    below = [level for row in plan.plans[0].nodes for level in row.levels_below.values()]
    assert bool(below) is (policy == "int8")
    options: dict[str, Any] = {"plan": plan, "dtype": dtype, "weights": "cache", "strict": True}
    run = torch.compile(model, backend="amp_fx", options=options)
    # the same plan in a file that needs no amp_fx
    program = amp_fx.export(model, (images(20),), plan=plan, dtype=dtype).module()
    for call in (run, program):
        assert 0.75 < plan.point.error / measured(model, call, [images(20), images(21)]) < 1.33


@pytest.mark.parametrize("activation", [nn.PReLU, nn.ReLU])
def test_what_activations_and_pools_hand_on_is_rounded_once(activation: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    blocks = [(nn.Conv2d(3 if at == 0 else 24, 24, 3), activation(), nn.MaxPool2d(2, 1)) for at in range(3)]
    model = nn.Sequential(*(layer for block in blocks for layer in block), nn.Conv2d(24, 8, 1)).eval()
    with torch.no_grad():
        # results alone are rounded
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    batches = [images(seed).bfloat16().float() for seed in (10, 11)]
    plan = amp_fx.calibrate(model, batches, of="outputs", profile="off").plan(verify=False)
    assert all(row.dtype is torch.bfloat16 for row in plan.plans[0].nodes if row.op == "conv2d")
    options: dict[str, Any] = {"plan": plan, "weights": "cache", "strict": True}
    run = torch.compile(model, backend="amp_fx", options=options)
    with torch.no_grad():
        errors = [error([run(x)], [exact(model, x)]) for x in batches]
    assert 0.8 < plan.point.error / torch.tensor(errors).square().mean().sqrt().item() < 1.2


def test_a_plan_is_checked_by_a_compiled_call(model: Any) -> None:
    found = amp_fx.calibrate(model, images(10), of=lambda returned: returned["scores"], profile="off")
    plan = found.plan()
    assert plan.measured is not None
    assert 0.75 < plan.point.error / plan.measured < 1.33
    assert found.predict(plan) == pytest.approx(plan.point.error)
    assert "output error" in str(found)
    assert "gradient" not in str(found)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_leaves_the_range_of_float16_stays_in_float32(tmp_path: Any) -> None:
    model, x = Beyond().eval(), torch.randn(16, 64)
    found = amp_fx.calibrate(model, [torch.randn(16, 64), x], of="outputs", dtype="fp16", profile="off")
    rows = {row.name: row for row in found.sensitivity.graphs[0].calls}
    assert rows["mul"].value is not None
    assert rows["square"].value is None
    found.sensitivity.save(tmp_path / "sensitivity.json")
    assert Sensitivity.load(tmp_path / "sensitivity.json") == found.sensitivity
    plan = found.plan(budget=1)
    placed = {row.op: row.dtype for row in plan.plans[0].nodes}
    assert placed["linear"] is torch.float16
    assert placed["square"] is placed["mean.dim"] is torch.float32
    options: dict[str, Any] = {"plan": plan, "dtype": "fp16"}
    run = torch.compile(model, backend="amp_fx", options=options)
    program = amp_fx.export(model, (x,), plan=plan, dtype="fp16").module()
    with torch.no_grad():
        for call in (run, program):
            assert error([call(x)], [exact(model, x)]) < 2 * torch.finfo(torch.float16).eps


def test_weights_that_are_frozen_and_code_without_gradients_count() -> None:
    linear = nn.Linear(32, 16).requires_grad_(False)

    @torch.no_grad()
    def angles(m: Any, x: Tensor) -> Tensor:
        return m.linear(x) * 2

    model, x = Parts(lambda m, x: angles(m, x).tanh(), linear=linear), torch.randn(8, 32)
    found = amp_fx.calibrate(model, x, of="outputs", profile="off")
    options: dict[str, Any] = {"plan": found.plan(verify=False), "strict": True}
    run = torch.compile(model, backend="amp_fx", options=options)
    with torch.no_grad():
        true = error([run(x)], [torch.tanh(2 * exact(linear, x))])
    assert 0.75 < found.autocast_error / true < 1.33


def test_running_statistics_that_a_training_step_only_reads_are_no_hindrance() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), torch.randn(2, 3, 8, 8)
    found = amp_fx.calibrate(model, x, lambda result: result.square().mean(), profile="off")
    assert 1e-4 < found.autocast_error < 1e-1


_WEIGHTS, _CLASSES, _SHARES = torch.rand(8) + 0.5, torch.arange(4), torch.rand(4, 8)

#: calls with arguments that torch gives no gradient
CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "weights of classes": lambda x: F.cross_entropy(x, _CLASSES, _WEIGHTS),
    "weights of classes by name": lambda x: F.cross_entropy(x, _CLASSES, weight=_WEIGHTS, label_smoothing=0.1),
    "weights of classes of log-probabilities": lambda x: F.nll_loss(x.log_softmax(1), _CLASSES, _WEIGHTS),
    "weights of labels": lambda x: F.binary_cross_entropy(x.sigmoid(), _SHARES, _WEIGHTS),
    "weights of positive labels": lambda x: F.binary_cross_entropy_with_logits(x, _SHARES, None, pos_weight=_WEIGHTS),
    "a count in integers": lambda x: (
        x * torch.histc(x.argmax(1).float(), 8, 0, 7).cumsum(0, dtype=torch.int32)
    ).square().mean(),
    "a turn by complex numbers": lambda x: torch.view_as_real(
        torch.view_as_complex(x.view(4, 4, 2)) * torch.polar(_SHARES[:, :4], _SHARES[:, 4:])
    ).sin().square().mean(),
    "signs": lambda x: F.soft_margin_loss(x, _SHARES.round() * 2 - 1),
    "statistics of instances": lambda x: F.instance_norm(
        x[None], _WEIGHTS[:4], _WEIGHTS[4:], use_input_stats=False
    ).square().mean(),
    "scales of channels": lambda x: torch.fake_quantize_per_channel_affine(
        x, _WEIGHTS, torch.zeros(8, dtype=torch.int32), 1, -128, 127
    ).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("call", CONSTANTS)
@pytest.mark.parametrize("of", ["gradients", "outputs"])
def test_what_has_no_gradient_is_no_hindrance(of: Any, call: str) -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    model = Parts(lambda m, x: CONSTANTS[call](m.linear(x)), linear=linear)
    assert 1e-5 < amp_fx.calibrate(model, x, of=of, profile="off").autocast_error < 1e-1


@torch.library.custom_op("amp_fx_tests::grown_back", mutates_args=())
def grown_back(gradient: Tensor) -> Tensor:
    return gradient * 3


@torch.library.custom_op("amp_fx_tests::grown", mutates_args=())
def grown(x: Tensor) -> Tensor:
    return x * 3


grown.register_autograd(lambda ctx, gradient: grown_back(gradient))
for op in (grown, grown_back):
    op.register_fake(torch.empty_like)


def test_an_op_of_another_library_whose_derivative_has_none_is_measured_by_outputs_and_else_named() -> None:
    model, x = Parts(lambda m, x: grown(m.up(x)).square().mean(), up=nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(AmpFxError, match=r"differentiated.*grown_back.*of='outputs'"):
        amp_fx.calibrate(model, x, profile="off")
    assert amp_fx.calibrate(model, x, of="outputs", profile="off").autocast_error > 0


def parted(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """Two graphs, and between them a break or code that is not traced."""
    torch.manual_seed(0)
    layers = {"up": nn.Linear(32, 64), "head": nn.Linear(64, 16)}
    return Parts(lambda m, x: m.head(between(m.up(x))), **layers).eval()


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


@torch.compiler.disable()  # called, as the types of torch want it
def not_traced(x: Tensor) -> Tensor:
    return x * 1.0


@torch.compiler.disable()
def not_traced_in_place(x: Tensor) -> Tensor:
    flat = x.view(-1)
    flat *= 1.0
    return x


@torch.compiler.disable()
def without_gradients(x: Tensor) -> Tensor:
    return x.detach() * 2


@pytest.mark.parametrize("between", [broken, not_traced, not_traced_in_place])
def test_graphs_count_before_a_break_and_before_code_that_is_not_traced(
    between: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(8, 32)
    found = amp_fx.calibrate(parted(between), x, of="outputs", profile="off")
    assert "not known" not in caplog.text
    assert len(found.sensitivity.graphs) == 2
    first, last = ([call.value for call in graph.calls] for graph in found.sensitivity.graphs)
    (whole,) = amp_fx.calibrate(parted(torch.clone), x, of="outputs", profile="off").sensitivity.graphs
    wanted = {call.name: call.value for call in whole.calls}
    assert [first[0], last[-1]] == pytest.approx([wanted["linear"], wanted["linear_1"]], rel=1e-3)
    compiled = amp_fx.compile(parted(between), plan=found.plan(budget=1.0, verify=False))
    with torch.no_grad():
        assert 0 < error([compiled(x)], [exact(parted(between), x)]) < 2 * found.autocast_error


def test_graphs_before_code_without_gradients_are_as_autocast_has_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(8, 32)
    found = amp_fx.calibrate(parted(without_gradients), x, of="outputs", profile="off")
    first, second = found.sensitivity.graphs
    assert not first.calls
    assert any(call.value for call in second.calls)
    assert "not known" in caplog.text
    strict = found.plan(error=0.0, verify=False)
    assert [[row.dtype is row.low for row in plan.nodes] for plan in strict.plans] == [[True], [False]]
    with pytest.raises(AmpFxError, match="no traced code leads to an output"):
        amp_fx.calibrate(
            Parts(lambda m, x: without_gradients(m.up(x)), up=nn.Linear(8, 8)),
            torch.randn(4, 8),
            of="outputs",
        )


def test_a_gpu_that_is_not_there_is_planned_for(model: Any) -> None:
    pytest.importorskip("triton")
    found = amp_fx.calibrate(model, images(10), of="outputs", policy="int8", target="cuda:h100")
    points = {point.name: point for point in found.frontier()}
    assert points["fp32"].error == 0 < points["autocast"].error
    plan = found.plan(budget=1.0, verify=False)
    assert 0 < plan.point.error <= found.autocast_error * (1 + 1e-6)
    assert plan.point.time is not None
    # a GPU measures what it reads in each call
    assert not any(call.scales for graph in found.sensitivity.graphs for call in graph.calls)


def test_sensitivity_of_outputs_is_not_taken_for_that_of_gradients(model: Any, tmp_path: Path) -> None:
    small, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 32)
    with torch.inference_mode():
        found = amp_fx.calibrate(small, x.clone(), of="outputs", profile="off")
    path = str(found.save(tmp_path / "sensitivity.json"))
    options = {"policy": {"base": "autocast", "sensitivity": path, "budget": 0.5}, "profile": "off"}
    run = torch.compile(small, backend="amp_fx", options=options)
    with pytest.raises(PlanError, match="gradients"):
        run(x)
    with torch.no_grad():
        assert error([run(x)], [exact(small, x)]) < found.autocast_error


def test_a_write_to_a_part_of_what_a_derivative_reads_is_told_with_its_line() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        h = F.relu(m.up(x))
        y = m.down(h)
        (h if whole else h[:2]).add_(y if whole else y[:2])
        return m.head(F.relu(y.add(1), inplace=True) + h)

    whole = True
    model = Parts(program, **{name: nn.Linear(8, 8) for name in ("up", "down", "head")})
    assert amp_fx.calibrate(model, torch.randn(4, 8), of="outputs", profile="off").autocast_error > 0
    whole = False
    with pytest.raises(AmpFxError, match=r"test_outputs\.py:\d+: \(h if whole else h\[:2\]\)\.add_"):
        amp_fx.calibrate(model, torch.randn(4, 8), of="outputs", profile="off")


def test_bad_input_is_told_in_one_sentence(model: Any) -> None:
    for given, kind, message in (
        ({"of": "logits"}, OptionsError, r"'gradients', 'outputs'.*'logits'"),
        ({"loss": torch.sum, "of": "outputs"}, OptionsError, "loss"),
        ({"of": lambda returned: returned["best"]}, AmpFxError, "."),
        ({"loss": torch.sum, "policy": "int8"}, OptionsError, "gradients.*of='outputs'"),
    ):
        with pytest.raises(kind, match=message):
            amp_fx.calibrate(model, images(0), **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("rule", "below"), [("a", ["b"]), ("a|b|c", []), ("none", ["a", "b"])])
def test_a_calibration_prints_whatever_rules_keep_out_of_the_level(rule: str, below: list[str]) -> None:
    linears = {name: nn.Linear(32, 32) for name in "abc"}
    policy = {"base": "int8", "rules": [{"module": rule, "precision": "fp32"}]}
    chain = Parts(lambda m, x: m.c(m.b(m.a(x).relu()).relu()), **linears).eval()
    cal = amp_fx.calibrate(chain, torch.randn(16, 32), of="outputs", policy=policy, profile="off")
    assert "int8" in str(cal)
    rows = known(cal, "int8").plan.plans[0].nodes
    # the last linear stays as it is
    assert [row.module_path for row in rows if row.levels_below] == below


def test_layers_that_evaluate_as_one_op_are_measured_where_torch_takes_them_apart() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 8, 32)
    with pytest.raises(AmpFxError, match=r"Write torch.backends.mha.set_fastpath_enabled\(False\)"):
        amp_fx.calibrate(model, x, of="outputs", profile="off")
    with mock.patch.object(torch.backends.mha, "_is_fastpath_enabled", False):
        found = amp_fx.calibrate(model, x, of="outputs", profile="off")
        plan = found.plan()
    assert sum(row.dtype is row.low for row in plan.plans[0].nodes if row.op == "linear") == 8
    assert plan.measured is not None
    assert 0.75 < plan.point.error / plan.measured < 1.33
