"""Gradients and activations by exponent, against the ranges of the low dtypes.

This is the plot of Micikevicius et al., "Mixed Precision Training" (2018), figure 3. It is measured in one
forward and backward of the model as it is, op by op and without amp_fx; numbers need no plotting library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx.errors import AmpFxError
from amp_fx.graphs.values import tensors
from amp_fx.instruments.batches import call_of, called, uncompiled
from amp_fx.instruments.progress import progress
from amp_fx.instruments.reports.counting import FORMATS, Counts
from amp_fx.instruments.reports.figures import draw_histogram, save_figure
from amp_fx.instruments.step import Step, plain
from amp_fx.precision.plans.files import as_data, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: bumped when the JSON form changes incompatibly
_VERSION = 1
#: what is counted, and what it is called in a figure
KINDS = {
    "activations": "outputs of modules",
    "activation_gradients": "gradients of outputs",
    "weight_gradients": "gradients of parameters",
}
_GRADIENTS = ("activation_gradients", "weight_gradients")
#: modules that the text names
_WORST = 5


@dataclass
class Histogram:
    """The measurements of :func:`histogram`."""

    #: path of a module -> kind, a key of :data:`KINDS` -> counts; the model itself is ``""``
    modules: dict[str, dict[str, Counts]] = field(default_factory=dict)
    #: name of the model
    title: str = ""

    def total(self, *kinds: str) -> Counts:
        """Counts of all modules, by keys of :data:`KINDS`; none means both kinds of gradients."""
        wanted = kinds or _GRADIENTS
        counts = (rows[kind] for rows in self.modules.values() for kind in wanted if kind in rows)
        return sum(counts, Counts())

    @property
    def loss_scale(self) -> float | None:
        """The power of two that saves the most gradients from becoming zero in fp16, and none overflows."""
        scale = self.total().loss_scale()
        return None if scale is None else 2.0**scale

    def __str__(self) -> str:
        gradients, scale = self.total(), self.total().loss_scale()
        lines = [f"{self.title}: {gradients.nonzero} gradients that are not zero"]
        if gradients.nonfinite:
            lines[0] += f", and {gradients.nonfinite} that are infinite or not a number"
        for dtype in FORMATS:
            over = ", the largest overflows" if gradients.overflows(dtype) else ""
            lines.append(
                f"  {dtype:<14}{gradients.lost(dtype):>8.2%} underflow to zero,"
                f" {gradients.subnormal(dtype):>7.2%} subnormal: fewer significant bits{over}"
            )
        if scale is None:
            lines.append("no loss scale: the largest gradient overflows float16 as it is")
        else:
            after = f"{gradients.lost('float16', scale):.2%} underflow to zero in float16"
            lines.append(f"loss scale 2**{scale} = {2**scale}: {after}, none overflows")
        shares = {name: Histogram({name: rows}).total().lost() for name, rows in self.modules.items()}
        worst = [name for name in sorted(shares, key=lambda name: -shares[name])[:_WORST] if shares[name]]
        if worst:
            lines.append(f"where float16 loses most (modules: {len(self.modules)})")
        lines += [f"  {name or '(the model)':<40}{shares[name]:>8.2%} underflow to zero" for name in worst]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form: counts of every module, of all, and the loss scale."""
        total = {"gradients": self.total(), **{kind: self.total(kind) for kind in KINDS}}
        own = {"version": _VERSION, "title": self.title, "loss_scale": self.loss_scale}
        return as_data({**own, "total": total, "modules": self.modules})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes ``.json``, or the figure as whatever else matplotlib writes: ``.png``, ``.svg``, ``.pdf``."""
        path = Path(path)
        if path.suffix.lower() == ".json":
            write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
            return path
        save_figure(self.figure(), path, ".json")
        return path

    def figure(self) -> Figure:
        """The figure: gradients above, activations below, the ranges of the formats underneath each."""
        gradients = {KINDS[kind]: self.total(kind) for kind in _GRADIENTS}
        return draw_histogram(self.title, gradients, {KINDS["activations"]: self.total("activations")})


@torch.inference_mode(False)
@progress("histogram: runs the model forward and backward")
def histogram(
    model: Callable[..., Any], batch: Any, loss: Callable[[Any], torch.Tensor] | None = None
) -> Histogram:
    """Counts gradients and activations by exponent in one forward and backward of a model.

    The model is run as it is, in the precision of its own weights, op by op, and as it was before it was compiled. It
    and the random generators are afterwards what they were.

    Args:
        model: a module.
        batch: a tuple or list of positional arguments, a mapping of keyword arguments, or the only argument.
        loss: what the model returns -> 0-d tensor. None: the model returns the loss, or has it in ``.loss``.

    Raises:
        InputError: the model does not take the batch.
        OptionsError: a loss that is no function.
        AmpFxError: not a module, or no loss that depends on a parameter.
    """
    program = uncompiled(model)
    if not isinstance(program, nn.Module):
        raise AmpFxError(f"histogram needs a torch.nn.Module; got {type(model).__name__}.")
    step = Step(program, call_of(program, batch), loss, seed=None)
    found: dict[str, dict[str, Counts]] = {}

    def count(name: str, kind: str, value: torch.Tensor) -> None:
        if value.is_floating_point():
            found.setdefault(name, {}).setdefault(kind, Counts()).add(value)

    def observe(name: str, module: nn.Module, given: Any, result: Any) -> None:
        for value in tensors(plain(result)):
            count(name, "activations", value)
            if value.requires_grad:
                value.register_hook(partial(count, name, "activation_gradients"))

    leaves = [each for each in program.named_modules() if next(each[1].children(), None) is None]
    handles = [module.register_forward_hook(partial(observe, name)) for name, module in leaves]
    try:
        gradients = step.results(partial(called, program))
    finally:
        for handle in handles:
            handle.remove()
    for name, gradient in gradients.items():
        count(name.rpartition(".")[0], "weight_gradients", gradient)
    return Histogram(found, type(program).__name__)
