"""A Dynamo graph becomes pre-dispatch ATen: same calls, same inputs, autocast as facts about nodes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from amp_fx import CaptureError
from amp_fx._torch import enable_autocast
from amp_fx.graphs.calls import module_path, source_line
from amp_fx.graphs.capture import capture
from amp_fx.graphs.keys import REGION_META, TRACED_META
from amp_fx.graphs.regions import ENTER, EXIT, ambient_regions
from support.checks.whole_program import DOWN, UP, agree, check
from support.models.small import Parts
from support.tracing.captured_graphs import Block, captured, dynamo_graph, plans, rewrite

BF16, FP16 = torch.bfloat16, torch.float16


def net() -> nn.Module:
    return Parts(
        lambda m, x: m.heads["class"](m.blocks[1](m.blocks[0](x))),
        blocks=nn.ModuleList([Block(), Block()]),
        heads=nn.ModuleDict({"class": nn.Linear(8, 4)}),
    )


def ops(gm: fx.GraphModule) -> list[str]:
    return [n.target.name() for n in gm.graph.nodes if isinstance(n.target, OpOverload)]


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


# ---- the graph itself ----


def test_a_capture_has_dynamos_calls_and_placeholders_and_leaves_its_graph_as_it_was() -> None:
    gm = dynamo_graph(net(), torch.randn(2, 8))
    code = gm.code
    before = {n: (n.name, n.target, copy.copy(n.meta)) for n in gm.graph.nodes}
    traced = capture(gm, ambient_regions({"cpu": BF16}))
    assert gm.code == code
    assert {n: (n.name, n.target, n.meta) for n in gm.graph.nodes} == before
    assert len(traced.graph.nodes) == len(gm.graph.nodes)
    block = ["aten::layer_norm", "aten::linear", "aten::gelu", "aten::linear", "aten::add.Tensor"]
    assert ops(traced) == [*block, *block, "aten::linear"]
    originals = gm.graph.find_nodes(op="placeholder")
    copies = traced.graph.find_nodes(op="placeholder")
    assert [(n.name, n.target) for n in copies] == [(n.name, n.target) for n in originals]
    for new, old in zip(copies, originals, strict=True):
        assert new.meta.items() >= old.meta.items()
        assert new._dynamo_source is old._dynamo_source
    assert traced._param_name_to_source == gm._param_name_to_source
    assert traced.meta.items() >= gm.meta.items()


def test_traced_dtypes_and_sizes_of_outputs_are_recorded() -> None:
    traced = captured(lambda x: (x.to(BF16), x.argmax(), x.double(), x + 1), torch.randn(4))
    expected = [[(BF16, [4])], [(torch.int64, [])], [(torch.float64, [4])], [(torch.float32, [4])]]
    assert traced.graph.output_node().meta[TRACED_META] == expected


DO_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "dropout in eval": lambda x: F.dropout(x, 0.5, training=False),
    "device": lambda x: x.to("cpu"),
    "expand": lambda x: x.expand(4, 4),
}


@pytest.mark.parametrize("call", DO_NOTHING)
def test_a_call_that_does_nothing_has_a_value_of_its_own_and_leaves_its_argument_alone(call: str) -> None:
    convert = DO_NOTHING[call]
    traced = captured(lambda x, w: (convert(x).exp(), x @ w), torch.randn(4, 4), torch.randn(4, 4))
    kept = {n.target for n in traced.graph.nodes}
    (read,) = node(traced, "exp").all_input_nodes
    assert read.target is torch.ops.aten.to.dtype or torch.ops.aten.to.dtype not in kept
    assert node(traced, "matmul").all_input_nodes[0].op == "placeholder"


def test_an_in_place_call_stays_the_value_that_later_calls_read() -> None:
    square = torch.randn(4, 4)
    traced = captured(lambda x, w: [y := x @ w, y.relu_(), y + 1][-1], square, square)
    assert ops(traced) == ["aten::matmul", "aten::relu_", "aten::add.Tensor"]
    assert node(traced, "add").all_input_nodes == [node(traced, "relu_")]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_padding_by_a_word_is_by_numbers_where_both_sides_have_as_much() -> None:
    convs = (nn.Conv2d(2, 2, size, padding="same", dilation=(1, 3)) for size in (3, 4))
    odd, even = (captured(conv, torch.randn(1, 2, 9, 9)) for conv in convs)
    assert (ops(even), node(odd, "conv2d").args[4]) == (["aten::conv2d.padding"], [1, 3])


def test_switching_gradients_off_inside_the_program_is_kept() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return (x @ w) * scale

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    traced = captured(program, x, w)
    switches = [n.args for n in traced.graph.nodes if n.target is torch._C._set_grad_enabled]
    assert switches == [(False,), (True,)]
    # native promotion: a 0-d fp32 scale leaves the bf16 product in bf16
    check(program, x, w, casts={DOWN: 2, UP: 1})


def test_symbolic_sizes_stay_placeholders_and_arithmetic() -> None:
    args = torch.randn(6, 8), torch.randn(8, 8)
    traced = captured(lambda x, w: (x @ w).reshape(x.shape[0] * 2, -1) / x.shape[0], *args, dynamic=True)
    symbols = [n.meta["val"] for n in traced.graph.find_nodes(op="placeholder")]
    assert any(isinstance(value, torch.SymInt) for value in symbols)
    assert isinstance(node(traced, "matmul").meta["val"].shape[0], torch.SymInt)


# ---- autocast ----


def test_under_an_ambient_autocast_no_casts_are_recorded_and_traced_dtypes_are_its_own() -> None:
    traced = captured(net(), torch.randn(2, 8), ambient=FP16)
    assert "aten::to.dtype" not in ops(traced)
    region = node(traced, "linear").meta[REGION_META]["cpu"]
    assert (region.enabled, region.dtype, region.by_user) == (True, FP16, True)
    assert node(traced, "linear").meta["val"].dtype is FP16
    assert node(traced, "add").meta["val"].dtype is torch.float32
    assert traced.graph.output_node().meta[TRACED_META] == [[(FP16, [2, 4])]]


def test_regions_inside_the_program_become_facts_about_nodes() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = x @ w
        with torch.autocast("cpu", FP16):
            b = x @ w
            with torch.autocast("cpu", enabled=False):
                c = x @ w
            d = x @ w
        return a, b, c, d, x @ w

    traced = captured(program, torch.randn(4, 4), torch.randn(4, 4))
    assert ops(traced) == ["aten::matmul"] * 5
    calls = [n for n in traced.graph.nodes if n.name.startswith("matmul")]
    regions = [n.meta[REGION_META]["cpu"] for n in calls]
    assert [r.enabled for r in regions] == [True, True, False, True, True]
    assert [r.by_user for r in regions] == [False, True, True, True, False]
    assert [r.dtype for r in regions if r.enabled] == [BF16, FP16, FP16, BF16]
    wide = torch.float32
    assert [n.meta["val"].dtype for n in calls] == [wide, FP16, wide, FP16, wide]


def test_capturing_leaves_the_threads_autocast_state_alone() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", FP16):
            return x @ w

    gm = dynamo_graph(program, torch.randn(4, 4), torch.randn(4, 4))
    with enable_autocast("cpu", True, BF16):
        capture(gm, ambient_regions({"cpu": BF16}))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is BF16
    capture(gm, ambient_regions({"cpu": FP16}))
    assert not torch.is_autocast_enabled("cpu")


# ---- higher-order ops and functorch ----


def test_a_body_without_gradients_may_write_to_a_leaf() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            checkpoint(lambda t: t.mul_(2).sum(), w, use_reentrant=False)
        return x @ w

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    got = rewrite(program, x, given := w.clone().requires_grad_()).outputs
    torch.testing.assert_close(got, x @ (2 * w), rtol=0.05, atol=0.05)
    assert torch.equal(given, 2 * w)


def test_a_checkpoint_body_stands_in_the_region_around_its_call() -> None:
    block = Block()

    def program(x: Tensor) -> Tensor:
        with torch.autocast("cpu", FP16):
            return checkpoint(block, x, use_reentrant=False)

    traced = captured(program, torch.randn(2, 8, requires_grad=True))
    (body,) = (m for m in traced.modules() if isinstance(m, fx.GraphModule) and m is not traced)
    region = node(body, "linear").meta[REGION_META]["cpu"]
    assert (region.enabled, region.dtype, region.by_user) == (True, FP16, True)


def test_a_body_that_stays_as_it_is_switches_the_users_autocast_on_itself() -> None:
    def program(q: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return flex_attention(q, q, q)

    traced = captured(program, torch.randn(1, 2, 16, 16))
    bodies = [m for m in traced.modules() if isinstance(m, fx.GraphModule) and m is not traced]
    switched = [[n.target for n in body.graph.nodes if n.target in (ENTER, EXIT)] for body in bodies]
    assert switched == [[ENTER, EXIT]] * len(bodies) != []
    # around the call itself it is off: the mask's own transforms had it on
    (call,) = [n for n in traced.graph.nodes if str(n.target) == "flex_attention"]
    before = [n.target for n in traced.graph.nodes if n < call]
    assert before.count(ENTER) == before.count(EXIT)


# ---- words for people ----


def test_source_line_is_the_users_innermost_line() -> None:
    traced = captured(Block(), torch.randn(2, 8))
    line = source_line(node(traced, "gelu"))
    assert line.startswith(f"{inspect.getfile(Block)}:")
    assert line.endswith("return x + self.down(F.gelu(self.up(self.norm(x))))")
    node(traced, "gelu").meta["stack_trace"] = (
        '  File "a.py", line 1, in f\n    x = g(x)\n  File "b.py", line 22, in g\n    return h(x)\n'
    )
    assert source_line(node(traced, "gelu")) == "b.py:22: return h(x)"


def test_module_paths_are_those_of_named_modules() -> None:
    rewritten = rewrite(net(), torch.randn(2, 8))
    paths = {row.name: row.module_path for row in rewritten.plan.nodes if row.op == "linear"}
    names = dict(net().named_modules())
    blocks = [f"blocks.{index}.{linear}" for index in range(2) for linear in ("up", "down")]
    assert list(paths.values()) == [*blocks, "heads.class"]
    assert set(paths.values()) <= names.keys()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].encoder._modules['layer']._modules['0'].attention", "encoder.layer.0.attention"),
        ("L['self']._modules['module'].blocks._modules['3']", "module.blocks.3"),
        ("L['model'].head", "head"),
        ("L['self'].heads['class']", "heads.class"),
        ("L['fn']", ""),
        ("G['model'].linear", "linear"),
    ],
)
def test_module_paths_are_read_off_dynamos_source(path: str, expected: str) -> None:
    made = fx.Graph().placeholder("x")
    made.meta["nn_module_stack"] = {"outer": ("L['self']", nn.Module), "inner": (path, nn.Module)}
    assert module_path(made) == expected


def test_a_program_that_cannot_be_traced_is_an_error_that_names_node_and_line() -> None:
    def program(x: Tensor) -> Tensor:
        return x.exp()  # the line to name

    gm = dynamo_graph(program, torch.randn(4))
    gm.graph.find_nodes(op="call_method", target="exp")[0].target = "no_such_method"
    with pytest.raises(CaptureError, match=r"exp .*test_capture\.py:\d+: return x\.exp\(\)") as info:
        capture(gm, ambient_regions({"cpu": BF16}))
    assert isinstance(info.value.__cause__, AttributeError)
    # and one that Dynamo did not make
    with pytest.raises(CaptureError, match="Dynamo"):
        capture(fx.symbolic_trace(nn.Linear(4, 4)), ambient_regions({"cpu": BF16}))


#: name -> program without tensors as inputs, its arguments
WITHOUT_INPUTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "arange": (lambda: torch.arange(5.0), ()),
    "full": (lambda: torch.full((2, 2), 1.5), ()),
    "window": (lambda: torch.hann_window(8) + 1, ()),
    "arithmetic": (lambda: torch.linspace(0, 1, 5).exp(), ()),
    "matmul": (lambda: torch.randn(8, 8) @ torch.randn(8, 8), ()),
    "matmul of a size": (lambda n: torch.ones(n, 8) @ torch.eye(8), (4,)),
}


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", WITHOUT_INPUTS)
def test_a_graph_that_makes_all_its_tensors_passes_in_silence_and_its_matmuls_run_low(
    name: str, ambient: torch.dtype | None
) -> None:
    program, args = WITHOUT_INPUTS[name]
    is_matmul = name.startswith("matmul")
    exactness: dict[str, Any] = {"reference": torch.float32, "tolerance": 0.02} if is_matmul else {}
    (plan,) = agree(program, *args, ambient=ambient, **exactness)
    assert [row.dtype for row in plans(plan, "matmul")] == [BF16] * is_matmul
    assert is_matmul or not plan.changed
    assert not plan.fallback


@pytest.mark.parametrize(
    "gives_itself",
    [
        lambda y: y.type_as(y),
        lambda y: y.real,
        lambda y: y.to(torch.float32),
        lambda y: y.contiguous(),
        lambda y: y.float(),
        lambda y: torch.conj(y),
        lambda y: y.resolve_conj(),
    ],
    ids=["type_as", "real", "to", "contiguous", "float", "conj", "resolve_conj"],
)
def test_a_value_that_a_call_without_gradients_gives_back_may_be_written_to_with_gradients(
    gives_itself: Callable[[Tensor], Tensor],
) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        with torch.no_grad():
            same = gives_itself(y)
        same.mul_(0.5)
        return same @ w, y

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    agree(program, x, w, reference=torch.float32)
