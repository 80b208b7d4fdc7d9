"""``amp_fx.explain(model, *args)``: a report of forward and backward, without compiling or changing the model.

The model goes through Dynamo, amp_fx and Inductor up to and including fusion, once with amp_fx and once under
``torch.autocast`` to compare with; the graphs are then run op by op, so that code after a graph break is
reached. No code is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import (
    DynamoWatch,
    LeftOut,
    Lowered,
    OpOverload,
    breaks_without_graph,
    compile_id,
    lower_with_inductor,
    replace_inner_compile,
    rest_left_out,
    stock_inductor,
    unwrapped_errors,
)
from amp_fx.backend import amp_fx
from amp_fx.errors import AmpFxError
from amp_fx.graphs.facts import (
    arguments,
    cast_bytes,
    is_eligible,
    module_path,
    source_line,
    tensor_nodes,
    tensors,
)
from amp_fx.graphs.uncompiled import listen_again, not_told
from amp_fx.options import Options
from amp_fx.plans.plan import CastPlan, NodePlan, Plan, dtype_name, input_plan, measure
from amp_fx.policy import OpClass
from amp_fx.policy.table import op_name, supported_devices
from amp_fx.reports.advice import layout_advice, scaling_advice, weight_advice
from amp_fx.reports.kernels import cast_kernels, conversion, conversions
from amp_fx.reports.left_out import is_compiled_in_place, left_out_advice
from amp_fx.reports.recording import record
from amp_fx.reports.report import Cost, Report
from amp_fx.reports.untouched import plain, untouched
from amp_fx.scaling.unscaled import without_scaling

__all__ = ["explain"]


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Says what amp_fx would do to a model, forward and backward, on one call.

    Nothing that Inductor generates is run, and the model is not changed: buffers, gradients, attributes and the
    states of the random generators are what they were. The arguments are not written to. As after
    ``torch._dynamo.explain``, code compiled earlier in this process is compiled again when it is next called.

    Args:
        model: a module or a function. What ``torch.compile`` returned is taken as it was before; after
            ``module.compile()`` the module is compiled in place here, too, which Dynamo does not do for all modules.
        *args: of one call.
        options: as in ``torch.compile(model, backend="amp_fx", options=...)``.
        **kwargs: of one call.

    Returns:
        The report; every subgraph is in it, graph breaks are named, and so is what never becomes a graph.

    Raises:
        OptionsError: bad options.
        CaptureError, PassError: with ``strict``, a graph cannot be rewritten.
    """
    parsed = Options.parse(None, options)
    program = getattr(model, "_orig_mod", model)
    # a scaler belongs to a training that is not going on here
    given = {key: value for key, value in (options or {}).items() if key != "scaler"}

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return amp_fx(gm, example_inputs, options=given)

    with record() as recording, without_scaling(), not_told(), unwrapped_errors(AmpFxError):
        run = _lowered(program, args, kwargs, backend)
    ours, plans = run.graphs, recording.plans
    # in the order of the forward graphs
    plans += [
        _backward_plan(graph.lowered.before, graph.name, plans) for graph in ours if graph.phase == "backward"
    ]
    for plan in plans:
        for graph in ours:
            if (graph.name, graph.phase) == (plan.graph, plan.phase):
                _mark_kernels(plan, graph.lowered)
    costs = {"amp_fx": _cost(ours)}
    device = _device(program, args, kwargs)
    if device in supported_devices():
        with torch.autocast(device, parsed.low_dtype(device)):
            costs["torch.autocast"] = _cost(_lowered(program, args, kwargs, stock_inductor).graphs)
    weights = dict(program.named_parameters()) if isinstance(program, nn.Module) else {}
    notes = left_out_advice(program, plans, run.left_out, run.breaks)
    notes += weight_advice(plans, weights) + layout_advice(plans, weights)
    if parsed.scaler is None:
        notes += scaling_advice(plans)
    name = getattr(program, "__name__", type(program).__name__)
    return Report(plans, name, costs, notes)


@dataclass(frozen=True)
class _Graph:
    """One graph as Inductor would compile it, with Dynamo's id."""

    name: str
    phase: str
    lowered: Lowered


@dataclass(frozen=True)
class _Run:
    """What Dynamo made of one call.

    Attributes:
        graphs: in the order of compilation.
        left_out: functions that it gave up.
        breaks: every graph break, also where there was no graph yet.
    """

    graphs: list[_Graph] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


