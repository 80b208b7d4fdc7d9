"""A rewritten graph becomes an exported program: its weights, and on request inputs and outputs, in the low dtype."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch.export import ExportGraphSignature
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from amp_fx.errors import InputError, OptionsError
from amp_fx.graphs.calls import PROGRAM_CAST, graph_inputs_of, output_nodes, start
from amp_fx.graphs.exported import Inner
from amp_fx.graphs.keys import CAST_META, COPY_META, KEPT_META, OWN, REGION_META, TRACED_META, Kept
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import LOW_DTYPES, dtypes_and_sizes, is_eligible, storage_of, storages_written_in
from amp_fx.runtime.weights.lift import SHIFT, Lift, kept_copies, steps_to
from amp_fx.runtime.weights.patterns import fold_norms
from amp_fx.runtime.widened import identity

_WEIGHT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Weight:
    """One input of the graph that is stored with the program."""

    name: str
    target: str
    value: torch.Tensor


def weights_of(ep: torch.export.ExportedProgram) -> list[Weight]:
    """Tensors that are stored with the program, but for those that its signature says it writes to."""
    signature = ep.graph_signature
    written = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    found = []
    for spec in signature.input_specs:
        if spec.kind not in _WEIGHT_KINDS or spec.target is None or spec.target in written:
            continue
        value = ep.state_dict.get(spec.target, ep.constants.get(spec.target))
        found.append(Weight(spec.arg.name, spec.target, value))
    return found


def stored_weights(ep: torch.export.ExportedProgram) -> list[Weight]:
    """The floating ones of :func:`weights_of`."""
    return [weight for weight in weights_of(ep) if is_eligible(weight.value)]


def tied(weights: Iterable[Weight]) -> list[list[Weight]]:
    """The weights, those that are one tensor together."""
    groups: dict[tuple[Any, ...], list[Weight]] = {}
    for weight in weights:
        groups.setdefault(identity(weight.value), []).append(weight)
    return list(groups.values())


def beyond_range(weights: Iterable[Weight], low: torch.dtype) -> list[Weight]:
    """Weights with finite values that the low dtype cannot hold."""
    return [weight for weight in weights if bool(_overflows(weight.value.detach(), low).any())]


def _overflows(value: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Where a finite value is infinite in the low dtype."""
    return value.isfinite() & value.to(low).isinf()


