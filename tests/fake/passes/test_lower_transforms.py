"""``vmap`` and ``torch.func`` run with autocast's dtypes and error, for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.flop_counter import flop_registry

from amp_fx import record
from amp_fx.precision.placement import devices
from support.tracing.captured_graphs import DEFAULTS, op_by_op, rewrite

BF16 = torch.bfloat16
Program = Callable[[nn.Module, Tensor], Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def per_sample(m: nn.Module, x: Tensor) -> Tensor:
    found = vmap(grad(lambda p, row: functional_call(m, p, (row,)).square().sum()), (None, 0))(
        dict(m.named_parameters()), x
    )
    return torch.stack([each.square().sum() for each in found.values()]).sum()


def mean_flow(m: nn.Module, x: Tensor) -> Tensor:
    velocity, change = jvp(  # pyright: ignore[reportAssignmentType]  # without has_aux
        m, (x,), (torch.ones_like(x),)
    )
    return (velocity - x + 0.3 * change).square().mean()


def meta_learning(m: nn.Module, x: Tensor) -> Tensor:
    weights = dict(m.named_parameters())
    found = grad(lambda p: functional_call(m, p, (x,)).square().mean())(weights)
    return functional_call(m, {k: w - 0.1 * found[k] for k, w in weights.items()}, (x,)).square().mean()


def ensemble(m: nn.Module, x: Tensor) -> Tensor:
    weights = {k: torch.stack([w, 0.5 * w, -w]) for k, w in m.named_parameters()}
    return vmap(lambda p: functional_call(m, p, (x,)))(weights).square().mean()


def physics(m: nn.Module, x: Tensor) -> Tensor:
    slope = vmap(grad(lambda row: m(row).sum()))(x)
    return (slope + vmap(m)(x)).square().mean()


def laplacian(m: nn.Module, x: Tensor) -> Tensor:
    return vmap(hessian(lambda row: m(row).sum()))(x[:2]).diagonal(dim1=1, dim2=2).sum(1).square().mean()


def jacobian(m: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacrev(m))(x).square().mean()


def trained_at_test_time(m: Any, x: Tensor) -> Tensor:
    weight = m[0].weight
    for rows in x.split(4):
        weight = weight - 0.1 * grad(lambda w, r: ((r @ w.T).square() - 1).mean())(weight, rows)
    return m[2]((x @ weight.T).tanh()).square().mean()


def in_the_programs_own_region(m: nn.Module, x: Tensor) -> Tensor:
    def run(row: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return m(row).float().square()

    return vmap(run)(x).mean()


def pulled_back_ones(m: nn.Module, x: Tensor) -> Tensor:
    y, pull, *_ = vjp(m, x)
    return pull(torch.ones_like(y))[0].square().mean()


def pulled_back_twice(m: nn.Module, x: Tensor) -> Tensor:
    y, pull, *_ = vjp(lambda t: m(t).square(), x)
    return (pull(y.sin())[0] + pull(torch.arange(16.0).expand(8, 16) / 8)[0]).square().mean()


def pulled_back_by_a_product(m: Any, x: Tensor) -> Tensor:
    y, pull, *again = vjp(lambda t: (m(t), t.sin()), x, has_aux=True)
    return m(pull(y @ m[2].weight @ m[0].weight)[0] + again[0]).square().mean()


def pulled_back_to_weights(m: nn.Module, x: Tensor) -> Tensor:
    y, pull, *_ = vjp(lambda p: functional_call(m, p, (x,)), dict(m.named_parameters()))
    return torch.stack([each.square().sum() for each in pull(y - x)[0].values()]).sum()


def pulled_back_row_by_row(m: nn.Module, x: Tensor) -> Tensor:
    _, pull, *_ = vjp(m, x)
    return vmap(lambda row: pull(row.expand(8, 16))[0])(torch.eye(16)).square().mean()


PROGRAMS = (
    per_sample, mean_flow, meta_learning, ensemble, physics, laplacian, jacobian, trained_at_test_time,
    in_the_programs_own_region, pulled_back_ones, pulled_back_twice, pulled_back_by_a_product, pulled_back_to_weights,
    pulled_back_row_by_row,
)  # fmt: skip


def low_share(graphs: list[fx.GraphModule]) -> float:
    """Of FLOPs, of what reads 16 bits."""
    flops = {True: 0, False: 0}
    for node in (node for gm in graphs for node in gm.graph.nodes):
        if (op := getattr(node.target, "overloadpacket", None)) in flop_registry:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            is_low = all(v.dtype is BF16 for v in args if isinstance(v, Tensor))
            flops[is_low] += flop_registry[op](*args, **kwargs, out_val=node.meta["val"])
    return flops[True] / sum(flops.values())


@pytest.mark.quick_rows("per_sample", "ensemble", "pulled_back_ones")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_have_autocasts_error_and_all_flops_are_low(program: Program) -> None:
    model, x = net(), torch.randn(8, 16)
    wide = copy.deepcopy(model).double()

    def gradients(loss: Tensor, of: nn.Module) -> list[Tensor]:
        return list(
            torch.autograd.grad(loss, list(of.parameters()), materialize_grads=True, allow_unused=True)
        )

    exact = gradients(program(wide, x.double()), wide)
    with torch.autocast("cpu", BF16):
        loss = program(model, x)
    theirs = gradients(loss, model)
    with op_by_op() as graphs, record() as recording:
        run = torch.compile(program, backend="amp_fx", options=dict(DEFAULTS), fullgraph=True)
        ours = gradients(run(model, x), model)
    (plan,) = recording.plans
    assert not plan.fallback
    assert all(row.dtype is BF16 for row in plan.untouched_matmuls)
    assert low_share(graphs) == 1.0
    for found, other, true in zip(ours, theirs, exact, strict=True):
        assert found.dtype is torch.float32
        assert (found - true).norm() <= 1.05 * (other - true).norm() + 1e-3 * true.norm()


def test_results_have_the_dtypes_of_the_program() -> None:
    with op_by_op():
        run = torch.compile(
            lambda m, x: (vmap(m)(x), vmap(m)(x)[:2] @ x[:, :2]), backend="amp_fx", options=dict(DEFAULTS)
        )
        assert [each.dtype for each in run(net(), torch.randn(16, 16))] == [torch.float32] * 2


@pytest.mark.parametrize(
    "options",
    [{"profile": "auto"}, {"policy": "O0"}, {"policy": {"rules": [{"op": "linear", "precision": "fp32"}]}}],
)
def test_where_a_rule_or_a_slow_device_says_fp32_nothing_is_lowered(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = next(row for row in devices.CPUS if row.name == "avx2")
    monkeypatch.setattr(devices, "builtin", lambda device: devices.cpu_profile(slow, 1))

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return vmap(self.net)(x)

    found = rewrite(Mapped(), torch.randn(8, 16), options=options)
    assert not any(row.dtype is BF16 for row in found.plan.untouched_matmuls)
    low = rewrite(Mapped(), torch.randn(8, 16))
    assert [row.dtype for row in low.plan.untouched_matmuls] == [BF16, BF16]
