"""How dtypes, classes and casts look, the same in every writer. Each is also written out: colour alone says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from amp_fx.viz.schema import Cast, Drawing, Graph, Total

__all__ = [
    "CHANGED",
    "CLASSES",
    "DTYPES",
    "HEAT",
    "LOWER",
    "MIXED",
    "PLAIN",
    "WIDEN",
    "Border",
    "cast_lines",
    "graph_label",
    "heat",
    "heat_samples",
    "is_lowering",
    "size",
    "total_line",
]

#: fill colours by compute dtype: tints of the Okabe-Ito palette, which colour-blind readers tell apart
DTYPES = {
    "bfloat16": "#a9d8f5",
    "float16": "#a5dfc9",
    "float32": "#fbdc94",
}

#: fill colours by what rounding a call adds to the relative error of the gradient: (below, colour). Lightness tells
#: them apart, too. The first is for what was not measured
HEAT = (
    (0.0, "#eeeeee"),
    (1e-4, "#fff7e0"),
    (1e-3, "#fdd9a0"),
    (1e-2, "#fbaa6c"),
    (math.inf, "#ef7350"),
)

#: several dtypes in one closed module
MIXED = "#e4dcf0"

#: no floating dtype
PLAIN = "#eeeeee"

#: casts to a narrower and to a wider dtype: Okabe-Ito's blue and vermillion
LOWER, WIDEN = "#0072b2", "#c04a00"

#: what differs from the earlier report
CHANGED = "#cc0000"

_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64}


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


def is_lowering(cast: Cast) -> bool:
    """True for a cast to a dtype that is not wider."""
    return _BITS.get(cast["after"], 8) <= _BITS.get(cast["before"], 8)


def heat(error: float | None) -> int:
    """The position in :data:`HEAT` of an error of the gradient; None is an overflow."""
    if error is None:
        return len(HEAT) - 1
    return next(place for place, (limit, _) in enumerate(HEAT) if error < limit)


def heat_samples(model: Drawing) -> list[tuple[str, str]]:
    """(colour, meaning) for a legend; empty where no harm was measured."""
    present = {node["heat"] for graph in model["graphs"] for node in graph["nodes"]}
    if not any(present):
        return []
    meanings = [
        "not measured",
        *(f"rounding adds less than {limit:g} to the gradient's error" for limit, _ in HEAT[1:-1]),
    ]
    meanings.append(f"rounding adds {HEAT[-2][0]:g} or more, or overflows")
    return [(HEAT[place][1], meanings[place]) for place in sorted(present)]


def size(nbytes: int) -> str:
    """``"1.05 MB"``."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"


def cast_lines(casts: Iterable[Cast]) -> list[str]:
    """The casts on one edge, a line per direction: direction, count, bytes and what became of them."""
    found: dict[tuple[str, str], list[Cast]] = {}
    for cast in casts:
        arrow = f"{cast['before']} \N{RIGHTWARDS ARROW} {cast['after']}"
        found.setdefault((arrow, cast["mark"]), []).append(cast)
    lines = []
    for (arrow, mark), rows in found.items():
        count = f"{len(rows)}x " if len(rows) > 1 else ""
        lines.append(
            f"{arrow}  {count}{size(sum(row['bytes'] for row in rows))}{_fate(rows)}{mark and f', {mark}'}"
        )
    return lines


def _fate(casts: list[Cast]) -> str:
    fused = sum(cast["kernel"] is False for cast in casts)
    if not fused:
        return ""
    return ", fused" if fused == len(casts) else f", {fused} fused"


def total_line(total: Total) -> str:
    """``"amp_fx: 426 casts (259 MB) asked for; after fusion 171 kernels only cast (132 MB)"``."""
    text = f"{total['name']}: {total['casts']} casts ({size(total['cast_bytes'])}) asked for"
    if total["kernels"] is not None and total["kernel_bytes"] is not None:
        text += f"; after fusion {total['kernels']} kernels only cast ({size(total['kernel_bytes'])})"
    return text


def graph_label(model: Drawing, graph: Graph) -> str:
    """``"forward"``, with Dynamo's id where there are several; why it ends; who compiled it."""
    several = sum(other["phase"] == graph["phase"] for other in model["graphs"]) > 1
    text = graph["label"] if several else graph["phase"]
    if graph["graph_break"]:
        text += f"\nends at a graph break: {graph['graph_break']}"
    if graph["fallback"]:
        text += f"\nleft to torch.autocast: {graph['fallback']}"
    return text
