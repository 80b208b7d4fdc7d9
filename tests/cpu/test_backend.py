"""``torch.compile(..., backend="amp_fx")`` as users call it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import amp_fx.compiler.compiling
from amp_fx import record
from amp_fx.graphs.fallback import under_autocast
from amp_fx.graphs.regions import Region
from gpt import GPT, GPTConfig, get_batch, make_corpus
from support.checks.held_memory import run_python
from support.models.loss_scaled import OPTIONS, new_scaler
from support.torch_versions import IS_2_11, fails_in
from support.tracing.captured_graphs import DEFAULTS, dynamo_graph, op_by_op

BF16, FP16 = torch.bfloat16, torch.float16


def compiled(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Strict, and without a device profile: these models are too small to gain anything."""
    return torch.compile(program, backend="amp_fx", options={**DEFAULTS, **options})


# ---- from outside: nothing imported, logs, traces, caches ----


SCRIPT = """
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


def test_the_backend_works_by_name_with_nothing_imported_and_caches_hit_the_next_time(tmp_path: Path) -> None:
    caches, traces = str(tmp_path / "caches"), tmp_path / "traces"
    command = ("-W", "error::UserWarning:amp_fx", "-c", SCRIPT)
    first = json.loads(run_python(*command, TORCHINDUCTOR_CACHE_DIR=caches).stdout)
    variables = {"TORCH_LOGS": "+amp_fx", "TORCH_TRACE": str(traces)}
    done = run_python(*command, TORCHINDUCTOR_CACHE_DIR=caches, **variables)
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


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="new in torch 2.13")
def test_it_can_be_the_default_backend() -> None:
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("amp_fx")
    try:
        with record() as recording:
            torch.compile(lambda x: x @ x)(torch.randn(8, 8))
    finally:
        torch.compiler.set_default_backend(before)
    assert len(recording.plans) == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[fx.GraphModule, dict[str, Any], tuple[bool, bool]]]:
    """The graphs that Inductor is asked for, config beside our passes, and autocast on the CPU and on any device."""
    asked = []

    def compile_with_inductor(gm: fx.GraphModule, _: Any, patches: Mapping[str, Any]) -> Callable[..., Any]:
        config = {key: value for key, value in patches.items() if "custom" not in key}
        asked.append((gm, config, (torch.is_autocast_enabled("cpu"), torch._C._is_any_autocast_enabled())))
        return gm.forward

    monkeypatch.setattr(amp_fx.compiler.compiling, "compile_with_inductor", compile_with_inductor)
    return asked


def test_mode_options_and_numerics_reach_inductor(asked: list[Any]) -> None:
    torch.compile(lambda x: x @ x, backend="amp_fx", mode="reduce-overhead")(torch.randn(4, 4))
    compiled(lambda x: x @ x, numerics="eager", max_autotune=True)(torch.randn(4, 4))
    assert [config for _, config, _ in asked] == [
        {"triton.cudagraphs": True},
        {"max_autotune": True, "emulate_precision_casts": True},
    ]


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="Inductor sees to it")
def test_generated_kernels_wait_for_their_threads_also_in_a_backward_that_is_compiled_late() -> None:
    from torch._inductor.codegen.triton import TritonKernel

    def access() -> object:
        return vars(TritonKernel)["_handle_pdl_before_access"]

    stock, seen = access(), list[bool]()
    with op_by_op(lambda _: seen.append(access() is not stock)):
        result = compiled(lambda x: x @ x.T)(torch.randn(3, 4).requires_grad_())
        assert seen == [True]
        result.sum().backward()
    assert seen == [True, True]
    assert access() is stock


def test_without_gradients_kernels_are_called_from_cpp_unless_options_say_otherwise(asked: list[Any]) -> None:
    for options, gradients in (({}, False), ({"cpp_wrapper": False}, False), ({}, True)):
        torch._dynamo.reset()
        with torch.set_grad_enabled(gradients):
            compiled(lambda x: x @ x, **options)(torch.randn(4, 4))
    assert [config.get("cpp_wrapper") for _, config, _ in asked] == [True, False, None]


@torch.no_grad()
def test_a_graph_on_a_cpu_alone_asks_for_no_cuda_graphs_unless_it_is_said_who_calls(asked: list[Any]) -> None:
    given: list[dict[str, Any]] = [{}, {"cpp_wrapper": False}, {"cpp_wrapper": True}]
    for options in given:
        torch._dynamo.reset()
        amp_fx.compile(lambda x: x @ x, mode="reduce-overhead", inductor=options)(torch.randn(4, 4))
    assert [config["triton.cudagraphs"] for _, config, _ in asked] == [False, True, True]


@pytest.mark.slow
def test_the_kernels_of_a_step_may_be_called_from_cpp() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)), torch.randn(8, 64)
    found = []
    for options in ({}, {"cpp_wrapper": True}):
        torch._dynamo.reset()
        model.zero_grad()
        compiled(model, **options)(x).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_inductor_gets_a_graph_that_meets_autocast_never_again(asked: list[Any]) -> None:
    with torch.autocast("cpu", BF16):
        compiled(lambda x: x @ x)(torch.randn(4, 4))
    # off for this device, on for one that does not exist: AOTAutograd then guards the run time too
    assert [autocast for _, _, autocast in asked] == [(False, True)]
    assert not torch._C._is_any_autocast_enabled()


def test_a_graph_with_nothing_to_cast_is_compiled_as_dynamo_made_it(asked: list[Any]) -> None:
    compiled(lambda x: x.exp() + 1)(torch.randn(4))
    [(gm, _, _)] = asked
    assert [node.op for node in gm.graph.nodes].count("call_method") == 1


@fails_in("2.11", "2.12", fault="emulate_precision_casts does not round what is narrowed and widened")
def test_eager_numerics_give_the_bits_of_eager_autocast() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        return (h + h.sigmoid()) * h - h.tanh()

    x, w = torch.randn(16, 16), torch.randn(16, 16)
    with torch.autocast("cpu", BF16):
        assert torch.equal(compiled(program, numerics="eager")(x, w), program(x, w))


@pytest.mark.usefixtures("without_inductor")
def test_the_same_function_runs_with_and_without_an_ambient_autocast() -> None:
    own = compiled(lambda x: x @ x)
    x = torch.randn(8, 8)
    assert own(x).dtype is torch.float32
    with torch.autocast("cpu", FP16):
        assert own(x).dtype is FP16
    assert own(x).dtype is torch.float32
    with torch.inference_mode():
        assert own(x).is_inference()


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


@pytest.mark.usefixtures("without_inductor")
def test_threads_compile_side_by_side() -> None:
    def work(index: int) -> bool:
        x = torch.randn(8, 8)
        got, wanted = compiled(lambda y: torch.matmul(y, y) + index)(x), x @ x + index
        return bool(0 < (got - wanted).norm() <= 2e-2 * wanted.norm())

    with record() as recording, ThreadPoolExecutor(3) as threads:
        assert all(threads.map(work, range(3)))
    assert len(recording.plans) >= 1


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
def test_graphs_without_anything_to_lower_pass_through(program: Callable[..., Tensor], value: Tensor) -> None:
    with record() as recording:
        got = compiled(program)(value)
    assert recording.plans == []
    assert got.dtype is program(value).dtype
    torch.testing.assert_close(got, program(value))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("foreach", [False, True])
def test_a_compiled_optimizer_step_passes_through(foreach: bool) -> None:
    model = nn.Linear(8, 8)
    models = model, copy.deepcopy(model)
    for index, pair in enumerate(zip(*(each.parameters() for each in models), strict=True)):
        for parameter in pair:
            parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=foreach) for m in models)
    with record() as recording:
        compiled(ours.step)()
    theirs.step()
    assert recording.plans == []
    torch.testing.assert_close(*(list(m.parameters()) for m in models))


# ---- the way out ----


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fallback_is_low_with_the_traced_dtypes_and_fp32_where_autocast_fails_too(dynamic: bool) -> None:
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    regions = {"cpu": Region(True, BF16, by_user=False)}
    wrapped = under_autocast(dynamo_graph(lambda x, w: (x @ w, x.argmax()), x, w, dynamic=dynamic), regions)
    # sizes come before the tensors that have them
    got, _ = wrapped(*([8] if dynamic else []), x, w)
    assert got.dtype is torch.float32
    with torch.autocast("cpu", BF16):
        assert torch.equal(got, (x @ w).float())
    gm = dynamo_graph(lambda x, w: torch.lerp(x, x @ w, 0.5), x, w, dynamic=dynamic)
    assert under_autocast(gm, regions) is gm


# ---- training ----

#: the model, steps, rate, lines of its corpus, and the options
RUNS: dict[str, tuple[GPTConfig, int, float, int, dict[str, Any]]] = {
    "bf16": (GPTConfig(context=64, layers=2, heads=4, width=64), 300, 3e-3, 5_000, {}),
    "fp16 with a scaler": (GPTConfig(context=16, layers=1, heads=2, width=16), 60, 1e-2, 500, OPTIONS),
}


@pytest.mark.slow
@pytest.mark.xdist_group("training_curve")
@pytest.mark.parametrize("run", RUNS)
def test_a_small_gpt_reaches_the_loss_of_the_fp32_run(run: str) -> None:
    config, steps, rate, lines, options = RUNS[run]
    model, corpus = GPT(config), make_corpus(lines=lines)
    twin = copy.deepcopy(model)
    twin.compile(backend="amp_fx", options=options)
    ours, off = new_scaler(enabled=run != "bf16"), torch.amp.GradScaler("cpu", enabled=False)

    def losses(of: nn.Module, scaler: torch.amp.GradScaler) -> tuple[float, float]:
        """The first one, and the last ones averaged: single steps are as noisy as their batches."""
        optimizer, found = torch.optim.AdamW(of.parameters(), lr=rate), []
        for step in range(steps):
            loss = of(*get_batch(corpus, step, batch=config.context // 4, length=config.context))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(loss.item())
        return found[0], sum(found[-steps // 4 :]) / (steps // 4)

    (first, fp32), (_, amp_fx) = losses(model, off), losses(twin, ours)
    assert fp32 < 0.9 * first, "the fp32 run did not learn: the comparison would say nothing"
    # in torch 2.11 autocast's loss, and that of compiling in fp32, moves by up to 2.5 %, too
    assert amp_fx == pytest.approx(fp32, rel=0.03 if IS_2_11 else 0.01)
    assert amp_fx != fp32, "the run was not in low precision"
    assert ours.skipped_steps <= 3