def _lowered(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backend: Callable[..., Any]
) -> _Run:
    """Every graph as Inductor would compile it. Runs them op by op."""
    run = _Run()
    found = run.graphs

    def inner_compile(
        gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        lowered = lower_with_inductor(gm, example_inputs, **options)
        phase = "backward" if options.get("is_backward") else "forward"
        found.append(_Graph(compile_id(), phase, lowered))
        return lowered.call

    def compile_or_forget(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        before = len(found)
        if (rest := rest_left_out(gm)) is not None:
            run.left_out.append(rest)
        try:
            return backend(gm, example_inputs)
        except Exception:
            # Inductor may ask Dynamo to trace again: then this graph never runs
            del found[before:]
            raise

    # as Module.compile does it
    entry = program._call_impl if is_compiled_in_place(program) else program
    torch.compiler.reset()
    watch = DynamoWatch(run.left_out.append)
    watch.start()
    try:
        with untouched(program, args, kwargs) as (given, named), replace_inner_compile(inner_compile):
            result = torch.compile(entry, backend=compile_or_forget)(*given, **named)
            # the caller's autocast has nothing to do with the backward, as in a training loop
            _differentiate(program, given, named, result)
        run.breaks.extend(breaks_without_graph())
    finally:
        torch.compiler.reset()
        listen_again()
    return run


def _differentiate(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """Runs the backward, whose graphs are compiled only then; gradients are dropped."""
    outputs = [value for value in tensors(plain(result)) if value.requires_grad]
    leaves = [value for value in tensors((args, kwargs)) if value.requires_grad]
    if isinstance(program, nn.Module):
        leaves += [parameter for parameter in program.parameters() if parameter.requires_grad]
    if outputs and leaves:
        seeds = [torch.ones_like(value) for value in outputs]
        torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)


def _device(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = tensors((args, kwargs))
    if isinstance(program, nn.Module):
        given += program.parameters()
    return next((value.device.type for value in given if value.device.type != "cpu"), "cpu")


def _cost(graphs: Sequence[_Graph]) -> Cost:
    casts = [pair for graph in graphs for pair in conversions(graph.lowered.after)]
    kernels = [size for graph in graphs for _, size in cast_kernels(graph.lowered)]
    return Cost(
        casts=len(casts),
        cast_bytes=sum(cast_bytes(before, after.dtype) for before, after in casts),
        kernels=len(kernels),
        kernel_bytes=sum(kernels),
        moved=sum(graph.lowered.bytes_moved for graph in graphs),
    )


def _mark_kernels(plan: Plan, lowered: Lowered) -> None:
    """Says of each cast whether a kernel of its own does it. Casts in bodies of higher-order ops are not found."""
    alone = {
        _planned_name(node) if plan.phase == "forward" else node.name
        for casts, _ in cast_kernels(lowered)
        for node in casts
    }
    for cast in plan.casts:
        cast.kernel = cast.name in alone


def _planned_name(node: fx.Node) -> str:
    """The name in the plan of what AOTAutograd traced the node from."""
    origin = node.meta.get("from_node")
    return origin[-1].name if origin else node.name


def _backward_plan(gm: fx.GraphModule, graph: str, forward: Sequence[Plan]) -> Plan:
    """What the backward computes in which dtype: nothing is decided there, it mirrors the forward."""
    origin = next((plan for plan in forward if plan.graph == graph), Plan(graph))
    low = next((node.low for node in origin.nodes if node.low is not None), None)
    plan = Plan(graph, origin.policy, phase="backward")
    flops: dict[Any, int] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and (given := input_plan(node, "")) is not None:
            # what AOTAutograd calls the forward's own inputs
            given.parameter = node.name.startswith("primals")
            plan.inputs.append(given)
        if node.op != "call_function":
            continue
        if (values := conversion(node)) is not None:
            plan.casts.append(_backward_cast(node, *values))
            continue
        row = _backward_node(node, low)
        measure(row, node, "", flops)
        plan.nodes.append(row)
    return plan


def _backward_cast(node: fx.Node, before: torch.Tensor, after: torch.Tensor) -> CastPlan:
    return CastPlan(
        name=node.name,
        value=node.all_input_nodes[0].name,
        from_dtype=before.dtype,
        to_dtype=after.dtype,
        bytes=cast_bytes(before, after.dtype),
        users=tuple(user.name for user in node.users),
        inserted=True,
        source=source_line(node),
    )


def _backward_node(node: fx.Node, low: torch.dtype | None) -> NodePlan:
    results = [value for value in tensors(node.meta.get("val")) if is_eligible(value)]
    dtypes = {
        source.meta["val"].dtype
        for _, value in arguments(node)
        for source in tensor_nodes(value)
        if is_eligible(source.meta.get("val"))
    }
    dtype = results[0].dtype if results else None
    origin = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    what = f"gradient of {getattr(origin[-1][1], '__name__', origin[-1][1])}" if origin else "gradient"
    read = ", ".join(sorted(map(dtype_name, dtypes))) or "nothing floating"
    return NodePlan(
        name=node.name,
        op=op_name(node.target)
        if isinstance(node.target, OpOverload)
        else getattr(node.target, "__name__", str(node.target)),
        module_path=module_path(node),
        op_class=OpClass.FOLLOW if len(dtypes) < 2 else OpClass.PROMOTE,
        reason=f"{what}: reads {read}, as the forward left it",
        source=source_line(node),
        traced=dtype,
        low=low,
        dtype=dtype,
    )
