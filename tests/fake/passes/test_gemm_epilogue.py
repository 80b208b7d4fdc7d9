"""The epilogue pass on joint graphs of fake CUDA tensors. End to end: tests/fake/targets, tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import expecttest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx._torch import FakeTensorMode
from amp_fx.graphs.keys import RESULT_MARK
from amp_fx.passes import GemmEpilogue, PassContext
from amp_fx.passes.base import mark
from graphs import calls_text

aten = torch.ops.aten
MM, BMM, ADDMM, BADDBMM = aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default
VIEW, ADD, PERMUTE = aten.view.default, aten.add.Tensor, aten.permute.default

PAIR = (8, 4), (4, 6)
BIASED = (6,), *PAIR
BATCHED = (2, 8, 4), (2, 4, 6)

Cases = Mapping[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]]


def joint_graph(
    program: Callable[..., object], shapes: tuple[tuple[int, ...], ...], device: str = "cuda"
) -> fx.GraphModule:
    """``program`` on bf16 inputs, as ATen, with fake values."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
        return make_fx(program)(*inputs)


def after(gm: fx.GraphModule, *own: object, marks: tuple[str, ...] = ()) -> str:
    """The calls after the pass; those of some targets come from one whose result a rule has in fp32."""
    for node in gm.graph.nodes:
        if node.target in own:
            mark(node, RESULT_MARK, "linear")
    GemmEpilogue(marks).call(gm, PassContext())
    gm.graph.lint()
    return calls_text(gm)


def widen(x: Tensor) -> Tensor:
    return torch.ops.prims.convert_element_type.default(x, torch.float32)


def test_a_result_that_is_only_widened_and_returned_leaves_the_matmul_in_fp32() -> None:
    cases: Cases = {
        "at once": (lambda g, x: widen(MM(g, x)), PAIR),
        "after a view": (lambda g, x: widen(PERMUTE(MM(g, x), [1, 0])), PAIR),
        "before a view": (lambda g, x: PERMUTE(widen(MM(g, x)), [1, 0]), PAIR),
        "batched": (lambda a, b: widen(BMM(a, b)), BATCHED),
        "twice": (lambda g, x: (lambda mm: (widen(mm), widen(mm)))(MM(g, x)), PAIR),
        # Inductor lowers no wide one
        "with a bias": (lambda *args: widen(ADDMM(*args)), BIASED),
        # its cast fuses with the reader
        "an activation": (lambda g, x: widen(MM(g, x)).exp(), PAIR),
        "also returned": (lambda g, x: (lambda wide: (wide, wide.exp()))(widen(MM(g, x))), PAIR),
        "read through a view": (
            lambda g, x: (lambda wide: (wide, VIEW(wide, [-1]).exp()))(widen(MM(g, x))),
            PAIR,
        ),
        "narrowed again": (lambda g, x: widen(MM(g, x)).to(torch.bfloat16), PAIR),
        "also read in 16 bits": (lambda g, x: (lambda mm: (widen(mm), mm))(MM(g, x)), PAIR),
    }
    found = [f"{name}: {after(joint_graph(*case))}" for name, case in cases.items()]
    found.append(f"on a CPU: {after(joint_graph(*cases['at once'], device='cpu'))}")
    expecttest.assert_expected_inline(
        "\n".join(found),
        """\
at once: mm.dtype:f32
after a view: mm.dtype:f32, permute:f32
before a view: mm.dtype:f32, permute:f32
batched: bmm.dtype:f32
twice: mm.dtype:f32
with a bias: addmm:bf16, convert:f32
an activation: mm:bf16, convert:f32, exp:f32
also returned: mm:bf16, convert:f32, exp:f32
read through a view: mm:bf16, convert:f32, view:f32, exp:f32
narrowed again: mm:bf16, convert:f32, _to_copy:bf16
also read in 16 bits: mm:bf16, convert:f32
on a CPU: mm:bf16, convert:f32""",
    )


def test_a_result_that_a_rule_has_in_fp32_is_rounded_for_nobody_who_widens_it() -> None:
    cases: Mapping[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[object, ...]]] = {
        "through a view": (lambda x, w: widen(VIEW(MM(x, w), [2, 4, 6])).exp(), PAIR, (MM, VIEW)),
        "with a bias": (lambda *args: widen(ADDMM(*args)).exp(), BIASED, (ADDMM,)),
        "batched, with a bias": (lambda *args: widen(BADDBMM(*args)), ((2, 8, 6), *BATCHED), (BADDBMM,)),
        "added to": (lambda x, w, b: widen(ADD(MM(x, w), b)).exp(), (*PAIR, (6,)), (MM, ADD)),
        "also read in 16 bits": (
            lambda x, w: (lambda mm: (widen(mm).exp(), mm.relu()))(MM(x, w)),
            PAIR,
            (MM,),
        ),
        "multiplied again": (lambda x, w, v: widen(MM(MM(x, w), v)), (*PAIR, (6, 4)), (MM,)),
    }
    found = [
        f"{name}: {after(joint_graph(program, shapes), *own, marks=('linear',))}"
        for name, (program, shapes, own) in cases.items()
    ]
    found.append(f"marks of others: {after(joint_graph(lambda x, w: widen(MM(x, w)).exp(), PAIR), MM)}")
    expecttest.assert_expected_inline(
        "\n".join(found),
        """\
through a view: mm.dtype:f32, view:f32, exp:f32
with a bias: mm.dtype:f32, convert:f32, add.Tensor:f32, exp:f32
batched, with a bias: bmm.dtype:f32, convert:f32, add.Tensor:f32
added to: mm.dtype:f32, convert:f32, add.Tensor:f32, exp:f32
also read in 16 bits: mm.dtype:f32, convert:bf16, exp:f32, relu:bf16
multiplied again: mm.dtype:f32, convert:bf16, mm.dtype:f32
marks of others: mm:bf16, convert:f32, exp:f32""",
    )
