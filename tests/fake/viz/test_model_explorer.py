"""Files for Model Explorer: nodes with namespaces, edges between them, casts over them, colours beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amp_fx.viz import model_explorer
from amp_fx.viz.model import drawing
from pictures import blocks, nasty


@pytest.fixture(scope="module")
def graphs() -> list[dict[str, Any]]:
    return model_explorer.graph_collection(drawing(blocks()))["graphs"]


def test_edges_and_overlays_join_nodes_that_exist(graphs: list[dict[str, Any]]) -> None:
    for graph in graphs:
        ids = [node["id"] for node in graph["nodes"]]
        assert len(set(ids)) == len(ids) > 5
        ends = {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]}
        (data,) = graph["tasksData"]["edgeOverlaysDataListLeftPane"]
        edges = [edge for overlay in data["overlays"] for edge in overlay["edges"]]
        ends |= {edge[end] for edge in edges for end in ("sourceNodeId", "targetNodeId")}
        assert ends
        assert ends <= set(ids)


def test_every_cast_is_on_an_overlay_with_direction_and_bytes(graphs: list[dict[str, Any]]) -> None:
    (data,) = graphs[0]["tasksData"]["edgeOverlaysDataListLeftPane"]
    labels = {overlay["name"]: [edge["label"] for edge in overlay["edges"]] for overlay in data["overlays"]}
    assert labels == {
        "casts to a narrower dtype": ["fp32 \N{RIGHTWARDS ARROW} bf16  96 B"] * 7,
        "casts to a wider dtype": ["bf16 \N{RIGHTWARDS ARROW} fp32  96 B"],
    }


def test_modules_are_namespaces_and_reasons_are_attributes(graphs: list[dict[str, Any]]) -> None:
    (node,) = [
        node for node in graphs[0]["nodes"] if node["label"] == "up: linear" and node["namespace"][-5] == "0"
    ]
    assert node["namespace"] == "net/layers.0/mlp"
    attributes = {row["key"]: row["value"] for row in node["attrs"]}
    assert attributes["why"] == "reason of linear_0"
    assert attributes["dtype"] == "bfloat16"


def test_a_slash_in_a_name_is_no_level() -> None:
    (graph,) = model_explorer.graph_collection(drawing(nasty()))["graphs"]
    assert {node["namespace"].count("/") for node in graph["nodes"]} == {0, 1}


def test_node_data_lie_beside_the_graphs_and_name_their_nodes(tmp_path: Path) -> None:
    path = tmp_path / "net.model-explorer.json"
    beside = model_explorer.write(drawing(blocks()), path)
    assert beside == tmp_path / "net.node-data.json"
    graphs = {graph["id"]: graph for graph in json.loads(path.read_text(encoding="utf-8"))["graphs"]}
    data = json.loads(beside.read_text(encoding="utf-8"))
    assert data.keys() == graphs.keys()
    for name, found in data.items():
        dtypes = {
            node["id"]: row["value"]
            for node in graphs[name]["nodes"]
            for row in node["attrs"]
            if row["key"] == "dtype"
        }
        bits = {"bfloat16": 16, "float32": 32}
        assert {node: row["value"] for node, row in found["results"].items()} == {
            node: bits[dtype] for node, dtype in dtypes.items()
        }
