"""torch.autocast and amp_fx side by side: the same modules, the casts of each, and what is saved. One SVG.

It needs neither a browser nor Graphviz, and a page that shows it in a dark window gets dark colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib import resources

from amp_fx.precision.plans.plan import CastSum, Cost, ModuleCasts
from amp_fx.viz.graph import Drawing
from amp_fx.viz.style import COLOURS
from amp_fx.viz.words import cost_text, short_dtype, size

#: how the file is named
SUFFIX = ".beside.svg"
_OURS, _THEIRS = "amp_fx", "torch.autocast"
#: more modules than these are summed up in one line, those with the fewest bytes
_MOST = 14

# pixels
_MARGIN, _COLUMN, _BOX, _BAR, _LINE = 24, 548, 158, 96, 18
_WIDTH = 3 * _MARGIN + 2 * _COLUMN
_TOP = 152

_NOTE = (
    "Both return the same dtypes, and neither backward is traced under autocast."
    " A bar is as long as the bytes that cast kernels read and write; weights include biases."
)

#: column -> its left edge
_COLUMNS = {_THEIRS: _MARGIN, _OURS: 2 * _MARGIN + _COLUMN}

#: of the file and of the page; colours are variables
STYLE = resources.files("amp_fx.viz").joinpath("beside.css").read_text(encoding="utf-8")


def variables(dark: int) -> str:
    """The colours of a light window, or of a dark one, as CSS declarations: ``--lower: #0072b2; ``."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())


def render(drawing: Drawing) -> str:
    """The picture as an SVG file."""
    style = (
        f".beside {{ {variables(0)} background: var(--paper); max-width: 100%; height: auto; }}\n"
        f"@media (prefers-color-scheme: dark) {{ .beside {{ {variables(1)} }} }}\n{STYLE}"
    )
    return drawn(drawing).replace("<g>", f"<style>\n{style}</style>\n<g>", 1) + "\n"


def headline(totals: Mapping[str, Cost]) -> str:
    """The gain, in one line: ``"225 of 450 cast kernels gone: casts move 45 GB, torch.autocast's 90.1 GB"``."""
    ours, theirs = totals.get(_OURS), totals.get(_THEIRS)
    if ours is None or theirs is None or ours.kernels is None or theirs.kernels is None:
        return "" if ours is None else cost_text(ours)
    now, before = ours.kernels, theirs.kernels
    moved = f"casts move {size(ours.kernel_bytes or 0)}"
    both = f"{moved}, torch.autocast's {size(theirs.kernel_bytes or 0)}"
    if now < before:
        return f"{before - now} of {before} cast kernels gone: {both}"
    if now == before and ours.kernel_bytes == theirs.kernel_bytes:
        return f"{now} cast kernels, as many as torch.autocast has: {moved}"
    return f"{now} cast kernels, torch.autocast has {before}: {both}"


def drawn(drawing: Drawing) -> str:
    """The picture as an SVG element without colours; empty where there is nothing to compare."""
    if not drawing.modules or set(drawing.totals) != set(_COLUMNS):
        return ""
    cast = [row for row in drawing.modules if row.casts and (row.module or _kinds(row))]
    dearest = sorted(cast, key=lambda row: -sum(each.kernel_bytes for each in row.casts))[:_MOST]
    # in the order of the program; the others are summed up
    shown = [row for row in cast if row in dearest]
    others = [row for row in cast if row not in dearest]
    parts = list(_head(drawing))
    widest = max((cast.kernel_bytes for row in shown for cast in row.casts), default=0)
    top = _TOP
    for index, row in enumerate(shown):
        fused = any(cast.casts > cast.kernels for cast in row.casts)
        height = max(34, _LINE * (len(_kinds(row)) + fused) + 8)
        for name, x in _COLUMNS.items():
            parts += _draw_module(row, name, x, top, height)
            parts += _draw_casts(row, name, x + _BOX + 12, top + 17, widest)
            if index:
                parts.append(f'<path class="step" d="M{x + _BOX / 2},{top - 10} v10"/>')
        top += height + 10
    if others:
        for name, x in _COLUMNS.items():
            total = sum(cast.kernel_bytes for row in others for cast in row.casts if cast.name == name)
            parts.append(_text(x, top + 8, f"{len(others)} more modules: casts move {size(total)}", "sub"))
        top += 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="beside" role="img" width="{_WIDTH}" height="{top + 8}"'
        f' viewBox="0 0 {_WIDTH} {top + 8}" aria-label="casts by module, side by side">\n<g>\n'
        + "\n".join(parts)
        + "\n</g>\n</svg>"
    )


