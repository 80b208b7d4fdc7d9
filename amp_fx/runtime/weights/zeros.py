"""Zeros around a value are padding of the convolution that reads them, so that nobody writes them.

oneDNN pads both sides alike. Where a program has more zeros on one side ("same" padding of TensorFlow's models),
windows begin or end with as many elements more, which multiply by zero. Before, an image of 112 by 112::

    pad = torch.ops.aten.pad.default(x, [0, 1, 0, 1])                            # (4, 96, 113, 113)
    conv2d = torch.ops.aten.conv2d.default(pad, w, b, [2, 2], [0, 0], [1, 1], 96)      # w: (96, 1, 3, 3)

After::

    w_wide = torch.ops.aten.pad.default(w, [1, 0, 1, 0])                         # of weights alone: computed once
    conv2d = torch.ops.aten.conv2d.default(x, w_wide, b, [2, 2], [1, 1], [1, 1], 96)   # w_wide: (96, 1, 4, 4)

In bf16, on a Xeon with AMX and two threads: 0.57 ms and 0.69 to 3.2 to write the zeros, 0.64 by wider windows. An
element that is infinite makes NaN of one result more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.fx as fx

from amp_fx.graphs.calls import args_of, convolution_settings
from amp_fx.graphs.convolutions import around, is_wrong
from amp_fx.graphs.values import numel
from amp_fx.runtime.weights.lift import Lift

aten = torch.ops.aten

#: operations of wider windows for each element that nobody writes: they take less time on any CPU
_WORTH = 128


def take_zeros(lift: Lift, convolution: fx.Node) -> None:
    """Pads a value in the convolution of it by a weight, where it is the one reader of the value with zeros around."""
    padded, amounts = args_of(convolution)[0], around(convolution)
    if amounts is None or len(padded.users) > 1 or lift.is_written_between(padded, convolution):
        return
    args, given, weight = convolution.args, convolution_settings(convolution), args_of(convolution)[1]
    taps = _taps(amounts, given["dilation"])
    if taps is None:
        return
    if any(taps):
        if _operations(convolution, taps) > _WORTH * numel(padded.meta["val"]):
            return
        # the last dimension comes first
        sides = [side for tap in reversed(taps) for side in (max(tap, 0), max(-tap, 0))]
        with lift.graph.inserting_before(convolution):
            weight = lift.call(aten.pad.default, weight, sides)
    padding = [own + max(sides) for own, sides in zip(given["padding"], amounts, strict=True)]
    settings = given["stride"], padding, given["dilation"], given["groups"]
    convolution.args = (args_of(padded)[0], weight, (*args, None)[2], *settings)
    # a kernel that is right with zeros around a value may be wrong with padding
    if is_wrong(convolution, convolution.meta["val"].dtype):
        convolution.args = args
    else:
        lift.graph.erase_node(padded)


def _taps(amounts: Sequence[tuple[int, int]], dilation: Sequence[int]) -> list[int] | None:
    """How many elements windows get, before those that they have, negative: behind; None: not whole numbers of them."""
    more = [(behind - before, step) for (before, behind), step in zip(amounts, dilation, strict=True)]
    return None if any(number % step for number, step in more) else [number // step for number, step in more]


def _operations(convolution: fx.Node, taps: Sequence[int]) -> int:
    """Multiplications and additions of the elements that windows get."""
    _, channels, *window = args_of(convolution)[1].meta["val"].shape
    wider = [size + abs(tap) for size, tap in zip(window, taps, strict=True)]
    return 2 * numel(convolution.meta["val"]) * channels * (math.prod(wider) - math.prod(window))
