"""End to end on a CUDA device; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from benchmarks.arms import ARMS
from benchmarks.errors import measure
from benchmarks.workloads import build_workload, gpt2
from support.checks.held_memory import double, renewed, served
from support.checks.option_pairs import Row, covering_rows, words
from support.checks.option_runs import check

pytestmark = pytest.mark.gpu

OPTIONS = {"profile": "off", "strict": True}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)).cuda()


def step(model: nn.Module, x: Tensor, **compile_options: Any) -> dict[str, Tensor]:
    """Gradients of one step, in fp64 for comparing."""
    torch._dynamo.reset()
    model.zero_grad()
    run = torch.compile(model, **compile_options) if compile_options else model
    run(x).square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return max(((got[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_is_as_accurate_as_autocast_and_really_low(dtype: str) -> None:
    model, x = network(), torch.randn(512, 256, device="cuda")
    low = getattr(torch, dtype)
    exact = step(network().double(), x.double())
    with torch.autocast("cuda", low):
        autocast = distance(step(model, x, backend="inductor"), exact)
    with amp_fx.record() as recording:
        ours = distance(step(model, x, backend="amp_fx", options={**OPTIONS, "dtype": dtype}), exact)
    assert ours <= 1.25 * autocast + 1e-3
    plan = recording.plans[0]
    assert {row.dtype for row in plan.nodes if row.op == "linear"} == {low}
    assert {row.dtype for row in plan.nodes if row.op == "layer_norm"} == {torch.float32}


def test_weight_gradients_are_not_rounded_to_16_bits() -> None:
    model, x = network(), torch.randn(512, 256, device="cuda")
    gradients = step(model, x, backend="amp_fx", options=OPTIONS)
    rounded = gradients["0.weight"].to(torch.bfloat16).double()
    assert not torch.equal(gradients["0.weight"], rounded)


@pytest.mark.parametrize("cudnn", [True, False])
def test_gradients_of_attention_are_near_those_of_fp64(cudnn: bool) -> None:
    # docs/faq.md: before torch 2.14, those of stock torch.compile are not
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        model = build_workload("gpt2", gpt2, batch=2, length=256, width=512, vocab=2048)
        [row] = measure(model, [ARMS["off"]], "cuda")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert row.gradient < 0.02


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor_work(mode: str) -> None:
    model, x = network().eval(), torch.randn(512, 256, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="amp_fx", mode=mode)
    with torch.no_grad():
        results = [compiled(x).clone() for _ in range(3)]
        assert (results[-1] - model(x)).norm() / model(x).norm() < 0.02
    assert results[-1].dtype is torch.float32


def test_another_card_can_be_asked_about() -> None:
    model, x = network(), torch.randn(512, 256, device="cuda")
    from_a_gpu = amp_fx.explain(model, x, target="cuda:h100")
    assert from_a_gpu.costs == amp_fx.explain(model.cpu(), x.cpu(), target="cuda:h100").costs


# ---- inference ----


@pytest.mark.parametrize("weights", ["auto", "cache"])
def test_copies_of_weights_are_renewed_without_a_wait_of_the_host(weights: str) -> None:
    model, x = network().eval(), torch.randn(64, 256, device="cuda")
    before, after, exact = renewed(model, x, {**OPTIONS, "weights": weights})
    assert (after - exact).norm() / exact.norm() < 0.02
    assert (before - exact).norm() / exact.norm() > 0.1


def test_copies_are_renewed_in_a_cuda_graph_of_the_user() -> None:
    model, x = network().eval(), torch.randn(64, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        compiled = served(model, x, OPTIONS)
        with torch.cuda.graph(graph):
            result = compiled(x)
        double(model)
        graph.replay()
        exact = model(x)
    assert (result - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("row", covering_rows(), ids=words)
def test_options_together_give_what_each_promises(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path, device="cuda")
