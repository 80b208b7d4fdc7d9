"""What a program only implies about dtypes is written down before anything is re-typed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from amp_fx.passes import PinDtypes
from graphs import check, run_until

aten = torch.ops.aten
BF16 = torch.bfloat16


def pinned(program: Callable[..., object], *args: Tensor) -> fx.GraphModule:
    return run_until(PinDtypes, program, *args).gm


@pytest.mark.parametrize(
    "create",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.full_like(x, 2.0),
        lambda x: torch.randint_like(x, 9),
        lambda x: x.new_zeros(3),
        lambda x: x.new_ones(3),
        lambda x: x.new_full((3,), 1.5),
        lambda x: x.new_empty(3),
    ],
)
def test_creation_after_a_tensor_names_its_dtype(create: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor) -> Tensor:
        return create(x)

    gm = pinned(program, torch.randn(4))
    (node,) = gm.graph.find_nodes(op="output")[0].all_input_nodes
    assert node.kwargs["dtype"] is torch.float32


def test_a_dtype_that_the_program_gave_stays() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=BF16)

    (node,) = pinned(program, torch.randn(4)).graph.find_nodes(
        op="call_function", target=aten.zeros_like.default
    )
    assert node.kwargs["dtype"] is BF16


def test_integers_are_left_alone() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    gm = pinned(program, torch.ones(4, dtype=torch.int64))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.zeros_like.default)
    assert "dtype" not in node.kwargs


@pytest.mark.parametrize(
    "convert",
    [
        lambda y, x: y.type_as(x),
        lambda y, x: y.to(x.dtype),
        lambda y, x: y.float(),
        lambda y, x: y.type(torch.float32),
    ],
    ids=["type_as", "dtype", "float", "type"],
)
def test_every_conversion_becomes_the_one_form(convert: Callable[[Tensor, Tensor], Tensor]) -> None:
    def program(y: Tensor, x: Tensor) -> Tensor:
        return convert(y, x)

    gm = pinned(program, torch.randn(4, dtype=torch.float64), torch.randn(4))
    (node,) = gm.graph.find_nodes(op="output")[0].all_input_nodes
    assert node.target is aten.to.dtype
    assert node.args[1] is torch.float32


def test_a_move_to_a_device_names_its_dtype_too() -> None:
    def program(y: Tensor, x: Tensor) -> Tensor:
        return y.to(x)

    gm = pinned(program, torch.randn(4, dtype=torch.float64), torch.randn(4))
    (node,) = gm.graph.find_nodes(op="output")[0].all_input_nodes
    assert torch.float32 in node.args


def test_what_follows_a_retyped_tensor_keeps_its_traced_dtype() -> None:
    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.matmul(x, w)
        return torch.zeros_like(h), y.to(torch.float64).type_as(h)

    x = torch.randn(4, 4)
    check(program, x, x.clone(), x.clone(), casts={("float32", "bfloat16"): 2}, reference=torch.float32)
