"""Graphs that scale their own gradients: one more input, and where its value comes from at run time.

The scale is an input, not a constant, so that it may change at every step without another compile, and graphs know
their scaler by name only, so that caches hit. What the input does is :class:`amp_fx.passes.ScaleBackward`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import FakeTensor, FakeTensorMode, copy_of
from amp_fx.passes import ScaleBackward
from amp_fx.scaling.scaler import find_scaler

__all__ = ["ScaledGraph"]

#: L['self']._modules['0']._parameters['weight'] -> 0.weight
_ROOT = re.compile(r"^\w\['\w+'\]")
_ATTRIBUTE = re.compile(r"(?:\._(?:modules|parameters|buffers))?\['?([^'\]]+)'?\]")


@dataclass(frozen=True, eq=False)
class ScaledGraph:
    """One graph that is compiled with a scaler.

    Attributes:
        scaler: the scaler's name.
        inputs: number of the program's inputs; the scale comes after them.
        leaves: positions of the parameters among them.
        source: position of an input that gradients are taken by.
        names: of the parameters, ``"encoder.0.weight"``.
        device: where the scale is needed.
    """

    scaler: str
    inputs: int
    leaves: tuple[int, ...]
    source: int
    names: tuple[str, ...]
    device: torch.device

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], scaler: str) -> ScaledGraph:
        """The facts about a graph that Dynamo made, with the inputs that it came with."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        differentiated = [
            position
            for position, value in enumerate(example_inputs)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        # Dynamo guards on the type: what is a parameter now is one in every call, and a leaf
        leaves = [
            position for position in differentiated if isinstance(example_inputs[position], nn.Parameter)
        ]
        source = (leaves or differentiated)[0]
        names = tuple(_parameter_name(placeholders[position]) for position in leaves)
        device = example_inputs[source].device
        return cls(scaler, len(placeholders), tuple(leaves), source, names, device)

    @property
    def rewriting(self) -> ScaleBackward:
        """The pass that gives the input its meaning."""
        return ScaleBackward(self.inputs)

    def extend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
        """A copy of the graph with the scale as its last input, and values for all of its inputs."""
        extended = copy_of(gm)
        inputs = extended.graph.find_nodes(op="placeholder")
        examples = (node.meta.get("example_value", node.meta.get("val")) for node in inputs)
        scale = self._fake_scale(next(value.fake_mode for value in examples if isinstance(value, FakeTensor)))
        with extended.graph.inserting_after(inputs[-1]):
            placeholder = extended.graph.placeholder("amp_fx_scale")
        placeholder.meta.update(val=scale, example_value=scale)
        # AOTAutograd wants the attribute on every placeholder of a graph of Dynamo's
        placeholder._dynamo_source = None  # type: ignore[attr-defined]
        extended.recompile()
        return extended, [*example_inputs, scale]

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph with the program's own signature; a call raises ScalerError if no scaler has the name."""

        def run(*args: Any) -> Any:
            if isinstance(source := args[self.source], FakeTensor):
                # DDPOptimizer asks for the dtypes of what a graph returns
                return compiled(*args, self._fake_scale(source.fake_mode))
            leaves = [args[position] for position in self.leaves]
            return compiled(*args, find_scaler(self.scaler).enter_graph(self.names, leaves, self.device))

        return run

    def _fake_scale(self, mode: FakeTensorMode) -> torch.Tensor:
        with mode:
            return torch.empty((), device=self.device)


def _parameter_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    return _ATTRIBUTE.sub(r".\1", _ROOT.sub("", str(source.name))).lstrip(".") or node.name
