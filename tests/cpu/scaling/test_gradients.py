"""Gradients of graphs that scale, of all kinds of programs: against eager fp32 without a scaler; and what it costs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from amp_fx import SecondDerivativeError
from amp_fx._torch import FakeTensor, FakeTensorMode
from amp_fx.compiler.compiling import ScaledGraph
from support.models import loss_scaled
from support.models.loss_scaled import (
    INF,
    OPTIONS,
    Loop,
    batch,
    compiled,
    gradient,
    gradients_are,
    loss_of,
    new_scaler,
)
from support.models.small import Parts, UpDown
from support.torch_versions import fails_in

PARAMETERS = ["up.weight", "up.bias", "down.weight", "down.bias"]

# ---- torch's own cases ----


def backwards(pattern: str, x: Tensor, y: Tensor, model: Any, optimizer: Any, scaler: Any, bad: bool) -> None:
    """From a batch to the step of the optimizer."""
    parts = 2 if pattern == "accumulation" else 1
    for part, (own, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        spoils = bad and part == 0 and pattern != "plain"
        scaler.scale(F.mse_loss(model(own * INF if spoils else own), target) / parts).backward()
    if bad and pattern == "plain":
        gradient(next(model.parameters())).fill_(INF)
    if pattern == "clipping":
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.2)
    scaler.step(optimizer)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("pattern", ["plain", "clipping", "accumulation"])
@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "fused AdamW"])
def test_torchs_scaling_cases_end_where_eager_fp32_ends(fused: bool, pattern: str) -> None:
    # which takes seconds to import
    from torch.testing._internal import common_cuda as torchs

    own: Any = (torch.optim.AdamW, {"lr": 1e-2, "fused": True}) if fused else (torch.optim.SGD, {"lr": 0.5})
    case = torchs._create_scaling_case("cpu", torch.float32, *own)
    control, scaling, opt_control, opt_scaling, data, _, skip = case
    scaler, disabled = new_scaler(growth_interval=1), torch.amp.GradScaler("cpu", enabled=False)
    model = compiled(scaling)
    for index, (x, y) in enumerate(data):
        if index != skip:
            opt_control.zero_grad()
            backwards(pattern, x, y, control, opt_control, disabled, False)
        opt_scaling.zero_grad()
        backwards(pattern, x, y, model, opt_scaling, scaler, index == skip)
        assert scaler.step_taken(opt_scaling) is (index != skip)
        scaler.update()
    assert loss_scaled.close(scaling, control, 5e-3)
    # three steps taken, one skipped
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5
    assert scaler.skipped_steps == 1


@pytest.mark.usefixtures("op_by_op")
# torch's own condition for retain_graph on compiled graphs
@functorch_config.patch(donated_buffer=False)
def test_several_losses_models_and_optimizers_share_a_scaler() -> None:
    from torch.testing._internal import common_cuda as torchs

    case, more = torchs._create_scaling_case, torchs._create_scaling_models_optimizers
    control0, scaling0, opt_control0, opt_scaling0, data, loss_fn, skip = case(device="cpu")
    control1, scaling1, opt_control1, opt_scaling1 = more(device="cpu")
    scaler = new_scaler(growth_interval=1)
    model0, model1 = compiled(scaling0), compiled(scaling1)

    def losses(m0: Any, m1: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out0, out1 = m0(x), m1(x)
        return loss_fn(0.3 * out0 + 0.7 * out1, y), loss_fn(0.6 * out0 - 0.4 * out1, y)

    for index, (x, y) in enumerate(data):
        for optimizer in (opt_control0, opt_control1, opt_scaling0, opt_scaling1):
            optimizer.zero_grad()
        for given in (losses(control0, control1, x, y), scaler.scale(losses(model0, model1, x, y))):
            for retain, loss in zip((True, False), given, strict=True):
                loss.backward(retain_graph=retain)
        if index == skip:
            gradient([*scaling1.parameters()][2]).fill_(INF)
        else:
            opt_control1.step()
        opt_control0.step()
        scaler.step(opt_scaling0)
        scaler.step(opt_scaling1)
        # only the optimizer whose own parameters are bad is skipped
        assert [scaler.step_taken(o) for o in (opt_scaling0, opt_scaling1)] == [True, index != skip]
        scaler.update()
    assert loss_scaled.close(scaling0, control0, 5e-3)
    assert loss_scaled.close(scaling1, control1, 5e-3)
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5


# ---- what is compiled ----


def test_gradients_are_true_to_scale_the_moment_backward_returns() -> None:
    loop, x = Loop(), batch()
    loss = loss_of(loop.run, x)
    assert loop.scaler.scale(loss) is loss
    loss.backward()
    assert gradients_are(loop.model, x)
    assert {gradient(p).dtype for p in loop.model.parameters()} == {torch.float32}


@pytest.mark.usefixtures("op_by_op")
def test_tiny_gradients_arrive() -> None:
    torch.manual_seed(1)
    loop, x = Loop(init_scale=2.0**24), batch()

    def tiny(m: Callable[..., Tensor]) -> Tensor:
        return m(x).pow(2).mean() * 1e-9

    exact = loss_scaled.fp32_gradients(loop.model, tiny)
    assert max(value.abs().max() for value in exact) < 6e-8 / 10, "fp16 could hold these by itself"
    unscaled = Loop(copy.deepcopy(loop.model), name="off", enabled=False)
    for each in (loop, unscaled):
        each.backward(tiny(each.run))
    assert gradients_are(loop.model, tiny, error=0.05)
    assert not gradients_are(unscaled.model, tiny, error=0.9), "without scaling they do not"


@pytest.mark.usefixtures("op_by_op")
def test_the_scale_may_change_at_every_step_without_another_compile() -> None:
    loop = Loop(growth_interval=1)
    loop.step()
    counters.clear()
    assert all(loop.step() for _ in range(3))
    assert not counters["stats"]["unique_graphs"]
    assert loop.scaler.get_scale() == 128.0 * 2**4


@pytest.mark.slow
def test_caches_hit_and_know_the_names_of_parameters() -> None:
    for _ in range(2):
        counters.clear()
        torch._dynamo.reset()
        loop = Loop()
        loop.backward(bad=True)
        assert set(loop.scaler.first_nonfinite()) == set(PARAMETERS)
    found = counters["aot_autograd"]
    assert (found["autograd_cache_hit"], found["autograd_cache_bypass"]) == (1, 0)


@pytest.mark.usefixtures("op_by_op")
def test_an_update_between_a_forward_and_its_backward_changes_neither_network() -> None:
    loop, second, x = Loop(growth_interval=1), UpDown(), batch()
    losses = [loss_of(run, x) for run in (loop.run, compiled(second))]
    loop.backward(losses[0])
    assert gradients_are(loop.model, x)
    assert loop.end()
    assert loop.scaler.get_scale() == 256.0
    loop.backward(losses[1])
    assert gradients_are(second, x)


# ---- programs ----


def broken(m: Any, x: Tensor) -> Tensor:
    hidden = m.up(x).relu()
    torch._dynamo.graph_break()
    return m.down(hidden)


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.down(checkpoint(lambda value: m.up(value).relu(), x, use_reentrant=False))


#: what a model calls, and what is called instead of what is compiled of it
PROGRAMS: dict[str, tuple[Callable[..., Tensor], Callable[[Any], Any]]] = {
    "a graph break": (broken, lambda run: run),
    "checkpointed inside": (checkpointed, lambda run: run),
    "checkpointed from outside": (
        lambda m, x: m.down(m.up(x).relu()), lambda run: partial(checkpoint, run, use_reentrant=False)
    ),
}  # fmt: skip


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("program", "called"), PROGRAMS.values(), ids=PROGRAMS)
def test_programs_of_several_graphs(program: Callable[..., Tensor], called: Callable[[Any], Any]) -> None:
    loop, x = Loop(Parts(program, up=nn.Linear(8, 8), down=nn.Linear(8, 8))), batch()
    loop.backward(loss_of(called(loop.run), x))
    assert gradients_are(loop.model, x)
    assert loop.end()
    assert not loop.step(loss_of(called(loop.run), x * INF))
    assert set(loop.scaler.first_nonfinite()) == set(PARAMETERS)


@pytest.mark.usefixtures("op_by_op")
@fails_in("2.11", fault="no guard notices that a parameter is thawed")
def test_frozen_parameters() -> None:
    loop, x = Loop(), batch()
    loop.model.up.requires_grad_(False)
    assert loop.step()
    # thawed in the middle of training
    loop.model.up.requires_grad_(True)
    loop.backward(loss_of(loop.run, x))
    assert gradients_are(loop.model, x)


@pytest.mark.usefixtures("op_by_op")
def test_sparse_embedding_gradients_of_eager_code_are_read() -> None:
    table = nn.Embedding(10, 8, sparse=True)
    loop = Loop(optimizer=lambda own: torch.optim.SGD([*table.parameters(), *own], lr=0.1))
    for factor in (1.0, INF):
        loop.backward(loss_of(loop.run, table(torch.tensor([1, 1, 3])) * factor))
        assert gradient(table.weight).is_sparse
        assert loop.end() is (factor == 1.0)


@pytest.mark.slow
def test_sparse_gradients_of_tables_in_the_graph_are_true_to_scale() -> None:
    # compiled: op by op, sparse tensors can be divided
    table, bag = nn.Embedding(10, 8, sparse=True), nn.EmbeddingBag(10, 8, sparse=True, mode="sum")
    model = Parts(lambda m, x: m.up(m.table(x).sum(1) + m.bag(x)), table=table, bag=bag, up=nn.Linear(8, 8))
    loop, ids = Loop(model), torch.tensor([[1, 1, 3], [3, 7, 9]])
    loop.backward(loss_of(loop.run, ids))
    assert gradient(table.weight).is_sparse
    assert gradient(bag.weight).is_sparse
    assert gradients_are(model, ids)
    assert loop.end()


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.usefixtures("op_by_op")
def test_gradients_of_inputs_that_overlap_and_are_written_to_leave_with_their_true_size() -> None:
    """AOTAutograd gives the graph the base of such inputs instead, and the graph returns the base's gradient."""
    up, weight, x = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), torch.randn(6, 8)

    def head(rows: Tensor, last: Tensor) -> Tensor:
        rows.mul_(0.5)
        return (F.linear(rows * 1.0, weight).sum(0) + F.linear(last * 1.0, weight)[0]).sum()

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        hidden = up(x) * 1.0
        return list(torch.autograd.grad(run(hidden, hidden[-1:]), [up.weight, weight]))

    scaler, run = new_scaler(), compiled(head)
    for found, exact in zip(gradients(run), gradients(head), strict=True):
        assert (found - exact).norm() < 5e-3 * exact.norm()
    assert scaler.get_scale() == 128.0


