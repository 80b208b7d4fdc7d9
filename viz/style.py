"""How dtypes, classes and casts look, the same in every writer. Each is also written out: colour alone says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from amp_fx.plans.plan import CastPlan, Cost
from amp_fx.viz.graph import Drawing, Graph, Group, Marked
from amp_fx.viz.words import short_dtype

__all__ = [
    "CLASSES",
    "DARK",
    "DTYPES",
    "HEAT",
    "LIGHT",
    "MEASURED",
    "Border",
    "Sample",
    "cast_lines",
    "cast_share",
    "heat",
    "heat_samples",
    "kernel_bytes",
    "legend",
    "measured_text",
    "module_words",
    "per_cent",
    "size",
    "tint",
    "total_line",
]

#: name -> in a light window, in a dark one. The first are fills by compute dtype: low precision is dark, fp32 light, so
#: that they differ in print, too; ``on-`` is text on these. Casts to a narrower and to a wider dtype are Okabe-Ito's
#: blue and vermilion
_COLOURS = {
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
    "paper": ("#ffffff", "#15171a"),
    "panel": ("#fafafa", "#1c1f23"),
    "ink": ("#111111", "#ececec"),
    "faint": ("#555555", "#a7a9ad"),
    "line": ("#999999", "#7d8086"),
    "frame": ("#00000008", "#ffffff0a"),
    "border": ("#222222", "#d5d5d5"),
}
LIGHT, DARK = ({name: pair[at] for name, pair in _COLOURS.items()} for at in (0, 1))

DTYPES = ("int8", "float8_e4m3fn", "bfloat16", "float16", "float32")

#: fill colours by what rounding a call adds to the error of the gradient, or by how far its result is off: (below,
#: colour). Lightness tells them apart, too. The first is for what was not measured
HEAT = (
    (0.0, "#eeeeee"),
    (1e-4, "#fff7e0"),
    (1e-3, "#fdd9a0"),
    (1e-2, "#fbaa6c"),
    (math.inf, "#ef7350"),
)

#: what calls are coloured by -> what that means, and how it is said that it has no end
MEASURED = {
    "sensitivity": ("rounding adds {} to the error", "overflows"),
    "error": ("{} from the reference", "not finite"),
}


class Border(NamedTuple):
    """The border of a box: what it means, dashes in SVG, style in dot, width in points."""

    meaning: str
    dashes: str
    dot: str
    width: float


CLASSES = {
    "low": Border("on the low-precision list", "", "solid", 2.0),
    "fp32": Border("on the fp32 list", "", "solid", 3.6),
    "promote": Border("widest of its arguments", "7 3", "dashed", 1.4),
    "follow": Border("moves values, as its argument", "2 3", "dotted", 1.4),
    "keep": Border("as the program wrote it", "", "solid", 0.8),
    "user": Border("by your rule", "10 3 2 3", "dashed", 3.6),
}


class Sample(NamedTuple):
    """A row of the legend: the look of a ``"fill"``, a ``"border"`` or a ``"cast"``, and what it means."""

    kind: str
    look: str
    text: str


def legend(drawing: Drawing) -> list[Sample]:
    """What occurs in a picture; looks are names of colours, classes or casts, or a colour of :data:`HEAT`."""
    nodes = [node for graph in drawing.graphs for node in graph.nodes]
    casts = [row for graph in drawing.graphs for edge in graph.edges for row in edge.casts]
    dtypes, classes = {node.dtype for node in nodes}, {node.op_class for node in nodes}
    rows = [Sample("fill", *sample) for sample in heat_samples(drawing)] or [
        *(Sample("fill", name, f"computes in {short_dtype(name)}") for name in DTYPES if name in dtypes),
        Sample("fill", "tint", "a closed module; the redder, the more bytes its casts move"),
        Sample("fill", "plain", "no floating dtype"),
    ]
    rows += [
        Sample("border", name, f"{name}: {border.meaning}")
        for name, border in CLASSES.items()
        if name in classes
    ]
    if any(node.was for node in nodes):
        rows.append(Sample("border", "changed", "changed: earlier \N{RIGHTWARDS DOUBLE ARROW} now"))
    rows.append(Sample("cast", "lower", "cast to a narrower dtype, as wide as its bytes"))
    rows.append(Sample("cast", "widen", "cast to a wider dtype, likewise"))
    if any(cast.kernel is False for cast, _ in casts):
        text = "cast that Inductor fuses into another kernel: it moves nothing of its own"
        rows.append(Sample("cast", "fused", text))
    if any(mark == "removed" for _, mark in casts):
        rows.append(Sample("cast", "removed", "cast removed since the earlier report"))
    return rows


def heat(error: float | None) -> int:
    """The position in :data:`HEAT` of an error of the gradient; None is an overflow."""
    if error is None:
        return len(HEAT) - 1
    return next(place for place, (limit, _) in enumerate(HEAT) if error < limit)


def measured_text(error: float | None, measured: str) -> str:
    """What was measured of a call, a key of :data:`MEASURED`: ``"sensitivity 2e-05"``."""
    return MEASURED[measured][1] if error is None else f"{measured} {error:.0e}"


def heat_samples(drawing: Drawing) -> list[tuple[str, str]]:
    """(colour, meaning) for a legend; empty where nothing was measured."""
    present = {node.heat for graph in drawing.graphs for node in graph.nodes}
    if not any(present):
        return []
    meaning, over = MEASURED[drawing.measured]
    meanings = ["not measured", *(meaning.format(f"less than {limit:g}") for limit, _ in HEAT[1:-1])]
    meanings.append(f"{meaning.format(f'{HEAT[-2][0]:g} or more')}, or {over}")
    return [(HEAT[place][1], meanings[place]) for place in sorted(present)]


def size(nbytes: int) -> str:
    """``"1.05 MB"``."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"