def lift_weights(
    gm: fx.GraphModule, groups: Sequence[Sequence[Weight]], when_beyond: str, *, folds: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Lifts out of a graph what :class:`amp_fx.passes.MarkStored` has marked.

    Inputs of weights become inputs of what is stored in their place; what is stored beside has inputs behind them.

    Args:
        gm: has the weights as inputs.
        groups: tied weights are together.
        when_beyond: the option ``weights_beyond_range``.
        folds: norms by given statistics are folded into the weights before them.

    Returns:
        What takes the place of weights, by their names in the state dict or among the constants; what else is made of
        a weight, as its factors below 16 bits, is beside it.

    Raises:
        OptionsError: a weight is beyond the range of the dtype that it is to be stored in.
    """
    weights = {weight.name: weight for group in groups for weight in group}
    inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    lift = Lift(gm, steps_to(kept_copies(gm.graph)))
    if folds:
        _fold_norms(lift, [inputs[name] for name in weights])
    taken: list[tuple[Kept, fx.Node]] = []
    for node in kept_copies(gm.graph):
        if not node.users:
            continue
        kept = node.meta[KEPT_META]
        given = weight = inputs[kept.weight]
        if kept.suffix:
            with gm.graph.inserting_after(weight):
                given = gm.graph.placeholder(f"{kept.weight}{kept.suffix}")
            given.target = given.name
            given.meta = {"val": node.meta["val"].detach(), COPY_META: kept.weight}
        taken.append((kept, lift.take(node, given=given)))
        lift.read_instead(node, given)
    stands = [node.meta["val"].detach() for node in kept_copies(gm.graph) if node.users]
    split = lift.split()
    values = split.prepare([weights[node.name].value.detach() for node in split.weights])
    values = _in_range(values, [kept for kept, _ in taken], groups, when_beyond)
    stored: dict[str, dict[str, torch.Tensor]] = {}
    for (kept, given), value, stand in zip(taken, values, stands, strict=True):
        weight = weights[kept.weight]
        if given.name == weight.name:
            given.meta["val"] = stand
            given.meta.pop("tensor_meta", None)
        learns = isinstance(kept.form, torch.dtype) and weight.value.requires_grad
        own = stored.setdefault(weight.target, {weight.target: weight.value})
        own[weight.target + given.name.removeprefix(weight.name)] = _like(weight, value, learns)
    for group in groups:
        held = [stored[weight.target][weight.target] for weight in group if weight.target in stored]
        for weight in group:
            # one of tied weights is read, and all are stored
            meta = inputs[weight.name].meta
            if held and not inputs[weight.name].users and weight.target not in stored:
                stored[weight.target] = {weight.target: held[0]}
                meta["val"] = meta["val"].new_empty(held[0].shape, dtype=held[0].dtype)
    for node in split.weights:
        if not node.users:
            gm.graph.erase_node(node)
            stored.setdefault(target := weights[node.name].target, {}).pop(target, None)
    return stored


def _fold_norms(lift: Lift, weights: Collection[fx.Node]) -> None:
    """Folds norms, and marks what is stored of that: the weight in its own place, a bias beside it."""
    written = storages_written_in(lift.graph)
    lift.derived.update(node for node in weights if storage_of(node) not in written)
    for low, bias in fold_norms(lift):
        weight = next(iter(graph_inputs_of(low)))
        is_alone = all(user in lift.derived for user in weight.users)
        is_first = not any(
            node.meta[KEPT_META].weight == weight.name for node in kept_copies(lift.graph) if node.users
        )
        low.meta[KEPT_META] = Kept(weight.name, "" if is_alone and is_first else "_folded_weight")
        bias.meta[KEPT_META] = Kept(weight.name, SHIFT)


def _in_range(
    values: Sequence[torch.Tensor], kept: Sequence[Kept], groups: Sequence[Sequence[Weight]], when_beyond: str
) -> list[torch.Tensor]:
    """The stored tensors, infinities clamped where the weights are finite; OptionsError if that is not asked for."""
    group_of = {weight.name: group for group in groups for weight in group}
    refused: dict[str, float] = {}
    found = list[torch.Tensor]()
    for value, each in zip(values, kept, strict=True):
        group = group_of[each.weight]
        if value.dtype in LOW_DTYPES and (beyond := value.isinf()).any():
            source = group[0].value.detach()
            if source.shape == value.shape:
                beyond &= source.isfinite()
            if beyond.any():
                largest = source[source.isfinite()].abs().max().item()
                refused[" = ".join(weight.target for weight in group)] = largest
                most = torch.finfo(value.dtype).max
                value = torch.where(beyond, value.clamp(-most, most), value)
        found.append(value)
    if refused and when_beyond == "raise":
        names = ", ".join(f"{name} (largest magnitude {largest:g})" for name, largest in refused.items())
        raise OptionsError(
            f"weights beyond the range of the low dtype: {names}. Use dtype='bfloat16', or say what to do "
            "with weights_beyond_range='clamp' or 'keep' (in fp32, with the ops that read them)."
        )
    return found


def _like(weight: Weight, value: torch.Tensor, learns: bool) -> torch.Tensor:
    """A parameter where the weight is one."""
    return torch.nn.Parameter(value, learns) if isinstance(weight.value, torch.nn.Parameter) else value


def narrow_ends(
    gm: fx.GraphModule, signature: ExportGraphSignature, low: torch.dtype
) -> dict[str, torch.dtype]:
    """Puts the user's fp32 inputs and outputs into the low dtype; the casts inside are fused by the passes.

    Inputs that the program writes to keep theirs. Returns the new dtypes by the inputs' names.
    """
    users = {spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT}
    # a program that was not decomposed writes in its graph, and its signature does not say so
    storages = storages_written_in(gm.graph)
    written = {node.name for node in gm.graph.find_nodes(op="placeholder") if storage_of(node) in storages}
    written.update(signature.user_inputs_to_mutate.values())
    narrowed: dict[str, torch.dtype] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in users - written and is_eligible(value) and value.dtype is torch.float32:
            narrowed[node.name] = low
            node.meta["val"] = value.to(low)
            node.meta.pop("tensor_meta", None)
            wide = _cast(node, value.dtype, before=start(gm.graph))
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
    output = gm.graph.output_node()
    ends = list(output.args[0])  # type: ignore[arg-type]  # a tuple
    for index, spec in enumerate(signature.output_specs):
        value = ends[index].meta.get("val") if isinstance(ends[index], fx.Node) else None
        if spec.kind is OutputKind.USER_OUTPUT and is_eligible(value) and value.dtype is torch.float32:
            ends[index] = _cast(ends[index], low, before=output)
    output.args = (tuple(ends),)
    output.meta[TRACED_META] = [dtypes_and_sizes(node) for node in output_nodes(gm)]
    return narrowed


def _cast(node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    neighbour = next((user for user in node.users if REGION_META in user.meta), node)
    work = Rewriter(node.graph, meta={CAST_META: True, REGION_META: neighbour.meta.get(REGION_META, {})})
    with work.before(before):
        return work.call(PROGRAM_CAST, node, dtype, like=(neighbour,))


class _LowInputsProgram(torch.export.ExportedProgram):
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
    names: Collection[Any], examples: Any, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    # keyword inputs may come in another order than those of the example
    given = tree_leaves((args, {name: kwargs[name] for name in examples[1] if name in kwargs}))
    for name, example, value in zip(names, tree_leaves(examples), given, strict=False):
        both = isinstance(value, torch.Tensor) and isinstance(example, torch.Tensor)
        if both and value.dtype is not example.dtype and value.is_floating_point():
            raise InputError(
                f"input {name!r} has dtype {value.dtype}; this program takes {example.dtype}, because it was exported "
                f"with keep_io_dtypes=False. Give it {name}.to({example.dtype}), or export with keep_io_dtypes=True."
            )


def new_program(
    ep: torch.export.ExportedProgram,
    gm: fx.GraphModule,
    stored: Mapping[str, Mapping[str, torch.Tensor]],
    narrowed: Mapping[str, torch.dtype],
    more: Mapping[str, torch.nn.Parameter] | None = None,
) -> torch.export.ExportedProgram:
    """The program with a rewritten graph.

    ``stored`` takes the place of weights, by their names in the state dict or among the constants; ``narrowed`` has the
    user's inputs whose dtype has changed; ``more`` is held by inputs that the graph has beside.
    """
    more = more or {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in narrowed:
            # so that any runtime says which dtype it wants
            with gm.graph.inserting_before(start(gm.graph)):
                dtype = {"dtype": node.meta["val"].dtype}
                gm.graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (node,), dtype)
    signature = ep.graph_signature
    outputs = [
        replace(spec, arg=TensorArgument(node.name))
        if isinstance(node, fx.Node) and isinstance(spec.arg, TensorArgument)
        else spec
        # fx has no type for a tuple of outputs
        for spec, node in zip(signature.output_specs, gm.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    ]
    inputs = _input_specs(gm, signature, more)
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if isinstance(inner := node.target, Inner):
                node.target, node.meta["val"] = inner.target, inner.value
            node.meta = {key: value for key, value in node.meta.items() if not key.startswith(OWN)}
    kind = _LowInputsProgram if narrowed else torch.export.ExportedProgram
    return kind(
        root=gm,
        graph=gm.graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={
            **_with_stored(ep.state_dict, stored),
            **{OWN + name: value for name, value in more.items()},
        },
        range_constraints=dict(ep.range_constraints),
        module_call_graph=[_own_entry(entry) for entry in ep.module_call_graph],
        example_inputs=_low_examples(ep, narrowed),
        constants=_with_stored(ep.constants, stored),
        verifiers=ep.verifiers,
    )


def _input_specs(
    gm: fx.GraphModule, signature: ExportGraphSignature, more: Collection[str]
) -> list[InputSpec]:
    """Specs of the program's inputs, of its weights' factors below 16 bits, and of its constants."""
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in more:
            spec = InputSpec(InputKind.PARAMETER, TensorArgument(node.name), OWN + node.name)
        elif (spec := specs.get(node.name)) is None:
            weight = specs[node.meta[COPY_META]]
            target = f"{weight.target}{node.name.removeprefix(weight.arg.name)}"
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
    """A copy whose names the new program may change; a deep one of tree specs warns."""
    if (called := entry.signature) is not None:
        called = replace(called, inputs=[*called.inputs], outputs=[*called.outputs])
    return replace(entry, signature=called)


def _low_examples(ep: torch.export.ExportedProgram, dtypes: Mapping[str, torch.dtype]) -> Any:
    """The example inputs of a program, in the dtypes that its inputs of these names have now."""
    leaves, spec = tree_flatten(ep.example_inputs)
    names = ep.graph_signature.user_inputs
    if len(leaves) != len(names):
        # None, where the program was read from a file without them
        return ep.example_inputs
    lows = [
        value.to(dtypes[str(name)]) if isinstance(value, torch.Tensor) and str(name) in dtypes else value
        for name, value in zip(names, leaves, strict=True)
    ]
    return tree_unflatten(lows, spec)
