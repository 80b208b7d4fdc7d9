"""Constants of a frozen graph that follow their weights without compiling again.

What Inductor's freezing computes from weights (low copies, packed for oneDNN, with BatchNorm folded in) is known as an
FX graph, see :mod:`amp_fx.weights.folding`::

    w0 = placeholder()                                                        # f32, a weight
    detach = torch.ops.aten.detach.default(w0)
    to = torch.ops.aten.to.dtype(detach, torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight.default(to, 16)          # a constant of the frozen graph

After weights have changed, the part of it that depends on them runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import autocast_disabled

__all__ = ["LiveConstants", "folded_bytes"]

_alive: weakref.WeakSet[LiveConstants] = weakref.WeakSet()


def folded_bytes() -> int:
    """Bytes of all constants that are alive, without those in the memory of a weight."""
    return sum(constants.nbytes for constants in list(_alive))


class LiveConstants:
    """Constants of one compiled graph that depend on weights.

    Args:
        program: computes them from the weights.
        constants: what the compiled graph holds, by the node of the program that computes it.
        nbytes: of the constants that are not in the memory of a weight.
    """

    def __init__(self, program: fx.GraphModule, constants: Mapping[fx.Node, Tensor], nbytes: int) -> None:
        self.nbytes = nbytes
        self._program = program
        self._constants = constants
        # made now: who drops the last reference may do so while tensors are fake
        with torch.inference_mode(False):
            nothing = torch.zeros(1)
            self._dropped = [
                (value, nothing.to_mkldnn() if value.is_mkldnn else nothing) for value in constants.values()
            ]
        _alive.add(self)

    def renew(self, weights: Sequence[Tensor], changed: Sequence[bool]) -> None:
        """Gives the constants the values that follow from ``weights``. The compiled graph must not be running.

        Args:
            weights: all of them.
            changed: those whose constants are computed again.
        """
        with torch.inference_mode(False), torch.no_grad(), autocast_disabled():
            _Renewal(self._program, self._constants, changed).run(*weights)

    def drop(self) -> None:
        """Frees the memory. The compiled graph must not be called again."""
        for value, nothing in self._dropped:
            value.data = nothing


class _Renewal(fx.Interpreter):
    """Replaces each constant as soon as its new value is known, so that there is never more than one too many."""

    def __init__(
        self, program: fx.GraphModule, constants: Mapping[fx.Node, Tensor], changed: Sequence[bool]
    ) -> None:
        super().__init__(program)
        inputs = program.graph.find_nodes(op="placeholder")
        stale = {node for node, has_changed in zip(inputs, changed, strict=True) if has_changed}
        for node in program.graph.nodes:
            if not stale.isdisjoint(node.all_input_nodes):
                stale.add(node)
        self._constants = {node: value for node, value in constants.items() if node in stale}
        self._needed = set(self._constants)
        for node in reversed(program.graph.nodes):
            if node in self._needed:
                self._needed.update(node.all_input_nodes)

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._needed and n.op != "placeholder":
            return None
        value = super().run_node(n)
        if n in self._constants:
            # packed tensors of oneDNN cannot be copied into
            self._constants[n].data = value
        return value
