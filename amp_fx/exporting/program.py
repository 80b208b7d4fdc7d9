"""A rewritten graph and its weights become an exported program."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.export.graph_signature import ExportGraphSignature, InputSpec, TensorArgument
from torch.utils._pytree import tree_leaves

from amp_fx.errors import InputError
from amp_fx.exporting.ends import check_dtypes, low_examples
from amp_fx.exporting.stored import scale_target
from amp_fx.graphs.keys import (
    COPY_META,
    NODE_KEYS,
    RECIPE_META,
)

__all__ = ["LowInputsProgram", "new_program"]


class LowInputsProgram(torch.export.ExportedProgram):
    """A program that takes inputs in the low dtype, and says so to whoever gives it fp32.

    Once saved and loaded it is a plain program, whose graph has a check of its own.
    """

    def module(self, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        """As of the base class; calls raise InputError for an input in another dtype."""
        module = super().module(*args, **kwargs)
        if self.example_inputs is not None:
            check = functools.partial(_check_inputs, self.graph_signature.user_inputs, self.example_inputs)
            module.register_forward_pre_hook(check, with_kwargs=True)
        return module


def _check_inputs(
    names: Collection[Any],
    examples: Any,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    # keyword inputs may come in another order than those of the example
    given = tree_leaves((args, {name: kwargs[name] for name in examples[1] if name in kwargs}))
    for name, example, value in zip(names, tree_leaves(examples), given, strict=False):
        if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
            continue
        if value.dtype is not example.dtype and value.is_floating_point():
            raise InputError(
                f"input {name!r} has dtype {value.dtype}; this program takes {example.dtype}, because it was exported "
                f"with keep_io_dtypes=False. Give it {name}.to({example.dtype}), or export with keep_io_dtypes=True."
            )


def new_program(
    ep: torch.export.ExportedProgram,
    gm: fx.GraphModule,
    stored: Mapping[str, Mapping[str, torch.Tensor]],
    narrowed: Mapping[str, torch.dtype],
) -> torch.export.ExportedProgram:
    """The program with a new graph and new weights.

    Args:
        ep: what was exported.
        gm: its graph, rewritten.
        stored: what takes the place of weights, by their names in the state dict or among the constants.
        narrowed: inputs of the user whose dtype has changed.
    """
    check_dtypes(gm, narrowed.keys())
    signature = ep.graph_signature
    outputs = [
        replace(spec, arg=TensorArgument(node.name))
        if isinstance(node, fx.Node) and isinstance(spec.arg, TensorArgument)
        else spec
        # fx has no type for a tuple of outputs
        for spec, node in zip(signature.output_specs, gm.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    ]
    inputs = _input_specs(gm, signature)
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            for key in NODE_KEYS & node.meta.keys():
                del node.meta[key]
    kind = LowInputsProgram if narrowed else torch.export.ExportedProgram
    return kind(
        root=gm,
        graph=gm.graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=_with_stored(ep.state_dict, stored),
        range_constraints=dict(ep.range_constraints),
        module_call_graph=[_own_entry(entry) for entry in ep.module_call_graph],
        example_inputs=low_examples(ep, narrowed),
        constants=_with_stored(ep.constants, stored),
        verifiers=ep.verifiers,
    )


def _input_specs(gm: fx.GraphModule, signature: ExportGraphSignature) -> list[InputSpec]:
    """Those of the program, and of the factors of its weights below 16 bits."""
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        spec = specs.get(node.name)
        if spec is None:
            weight = specs[node.meta[COPY_META]]
            recipe, _ = node.meta[RECIPE_META]
            target = scale_target(str(weight.target), recipe)
            spec = replace(weight, arg=TensorArgument(node.name), target=target)
        found.append(spec)
    return found


def _with_stored(
    values: Mapping[str, Any], stored: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Any]:
    """Values by name, and what takes the place of those that have changed."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= stored.get(name, {name: value})
    return found


def _own_entry(entry: torch.export.ModuleCallEntry) -> torch.export.ModuleCallEntry:
    """A copy whose names the new program may change."""
    if entry.signature is None:
        return replace(entry)
    called = replace(
        entry.signature, inputs=list(entry.signature.inputs), outputs=list(entry.signature.outputs)
    )
    return replace(entry, signature=called)
