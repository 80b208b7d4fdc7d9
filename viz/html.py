"""The picture as one HTML file: no server, no network, opened by a double click.

What never changes is written here; the page's own code lays out the graphs, and opens and closes modules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib import resources
from typing import Any

from amp_fx.plans.plan import Cost
from amp_fx.viz import beside
from amp_fx.viz.graph import DEPTH, Drawing, Edge, Graph, Group, Marked, Node
from amp_fx.viz.style import (
    CLASSES,
    DARK,
    DTYPES,
    HEAT,
    LIGHT,
    Sample,
    cast_lines,
    cast_share,
    heat_samples,
    legend,
    module_words,
    per_cent,
    size,
)
from amp_fx.viz.words import short_dtype

__all__ = ["data", "render"]

#: the page's own code, in the order in which it runs
_SCRIPTS = ("visible.js", "words.js", "layout.js", "drawing.js", "viewer.js", "page.js")

#: casts in the legend: stroke, and more attributes
_LINES = {
    "lower": ("lower", "stroke-width:6"),
    "widen": ("widen", "stroke-width:6"),
    "fused": ("faint", "stroke-width:1.2;stroke-dasharray:6 4;opacity:.6"),
    "removed": ("faint", "stroke-width:2.6;stroke-dasharray:2 4"),
}


def render(drawing: Drawing) -> str:
    """The page of a drawing, as text."""
    parts = {
        "title": escape(drawing.title),
        "light": beside.variables(LIGHT),
        "dark": beside.variables(DARK),
        "style": _asset("viewer.css") + beside.STYLE,
        "tabs": "".join(_tabs(drawing)),
        "beside": beside.drawn(drawing),
        "sentence": _sentence(drawing),
        "bars": "".join(_bars(drawing)),
        "more": escape(drawing.more),
        "policy": escape(drawing.policy),
        "diff": escape(drawing.diff),
        "legend": "".join(map(_sample, legend(drawing))),
        "text": escape(drawing.text),
        "licence": _asset("vendor/dagre.LICENSE"),
        "layout": _asset("vendor/dagre.min.js"),
        "data": _json(data(drawing)),
        "script": '"use strict";\n(() => {\n' + "\n".join(map(_asset, _SCRIPTS)) + "})();\n",
    }
    # one pass over the template: what is put in is never searched for placeholders
    head, *rest = _asset("viewer.html").split("{{")
    pieces = [head]
    for piece in rest:
        name, text = piece.split("}}", 1)
        pieces += [parts[name], text]
    return "".join(pieces)


def _asset(name: str) -> str:
    return resources.files("amp_fx.viz").joinpath(name).read_text(encoding="utf-8")


def _json(found: dict[str, Any]) -> str:
    """JSON inside a script element: nothing in it may look like the element's end or like a comment."""
    text = json.dumps(found, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _tabs(drawing: Drawing) -> Iterator[str]:
    for index, graph in enumerate(drawing.graphs):
        text = drawing.label(graph)
        text += " (ends at a graph break)" * bool(graph.graph_break) + " (not rewritten)" * bool(
            graph.fallback
        )
        why = escape(graph.graph_break or graph.fallback)
        yield f'<button role="tab" data-graph="{index}" title="{why}">{escape(text)}</button>'
    if beside.drawn(drawing):
        yield '<button role="tab" data-beside="">beside autocast</button>'


def _sentence(drawing: Drawing) -> str:
    ours = next(iter(drawing.totals.values()), None)
    if ours is None:
        return ""
    if ours.moved and ours.kernel_bytes is not None:
        share = per_cent(ours.kernel_bytes, ours.moved)
        return f"Casts move {size(ours.kernel_bytes)} of {size(ours.moved)}, {share}."
    return f"{ours.casts} casts in the graph, {size(ours.cast_bytes)} if none is fused."


def _bars(drawing: Drawing) -> Iterator[str]:
    """A bar for each of what is compared: what casts move of all."""
    most = max((cost.moved or cost.cast_bytes for cost in drawing.totals.values()), default=0) or 1
    for name, cost in drawing.totals.items():
        parts, text = _bar(cost)
        pieces = (
            f'<div class="{part}" style="width:{100 * part_size / most:.4g}%"></div>'
            for part, part_size in parts
        )
        yield f'<span>{escape(name)}</span><div class="bar">{"".join(pieces)}</div><div class="number">{text}</div>'


def _bar(cost: Cost) -> tuple[list[tuple[str, int]], str]:
    if not cost.moved or cost.kernel_bytes is None:
        return [("casts", cost.cast_bytes)], f"{cost.casts} casts, {size(cost.cast_bytes)}"
    parts = [("casts", cost.kernel_bytes), ("rest", cost.moved - cost.kernel_bytes)]
    moved = f"{size(cost.kernel_bytes)} of {size(cost.moved)}"
    return parts, f"{cost.kernels} cast kernels of {cost.casts} casts, {moved}"


def _sample(sample: Sample) -> str:
    kind, look, text = sample
    if kind == "cast":
        colour, style = _LINES[look]
        shape = f'<path d="M2,9.5 H34" style="stroke:var(--{colour});{style}"/>'
    else:
        fill, style = "var(--paper)", "stroke-width:1"
        if look == "tint":
            fill, text = (
                "color-mix(in srgb, var(--tint) 53%, var(--paper))",
                f"{text}. Its foot shows its calls by dtype",
            )
        elif kind == "fill":
            fill = f"var(--{look})" if look in LIGHT else look
        elif look == "changed":
            style = "stroke:var(--changed);stroke-width:4"
        else:
            style = f"stroke-width:{CLASSES[look].width};stroke-dasharray:{CLASSES[look].dashes or 'none'}"
        shape = f'<rect x="3" y="3" width="30" height="13" rx="2" class="face" style="fill:{fill};{style}"/>'
    return f'<svg width="36" height="19">{shape}</svg><span>{escape(text)}</span>'


def data(drawing: Drawing) -> dict[str, Any]:
    """What the page's code reads, as JSON-like data."""
    style = {
        "dtypes": DTYPES,
        "classes": {name: [border.dashes, border.width] for name, border in CLASSES.items()},
        "heat": [colour for _, colour in HEAT],
        "isHot": bool(heat_samples(drawing)),
        "depth": DEPTH,
    }
    return {"style": style, "graphs": [_graph(graph) for graph in drawing.graphs]}


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "phase": graph.phase,
        "nodes": [_node(node) for node in graph.nodes],
        "edges": [_edge(edge) for edge in graph.edges],
        "groups": [_group(graph, group) for group in graph.groups],
    }