def _head(drawing: Drawing) -> Iterator[str]:
    yield _text(_MARGIN, 34, headline(drawing.totals), "headline")
    ours, theirs = drawing.totals[_OURS].moved, drawing.totals[_THEIRS].moved
    text = f"{drawing.title}, policy {drawing.policy}"
    if ours and theirs:
        change = 100 * (ours / theirs - 1)
        text += f"; all kernels of a step move {size(ours)}, torch.autocast's {size(theirs)}"
        text += f" ({change:+.1f} %)" if abs(change) >= 0.05 else ""
    yield _text(_MARGIN, 58, text)
    yield _text(_MARGIN, 78, _NOTE, "sub")
    if drawing.more:
        yield _text(_MARGIN, 96, drawing.more)
    for name, x in _COLUMNS.items():
        cost = drawing.totals[name]
        yield _text(x, 116, name, "name")
        yield _text(x, 134, cost_text(cost), "sub")


def _kind(cast: CastSum) -> tuple[str, str, str, str]:
    return cast.phase, cast.what, short_dtype(cast.before), short_dtype(cast.after)


def _kinds(row: ModuleCasts) -> list[tuple[str, str, str, str]]:
    """The casts that are kernels in at least one of the columns."""
    return list(dict.fromkeys(_kind(cast) for cast in row.casts if cast.kernels))


def _draw_module(row: ModuleCasts, name: str, x: int, top: int, height: int) -> Iterator[str]:
    dtype = row.dtypes.get(name, "")
    fill, ink = (dtype, f"on-{dtype}") if f"on-{dtype}" in COLOURS else ("plain", "ink")
    box = f'x="{x}" y="{top}" width="{_BOX}" height="{height}" rx="4" style="fill:var(--{fill})"'
    yield f'<rect class="module" {box}/>'
    times = f" \N{MULTIPLICATION SIGN}{row.times}" if row.times > 1 else ""
    label = _clip(row.module or "(no module)", 22 - len(times)) + times
    look, middle = f'text-anchor="middle" style="fill:var(--{ink})"', top + height / 2
    yield _text(x + _BOX / 2, middle - 3, label, more=look)
    yield _text(x + _BOX / 2, middle + 11, short_dtype(dtype) or "no floating dtype", "sub", look)


def _draw_casts(row: ModuleCasts, name: str, x: int, baseline: int, widest: int) -> Iterator[str]:
    """A line for each kind of casts; struck through where only torch.autocast has kernels of it."""
    casts, reference = (
        {_kind(cast): cast for cast in row.casts if cast.name == column and cast.kernels}
        for column in (name, _THEIRS)
    )
    for kind in _kinds(row):
        if (cast := casts.get(kind) or reference.get(kind)) is not None:
            yield from _draw_cast(cast, x, baseline, widest, gone=kind not in casts)
        baseline += _LINE
    if fused := sum(cast.casts - cast.kernels for cast in row.casts if cast.name == name):
        yield _text(x, baseline, f"{fused} cast{'s' * (fused > 1)} fused into other kernels: free", "sub")


def _draw_cast(cast: CastSum, x: int, baseline: int, widest: int, *, gone: bool) -> Iterator[str]:
    length = max(2.0, _BAR * cast.kernel_bytes / widest) if widest else 2.0
    look = "ghost" if gone else "lower" if cast.narrows else "widen"
    yield f'<rect class="{look}" x="{x}" y="{baseline - 10}" width="{length:.1f}" height="11" rx="2"/>'
    count = f"{cast.kernels} \N{MULTIPLICATION SIGN} " if cast.kernels > 1 else ""
    dtypes = f"{short_dtype(cast.before)} \N{RIGHTWARDS ARROW} {short_dtype(cast.after)}"
    words = f"{count}{cast.what} {dtypes}, {size(cast.kernel_bytes)}"
    # gradients are cast in the backward, and it need not be said
    if cast.what in ("weight", "activation") and cast.phase != "forward":
        words += f", in the {cast.phase}"
    yield _text(x + _BAR + 8, baseline, words, "gone" if gone else "")


def _clip(path: str, length: int) -> str:
    """As many of the last levels of a module path as there is room for."""
    parts = path.split(".")
    while len(parts) > 1 and (len(".".join(parts)) > length or parts[0] == "*"):
        parts.pop(0)
    text = ".".join(parts)
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _text(x: float, y: float, text: str, name: str = "", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{name}" {more}>{escape(text)}</text>'
