"""The model of a picture holds every cast of the plan, folds equal blocks and says what changed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from amp_fx import AmpFxError
from amp_fx.instruments.reports.report import Report
from amp_fx.precision.plans.plan import InputPlan, Plan
from amp_fx.precision.policy import OpClass
from amp_fx.viz import dot
from amp_fx.viz.graph import Graph, Marked
from amp_fx.viz.model import drawing
from amp_fx.viz.style import COLOURS, DTYPES, HEAT, group_face, legend
from amp_fx.viz.words import per_cent
from gpt import GPT, GPTConfig
from support.tracing.captured_graphs import rewrite
from support.tracing.handwritten_reports import HIGH, LOW, blocks, call, cast, chain, parameter


def titles(graph: Graph, depth: int = 2) -> list[str]:
    """What the closed modules are called."""
    return [graph.groups[group].title for group in closed(graph, depth)]


def closed(graph: Graph, depth: int = 2) -> list[int]:
    return [int(box[1:]) for box in dict.fromkeys(graph.boxes(depth)) if box[0] == "g"]


def casts(graph: Graph) -> dict[str, Marked]:
    return {row.cast.name: row for edge in graph.edges for row in edge.casts}


def shown_edges(graph: Graph) -> dict[tuple[str, str], list[Marked]]:
    """Casts of what is drawn with everything open, by the names of both ends."""
    found: dict[tuple[str, str], list[Marked]] = {}
    for edge in graph.edges:
        if not edge.repeated:
            tail, head = (graph.nodes[graph.nodes[end].drawn].name for end in (edge.tail, edge.head))
            found.setdefault((tail, head), []).extend(edge.casts)
    return found


def folded(first: str, last: str, times: int) -> str:
    return f"{first} \N{HORIZONTAL ELLIPSIS} {last} \N{MULTIPLICATION SIGN}{times}"


def drawn(
    *nodes: Any, inputs: tuple[InputPlan, ...] = (), casts: tuple[Any, ...] = (), phase: str = "forward"
) -> Graph:
    plan = Plan(nodes=list(nodes), casts=list(casts), inputs=list(inputs), phase=phase)
    return drawing(Report([plan])).graphs[0]


def test_of_a_real_model_every_cast_is_drawn_and_equal_blocks_once() -> None:
    model, tokens = GPT(GPTConfig(layers=3, width=16, heads=2, context=8)), torch.randint(8, (2, 8))
    plan = rewrite(model, tokens, tokens).plan
    graph = drawing(Report([plan])).graphs[0]
    expected = {cast.name: cast for cast in plan.casts if cast.inserted}
    assert len(expected) > 10
    assert {name: row.cast for name, row in casts(graph).items()} == expected
    (at,) = {group.first for group in graph.groups if group.first is not None}
    first = graph.groups[at]
    assert (first.title, first.times) == (folded("blocks.0", "blocks.2", 3), 3)
    assert titles(graph, depth=1).count(first.title) == 1


def test_what_differs_or_is_no_list_is_drawn_apart() -> None:
    graph = drawing(blocks(4, odd=[2])).graphs[0]
    assert titles(graph) == [folded("layers.0", "layers.3", 3), "layers.2"]
    assert [g.times for g in graph.groups if g.label.startswith("layers")] == [3, 3, 1, 3]
    nodes = [call(f"{m}_{i}", op="relu", module=m) for m in ("conv1", "conv2") for i in range(2)]
    assert titles(drawn(*nodes), depth=1) == ["conv1", "conv2"]


def test_modules_are_closed_below_depth_two_and_an_open_folded_block_shows_one_block() -> None:
    graph = drawing(blocks()).graphs[0]
    assert {graph.groups[group].depth for group in closed(graph)} == {2}
    assert set(graph.groups[closed(graph)[0]].casts) == {"cast_0", "castw_0"}
    assert not closed(graph, depth=9)
    names = {graph.nodes[node.drawn].name for node in graph.nodes}
    assert "linear_0" in names
    assert "linear_1" not in names
    # and nothing leads back
    edges = shown_edges(graph)
    assert [row.cast.name for row in edges["norm_0", "linear_0"]] == ["cast_0"]
    assert ("add_0", "norm_0") not in edges
    assert "cast_1" not in {row.cast.name for rows in edges.values() for row in rows}
    # those between blocks are drawn
    between = shown_edges(drawing(blocks()).graphs[1])["sum_2", "mm_2"]
    assert [row.cast.name for row in between] == ["low_1", "low_0"]


def test_what_leaves_the_graph_through_a_cast_is_drawn_beside_its_producer() -> None:
    forward, backward = drawing(blocks()).graphs
    (result,) = [node for node in forward.nodes if node.kind == "result"]
    assert (result.label, result.dtype) == ("result", "float32")
    gradients = [node for node in backward.nodes if node.kind == "result"]
    assert [node.label for node in gradients] == ["gradient"] * 3
    homes = {node.name: node.group for node in backward.nodes}
    assert homes["grad_1"] == homes["mm_1"]
    # sums of gradients in the module of the last summand
    labels = [backward.groups[homes[f"sum_{index}"]].label for index in range(3)]
    assert labels == ["layers.0", "layers.1", "layers.2"]
    assert titles(backward) == [folded("layers.2", "layers.0", 3)]


def given(name: str, dtype: torch.dtype = HIGH, copy_of: str = "") -> InputPlan:
    return InputPlan(name, False, dtype, (2, 8), 64, copy_of=copy_of)


WEIGHT, SCALE = parameter("weight"), parameter("scale")
TABLE, MEAN = (given(f"l_self_modules_norm_buffers_{name}_") for name in ("table", "mean"))

#: inputs that are cast, inputs that are not, and the boxes of them
INPUTS: dict[str, tuple[list[InputPlan], list[InputPlan], list[tuple[str, str]]]] = {
    "by the program's names": ([given("l_kwargs_tokens_")], [], [("input", "tokens")]),
    "parameters of one reader share a box": ([WEIGHT, parameter("bias")], [SCALE], [("parameter", "weight, bias")]),
    "scales of a copy are told from the copy": (
        [given("copy", LOW, WEIGHT.name), given("scales", HIGH, WEIGHT.name)], [],
        [("parameter", "weight"), ("parameter", "weight scales")],
    ),
    "buffers where they are cast": ([TABLE], [MEAN], [("parameter", "table")]),
}  # fmt: skip


@pytest.mark.parametrize("which", INPUTS)
def test_inputs_are_drawn_where_they_are_cast_and_nowhere_else(which: str) -> None:
    cast_inputs, others, boxes = INPUTS[which]
    added = [cast(f"cast_{row.name}", row.name, "linear", before=row.dtype or HIGH) for row in cast_inputs]
    reads = [row.name for row in (*added, *others)]
    graph = drawn(call("linear", *reads), inputs=(*cast_inputs, *others), casts=(*added,))
    found = [node for node in graph.nodes if node.kind != "call"]
    assert [(node.kind, node.label) for node in found] == boxes
    assert sum(node.bytes for node in found) == sum(row.bytes for row in cast_inputs)
    assert set(casts(graph)) == {row.name for row in added}
    assert "incoming gradient" in [node.label for node in drawing(blocks(1)).graphs[1].nodes]


def test_a_folded_module_has_the_share_of_all_that_are_equal_to_it() -> None:
    graph = drawing(blocks(4)).graphs[0]
    group = graph.groups[closed(graph)[0]]
    shares = [group_face(graph, group, hot=False, folded=folded).share for folded in (True, False)]
    # two casts of each block, one before the head and one behind it
    assert shares == pytest.approx([8 / 10, 2 / 10])
    # below ten per cent they have a digit more
    found = [per_cent(part, 1000).removesuffix("\N{NO-BREAK SPACE}%") for part in (0, 62, 99.4, 99.6, 650)]
    assert found == ["0", "6.2", "9.9", "10", "65"]


def test_a_closed_module_says_what_the_casts_move_that_are_kernels() -> None:
    report = blocks(1)
    for names, said in (("castw", "96 B"), (("none",), "fused")):
        for plan in report.plans:
            plan.casts = [replace(row, kernel=row.name.startswith(names)) for row in plan.casts]
        assert f"2 casts inside, {said}" in dot.source(drawing(report, depth=2)).source


def test_casts_in_a_chain_and_behind_views_are_on_one_edge_in_order() -> None:
    graph = drawn(
        call("a", dtype=HIGH),
        call("b", "up", dtype=HIGH),
        casts=(cast("down", "a", "up"), cast("up", "down", "b", before=LOW, after=HIGH)),
    )
    assert [[row.cast.name for row in edge.casts] for edge in graph.edges] == [["down", "up"]]
    assert not [node for node in graph.nodes if node.kind == "result"]
    follow = OpClass.FOLLOW
    graph = drawn(
        call("a", dtype=HIGH),
        call("split", "down", op="split.Tensor", op_class=follow, bytes=0),
        call("item", "split", op="getitem", op_class=follow),
        call("b", "item"),
        casts=(cast("down", "a", "split"),),
    )
    assert [node.name for node in graph.nodes] == ["a", "b"]
    assert [[row.cast.name for row in edge.casts] for edge in graph.edges] == [["down"]]


def test_what_computes_nothing_is_no_box_and_calls_without_a_floating_dtype_are_one_per_module() -> None:
    keep: dict[str, Any] = {"dtype": None, "op_class": OpClass.KEEP, "shape": ()}
    graph = drawn(
        call("off", op="_set_grad_enabled", **keep),
        call("linear"),
        call("finite", "linear", op="all", **keep),
        call("check", "finite", op="_assert_async", **keep),
    )
    assert [node.name for node in graph.nodes] == ["linear", "finite"]
    mask: dict[str, Any] = {"op": "eq", "module": "net.mask", "dtype": None, "op_class": OpClass.KEEP}
    masks = [call(f"mask_{index}", **mask) for index in range(6)]
    graph = drawn(*masks, call("linear", "mask_5", module="net.linear"))
    assert titles(graph, depth=9) == ["6 integer and boolean ops"]


def test_a_flat_graph_of_5000_calls_is_drawn_as_runs() -> None:
    graph = drawing(chain(5000)).graphs[0]
    boxes = set(graph.boxes(2))
    assert len(boxes) <= 160
    inside = [leaf for group in closed(graph) for leaf in graph.groups[group].leaves]
    single = [int(box[1:]) for box in boxes if box[0] == "n"]
    assert sorted(inside + single) == list(range(len(graph.nodes)))


def test_a_graph_is_drawn_as_deep_as_few_boxes_allow_unless_a_depth_is_named() -> None:
    def numbers(report: Report, depth: int | Literal["all"] | None = None) -> list[tuple[int, int]]:
        """Depth and number of boxes of each graph."""
        graphs = drawing(report, depth=depth).graphs
        return [(graph.depth, len({*graph.boxes(graph.depth)})) for graph in graphs]

    few = blocks(3)
    # without a place in a list, modules do not fold
    many = Report.from_dict(json.loads(json.dumps(blocks(9).to_dict()).replace("layers.", "layer_")))
    assert all(count <= 24 for _, count in numbers(few) + numbers(many))
    assert [depth for depth, _ in numbers(few)] == [graph.deepest for graph in drawing(few).graphs]
    for (depth, _), graph in zip(numbers(many), drawing(many).graphs, strict=True):
        assert depth < graph.deepest
        assert len({*graph.boxes(depth + 1)}) > 24
    assert numbers(many, 1) < numbers(many, 99) == numbers(many, 98)
    # nothing can be closed in a graph without modules, but its runs
    assert numbers(chain(20)) == [(1, 21)]
    assert numbers(chain(200), 99)[0][1] < numbers(chain(200), "all")[0][1] == 201
    for bad in (0, -1, 2.5, "2", "whole"):
        with pytest.raises(AmpFxError, match=re.escape(repr(bad))):
            drawing(few, depth=bad)  # pyright: ignore[reportArgumentType]


def test_blocks_of_a_backward_fold_whatever_masks_and_constants_they_have() -> None:
    def block(index: int, *masks: str) -> list[Any]:
        module = f"net.layers.{index}"
        return [
            call(f"zero_{index}", op="full", module=module, op_class=OpClass.FOLLOW, shape=()),
            call(f"mm_{index}", f"low_{index}", op="mm", module=module, flops=10),
            call(f"where_{index}", f"mm_{index}", f"zero_{index}", *masks, op="where.self", module=module),
        ]

    # the mask of the last block was saved, this one is worked out again
    mask = call("mask_1", "saved_1", op="le.Scalar", module="net.layers.1", dtype=None)
    saved = tuple(InputPlan(f"saved_{index}", False, HIGH, (2, 8), 64) for index in (1, 0))
    low = tuple(cast(f"low_{index}", f"saved_{index}", f"mm_{index}") for index in (1, 0))
    graph = drawn(mask, *block(1, "mask_1"), *block(0), inputs=saved, casts=low, phase="backward")
    assert titles(graph) == [folded("layers.1", "layers.0", 2)]
    assert not [node for node in graph.nodes if node.op in ("le.Scalar", "full")]
    found = [(node.label, graph.groups[node.group].label) for node in graph.nodes if node.kind == "input"]
    assert found == [("saved value", "layers.1"), ("saved value", "layers.0")]
    # a cast that only masks read is no gradient
    nodes = call("mm", "x", op="mm", flops=10), call("mask", "wide", op="le.Scalar", dtype=None)
    wide = cast("wide", "mm", "mask", before=LOW, after=HIGH)
    assert [node.kind for node in drawn(*nodes, casts=(wide,), phase="backward").nodes] == ["call"]


def test_what_a_rule_changed_is_marked_against_the_earlier_report() -> None:
    before, after = blocks(3), blocks(3, odd=[1])
    forward = drawing(after, before).graphs[0]
    was = {node.name: node.was for node in forward.nodes if node.was}
    assert was == {"linear_1": "bfloat16", "gelu_1": "bfloat16"}
    back = drawing(before, after).graphs[0]
    for graph, mark in ((forward, "removed"), (back, "added")):
        marks = {name: row.mark for name, row in casts(graph).items() if row.mark}
        assert marks == {"cast_1": mark, "castw_1": mark}
    assert "linear" in drawing(after, before).diff
    # what is gone is in no module
    (odd,) = [group for group in forward.groups if group.label == "layers.1"]
    assert odd.casts == {}


def test_a_module_is_named_after_its_only_listed_call_and_nothing_can_be_drawn() -> None:
    graph = drawing(blocks()).graphs[0]
    first = next(group for group in graph.groups if group.label == "mlp")
    assert getattr(first.main, "op", "") == "linear"
    assert drawing(Report()).graphs == []
    graph = drawing(Report([Plan()])).graphs[0]
    assert (graph.nodes, graph.edges) == ([], [])
    # a list and the place in it are one level
    one, other, last = ["model", "layers.0", "mlp"], ["0", "1"], ["layer1.10", "0"]
    for path, levels in (("model.layers.0.mlp.up", one), ("0.1.conv", other), ("layer1.10.0.bn2", last)):
        assert [group.label for group in drawn(call("a", module=path)).groups[1:]] == levels


def measured() -> Report:
    """Three equal blocks whose linears are unlike in sensitivity."""
    report = blocks(3)
    report.sensitivities = {report.plan.graph: {"linear_0": 2e-5, "linear_1": 3e-3, "linear_2": None}}
    return report


def test_boxes_say_what_rounding_costs_where_that_was_measured_and_unlike_blocks_do_not_fold() -> None:
    report = measured()
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).sensitivities == report.sensitivities
    assert "sensitivities" not in blocks(3).to_dict()
    model = drawing(report)
    forward, backward = model.graphs
    nodes = {node.name: node for node in forward.nodes}
    linears = [nodes[f"linear_{index}"] for index in range(3)]
    assert [node.measured for node in linears] == ["sensitivity 2e-05", "sensitivity 3e-03", "overflows"]
    assert [HEAT[node.heat][0] for node in linears] == [1e-4, 1e-2, math.inf]
    assert {node.heat for node in nodes.values() if node not in linears} == {0}
    assert {node.heat for node in backward.nodes} == {0}
    assert all(group.first is None for group in forward.groups)
    colours = {colour for _, colour in HEAT}
    assert len(colours & {fill for _, fill, _ in legend(model)}) == 4
    assert not colours & {fill for _, fill, _ in legend(drawing(blocks(3)))}


def test_a_picture_in_dot_is_coloured_by_measured_sensitivity() -> None:
    # closed: the worst inside
    assert f'fillcolor="{HEAT[4][1]}"' in dot.source(drawing(measured(), depth=1)).source
    picture = dot.source(drawing(measured(), depth="all")).source
    filled = {*re.findall(r'fillcolor="(#\w+)"', picture)}
    assert filled & {colour for _, colour in HEAT} == {HEAT[place][1] for place in (0, 1, 3, 4)}
    assert not filled & {COLOURS[name][0] for name in DTYPES}
    assert "sensitivity 3e-03" in picture