def _node(node: Node) -> dict[str, Any]:
    is_call = node.kind == "call"
    dtype = node.dtype or "no floating dtype"
    flops = f", {node.flops / 1e9:.3g} GFLOP" if node.flops else ""
    details = (
        node.label + (f"   in {node.module}" if node.module else ""),
        f"computes in {dtype}" if is_call else f"{node.kind}, {dtype}",
        f"earlier: {node.was}" if node.was else "",
        f"why: {node.reason}" + (f"   [{node.op_class}]" if is_call else ""),
        f"result: {list(node.shape)}, {size(node.bytes)}{flops}",
        f"source: {node.source}" if node.source else "",
        f"name: {node.name}",
    )
    kept = ("name", "kind", "group", "module", "dtype", "op_class", "lines", "reason", "heat", "drawn")
    row = {key: getattr(node, key) for key in kept}
    return {**row, "changed": bool(node.was), "details": "\n".join(line for line in details if line)}


def _edge(edge: Edge) -> dict[str, Any]:
    casts = [
        {
            "name": cast.name,
            "before": short_dtype(cast.from_dtype),
            "after": short_dtype(cast.to_dtype),
            "bytes": cast.bytes,
            "readers": len(cast.users),
            "kernel": cast.kernel,
            "narrows": cast.narrows,
            "mark": mark,
        }
        for cast, mark in edge.casts
    ]
    return {"tail": edge.tail, "head": edge.head, "repeated": edge.repeated, "casts": casts}


def _group(graph: Graph, group: Group) -> dict[str, Any]:
    leaves = [graph.nodes[leaf] for leaf in group.leaves]
    op, calls, casts = module_words(graph, group)
    inside = "; ".join(cast_lines(map(Marked, group.casts.values())))
    kept = ("label", "title", "parent", "depth", "run", "first", "times")
    return {
        **{key: getattr(group, key) for key in kept},
        "op": op,
        "op_class": group.main.op_class if group.main else None,
        "calls": calls,
        "mix": graph.content(group),
        "casts": casts,
        "inside": f"casts inside: {inside}" if inside else "",
        "share": cast_share(graph, group) / group.times,
        "bytes": sum(leaf.bytes for leaf in leaves),
        "heat": max((leaf.heat for leaf in leaves), default=0),
        "changed": any(leaf.was for leaf in leaves),
    }
