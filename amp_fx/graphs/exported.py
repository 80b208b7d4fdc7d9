"""Exported programs as graphs for the passes: autocast regions become facts about nodes.

``torch.export`` speaks the IR that the passes work on, so nothing is traced again; inputs, constraints and
names stay. What it writes as higher-order ops that only set a mode (``wrap_with_autocast``,
``wrap_with_set_grad_enabled``) is spliced into the graph around it. What goes into a region without gradients is
detached, so that none leaves it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import HigherOrderOperator, OpOverload, is_functorch_wrapped
from amp_fx.errors import CaptureError
from amp_fx.graphs.calls import output_nodes, where
from amp_fx.graphs.capture import OPAQUE_BODIES, pad_by_numbers
from amp_fx.graphs.fake_runs import dtype_under_autocast, fake_arguments
from amp_fx.graphs.keys import REGION_META, TRACED_META
from amp_fx.graphs.regions import Region, is_autocast_call, node_regions
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import LOW_DTYPES, dtypes_and_sizes, in_place_target, is_eligible, tensors

aten = torch.ops.aten


class Inner:
    """A call inside ``vmap`` or ``torch.func``, and its value, which is nowhere else: no pass looks at it."""

    def __init__(self, target: Any, value: Any) -> None:
        self.target, self.value = target, value
        # as in a graph of Dynamo's
        self.__name__ = target.__name__.partition(".")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call."""
        return self.target(*args, **kwargs)


def adopt(gm: fx.GraphModule, ambient: Mapping[str, Region]) -> fx.GraphModule:
    """A copy of the graph of an ExportedProgram, or of a body inside it, in the form that ``capture`` returns."""
    root = torch.nn.Module()
    graph = fx.Graph()
    inputs = {node: graph.node_copy(node) for node in gm.graph.find_nodes(op="placeholder")}
    for node, copied in inputs.items():
        copied.name = node.name  # as torch.export writes it: _rename would make another name of "input"
    output = graph.output(_Splice(graph, root).run(gm, inputs, ambient))
    output.meta = dict(gm.graph.output_node().meta)
    adopted = fx.GraphModule(root, graph)
    adopted.meta.update(gm.meta)
    _share_storages(graph)
    pad_by_numbers(graph)
    output.meta[TRACED_META] = [dtypes_and_sizes(node) for node in output_nodes(adopted)]
    return adopted


def ambient_dtype(adopted: fx.GraphModule) -> torch.dtype | None:
    """The dtype of an autocast that was on while the program was exported; None where there was none.

    Such a program says bf16 in its metadata, while its ops and weights are fp32: ``torch.export`` does not
    record the state that surrounds it. CaptureError where no autocast explains the dtypes in the graph.
    """
    node = next(_differing(adopted, None), None)
    if node is None:
        return None
    dtype = node.meta["val"].dtype
    if dtype in LOW_DTYPES and next(_differing(adopted, dtype), None) is None:
        return dtype
    raise CaptureError(
        f"{node.name} is recorded as {dtype}, which neither the program itself nor one torch.autocast around its "
        f"export gives [{where(node)}]. Export again without torch.autocast around "
        "torch.export.export, or use amp_fx.export(model, args)."
    )


