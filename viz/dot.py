"""dot, SVG and PNG through Graphviz: the picture as the HTML page shows it at first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import graphviz

from amp_fx.errors import AmpFxError
from amp_fx.plans.files import write_bytes, write_text
from amp_fx.viz.schema import Cast, Drawing, Graph, Group, Node, is_lowering, short_dtype
from amp_fx.viz.style import (
    CHANGED,
    CLASSES,
    DTYPES,
    HEAT,
    INK,
    LOWER,
    PLAIN,
    WIDEN,
    cast_lines,
    graph_label,
    heat_samples,
    size,
    tint,
    total_line,
)
from amp_fx.viz.view import DEPTH, Box, View, casts_inside, content, view

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["source", "write"]

_FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"

#: dots per inch of a PNG: sharp on a dense screen
_DPI = "110"

_HINT = (
    "the program 'dot' of Graphviz draws .svg and .png, and is not there; install it (Debian, Ubuntu: apt install"
    " graphviz; macOS: brew install graphviz), or save as .html or .dot, which need nothing"
)


def write(model: Drawing, path: Path, depth: int = DEPTH) -> None:
    """Writes a drawing as ``.dot``, ``.svg`` or ``.png``.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
        path: the suffix says the format.
        depth: modules deeper than this are closed.

    Raises:
        AmpFxError: the ``dot`` program is missing or fails.
        OSError: the file cannot be written.
    """
    picture = source(model, depth)
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


def source(model: Drawing, depth: int = DEPTH) -> graphviz.Digraph:
    """The drawing in the dot language: one cluster per graph, and the legend.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
        depth: modules deeper than this are closed.
    """
    picture = graphviz.Digraph(
        graph_attr={
            "label": _heading(model),
            "labelloc": "t",
            "labeljust": "l",
            "fontname": _FONT,
            "fontsize": "11",
            "ranksep": "0.3",
            "nodesep": "0.18",
            "bgcolor": "white",
        },
        node_attr={
            "shape": "box",
            "fontname": _FONT,
            "fontsize": "10",
            "margin": "0.12,0.05",
            "height": "0.3",
        },
        edge_attr={"fontname": _FONT, "fontsize": "9", "arrowsize": "0.6", "color": "#777777"},
    )
    for index, graph in enumerate(model["graphs"]):
        shown = view(graph, depth)
        _draw_group(picture, graph, shown, index, 0, graph_label(model, graph), _fills(model, graph))
        dearest = max((_real(casts.values()) for casts in shown.edges.values()), default=0)
        for (tail, head), casts in shown.edges.items():
            look = _cast_look(list(casts.values()), dearest)
            picture.edge(_name(index, tail), _name(index, head), **look)
    return picture


def _heading(model: Drawing) -> str:
    """The title and the legend. As a label of the whole they take no room among the boxes."""
    rows = "".join(
        f'<TR><TD ALIGN="LEFT"><FONT POINT-SIZE="15">{escape(line)}</FONT></TD></TR>'
        for line in _title(model).split("\n")
    )
    return (
        f'<<TABLE BORDER="0" CELLSPACING="1">{rows}<TR><TD ALIGN="LEFT">{_legend(model)}</TD></TR></TABLE>>'
    )


def _title(model: Drawing) -> str:
    lines = [f"{model['title']}: cast placement, policy {model['policy']}", *map(total_line, model["totals"])]
    if model["more"]:
        lines.append(model["more"])
    if model["diff"]:
        lines.append(f"against the earlier report: {model['diff'].splitlines()[0]}")
    return "\n".join(lines)


@contextmanager
def _cluster(picture: graphviz.Digraph, name: str, label: str) -> Iterator[graphviz.Digraph]:
    inside = graphviz.Digraph(name=f"cluster_{name}")
    inside.attr(
        label=_text(label, justify="l"), color="#999999", fontsize="11", style="rounded", labeljust="l"
    )
    yield inside
    picture.subgraph(inside)


#: fill and text
_Fill = tuple[str, str]


def _fills(model: Drawing, graph: Graph) -> list[_Fill]:
    """The colours of every node: what rounding it costs where that was measured, else its dtype."""
    if heat_samples(model):
        return [(HEAT[node["heat"]][1], "#000000") for node in graph["nodes"]]
    dtypes = [node["dtype"] for node in graph["nodes"]]
    return [(DTYPES.get(dtype, PLAIN), INK.get(dtype, "#000000")) for dtype in dtypes]


def _draw_group(
    picture: graphviz.Digraph,
    graph: Graph,
    shown: View,
    index: int,
    group: int,
    label: str,
    fills: list[_Fill],
) -> None:
    with _cluster(picture, f"{index}_{group}", label) as cluster:
        for node in shown.nodes:
            if graph["nodes"][node]["group"] == group:
                _draw_node(cluster, graph["nodes"][node], _name(index, ("node", node)), fills[node])
        for closed in shown.closed:
            if graph["groups"][closed]["parent"] == group:
                _draw_closed(cluster, graph, closed, _name(index, ("group", closed)))
        for inner in shown.open:
            if graph["groups"][inner]["parent"] == group:
                _draw_group(cluster, graph, shown, index, inner, _times(graph["groups"][inner]), fills)


def _times(group: Group) -> str:
    return group["title"] + (f"  x{group['times']}" if group["times"] > 1 else "")


def _draw_node(picture: graphviz.Digraph, node: Node, name: str, fill: _Fill) -> None:
    dtype = short_dtype(node["dtype"])
    if node["was"]:
        dtype = f"{short_dtype(node['was'])} => {dtype or 'none'}"
    picture.node(
        name,
        _text("\n".join(line for line in (node["label"], dtype, node["sensitivity"]) if line)),
        tooltip=_text(f"{node['reason']}\n{node['source']}"),
        shape="box" if node["kind"] == "call" else "ellipse",
        fillcolor=fill[0],
        fontcolor=fill[1],
        **_border(node["op_class"], changed=bool(node["was"])),
    )


def _draw_closed(picture: graphviz.Digraph, graph: Graph, group: int, name: str) -> None:
    row = graph["groups"][group]
    nodes = graph["nodes"]
    found = content(graph, row["leaves"])
    label = _times(row)
    if row["main"] is not None:
        label += f": {nodes[row['main']]['op']}"
    mix = "each: " * (row["times"] > 1 and bool(found)) + ", ".join(
        f"{count} in {short_dtype(dtype)}" for dtype, count in found.most_common()
    )
    border = _border(
        nodes[row["main"]]["op_class"] if row["main"] is not None else "keep",
        changed=any(nodes[leaf]["was"] for leaf in row["leaves"]),
    )
    tooltip = f"module {row['label']}: {len(row['leaves'])} nodes"
    casts = casts_inside(graph, group)
    hot = max((nodes[leaf]["heat"] for leaf in row["leaves"]), default=0)
    share = (
        row["times"] * _real(casts) / max(_real(cast for edge in graph["edges"] for cast in edge["casts"]), 1)
    )
    moved = "fused" if all(cast["kernel"] is False for cast in casts) else size(_real(casts))
    inside = f"{len(casts)} cast{'s' * (len(casts) > 1)} inside, {moved}"
    text = "\n".join(line for line in (label, mix, inside if casts else "") if line)
    picture.node(
        name,
        _text(text),
        tooltip=_text(tooltip),
        shape="box3d",
        margin="0.16,0.1",
        fillcolor=HEAT[hot][1] if hot else tint(share),
        **border,
    )


def _border(op_class: str, *, changed: bool) -> dict[str, str]:
    border = CLASSES[op_class]
    return {
        "style": f"filled,{border.dot}",
        "penwidth": str(max(border.width, 3.0) if changed else border.width),
        "color": CHANGED if changed else "#222222",
    }


def _real(casts: Iterable[Cast]) -> int:
    """Bytes of the casts that Inductor does not fuse, as far as that is known; each once."""
    return sum({cast["name"]: cast["bytes"] for cast in casts if cast["kernel"] is not False}.values())


def _cast_look(casts: Collection[Cast], dearest: int) -> dict[str, str]:
    """An edge as wide as the bytes of its casts; those that are fused fade."""
    if not casts:
        return {}
    colour = LOWER if all(map(is_lowering, casts)) else WIDEN
    gone = all(cast["mark"] == "removed" for cast in casts)
    fused = all(cast["kernel"] is False for cast in casts)
    width = 1.0 if fused else 1.5 + 4.5 * _real(casts) / max(dearest, 1)
    # a label lies over lines and frames: on paper of its own, it can be read there, and a narrow one meets fewer
    lines = "<BR/>".join(escape(line).replace("  ", "<BR/>") for line in cast_lines(casts))
    label = f'<TABLE BORDER="0" CELLPADDING="1" BGCOLOR="white"><TR><TD>{lines}</TD></TR></TABLE>'
    return {
        "label": f"<{label}>",
        "color": f"{colour}80" if fused else colour,
        "fontcolor": f"{colour}b0" if fused else colour,
        "penwidth": f"{width:.1f}",
        "style": "dotted" if gone else "dashed" if fused else "solid",
    }


def _legend(model: Drawing) -> str:
    """Explains what occurs in the picture: a table of two columns, whose text is all our own."""
    nodes = [node for graph in model["graphs"] for node in graph["nodes"]]
    casts = [cast for graph in model["graphs"] for edge in graph["edges"] for cast in edge["casts"]]
    present = {node["dtype"] for node in nodes}
    fills = [
        (colour, f"computes in {short_dtype(dtype)}") for dtype, colour in DTYPES.items() if dtype in present
    ]
    fills.append((tint(0.5), "a closed module; the redder, the more bytes its casts move"))
    fills.append((PLAIN, "no floating dtype"))
    samples = [(f'BGCOLOR="{colour}"', "", text) for colour, text in heat_samples(model) or fills]
    present = {node["op_class"] for node in nodes}
    samples += [
        (f'BORDER="{round(border.width)}" STYLE="{border.dot}"', "", f"{name}: {border.meaning}")
        for name, border in CLASSES.items()
        if name in present
    ]
    if any(node["was"] for node in nodes):
        samples.append((f'BORDER="3" COLOR="{CHANGED}"', "", "changed: earlier =&gt; now"))
    samples += [
        ('BORDER="0"', f'<FONT COLOR="{colour}">{line}</FONT>', text)
        for line, colour, text in _cast_samples(casts)
    ]
    cells = [
        f'<TD WIDTH="40" {look}>{inside}</TD><TD BORDER="0" ALIGN="LEFT">{text}</TD>'
        for look, inside, text in samples
    ]
    half = -(-len(cells) // 2)
    empty = '<TD BORDER="0"></TD><TD BORDER="0"></TD>'
    rows = "".join(
        f"<TR>{left}{right}</TR>"
        for left, right in zip(cells[:half], [*cells[half:], *[empty] * (2 * half - len(cells))], strict=True)
    )
    head = '<TR><TD BORDER="0" ALIGN="LEFT" COLSPAN="4">legend</TD></TR>'
    return f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="4" CELLPADDING="2">{head}{rows}</TABLE>'


def _cast_samples(casts: Collection[Cast]) -> list[tuple[str, str, str]]:
    samples = [
        ("<B>\N{EM DASH}\N{RIGHTWARDS ARROW}</B>", LOWER, "cast to a narrower dtype, as wide as its bytes"),
        ("<B>\N{EM DASH}\N{RIGHTWARDS ARROW}</B>", WIDEN, "cast to a wider dtype, likewise"),
    ]
    if any(cast["kernel"] is False for cast in casts):
        samples.append(
            (
                "- - \N{RIGHTWARDS ARROW}",
                LOWER,
                "cast fused into another kernel by Inductor: it moves nothing",
            )
        )
    if any(cast["mark"] == "removed" for cast in casts):
        samples.append((". . \N{RIGHTWARDS ARROW}", LOWER, "removed since the earlier report"))
    return samples


def _name(graph: int, box: Box) -> str:
    return f"{box[0]}_{graph}_{box[1]}"


def _text(text: str, *, justify: str = "n") -> str:
    """A label as it is meant: dot knows escapes, entities and HTML-like labels, which user text must not be."""
    lines = [graphviz.escape(line) for line in text.replace("&", "&amp;").split("\n")]
    return lines[0] if len(lines) == 1 and justify == "n" else "".join(f"{line}\\{justify}" for line in lines)
