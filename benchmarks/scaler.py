"""What a loss scaler does on a GPU in a step, beside the compiled graphs: kernels and bytes, for ``benchmarks.counts``.

Nothing runs: each op that a scaler calls is a kernel, and how many launches a call for many tensors takes is worked
out as ATen's ``multi_tensor_apply`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx

aten = torch.ops.aten

#: of one launch for a list of tensors, as far as CUDA 12 goes (MultiTensorApply.cuh); CUDA 13 takes seven times as much
_TENSORS, _BLOCKS, _CHUNK = 110, 320, 65536
#: results of norms that one launch gathers (ForeachReduceOp.cu)
_GATHERED = 400

_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default
_NORM = aten._foreach_norm.Scalar
_UPDATE = aten._amp_update_scale_.default
#: no kernels
_FREE = frozenset({aten.alias.default, aten.detach.default, aten.empty.memory_format})


def launches(sizes: Sequence[int]) -> int:
    """How many kernels one pass over tensors of so many elements takes."""
    count = tensors = blocks = 0
    for size in sizes:
        chunks = -(-size // _CHUNK)
        tensors += 1
        for chunk in range(1, chunks + 1):
            blocks += 1
            is_last = chunk == chunks
            if blocks == _BLOCKS or (is_last and tensors == _TENSORS):
                count, blocks = count + 1, 0
                # what is left of the tensor begins the next one
                tensors = 0 if is_last else 1
    return count + (blocks > 0)


class _Ops(TorchDispatchMode):
    """Counts ops, and leaves out those that have no fake kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _CHECK:
            self._pass(args[0], 8)
            return None
        if func is _NORM:
            self._pass(args[0], 4)
            # a norm leaves a number for each chunk, in zeros that another kernel gathers
            self.kernels += 1 - (-len(args[0]) // _GATHERED)
            return [value.new_empty(()) for value in args[0]]
        if func.namespace == "aten" and func not in _FREE:
            self.kernels += 1
        return args[0] if func is _UPDATE else func(*args, **(kwargs or {}))

    def _pass(self, values: Sequence[torch.Tensor], element: int) -> None:
        sizes = [value.numel() for value in values]
        self.kernels += launches(sizes)
        self.moved += element * sum(sizes)


class _Fused(torch.optim.SGD):
    """An optimizer that asks the device whether to step, as fused ones do; its own kernels are not counted."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing."""


def beside(ours: bool, sizes: Sequence[int]) -> tuple[int, int]:
    """Kernels and bytes of amp_fx's scaler or torch's in a step, with parameters of so many elements."""
    ops = _Ops()
    # no device at all: what is called does not depend on it, but on a CPU
    with torch.device("meta"):
        scaler = amp_fx.GradScaler("cpu", name="counted") if ours else torch.amp.GradScaler("cpu")
        parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = _Fused(parameters)
        # in the first step, the scale and what counts steps are made
        for counted in (False, True):
            loss = torch.empty((), requires_grad=True)
            if isinstance(scaler, amp_fx.GradScaler):
                scaler.enter_graph([], [], torch.device("meta"))
            with ops if counted else contextlib.nullcontext():
                scaled = scaler.scale(loss)
                if scaled is not loss:
                    torch.autograd.grad(scaled, loss, torch.empty(()))
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
    return ops.kernels, ops.moved
