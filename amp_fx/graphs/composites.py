"""Composite ops that are captured as the ops they are made of, as autocast sees them.

Pre-dispatch tracing records a composite op as one node. ``torch.autocast`` on a CPU does not list these composites, but
the linears inside of them: eager code rounds what the linears read. On CUDA the composites themselves are listed.

Before::

    %lstm_cell = aten.lstm_cell.default(%x, [%h, %c], %w_ih, %w_hh, %b_ih, %b_hh)

After::

    %linear = aten.linear.default(%x, %w_ih, %b_ih)
    %linear_1 = aten.linear.default(%h, %w_hh, %b_hh)
    %add = aten.add.Tensor(%linear_1, %linear)
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from amp_fx._torch import OpOverload

__all__ = ["COMPOSITES"]

aten = torch.ops.aten


def _parts(op: OpOverload, devices: tuple[str, ...]) -> Callable[..., Any]:
    def decompose(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op.decompose(x, *args, **kwargs) if x.device.type in devices else NotImplemented

    return decompose


#: what :func:`make_fx` takes as ``decomposition_table``: ops, and on which devices autocast does not list them
COMPOSITES: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        op: _parts(op, devices)
        for op, devices in {
            aten.lstm_cell.default: ("cpu",),
            aten.gru_cell.default: ("cpu", "mps"),
            aten.gru.input: ("cpu", "mps"),
        }.items()
    }
)
