"""The ``torch.compile`` backend: Dynamo graph -> capture -> passes -> Inductor.

Registered by the entry point ``torch_dynamo_backends``; decorating it as well would make torch fail with
"duplicate name".
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.fx as fx

from amp_fx import layout
from amp_fx._torch import (
    autocast_shield,
    compile_id,
    compile_with_inductor,
    graph_break,
    graph_pass,
    in_compiled_autograd,
    log_artifact,
    saved_tensors_shield,
    source_hash,
)
from amp_fx.capture import capture, graph_devices
from amp_fx.errors import CaptureError, PassError
from amp_fx.fallback import under_autocast, warn_fallback
from amp_fx.freezing import FrozenGraph
from amp_fx.inference import cached, copied_weights, in_inference_mode, weight_inputs
from amp_fx.options import Options
from amp_fx.passes import (
    JOINT_PIPELINES,
    OUTLINE,
    PIPELINE,
    POST_GRAD_PIPELINES,
    Pass,
    PassContext,
    Replay,
    cached_pipeline,
    replay_pipeline,
    run_in_order,
    run_passes,
)
from amp_fx.plan import Plan
from amp_fx.plan_files import choose_plan
from amp_fx.policy.table import supported_devices
from amp_fx.profile import resolve
from amp_fx.recording import is_recording, publish
from amp_fx.regions import Region, ambient_regions, is_autocast_call
from amp_fx.scaling import ScaledGraph, is_scaled, warn_unscaled
from amp_fx.weights import counting

__all__ = ["amp_fx"]

logger = logging.getLogger(__name__)

#: what a stack trace names when an optimizer of torch computes
_OPTIMIZERS = os.path.join(os.path.dirname(torch.optim.__file__), "")


def amp_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph in mixed precision. Use it as ``torch.compile(model, backend="amp_fx")``.

    Args:
        gm: Dynamo's graph. Not changed.
        example_inputs: tensors and symbolic integers, one per placeholder.
        mode: a ``torch.compile`` mode, handed to Inductor.
        options: see the README or :class:`amp_fx.options.Options`.

    Returns:
        A callable with the graph's signature, whose outputs have the dtypes Dynamo traced.

    Raises:
        OptionsError: bad options.
        CaptureError, PassError: the graph cannot be rewritten and ``strict`` is set.
        PlanError: none of the plans in the options is about this graph.
    """
    opts = Options.parse(mode, options)
    reason = _not_ours(gm)
    if reason:
        logger.debug("graph passed through to Inductor: %s", reason)
        return _inductor(gm, example_inputs, opts)

    ambient = ambient_regions(
        {d: opts.low_dtype(d) for d in graph_devices(gm).intersection(supported_devices())}
    )
    training = _will_differentiate(example_inputs)
    scaler = opts.scaler if training and is_scaled(ambient) else None
    try:
        rewritten, plan = rewrite(gm, ambient, opts, training=training)
    except (CaptureError, PassError) as error:
        # a plan that cannot be followed is the user's to know: what fell back when it was made, still does
        if opts.strict or (opts.plan is not None and isinstance(error, PassError)):
            raise
        return _fall_back(gm, example_inputs, ambient, opts, str(error), scaler)
    if training and scaler is None and is_scaled(ambient):
        warn_unscaled(plan)
    if not torch.is_grad_enabled() and opts.weights == "freeze":
        compiled: Callable[..., Any] = _freeze(rewritten, example_inputs, opts, may_change=not opts.strict)
    elif not torch.is_grad_enabled() and opts.weights == "cache" and _packs(gm, opts):
        compiled = _freeze(rewritten, example_inputs, opts, may_change=True)
    elif copied_weights(rewritten):
        compiled = _cache(rewritten, example_inputs, opts)
        if opts.weights == "auto":
            # under no_grad weights are cast in the graph: what gains from copies that live may lose by a cast per call
            casting, _ = rewrite(gm, ambient, replace(opts, weights="cast"), training=training)
            compiled = in_inference_mode(compiled, _inductor(casting, example_inputs, opts))
    elif not plan.changed and not any(is_autocast_call(node) for node in gm.graph.nodes):
        logger.debug("nothing to cast: the graph is compiled as Dynamo made it")
        compiled = _inductor(gm, example_inputs, opts, scaler)
    else:
        compiled = _inductor(rewritten, example_inputs, opts, scaler)
    if training:
        compiled = counting(compiled)
    plan.graph, plan.graph_break = compile_id(), graph_break(gm)
    if is_recording():
        plan.autocast = _autocast_casts(gm, ambient, training=training)
    # last: Inductor may ask Dynamo to trace again, and then this graph never runs
    publish(plan)
    return compiled


