"""Gradients and activations by exponent, against the ranges of the low dtypes.

    found = amp_fx.histogram(model, batch, loss)
    print(found)                  # what becomes zero in fp16, and the loss scale that saves it
    found.figure().savefig("histogram.png")

This is the plot of Micikevicius et al., "Mixed Precision Training" (2018), figure 3. It is measured in one
forward and backward of the model as it is, op by op and without amp_fx; numbers need no plotting library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.errors import AmpFxError
from amp_fx.graphs.facts import tensors
from amp_fx.plans.files import write_text
from amp_fx.reports.untouched import plain, untouched

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "KINDS", "Counts", "Format", "Histogram", "histogram"]

#: bumped when the JSON form changes incompatibly
_VERSION = 1

#: exponents counted, first and last: all of fp32, subnormals included
_FIRST, _LAST = -150, 128

#: what is counted, and what it is called in a figure
KINDS = {
    "activations": "outputs of modules",
    "activation_gradients": "gradients of outputs",
    "weight_gradients": "gradients of parameters",
}
_GRADIENTS = ("activation_gradients", "weight_gradients")

#: loss scales beyond this are no use in fp32 either
_LARGEST_SCALE = 64


@dataclass(frozen=True)
class Format:
    """A floating format.

    Attributes:
        smallest: exponent of the smallest subnormal; what is at most half of it becomes zero.
        normal: exponent of the smallest normal number; below it digits are lost.
        largest: the largest finite number.
    """

    smallest: int
    normal: int
    largest: float


#: IEEE 754 binary16; bfloat16; OCP 8-bit floating point specification 1.0
FORMATS = {
    "float16": Format(-24, -14, 65504.0),
    "bfloat16": Format(-133, -126, torch.finfo(torch.bfloat16).max),
    "float8_e4m3": Format(-9, -6, 448.0),
    "float8_e5m2": Format(-16, -14, 57344.0),
}


@dataclass
class Counts:
    """How many values there are at each exponent.

    Attributes:
        exponents: e -> number of values with ``2**e < abs(value) <= 2**(e + 1)``: with the upper end included,
            exactly the values below an exponent are those that round to zero.
        zeros: values that are zero.
        nonfinite: infinities and NaN.
        largest: largest finite magnitude.
    """

    exponents: dict[int, int] = field(default_factory=dict)
    zeros: int = 0
    nonfinite: int = 0
    largest: float = 0.0

    @property
    def nonzero(self) -> int:
        """Number of finite values that are not zero."""
        return sum(self.exponents.values())

    @property
    def total(self) -> int:
        """Number of values."""
        return self.nonzero + self.zeros + self.nonfinite

    def add(self, values: torch.Tensor) -> None:
        """Counts a tensor: fp32, bf16, fp16 or fp64, any shape."""
        flat = (values.coalesce().values() if values.is_sparse else values).detach().float().flatten()
        finite = flat.isfinite()
        magnitude = flat[finite].abs()
        self.nonfinite += int((~finite).sum())
        self.zeros += int((magnitude == 0).sum())
        magnitude = magnitude[magnitude > 0]
        if not magnitude.numel():
            return
        self.largest = max(self.largest, float(magnitude.max()))
        # magnitude = mantissa * 2**exponent, 0.5 <= mantissa < 1; a power of two is the upper end of its bin
        mantissa, exponent = torch.frexp(magnitude)
        bins = exponent.long() - 1 - (mantissa == 0.5).long()
        found = torch.bincount(bins - _FIRST, minlength=_LAST - _FIRST).tolist()
        for place, count in enumerate(found):
            if count:
                self.exponents[place + _FIRST] = self.exponents.get(place + _FIRST, 0) + count

    def merge(self, other: Counts) -> Counts:
        """The values of both."""
        keys = sorted({*self.exponents, *other.exponents})
        return Counts(
            {e: self.exponents.get(e, 0) + other.exponents.get(e, 0) for e in keys},
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            max(self.largest, other.largest),
        )

    def lost(self, dtype: str = "float16", scale: int = 0) -> float:
        """Share of the nonzero values that become zero in a format, multiplied by ``2**scale`` first."""
        edge = FORMATS[dtype].smallest - 1 - scale
        return sum(n for e, n in self.exponents.items() if e < edge) / max(self.nonzero, 1)

    def subnormal(self, dtype: str = "float16", scale: int = 0) -> float:
        """Share of the nonzero values that lose digits in a format without becoming zero."""
        row = FORMATS[dtype]
        edges = range(row.smallest - 1 - scale, row.normal - scale)
        return sum(n for e, n in self.exponents.items() if e in edges) / max(self.nonzero, 1)

    def overflows(self, dtype: str = "float16", scale: int = 0) -> bool:
        """True if the largest value, multiplied by ``2**scale``, is beyond the format."""
        return self.largest * 2.0**scale > FORMATS[dtype].largest

    def loss_scale(self, dtype: str = "float16") -> int | None:
        """Exponent of the loss scale: the smallest that loses least of all that do not overflow.

        None where even a scale of 1 overflows.
        """
        fitting = [s for s in range(_LARGEST_SCALE + 1) if not self.overflows(dtype, s)]
        return min(fitting, key=lambda s: (self.lost(dtype, s), s), default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form, with the shares in every format."""
        return {
            "exponents": {str(e): self.exponents[e] for e in sorted(self.exponents)},
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            "lost": {dtype: self.lost(dtype) for dtype in FORMATS},
            "subnormal": {dtype: self.subnormal(dtype) for dtype in FORMATS},
            "overflows": {dtype: self.overflows(dtype) for dtype in FORMATS},
        }


