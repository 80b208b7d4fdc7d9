"""Files for Google's Model Explorer: the graphs with casts as an edge overlay, and node data that colours them.

    model-explorer report.model-explorer.json --node_data_paths=report.node-data.json

Model Explorer is a program of its own (``pip install ai-edge-model-explorer``); writing its files needs nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from amp_fx.plans.files import write_text
from amp_fx.viz.schema import BITS, Drawing, Edge, Graph, Node, is_lowering
from amp_fx.viz.style import DTYPES, LOWER, PLAIN, WIDEN, cast_lines, size

__all__ = ["SUFFIX", "graph_collection", "node_data", "write"]

#: how the graph file is named; the node data are beside it
SUFFIX, _DATA_SUFFIX = ".model-explorer.json", ".node-data.json"

#: node data are numbers: bits of the compute dtype


def write(model: Drawing, path: Path) -> Path:
    """Writes the graph file and, beside it, the node data.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
        path: of the graph file; ``x.model-explorer.json`` has its node data in ``x.node-data.json``.

    Returns:
        The path of the node data.

    Raises:
        OSError: a file cannot be written.
    """
    data = path.with_name(path.name.removesuffix(SUFFIX).removesuffix(".json") + _DATA_SUFFIX)
    write_text(path, json.dumps(graph_collection(model)))
    write_text(data, json.dumps(node_data(model)))
    return data


def graph_collection(model: Drawing) -> dict[str, Any]:
    """The graphs in Model Explorer's JSON form.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
    """
    return {"label": model["title"], "graphs": [_graph(graph) for graph in model["graphs"]]}


def node_data(model: Drawing) -> dict[str, Any]:
    """Compute dtypes in Model Explorer's node data form: bits and colour by graph and node.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
    """
    return {
        graph["label"]: {
            "name": "bits of the compute dtype",
            "results": {
                str(index): {"value": BITS[node["dtype"]], "bgColor": DTYPES.get(node["dtype"], PLAIN)}
                for index, node in enumerate(graph["nodes"])
                if node["dtype"] in BITS
            },
        }
        for graph in model["graphs"]
    }


def _graph(graph: Graph) -> dict[str, Any]:
    incoming: dict[int, list[Edge]] = {}
    for edge in graph["edges"]:
        incoming.setdefault(edge["head"], []).append(edge)
    return {
        "id": graph["label"],
        "nodes": [
            {
                "id": str(index),
                "label": node["label"],
                "namespace": _namespace(graph, node["group"]),
                "attrs": _attributes(node, incoming.get(index, [])),
                "incomingEdges": [
                    {
                        "sourceNodeId": str(edge["tail"]),
                        "sourceNodeOutputId": "0",
                        "targetNodeInputId": str(place),
                    }
                    for place, edge in enumerate(incoming.get(index, []))
                ],
                "outputsMetadata": [
                    {"id": "0", "attrs": [_pair("tensor_shape", f"{node['dtype']}{node['shape']}")]}
                ],
            }
            for index, node in enumerate(graph["nodes"])
        ],
        "tasksData": {"edgeOverlaysDataListLeftPane": [_casts(graph)]},
    }


def _namespace(graph: Graph, group: int | None) -> str:
    """``transformer/h.0/attn``; a slash in a label would add a level."""
    labels: list[str] = []
    while group:
        labels.insert(0, graph["groups"][group]["label"].replace("/", "\N{DIVISION SLASH}"))
        group = graph["groups"][group]["parent"]
    return "/".join(labels)


def _attributes(node: Node, edges: list[Edge]) -> list[dict[str, str]]:
    casts = [line for edge in edges for line in cast_lines(edge["casts"])]
    rows = {
        "dtype": node["dtype"],
        "earlier dtype": node["was"],
        "why": node["reason"],
        "class": node["op_class"] if node["kind"] == "call" else node["kind"],
        "casts it reads through": "; ".join(casts),
        "bytes of result": size(node["bytes"]),
        "FLOPs": str(node["flops"] or ""),
        "source": node["source"],
        "name": node["name"],
    }
    return [_pair(key, value) for key, value in rows.items() if value]


def _pair(key: str, value: str) -> dict[str, str]:
    return {"key": key, "value": value}


def _casts(graph: Graph) -> dict[str, Any]:
    """The edges with casts, to be laid over the graph."""
    overlays = []
    for name, colour, lowers in (("to a narrower dtype", LOWER, True), ("to a wider dtype", WIDEN, False)):
        edges = [
            {
                "sourceNodeId": str(edge["tail"]),
                "targetNodeId": str(edge["head"]),
                "label": "; ".join(cast_lines(edge["casts"])),
            }
            for edge in graph["edges"]
            if edge["casts"] and is_lowering(edge["casts"][-1]) is lowers
        ]
        if edges:
            overlays.append({"name": f"casts {name}", "edgeColor": colour, "edges": edges})
    return {"type": "edge_overlays", "name": "casts", "overlays": overlays}