def rewrite(
    gm: fx.GraphModule, ambient: Mapping[str, Region], opts: Options, *, training: bool = False
) -> tuple[fx.GraphModule, Plan]:
    """Captures a Dynamo graph and runs the passes on the capture.

    Args:
        gm: Dynamo's graph; not changed.
        ambient: autocast state at graph entry per device type.
        opts: validated options.
        training: True if the graph will be differentiated; costs count the backward too.

    Raises:
        CaptureError, PassError: the graph cannot be rewritten.
        PlanError: none of the plans in the options is about this graph.
    """
    start = time.thread_time()
    log_artifact("amp_fx_dynamo", lambda: gm.print_readable(print_output=False))
    with saved_tensors_shield():
        captured = capture(gm, ambient)
        log_artifact("amp_fx_captured", lambda: captured.print_readable(print_output=False))
        traced = time.thread_time()
        device = "cuda" if "cuda" in ambient else next(iter(sorted(ambient)))
        pipeline, folded = PIPELINE, frozenset[str]()
        if opts.weights != "cast" and not torch.is_grad_enabled():
            pipeline, folded = cached_pipeline(PIPELINE), weight_inputs(captured)
        profile = resolve(opts.profile, device)
        context = PassContext(opts.policy, opts.numerics, profile, training, folded=folded)
        if opts.plan is None:
            plan = run_passes(captured, pipeline, context)
        else:
            plan = _replay(captured, opts.plan, pipeline, context)
    plan.training = training
    log_artifact("amp_fx_plan", plan.to_json)
    done = time.thread_time()
    logger.debug(
        "rewrote %d nodes in %.0f ms (capture %.0f ms, passes %.0f ms), %d casts",
        len(gm.graph.nodes),
        1e3 * (done - start),
        1e3 * (traced - start),
        1e3 * (done - traced),
        len(plan.casts),
    )
    return captured, plan


def _replay(
    captured: fx.GraphModule, plans: Sequence[Plan], pipeline: Sequence[Pass], context: PassContext
) -> Plan:
    """Runs the passes with the decisions of whichever plan was made for this graph."""
    outline = run_passes(captured, OUTLINE, context)
    outline.graph, outline.training = compile_id(), context.training
    chosen = choose_plan(plans, outline)
    rows = {row.name: saved for row, saved in zip(outline.nodes, chosen.nodes, strict=True)}
    plan = run_passes(captured, replay_pipeline(Replay(rows), pipeline), context)
    plan.policy = chosen.policy
    return plan


def _autocast_casts(
    gm: fx.GraphModule, ambient: Mapping[str, Region], *, training: bool
) -> dict[str, int] | None:
    """Casts and their bytes where torch.autocast itself would place them; None if that does not pass."""
    try:
        _, plan = rewrite(gm, ambient, Options(numerics="eager", profile="off"), training=training)
    except (CaptureError, PassError):
        return None
    return {"casts": len(plan.casts), "bytes": sum(cast.bytes for cast in plan.casts)}


def _will_differentiate(example_inputs: Sequence[Any]) -> bool:
    """Read off the real inputs: fake values do not say whether they require a gradient."""
    return torch.is_grad_enabled() and any(
        value.requires_grad for value in example_inputs if isinstance(value, torch.Tensor)
    )


