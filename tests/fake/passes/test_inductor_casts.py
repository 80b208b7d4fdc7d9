"""Passes on casts in Inductor's graphs, on what AOTAutograd hands to it. End to end: tests/cpu/targets, tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import amp_fx.compiler.compiling
from amp_fx._torch import FakeTensorMode
from amp_fx.compiler.notices import only_looking
from amp_fx.graphs.keys import RESULT_MARK
from amp_fx.passes import GemmEpilogue, PassContext, WriteCasts
from amp_fx.passes.base import mark
from support.tracing.captured_graphs import DEFAULTS, calls_text, op_by_op

aten, prims = torch.ops.aten, torch.ops.prims
LOWS = torch.bfloat16, torch.float16
ROWS, CLASSES = 12, 40
X, W, SCALE = torch.randn(ROWS, 16), torch.randn(16, 16) / 4, torch.rand(16) + 0.5
HEAD, LABELS = torch.randn(16, CLASSES) / 4, torch.arange(ROWS)


Program = Callable[..., Any]


def compiled(program: Program, *args: Tensor, **options: Any) -> tuple[list[fx.GraphModule], list[Tensor]]:
    """Graphs after partitioning; and results and gradients of the last one's sum, computed op by op."""
    torch._dynamo.reset()
    leaves = [arg.clone().requires_grad_() for arg in args]
    with op_by_op() as found, only_looking():
        results = torch.compile(program, backend="amp_fx", options={**DEFAULTS, **options})(*leaves)
        results[-1].sum().backward()
    return found, [*results, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def kept(forward: fx.GraphModule, size: int) -> list[torch.dtype]:
    """Dtypes of what a forward graph returns, or keeps for the backward, and has this number of elements."""
    values = [node.meta["val"] for node in forward.graph.output_node().all_input_nodes]
    return [value.dtype for value in values if value.numel() == size]


def converted(gm: fx.GraphModule) -> list[Tensor]:
    """What casts make."""
    target = prims.convert_element_type.default
    return [node.meta["val"] for node in gm.graph.find_nodes(op="call_function", target=target)]


def without_passes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(amp_fx.compiler.compiling, "joint_passes", lambda *_args, **_given: ())


# ---- statistics of norms stay in fp32: a number a row, beside the norm's input all that is kept of it ----


def layer_norm(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ((F.layer_norm(x @ w, (16,), scale, None) @ w).float().square(),)


def group_norm(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    h = F.group_norm((x @ w).unflatten(0, (3, 4)), 4, scale[:4], None).flatten(0, 1)
    return ((h @ w).float().square(),)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("program", [layer_norm, group_norm])
def test_a_low_norm_keeps_its_statistics_in_fp32(program: Program, dtype: str) -> None:
    graphs, (_, *gradients) = compiled(program, X, W, SCALE, dtype=dtype, policy="fast")
    assert kept(graphs[0], ROWS) == [torch.float32] * 2
    for gm in graphs:
        gm.graph.lint()
    # the norm itself did run low
    assert any(value.dtype in LOWS and value.numel() > ROWS for value in converted(graphs[0]))
    exact = [arg.double().requires_grad_() for arg in (X, W, SCALE)]
    program(*exact)[-1].sum().backward()
    for found, true in zip(gradients, exact, strict=True):
        assert true.grad is not None
        assert (found - true.grad).norm() < 0.02 * true.grad.norm()


def test_without_the_pass_the_statistics_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    without_passes(monkeypatch)
    (forward, _), _ = compiled(layer_norm, X, W, SCALE, policy="fast")
    assert set(kept(forward, ROWS)) == {torch.bfloat16}


def test_a_statistic_that_the_program_rounds_itself_stays_rounded() -> None:
    def by_hand(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        h = F.layer_norm(x @ w, (16,), scale, None) @ w
        mean = h.mean(-1, keepdim=True).to(torch.bfloat16)
        return (((h - mean) * mean).float().square(),)

    (forward, _), _ = compiled(by_hand, X, W, SCALE, policy="fast")
    assert sorted(map(str, kept(forward, ROWS))) == ["torch.bfloat16", "torch.float32", "torch.float32"]


# ---- what is returned is kept apart from what the graph reads ----


def logits_and_loss(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ w
    return logits, F.cross_entropy(logits, LABELS)


@pytest.mark.parametrize("numerics", ["compiled", "eager"])
def test_loss_and_backward_read_the_low_logits(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (forward, backward), results = compiled(logits_and_loss, X, HEAD, numerics=numerics)
    assert kept(forward, ROWS * CLASSES) == [torch.float32, torch.bfloat16]
    inputs = [n.meta["val"] for n in backward.graph.find_nodes(op="placeholder") if "tangents" not in n.name]
    assert torch.float32 not in {value.dtype for value in inputs if value.numel() == ROWS * CLASSES}
    without_passes(monkeypatch)
    (forward, _), before = compiled(logits_and_loss, X, HEAD, numerics=numerics)
    assert kept(forward, ROWS * CLASSES) == [torch.float32]
    assert all(map(torch.equal, results, before))


def test_a_matmul_in_fp32_reads_what_is_returned() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ w
        return hidden, torch.addmm(X[:, :1], hidden, w.t())

    rules = {"rules": [{"op": "addmm", "precision": "fp32"}]}
    (forward, _), _ = compiled(program, X, HEAD, policy=rules)
    assert kept(forward, ROWS * CLASSES) == [torch.float32]


def test_results_that_share_memory_still_do() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ w
        return logits, logits.view(-1, 2), F.cross_entropy(logits, LABELS)

    (forward, _), (logits, pairs, *_) = compiled(program, X, HEAD)
    assert logits.untyped_storage().data_ptr() == pairs.untyped_storage().data_ptr()
    # nor is the memory written twice
    wide = [value.numel() for value in converted(forward) if value.dtype is torch.float32]
    assert wide.count(ROWS * CLASSES) == 1


# ---- on CUDA, casts are written before they are viewed ----

STREAM, WEIGHT = (2, 4, 8), (8, 8)


def low(x: Tensor) -> Tensor:
    return prims.convert_element_type.default(x, torch.bfloat16)


def rows(x: Tensor) -> Tensor:
    return aten.view.default(x, [8, 8])


def copies(x: Tensor) -> Tensor:
    return aten.clone.default(aten.expand.default(low(aten.unsqueeze.default(x, 1)), [2, 3, 4, 8]))


def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A stream's gradient is multiplied by the weight and by what the forward saved, and goes on in fp32."""
    total = x + 1
    viewed = rows(low(total))
    return viewed @ w, aten.permute.default(viewed, [1, 0]) @ w, total * 2


def test_which_casts_are_written_before_they_are_viewed() -> None:
    #: programs of a stream in fp32, unless said, and a weight in bf16
    cases: dict[str, Callable[[Tensor, Tensor], object]] = {
        "a low copy of what goes on in fp32": gradient,
        "what is repeated": lambda x, w: copies(x + 1),
        "not shared": lambda x, w: rows(low(x + 1)) @ w,
        "an input": lambda x, w: (rows(low(x)) @ w, x * 2),
        "no view": lambda x, w: (aten.bmm.default(low(total := x + 1), w.expand(2, 8, 8)), total * 2),
        "not multiplied": lambda x, w: (rows(low(total := x + 1)) * 2, total * 2),
        "also read as it is": lambda x, w: (rows(cast := low(total := x + 1)) @ w, cast * 2, total * 2),
        "not contiguous": lambda x, w: (aten.reshape.default(low(y := x.mT + 1), [8, 8]) @ w, y * 2),
        "repeated in registers": lambda x, w: (
            aten.expand.default(low(aten.slice.Tensor(x, 1, 0, 1) + 1), list(STREAM)) * 2
        ),
        "a repeated input": lambda x, w: copies(x),
        "a widening cast of a bf16 stream": lambda x, w: (rows((y := x + 1).float()) @ w.float(), y * 2),
        "a low copy, on a CPU": gradient,
        "an inverse deviation, on a CPU": lambda x, _w: x * (x * x).sum(-1, True).rsqrt(),
        "roots of elements, on a CPU": lambda x, _w: x * (x * x).rsqrt(),
        "returned deviations, on a CPU": lambda x, _w: (x * x).sum(-1, True).rsqrt(),
        "returned roots, on a CPU": lambda x, _w: x.rsqrt(),
        "an inverse deviation": lambda x, _w: x * (x * x).sum(-1, True).rsqrt(),
    }
    found: dict[str, int] = {}
    for name, program in cases.items():
        device = "cpu" if "CPU" in name else "cuda"
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        with FakeTensorMode():
            weight = torch.empty(WEIGHT, dtype=torch.bfloat16, device=device)
            gm = make_fx(program)(torch.empty(STREAM, dtype=dtype, device=device), weight)
        code, before = gm.graph.python_code("self").src, {node: {*node.meta} for node in gm.graph.nodes}
        WriteCasts().call(gm, PassContext())
        assert gm.graph.python_code("self").src == code
        if marked := sum(node.meta.keys() != keys for node, keys in before.items()):
            found[name] = marked
    rows_of_cpu = dict.fromkeys(("an inverse deviation, on a CPU", "returned deviations, on a CPU"), 1)
    assert found == {"a low copy of what goes on in fp32": 1, "what is repeated": 1, **rows_of_cpu}


# ---- on CUDA, matmuls leave results in fp32 that are only widened ----

MM, BMM, ADDMM, BADDBMM = aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default
VIEW, ADD, PERMUTE = aten.view.default, aten.add.Tensor, aten.permute.default

PAIR = (8, 4), (4, 6)
BIASED = (6,), *PAIR
BATCHED = (2, 8, 4), (2, 4, 6)

Shapes = tuple[tuple[int, ...], ...]


def joint_graph(program: Callable[..., object], shapes: Shapes, device: str = "cuda") -> fx.GraphModule:
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
    cases: Mapping[str, tuple[Callable[..., Any], Shapes]] = {
        "at once": (lambda g, x: widen(MM(g, x)), PAIR),
        "after a view": (lambda g, x: widen(PERMUTE(MM(g, x), [1, 0])), PAIR),
        "before a view": (lambda g, x: PERMUTE(widen(MM(g, x)), [1, 0]), PAIR),
        "batched": (lambda a, b: widen(BMM(a, b)), BATCHED),
        "twice": (lambda g, x: (widen(mm := MM(g, x)), widen(mm)), PAIR),
        # Inductor lowers no wide one
        "with a bias": (lambda *args: widen(ADDMM(*args)), BIASED),
        # its cast fuses with the reader
        "an activation": (lambda g, x: widen(MM(g, x)).exp(), PAIR),
        "also returned": (lambda g, x: (wide := widen(MM(g, x)), wide.exp()), PAIR),
        "read through a view": (lambda g, x: (wide := widen(MM(g, x)), VIEW(wide, [-1]).exp()), PAIR),
        "narrowed again": (lambda g, x: widen(MM(g, x)).to(torch.bfloat16), PAIR),
        "also read in 16 bits": (lambda g, x: (widen(mm := MM(g, x)), mm), PAIR),
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
    cases: Mapping[str, tuple[Callable[..., Any], Shapes, tuple[object, ...]]] = {
        "through a view": (lambda x, w: widen(VIEW(MM(x, w), [2, 4, 6])).exp(), PAIR, (MM, VIEW)),
        "with a bias": (lambda *args: widen(ADDMM(*args)).exp(), BIASED, (ADDMM,)),
        "batched, with a bias": (lambda *args: widen(BADDBMM(*args)), ((2, 8, 6), *BATCHED), (BADDBMM,)),
        "added to": (lambda x, w, b: widen(ADD(MM(x, w), b)).exp(), (*PAIR, (6,)), (MM, ADD)),
        "also read in 16 bits": (lambda x, w: (widen(mm := MM(x, w)).exp(), mm.relu()), PAIR, (MM,)),
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
