"""Graphs that scale their own gradients: two more inputs, and where their values come from at run time.

The scale and the flags are inputs, not constants, so that a scale may change at every step without another compile,
and graphs know their scaler by name only, so that caches hit. What the inputs do is
:class:`amp_fx.passes.ScaleBackward`.
"""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import FakeTensor
from amp_fx.errors import ScalingWarning
from amp_fx.graphs.regions import Region
from amp_fx.passes import ScaleBackward
from amp_fx.plans.plan import Plan
from amp_fx.scaling.scaler import find_scaler

__all__ = ["ScaledGraph", "is_scaled", "warn_taken_inside", "warn_unscaled", "without_scaling"]

#: L['self']._modules['0']._parameters['weight'] -> 0.weight
_ROOT = re.compile(r"^\w\['\w+'\]")
_ATTRIBUTE = re.compile(r"(?:\._(?:modules|parameters|buffers))?\['?([^'\]]+)'?\]")

_warned = False

#: True while a model is only looked at
_not_training: ContextVar[bool] = ContextVar("amp_fx_not_training", default=False)


@dataclass(frozen=True, eq=False)
class ScaledGraph:
    """One graph that is compiled with a scaler.

    Attributes:
        scaler: the scaler's name.
        inputs: number of the program's inputs; the scale comes after them, then the flags.
        leaves: positions of the parameters among them.
        names: of the parameters, ``"encoder.0.weight"``.
        device: where scale and flags live.
    """

    scaler: str
    inputs: int
    leaves: tuple[int, ...]
    names: tuple[str, ...]
    device: torch.device

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], scaler: str) -> ScaledGraph:
        """The facts about a graph that Dynamo made, with the inputs that it came with."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        # Dynamo guards on the type: what is a parameter now is one in every call, and a leaf
        leaves = [
            position
            for position, value in enumerate(example_inputs)
            if isinstance(value, nn.Parameter) and value.requires_grad
        ]
        source = leaves or [
            position
            for position, value in enumerate(example_inputs)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        return cls(
            scaler,
            len(placeholders),
            tuple(leaves),
            tuple(_parameter_name(placeholders[position]) for position in leaves),
            example_inputs[source[0]].device,
        )

    @property
    def rewriting(self) -> ScaleBackward:
        """The pass that gives the inputs their meaning."""
        return ScaleBackward(self.inputs, self.leaves)

    def extend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
        """A copy of the graph with the two inputs, and values for all of its inputs.

        A copy, because Dynamo reads the placeholders of its own graph again after the backend returns.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        output = graph.graph_copy(gm.graph, copies)
        graph.output(output).meta = dict(gm.graph.output_node().meta)
        originals = gm.graph.find_nodes(op="placeholder")
        for node in originals:
            if hasattr(node, "_dynamo_source"):
                copies[node]._dynamo_source = node._dynamo_source
        values = self._example_values(originals)
        after = copies[originals[-1]]
        for name, value in values.items():
            with graph.inserting_after(after):
                after = graph.placeholder(name)
            after.meta.update(val=value, example_value=value)
            # AOTAutograd wants the attribute on every placeholder of a graph of Dynamo's
            after._dynamo_source = None
        extended = fx.GraphModule(gm, graph)
        extended.meta.update(gm.meta)
        if hasattr(gm, "_param_name_to_source"):
            extended._param_name_to_source = gm._param_name_to_source
        return extended, [*example_inputs, *values.values()]

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph with the program's own signature.

        Raises (when called):
            ScalerError: no scaler has the name.
        """

        def run(*args: Any) -> Any:
            leaves = [args[position] for position in self.leaves]
            if leaves and isinstance(leaves[0], FakeTensor):
                # DDPOptimizer asks for the dtypes of what a graph returns
                with leaves[0].fake_mode:
                    return compiled(*args, *self._new_values())
            return compiled(*args, *find_scaler(self.scaler).enter_graph(self, leaves))

        return run

    def _new_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.ones((), device=self.device),
            torch.zeros(len(self.leaves), device=self.device, requires_grad=True),
        )

    def _example_values(self, placeholders: Sequence[fx.Node]) -> dict[str, torch.Tensor]:
        scale, flags = self._new_values()
        examples = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
        mode = next(value.fake_mode for value in examples if isinstance(value, FakeTensor))
        return {
            # static: with dynamic=True the length of the vector would become a symbol that nothing defines
            "amp_fx_scale": mode.from_tensor(scale, static_shapes=True),
            "amp_fx_flags": mode.from_tensor(flags, static_shapes=True),
        }


def is_scaled(regions: Mapping[str, Region]) -> bool:
    """True for fp16 that is amp_fx's doing: under the user's own autocast the user owns the scaling, too."""
    return any(region.dtype is torch.float16 and not region.by_user for region in regions.values())


@contextlib.contextmanager
def without_scaling() -> Iterator[None]:
    """Inside, models are looked at and not trained: nobody is warned, and the one warning is kept for later."""
    token = _not_training.set(True)
    try:
        yield
    finally:
        _not_training.reset(token)


def warn_unscaled(plan: Plan) -> None:
    """Warns, once in a process, that fp16 is trained without loss scaling."""
    global _warned
    if _warned or _not_training.get() or all(row.dtype is not torch.float16 for row in plan.nodes):
        return
    # the scaler of torch knows nothing of this graph, nor the graph of it; it works from outside
    if any(issubclass(type(o), torch.amp.GradScaler) and o.is_enabled() for o in gc.get_objects()):
        return
    _warned = True
    warnings.warn(
        "amp_fx trains in float16 without loss scaling: gradients below 6e-8 become zero. "
        "Use options={'dtype': 'float16', 'scaler': 'default'} with scaler = amp_fx.GradScaler(device), "
        "or torch.amp.GradScaler, or dtype 'bfloat16', which needs no scaling.",
        ScalingWarning,
        stacklevel=3,
    )


def warn_taken_inside(scaler: str) -> None:
    """Warns that a graph takes its gradients itself, where no scaler of amp_fx reaches them."""
    warnings.warn(
        f"scaler={scaler!r} does not scale the gradients that a compiled function takes inside itself, with "
        "torch.autograd.grad or backward(): gradients below 6e-8 become zero. Compile the model or the loss and call "
        "backward() outside, or use dtype 'bfloat16', which needs no scaling.",
        ScalingWarning,
        stacklevel=3,
    )


def _parameter_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    return _ATTRIBUTE.sub(r".\1", _ROOT.sub("", str(source.name))).lstrip(".") or node.name