@dataclass
class Histogram:
    """What :func:`histogram` measured.

    Attributes:
        modules: path of a module -> kind, a key of :data:`KINDS` -> counts. The model itself is ``""``.
        title: name of the model.
    """

    modules: dict[str, dict[str, Counts]] = field(default_factory=dict)
    title: str = ""

    def total(self, *kinds: str) -> Counts:
        """Counts of all modules.

        Args:
            kinds: keys of :data:`KINDS`; none means both kinds of gradients.
        """
        found = Counts()
        for rows in self.modules.values():
            for kind in kinds or _GRADIENTS:
                found = found.merge(rows.get(kind, Counts()))
        return found

    @property
    def loss_scale(self) -> float | None:
        """The power of two that saves the most gradients from becoming zero in fp16, and none overflows."""
        scale = self.total().loss_scale()
        return None if scale is None else 2.0**scale

    def __str__(self) -> str:
        gradients, scale = self.total(), self.total().loss_scale()
        lines = [f"{self.title}: {gradients.nonzero} gradients that are not zero"]
        for dtype in FORMATS:
            over = ", the largest overflows" if gradients.overflows(dtype) else ""
            lines.append(
                f"  {dtype:<12}{gradients.lost(dtype):>8.2%} become zero,"
                f" {gradients.subnormal(dtype):>7.2%} lose digits{over}"
            )
        if scale is None:
            lines.append("no loss scale: the largest gradient overflows float16 as it is")
        else:
            after = f"{gradients.lost('float16', scale):.2%} become zero in float16"
            lines.append(f"loss scale 2**{scale} = {2**scale}: {after}, none overflows")
        worst = self._worst()
        if worst:
            lines.append(f"where float16 loses most (modules: {len(self.modules)})")
            lines += [f"  {name or '(the model)':<40}{share:>8.2%} become zero" for name, share in worst]
        return "\n".join(lines)

    def _worst(self, most: int = 5) -> list[tuple[str, float]]:
        shares = {}
        for name, rows in self.modules.items():
            found = Counts()
            for kind in _GRADIENTS:
                found = found.merge(rows.get(kind, Counts()))
            shares[name] = found.lost()
        ranked = sorted(shares.items(), key=lambda row: -row[1])
        return [(name, share) for name, share in ranked[:most] if share]

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form: counts of every module, of all, and the loss scale."""
        return {
            "version": _VERSION,
            "title": self.title,
            "loss_scale": self.loss_scale,
            "total": {
                "gradients": self.total().to_dict(),
                **{kind: self.total(kind).to_dict() for kind in KINDS},
            },
            "modules": {
                name: {kind: counts.to_dict() for kind, counts in rows.items()}
                for name, rows in self.modules.items()
            },
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes ``.json``, or the figure as whatever else matplotlib writes: ``.png``, ``.svg``, ``.pdf``.

        Raises:
            AmpFxError: matplotlib is missing, or does not write that suffix.
            OSError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() == ".json":
            write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
            return path
        figure = self.figure()
        valid = figure.canvas.get_supported_filetypes()
        if path.suffix.lower().removeprefix(".") not in valid:
            raise AmpFxError(
                f"cannot write {path.name!r}; valid suffixes: .json, .{', .'.join(sorted(valid))}."
            )
        figure.savefig(path)
        return path

    def figure(self) -> Figure:
        """The figure: gradients above, activations below, the ranges of the formats underneath each.

        Raises:
            AmpFxError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise AmpFxError(
                "the figure needs matplotlib: pip install 'amp_fx[plot]'. The numbers do without it."
            ) from error
        figure = Figure(figsize=(10, 7.5), layout="constrained")
        figure.suptitle(f"{self.title}: magnitudes by exponent")
        gradients, activations = figure.subplots(2, 1)
        total, kinds = self.total(), {KINDS[kind]: self.total(kind) for kind in _GRADIENTS}
        outputs = self.total("activations")
        known = [*total.exponents, *outputs.exponents]
        exponents = range(min([-30, *known]) - 2, max([17, *known]) + 3)
        _draw(gradients, "gradients", kinds, exponents)
        _draw(activations, "activations", {KINDS["activations"]: outputs}, exponents)
        scale = total.loss_scale()
        saved = (
            "" if scale is None else f"; a loss scale of 2^{scale} leaves {total.lost('float16', scale):.2%}"
        )
        gradients.set_title(f"{total.lost():.2%} of the gradients become zero in fp16{saved}", fontsize=11)
        return figure


