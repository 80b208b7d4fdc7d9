"""The table of what is known of single ops, held against the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from amp_fx._torch import OpOverload
from amp_fx.graphs.fake_runs import is_matmul, matmul_flops
from amp_fx.graphs.traits import OPS, Trait, has_trait, op_row
from amp_fx.placement.layout import convert_op
from graphs import captured

aten = torch.ops.aten


def overloads(name: str) -> list[OpOverload]:
    """The overloads that a row is about."""
    namespace, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base)
    names = packet.overloads() if overload == "*" else [overload or "default"]
    return [getattr(packet, each) for each in names]


def test_a_row_is_about_an_op_of_torch_whose_arguments_it_names() -> None:
    # torch knows it once a graph needs it
    convert_op()
    for name, row in OPS.items():
        for op in overloads(name):
            arguments = [argument.name for argument in op._schema.arguments]
            assert {*row.writes, row.writes_if, row.addend} - {""} <= set(arguments), op
            assert row.rows is None or row.rows < len(arguments), op
            assert not name.endswith(".*") or all(has_trait(op, trait) for trait in row.traits), op


def test_a_row_says_something() -> None:
    assert not [name for name, row in OPS.items() if row == op_row("no op of this name")]


def test_the_in_place_form_has_the_traits_of_all_overloads_and_no_others() -> None:
    assert has_trait(aten.relu_.default, Trait.RELU)
    assert has_trait(aten.hardtanh_.default, Trait.KINK)
    assert has_trait(aten.add_.Tensor, Trait.ADDS_EPS)
    assert not has_trait(aten.add_.Tensor, Trait.LINEAR)
    assert not has_trait(aten.mean.dim, Trait.LINEAR)


def test_a_call_is_asked_by_node_by_overload_and_by_the_name_in_a_plan() -> None:
    graph = fx.Graph()
    x = graph.placeholder("mm")
    call = graph.call_function(aten.transpose.int, (x, 0, 1))
    asked: list[Any] = [call, aten.transpose.int, "transpose.int"]
    assert all(has_trait(each, Trait.CAST, Trait.RESHAPES) for each in asked)
    # an input's target is its name; a method's is one of torch's
    method = graph.call_method("relu", (x,))
    assert not any(has_trait(each, *Trait) for each in (x, method, torch.relu, None))


def test_one_row_makes_a_matmul_in_captured_graphs_and_by_the_names_inside_vmap() -> None:
    for name, row in OPS.items():
        if Trait.MATMUL in row.traits:
            node = fx.Graph().call_function(overloads(name)[0])
            assert is_matmul(node)
            assert has_trait(name.partition(".")[0], Trait.MATMUL)


@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        (F.linear, ((2, 3, 4), (5, 4))),
        (torch.addmm, ((5,), (3, 4), (4, 5))),
        (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
        (lambda x, w: F.conv2d(x, w, groups=2), ((2, 4, 8, 8), (6, 2, 3, 3))),
        (F.scaled_dot_product_attention, ((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))),
    ],
    ids=["linear", "addmm", "baddbmm", "conv2d", "attention"],
)
def test_operations_are_those_that_torch_counts(
    program: Callable[..., torch.Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    given = [torch.randn(shape, device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        program(*given)
    gm = captured(program, *map(torch.randn, shapes))
    assert (
        sum(matmul_flops(node) for node in gm.graph.nodes if is_matmul(node)) == counter.get_total_flops() > 0
    )
