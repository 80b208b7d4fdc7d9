"""dot, SVG and PNG through Graphviz: the graphs by modules, as the page shows them at first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap

import graphviz

from amp_fx.errors import AmpFxError
from amp_fx.precision.plans.files import write_bytes, write_text
from amp_fx.viz import style
from amp_fx.viz.graph import Drawing, Graph, Marked
from amp_fx.viz.style import CLASSES, COLOURS, Border, Face
from amp_fx.viz.words import cost_text

_FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"
#: dots per inch of a PNG: sharp on a dense screen
_DPI = "110"
#: characters of a line above a graph
_TITLE = 60

_HINT = (
    "the program 'dot' of Graphviz draws .svg and .png, and is not there; install it (Debian, Ubuntu: apt install"
    " graphviz; macOS: brew install graphviz), or save as .html or .dot, which need nothing"
)

_TEXT = {"labelloc": "t", "labeljust": "l", "fontname": _FONT, "fontsize": "11"}
_GRAPH = {**_TEXT, "bgcolor": "white", "ranksep": "0.3", "nodesep": "0.18"}
_NODE = {"fontname": _FONT, "fontsize": "10", "margin": "0.12,0.05", "height": "0.3"}
_EDGE = {"fontname": _FONT, "fontsize": "9", "arrowsize": "0.6", "color": "#777777"}
_CLUSTER = {"color": "#999999", "fontsize": "11", "style": "rounded", "labeljust": "l"}
_LIGHT = {name: light for name, (light, _) in COLOURS.items()}


def write(drawing: Drawing, path: Path) -> None:
    """Writes a drawing as ``.dot``, ``.svg`` or ``.png``; the last two need the ``dot`` program.

    AmpFxError where ``dot`` is missing or fails.
    """
    picture = source(drawing)
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


def source(drawing: Drawing) -> graphviz.Digraph:
    """The drawing in the dot language: one cluster per graph, and the legend."""
    look = {**_GRAPH, "label": _heading(drawing)}
    picture = graphviz.Digraph(graph_attr=look, node_attr=_NODE, edge_attr=_EDGE)
    for index, graph in enumerate(drawing.graphs):
        title = drawing.label(graph)
        why = f"ends at a graph break: {graph.graph_break}" if graph.graph_break else ""
        why += f"\nnot rewritten: {graph.fallback}" if graph.fallback else ""
        # a frame is as wide as its title
        title = "\n".join([title, *(part for line in why.splitlines() for part in wrap(line, _TITLE))])
        _Picture(graph, f"{index}_", style.is_hot(drawing)).draw(picture, title)
    return picture


class _Picture:
    """Draws one graph."""

    def __init__(self, graph: Graph, prefix: str, hot: bool) -> None:
        self.graph, self.prefix, self.hot = graph, prefix, hot
        self.boxes = graph.boxes(graph.depth)
        #: what stands in each open group
        self.inside: dict[int, list[str]] = {0: []}
        for box in dict.fromkeys(self.boxes):
            row = (graph.nodes if box[0] == "n" else graph.groups)[int(box[1:])]
            for group in graph.around(row.group):
                self.inside.setdefault(group, [])
            self.inside[row.group or 0].append(box)

    def draw(self, picture: graphviz.Digraph, title: str) -> None:
        self._draw_group(picture, 0, title)
        drawn: dict[tuple[str, str], dict[str, Marked]] = {}
        for edge in self.graph.edges:
            ends = self.boxes[edge.tail], self.boxes[edge.head]
            if ends[0] != ends[1] and not edge.repeated:
                drawn.setdefault(ends, {}).update((row.cast.name, row) for row in edge.casts)
        rows = {ends: list(casts.values()) for ends, casts in drawn.items()}
        dearest = max((style.kernel_bytes(cast for cast, _ in casts) for casts in rows.values()), default=0)
        for (tail, head), casts in rows.items():
            look = _cast_look(casts, dearest) if casts else {}
            picture.edge(self.prefix + tail, self.prefix + head, **look)

    def _draw_group(self, picture: graphviz.Digraph, group: int, title: str) -> None:
        cluster = graphviz.Digraph(f"cluster_{self.prefix}{group}")
        cluster.attr(label=_text(title, justify="l"), **_CLUSTER)
        for box in self.inside[group]:
            self._draw_box(cluster, box, int(box[1:]))
        for inner in self.inside:
            if self.graph.groups[inner].group == group:
                self._draw_group(cluster, inner, self.graph.groups[inner].title)
        picture.subgraph(cluster)

    def _draw_box(self, picture: graphviz.Digraph, box: str, at: int) -> None:
        if box[0] == "n":
            node = self.graph.nodes[at]
            face, tip = style.node_face(node, hot=self.hot), f"{node.reason}\n{node.source}"
            look = {"shape": "box" if node.kind == "call" else "ellipse"}
        else:
            group = self.graph.groups[at]
            face = style.group_face(self.graph, group, hot=self.hot)
            tip = f"module {group.label}: {len(group.leaves)} nodes"
            look = {"shape": "box3d", "margin": "0.16,0.1"}
        text = _text("\n".join(face.lines))
        picture.node(self.prefix + box, text, tooltip=_text(tip), **look, **look_of(face))


def look_of(face: Face) -> dict[str, str]:
    """Attributes of a box in dot text: colours and borders."""
    border = CLASSES[face.op_class]
    # a closed module: white to its tint
    strength = 0.75 * min(face.share, 1.0) ** 0.5
    tint = (round(255 - strength * (255 - part)) for part in bytes.fromhex(_LIGHT["tint"][1:]))
    return {
        "fillcolor": _LIGHT.get(face.fill, face.fill) or f"#{''.join(f'{mixed:02x}' for mixed in tint)}",
        "fontcolor": _LIGHT.get(face.ink, face.ink),
        "style": f"filled,{border.dot}",
        "penwidth": str(max(border.width, 3.0) if face.changed else border.width),
        "color": _LIGHT["changed" if face.changed else "border"],
    }


def _cast_look(casts: Sequence[Marked], dearest: int) -> dict[str, str]:
    """An edge as wide as the bytes of its casts; those that are fused fade."""
    colour = _LIGHT["lower" if all(cast.narrows for cast, _ in casts) else "widen"]
    gone = all(mark == "removed" for _, mark in casts)
    fused = all(cast.kernel is False for cast, _ in casts)
    width = 1.0 if fused else 1.5 + 4.5 * style.kernel_bytes(cast for cast, _ in casts) / max(dearest, 1)
    # a label lies over lines and frames: on paper of its own, it can be read there, and a narrow one meets fewer
    lines = "<BR/>".join(escape(line).replace("  ", "<BR/>") for line in style.cast_lines(casts))
    label = f'<TABLE BORDER="0" CELLPADDING="1" BGCOLOR="white"><TR><TD>{lines}</TD></TR></TABLE>'
    return {
        "label": f"<{label}>",
        "color": f"{colour}80" if fused else colour,
        "fontcolor": f"{colour}b0" if fused else colour,
        "penwidth": f"{width:.1f}",
        "style": "dotted" if gone else "dashed" if fused else "solid",
    }


def _heading(drawing: Drawing) -> str:
    """The title and the legend. As a label of the whole they take no room among the boxes."""
    lines = [f"{drawing.title}: cast placement, policy {drawing.policy}"]
    lines += [f"{name}: {cost_text(cost)}" for name, cost in drawing.totals.items()]
    if drawing.more:
        lines.append(drawing.more)
    if drawing.diff:
        lines.append(f"against the earlier report: {drawing.diff.splitlines()[0]}")
    title = "".join(f'<FONT POINT-SIZE="15">{escape(line)}</FONT><BR ALIGN="LEFT"/>' for line in lines)
    cells = [_legend_cells(*sample) for sample in style.legend(drawing)]
    half = -(-len(cells) // 2)
    columns = zip(cells[:half], [*cells[half:], '<TD COLSPAN="2"></TD>'], strict=False)
    rows = "".join(f"<TR>{left}{right}</TR>" for left, right in columns)
    head = "".join(f'<TR><TD ALIGN="LEFT" COLSPAN="4">{text}</TD></TR>' for text in (title, "legend"))
    return f'<<TABLE BORDER="0" CELLSPACING="4" CELLPADDING="2">{head}{rows}</TABLE>>'


def _legend_cells(border: Border, fill: str, colour: str) -> str:
    """Two cells of a table in dot's own HTML: how it looks, and what it means."""
    look = f'BORDER="{round(border.width)}" STYLE="{border.dot}" COLOR="{_LIGHT[colour]}"'
    inside = ""
    if fill:
        look += f' BGCOLOR="{_LIGHT.get(fill, fill)}"'
    else:
        line = {"solid": "\N{EM DASH}", "dashed": "- - ", "dotted": ". . "}[border.dot]
        look, inside = "", f'<FONT COLOR="{_LIGHT[colour]}">{line}\N{RIGHTWARDS ARROW}</FONT>'
    return f'<TD WIDTH="40" {look}>{inside}</TD><TD ALIGN="LEFT">{escape(border.meaning)}</TD>'


def _text(text: str, *, justify: str = "n") -> str:
    """A label as it is meant: dot knows escapes, entities and HTML-like labels, which user text must not be."""
    lines = [graphviz.escape(line) for line in text.replace("&", "&amp;").split("\n")]
    return lines[0] if len(lines) == 1 and justify == "n" else "".join(f"{line}\\{justify}" for line in lines)
