"""``amp_fx.explain`` and plan files on whole programs: true numbers, nothing generated, nothing changed."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import amp_fx
from amp_fx import NodePlan, OptionsError, Plan, PlanError, Report
from amp_fx._torch import replace_inner_compile
from amp_fx.instruments.reports.lowered import LoweredGraphs, autocast_backend
from amp_fx.precision.plans.plan import dtype_name
from amp_fx.viz.model import drawing
from gpt import GPT, GPTConfig
from support.models.small import Parts, UpDown
from support.torch_versions import IS_2_11

# tests share a report
pytestmark = pytest.mark.xdist_group("explain")

OFF = {"profile": "off", "strict": True}


def explained(model: Callable[..., Any], *args: Tensor, **options: Any) -> Report:
    return amp_fx.explain(model, *args, options={**OFF, **options})


X = torch.randn(4, 8)


def of_phase(report: Report, phase: str = "forward") -> list[Plan]:
    return [plan for plan in report.plans if plan.phase == phase]


def rows(report: Report, phase: str = "forward", op: str = "") -> list[NodePlan]:
    """The calls of a phase, or those of one op."""
    return [row for plan in of_phase(report, phase) for row in plan.nodes if not op or row.op == op]


def dtypes_of_linears(report: Report) -> dict[str, torch.dtype | None]:
    return {row.module_path: row.dtype for row in rows(report, op="linear")}


def stacked(*layers: nn.Module) -> nn.Module:
    return Parts(lambda m, x: m.layers(x), layers=nn.Sequential(*layers))


class Broken(nn.Module):
    """Three graph breaks; a buffer, an attribute and the random generator change in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layers[0](self.norm(x))
        torch._dynamo.graph_break()
        x = self.layers[1](self.drop(x))
        print("in the middle")
        x = self.layers[2](x)
        if x.sum() > 1e9:
            x = x + 1
        return self.layers[3](x).square().mean()


def test_three_graph_breaks_are_named_and_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Broken(), torch.randn(4, 8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, gradients = copy.deepcopy(model.state_dict()), {id(p.grad) for p in model.parameters()}
    state, given = torch.get_rng_state(), x.clone()
    report = explained(model, x)
    lines = [line.strip() for line in Path(__file__).read_text().splitlines()]
    breaks = ["torch._dynamo.graph_break()", 'print("in the middle")', "if x.sum() > 1e9:"]
    found = [reason.rpartition("[")[2] for reason in report.graph_breaks]
    assert found == [f"{__file__}:{lines.index(code) + 1}]" for code in breaks]
    screen = str(report).splitlines()
    assert "graph breaks" in screen
    assert all(any(reason[:60] in line for line in screen) for reason in report.graph_breaks)
    assert len(screen) <= 25
    assert (len(of_phase(report, "forward")), len(of_phase(report, "backward"))) == (4, 4)
    assert [row.dtype for row in rows(report, op="linear")] == [torch.bfloat16] * 4
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert gradients == {id(p.grad) for p in model.parameters()}
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.calls, model.training, x.grad) == (0, True, None)
    assert torch.equal(x, given)


CONFIG, TOKENS = GPTConfig(layers=2, width=32, heads=2, context=16), torch.randint(8, (2, 16))


@pytest.fixture(scope="module")
def gpt() -> Report:
    torch._dynamo.reset()
    return explained(GPT(CONFIG), TOKENS, TOKENS)


def test_the_report_of_a_gpt_has_the_numbers_of_the_gpt(gpt: Report) -> None:
    model = GPT(CONFIG)
    assert len(str(gpt).splitlines()) <= 25
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert dtypes_of_linears(gpt) == dict.fromkeys(linears, torch.bfloat16)
    assert gpt.to_dict()["summary"]["shares"]["bfloat16"]["flops"] > 0.9

    counter = FlopCounterMode(display=False)
    # which it counts as matmuls
    with counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(TOKENS, TOKENS)
        forward = counter.get_total_flops()
        loss.backward()
    backward = counter.get_total_flops() - forward
    assert sum(row.flops for row in rows(gpt)) == forward
    # the fused attention multiplies queries and keys once more
    again = 2 * 2 * (2 * 2 * 16 * 16 * 16)
    assert sum(row.flops for row in rows(gpt, "backward")) == backward + again
    assert list(gpt.costs) == ["amp_fx", "torch.autocast"]
    # of the forward, every cast in the plan is a node of what Inductor gets
    assert gpt.costs["amp_fx"].casts >= sum(len(plan.casts) for plan in of_phase(gpt, "forward"))
    for name, cost in gpt.costs.items():
        assert 0 < (cost.kernels or 0) <= cost.casts
        assert 0 < (cost.kernel_bytes or 0) < (cost.moved or 0)
        # those of all modules are those of the whole
        casts = [cast for row in gpt.modules for cast in row.casts if cast.name == name]
        sums = [(cast.casts, cast.bytes, cast.kernels, cast.kernel_bytes) for cast in casts]
        whole = cost.casts, cost.cast_bytes, cost.kernels, cost.kernel_bytes
        assert (*map(sum, zip(*sums, strict=True)),) == whole


