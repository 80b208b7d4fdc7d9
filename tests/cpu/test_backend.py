"""``torch.compile(..., backend="amp_fx")`` as users call it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor, fx, nn

import amp_fx.compiling
import amp_fx.rewriting
from amp_fx import FallbackWarning, Plan, record
from amp_fx.graphs.fallback import under_autocast
from amp_fx.graphs.regions import Region
from graphs import DEFAULTS, Block, dynamo_graph
from small_models import UpDown
from versions import fails_in

BF16, FP16 = torch.bfloat16, torch.float16


def compiled(program: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    """Strict, and without a device profile: these models are too small to gain anything."""
    return torch.compile(program, backend="amp_fx", dynamic=dynamic, options={**DEFAULTS, **options})


def low_ops(plans: Sequence[Plan]) -> set[str]:
    """Ops that run in a low dtype somewhere."""
    return {row.op for plan in plans for row in plan.nodes if row.dtype in (BF16, FP16)}


def close(got: Tensor, exact: Tensor, error: float = 2e-2) -> bool:
    return bool((got.double() - exact.double()).norm() <= error * exact.double().norm())


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fresh interpreter. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:amp_fx", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


# ---- from outside: nothing imported, logs, traces, caches ----


_SCRIPT = """
import json, sys, torch
from torch import nn
from torch._dynamo.utils import counters

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.island, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        # its weight is laid out by an op of amp_fx's own
        self.convolution = nn.Conv2d(64, 64, 3)

    def forward(self, x):
        x = self.first(x) + self.convolution(x.new_ones(1, 64, 3, 3)).mean()
        with torch.autocast("cpu", enabled=False):
            x = self.island(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(x)

imported = "amp_fx" in sys.modules
model = Block()
out = torch.compile(model, backend="amp_fx", options={"profile": "off", "strict": True})(torch.randn(4, 8))
out.sum().backward()
print(json.dumps({
    "imported before": imported,
    "listed": "amp_fx" in torch._dynamo.list_backends(),
    "output": str(out.dtype),
    "gradients": sorted({str(p.grad.dtype) for p in model.parameters()}),
    "counters": {**counters["inductor"], **counters["aot_autograd"]},
}))
"""


def test_the_backend_works_by_name_with_nothing_imported_and_caches_hit_in_the_next_process(
    tmp_path: Path,
) -> None:
    caches, traces = str(tmp_path / "caches"), tmp_path / "traces"
    first = json.loads(run_python(_SCRIPT, TORCHINDUCTOR_CACHE_DIR=caches).stdout)
    variables = {"TORCH_LOGS": "+amp_fx", "TORCH_TRACE": str(traces)}
    done = run_python(_SCRIPT, TORCHINDUCTOR_CACHE_DIR=caches, **variables)
    before, after = first.pop("counters"), json.loads(done.stdout)["counters"]
    assert first == {
        "imported before": False,
        "listed": True,
        "output": "torch.bfloat16",  # the model's own region is around its last layer
        "gradients": ["torch.float32"],
    }
    # of Inductor's, forward and backward
    wanted = {"autograd_cache_miss": 1, "autograd_cache_saved": 1, "fxgraph_cache_miss": 2}
    assert wanted.items() <= before.items()
    assert after["autograd_cache_hit"] == 1
    assert after["fxgraph_cache_hit"] >= 1
    assert not [key for key in after if key.endswith(("_cache_miss", "_cache_bypass"))]
    # the log has each pass and the overhead, the trace the graph at every stage and the plan
    for words in ("captured", "classify:", "place:", "insert-casts:", "verify:", "rewrote", "casts"):
        assert words in done.stderr
    trace = "\n".join(path.read_text(encoding="utf-8") for path in traces.glob("*.log"))
    for name in ("amp_fx_dynamo", "amp_fx_captured", "amp_fx_rewritten", "amp_fx_plan"):
        assert f'"name": "{name}"' in trace
    assert "torch.ops.aten.linear.default" in trace


# ---- ways to ask for it ----


@pytest.mark.usefixtures("without_inductor")
def test_a_module_compiles_itself() -> None:
    model, x = Block(), torch.randn(4, 8)
    expected = model(x)
    model.compile(backend="amp_fx", options=dict(DEFAULTS))
    with record() as recording:
        got = model(x)
    assert got.dtype is torch.float32
    assert close(got, expected)
    assert "linear" in low_ops(recording.plans)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="new in torch 2.13")
def test_it_can_be_the_default_backend() -> None:
    def program(x: Tensor) -> Tensor:
        return x @ x

    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("amp_fx")
    try:
        with record() as recording:
            torch.compile(program)(torch.randn(8, 8))
    finally:
        torch.compiler.set_default_backend(before)
    assert len(recording.plans) == 1


@dataclass
class Asked:
    """What Inductor is asked for, of which nothing is compiled: the graph runs as it is."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    #: of Inductor's config, beside the passes of ours
    patches: list[dict[str, Any]] = field(default_factory=list)
    #: whether autocast is on, for the CPU and for any device
    autocast: list[tuple[bool, bool]] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, _: Any, patches: Mapping[str, Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.patches.append({key: value for key, value in patches.items() if "custom" not in key})
        self.autocast.append((torch.is_autocast_enabled("cpu"), torch._C._is_any_autocast_enabled()))
        return gm.forward


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(amp_fx.compiling, "compile_with_inductor", asked)
    return asked


def test_mode_options_and_numerics_reach_inductor(asked: Asked) -> None:
    torch.compile(lambda x: x @ x, backend="amp_fx", mode="reduce-overhead")(torch.randn(4, 4))
    compiled(lambda x: x @ x, numerics="eager", max_autotune=True)(torch.randn(4, 4))
    assert asked.patches == [
        {"triton.cudagraphs": True},
        {"max_autotune": True, "emulate_precision_casts": True},
    ]


def test_inductor_gets_a_graph_that_meets_autocast_never_again(asked: Asked) -> None:
    with torch.autocast("cpu", BF16):
        compiled(lambda x: x @ x)(torch.randn(4, 4))
    # off for this device, on for one that does not exist: AOTAutograd then guards the run time too
    assert asked.autocast == [(False, True)]
    assert not torch._C._is_any_autocast_enabled()


def test_a_graph_with_nothing_to_cast_is_compiled_as_dynamo_made_it(asked: Asked) -> None:
    compiled(lambda x: x.exp() + 1)(torch.randn(4))
    assert [node.op for node in asked.graphs[0].graph.nodes].count("call_method") == 1


# ---- inference ----


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_gives_the_eager_dtype_in_low_precision(mode: Callable[[], Any]) -> None:
    model, x = Block().eval(), torch.randn(4, 8)
    with mode(), record() as recording:
        got = compiled(model)(x)
        expected = model(x)
    assert got.dtype is torch.float32
    assert got.is_inference() is expected.is_inference()
    assert close(got, expected)
    assert "linear" in low_ops(recording.plans)


@fails_in(
    "2.11",
    "2.12",
    fault="a value that is narrowed and widened again is not rounded, in spite of emulate_precision_casts",
)
def test_eager_numerics_give_the_bits_of_eager_autocast() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        return (h + h.sigmoid()) * h - h.tanh()

    x, w = torch.randn(16, 16), torch.randn(16, 16)
    with torch.autocast("cpu", BF16):
        assert torch.equal(compiled(program, numerics="eager")(x, w), program(x, w))


# ---- the user's autocast ----


@pytest.mark.usefixtures("without_inductor")
def test_the_same_function_runs_with_and_without_an_ambient_autocast() -> None:
    own = compiled(lambda x: x @ x)
    x = torch.randn(8, 8)
    assert own(x).dtype is torch.float32
    with torch.autocast("cpu", FP16):
        assert own(x).dtype is FP16
    assert own(x).dtype is torch.float32


@pytest.mark.usefixtures("without_inductor")
def test_the_backward_of_an_fp32_island_does_not_overflow() -> None:
    # pytorch#153044: stock torch.compile traces this backward under the ambient fp16 and returns inf
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.matmul(x.float(), w.float())

    def gradient(of: Callable[..., Tensor]) -> float:
        x, w = torch.full((1, 1), 256.0), torch.ones(1, 1, requires_grad=True)
        with torch.autocast("cpu", FP16):
            y = of(x, w)
        (y * 256.0).sum().backward()
        assert w.grad is not None
        assert w.grad.dtype is torch.float32
        return w.grad.item()

    assert gradient(program) == 65536.0
    assert gradient(compiled(program)) == 65536.0


# ---- shapes, breaks, threads ----


@pytest.mark.usefixtures("without_inductor")
def test_dynamic_shapes_compile_once_for_all_sizes() -> None:
    model = Block()
    own = compiled(model, dynamic=True)
    with record() as recording:
        for size in (3, 4, 7, 12):
            x = torch.randn(size, 8)
            got = own(x)
            assert got.shape == (size, 8)
            assert close(got, model(x))
    assert len(recording.plans) == 1
    assert "linear" in low_ops(recording.plans)


@pytest.mark.usefixtures("without_inductor")
def test_graph_breaks_make_graphs_that_agree_on_dtypes() -> None:
    seen = list[torch.dtype]()

    def broken(h: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        seen.append(h.dtype)
        return h

    model, x = UpDown(act=broken), torch.randn(4, 8)
    expected = model(x)
    with record() as recording:
        got = compiled(model)(x)
    assert {got.dtype, *seen} == {torch.float32}
    assert close(got, expected)
    got.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert [low_ops([plan]) for plan in recording.plans] == [{"linear"}, {"linear"}]


@pytest.mark.usefixtures("without_inductor")
def test_threads_compile_side_by_side() -> None:
    def work(index: int) -> bool:
        x = torch.randn(8, 8)
        return close(compiled(lambda y: torch.matmul(y, y) + index)(x), x @ x + index)

    with record() as recording, ThreadPoolExecutor(3) as threads:
        assert all(threads.map(work, range(3)))
    assert len(recording.plans) >= 1
    assert all(low_ops([plan]) == {"matmul"} for plan in recording.plans)


# ---- what is none of its business ----


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("program", "value"),
    [
        (lambda x: (x @ x).cumsum(0) % 7, torch.arange(16).reshape(4, 4)),
        (lambda x: (x @ x).exp(), torch.eye(4, dtype=torch.float64)),
        (lambda x: (x @ x) * 2, torch.eye(4, dtype=torch.complex64)),
    ],
    ids=["integers", "fp64", "complex"],
)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_graphs_without_anything_to_lower_pass_through(
    program: Callable[[Tensor], Tensor], value: Tensor
) -> None:
    with record() as recording:
        got = compiled(program)(value)
    assert recording.plans == []
    assert got.dtype is program(value).dtype
    torch.testing.assert_close(got, program(value))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("foreach", [False, True])
def test_a_compiled_optimizer_step_passes_through(foreach: bool) -> None:
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for index, parameter in enumerate(each.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, foreach=foreach) for each in (model, twin)
    )
    with record() as recording:
        compiled(ours.step)()
    theirs.step()
    assert recording.plans == []
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("without_inductor")
def test_compiled_autograd_leaves_the_backward_as_it_is() -> None:
    model, x = Block(), torch.randn(4, 8)
    exact = copy.deepcopy(model).double()
    exact(x.double()).sum().backward()

    def train() -> None:
        own(x).sum().backward()

    own = compiled(model)
    with record() as recording, torch._dynamo.config.patch(compiled_autograd=True):
        compiled(train)()
    assert all("linear" in low_ops([plan]) for plan in recording.plans)
    for got, expected in zip(model.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        assert got.grad.dtype is torch.float32
        assert close(got.grad, expected.grad)


# ---- the way out ----


class Scale(torch.autograd.Function):
    """A function with a backward of its own: Dynamo keeps it as one higher-order op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return torch.matmul(x, w) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return 2 * gradient.float() @ w.mT, 2 * x.mT @ gradient.float()


def in_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return Scale.apply(x, w) + 1  # the line to name


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


@pytest.mark.usefixtures("without_inductor")
def test_a_graph_that_cannot_be_rewritten_runs_as_autocast_would_with_one_warning() -> None:
    x, w = inputs()
    with pytest.warns(FallbackWarning) as caught, record() as recording:
        got = compiled(in_autocast, strict=False)(x, w)
    expected = in_autocast(x, w)
    assert got.dtype is expected.dtype
    assert close(got, expected)
    (text,) = [str(each.message) for each in caught if each.category is FallbackWarning]
    named = ("autograd_function_apply", "test_backend.py", "the line to name", "options={'strict': True}")
    assert all(each in text for each in named)
    (plan,) = recording.plans
    assert "autograd_function_apply" in plan.fallback
    assert plan.nodes == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fallback_is_low_precision_with_the_traced_dtypes(dynamic: bool) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w, x.argmax()

    gm = dynamo_graph(program, *inputs(), dynamic=dynamic)
    wrapped = under_autocast(gm, {"cpu": Region(True, BF16, by_user=False)})
    assert wrapped is not gm
    x, w = inputs()
    # sizes come before the tensors that have them
    got, _ = wrapped(*([8] if dynamic else []), x, w)
    assert got.dtype is torch.float32
    with torch.autocast("cpu", BF16):
        assert torch.equal(got, (x @ w).float())


def test_a_fallback_on_which_autocast_fails_too_stays_fp32() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.lerp(x, x @ w, 0.5)

    gm = dynamo_graph(program, *inputs())
    assert under_autocast(gm, {"cpu": Region(True, BF16, by_user=False)}) is gm
