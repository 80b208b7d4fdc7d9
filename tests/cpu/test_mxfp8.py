"""Training with a scale for each 32 elements: graphs run op by op, and multiply by the definition of their scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

import amp_fx
from amp_fx.plans.plan import Plan
from benchmarks.workloads import llama_512
from fp8 import MLP, calls, emulating_blocks, error, exact_gradients, options
from small_models import GPT

aten = torch.ops.aten


def step(
    folder: Path, model: nn.Module, *args: Tensor, in_fp8: bool = True, **settings: bool
) -> tuple[list[Tensor], Plan, list[list[fx.Node]]]:
    """(gradients, plan, scaled matmuls of forward and backward) of one compiled step."""
    torch._dynamo.reset()
    model.zero_grad()
    given = options(folder, "mxfp8") if in_fp8 else {"profile": "off", "strict": True}
    compiled = torch.compile(model, backend="amp_fx", options=given, **settings)  # type: ignore[call-overload]
    with amp_fx.record() as recording, emulating_blocks() as graphs:
        compiled(*args).backward()
    (plan,) = recording.plans
    scaled = [calls(graph, aten._scaled_mm.default) for graph in graphs]
    return [p.grad for p in model.parameters() if p.grad is not None], plan, scaled


def drawn(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.04)
    return model


def test_gradients_of_a_small_gpt_are_as_near_to_fp64_as_with_a_scale_for_each_row(tmp_path: Path) -> None:
    model = drawn(GPT(layers=4, width=256, heads=4, vocab=320, length=128))
    tokens = torch.randint(320, (4, 129))
    args = tokens[:, :-1], tokens[:, 1:]
    exact = exact_gradients(model, args)
    in_bf16 = error(step(tmp_path, model, *args, in_fp8=False)[0], exact)
    found, plan, (forward, backward) = step(tmp_path, model, *args)
    assert plan.fp8 == "mxfp8"
    assert (len(forward), len(backward)) == (16, 32)
    assert 5 * in_bf16 < error(found, exact) < 0.115


@pytest.mark.slow
def test_gradients_of_a_small_llama_are_as_near(tmp_path: Path) -> None:
    model, batch = llama_512(batch=4, length=128, layers=4, width=256, hidden=640, vocab=320)
    exact = exact_gradients(drawn(model), list(batch.values()))
    found, _, _ = step(tmp_path, model, *batch.values())
    assert 0.03 < error(found, exact) < 0.17


def test_all_operands_are_e4m3_with_scales_of_one_byte(tmp_path: Path) -> None:
    _, plan, (forward, backward) = step(tmp_path, MLP(32, 64, 96, 16), torch.randn(64, 32))
    assert [row.multiplied for row in plan.nodes if row.flops] == [torch.float8_e4m3fn] * 2 + [None]
    assert (len(forward), len(backward)) == (2, 3)
    for node in forward + backward:
        kinds = [arg.meta["val"].dtype for arg in node.args[:4]]  # type: ignore[union-attr]  # nodes
        assert kinds == [torch.float8_e4m3fn] * 2 + [torch.float8_e8m0fnu] * 2


@pytest.mark.parametrize(
    ("sizes", "tokens", "expected"),
    [
        ((32, 64, 64, 32), 32, (2, 3)),
        # tokens are contracted in gradients of weights: 48 is no multiple of 32
        ((32, 64, 64, 32), 48, (2, 1)),
        # the second linear contracts 48, the gradient of its input does not
        ((32, 48, 64, 32), 32, (1, 3)),
        ((32, 64, 48, 32), 32, (2, 2)),
    ],
)
def test_what_32_does_not_divide_stays_low_where_it_is_contracted(
    tmp_path: Path, sizes: tuple[int, ...], tokens: int, expected: tuple[int, int]
) -> None:
    model, x = MLP(*sizes), torch.randn(tokens, sizes[0])
    exact = exact_gradients(model, [x])
    found, _, scaled = step(tmp_path, model, x)
    assert tuple(map(len, scaled)) == expected
    assert error(found, exact) < 0.12


def test_a_number_of_tokens_that_is_not_known_leaves_all_low(tmp_path: Path) -> None:
    _, plan, scaled = step(tmp_path, MLP(32, 64, 64, 16), torch.randn(64, 32), dynamic=True)
    assert not any(scaled)
    reason = next(row.reason for row in plan.nodes if row.flops)
    assert "mxfp8 has no scales for a number of rows that is not known" in reason


@pytest.mark.parametrize("magnitude", [1e-30, 1e-15, 1e15])
def test_the_magnitude_of_values_does_not_matter(tmp_path: Path, magnitude: float) -> None:
    class Scaled(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x))).float().sum() * 1e-3

    model, x = Scaled(32, 64, 64, 16, bias=False), torch.randn(32, 32) * magnitude
    exact = exact_gradients(model, [x])
    assert error(step(tmp_path, model, x)[0], exact) < 0.12


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_behind_every_matmul(tmp_path: Path, bad: float) -> None:
    model, x = MLP(32, 64, 64, 16), torch.randn(32, 32)
    x[3, 5] = bad
    exact = exact_gradients(model, [x])
    for ours, theirs in zip(step(tmp_path, model, x)[0], exact, strict=True):
        assert not ours[~theirs.isfinite()].isfinite().any()


def test_zeros_stay_zeros(tmp_path: Path) -> None:
    model, x = MLP(32, 64, 64, 16), torch.zeros(32, 32)
    found, _, (forward, _) = step(tmp_path, model, x)
    assert len(forward) == 2
    assert not found[0].any()
    assert all(g.isfinite().all() for g in found)


def test_a_device_that_has_no_scales_of_blocks_runs_as_autocast(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(MLP(32, 64, 16), backend="amp_fx", options=options(tmp_path, "mxfp8"))
    with amp_fx.record() as recording:
        compiled(torch.randn(32, 32))
    assert recording.plans[0].fp8 == "as autocast: cpu a CPU with fp8 does not multiply in mxfp8"
