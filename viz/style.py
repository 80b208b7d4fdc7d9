"""How dtypes, classes and casts look, the same in every writer. Each is also written out: colour alone says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from amp_fx.precision.plans.plan import CastPlan
from amp_fx.viz.graph import Drawing, Graph, Group, Marked, Node
from amp_fx.viz.words import in_bits, short_dtype, size

#: name -> in a light window, in a dark one. The first are fills by compute dtype: low precision is dark, fp32 light, so
#: that they differ in print, too; ``on-`` is text on these. Casts to a narrower and to a wider dtype are Okabe-Ito's
#: blue and vermilion; closed modules are tinted by the bytes that casts move in them
COLOURS = {
    "int8": ("#8a2b55", "#e79bbd"),
    "float8_e4m3fn": ("#6a3d9a", "#c3a5e8"),
    "bfloat16": ("#2a78ad", "#5eb0e5"),
    "float16": ("#1f7f63", "#45bf99"),
    "float32": ("#fdecb8", "#4b3e17"),
    "on-int8": ("#ffffff", "#2b0617"),
    "on-float8_e4m3fn": ("#ffffff", "#160527"),
    "on-bfloat16": ("#ffffff", "#00131f"),
    "on-float16": ("#ffffff", "#001f16"),
    "on-float32": ("#332600", "#ffeab0"),
    "plain": ("#eeeeee", "#33363b"),
    "lower": ("#0072b2", "#6cbcf2"),
    "widen": ("#c04a00", "#ff9a5c"),
    "changed": ("#cc0000", "#ff6b6b"),
    "tint": ("#d1495b", "#e0566a"),
    "tinted": ("#e79fa8", "#813844"),
    "paper": ("#ffffff", "#15171a"),
    "panel": ("#fafafa", "#1c1f23"),
    "ink": ("#111111", "#ececec"),
    "faint": ("#555555", "#a7a9ad"),
    "line": ("#999999", "#7d8086"),
    "frame": ("#00000008", "#ffffff0a"),
    "border": ("#222222", "#d5d5d5"),
}

DTYPES = ("int8", "float8_e4m3fn", "bfloat16", "float16", "float32")
#: fill colours by what rounding a call adds to the error of the gradient, or by how far its result is off: (below,
#: colour). Lightness tells them apart, too. The first is for what was not measured
HEAT = ((0.0, "#eeeeee"), (1e-4, "#fff7e0"), (1e-3, "#fdd9a0"), (1e-2, "#fbaa6c"), (math.inf, "#ef7350"))
INK_ON_HEAT = "#111111"

#: what calls are coloured by -> what that means, and how it is said that it has no end
MEASURED = {
    "sensitivity": ("rounding adds {} to the error", "overflows"),
    "error": ("{} from the reference", "not finite"),
}


class Border(NamedTuple):
    """The border of a box, or the line of a cast: what it means, dashes in SVG, style in dot, width in points."""

    meaning: str
    dashes: str = ""
    dot: str = "solid"
    width: float = 1.0


CLASSES = {
    "low": Border("on the low-precision list", width=2.0),
    "fp32": Border("on the fp32 list", width=3.6),
    "promote": Border("widest of its arguments", "7 3", "dashed", 1.4),
    "follow": Border("moves values, as its argument", "2 3", "dotted", 1.4),
    "keep": Border("as the program wrote it", width=0.8),
    "user": Border("by your rule", "10 3 2 3", "dashed", 3.6),
}


class Face(NamedTuple):
    """The text and look of a box; its ``share`` of the bytes that casts move tints a closed module."""

    lines: list[str]
    fill: str
    ink: str
    op_class: str
    changed: bool
    share: float = 0.0


def node_face(node: Node, *, hot: bool) -> Face:
    """The box of a call, an input, a parameter or a result."""
    dtype = short_dtype(node.dtype)
    if node.was:
        dtype = f"{short_dtype(node.was)} \N{RIGHTWARDS DOUBLE ARROW} {dtype or 'none'}"
    fill, ink = (node.dtype, f"on-{node.dtype}") if node.dtype in COLOURS else ("plain", "ink")
    if hot:
        fill, ink = HEAT[node.heat][1], INK_ON_HEAT
    kept = f"kept {in_bits([node.kept])}" if node.kept else ""
    if node.kept_in[0] < node.kept_in[1]:
        kept += f" in {node.kept_in[0]} of {node.kept_in[1]} blocks"
    lines = [line for line in (node.label, dtype, node.measured, kept) if line]
    return Face(lines, fill, ink, node.op_class, bool(node.was))


def group_face(graph: Graph, group: Group, *, hot: bool, folded: bool = True) -> Face:
    """The box of a closed module, which stands for all that are equal to it where it is folded."""
    leaves, casts = [graph.nodes[leaf] for leaf in group.leaves], group.casts.values()
    times = group.times if folded else 1
    lines = [(group.title if folded else group.label) + (f": {group.main.op}" if group.main else "")]
    if calls := ", ".join(f"{count} in {short_dtype(dtype)}" for dtype, count in graph.content(group)):
        lines.append(f"each: {calls}" if times > 1 else calls)
    if casts:
        moved = "fused" if all(cast.kernel is False for cast in casts) else size(kernel_bytes(casts))
        lines.append(f"{len(casts)} cast{'s' * (len(casts) > 1)} inside, {moved}")
    if kept := sorted({leaf.kept for leaf in leaves} - {0}):
        lines.append(f"values kept {in_bits(kept)} inside")
    return Face(
        lines,
        HEAT[max((leaf.heat for leaf in leaves), default=0)][1] if hot else "",
        INK_ON_HEAT if hot else "ink",
        group.main.op_class if group.main else "keep",
        any(leaf.was for leaf in leaves),
        times * kernel_bytes(casts) / max(kernel_bytes(graph.groups[0].casts.values()), 1),
    )


def legend(drawing: Drawing) -> Iterator[tuple[Border, str, str]]:
    """The entries of a legend, each a border, its fill and its colour; a line has no fill."""
    nodes = [node for graph in drawing.graphs for node in graph.nodes]
    casts = [row for graph in drawing.graphs for edge in graph.edges for row in edge.casts]
    dtypes, classes = {node.dtype for node in nodes}, {node.op_class for node in nodes}
    if is_hot(drawing):
        meaning, over = MEASURED[drawing.measured]
        texts = ["not measured", *(meaning.format(f"less than {limit:g}") for limit, _ in HEAT[1:-1])]
        texts.append(f"{meaning.format(f'{HEAT[-2][0]:g} or more')}, or {over}")
        for place in sorted({node.heat for node in nodes}):
            yield Border(texts[place]), HEAT[place][1], "border"
    else:
        for name in DTYPES:
            if name in dtypes:
                yield Border(f"computes in {short_dtype(name)}"), name, "border"
        yield Border("a closed module; the redder, the more bytes its casts move"), "tinted", "border"
        yield Border("no floating dtype"), "plain", "border"
    for name, border in CLASSES.items():
        if name in classes:
            yield border._replace(meaning=f"{name}: {border.meaning}"), "paper", "border"
    if any(node.was for node in nodes):
        yield Border("changed: earlier \N{RIGHTWARDS DOUBLE ARROW} now", width=4), "paper", "changed"
    yield Border("cast to a narrower dtype, as wide as its bytes", width=6), "", "lower"
    yield Border("cast to a wider dtype, likewise", width=6), "", "widen"
    if any(cast.kernel is False for cast, _ in casts):
        text = "cast that Inductor fuses into another kernel: it moves nothing of its own"
        yield Border(text, "6 4", "dashed"), "", "lower"
    if any(mark == "removed" for _, mark in casts):
        yield Border("cast removed since the earlier report", "2 4", "dotted", 2.6), "", "lower"


def is_hot(drawing: Drawing) -> bool:
    """True where calls are coloured by what was measured of them."""
    return any(node.heat for graph in drawing.graphs for node in graph.nodes)


def measured(error: float | None, what: str) -> tuple[str, int]:
    """The sensitivity of a call in words, and its position in :data:`HEAT`; None is an overflow."""
    if error is None:
        return MEASURED[what][1], len(HEAT) - 1
    return f"{what} {error:.0e}", next(place for place, (limit, _) in enumerate(HEAT) if error < limit)


def kernel_bytes(casts: Iterable[CastPlan]) -> int:
    """Bytes of the casts that Inductor does not fuse, as far as that is known."""
    return sum(cast.bytes for cast in casts if cast.kernel is not False)


def cast_lines(casts: Iterable[Marked]) -> list[str]:
    """The casts on one edge, a line per direction: ``"fp32 -> bf16  1.5 MB in 2 casts, fused"``."""
    found: dict[tuple[str, str], list[CastPlan]] = {}
    for cast, mark in casts:
        arrow = f"{short_dtype(cast.from_dtype)} \N{RIGHTWARDS ARROW} {short_dtype(cast.to_dtype)}"
        found.setdefault((arrow, mark), []).append(cast)
    lines = []
    for (arrow, mark), rows in found.items():
        count = f" in {len(rows)} casts" if len(rows) > 1 else ""
        fused = sum(cast.kernel is False for cast in rows)
        fate = "" if not fused else ", fused" if fused == len(rows) else f", {fused} fused"
        lines.append(f"{arrow}  {size(sum(cast.bytes for cast in rows))}{count}{fate}{mark and f', {mark}'}")
    return lines
