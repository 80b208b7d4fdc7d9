"""The picture as one HTML file: no server, no network, opened by a double click.

What never changes is written here; the page's own code lays out the graphs, and opens and closes modules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib import resources
from typing import Any

from amp_fx.viz import beside, style
from amp_fx.viz.graph import Drawing, Graph, Group, Marked, Node
from amp_fx.viz.style import COLOURS, Border, Face
from amp_fx.viz.words import cost_text, saved_text, short_dtype, size

#: the page's own code, in the order in which it runs
_SCRIPTS = ("visible.js", "words.js", "layout.js", "drawing.js", "viewer.js", "page.js")


def render(drawing: Drawing) -> str:
    """The page of a drawing, as text."""
    # inside a script element nothing may look like the element's end or like a comment
    found = json.dumps(data(drawing), separators=(",", ":"))
    found = found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {
        "title": escape(drawing.title),
        "light": beside.variables(0),
        "dark": beside.variables(1),
        "style": _asset("viewer.css") + beside.STYLE,
        "tabs": "".join(_tabs(drawing)),
        "beside": beside.drawn(drawing),
        "sentence": escape(beside.headline(drawing.totals)),
        "bars": "".join(_bars(drawing)),
        "more": escape(drawing.more),
        "policy": escape(drawing.policy),
        "saved": "".join(f"<div>{escape(saved_text(row))}</div>" for row in drawing.saved),
        "diff": escape(drawing.diff),
        "legend": "".join(_sample(*sample) for sample in style.legend(drawing)),
        "text": escape(drawing.text),
        "licence": _asset("vendor/dagre.LICENSE"),
        "layout": _asset("vendor/dagre.min.js"),
        "data": found,
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


def _tabs(drawing: Drawing) -> Iterator[str]:
    for index, graph in enumerate(drawing.graphs):
        text = drawing.label(graph)
        text += " (ends at a graph break)" if graph.graph_break else ""
        text += " (not rewritten)" if graph.fallback else ""
        why = escape(graph.graph_break or graph.fallback)
        yield f'<button role="tab" data-graph="{index}" title="{why}">{escape(text)}</button>'
    if beside.drawn(drawing):
        yield '<button role="tab" data-beside="">beside autocast</button>'


def _bars(drawing: Drawing) -> Iterator[str]:
    """A bar for each of what is compared: what casts move of all."""
    most = max((cost.moved or cost.cast_bytes for cost in drawing.totals.values()), default=0) or 1
    for name, cost in drawing.totals.items():
        casts = cost.cast_bytes if not cost.moved or cost.kernel_bytes is None else cost.kernel_bytes
        parts = {"casts": casts, "rest": (cost.moved or casts) - casts}
        bar = (f'<div class="{part}" style="width:{100 * n / most:.4g}%"></div>' for part, n in parts.items())
        yield f'<span>{escape(name)}</span><div class="bar">{"".join(bar)}</div>'
        yield f'<div class="number">{cost_text(cost)}</div>'


def _sample(border: Border, fill: str, colour: str) -> str:
    look = f"stroke:var(--{colour});stroke-width:{border.width};stroke-dasharray:{border.dashes or 'none'}"
    shape = f'rect x="3" y="3" width="30" height="13" rx="2" style="fill:{_css(fill)};{look}"'
    if not fill:
        shape = f'path d="M2,9.5 H34" style="{look}"'
    foot = ". Its foot shows its calls by dtype" if fill == "tinted" else ""
    return f'<svg width="36" height="19"><{shape}/></svg><span>{escape(border.meaning)}{foot}</span>'


def _css(colour: str) -> str:
    return f"var(--{colour})" if colour in COLOURS else colour


def data(drawing: Drawing) -> dict[str, Any]:
    """The data that the page's code reads, JSON-like."""
    hot = style.is_hot(drawing)
    borders = {name: [border.dashes, border.width] for name, border in style.CLASSES.items()}
    return {"borders": borders, "graphs": [_graph(graph, hot) for graph in drawing.graphs]}


def _graph(graph: Graph, hot: bool) -> dict[str, Any]:
    return {
        "phase": graph.phase,
        "depth": min(graph.depth, graph.deepest),
        "nodes": [_node(node, hot) for node in graph.nodes],
        "edges": [{**vars(edge), "casts": [_cast(row) for row in edge.casts]} for edge in graph.edges],
        "groups": [_group(graph, group, hot) for group in graph.groups],
    }


def _face(face: Face) -> dict[str, Any]:
    return {**face._asdict(), "fill": _css(face.fill), "ink": _css(face.ink)}


def _node(node: Node, hot: bool) -> dict[str, Any]:
    is_call = node.kind == "call"
    dtype = node.dtype or "no floating dtype"
    flops = f", {node.flops / 1e9:.3g} GFLOP" if node.flops else ""
    details = (
        node.label + (f"   in {node.module}" if node.module else ""),
        f"computes in {dtype}" if is_call else f"{node.kind}, {dtype}",
        f"earlier: {node.was}" if node.was else "",
        f"why: {node.reason}" + (f"   [{node.op_class}]" if is_call else ""),
        f"result: {list(node.shape)}, {size(node.bytes)}{flops}",
        *(f"kept for the backward: {line}" for line in node.saved),
        f"source: {node.source}" if node.source else "",
        f"name: {node.name}",
    )
    kept = ("name", "kind", "group", "module", "dtype", "reason", "drawn")
    row = {key: getattr(node, key) for key in kept}
    return {**row, "face": _face(style.node_face(node, hot=hot)), "details": "\n".join(filter(None, details))}


def _cast(row: Marked) -> dict[str, Any]:
    cast, mark = row
    return {
        "name": cast.name,
        "before": short_dtype(cast.from_dtype),
        "after": short_dtype(cast.to_dtype),
        "bytes": cast.bytes,
        "readers": len(cast.users),
        "kernel": cast.kernel,
        "narrows": cast.narrows,
        "mark": mark,
    }


def _group(graph: Graph, group: Group, hot: bool) -> dict[str, Any]:
    """``face`` and ``title`` are those of all equal groups, ``each`` and ``label`` those of one."""
    content = graph.content(group)
    calls = ", ".join(f"{count} calls in {dtype}" for dtype, count in content) or "no floating computation"
    inside = "; ".join(style.cast_lines(map(Marked, group.casts.values())))
    kept = ("label", "title", "group", "depth", "run", "first", "times")
    return {
        **{key: getattr(group, key) for key in kept},
        "face": _face(style.group_face(graph, group, hot=hot)),
        "each": _face(style.group_face(graph, group, hot=hot, folded=False)),
        "mix": [(_css(dtype) if dtype in COLOURS else "var(--plain)", count) for dtype, count in content],
        "inside": f"casts inside: {inside}" if inside else "",
        "details": f"{calls}\nresults: {size(sum(graph.nodes[leaf].bytes for leaf in group.leaves))}",
    }
