"""AOTAutograd's graphs: what their inputs and outputs are."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

__all__ = ["JointRoles", "joint_roles", "program_outputs"]


@dataclass(frozen=True)
class JointRoles:
    """What the inputs and outputs of a joint graph are.

    Attributes:
        inputs: position among the inputs of the graph that was compiled -> placeholder.
        tangents: the gradients that enter the backward.
        gradients: position of an input that requires a gradient -> positions of the gradient among the outputs,
            several for a tensor subclass. An output is None where the graph computes no gradient.
    """

    inputs: dict[int, fx.Node]
    tangents: list[fx.Node]
    gradients: dict[int, list[int]]


def joint_roles(gm: fx.GraphModule) -> JointRoles | None:
    """Reads AOTAutograd's descriptors; None for a graph that has no backward, or no descriptors."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, TangentAOTInput

    tangents = [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(_whole(node.meta.get("desc")), TangentAOTInput)
    ]
    gradients: dict[int, list[int]] = {}
    for position, output in enumerate(gm.graph.output_node().meta.get("desc") or ()):
        descriptor = _whole(output)
        if isinstance(descriptor, GradAOTOutput) and isinstance(descriptor.grad_of, PlainAOTInput):
            gradients.setdefault(descriptor.grad_of.idx, []).append(position)
    return JointRoles(_joint_inputs(gm), tangents, gradients) if gradients else None


def _joint_inputs(gm: fx.GraphModule) -> dict[int, fx.Node]:
    """The program's inputs of a graph of AOTAutograd's, by their positions; those that it has changed are left out."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    placeholders = gm.graph.find_nodes(op="placeholder")
    described = [(_whole(node.meta.get("desc")), node) for node in placeholders]
    return {what.idx: node for what, node in described if isinstance(what, PlainAOTInput)}


def _whole(descriptor: Any) -> Any:
    """That of a tensor subclass, for one of its parts."""
    while hasattr(descriptor, "base") and hasattr(descriptor, "attr"):
        descriptor = descriptor.base
    return descriptor


def program_outputs(forward: fx.GraphModule) -> list[fx.Node]:
    """What a forward graph returns to the program, and not, or not only, to its backward."""
    from torch._functorch._aot_autograd import descriptors

    saved = tuple(kind for name, kind in vars(descriptors).items() if name.startswith("SavedForBackwards"))
    output = forward.graph.output_node()
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)  # type: ignore[arg-type]  # a list
    return [node for node, what in described if isinstance(node, fx.Node) and not isinstance(what, saved)]
