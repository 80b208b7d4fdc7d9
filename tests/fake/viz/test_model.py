"""The model of a picture holds every cast of the plan, folds equal blocks and says what changed."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from amp_fx.plans.plan import InputPlan, Plan
from amp_fx.policy import OpClass
from amp_fx.reports.report import Report
from amp_fx.viz import dot
from amp_fx.viz.model import drawing
from amp_fx.viz.schema import Cast, Graph
from amp_fx.viz.style import DTYPES, HEAT, heat_samples
from amp_fx.viz.view import casts_inside, view
from gpt import GPT, GPTConfig
from graphs import rewrite
from pictures import HIGH, LOW, blocks, call, cast, chain, parameter


def titles(graph: Graph, depth: int = 2) -> list[str]:
    """What the closed modules are called."""
    return [graph["groups"][group]["title"] for group in view(graph, depth).closed]


def casts(graph: Graph) -> dict[str, Cast]:
    return {cast["name"]: cast for edge in graph["edges"] for cast in edge["casts"]}


def drawn(
    *nodes: Any, inputs: tuple[InputPlan, ...] = (), casts: tuple[Any, ...] = (), phase: str = "forward"
) -> Graph:
    plan = Plan(nodes=list(nodes), casts=list(casts), inputs=list(inputs), phase=phase)
    return drawing(Report([plan]))["graphs"][0]


@pytest.fixture(scope="module")
def gpt() -> Plan:
    torch._dynamo.reset()
    model = GPT(GPTConfig(layers=3, width=16, heads=2, context=8))
    tokens = torch.randint(8, (2, 8))
    return rewrite(model, tokens, tokens).plan


def test_every_cast_of_a_real_plan_is_drawn_once_per_reader_with_its_dtypes_and_bytes(gpt: Plan) -> None:
    graph = drawing(Report([gpt]))["graphs"][0]
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    expected = {c.name: (short[c.from_dtype], short[c.to_dtype], c.bytes) for c in gpt.casts if c.inserted}
    assert len(expected) > 10
    assert {name: (c["before"], c["after"], c["bytes"]) for name, c in casts(graph).items()} == expected


def test_the_model_is_json_like_all_the_way_down(gpt: Plan) -> None:
    model = drawing(Report([gpt]), Report([gpt]))
    assert json.loads(json.dumps(model)) == model


def test_equal_blocks_of_a_real_model_are_drawn_as_one(gpt: Plan) -> None:
    graph = drawing(Report([gpt]))["graphs"][0]
    (fold,) = {group["fold"] for group in graph["groups"]} - {None}
    assert fold is not None
    first = graph["groups"][fold]
    assert (first["title"], first["times"]) == ("blocks.0 \N{HORIZONTAL ELLIPSIS} blocks.2", 3)
    assert titles(graph, depth=1).count(first["title"]) == 1


def test_a_block_that_differs_is_drawn_apart() -> None:
    graph = drawing(blocks(4, odd=[2]))["graphs"][0]
    assert titles(graph) == ["layers.0 \N{HORIZONTAL ELLIPSIS} layers.3", "layers.2"]
    assert [g["times"] for g in graph["groups"] if g["label"].startswith("layers")] == [3, 3, 1, 3]


def test_modules_of_like_names_that_are_no_list_do_not_fold() -> None:
    nodes = [call(f"{m}_{i}", op="relu", module=m) for m in ("conv1", "conv2") for i in range(2)]
    assert titles(drawn(*nodes), depth=1) == ["conv1", "conv2"]


def test_modules_are_closed_below_depth_two_and_open_on_demand() -> None:
    graph = drawing(blocks())["graphs"][0]
    shown = view(graph)
    assert {graph["groups"][group]["depth"] for group in shown.closed} == {2}
    assert {graph["groups"][group]["depth"] for group in shown.open} == {0, 1}
    assert not view(graph, depth=9).closed


def test_a_closed_module_knows_the_casts_inside_it() -> None:
    graph = drawing(blocks())["graphs"][0]
    first = view(graph).closed[0]
    assert {cast["name"] for cast in casts_inside(graph, first)} == {"cast_0", "castw_0"}


def test_an_open_folded_block_shows_one_block_and_nothing_leads_back() -> None:
    graph = drawing(blocks())["graphs"][0]
    shown = view(graph, depth=9)
    names = {index: graph["nodes"][index]["name"] for index in shown.nodes}
    assert "linear_0" in names.values()
    assert "linear_1" not in names.values()
    ends = {(names[tail[1]], names[head[1]]) for tail, head in shown.edges}
    assert ("norm_0", "linear_0") in ends
    assert ("add_0", "norm_0") not in ends
    found = [cast for on_edge in shown.edges.values() for cast in on_edge]
    assert found.count("cast_0") == 1
    assert "cast_1" not in found


def test_casts_between_folded_blocks_are_drawn() -> None:
    graph = drawing(blocks())["graphs"][1]
    between = [found for found in view(graph, depth=9).edges.values() if {"low_1", "low_0"} <= set(found)]
    assert len(between) == 1


def test_what_leaves_the_graph_through_a_cast_is_drawn_beside_its_producer() -> None:
    forward, backward = drawing(blocks())["graphs"]
    (result,) = [node for node in forward["nodes"] if node["kind"] == "result"]
    assert (result["label"], result["dtype"]) == ("result", "float32")
    gradients = [node for node in backward["nodes"] if node["kind"] == "result"]
    assert [node["label"] for node in gradients] == ["gradient"] * 3
    homes = {node["name"]: node["group"] for node in backward["nodes"]}
    assert homes["grad_1"] == homes["mm_1"]


def test_parameters_of_one_reader_share_a_box_and_appear_only_where_they_are_cast() -> None:
    weight, bias, scale = (parameter(name) for name in ("weight", "bias", "scale"))
    graph = drawn(
        call("linear", "cast", "cast_1", scale.name),
        inputs=(weight, bias, scale),
        casts=(cast("cast", weight.name, "linear"), cast("cast_1", bias.name, "linear")),
    )
    (box,) = [node for node in graph["nodes"] if node["kind"] == "parameter"]
    assert box["label"] == "weight, bias"
    assert box["bytes"] == weight.bytes + bias.bytes
    assert set(casts(graph)) == {"cast", "cast_1"}


def test_inputs_have_the_names_that_the_program_gives_them() -> None:
    tokens = InputPlan("l_kwargs_tokens_", False, HIGH, (2, 8), 64)
    graph = drawn(call("linear", "cast"), inputs=(tokens,), casts=(cast("cast", tokens.name, "linear"),))
    assert [node["label"] for node in graph["nodes"] if node["kind"] == "input"] == ["tokens"]
    backward = drawing(blocks(1))["graphs"][1]
    assert "incoming gradient" in [node["label"] for node in backward["nodes"]]


def test_a_closed_module_says_what_the_casts_move_that_are_kernels() -> None:
    report = blocks(1)
    for plan in report.plans:
        plan.casts = [replace(row, kernel=row.name.startswith("castw")) for row in plan.casts]
    assert "2 casts inside, 96 B" in dot.source(drawing(report)).source
    for plan in report.plans:
        plan.casts = [replace(row, kernel=False) for row in plan.casts]
    assert "2 casts inside, fused" in dot.source(drawing(report)).source


def test_a_chain_of_casts_is_on_one_edge_in_order() -> None:
    graph = drawn(
        call("a", dtype=HIGH),
        call("b", "up", dtype=HIGH),
        casts=(cast("down", "a", "up"), cast("up", "down", "b", before=LOW, after=HIGH)),
    )
    assert [[c["name"] for c in edge["casts"]] for edge in graph["edges"]] == [["down", "up"]]
    assert not [node for node in graph["nodes"] if node["kind"] == "result"]


def test_views_and_elements_are_not_drawn_but_the_casts_behind_them_are() -> None:
    follow = OpClass.FOLLOW
    graph = drawn(
        call("a", dtype=HIGH),
        call("split", "down", op="split.Tensor", op_class=follow, nbytes=0),
        call("item", "split", op="getitem", op_class=follow),
        call("b", "item"),
        casts=(cast("down", "a", "split"),),
    )
    assert [node["name"] for node in graph["nodes"]] == ["a", "b"]
    assert [[c["name"] for c in edge["casts"]] for edge in graph["edges"]] == [["down"]]


def test_sums_of_gradients_are_drawn_in_the_module_of_the_last_summand() -> None:
    graph = drawing(blocks())["graphs"][1]
    home = {node["name"]: graph["groups"][node["group"]]["label"] for node in graph["nodes"]}
    assert [home[f"sum_{index}"] for index in range(3)] == ["layers.0", "layers.1", "layers.2"]
    assert titles(graph) == ["layers.2 \N{HORIZONTAL ELLIPSIS} layers.0"]


def test_calls_without_a_floating_dtype_are_one_box_per_module() -> None:
    masks = [
        call(f"mask_{i}", op="eq", module="net.mask", dtype=None, op_class=OpClass.KEEP) for i in range(6)
    ]
    graph = drawn(*masks, call("linear", "mask_5", module="net.linear"))
    assert titles(graph, depth=9) == ["6 integer and boolean ops"]


def test_a_flat_graph_of_5000_calls_is_drawn_as_runs() -> None:
    graph = drawing(chain(5000))["graphs"][0]
    shown = view(graph)
    assert len(shown.nodes) + len(shown.closed) <= 160
    inside = Counter(leaf for group in shown.closed for leaf in graph["groups"][group]["leaves"])
    assert set(inside) | set(shown.nodes) == set(range(len(graph["nodes"])))


def test_blocks_of_a_backward_fold_whatever_masks_and_constants_they_have() -> None:
    follow = OpClass.FOLLOW
    nodes = []
    for index in (1, 0):
        module = f"net.layers.{index}"
        given = [f"mask_{index}"] if index else []
        if index:
            # the mask of the last block was saved, this one is worked out again
            nodes.append(call(f"mask_{index}", "saved_1", op="le.Scalar", module=module, dtype=None))
        nodes += [
            call(f"zero_{index}", op="full", module=module, op_class=follow, shape=()),
            call(f"mm_{index}", f"low_{index}", op="mm", module=module, flops=10),
            call(f"where_{index}", f"mm_{index}", f"zero_{index}", *given, op="where.self", module=module),
        ]
    graph = drawn(
        *nodes,
        inputs=(InputPlan("saved_1", False, HIGH, (2, 8), 64), InputPlan("saved_0", False, HIGH, (2, 8), 64)),
        casts=tuple(cast(f"low_{index}", f"saved_{index}", f"mm_{index}") for index in (1, 0)),
        phase="backward",
    )
    assert titles(graph) == ["layers.1 \N{HORIZONTAL ELLIPSIS} layers.0"]
    assert not [node for node in graph["nodes"] if node["op"] in ("le.Scalar", "full")]
    saved = [node for node in graph["nodes"] if node["kind"] == "input"]
    assert [node["label"] for node in saved] == ["saved value"] * 2
    assert [graph["groups"][node["group"]]["label"] for node in saved] == ["layers.1", "layers.0"]


def test_a_cast_that_only_masks_read_is_no_gradient() -> None:
    graph = drawn(
        call("mm", "x", op="mm", flops=10),
        call("mask", "wide", op="le.Scalar", dtype=None),
        casts=(cast("wide", "mm", "mask", before=LOW, after=HIGH),),
        phase="backward",
    )
    assert [node["kind"] for node in graph["nodes"]] == ["call"]


def test_buffers_are_drawn_where_they_are_cast_and_nowhere_else() -> None:
    name = "l_self_modules_norm_buffers_{}_"
    mean, table = (InputPlan(name.format(what), False, HIGH, (8,), 32) for what in ("mean", "table"))
    graph = drawn(
        call("norm", mean.name, module="net.norm"),
        call("linear", "cast", module="net.linear"),
        inputs=(mean, table),
        casts=(cast("cast", table.name, "linear"),),
    )
    assert [(node["kind"], node["label"]) for node in graph["nodes"] if node["kind"] != "call"] == [
        ("parameter", "table")
    ]


def test_what_a_rule_changed_is_marked_against_the_earlier_report() -> None:
    before, after = blocks(3), blocks(3, odd=[1])
    forward = drawing(after, before)["graphs"][0]
    was = {node["name"]: node["was"] for node in forward["nodes"] if node["was"]}
    assert was == {"linear_1": "bfloat16", "gelu_1": "bfloat16"}
    assert {name: cast["mark"] for name, cast in casts(forward).items() if cast["mark"]} == {
        "cast_1": "removed",
        "castw_1": "removed",
    }
    back = drawing(before, after)["graphs"][0]
    assert {name for name, cast in casts(back).items() if cast["mark"] == "added"} == {"cast_1", "castw_1"}
    assert "linear" in drawing(after, before)["diff"]


def test_a_module_with_one_listed_call_is_named_after_it() -> None:
    graph = drawing(blocks())["graphs"][0]
    (first, *_) = [group for group in graph["groups"] if group["label"] == "mlp"]
    assert first["main"] is not None
    assert graph["nodes"][first["main"]]["op"] == "linear"


def test_a_model_without_graphs_and_a_graph_without_calls_can_be_drawn() -> None:
    assert drawing(Report())["graphs"] == []
    graph = drawing(Report([Plan()]))["graphs"][0]
    assert (graph["nodes"], graph["edges"]) == ([], [])


@pytest.mark.parametrize(
    ("path", "levels"),
    [
        ("model.layers.0.mlp.up", ["model", "layers.0", "mlp"]),
        ("0.1.conv", ["0", "1"]),
        ("layer1.10.0.bn2", ["layer1.10", "0"]),
    ],
)
def test_a_list_and_the_place_in_it_are_one_level(path: str, levels: list[str]) -> None:
    graph = drawn(call("a", module=path))
    assert [group["label"] for group in graph["groups"][1:]] == levels


def measured() -> Report:
    """Three equal blocks whose linears sensitivity unlike."""
    report = blocks(3)
    report.sensitivities = {report.plan.graph: {"linear_0": 2e-5, "linear_1": 3e-3, "linear_2": None}}
    return report


def test_boxes_say_what_rounding_costs_where_that_was_measured_and_unlike_blocks_do_not_fold() -> None:
    model = drawing(measured())
    forward, backward = model["graphs"]
    nodes = {node["name"]: node for node in forward["nodes"]}
    linears = [nodes[f"linear_{index}"] for index in range(3)]
    assert [node["sensitivity"] for node in linears] == [
        "sensitivity 2e-05",
        "sensitivity 3e-03",
        "overflows",
    ]
    assert [HEAT[node["heat"]][0] for node in linears] == [1e-4, 1e-2, math.inf]
    assert {node["heat"] for node in nodes.values() if node not in linears} == {0}
    assert {node["heat"] for node in backward["nodes"]} == {0}
    assert all(group["fold"] is None for group in forward["groups"])
    assert len(heat_samples(model)) == 4
    assert heat_samples(drawing(blocks(3))) == []


def test_sensitivities_come_back_from_a_saved_report() -> None:
    report = measured()
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).sensitivities == report.sensitivities
    assert "sensitivities" not in blocks(3).to_dict()


def test_a_picture_in_dot_is_coloured_by_sensitivity_where_that_was_measured() -> None:
    picture = dot.source(drawing(measured()), depth=9).source
    assert {colour for _, colour in HEAT if f'fillcolor="{colour}"' in picture} == {
        HEAT[place][1] for place in (0, 1, 3, 4)
    }
    assert not any(f'fillcolor="{colour}"' in picture for colour in DTYPES.values())
    assert "sensitivity 3e-03" in picture
    # closed: the worst inside
    assert f'fillcolor="{HEAT[4][1]}"' in dot.source(drawing(measured()), depth=1).source