def _inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, scaler: str | None = None
) -> Callable[..., Any]:
    scaled = None if scaler is None else ScaledGraph.of(gm, example_inputs, scaler)
    joint: list[Pass] = []
    if scaled is not None:
        gm, example_inputs = scaled.extend(gm, example_inputs)
        joint.append(scaled.rewriting)
    # on a CPU the passes are about convolutions
    devices = [device for device in sorted(graph_devices(gm)) if device != "cpu" or layout.convolves(gm)]
    joint += [step for device in devices for step in JOINT_PIPELINES.get(device, ())]
    post_grad = [step for device in devices for step in POST_GRAD_PIPELINES.get(device, ())]
    own = {**_hook("joint", joint, opts), **_hook("post_grad", post_grad, opts)}
    with autocast_shield():
        compiled = compile_with_inductor(gm, example_inputs, {**opts.inductor, **own})
    return compiled if scaled is None else scaled.bind(compiled)


def _hook(stage: Literal["joint", "post_grad"], passes: Sequence[Pass], opts: Options) -> dict[str, Any]:
    """The Inductor option that runs the passes at a stage."""
    if not passes:
        return {}
    # what they depend on is their source and their options
    modules = [sys.modules[type(step).__module__] for step in passes]
    uuid = f"{source_hash(layout, *modules)} {passes}"
    return graph_pass(stage, uuid, lambda graph: run_in_order(graph, passes, PassContext()), opts.inductor)


def _cache(gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options) -> Callable[..., Any]:
    return cached(gm, example_inputs, lambda graph, inputs: _inductor(graph, inputs, opts))


def _freeze(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, *, may_change: bool
) -> Callable[..., Any]:
    # a constant that is part of the code could not change
    inductor = {**opts.inductor, "freezing": True, "always_keep_tensor_constants": may_change}
    frozen = replace(opts, inductor=inductor)
    graph = FrozenGraph(gm, lambda g, inputs: _inductor(g, inputs, frozen), may_change=may_change)
    if not graph.has_weights:
        return _inductor(gm, example_inputs, opts)
    graph.freeze(example_inputs)
    return graph


def _packs(gm: fx.GraphModule, opts: Options) -> bool:
    """Where packing weights pays; what folds BatchNorm does not round where eager autocast rounds."""
    return graph_devices(gm) == {"cpu"} and opts.numerics != "eager"


def _fall_back(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ambient: Mapping[str, Region],
    opts: Options,
    reason: str,
    scaler: str | None,
) -> Callable[..., Any]:
    fallback = under_autocast(gm, ambient)
    warn_fallback(reason, in_fp32=fallback is gm)
    compiled = _inductor(fallback, example_inputs, opts, scaler)
    publish(Plan(compile_id(), str(opts.policy), fallback=reason, graph_break=graph_break(gm)))
    return compiled


def _not_ours(gm: fx.GraphModule) -> str:
    """Why a graph is none of mixed precision's business, or an empty string."""
    if in_compiled_autograd():
        return "compiled autograd's backward: its casts are already those of the forward"
    if _is_optimizer(gm):
        return "an optimizer's graph"
    if not any(
        isinstance(value := node.meta.get("example_value"), torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        for node in gm.graph.nodes
    ):
        return "no floating tensor below fp64"
    if not graph_devices(gm).intersection(supported_devices()):
        return f"autocast has no op list for {', '.join(sorted(graph_devices(gm)))}"
    return ""


def _is_optimizer(gm: fx.GraphModule) -> bool:
    """True for what torch.optim computes, and for the foreach ops that other optimizers are made of."""
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    if any(getattr(node.target, "__name__", "").startswith("_foreach_") for node in calls):
        return True
    return bool(calls) and all(_OPTIMIZERS in node.meta.get("stack_trace", "") for node in calls)