def test_a_gradient_penalty_on_the_eager_part_works_and_on_the_graph_is_an_error() -> None:
    loop, x, head = Loop(), batch().requires_grad_(), nn.Linear(8, 1)

    def penalized(net: Callable[..., Tensor]) -> Tensor:
        features = net(x).detach().requires_grad_()
        (own,) = torch.autograd.grad(head(features).pow(2).sum(), features, create_graph=True)
        return loss_of(net, x) + own.pow(2).sum()

    loop.backward(penalized(loop.run))
    assert gradients_are(loop.model, penalized)
    assert loop.end()
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False):
        (own,) = torch.autograd.grad(loop.scaler.scale(loss_of(loop.run, x)), x, create_graph=True)
        with pytest.raises(SecondDerivativeError):
            own.pow(2).sum().backward()


@pytest.mark.usefixtures("op_by_op")
def test_dynamic_shapes() -> None:
    model, scaler = UpDown(), new_scaler()
    own = torch.compile(model, backend="amp_fx", dynamic=True, options=OPTIONS)
    for rows in (4, 8):
        x = torch.randn(rows, 8)
        model.zero_grad()
        scaler.scale(loss_of(own, x)).backward()
        assert gradients_are(model, x)


@pytest.mark.usefixtures("op_by_op")
def test_a_graph_without_parameters_hands_gradients_through() -> None:
    scaler, x = new_scaler(), batch().requires_grad_()
    eager = nn.Linear(8, 8)
    own = compiled(lambda value: value @ value)
    scaler.scale(own(eager(x)).mean()).backward()
    assert gradients_are(eager, lambda m: (m(x) @ m(x)).mean())
    scaler.step(torch.optim.SGD(eager.parameters()))


