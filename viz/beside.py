"""torch.autocast and amp_fx side by side: the same modules, the casts of each, and what is saved. One SVG.

It needs neither a browser nor Graphviz, and a page that shows it in a dark window gets dark colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from amp_fx.viz.schema import CastRow, Drawing, ModuleRow, Total, is_lowering, short_dtype
from amp_fx.viz.style import DARK, LIGHT, per_cent, size

__all__ = ["STYLE", "SUFFIX", "drawn", "headline", "render", "variables"]

#: how the file is named
SUFFIX = ".beside.svg"

#: more modules than these are summed up in one line, those with the fewest bytes
_MOST = 14

# pixels
_MARGIN, _COLUMN, _BOX, _BAR, _LINE = 24, 548, 158, 96, 18
_WIDTH = 3 * _MARGIN + 2 * _COLUMN
_TOP = 152

#: where one expects it, so that it need not be said
_WHERE = {"weight": "forward", "activation": "forward"}

#: phase, what, before, after
_Kind = tuple[str, str, str, str]

#: of both, the page's own and the file's; colours are variables
STYLE = """
.beside text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }
.beside .headline { font-size: 19px; font-weight: 700; }
.beside .name { font-size: 14px; font-weight: 600; }
.beside .sub { font-size: 11.5px; fill: var(--faint); }
.beside .gone { fill: var(--faint); text-decoration: line-through; }
.beside .ghost { fill: none; stroke: var(--line); stroke-dasharray: 3 3; }
.beside .step { stroke: var(--line); fill: none; }
.beside .module { stroke: var(--border); stroke-width: 1; }
.beside .lower { fill: var(--lower); }
.beside .widen { fill: var(--widen); }
"""


def variables(colours: Mapping[str, str]) -> str:
    """The colours as CSS declarations: ``--lower: #0072b2; ``."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def render(model: Drawing) -> str:
    """The picture as an SVG file.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
    """
    style = (
        f".beside {{ {variables(LIGHT)} background: var(--paper); max-width: 100%; height: auto; }}\n"
        f"@media (prefers-color-scheme: dark) {{ .beside {{ {variables(DARK)} }} }}\n{STYLE}"
    )
    return drawn(model).replace("<g>", f"<style>\n{style}</style>\n<g>", 1) + "\n"


def headline(totals: Sequence[Total]) -> str:
    """What is gained, in one line: ``"225 of 450 cast kernels gone: casts move 45 GB, not 90.1 GB"``."""
    ours, theirs = _of(totals, "amp_fx"), _of(totals, "torch.autocast")
    if ours is None or theirs is None or None in (ours["kernels"], theirs["kernels"]):
        return "what torch.autocast would cast is not known"
    now, before = ours["kernels"] or 0, theirs["kernels"] or 0
    moved = (
        f"casts move {size(ours['kernel_bytes'] or 0)}, torch.autocast's {size(theirs['kernel_bytes'] or 0)}"
    )
    if now < before:
        return f"{before - now} of {before} cast kernels gone: {moved}"
    if now == before and ours["kernel_bytes"] == theirs["kernel_bytes"]:
        return (
            f"{now} cast kernels, as many as torch.autocast has: casts move {size(ours['kernel_bytes'] or 0)}"
        )
    return f"{now} cast kernels, torch.autocast has {before}: {moved}"


def drawn(model: Drawing) -> str:
    """The picture as an SVG element without colours; empty where there is nothing to compare.

    Args:
        model: what :func:`amp_fx.viz.model.drawing` made.
    """
    names = [total["name"] for total in reversed(model["totals"])]
    if not model["modules"] or len(names) != 2:
        return ""
    shown, others = _chosen(model["modules"])
    parts = [*_head(model, names)]
    widest = max((cast["kernel_bytes"] for row in shown for cast in row["casts"]), default=0)
    top = _TOP
    for index, row in enumerate(shown):
        height = _height(row)
        for column, name in enumerate(names):
            x = _MARGIN + column * (_COLUMN + _MARGIN)
            parts += _draw_module(row, name, names[0], x, top, height, widest)
            if index:
                parts.append(f'<path class="step" d="M{x + _BOX / 2},{top - 10} v10"/>')
        top += height + 10
    if others:
        parts += _others(others, names, top + 8)
        top += 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="beside" role="img" width="{_WIDTH}" height="{top + 8}"'
        f' viewBox="0 0 {_WIDTH} {top + 8}" aria-label="casts by module, side by side">\n<g>\n'
        + "\n".join(parts)
        + "\n</g>\n</svg>"
    )


def _head(model: Drawing, names: Sequence[str]) -> Iterator[str]:
    yield _text(_MARGIN, 34, headline(model["totals"]), "headline")
    ours, theirs = _of(model["totals"], "amp_fx"), _of(model["totals"], "torch.autocast")
    moved = ""
    if ours and theirs and ours["moved"] and theirs["moved"]:
        change = 100 * (ours["moved"] / theirs["moved"] - 1)
        moved = (
            f"; all kernels of a step move {size(ours['moved'])}, torch.autocast's {size(theirs['moved'])}"
        )
        moved += f" ({change:+.1f} %)" if abs(change) >= 0.05 else ""
    yield _text(_MARGIN, 58, f"{model['title']}, policy {model['policy']}{moved}", "")
    yield _text(
        _MARGIN,
        78,
        "Both return the same dtypes, and neither backward is traced under autocast."
        " A bar is as long as the bytes that cast kernels read and write; weights include biases.",
        "sub",
    )
    if model["more"]:
        yield _text(_MARGIN, 96, model["more"], "")
    for column, name in enumerate(names):
        total = _of(model["totals"], name)
        x = _MARGIN + column * (_COLUMN + _MARGIN)
        yield _text(x, 116, name, "name")
        if total is not None and total["kernels"] is not None:
            share = ""
            if total["moved"]:
                share = f", {per_cent(total['kernel_bytes'] or 0, total['moved'])} of all bytes"
            yield _text(
                x, 134, f"{total['kernels']} cast kernels, {size(total['kernel_bytes'] or 0)}{share}", "sub"
            )


