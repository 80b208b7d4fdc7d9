"""Figures, with matplotlib; numbers need no plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import AmpFxError, MissingLibraryError, install_hint
from amp_fx.instruments.reports.counting import FORMATS, Counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: colours that differ in lightness too, for those who do not see them
_COLOURS = ("#0072b2", "#e69f00")
#: share of the values at an exponent of the lower end up to which the axis leaves it out
_RARE = 1e-3
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3": "fp8 e4m3", "float8_e5m2": "fp8 e5m2"}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; MissingLibraryError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError(
            f"the figure needs matplotlib: {install_hint('plot')}. The numbers do without it."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def check_figure(path: Path, *also: str) -> None:
    """Raises AmpFxError for a file that is no figure; ``also`` are valid suffixes that the caller writes itself."""
    if (suffix := path.suffix.lower()) in also:
        return
    valid = [*also, *(f".{name}" for name in sorted(new_figure(1, 1).canvas.get_supported_filetypes()))]
    if suffix not in valid:
        raise AmpFxError(f"cannot write {path.name!r}; valid suffixes: {', '.join(valid)}.")


def save_figure(figure: Figure, path: Path, *also: str) -> None:
    """Writes a figure in the format of the path's suffix, see :func:`check_figure`."""
    check_figure(path, *also)
    figure.savefig(path)


def draw_histogram(title: str, gradients: Mapping[str, Counts], activations: Mapping[str, Counts]) -> Figure:
    """Gradients above, activations below, each what is counted -> counts, and the formats' ranges underneath."""
    figure = new_figure(10, 7.5)
    figure.suptitle(f"{title}: magnitudes by exponent")
    panels = figure.subplots(2, 1)
    total = sum(gradients.values(), Counts())
    scale = total.loss_scale()
    exponents = _axis([*gradients.values(), *activations.values()], scale or 0)
    _panel(panels[0], "gradients", gradients, exponents)
    _panel(panels[1], "activations", activations, exponents)
    saved = ""
    if scale is not None:
        saved = f"; at a loss scale of 2^{scale}, {total.lost('float16', scale):.2%} do"
        _ghost(panels[0], total, scale, exponents)
    panels[0].set_title(f"{total.lost():.2%} of the gradients underflow to zero in fp16{saved}", fontsize=11)
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper right", fontsize=9)
    return figure


def _axis(series: Sequence[Counts], scale: int) -> range:
    """The exponents that are shown: all of fp16, and all but rare small values, as they are and scaled."""
    found = [(e, n / counts.nonzero) for counts in series for e, n in counts.exponents.items()]
    # below fp16 there is room for the words
    first = min([FORMATS["float16"].smallest - 6, *(e for e, share in found if share > _RARE)])
    last = max([16, *(e for e, _ in found)])
    return range(first - 1, max(last, min(last + scale, 16)) + 3)


def _ghost(axes: Axes, counts: Counts, scale: int, exponents: range) -> None:
    """The outline of the gradients where the suggested loss scale moves them."""
    heights = [100 * counts.exponents[e - scale] / max(counts.total, 1) for e in exponents]
    axes.stairs(
        heights, [*exponents, exponents[-1] + 1], color="#444444", linestyle="--", linewidth=1.2,
        label=f"all gradients at a loss scale of 2^{scale}",
    )  # fmt: skip


def _panel(axes: Axes, what: str, series: Mapping[str, Counts], exponents: range) -> None:
    """One panel: share of all values per exponent, and a line per format below."""
    first, last = exponents[0], exponents[-1]
    total = max(sum(counts.total for counts in series.values()), 1)
    bottom = [0.0] * len(exponents)
    present = {label: counts for label, counts in series.items() if counts.total}
    for colour, (label, counts) in zip(_COLOURS, present.items(), strict=False):
        heights = [100 * counts.exponents[e] / total for e in exponents]
        zeros = f" ({counts.zeros / max(counts.total, 1):.1%} are zero)"
        axes.bar(
            [e + 0.5 for e in exponents], heights, 1.0, bottom, color=colour, label=label + zeros,
            edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top = max([*bottom, 1.0])
    row = FORMATS["float16"]
    axes.axvspan(first, row.smallest - 1, color="#d55e00", alpha=0.15, zorder=0)
    axes.annotate(
        "zero in fp16", (row.smallest - 1, 1.37 * top), xytext=(-4, 0), textcoords="offset points", ha="right",
        va="center", fontsize=8, color="#a04000",
    )  # fmt: skip
    step = 0.075 * top
    for place, (dtype, row) in enumerate(FORMATS.items(), 1):
        height = -place * step
        end = min(torch.tensor(row.largest).log2().item(), last)
        start = max(row.normal, first)
        axes.plot([start, end], [height, height], color="black", linewidth=3, solid_capstyle="butt")
        axes.plot([max(row.smallest - 1, first), start], [height, height], color="black", linewidth=1)
        axes.annotate(
            _SHORT[dtype], (last, height), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
            annotation_clip=False,
        )  # fmt: skip
    axes.set(
        xlim=(first, last), ylim=(-(len(FORMATS) + 0.7) * step, 1.45 * top),
        xlabel="exponent: log2 of the magnitude (ranges: thick normal, thin subnormal)",
        ylabel=f"% of all {what}",
    )  # fmt: skip
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.1 * top])