def per_cent(part: float, whole: float) -> str:
    """``"15 %"``; one digit more below ten."""
    share = 100 * part / whole if whole else 0.0
    digits = 0 if share >= 9.95 or not share else 1
    return f"{share:.{digits}f}\N{NO-BREAK SPACE}%"


def tint(share: float) -> str:
    """White to the tint of closed modules, by their share of all cast bytes."""
    strength = 0.75 * min(share, 1.0) ** 0.5
    channels = (int(LIGHT["tint"][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 + strength * (channel - 255)):02x}" for channel in channels)


def kernel_bytes(casts: Iterable[CastPlan]) -> int:
    """Bytes of the casts that Inductor does not fuse, as far as that is known."""
    return sum(cast.bytes for cast in casts if cast.kernel is not False)


def cast_share(graph: Graph, group: Group) -> float:
    """The share of a module, and of those equal to it, in the bytes that casts of its graph move."""
    every = kernel_bytes(graph.groups[0].casts.values())
    return group.times * kernel_bytes(group.casts.values()) / max(every, 1)


def module_words(graph: Graph, group: Group) -> tuple[str, str, str]:
    """What a closed module says after its title: ``": linear"``, ``"3 in bf16"``, ``"2 casts inside, 192 B"``."""
    op = f": {group.main.op}" if group.main else ""
    calls = ", ".join(f"{count} in {short_dtype(dtype)}" for dtype, count in graph.content(group))
    casts = group.casts.values()
    if not casts:
        return op, calls, ""
    moved = "fused" if all(cast.kernel is False for cast in casts) else size(kernel_bytes(casts))
    return op, calls, f"{len(casts)} cast{'s' * (len(casts) > 1)} inside, {moved}"


def cast_lines(casts: Iterable[Marked]) -> list[str]:
    """The casts on one edge, a line per direction: direction, count, bytes and what became of them."""
    found: dict[tuple[str, str], list[CastPlan]] = {}
    for cast, mark in casts:
        arrow = f"{short_dtype(cast.from_dtype)} \N{RIGHTWARDS ARROW} {short_dtype(cast.to_dtype)}"
        found.setdefault((arrow, mark), []).append(cast)
    return [_cast_line(arrow, mark, rows) for (arrow, mark), rows in found.items()]


def _cast_line(arrow: str, mark: str, casts: Sequence[CastPlan]) -> str:
    count = f" in {len(casts)} casts" if len(casts) > 1 else ""
    fused = sum(cast.kernel is False for cast in casts)
    fate = "" if not fused else ", fused" if fused == len(casts) else f", {fused} fused"
    return f"{arrow}  {size(sum(cast.bytes for cast in casts))}{count}{fate}{mark and f', {mark}'}"


def total_line(name: str, cost: Cost) -> str:
    """``"amp_fx: 171 cast kernels move 132 of 800 MB, 16 %; 426 casts in the graphs, the others are fused"``."""
    if cost.kernels is None or cost.kernel_bytes is None or cost.moved is None:
        return f"{name}: {cost.casts} casts in the graphs, {size(cost.cast_bytes)}"
    return (
        f"{name}: {cost.kernels} cast kernels move {size(cost.kernel_bytes)} of {size(cost.moved)},"
        f" {per_cent(cost.kernel_bytes, cost.moved)}; {cost.casts} casts in the graphs, the others are fused"
    )
