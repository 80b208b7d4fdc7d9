"""Values that capture takes from Dynamo as they are, and whose shape the program then changes in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.checks.whole_program import agree
from support.tracing.captured_graphs import plans

ONE_ROUNDING = 1e-2

#: what makes a value of 1 x 4, read from the example that Dynamo left of it
MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": torch.vmap(torch.sin),
    "nested vmap": torch.vmap(torch.vmap(torch.sin)),
    "grad": torch.func.grad(lambda t: t.square().sum()),
    "vjp": lambda t: torch.func.vjp(torch.sin, t)[1](t)[0],
    "vmap of grad": torch.vmap(torch.func.grad(lambda t: t.square().sum())),
    "changed inside, too": torch.vmap(lambda t: t.sin().unsqueeze_(0).squeeze_(0)),
    "jvp": lambda t: torch.func.jvp(torch.sin, (t,), (t,))[1],
    "cond": lambda t: torch.cond(t.sum() > 0, torch.sin, torch.cos, (t,)),
    "checkpoint": lambda t: checkpoint(torch.sin, t, use_reentrant=False),
    "one result of several": lambda t: checkpoint(lambda u: (u.cos(), u.sin()), t, use_reentrant=False)[1],
}

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.squeeze_(),
    "squeeze_ of a dimension": lambda y: y.squeeze_(0),
    "t_": lambda y: y.t_(),
    "transpose_": lambda y: y.transpose_(0, 1),
    "swapaxes_": lambda y: y.swapaxes_(0, 1),
    "swapdims_": lambda y: y.swapdims_(0, 1),
    "as_strided_": lambda y: y.as_strided_((2, 2), (2, 1)),
    "a function": lambda y: Tensor.unsqueeze_(y, 1),
    "twice": lambda y: y.unsqueeze_(0).transpose_(0, 2),
}


def changed(make: str, change: str, *, dynamic: bool | None = None) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = MAKERS[make](x)
        z = b.clone().add_(y)
        CHANGES[change](y)
        return z @ w, y, y * 2

    x, w, b = torch.randn(1, 4), torch.randn(4, 4, requires_grad=True), torch.randn(1, 4)
    (plan,) = agree(program, x, w, b, tolerance=ONE_ROUNDING, dynamic=dynamic)
    assert {row.dtype for row in plans(plan, "matmul")} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", MAKERS)
def test_a_value_is_read_in_the_shape_that_it_had_before_it_was_changed(make: str) -> None:
    changed(make, "t_")


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_shape_changes_it_from_there_on(change: str) -> None:
    changed("vmap", change)
    changed("checkpoint", change)


def test_a_shape_of_unknown_sizes_is_changed_in_place() -> None:
    changed("vmap", "transpose_", dynamic=True)