#: colours that differ in lightness too, for those who do not see them
_COLOURS = ("#0072b2", "#e69f00")
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3": "fp8 e4m3", "float8_e5m2": "fp8 e5m2"}


def _draw(axes: Axes, what: str, series: Mapping[str, Counts], exponents: range) -> None:
    """One panel: share of all values per exponent, and a line per format below."""
    first, last = exponents[0], exponents[-1]
    total = max(sum(counts.total for counts in series.values()), 1)
    bottom = [0.0] * len(exponents)
    for colour, (label, counts) in zip(_COLOURS, series.items(), strict=False):
        heights = [100 * counts.exponents.get(e, 0) / total for e in exponents]
        zeros = f" ({counts.zeros / max(counts.total, 1):.1%} are zero)"
        axes.bar(
            [e + 0.5 for e in exponents], heights, 1.0, bottom, color=colour, label=label + zeros,
            edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top = max([*bottom, 1.0])
    row = FORMATS["float16"]
    axes.axvspan(first, row.smallest - 1, color="#d55e00", alpha=0.12, label="zero in fp16", zorder=0)
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
        xlim=(first, last), ylim=(-(len(FORMATS) + 0.7) * step, 1.1 * top),
        xlabel="exponent: log2 of the magnitude (ranges: thick normal, thin subnormal)",
        ylabel=f"% of all {what}",
    )  # fmt: skip
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.1 * top])
    axes.legend(loc="upper right", fontsize=9)


def histogram(
    model: Callable[..., Any], batch: Any, loss: Callable[[Any], torch.Tensor] | None = None
) -> Histogram:
    """Counts gradients and activations by exponent in one forward and backward of a model.

    The model is run as it is: in the precision of its own weights, op by op. Its gradients, buffers and the
    random generators are what they were afterwards.

    Args:
        model: a module; one that is compiled is taken as it was before.
        batch: a tuple or list of positional arguments, a mapping of keyword arguments, or the only argument.
        loss: what the model returns -> 0-d tensor. None: the model returns the loss, or has it in ``.loss``.

    Raises:
        AmpFxError: not a module, or no loss.
    """
    program = getattr(model, "_orig_mod", model)
    if not isinstance(program, nn.Module):
        raise AmpFxError(f"histogram needs a torch.nn.Module; got {type(model).__name__}.")
    args, kwargs = _call(batch)
    found: dict[str, dict[str, Counts]] = {}

    def count(name: str, kind: str, value: torch.Tensor) -> None:
        if value.is_floating_point():
            found.setdefault(name, {}).setdefault(kind, Counts()).add(value)

    def hook(name: str) -> Callable[..., None]:
        def run(module: nn.Module, given: Any, result: Any) -> None:
            for value in tensors(plain(result)):
                count(name, "activations", value)
                if value.requires_grad:
                    value.register_hook(lambda gradient: count(name, "activation_gradients", gradient))

        return run

    with untouched(program, args, kwargs) as (given, named), torch.enable_grad():
        handles = [
            module.register_forward_hook(hook(name))
            for name, module in program.named_modules()
            if next(module.children(), None) is None
        ]
        try:
            value = _loss(program(*given, **named), loss)
        finally:
            for handle in handles:
                handle.remove()
        parameters = {name: p for name, p in program.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            count(name.rpartition(".")[0], "weight_gradients", gradient)
    return Histogram(found, type(program).__name__)


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _loss(result: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    value = getattr(result, "loss", result) if loss is None else loss(result)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise AmpFxError(
            f"no loss: it should be a tensor with one element, got {shape}. Pass"
            " loss=lambda outputs: ..., or a model that returns its loss."
        )
    if not value.requires_grad:
        raise AmpFxError("the loss depends on no parameter that requires a gradient.")
    return value
