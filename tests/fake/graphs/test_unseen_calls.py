"""Calls that no dispatcher sees, and what stays as it is in the user's autocast: captured with no warning.

``.data``, tensors that wrap others, functions with a backward of their own, functorch regions. Each is held against
eager execution and fp64, as in ``test_hard_graphs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor

from amp_fx import record
from support.checks.whole_program import agree
from support.models.small import Parts
from support.tracing.captured_graphs import DEFAULTS, plans, without_inductor

BF16 = torch.bfloat16
ONE_ROUNDING = 1e-2


def square(requires_grad: bool = False) -> Tensor:
    return torch.randn(4, 4, requires_grad=requires_grad)


# ---- .data ----


def average_is_assigned(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    m.average.data = m.average.data * 0.9 + y.mean(0).detach() * 0.1
    return y


def average_is_written(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    m.average.data.mul_(0.9).add_(y.mean(0).detach(), alpha=0.1)
    return y - m.average


def average_is_copied(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    m.average.data.copy_(y.data.mean(0))
    return y


def weight_is_normed(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data.div_(m.linear.weight.data.norm(dim=1, keepdim=True))
    return m.linear(x)


def weight_is_assigned(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data = F.normalize(m.linear.weight.data, dim=1)
    return m.linear(x)


def codebook_is_written(m: Any, x: Tensor) -> Tensor:
    z = m.linear(x)
    # far from each other, so that rounding chooses no other code
    codes = F.one_hot(torch.arange(4) % 2, 2).to(z.dtype)
    m.codebook.data.mul_(0.9).add_(codes.t() @ z.detach(), alpha=0.1)
    return z + (codes @ m.codebook - z).data


MODULES = [
    average_is_assigned, average_is_written, average_is_copied, weight_is_normed, weight_is_assigned,
    codebook_is_written,
]  # fmt: skip


@pytest.mark.parametrize("forward", MODULES)
def test_what_a_module_reads_and_writes_through_data_is_as_eagerly(forward: Any) -> None:
    model = Parts(forward, linear=nn.Linear(4, 4))
    model.register_buffer("average", torch.zeros(4))
    model.register_buffer("codebook", torch.randn(2, 4))
    (plan,) = agree(model, square(), tolerance=ONE_ROUNDING)
    assert [row.dtype for row in plans(plan, "linear")] == [BF16]


def written_local(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.data.clamp_(-1, 1)
    return y @ w


def written_after_it_was_saved(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).tanh()
    y.data.mul_(2)
    return y @ w


def written_through_a_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    v = y.data.t()
    v.data.clamp_(-1, 1)
    return y @ w, v


def copied_into_a_row(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y[0].data.copy_(w[0])
    return y @ w


def read_before_a_write(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    seen = y.data
    y.clamp_(-1, 1)
    return y @ w, seen * 2


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y.data, y @ w


def straight_through(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y + (y.tanh().data - y.data)


# no .data, and the same fault: a view of what has its traced dtype was a view of something else
def written_where_autocast_is_off(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with torch.autocast("cpu", enabled=False):
        y.view(-1).clamp_(-1, 1)
    return y @ w


@pytest.mark.parametrize(
    "program",
    [
        written_local, written_after_it_was_saved, written_through_a_view, copied_into_a_row, read_before_a_write,
        returned, straight_through, written_where_autocast_is_off,
    ],
)  # fmt: skip
def test_writes_through_data_reach_the_value(program: Callable[..., Any]) -> None:
    (plan,) = agree(program, square(True), square(True), tolerance=ONE_ROUNDING)
    assert {row.dtype for row in plans(plan, "matmul")} == {BF16}


# ---- tensors that wrap others ----


def made_plain(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.plain(x), m.weight).a  # pyright: ignore


def transposed(m: Any, x: Tensor) -> Tensor:
    return (m.plain(x) @ m.weight.t()).b


def read_by_part(m: Any, x: Tensor) -> Tensor:
    return m.plain(x) @ m.weight.a


def added(m: Any, x: Tensor) -> Tensor:
    return (m.plain(x) + m.weight).a


def multiplied_twice(m: Any, x: Tensor) -> Tensor:
    return m.plain(F.linear(F.linear(m.plain(x), m.weight), m.weight).b)  # pyright: ignore


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
@pytest.mark.parametrize("forward", [made_plain, transposed, read_by_part, added, multiplied_twice])
def test_one_wrapped_weight_leaves_the_rest_of_a_model_low(forward: Any, ambient: Any) -> None:
    model = Parts(forward, plain=nn.Linear(4, 4))
    weight = TwoTensor(*(2 * [torch.randn(4, 4)]))
    model.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    x = square()
    expected = model(x)
    with without_inductor(), record() as recording, torch.autocast("cpu", BF16, enabled=ambient is not None):
        run = torch.compile(model, backend="amp_fx", options=dict(DEFAULTS))
        got, eager = run(x), model(x)
    assert (type(got), got.dtype) == (Tensor, eager.dtype)
    assert (got - expected).norm() <= 2 * ONE_ROUNDING * expected.norm()
    (plan,) = recording.plans
    assert BF16 in [row.dtype for row in plans(plan, "linear")]
    # an attribute of what wraps others has no gradient
    assert got.requires_grad is eager.requires_grad


# ---- what stays as it is, in the user's autocast ----


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return gradient @ w.mT, x.mT @ gradient


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s * (1 + x * (1 - s)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_function_without_custom_fwd_trains_in_the_users_autocast(where: str) -> None:
    """Eagerly its backward raises, as it multiplies bf16 and fp32."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return Product.apply(x @ w, w) @ w

    x, w = square(True), square(True)
    with without_inductor(), torch.autocast("cpu", BF16, enabled=where == "around"):
        got = torch.compile(program, backend="amp_fx", options=dict(DEFAULTS))(x, w)
    assert got.dtype is BF16
    found = torch.autograd.grad(got.float().square().sum(), (x, w))
    exact = [value.detach().double().requires_grad_() for value in (x, w)]
    wanted = torch.autograd.grad((exact[0] @ exact[1] @ exact[1] @ exact[1]).square().sum(), exact)
    for gradient, right in zip(found, wanted, strict=True):
        assert (gradient - right).norm() < 3 * ONE_ROUNDING * right.norm()


IN_AUTOCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function of elements": lambda x, w: Swish.apply(x @ w) @ w,
    "vmap": lambda x, w: torch.vmap(lambda row: row @ w)(x) @ w,
    "grad": lambda x, w: torch.func.grad(lambda y: (y @ w).tanh().sum())(x) @ w,
    "per-sample gradients": lambda x, w: torch.vmap(torch.func.grad(lambda row: (row @ w).square().sum()))(x) @ w,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", IN_AUTOCAST)
def test_what_stays_as_it_is_takes_the_users_autocast_along(name: str) -> None:
    (plan,) = agree(IN_AUTOCAST[name], square(True), square(True), ambient=BF16, tolerance=ONE_ROUNDING)
    assert plans(plan, "matmul")[-1].dtype is BF16


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@torch.no_grad()
def test_flex_attention_in_the_users_autocast_leaves_the_products_around_it_low() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).view(1, 2, 16, 16)
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score - (i - j).abs())  # pyright: ignore[reportReturnType]

    (plan,) = agree(program, torch.randn(32, 16), torch.randn(16, 16), ambient=BF16, tolerance=ONE_ROUNDING)
    assert [row.dtype for row in plans(plan, "matmul")] == [BF16]
