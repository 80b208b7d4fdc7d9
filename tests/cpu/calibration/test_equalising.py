"""Large channels of what int8 multiplies: powers of two take them over into the weight."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import CalibratedPlan, Calibration, Plan
from amp_fx.instruments.calibration.ranges import Ranges
from amp_fx.precision.plans.plan import NodePlan
from amp_fx.precision.plans.sensitivity import INPUT, MEASURED, GraphSensitivity, Sensitivity
from support.checks.below_16_bits import error_of
from support.models.calibrated import calibrated, compiled, wrong
from support.models.small import Parts
from support.programs.target_process import needs_a_target

#: of what is equalised, the scales that each call finds, and measured ones
KINDS = (INPUT, MEASURED)


def uneven(apart: float = 30.0) -> Any:
    """Four linears behind a norm with a few large channels; two of them read one value."""

    def program(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        gated = m.one(y).tanh() * m.other(y).sigmoid()
        return m.head(m.down(nn.functional.gelu(m.up(gated + y))))

    torch.manual_seed(0)
    linears = {"one": (64, 64), "other": (64, 64), "up": (64, 96), "down": (96, 64), "head": (64, 8)}
    parts: dict[str, nn.Module] = {name: nn.Linear(*sizes) for name, sizes in linears.items()}
    net: Any = Parts(program, norm=nn.LayerNorm(64), **parts).eval()
    net.norm.weight.data[::16] *= apart
    return net


def tokens(rows: int = 4) -> Tensor:
    # no element is much larger than those of other batches
    return torch.rand(rows, 32, 64) - 0.5


def rows_of(plan: Any) -> dict[str, NodePlan]:
    return {row.module_path: row for row in plan.plans[0].nodes if row.op == "linear"}


@pytest.fixture(scope="module")
def net() -> Any:
    return uneven()


@pytest.fixture(scope="module")
def cal(net: Any) -> Calibration:
    torch.manual_seed(1)
    return calibrated(net, [tokens(16) for _ in range(4)])


def plan_of(cal: Calibration, kind: str) -> CalibratedPlan:
    """All in int8 that may be, by measured scales or by those that each call finds."""
    found = cal.plan(budget=100, verify=False)
    calls = {call.name: call for call in cal.sensitivity.graphs[0].calls}
    rows = [
        replace(row, scales={}, equalisation=calls[row.name].equalisation.get(INPUT, ()))
        if row.scales
        else row
        for row in found.plans[0].nodes
    ]
    return found if kind == MEASURED else replace(found, plans=[replace(found.plans[0], nodes=rows)])


def as_it_is(net: Any, plan: Plan) -> Plan:
    """The plan without equalisation, by scales of the values as they are."""
    ranges = Ranges()
    hooks = [
        net.get_submodule(row.module_path).register_forward_pre_hook(
            lambda _, args, path=row.module_path: ranges.observe((0, path), args[0])
        )
        for row in plan.nodes
        if row.scales
    ]
    with torch.no_grad():
        for _ in range(4):
            net(tokens(16))
    for hook in hooks:
        hook.remove()
    scales = {path: {"input": scale} for (_, path), scale in ranges.scales().items()}
    rows = [
        replace(row, scales=scales[row.module_path] if row.scales else {}, equalisation=())
        for row in plan.nodes
    ]
    return replace(plan, nodes=rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_on_other_batches_is_the_predicted_one_and_less_than_without(
    net: Any, cal: Calibration, kind: str
) -> None:
    plan = plan_of(cal, kind)
    rows, x = rows_of(plan), tokens(16)
    assert [path for path, row in rows.items() if row.equalisation] == ["one", "other", "up"]
    assert bool(rows["up"].scales) is (kind == MEASURED)
    predicted = cal.predict(plan.plans)
    with torch.inference_mode():
        found = wrong(compiled(net, plan.plans)(x), net, x)
    assert predicted / 1.3 < found < predicted * 1.3
    with torch.inference_mode():
        assert found < 0.7 * wrong(compiled(net, as_it_is(net, plan.plans[0]))(x), net, x)


def test_a_product_is_what_it_was_whatever_the_powers_are(net: Any, cal: Calibration) -> None:
    plan, x = plan_of(cal, INPUT).plans[0], tokens()
    rows = [replace(row, levels={}, equalisation=()) if row.op == "linear" else row for row in plan.nodes]
    generator = torch.Generator().manual_seed(3)
    errors = list[float]()
    for most in (0, 1, 14):
        drawn = torch.randint(-most, most + 1, (64,), generator=generator).tolist()
        place = next(at for at, row in enumerate(rows) if row.module_path == "up")
        chosen = replace(
            rows[place],
            levels=dict(rows_of(plan_of(cal, INPUT))["up"].levels),
            equalisation=tuple(drawn),
        )
        edited = replace(plan, nodes=[*rows[:place], chosen, *rows[place + 1 :]])
        with torch.inference_mode():
            errors.append(wrong(compiled(net, edited)(x), net, x))
    # a bad choice costs digits of int8, and nothing else
    assert errors[0] < 0.03
    assert errors[1] < 0.06
    assert 0.1 < errors[2] < 1.5


def test_channels_that_are_alike_are_left_alone() -> None:
    even = calibrated(uneven(1.0), tokens())
    assert not any(call.equalisation for graph in even.sensitivity.graphs for call in graph.calls)


def test_a_call_that_some_batches_leave_out_counts_where_it_runs() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return m.head(m.up(y) if len(x) < 16 else m.down(m.up(y)).tanh())

    net: Any = uneven()
    net.down, net.up, net.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
    part = Parts(program, norm=net.norm, up=net.up, down=net.down, head=net.head).eval()
    few, many = tokens(4), tokens(16)
    beside = calibrated(part, [few, many]).sensitivity

    def added(graph: GraphSensitivity) -> dict[str, tuple[float, float]]:
        paths = {row.name: row.module_path for row in graph.outline.nodes if row.op == "linear"}
        calls = {paths[call.name]: call for call in graph.calls if call.name in paths}
        return {
            path: (call.roles["forward"]["input"] or 0.0, call.value or 0.0)
            for path, call in calls.items()
            if path != "head"
        }

    for batch, graph in zip((few, many), beside.graphs, strict=True):
        [alone] = calibrated(part, batch).sensitivity.graphs
        for path, wanted in added(alone).items():
            assert all(0.6 < one / other < 1.6 for one, other in zip(added(graph)[path], wanted, strict=True))


def test_calls_that_read_one_value_divide_it_once(net: Any, cal: Calibration) -> None:
    plan = plan_of(cal, INPUT)
    assert rows_of(plan)["one"].equalisation == rows_of(plan)["other"].equalisation
    program = amp_fx.export(net, (tokens(),), plan=plan.plans)
    held = [name for name in program.state_dict if name.endswith("_equalisation")]
    assert held == ["one.weight_int8_equalisation", "up.weight_int8_equalisation"]
    read = [
        node for node in program.graph.nodes for each in node.all_input_nodes if "equalisation" in each.name
    ]
    assert len(read) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_the_same_in_its_file_and_sensitivities_too(
    net: Any, cal: Calibration, kind: str, tmp_path: Path
) -> None:
    plan = plan_of(cal, kind)
    plan.save(tmp_path / "plan.json")
    cal.save(tmp_path / "sensitivity.json")
    x = tokens()
    with torch.inference_mode():
        first, second = (compiled(net, each)(x) for each in (plan.plans, tmp_path / "plan.json"))
    assert torch.equal(first, second)
    assert Sensitivity.load(tmp_path / "sensitivity.json") == cal.sensitivity
    assert math.isclose(cal.predict(tmp_path / "plan.json"), cal.predict(plan.plans))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"weights": "cast"}, {"weights": "cache"}, {"weights": "freeze"}, {"dtype": "float16"}]
)
def test_options_and_sizes_that_vary_change_no_more_than_rounding(
    net: Any, cal: Calibration, kind: str, options: dict[str, str]
) -> None:
    if "dtype" in options:
        cal = calibrated(net, tokens(64), **options)
    plan = plan_of(cal, kind)
    run = compiled(net, plan.plans, **options)
    for rows in (4, 1, 7, 3):
        with torch.inference_mode():
            assert wrong(run(x := tokens(rows)), net, x) < 2 * cal.predict(plan.plans)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_model_computes_what_it_did(cal: Calibration, kind: str) -> None:
    net, x, options = uneven(), tokens(), {"plan": plan_of(cal, kind).plans}
    with torch.inference_mode():
        before = compiled(net, options["plan"])(x)
    found = amp_fx.store_low(net, x, options=options)
    below = [name for name, dtype in found.stored.items() if dtype == "int8"]
    assert below == [
        f"{path}.weight" for path, row in rows_of(plan_of(cal, kind)).items() if row.levels_below
    ]
    with torch.inference_mode():
        # but for the rounding of biases, which oneDNN takes in fp32
        assert error_of(compiled(net, options["plan"])(x), before) < 0.01
        # in eager code the weights are what they were but for their rounding
        assert wrong(net(x), uneven(), x) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_files_for_other_runtimes_have_the_powers(net: Any, kind: str, tmp_path: Path) -> None:
    cal = calibrated(net, tokens(64), dtype="float16")
    plan, x, path = plan_of(cal, kind), tokens(), tmp_path / "model.onnx"
    program = amp_fx.export_onnx(net, (x,), path, plan=plan.plans, dtype="float16", int8_range="reduced")
    got = program.module()(x)
    assert wrong(got, net, x) < 2 * cal.predict(plan.plans)
    session = importlib.import_module("onnxruntime").InferenceSession(path)
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.from_numpy(found) - got).norm() < 0.01 * got.norm()


@pytest.mark.parametrize(
    ("exponents", "named"), [((1, 2, 3), "equalises 3 channels"), ((15, *[0] * 63), "from -14 to 14")]
)
@pytest.mark.usefixtures("without_inductor")
def test_exponents_that_fit_no_channel_are_refused(
    net: Any, cal: Calibration, exponents: tuple[int, ...], named: str
) -> None:
    plan: Plan = plan_of(cal, INPUT).plans[0]
    row = next(row for row in plan.nodes if row.equalisation)
    row.equalisation = exponents
    with pytest.raises(Exception, match=named) as caught, torch.no_grad():
        compiled(net, plan)(tokens())
    assert "amp_fx.calibrate" in str(caught.value)


@needs_a_target
@pytest.mark.slow
@pytest.mark.xdist_group("targets")
def test_on_a_gpu_the_kernel_that_scales_a_value_divides_it() -> None:
    layers = nn.LayerNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.Linear(512, 64)
    net, x = nn.Sequential(*layers).eval(), torch.randn(256, 512)
    net[0].weight.data[::16] *= 30  # type: ignore[operator]  # of a norm
    cal = calibrated(net, x, profile="auto", target="cuda:h100")
    calls = {call.name: call for call in cal.sensitivity.graphs[0].calls}
    [plan] = cal.plan(budget=100, verify=False).plans

    def moved(*, equalised: bool) -> int:
        """Bytes that kernels read and write with the linears but the last in int8, which the profile would not take."""
        rows = [
            replace(
                row,
                levels={"forward": "int8"},
                equalisation=calls[row.name].equalisation.get(INPUT, ()) if equalised else (),
            )
            if row.levels
            else row
            for row in plan.nodes
        ]
        assert any(row.equalisation for row in rows) is equalised
        options = {"plan": replace(plan, nodes=rows), "weights": "cache"}
        with torch.inference_mode():
            return amp_fx.explain(net, x, options=options, target="cuda:h100").costs["amp_fx"].moved or 0

    # the powers alone, in fp32, for one value of 512 channels
    assert moved(equalised=True) - moved(equalised=False) <= 2 * 4 * 512


def embedding_tied_to_the_equalised_weight(m: Any, x: Tensor) -> Tensor:
    ids = (x[..., 0] * 100).long() % 64
    return m.head(m.one(m.norm(x)).tanh() + nn.functional.embedding(ids, m.one.weight))


@pytest.mark.parametrize(
    "program",
    [
        embedding_tied_to_the_equalised_weight,
        lambda m, x: m.head((m.one(m.norm(x)) + m.one(x)).tanh()),
        lambda m, x: m.head((m.one(m.norm(x)) + m.one(m.norm(x.roll(3, -1)) * m.norm.weight)).tanh()),
        lambda m, x: m.head((m.norm(x) @ m.one.weight + nn.functional.linear(x, m.one.weight)).tanh()),
        lambda m, x: m.head(m.one(m.norm(x)).tanh()) * m.one.weight.norm(),
        lambda m, x: (m.head(m.one(m.norm(x)).tanh()), m.one.weight.sum(0)),
    ],
)
def test_a_weight_that_is_read_in_other_forms_too_is_exported(program: Any) -> None:
    net: Any = uneven()
    part = Parts(program, norm=net.norm, one=net.one, head=net.head).eval()
    # by scales that each call finds
    cal = calibrated(part, tokens(16))
    plan, x = plan_of(cal, INPUT), tokens()
    assert any(row.equalisation for row in plan.plans[0].nodes)
    exported = amp_fx.export(part, (x,), plan=plan.plans, int8_range="reduced").module()(x)
    got, *_ = exported if isinstance(exported, tuple) else (exported,)
    whole = part
    if isinstance(exported, tuple):
        whole = Parts(lambda m, x: m.of(x)[0], of=part)
    assert wrong(got, whole, x) < 3 * cal.predict(plan.plans)


def test_a_batch_that_says_nothing_decides_nothing() -> None:
    part = Parts(
        lambda m, x: m.head(m.up(m.norm(x) * x.abs().amax().sign()).tanh()),
        norm=uneven().norm,
        up=nn.Linear(64, 64),
        head=nn.Linear(64, 8),
    ).eval()
    batches = [torch.zeros(16, 32, 64), tokens(16)]
    found = [
        rows_of(plan_of(calibrated(part, each), INPUT))["up"].equalisation for each in (batches, batches[1])
    ]
    assert found[0] == found[1] != ()


def test_states_that_would_be_equalised_in_other_ways_stay_in_16_bits() -> None:
    first, second = uneven(), uneven()
    second.norm.weight.data = second.norm.weight.data.roll(5)
    cal = Calibration.worst(*(calibrated(net, tokens(16)) for net in (first, second)))
    plan, x = cal.plan(budget=100, verify=False), tokens(16)
    assert {"one", "other", "up"}.isdisjoint(path for path, row in rows_of(plan).items() if row.levels_below)
    for net in (first, second):
        with torch.inference_mode():
            assert wrong(compiled(net, plan.plans)(x), net, x) < 1.5 * plan.point.error
