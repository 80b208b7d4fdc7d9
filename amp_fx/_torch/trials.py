"""Calls of oneDNN that are tried once on a machine, as no rule says which takes less time, and which is right.

What was found is kept where Inductor keeps its caches, by the call, torch, the CPU and the number of threads.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from amp_fx._torch.convolutions import Convolution, pointwise_convolution
from amp_fx._torch.packing import CONVOLUTION_INT8, LINEAR, onednn_packs, packing
from amp_fx.runtime.state import cache_results

__all__ = ["computes_wrongly", "convolution_seconds", "is_faster_as_convolution"]

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

#: seconds of a call that is not timed again
_LONG = 0.05
#: elements of a window of one row, over all channels of a group, from which on it is tried; the least that was wrong,
#: of 554 random ones, had 24,576
_LONG_ROW = 2**13
#: channels of a group up to which, and columns of a window from which on, it is tried: 24 and 4 were the last, of 7,786
_FEW, _WIDE = 32, 4


def _kept_on_disk(function: Function) -> Function:
    """Keeps what a function returns, a number, for other processes; ``torch.compiler.config`` may switch that off."""

    @cache_results()
    @functools.wraps(function)
    def kept(*args: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.codecache import write_atomic
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if config.force_disable_caches:
            return function(*args)
        cpu = sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
        call = repr((function.__name__, args, torch.__version__, cpu, torch.get_num_threads()))
        path = Path(cache_dir(), "amp_fx", hashlib.sha256(call.encode()).hexdigest() + ".json")
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            # there is none yet, or it was cut off
            value = function(*args)
        try:
            write_atomic(str(path), json.dumps(value), make_dirs=True)
        except OSError as error:
            logger.debug("not kept on disk: %s", error)
        return value

    wrapped: Any = kept
    return wrapped


@_kept_on_disk
def is_faster_as_convolution(sizes: tuple[int, int, int], dtype: torch.dtype, threads: int) -> bool:
    """Whether oneDNN takes clearly less time for a product that it is given as a convolution with a window of one.

    Up to version 3.13, with AMX, its products may leave threads without work: with two threads, one of them for
    512 x 768 by 768 x 768. Which ones follows no rule, so both are timed. ``sizes``: rows, columns, contracted.
    """
    rows, columns, contracted = sizes
    is_asked = threads > 1 and dtype is not torch.float32 and torch.cpu._is_amx_tile_supported()
    if not is_asked or not 2**26 <= rows * columns * contracted <= 2**32:
        return False
    with _disable_current_modes():
        x, weight = (torch.zeros(size, contracted, dtype=dtype) for size in (rows, columns))
        image, kernel = x.t()[None, ..., None], weight[..., None, None]
        matrix = packing("linear", weight.shape, dtype, rows)(weight)
        window = (0, 0), (1, 1), (1, 1), 1
        kernel = packing("convolution", kernel.shape, dtype, *window, tuple(image.shape))(kernel)
        call = torch.ops.mkldnn._convolution_pointwise.default
        calls = (
            partial(LINEAR, x, matrix, None, "none", [], ""),
            partial(call, image, kernel, None, *window, "none", [], ""),
        )
        linear, convolution = (min(timeit.repeat(call, number=1, repeat=12)) for call in calls)
    return convolution < 0.85 * linear


@_kept_on_disk
def convolution_seconds(form: Convolution, dtype: torch.dtype, threads: int) -> float:
    """The seconds that a convolution of known sizes takes in a dtype, with so many threads, which are those of torch.

    Its value lies channels last, as Inductor has it.
    """
    with _disable_current_modes():
        call = _call(form, *(torch.zeros(sizes, dtype=dtype) for sizes in _sizes(form)))
        started = time.perf_counter()
        call()
        first = time.perf_counter() - started
        return first if first > _LONG else min(timeit.repeat(call, number=1, repeat=6))


def computes_wrongly(form: Convolution, dtype: torch.dtype) -> bool:
    """Whether oneDNN's kernel of a convolution of known sizes returns wrong numbers in a dtype, on this CPU.

    With AMX, up to version 3.12. It reads and writes memory that is not the value's where the result is one column wide
    and the stride is longer (pytorch#169688), and where a stride passes over more than the window (oneDNN#5494), so
    that these are not tried. What is tried: windows of one row over many channels, whose results may be as many times
    too large as the window is wide, and wide windows over a few channels, which the kernel reorders (oneDNN#4684).

    Args:
        form: of a transposed one, the convolution that is its gradient counts, where there may be one.
        dtype: of 16 bits, or int8.
    """
    is_onednns = onednn_packs(torch.float32 if dtype is torch.int8 else dtype)
    if not is_onednns or dtype.itemsize > 2 or not torch.cpu._is_amx_tile_supported():
        return False
    if form.output_padding is not None:
        if not torch.is_grad_enabled():
            return False
        form = form.gradient()
    (_, _, *x), (_, channels, *window) = _sizes(form)
    *_, columns = form.result()
    passes = [step > size for step, size in zip(form.stride, window, strict=True)]
    if columns == 1 and form.stride[-1] > 1:
        return True
    if max(window) > 1 and any(passes if len(x) == 3 else passes[:-1]):
        return True
    is_long = max(window[:-1]) == 1 and channels * window[-1] >= _LONG_ROW
    is_reordered = channels <= _FEW and window[-1] >= _WIDE
    return (is_long or is_reordered) and _differs(form, dtype, torch.get_num_threads())


@_kept_on_disk
def _differs(form: Convolution, dtype: torch.dtype, threads: int) -> bool:
    """True where a convolution is another one in a dtype than in fp32, of numbers whose sums are exact."""
    given, kernel = _sizes(form)
    one = (1, *given[1:])
    form = replace(form, sizes=one)
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(0)
        value, weight = (
            torch.randint(low, 2, sizes, generator=generator).float()
            for low, sizes in ((0, one), (-1, kernel))
        )
        exact = _call(form, value, weight)()
        if dtype is torch.int8:
            found = _call_int8(form, value.to(torch.uint8), weight.to(torch.int8))
        else:
            found = _call(form, value.to(dtype), weight.to(dtype))().float()
        return bool((found - exact).norm() > 0.02 * exact.norm())


def _call_int8(form: Convolution, x: Tensor, weight: Tensor) -> Tensor:
    x, ones = x.contiguous(memory_format=torch.channels_last), torch.ones(len(weight))
    window = form.stride, form.padding, form.dilation, form.groups
    packed = packing("convolution_int8", form.kernel, torch.int8, 1.0, 0, *window, form.sizes)(weight)
    factors = ones, torch.zeros(len(weight), dtype=torch.int32), None
    return CONVOLUTION_INT8(x, 1.0, 0, packed, *factors, *window, 1.0, 0, torch.float32, "none", [], "")


def _sizes(form: Convolution) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the value and of the weight."""
    assert form.sizes is not None
    return form.sizes, tuple(form.kernel)


def _call(form: Convolution, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """The call of a convolution of a value that lies channels last, as Inductor has it."""
    x = x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    *args, _, _ = form.args(channels_last=True)
    if form.is_packed and (how := form.packing(x.dtype)) is not None:
        op, given = pointwise_convolution(x, how(weight), None, *args)
        return lambda: op(*given)
    return lambda: torch.ops.aten.convolution.default(x, weight, None, *args)