def test_equal_blocks_are_one_row_and_weights_are_told_from_activations(gpt: Report) -> None:
    rows = {row.module: row for row in gpt.modules}
    up = rows["blocks.*.up"]
    assert up.times == 2
    assert up.dtypes == {"amp_fx": "bfloat16", "torch.autocast": "bfloat16"}
    (weights,) = [c for c in up.casts if c.name == "amp_fx" and c.what == "weight" and c.phase == "forward"]
    # a weight and a bias of each block
    assert (weights.casts, weights.bytes) == (4, 2 * 6 * (32 * 128 + 128))
    (gradients,) = [c for c in up.casts if c.name == "amp_fx" and c.what == "weight gradient"]
    assert (gradients.before, gradients.after, gradients.phase) == (torch.bfloat16, torch.float32, "backward")
    assert list(rows).index("blocks.*.qkv") < list(rows).index("blocks.*.up") < list(rows).index("head")


#: stock Inductor of torch 2.11 does not fuse the backward of GELU here
_ACTIVATION = nn.Tanh if IS_2_11 else nn.GELU


def test_all_pictures_say_the_same_of_a_module() -> None:
    # norms, an activation and a softmax, which kernels compute in fp32 whatever they read and write
    parts: dict[str, nn.Module] = {
        "convolution": nn.Conv2d(4, 8, 3), "batch_norm": nn.BatchNorm2d(8), "act": _ACTIVATION(),
        "layer_norm": nn.LayerNorm(6), "head": nn.Linear(6, 8), "softmax": nn.Softmax(-1),
    }  # fmt: skip
    model, x = nn.Sequential(OrderedDict(parts)), torch.randn(2, 4, 8, 8)
    # one norm in fp32, and one not
    report = explained(model, x, policy={"rules": [{"module": "layer_norm", "precision": "fp32"}]})
    ours, theirs = (
        {row.module: row.dtypes[which] for row in report.modules if row.module in parts}
        for which in ("amp_fx", "torch.autocast")
    )
    calls = {box.module: box.dtype for box in drawing(report).graphs[0].nodes if box.dtype}
    assert ours == {name: calls[name] for name in parts}
    # what hooks see under eager autocast is what torch.autocast is said to compute
    seen: list[str] = []
    for layer in parts.values():
        layer.register_forward_hook(lambda _module, _inputs, result: seen.append(dtype_name(result.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert theirs == dict(zip(parts, seen, strict=True))


def test_calls_of_the_backward_have_classes_of_their_own(gpt: Report) -> None:
    classes = {row.op: row.op_class.value for row in rows(gpt, "backward")}
    assert classes.items() >= {"mm": "low", "mul.Tensor": "promote", "permute": "follow"}.items()
    (backward,) = of_phase(gpt, "backward")
    assert {cast.kernel for cast in backward.casts} == {True, False}


def test_autocast_is_compared_at_equal_results() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        """Returns what autocast leaves in bf16, and has a region in fp32 within."""
        h = m.up(x)
        with torch.autocast("cpu", enabled=False):
            h = (h.float() * 1.5).square()
        return m.down(h)

    up = nn.Linear(16, 32)
    model, x = Parts(run, up=up, down=nn.Linear(32, 16)), torch.randn(4, 16)
    found = LoweredGraphs()
    torch._dynamo.reset()
    with replace_inner_compile(found.inner_compile):
        y = torch.compile(model, backend=autocast_backend(OFF))(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), [up.weight])
    assert y.dtype is torch.float32
    assert [graph.phase for graph in found.graphs] == ["forward", "backward"]
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).float()
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    (eager,) = torch.autograd.grad(expected.square().sum(), [up.weight])
    torch.testing.assert_close(gradient, eager, rtol=3e-2, atol=3e-2 * eager.abs().max().item())
    # the region is in fp32 in the backward, too: stock torch.compile multiplies in bf16 there
    backward, mul = found.graphs[1].lowered.before.graph, torch.ops.aten.mul.Tensor
    products = backward.find_nodes(op="call_function", target=mul)
    assert {node.meta["val"].dtype for node in products} == {torch.float32}


def test_cast_kernels_are_those_that_are_listed_and_conversions_of_integers_are_none() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.table(x.long()) + m.places.weight[: x.shape[1]])

    model = Parts(run, table=nn.Embedding(256, 32), places=nn.Embedding(8, 32), head=nn.Linear(32, 256))
    report = explained(model, torch.zeros(4, 8, dtype=torch.uint8))
    cost = report.costs["amp_fx"]
    assert cost.kernels == sum(map(len, report.kept.values())) > 0
    assert cost.kernel_bytes == sum(cast.bytes for casts in report.kept.values() for cast in casts)