class _Splice:
    """Copies graphs into one, mode-setting higher-order ops opened up."""

    def __init__(self, graph: fx.Graph, root: torch.nn.Module) -> None:
        self._graph = graph
        self._root = root
        #: what a region without gradients sees -> what it is outside
        self._detached: dict[fx.Node, fx.Node] = {}

    def run(self, gm: fx.GraphModule, env: dict[fx.Node, fx.Node], ambient: Mapping[str, Region]) -> Any:
        """Copies one graph whose inputs are in ``env``; returns what it outputs.

        CaptureError for a graph without an output.
        """
        regions = node_regions(gm.graph.nodes, ambient)
        opened: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            is_check = node.target is aten._assert_tensor_metadata.default
            if is_check and any(is_eligible(source.meta.get("val")) for source in node.all_input_nodes):
                # of a dtype that the passes may change
                continue
            if node.op == "placeholder" or is_autocast_call(node):
                continue
            if node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            if (wrapped := _wrapped(gm, node)) is not None:
                body, operands, region = wrapped
                given = [fx.map_arg(operand, env.__getitem__) for operand in operands]
                if node.target.name() == "wrap_with_set_grad_enabled":  # type: ignore[union-attr]  # an op
                    given = [self._switch_gradients(n, bool(node.args[0]), regions[node]) for n in given]
                inner = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
                opened[node] = fx.map_arg(self.run(body, inner, {**regions[node], **region}), self._written)
            elif node.op == "call_function" and node.args and node.args[0] in opened:
                env[node] = opened[node.args[0]][node.args[1]]
            elif node.op == "get_attr":
                if not all(_wrapped(gm, user) for user in node.users):
                    env[node] = self._attribute(gm, node, regions[next(iter(node.users))])
            else:
                env[node] = self._graph.node_copy(node, env.__getitem__)
                env[node].meta[REGION_META] = regions[node]
                if any(map(is_functorch_wrapped, tensors(node.meta.get("val")))):
                    env[node].target = Inner(node.target, env[node].meta.pop("val"))
        raise CaptureError("an exported graph has no output")

    def _switch_gradients(self, operand: Any, enabled: bool, region: Mapping[str, Region]) -> Any:
        """A value as a region without gradients sees it, or as one with gradients inside such a region does."""
        if not isinstance(operand, fx.Node):
            return operand
        if enabled:
            return self._detached.get(operand, operand)
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or operand in self._detached:
            return operand
        detached = Rewriter(self._graph, meta={REGION_META: region}).call(
            aten.detach.default, operand, like=(operand,)
        )
        self._detached[detached] = operand
        return detached

    def _written(self, result: fx.Node) -> fx.Node:
        """A value written to without gradients keeps its gradients: a write returns the value that it wrote to."""
        owner = result
        while (target := in_place_target(owner)) is not None:
            owner = target
        return self._detached.get(owner, result) if owner is not result else result

    def _attribute(self, gm: fx.GraphModule, node: fx.Node, region: Mapping[str, Region]) -> fx.Node:
        value: Any = operator.attrgetter(str(node.target))(gm)
        user = next(iter(node.users)).target
        if isinstance(value, fx.GraphModule) and not (
            isinstance(user, HigherOrderOperator) and user.name() in OPAQUE_BODIES
        ):
            value = adopt(value, region)
        stem = str(node.target).replace(".", "_")
        names = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(1)))
        name = next(name for name in names if not hasattr(self._root, name))
        setattr(self._root, name, value)
        copied = self._graph.node_copy(node)
        copied.target = name
        return copied


def _wrapped(
    gm: fx.GraphModule, node: fx.Node
) -> tuple[fx.GraphModule, tuple[Any, ...], dict[str, Region]] | None:
    """Body, operands and autocast state of a higher-order op that only sets a mode; else None."""
    name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
    region: dict[str, Region] = {}
    if name == "wrap_with_set_grad_enabled":
        _, body, *operands = node.args
    elif name == "wrap_with_autocast":
        device, dtype, enabled, _, body, *operands = node.args
        low = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(str(device))
        region[str(device)] = Region(bool(enabled), low, by_user=True)
    else:
        return None
    return getattr(gm, str(body.target)), tuple(operands), region  # type: ignore[union-attr]  # a get_attr node


def _differing(gm: fx.GraphModule, ambient: torch.dtype | None) -> Iterator[fx.Node]:
    """Calls of an adopted graph whose recorded dtype is not the one they give inside an autocast of dtype ambient."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(node.target, OpOverload) or not is_eligible(value):
            continue
        region = node.meta[REGION_META].get(value.device.type)
        # what has unbacked sizes would make new ones if it ran again
        if region is None or "unbacked_bindings" in node.meta:
            continue
        inside = region.dtype if region.enabled else None
        dtype = dtype_under_autocast(node, value.device.type, inside if region.by_user else ambient)
        if dtype is not value.dtype:
            yield node


def _share_storages(graph: fx.Graph) -> None:
    """Makes the fake values of views look into their bases' storages, which a program from a file has lost.

    The passes read off the fake values which tensors share memory.
    """
    for node in graph.nodes:
        before = node.meta.get("val")
        if node.target is operator.getitem and isinstance(before, torch.Tensor):
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif (
            isinstance(node.target, OpOverload)
            and "unbacked_bindings" not in node.meta
            and any(result.alias_info is not None for result in node.target._schema.returns)
        ):
            # by its schema, a result shares an argument's memory
            args, kwargs, mode = fake_arguments(node)
            with mode, torch.no_grad():
                value = node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
            # under autocast, an op that looks like a view may have rounded
            if [t.dtype for t in tensors(value)] == [t.dtype for t in tensors(before)]:
                node.meta["val"] = value
