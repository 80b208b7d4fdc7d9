"""The table of what is known of single ops, held against the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from amp_fx._torch import OpOverload, convert_op
from amp_fx.graphs.fake_runs import is_matmul, known_flops, matmul_flops
from amp_fx.graphs.traits import OPS, Trait, has_trait, op_row
from amp_fx.precision.policy import table
from support.ops.listed_ops import arguments, overload, run
from support.tracing.captured_graphs import captured

aten = torch.ops.aten


def overloads(name: str) -> list[OpOverload]:
    """The overloads that a row is about."""
    base, _, which = name.partition(".")
    if which != "*":
        return [overload(name)]
    packet = getattr(aten, base)
    return [getattr(packet, each) for each in packet.overloads()]


def test_a_row_says_something_about_an_op_of_torch_and_its_arguments() -> None:
    # torch knows it once a graph needs it
    convert_op()
    for name, row in OPS.items():
        assert row != op_row("no op of this name"), f"{name} says nothing"
        for op in overloads(name):
            arguments = [argument.name for argument in op._schema.arguments]
            assert {*row.writes, row.writes_if, row.addend} - {""} <= set(arguments), op
            assert row.rows is None or row.rows < len(arguments), op
            assert not name.endswith(".*") or all(has_trait(op, trait) for trait in row.traits), op


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


def test_the_operations_of_a_listed_matmul_are_counted_and_nobody_counts_those_of_an_uncounted_one() -> None:
    for name in {*table.rows_of("cpu"), *table.rows_of("cuda")}:
        # torch has no formula of bilinear
        if "::" in name or name == "bilinear":
            continue
        op = overload(name)
        if has_trait(op, Trait.MATMUL, Trait.UNCOUNTED_MATMUL):
            call = arguments(name)
            with FlopCounterMode(display=False) as counter:
                result = run(name, call)
            flops = known_flops(op.__name__, call[0], result) or counter.get_total_flops()
            assert bool(flops) == has_trait(op, Trait.MATMUL), name


#: name -> operation, shapes of its arguments
OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((2, 3, 4), (5, 4))),
    "addmm": (torch.addmm, ((5,), (3, 4), (4, 5))),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "conv2d": (lambda x, w: F.conv2d(x, w, groups=2), ((2, 4, 8, 8), (6, 2, 3, 3))),
    "attention": (F.scaled_dot_product_attention, ((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_that_torch_counts(name: str) -> None:
    program, shapes = OPERATIONS[name]
    given = [torch.randn(shape, device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        program(*given)
    gm = captured(program, *map(torch.randn, shapes))
    flops = [matmul_flops(node) for node in gm.graph.nodes if is_matmul(node)]
    assert sum(flops) == counter.get_total_flops() > 0