def test_where_autocast_fails_the_report_says_that_it_is_compared_with_fp32() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return torch.zeros(2, 8).scatter_add(0, torch.zeros(4, 8, dtype=torch.int64), m.up(x))

    model = Parts(run, up=nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match="dtype"), torch.autocast("cpu", torch.bfloat16):
        model(X)
    report = explained(model, X)
    assert "torch.autocast fails on" in str(report)
    assert report.costs["torch.autocast"].casts == 0 < report.costs["amp_fx"].casts
    assert "fails" not in str(explained(nn.Linear(8, 8), X))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
@pytest.mark.parametrize(
    "run",
    [
        lambda a, b: torch.complex(a, b).abs(),
        lambda a, b: torch.linalg.det(a) + b,
        lambda a, b: torch.linalg.slogdet(a)[1] + b,
        lambda a, b: torch.special.bessel_j0(a) + b,
        lambda a, b: torch.special.bessel_y1(a.abs()) + b,
    ],
)
def test_where_a_kernel_refuses_what_autocast_makes_low_the_report_says_so_too(run: Any) -> None:
    model = Parts(lambda m, x: run(m.one(x), m.other(x)), one=nn.Linear(8, 8), other=nn.Linear(8, 8)).eval()
    x = torch.randn(8, 8)
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(x)
    with torch.no_grad():
        report = explained(model, x)
    assert "torch.autocast fails on" in str(report)
    assert report.costs["torch.autocast"].casts == 0 < report.costs["amp_fx"].casts


@pytest.mark.usefixtures("group_of_one")
def test_a_compiled_ddp_model_is_explained_and_can_train_afterwards() -> None:
    model = stacked(*(nn.Linear(512, 512) for _ in range(3)))
    # buckets as small as a weight, so that Dynamo cuts the model into a graph for each
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    x = torch.randn(8, 512)
    report = explained(torch.compile(ddp, backend="amp_fx"), x)
    assert dtypes_of_linears(report) == dict.fromkeys(("layers.0", "layers.1", "layers.2"), torch.bfloat16)
    assert len(of_phase(report, "forward")) == len(of_phase(report, "backward")) == 3
    assert all("DDPOptimizer" in reason for reason in report.graph_breaks)
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(2):
        ddp(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_fp16_without_scaling_is_advice_and_the_one_warning_is_kept_for_training() -> None:
    # warnings are errors
    report = explained(UpDown(8, 16), X, dtype="float16")
    assert [row.kind for row in report.notes] == ["scaling"]
    assert explained(UpDown(8, 16), X, dtype="float16", scaler="none").notes == []
    assert "float16" in report.shares()


def test_bad_options_and_plans_of_other_models_are_raised_as_they_are() -> None:
    with pytest.raises(OptionsError, match="'polcy'"):
        explained(UpDown(8, 16), X, polcy="fast")
    with pytest.raises(PlanError, match=r"up linear\)"):
        explained(UpDown(8, 16), X, plan=Plan())


@pytest.mark.usefixtures("op_by_op")
def test_what_is_recorded_around_a_compile_is_what_explain_says() -> None:
    def decisions(plan: Plan) -> list[tuple[Any, ...]]:
        return [(row.module_path, row.op, row.op_class, row.dtype, row.reasons) for row in plan.nodes]

    model = UpDown(8, 16)
    report = explained(model, X)
    compiled: Callable[..., Tensor] = torch.compile(model, backend="amp_fx", options=OFF)
    with amp_fx.record() as recording:
        compiled(X).sum().backward()
    (recorded,) = recording.reports
    assert decisions(recorded.plan) == decisions(report.plan)
    # only explain asks Inductor which casts it fuses
    assert all(cast.kernel is not None for cast in report.plan.casts)
    assert recorded.plan.casts == [replace(cast, kernel=None) for cast in report.plan.casts]
    assert recorded.plan.training
    # the default, fp32 where nothing is gained, beside torch.autocast
    assert list(recorded.compared()) == ["amp_fx", "torch.autocast"]
    assert json.loads(json.dumps(recorded.to_dict())) == recorded.to_dict()
