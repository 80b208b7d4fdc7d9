"""Where values are stored: what the lists fix, and what may move without losing accuracy.

Only what every allowed placement has in common, or what is strictly cheapest, is asserted here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.plans.label import Kind
from checks import checked
from graphs import rewrite

BF16 = torch.bfloat16
DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")


def square() -> Tensor:
    return torch.randn(8, 8)


@checked(
    square(),
    square(),
    casts={DOWN: 2, UP: 1},
    dtypes={"matmul": "bfloat16", "gelu": "bfloat16", "mul": "bfloat16"},
)
def test_arithmetic_between_two_matmuls_stays_low(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(F.gelu(torch.matmul(x, w)) * 2, w)


@checked(square(), square(), casts={DOWN: 2}, dtypes={"add": "float32", "matmul": "bfloat16"})
def test_arithmetic_with_an_fp32_value_is_in_fp32(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.matmul(x, w)


@checked(square(), square(), casts={DOWN: 2, UP: 1}, dtypes={"flip": "float32", "exp": "float32"})
def test_a_move_whose_readers_want_fp32_stays_in_fp32(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    moved = x.mT.flip(0)
    return moved.exp(), torch.matmul(moved, w)


@checked(square(), square(), casts={DOWN: 2}, dtypes={"cat": "float32"})
def test_joined_values_are_in_the_widest_dtype(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x, torch.matmul(x, w)]).exp()


def test_softmax_follows_its_devices_list() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(F.softmax(torch.matmul(q, k), -1), v)

    tensors = [square() for _ in range(3)]
    assert rewrite(program, *tensors, device="cpu").dtypes("softmax") == ["bfloat16"]
    on_cuda = rewrite(program, *tensors, device="cuda")
    assert on_cuda.dtypes("softmax") == ["float32"]
    assert on_cuda.dtypes("matmul") == ["bfloat16"] * 2


def test_a_view_is_where_autocast_has_it_if_both_cost_the_same() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(x, w).view(4, 16).exp().view(8, 8), w)

    rewritten = rewrite(program, square(), square(), device="cuda")
    assert rewritten.dtypes("view") == ["bfloat16", "float32"]


def test_the_plan_says_why_a_value_is_where_it_is() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w[:, None].expand(2, 4, 8).reshape(8, 8))

    rewritten = rewrite(program, square(), torch.randn(2, 8))
    assert rewritten.one("expand").is_because(Kind.CHEAPER)


def test_eager_numerics_keep_autocasts_placement() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def model(x: Tensor, table: Tensor) -> Tensor:
        h = F.gelu(first(x))
        h = h.mul(2.0) - h.sigmoid()
        return second(h) + table.mT.flip(0)

    x, table = square(), square()
    pinned = rewrite(model, x, table, options={"numerics": "eager"})
    assert pinned.dtypes("gelu") == pinned.dtypes("mul") == pinned.dtypes("sigmoid") == ["bfloat16"]
    assert pinned.dtypes("flip") == ["float32"]
    with torch.autocast("cpu", BF16):
        theirs = model(x, table)
    # the same placement, so the same bits
    assert torch.equal(pinned.outputs, theirs.float())


def test_eager_numerics_round_where_autocast_rounds_at_the_end_of_a_graph() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.softmax(F.layer_norm(torch.matmul(x, w), (8,)).exp() * 3.0, -1)

    x, w = square(), square()
    pinned = rewrite(program, x, w, options={"numerics": "eager", "dtype": "bfloat16"})
    with torch.autocast("cpu", BF16):
        theirs = program(x, w)
    assert theirs.dtype is BF16
    assert torch.equal(pinned.outputs, theirs.float())
