"""Second derivatives: outside of a compiled function they are an error, inside they are right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from amp_fx import SecondDerivativeError
from support.torch_versions import fails_in
from support.tracing.captured_graphs import DEFAULTS

BF16 = torch.bfloat16
Call = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("op_by_op")


@pytest.fixture(autouse=True)
def _gradients_in_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))


def compiled(run: Call, **options: Any) -> Call:
    return torch.compile(run, backend="amp_fx", options={**DEFAULTS, **options})


def rows() -> Tensor:
    return torch.randn(32, 16, requires_grad=True)


def slope(y: Tensor, x: Tensor, **given: Any) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True, **given)[0]


# ---- outside ----


def wgan(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    return net(x).mean() + 10 * (slope(net(x), x).norm(dim=1) - 1).square().mean()


def r1(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    real = x.detach().requires_grad_()
    return slope(net(real), real).square().sum(1).mean()


def forces(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    """The positions are in an eager graph of their own, of which the compiled part sees one value."""
    hidden = (x * 2).tanh()
    return (slope(net(hidden), x) + 1).square().mean()


def path_length(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    """StyleGAN 2: a penalty on the gradient by a value in between, which nothing else holds."""
    middle = x.sin()
    return slope(net(middle), middle, retain_graph=True).square().sum().sqrt()


def sobolev(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    y = net(x)
    return (y - x.sum(1, keepdim=True)).square().mean() + (slope(y, x) - 1).square().mean()


def a_hessian_times_a_vector(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    gradients = torch.autograd.grad(net(x).square().mean(), list(model.parameters()), create_graph=True)
    return torch.stack([value.sum() for value in gradients]).sum()


def a_meta_step(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(net(x).square().mean(), list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), found, strict=True)}
    return functional_call(model, moved, (x,)).square().mean()


def checkpointed(net: Call, x: Tensor, model: nn.Module) -> Tensor:
    return slope(checkpoint(net, x, use_reentrant=False), x).square().mean()


OUTSIDE = (wgan, r1, forces, path_length, sobolev, a_hessian_times_a_vector, a_meta_step, checkpointed)


TAKEN: dict[str, Callable[[Tensor, list[Tensor]], object]] = {
    "grad": lambda loss, weights: torch.autograd.grad(loss, weights, allow_unused=True),
    "backward": lambda loss, _: loss.backward(),
}


@pytest.mark.quick_rows("wgan-grad", "forces-backward", "sobolev-grad", "checkpointed-backward")
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("loss", OUTSIDE)
def test_outside_of_a_compiled_model_a_second_derivative_is_an_error(loss: Call, taken: str) -> None:
    model = mlp()
    found = loss(compiled(model), rows(), model)
    with pytest.raises(SecondDerivativeError, match=r"graph \d+/\d+ .*create_graph.*inside"):
        TAKEN[taken](found, list(model.parameters()))


@pytest.mark.parametrize("options", [{"profile": "auto"}, {"numerics": "eager"}, {"policy": "fast"}])
def test_so_it_is_with_other_options_and_where_nothing_is_cast(options: dict[str, Any]) -> None:
    model = mlp()
    found = wgan(compiled(model, **options), rows(), model)
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(found, list(model.parameters()), allow_unused=True)


def test_by_a_value_in_between_that_is_no_leaf_it_is_an_error_as_well() -> None:
    model, x = mlp(), rows()
    start = x * 1.0
    found = slope(compiled(model)((start * 2).cos()), start).square().sum()
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(found, start)


def test_each_part_of_a_model_with_a_graph_break_refuses() -> None:
    first, last = nn.Linear(16, 64), nn.Linear(64, 1)

    def model(x: Tensor) -> Tensor:
        hidden = first(x).tanh()
        torch._dynamo.graph_break()
        return last(hidden).square()

    x = rows()
    found = slope(compiled(model)(x), x).square().mean()
    for parameters in (first.parameters(), last.parameters()):
        with pytest.raises(SecondDerivativeError):
            torch.autograd.grad(found, list(parameters), retain_graph=True, allow_unused=True)


def test_graphs_from_the_cache_refuse_and_so_do_those_of_sparse_gradients() -> None:
    for _ in range(2):
        torch._dynamo.reset()
        table, head = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 1)
        net = compiled(lambda at, head=head, table=table: head(table(at)).square())
        found = torch.autograd.grad(net(torch.arange(8)).sum(), table.weight, create_graph=True)[0]
        assert found.is_sparse
        with pytest.raises(SecondDerivativeError):
            torch.autograd.grad(found.to_dense().square().sum(), head.weight)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@functorch_config.patch(donated_buffer=False)
@pytest.mark.parametrize("options", [{}, {"profile": "auto"}])
def test_a_graph_of_gradients_that_nobody_goes_back_through_changes_nothing(options: dict[str, Any]) -> None:
    model, x = mlp(), rows()
    wide = copy.deepcopy(model).double()
    exact = torch.autograd.grad(wide(x.double()).square().mean(), list(wide.parameters()))
    net = compiled(model, **options)
    plain = torch.autograd.grad(net(x).square().mean(), list(model.parameters()))
    found = torch.autograd.grad(net(x).square().mean(), list(model.parameters()), create_graph=True)
    assert all(value.requires_grad for value in found)
    for each, other, true in zip(found, plain, exact, strict=True):
        assert torch.equal(each, other)
        assert (each - true).norm() < 0.02 * true.norm()
    net(x).square().mean().backward(create_graph=True)
    assert torch.equal(next(model.parameters()).grad, plain[0])  # type: ignore[arg-type]  # not None
    # what is logged of them, and a loss that stands beside them
    scale = torch.ones((), requires_grad=True)
    (by_scale,) = torch.autograd.grad(sum(g.square().sum() for g in found) * scale, scale)
    assert by_scale > 0


# ---- inside ----


def penalty_by_func(model: nn.Module, x: Tensor) -> Tensor:
    found = grad(lambda value: model(value).sum())(x)
    return model(x).mean() + 10 * (found.norm(dim=1) - 1).square().mean()


def forces_by_func(model: nn.Module, x: Tensor) -> Tensor:
    found = vmap(grad(lambda row: model(row).sum()))(x)
    return (model(x).sum() / 64).square() + (found + 1).square().mean()


def forces_by_autograd(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = model(x).sum()
    (found,) = torch.autograd.grad(energy, x, create_graph=True)
    return (energy / 64).square() + (found + 1).square().mean()


def r1_by_autograd(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad([model(x).sum()], [x], create_graph=True)
    return found.square().sum(1).mean()


def of_a_hidden_value(model: nn.Module, x: Tensor) -> Tensor:
    first, rest = model[0], model[1:]  # type: ignore[index]  # a Sequential
    hidden = first(x)
    (found,) = torch.autograd.grad(rest(hidden).sum(), hidden, create_graph=True)
    return found.square().mean() + rest(hidden).square().mean()


def autocast(run: Call) -> Call:
    def call(*args: Any) -> Any:
        with torch.autocast("cpu", BF16):
            return run(*args)

    return call


BY_AUTOGRAD = fails_in("2.11", fault="no requires_grad_()")


@pytest.mark.parametrize(
    "loss",
    [
        penalty_by_func,
        forces_by_func,
        *(
            pytest.param(f, marks=BY_AUTOGRAD)
            for f in (forces_by_autograd, r1_by_autograd, of_a_hidden_value)
        ),
    ],
)
def test_inside_of_a_compiled_function_it_is_right_for_each_parameter(loss: Call) -> None:
    model, x = mlp(), rows().detach()

    def gradients(arm: Callable[[Call], Call], of: nn.Module, at: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(arm(loss)(of, at), list(of.parameters()), allow_unused=True))

    exact = gradients(lambda run: run, copy.deepcopy(model).double(), x.double())
    theirs, ours = gradients(autocast, model, x), gradients(compiled, model, x)
    for found, other, true in zip(ours, theirs, exact, strict=True):
        if true is None or not true.any():
            assert found is None or not found.any()
            continue
        assert (found - true).norm() <= max(1.05 * (other - true).norm(), 2e-3 * true.norm())
