"""How dtypes, classes and casts look, the same in every writer. Each is also written out: colour alone says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypedDict

from amp_fx.viz.schema import Cast, Drawing, Graph, Total

__all__ = [
    "CHANGED",
    "CLASSES",
    "DARK",
    "DTYPES",
    "HEAT",
    "INK",
    "LIGHT",
    "LOWER",
    "MEASURED",
    "PLAIN",
    "WIDEN",
    "Border",
    "cast_lines",
    "graph_label",
    "heat",
    "heat_samples",
    "per_cent",
    "rounding",
    "size",
    "tint",
    "total_line",
]

#: fill colours by compute dtype: low precision is dark, fp32 light, so that they differ in print, too
DTYPES = {
    "int8": "#8a2b55",
    "float8_e4m3fn": "#6a3d9a",
    "bfloat16": "#2a78ad",
    "float16": "#1f7f63",
    "float32": "#fdecb8",
}

#: text on these
INK: dict[str, str] = dict.fromkeys(("int8", "float8_e4m3fn", "bfloat16", "float16"), "#ffffff")

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

#: no floating dtype
PLAIN = "#eeeeee"

#: casts to a narrower and to a wider dtype: Okabe-Ito's blue and vermilion
LOWER, WIDEN = "#0072b2", "#c04a00"

#: what differs from the earlier report
CHANGED = "#cc0000"

#: closed modules are tinted with it by the bytes that casts move in them
TINT = "#d1495b"

#: the page's colours by name, for a light window and for a dark one
LIGHT = {
    **DTYPES,
    "on-int8": "#ffffff",
    "on-float8_e4m3fn": "#ffffff",
    "on-bfloat16": "#ffffff",
    "on-float16": "#ffffff",
    "on-float32": "#332600",
    "plain": PLAIN,
    "lower": LOWER,
    "widen": WIDEN,
    "changed": CHANGED,
    "tint": TINT,
    "paper": "#ffffff",
    "panel": "#fafafa",
    "ink": "#111111",
    "faint": "#555555",
    "line": "#999999",
    "frame": "#00000008",
    "border": "#222222",
}
DARK = {
    "int8": "#e79bbd",
    "float8_e4m3fn": "#c3a5e8",
    "bfloat16": "#5eb0e5",
    "float16": "#45bf99",
    "float32": "#4b3e17",
    "on-int8": "#2b0617",
    "on-float8_e4m3fn": "#160527",
    "on-bfloat16": "#00131f",
    "on-float16": "#001f16",
    "on-float32": "#ffeab0",
    "plain": "#33363b",
    "lower": "#6cbcf2",
    "widen": "#ff9a5c",
    "changed": "#ff6b6b",
    "tint": "#e0566a",
    "paper": "#15171a",
    "panel": "#1c1f23",
    "ink": "#ececec",
    "faint": "#a7a9ad",
    "line": "#7d8086",
    "frame": "#ffffff0a",
    "border": "#d5d5d5",
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


def heat(error: float | None) -> int:
    """The position in :data:`HEAT` of an error of the gradient; None is an overflow."""
    if error is None:
        return len(HEAT) - 1
    return next(place for place, (limit, _) in enumerate(HEAT) if error < limit)


class Rounding(TypedDict):
    """What rounding a call costs, in the form of :class:`amp_fx.viz.schema.Node`."""

    sensitivity: str
    heat: int


def rounding(errors: Mapping[str, float | None], call: str, measured: str) -> Rounding:
    """What was measured of a call, a key of :data:`MEASURED`, and its colour; empty where that was not measured."""
    if call not in errors:
        return Rounding(sensitivity="", heat=0)
    error = errors[call]
    return Rounding(
        sensitivity=MEASURED[measured][1] if error is None else f"{measured} {error:.0e}", heat=heat(error)
    )


def heat_samples(model: Drawing) -> list[tuple[str, str]]:
    """(colour, meaning) for a legend; empty where nothing was measured."""
    present = {node["heat"] for graph in model["graphs"] for node in graph["nodes"]}
    if not any(present):
        return []
    meaning, over = MEASURED[model["measured"]]
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
    return (
        f"{share:.0f}\N{NO-BREAK SPACE}%" if share >= 9.95 or not share else f"{share:.1f}\N{NO-BREAK SPACE}%"
    )


def tint(share: float) -> str:
    """White to :data:`TINT`, by the share of all cast bytes."""
    strength = 0.75 * min(share, 1.0) ** 0.5
    channels = (int(TINT[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 + strength * (channel - 255)):02x}" for channel in channels)


def cast_lines(casts: Iterable[Cast]) -> list[str]:
    """The casts on one edge, a line per direction: direction, count, bytes and what became of them."""
    found: dict[tuple[str, str], list[Cast]] = {}
    for cast in casts:
        arrow = f"{cast['before']} \N{RIGHTWARDS ARROW} {cast['after']}"
        found.setdefault((arrow, cast["mark"]), []).append(cast)
    lines = []
    for (arrow, mark), rows in found.items():
        count = f" in {len(rows)} casts" if len(rows) > 1 else ""
        lines.append(
            f"{arrow}  {size(sum(row['bytes'] for row in rows))}{count}{_fate(rows)}{mark and f', {mark}'}"
        )
    return lines


def _fate(casts: list[Cast]) -> str:
    fused = sum(cast["kernel"] is False for cast in casts)
    if not fused:
        return ""
    return ", fused" if fused == len(casts) else f", {fused} fused"


def total_line(total: Total) -> str:
    """``"amp_fx: 171 cast kernels move 132 of 800 MB, 16 %; 426 casts in the graphs, the others are fused"``."""
    if total["kernels"] is None or total["kernel_bytes"] is None or total["moved"] is None:
        return f"{total['name']}: {total['casts']} casts in the graphs, {size(total['cast_bytes'])}"
    return (
        f"{total['name']}: {total['kernels']} cast kernels move {size(total['kernel_bytes'])} of"
        f" {size(total['moved'])}, {per_cent(total['kernel_bytes'], total['moved'])};"
        f" {total['casts']} casts in the graphs, the others are fused"
    )


def graph_label(model: Drawing, graph: Graph) -> str:
    """``"forward"``, with Dynamo's id where there are several; why it ends; who compiled it."""
    several = sum(other["phase"] == graph["phase"] for other in model["graphs"]) > 1
    text = graph["label"] if several else graph["phase"]
    if graph["graph_break"]:
        text += f"\nends at a graph break: {graph['graph_break']}"
    if graph["fallback"]:
        text += f"\nnot rewritten: {graph['fallback']}"
    return text
