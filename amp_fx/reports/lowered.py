"""Every graph of a call as Inductor would compile it: costs, which casts are kernels, and plans of the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    OpOverload,
    autocast_shield,
    compile_id,
    compile_with_inductor,
    lower_with_inductor,
    op_name,
)
from amp_fx.graphs.calls import arguments, module_path, source_line, tensor_nodes
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.fallback import under_autocast
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import graph_devices, is_eligible, is_view, tensors
from amp_fx.plans.label import Kind, Label, Reason
from amp_fx.plans.plan import Cost, Plan, dtype_name
from amp_fx.plans.reading import cast_plan, conversion, input_plan, node_plan
from amp_fx.policy import OpClass
from amp_fx.policy.levels import FORWARD, LEVELS, Level, is_narrow
from amp_fx.policy.table import supported_devices
from amp_fx.reports.casts import LoweredGraph, cost_of, is_move
from amp_fx.settings import Options

__all__ = ["LoweredGraphs", "autocast_backend"]


def autocast_backend(options: Mapping[str, Any] | None) -> Callable[..., Callable[..., Any]]:
    """A backend for ``torch.compile`` to compare with: torch.autocast with the results that amp_fx has.

    What users have today differs in two ways that are no merit of either: autocast leaves some outputs in the low
    dtype, and stock ``torch.compile`` traces the backward under autocast, which rounds more than eager autocast does
    (pytorch#153044). Both would move fewer bytes for other results. Here outputs have the dtypes of the program, and
    the backward is traced without autocast. Of the ``options``, the low dtype counts.
    """
    opts = Options.parse(None, options)

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        devices = graph_devices(gm).intersection(supported_devices())
        ambient = ambient_regions({device: opts.low_dtype(device) for device in devices})
        with autocast_shield():
            return compile_with_inductor(under_autocast(gm, ambient), example_inputs, {})

    return compile_graph


@dataclass
class LoweredGraphs:
    """Forward and backward graphs in the order of compilation; no code is generated."""

    graphs: list[LoweredGraph] = field(default_factory=list)

    def inner_compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        """Stands in for Inductor's; see :func:`amp_fx._torch.replace_inner_compile`."""
        lowered = lower_with_inductor(gm, example_inputs, **options)
        phase = "backward" if options.get("is_backward") else "forward"
        self.graphs.append(LoweredGraph(compile_id(), phase, lowered))
        return lowered.call

    def complete(self, plans: list[Plan]) -> None:
        """Adds the plans of the backward graphs, and says of each cast whether it is a kernel of its own.

        Casts in bodies of higher-order ops are not found among the kernels.
        """
        backward = [_backward_plan(graph, plans) for graph in self.graphs if graph.phase == "backward"]
        for graph in self.graphs:
            # the plan has the names of what AOTAutograd traced
            origins = [
                node.meta["from_node"][-1] if node.meta.get("from_node") else node for node in graph.kernels
            ]
            names = {origin.name for origin in origins}
            for plan in plans:
                if (graph.name, graph.phase) == (plan.graph, plan.phase):
                    plan.casts = [replace(cast, kernel=cast.name in names) for cast in plan.casts]
        plans += backward

    @property
    def cost(self) -> Cost:
        """Of all graphs."""
        return cost_of(graph.lowered for graph in self.graphs)


def _backward_plan(graph: LoweredGraph, forward: Sequence[Plan]) -> Plan:
    """What the backward computes in which dtype: nothing is decided there, it mirrors the forward."""
    origin = next((plan for plan in forward if plan.graph == graph.name), Plan(graph.name))
    low = next((node.low for node in origin.nodes if node.low is not None), None)
    levels = [level for node in origin.nodes for level in node.levels_below.values()]
    plan = Plan(graph.name, origin.policy, phase="backward")
    kernels = {node.name for node in graph.kernels}
    flops: dict[Any, int] = {}
    for node in graph.lowered.before.graph.nodes:
        # what AOTAutograd calls the forward's own inputs
        is_parameter = node.name.startswith("primals")
        if node.op == "placeholder" and (given := input_plan(node, "", is_parameter)) is not None:
            plan.inputs.append(given)
        elif node.op == "call_function" and conversion(node) is not None:
            plan.casts.append(cast_plan(node, inserted=True, kernel=node.name in kernels))
        elif node.op == "call_function":
            plan.nodes.append(node_plan(_backward_label(node, low, levels), node, flops))
    return plan


def _backward_class(node: fx.Node, dtype: torch.dtype | None, low: torch.dtype | None) -> OpClass:
    """What a call that no list has decided about does with its arguments."""
    if dtype is None:
        return OpClass.KEEP
    if is_matmul(node):
        return OpClass.LOW if dtype is low else OpClass.FP32
    return OpClass.FOLLOW if is_view(node) or is_move(node) else OpClass.PROMOTE


def _backward_label(node: fx.Node, low: torch.dtype | None, levels: Sequence[Level]) -> Label:
    results = [value for value in tensors(node.meta.get("val")) if is_eligible(value)]
    dtypes = {
        source.meta["val"].dtype
        for _, value in arguments(node)
        for source in tensor_nodes(value)
        if is_eligible(source.meta.get("val"))
    }
    dtype = results[0].dtype if results else None
    level = _level(node, levels)
    if level is not None:
        # the others are scales
        dtypes = {level.dtype}
    elif is_matmul(node) and len(dtypes) == 1:
        # a weight's gradient leaves a 16-bit matmul in fp32
        (dtype,) = dtypes
    origin = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    what = f"gradient of {getattr(origin[-1][1], '__name__', origin[-1][1])}" if origin else "gradient"
    read = ", ".join(sorted(map(dtype_name, dtypes))) or "nothing floating"
    target = node.target
    return Label(
        name=node.name,
        op=op_name(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target)),
        module_path=module_path(node),
        op_class=_backward_class(node, dtype, low),
        reasons=(Reason.of(Kind.GRADIENT, of=what, dtypes=read),),
        source=source_line(node),
        traced=dtype,
        low=low,
        dtype=dtype,
        levels={} if level is None else {FORWARD: level.name},
    )


def _level(node: fx.Node, levels: Sequence[Level]) -> Level | None:
    """The level in which a matmul of the backward multiplies, as those of the forward; None where it is low."""
    read = {value.dtype for source in node.all_input_nodes if is_narrow(value := source.meta.get("val"))}
    if not is_matmul(node):
        return None
    return next((level for level in (*levels, *LEVELS.values()) if level.dtype in read), None)
