"""Which calls are matmuls, and the floating-point operations of each."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from amp_fx._torch import (
    OpOverload,
    autocast_disabled,
    enable_autocast,
    ignore_fresh_symbols,
    size_hint,
    symbolic_kernels,
)
from amp_fx.graphs.fake_runs import fake_arguments
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import is_eligible, numel, tensors

__all__ = ["is_matmul", "matmul_flops"]


def is_matmul(node: fx.Node) -> bool:
    """True for calls that multiply matrices, convolve or attend, composite ops included."""
    if not isinstance(node.target, OpOverload):
        return False
    # the FLOP counter knows composite ops only by what they decompose into
    return node.target.overloadpacket in flop_registry or has_trait(node, Trait.MATMUL)


def matmul_flops(node: fx.Node, low: torch.dtype | None = None) -> int:
    """Floating-point operations of a matmul-like call, found on its fake values; 0 where there is no formula.

    Args:
        node: a call with eligible arguments.
        low: run under autocast to this dtype, for arguments whose traced dtypes need not agree.
    """
    args, kwargs, fake_mode = fake_arguments(node)
    name = getattr(node.target, "__name__", "")
    if "scaled_dot_product" in name:
        # fused attention, whose kernels for CPU have no formula of their own
        backward = "backward" in name
        shapes = [[size_hint(size) for size in value.shape] for value in args[: 4 if backward else 3]]
        if all(len(shape) == 4 for shape in shapes):
            return sdpa_backward_flop_count(*shapes) if backward else sdpa_flop_count(*shapes)
    known = _known_flops(node, args)
    if known is not None:
        return known
    device = next((value.device.type for value in tensors((args, kwargs)) if is_eligible(value)), None)
    if device is None:
        return 0
    with (
        fake_mode,
        ignore_fresh_symbols(fake_mode),
        symbolic_kernels(),
        autocast_disabled() if low is None else enable_autocast(device, True, low),
        FlopCounterMode(display=False) as counter,
    ):
        node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
    return size_hint(counter.get_total_flops())


def _known_flops(node: fx.Node, args: tuple[Any, ...]) -> int | None:
    """Operations of the commonest calls, from their shapes; None for others. Asking torch takes ten times as long."""
    name, value = getattr(node.target, "_opname", ""), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or len(args) < 2:
        return None
    if (
        name in ("linear", "matmul", "mm", "bmm", "_scaled_mm", "_int_mm")
        and min(args[0].ndim, args[1].ndim) > 1
    ):
        return 2 * numel(value) * size_hint(args[0].shape[-1])
    if name in ("addmm", "baddbmm") and len(args) > 2:
        return 2 * numel(value) * size_hint(args[1].shape[-1])
    if name in ("conv1d", "conv2d", "conv3d"):
        weight = args[1]
        return 2 * numel(value) * numel(weight) // max(1, size_hint(weight.shape[0]))
    return None
