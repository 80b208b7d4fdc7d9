"""What loss scaling adds to an fp16 training step on a GPU, counted: bytes and kernels, in the graphs and beside them.

    python -m benchmarks.scaler --target cuda:h100 [--only NAME ...]

The GPU need not be in the machine. Beside the graphs, each op that a scaler calls is a kernel; how many launches a call
for many tensors takes is worked out as ATen's ``multi_tensor_apply`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx
from amp_fx.targets import TARGETS
from benchmarks.arms import Arm
from benchmarks.counts import measure
from benchmarks.on_target import enter_target
from benchmarks.workloads import WORKLOADS, make

__all__ = ["Cost", "beside", "launches", "step_costs"]

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

_LOW: dict[str, Any] = {"dtype": "float16", "profile": "off"}
_FP16 = torch.float16
#: what others are compared with
_TORCHS = "autocast, torch's scaler"
#: name -> how the graphs are compiled, and the scaler beside them
_ARMS: dict[str, tuple[Arm, str]] = {
    "autocast": (Arm("autocast", autocast=True, dtype=_FP16), ""),
    _TORCHS: (Arm("autocast", autocast=True, dtype=_FP16), "torch"),
    "amp_fx": (Arm("amp_fx", "amp_fx", _LOW, dtype=_FP16), ""),
    "amp_fx, its scaler": (Arm("amp_fx", "amp_fx", {**_LOW, "scaler": "counted"}, dtype=_FP16), "amp_fx"),
}


@dataclass(frozen=True)
class Cost:
    """Kernels, and bytes that they read and write."""

    kernels: int = 0
    moved: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.kernels + other.kernels, self.moved + other.moved)


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
        self.cost = Cost()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (_CHECK, _NORM):
            sizes = [value.numel() for value in args[0]]
            # a norm leaves a number for each chunk, in zeros that another kernel gathers
            passes = 1 if func is _CHECK else 2
            kernels = launches(sizes) + (0 if func is _CHECK else 1 - (-len(sizes) // _GATHERED))
            self.cost += Cost(kernels, (8 if passes == 1 else 4) * sum(sizes))
            return None if func is _CHECK else [value.new_empty(()) for value in args[0]]
        if func.namespace == "aten" and func not in _FREE:
            self.cost += Cost(1)
        return args[0] if func is _UPDATE else func(*args, **(kwargs or {}))


class _Fused(torch.optim.SGD):
    """An optimizer that asks the device whether to step, as fused ones do; its own kernels are not counted."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing."""


class _Graph:
    names = ()
    device = torch.device("meta")


def beside(kind: str, sizes: Sequence[int]) -> Cost:
    """What a scaler does in a step, outside the graphs.

    Args:
        kind: ``"torch"``, ``"amp_fx"``, or ``""`` for none.
        sizes: elements of each parameter.
    """
    if not kind:
        return Cost()
    ops = _Ops()
    # no device at all: what is called does not depend on it, but on a CPU
    with torch.device("meta"):
        scaler = torch.amp.GradScaler("cpu") if kind == "torch" else amp_fx.GradScaler("cpu", name="counted")
        parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer, graph = _Fused(parameters), _Graph()
        # in the first step, the scale and what counts steps are made
        for counted in (False, True):
            loss = torch.empty((), requires_grad=True)
            if isinstance(scaler, amp_fx.GradScaler):
                scaler.enter_graph(graph, [])
            with ops if counted else contextlib.nullcontext():
                scaled = scaler.scale(loss)
                if scaled is not loss:
                    torch.autograd.grad(scaled, loss, torch.empty(()))
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
    return ops.cost


def step_costs(name: str, target: str) -> dict[str, tuple[Cost, Cost]]:
    """Of one workload: for each way to train it, what the graphs cost, and what is done beside them."""
    workload = make(name)
    sizes = [parameter.numel() for parameter in workload.model.parameters()]
    rows, found = {}, {}
    for label, (arm, scaler) in _ARMS.items():
        key = repr((arm.backend, arm.options))
        rows[key] = rows.get(key) or measure(workload, arm, "training", target).total
        found[label] = Cost(rows[key].kernels, rows[key].bytes_moved), beside(scaler, sizes)
    return found


def _lines(name: str, costs: dict[str, tuple[Cost, Cost]]) -> list[str]:
    totals = {label: graphs + outside for label, (graphs, outside) in costs.items()}
    lines = []
    for label, (graphs, outside) in costs.items():
        total = totals[label]
        plain = totals["amp_fx" if label.startswith("amp_fx") else "autocast"]
        lines.append(
            f"| {name} | {label} | {graphs.moved / 1e6:.2f} + {outside.moved / 1e6:.2f} MB"
            f" | {total.moved / plain.moved:.3f} | {total.moved / totals[_TORCHS].moved:.3f}"
            f" | {graphs.kernels} + {outside.kernels} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaler", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", default="cuda:h100", metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    args = parser.parse_args(argv)
    target = enter_target(parser, args.target)
    print(
        "| model | step | moved, in graphs + beside | of the same without scaler | of torch's scaler | kernels |"
    )
    print("|---|---|---|---|---|---|")
    for name in args.only:
        print("\n".join(_lines(name, step_costs(name, target))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
