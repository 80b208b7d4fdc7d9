"""Convolutions of a captured graph as the calls that compute them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import Convolution, computes_wrongly, size_hint
from amp_fx.graphs.calls import args_of, argument_value, convolution_settings
from amp_fx.graphs.values import is_fixed

aten = torch.ops.aten

#: what a convolution over a row has in the dimension that a line lacks
_OF_ROW = {"stride": 1, "padding": 0, "dilation": 1}


def packed_form(convolution: fx.Node, *, hinted: bool = False, turned: bool = True) -> Convolution:
    """A convolution as oneDNN's packed call takes it.

    One over a line whose length is not known stays as it is: with a single channel, the library lays out its result
    otherwise than Inductor expects.

    Args:
        convolution: of a captured graph.
        hinted: sizes that are not known are those of tracing.
        turned: one over a column becomes one over a row, as where its weight is packed.
    """
    x, weight = args_of(convolution)[:2]
    value, kernel, given = x.meta["val"].shape, weight.meta["val"].shape, convolution_settings(convolution)
    # of one sample a batch of one
    is_known, sizes = hinted or is_fixed(x), (1,) * (len(kernel) - len(value)) + (*map(size_hint, value),)
    is_line = is_known and (len(kernel) == 3 or (turned and _is_column(sizes, kernel, given)))
    if is_line:
        sizes, kernel = ((*each[:2], 1, each[2]) for each in (sizes, kernel))
        given |= {name: (number, given[name][0]) for name, number in _OF_ROW.items()}
    return Convolution(
        sizes=sizes if is_known else None,
        kernel=torch.Size(kernel),
        stride=given["stride"],
        padding=given["padding"],
        dilation=given["dilation"],
        output_padding=given.get("output_padding"),
        groups=given["groups"],
        is_line=is_line,
    )


def around(convolution: fx.Node) -> list[tuple[int, int]] | None:
    """The zeros before and behind the value that a convolution reads, by dimension; None where it is not padded so."""
    padded, dims = args_of(convolution)[0], len(args_of(convolution)[1].meta["val"].shape) - 2
    if padded.target is not aten.pad.default or "output_padding" in convolution_settings(convolution):
        return None
    mode, value = argument_value(padded, "mode"), argument_value(padded, "value")
    amounts: list[Any] = [*args_of(padded)[1]]
    is_fit = len(amounts) <= 2 * dims and all(isinstance(each, int) and each >= 0 for each in amounts)
    if mode not in (None, "constant") or value not in (None, 0) or not is_fit:
        return None
    # the last dimension comes first
    sides = list(zip(amounts[::2], amounts[1::2], strict=True))
    return [(0, 0)] * (dims - len(sides)) + sides[::-1]


def is_wrong(convolution: fx.Node, dtype: torch.dtype) -> bool:
    """Whether this CPU's kernel of a convolution returns wrong numbers in a dtype; sizes as traced."""
    if convolution.meta["val"].device.type != "cpu":
        return False
    # who runs the graph may pack a column's weight, or not
    forms = {packed_form(convolution, hinted=True, turned=turned) for turned in (False, True)}
    return any(computes_wrongly(form, dtype) for form in forms)


def _is_column(value: Any, kernel: Any, given: dict[str, Any]) -> bool:
    """True for one over a column by windows of one column."""
    is_column = len(kernel) == 4 and kernel[3] == value[3] == 1
    return is_column and given["padding"][1] == 0 and "output_padding" not in given
