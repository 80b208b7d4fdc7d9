"""dot, SVG and PNG through Graphviz: the graphs by modules, as the page shows them at first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import graphviz

from amp_fx.errors import AmpFxError
from amp_fx.plans.files import write_bytes, write_text
from amp_fx.viz.graph import DEPTH, Drawing, Graph, Group, Marked, Node
from amp_fx.viz.style import (
    CLASSES,
    HEAT,
    LIGHT,
    Sample,
    cast_lines,
    cast_share,
    heat_samples,
    kernel_bytes,
    legend,
    module_words,
    tint,
    total_line,
)

__all__ = ["source", "write"]

_FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"

#: dots per inch of a PNG: sharp on a dense screen
_DPI = "110"

_HINT = (
    "the program 'dot' of Graphviz draws .svg and .png, and is not there; install it (Debian, Ubuntu: apt install"
    " graphviz; macOS: brew install graphviz), or save as .html or .dot, which need nothing"
)

_GRAPH = {
    "labelloc": "t",
    "labeljust": "l",
    "fontname": _FONT,
    "fontsize": "11",
    "ranksep": "0.3",
    "nodesep": "0.18",
}
_NODE = {"shape": "box", "fontname": _FONT, "fontsize": "10", "margin": "0.12,0.05", "height": "0.3"}
_EDGE = {"fontname": _FONT, "fontsize": "9", "arrowsize": "0.6", "color": "#777777"}
_CLUSTER = {"color": "#999999", "fontsize": "11", "style": "rounded", "labeljust": "l"}


def write(drawing: Drawing, path: Path, depth: int = DEPTH) -> None:
    """Writes a drawing as ``.dot``, ``.svg`` or ``.png``; modules deeper than ``depth`` are closed.

    Raises:
        AmpFxError: the ``dot`` program is missing or fails.
        OSError: the file cannot be written.
    """
    picture = source(drawing, depth)
    suffix = path.suffix.lower()
    if suffix == ".dot":
        write_text(path, picture.source)
        return
    if suffix == ".png":
        picture.attr(dpi=_DPI)
    try:
        write_bytes(path, picture.pipe(format=suffix.removeprefix(".")))
    except graphviz.ExecutableNotFound as error:
        raise AmpFxError(f"cannot write {path.name}: {_HINT}.") from error
    except graphviz.CalledProcessError as error:
        raise AmpFxError(f"cannot write {path.name}: dot failed: {error}.") from error


def source(drawing: Drawing, depth: int = DEPTH) -> graphviz.Digraph:
    """The drawing in the dot language: one cluster per graph, and the legend."""
    label = {"label": _heading(drawing), "bgcolor": "white"}
    picture = graphviz.Digraph(graph_attr={**_GRAPH, **label}, node_attr=_NODE, edge_attr=_EDGE)
    for index, graph in enumerate(drawing.graphs):
        title = drawing.label(graph)
        if graph.graph_break:
            title += f"\nends at a graph break: {graph.graph_break}"
        if graph.fallback:
            title += f"\nnot rewritten: {graph.fallback}"
        _Picture(graph, f"{index}_", depth, is_hot=bool(heat_samples(drawing))).draw(picture, title)
    return picture


class _Picture:
    """Draws one graph."""

    def __init__(self, graph: Graph, prefix: str, depth: int, *, is_hot: bool) -> None:
        self.graph, self.prefix, self.is_hot = graph, prefix, is_hot
        self.boxes = graph.boxes(depth)
        #: what stands in each open group
        self.inside: dict[int, list[str]] = {0: []}
        for box in dict.fromkeys(self.boxes):
            at = int(box[1:])
            home = graph.nodes[at].group if box[0] == "n" else graph.groups[at].parent
            for group in graph.around(home):
                self.inside.setdefault(group, [])
            self.inside[home or 0].append(box)

    def draw(self, picture: graphviz.Digraph, title: str) -> None:
        self._draw_group(picture, 0, title)
        drawn: dict[tuple[str, str], dict[str, Marked]] = {}
        for edge in self.graph.edges:
            ends = self.boxes[edge.tail], self.boxes[edge.head]
            if ends[0] != ends[1] and not edge.repeated:
                drawn.setdefault(ends, {}).update((row.cast.name, row) for row in edge.casts)
        rows = {ends: list(casts.values()) for ends, casts in drawn.items()}
        dearest = max((_moved(casts) for casts in rows.values()), default=0)
        for (tail, head), casts in rows.items():
            look = _cast_look(casts, dearest) if casts else {}
            picture.edge(self.prefix + tail, self.prefix + head, **look)

    def _draw_group(self, picture: graphviz.Digraph, group: int, title: str) -> None:
        cluster = graphviz.Digraph(f"cluster_{self.prefix}{group}")
        cluster.attr(label=_text(title, justify="l"), **_CLUSTER)
        for box in self.inside[group]:
            at = int(box[1:])
            if box[0] == "n":
                self._draw_node(cluster, self.graph.nodes[at], self.prefix + box)
            else:
                self._draw_closed(cluster, self.graph.groups[at], self.prefix + box)
        for inner in self.inside:
            if self.graph.groups[inner].parent == group:
                self._draw_group(cluster, inner, self.graph.groups[inner].title)
        picture.subgraph(cluster)

    def _draw_node(self, picture: graphviz.Digraph, node: Node, name: str) -> None:
        fill, ink = LIGHT.get(node.dtype, LIGHT["plain"]), LIGHT.get(f"on-{node.dtype}", "#000000")
        picture.node(
            name,
            _text("\n".join(node.lines)),
            tooltip=_text(f"{node.reason}\n{node.source}"),
            shape="box" if node.kind == "call" else "ellipse",
            fillcolor=HEAT[node.heat][1] if self.is_hot else fill,
            fontcolor="#000000" if self.is_hot else ink,
            **_border(node.op_class, changed=bool(node.was)),
        )

    def _draw_closed(self, picture: graphviz.Digraph, group: Group, name: str) -> None:
        leaves = [self.graph.nodes[leaf] for leaf in group.leaves]
        hot = max(leaf.heat for leaf in leaves)
        op, calls, casts = module_words(self.graph, group)
        each = "each: " if group.times > 1 and calls else ""
        picture.node(
            name,
            _text("\n".join(line for line in (group.title + op, each + calls, casts) if line)),
            tooltip=_text(f"module {group.label}: {len(leaves)} nodes"),
            shape="box3d",
            margin="0.16,0.1",
            fillcolor=HEAT[hot][1] if self.is_hot else tint(cast_share(self.graph, group)),
            **_border(
                group.main.op_class if group.main else "keep", changed=any(leaf.was for leaf in leaves)
            ),
        )


def _border(op_class: str, *, changed: bool) -> dict[str, str]:
    border = CLASSES[op_class]
    return {
        "style": f"filled,{border.dot}",
        "penwidth": str(max(border.width, 3.0) if changed else border.width),
        "color": LIGHT["changed" if changed else "border"],
    }


def _moved(casts: Sequence[Marked]) -> int:
    return kernel_bytes(cast for cast, _ in casts)


def _cast_look(casts: Sequence[Marked], dearest: int) -> dict[str, str]:
    """An edge as wide as the bytes of its casts; those that are fused fade."""
    colour = LIGHT["lower" if all(cast.narrows for cast, _ in casts) else "widen"]
    gone = all(mark == "removed" for _, mark in casts)
    fused = all(cast.kernel is False for cast, _ in casts)
    # a label lies over lines and frames: on paper of its own, it can be read there, and a narrow one meets fewer
    lines = "<BR/>".join(escape(line).replace("  ", "<BR/>") for line in cast_lines(casts))
    label = f'<TABLE BORDER="0" CELLPADDING="1" BGCOLOR="white"><TR><TD>{lines}</TD></TR></TABLE>'
    return {
        "label": f"<{label}>",
        "color": f"{colour}80" if fused else colour,
        "fontcolor": f"{colour}b0" if fused else colour,
        "penwidth": f"{1.0 if fused else 1.5 + 4.5 * _moved(casts) / max(dearest, 1):.1f}",
        "style": "dotted" if gone else "dashed" if fused else "solid",
    }


def _heading(drawing: Drawing) -> str:
    """The title and the legend. As a label of the whole they take no room among the boxes."""
    lines = [f"{drawing.title}: cast placement, policy {drawing.policy}"]
    lines += [total_line(name, cost) for name, cost in drawing.totals.items()]
    if drawing.more:
        lines.append(drawing.more)
    if drawing.diff:
        lines.append(f"against the earlier report: {drawing.diff.splitlines()[0]}")
    title = "".join(f'<FONT POINT-SIZE="15">{escape(line)}</FONT><BR ALIGN="LEFT"/>' for line in lines)
    cells = [_legend_cells(sample) for sample in legend(drawing)]
    half = -(-len(cells) // 2)
    columns = cells[:half], [*cells[half:], '<TD COLSPAN="2"></TD>'][:half]
    rows = "".join(f"<TR>{left}{right}</TR>" for left, right in zip(*columns, strict=True))
    head = "".join(f'<TR><TD ALIGN="LEFT" COLSPAN="4">{text}</TD></TR>' for text in (title, "legend"))
    return f'<<TABLE BORDER="0" CELLSPACING="4" CELLPADDING="2">{head}{rows}</TABLE>>'


def _legend_cells(sample: Sample) -> str:
    """Two cells of a table in dot's own HTML: how it looks, and what it means."""
    kind, look, text = sample
    inside = ""
    if kind == "fill":
        attributes = f'BORDER="1" BGCOLOR="{tint(0.5) if look == "tint" else LIGHT.get(look, look)}"'
    elif look == "changed":
        attributes = f'BORDER="3" COLOR="{LIGHT[look]}"'
    elif kind == "border":
        attributes = f'BORDER="{round(CLASSES[look].width)}" STYLE="{CLASSES[look].dot}"'
    else:
        line = {"fused": "- - ", "removed": ". . "}.get(look, "\N{EM DASH}") + "\N{RIGHTWARDS ARROW}"
        attributes, inside = "", f'<FONT COLOR="{LIGHT.get(look, LIGHT["lower"])}">{line}</FONT>'
    return f'<TD WIDTH="40" {attributes}>{inside}</TD><TD ALIGN="LEFT">{escape(text)}</TD>'


def _text(text: str, *, justify: str = "n") -> str:
    """A label as it is meant: dot knows escapes, entities and HTML-like labels, which user text must not be."""
    lines = [graphviz.escape(line) for line in text.replace("&", "&amp;").split("\n")]
    return lines[0] if len(lines) == 1 and justify == "n" else "".join(f"{line}\\{justify}" for line in lines)