def _chosen(rows: Sequence[ModuleRow]) -> tuple[list[ModuleRow], list[ModuleRow]]:
    """Rows to draw in the order of the program, and those that are summed up."""
    cast = [row for row in rows if row["casts"] and (row["module"] or _kinds(row))]
    if len(cast) <= _MOST:
        return cast, []
    dearest = sorted(cast, key=lambda row: -sum(found["kernel_bytes"] for found in row["casts"]))[:_MOST]
    places = {id(row) for row in dearest}
    return [row for row in cast if id(row) in places], [row for row in cast if id(row) not in places]


def _kinds(row: ModuleRow) -> list[_Kind]:
    """What is a kernel in one of the columns, at least."""
    return list(dict.fromkeys(_kind(cast) for cast in row["casts"] if cast["kernels"]))


def _kind(cast: CastRow) -> _Kind:
    return cast["phase"], cast["what"], cast["before"], cast["after"]


def _height(row: ModuleRow) -> int:
    fused = any(cast["casts"] > cast["kernels"] for cast in row["casts"])
    return max(34, _LINE * (len(_kinds(row)) + fused) + 8)


def _draw_module(
    row: ModuleRow, name: str, reference: str, x: int, top: int, height: int, widest: int
) -> Iterator[str]:
    dtype = row["dtypes"].get(name, "")
    fill = f"var(--{dtype})" if dtype in LIGHT else "var(--plain)"
    ink = f"var(--on-{dtype})" if f"on-{dtype}" in LIGHT else "var(--ink)"
    yield (
        f'<rect class="module" x="{x}" y="{top}" width="{_BOX}" height="{height}" rx="4" style="fill:{fill}"/>'
    )
    times = f" \N{MULTIPLICATION SIGN}{row['times']}" if row["times"] > 1 else ""
    label = _clip(row["module"] or "(no module)", 22 - len(times)) + times
    middle = top + height / 2
    yield _text(x + _BOX / 2, middle - 3, label, "", f'text-anchor="middle" style="fill:{ink}"')
    yield _text(
        x + _BOX / 2,
        middle + 11,
        short_dtype(dtype) or "no floating dtype",
        "sub",
        f'text-anchor="middle" style="fill:{ink}"',
    )
    casts = {_kind(cast): cast for cast in row["casts"] if cast["name"] == name}
    others = {_kind(cast): cast for cast in row["casts"] if cast["name"] == reference}
    baseline = top + 17
    for kind in _kinds(row):
        yield from _draw_cast(kind, casts.get(kind), others.get(kind), x + _BOX + 12, baseline, widest)
        baseline += _LINE
    fused = sum(cast["casts"] - cast["kernels"] for cast in casts.values())
    if fused:
        yield _text(
            x + _BOX + 12, baseline, f"{fused} cast{'s' * (fused > 1)} fused into other kernels: free", "sub"
        )


def _draw_cast(
    kind: _Kind, cast: CastRow | None, reference: CastRow | None, x: int, baseline: int, widest: int
) -> Iterator[str]:
    """One line: a bar and its words; struck through where the reference has the kernel and this one has not."""
    phase, what, before, after = kind
    row = cast if cast is not None and cast["kernels"] else reference
    if row is None or not row["kernels"]:
        return
    gone = row is not cast
    length = max(2.0, _BAR * row["kernel_bytes"] / widest) if widest else 2.0
    look = "ghost" if gone else "lower" if is_lowering(row) else "widen"
    yield f'<rect class="{look}" x="{x}" y="{baseline - 10}" width="{length:.1f}" height="11" rx="2"/>'
    count = f"{row['kernels']} \N{MULTIPLICATION SIGN} " if row["kernels"] > 1 else ""
    words = f"{count}{what} {before} \N{RIGHTWARDS ARROW} {after}, {size(row['kernel_bytes'])}"
    if what in _WHERE and _WHERE[what] != phase:
        words += f", in the {phase}"
    yield _text(x + _BAR + 8, baseline, words, "gone" if gone else "")


def _others(rows: Sequence[ModuleRow], names: Sequence[str], baseline: int) -> Iterator[str]:
    for column, name in enumerate(names):
        total = sum(cast["kernel_bytes"] for row in rows for cast in row["casts"] if cast["name"] == name)
        x = _MARGIN + column * (_COLUMN + _MARGIN)
        yield _text(x, baseline, f"{len(rows)} more modules: casts move {size(total)}", "sub")


def _of(totals: Iterable[Total], name: str) -> Total | None:
    return next((total for total in totals if total["name"] == name), None)


def _clip(path: str, length: int) -> str:
    """As many of the last levels of a module path as there is room for."""
    parts = path.split(".")
    while len(parts) > 1 and (len(".".join(parts)) > length or parts[0] == "*"):
        parts.pop(0)
    text = ".".join(parts)
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _text(x: float, y: float, text: str, name: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{name}" {more}>{escape(text)}</text>'