# ---- cost ----


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_scaling_adds_no_kernel_and_next_to_no_bytes_to_the_graphs(kind: str) -> None:
    from benchmarks.counts import counting

    first = nn.Linear(256, 256) if kind == "linear" else nn.Embedding(2000, 256)
    x = torch.randn(32, 256) if kind == "linear" else torch.randint(0, 2000, (32,))

    def counts(scaler: str | None) -> tuple[int, int]:
        torch._dynamo.reset()
        model = nn.Sequential(first, nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        with counting() as counter:
            compiled(model, scaler=scaler)(x).sum().backward()
        return counter.total.bytes_moved, counter.total.kernels

    keep = new_scaler()
    (moved, kernels), (stock, stock_kernels) = counts(keep.name), counts(None)
    assert 0 < moved <= 1.001 * stock
    assert kernels == stock_kernels


def test_no_values_are_made_while_a_graph_is_compiled() -> None:
    graph = fx.symbolic_trace(UpDown())
    mode = FakeTensorMode()
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = mode.from_tensor(batch())
    parameter = nn.Parameter(torch.ones(8, 8))
    extended, (_, scale) = ScaledGraph.of(graph, [parameter], "default").extend(graph, [parameter])
    assert isinstance(scale, FakeTensor)
    assert scale.fake_mode is mode
    assert [n.name for n in extended.graph.find_nodes(op="placeholder")] == ["x", "amp_fx_scale"]
    # nor are they looked for when it is called with fake values, as by DDPOptimizer and by targets
    scaled = ScaledGraph("nobody's", 1, (), 0, (), torch.device("cpu"))
    (_, scale) = scaled.bind(lambda *args: args)(mode.from_tensor(batch()))
    assert scale.fake_mode is mode
