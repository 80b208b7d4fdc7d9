"""The ``torch.compile`` backend, as one page: what happens to a Dynamo graph, in order.

Registered by the entry point ``torch_dynamo_backends``; decorating it as well would make torch fail with
"duplicate name".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    UNTRACED,
    compile_id,
    graph_break,
    in_inference_mode,
    note_inference_mode,
)
from amp_fx.compiling import Call, Watch, compile_rewritten, is_raised
from amp_fx.graphs.fallback import (
    Taken,
    first_that_works,
    under_autocast,
)
from amp_fx.graphs.regions import ambient_regions, not_ours
from amp_fx.graphs.uncompiled import graph_arrived, watch
from amp_fx.graphs.values import graph_device, graph_devices
from amp_fx.levels import add_choices, level_placement
from amp_fx.lowering import lower, lower_as_it_is
from amp_fx.plans.plan import Plan
from amp_fx.plans.reading import is_heard, publish, unused_rules
from amp_fx.policy.levels import AUTO, levels_of
from amp_fx.policy.table import supported_devices
from amp_fx.rewriting import add_autocast, rewrite
from amp_fx.scaling.unscaled import expect_scaler, is_scaled, warn_ignored, warn_taken_inside
from amp_fx.settings import Options
from amp_fx.state import cache_results
from amp_fx.viz.words import summary
from amp_fx.weights.changes import counting
from amp_fx.widened import refuse_training

__all__ = ["amp_fx", "compile_graph", "listen"]

logger = logging.getLogger(__name__)


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
        options: see docs/options.md or :class:`amp_fx.settings.Options`.

    Returns:
        A callable with the graph's signature, whose outputs have the dtypes Dynamo traced.

    Raises:
        OptionsError: bad options.
        Exception: with ``strict``, whatever fails, as CaptureError or PassError where the graph cannot be rewritten;
            else only what Inductor cannot compile by itself either.
        PlanError: none of the plans in the options is about this graph.
        WeightsError: a gradient is asked for of weights that are stored low.
    """
    graph_arrived(gm)
    return compile_graph(gm, example_inputs, Options.parse(mode, options))


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, watch: Watch | None = None
) -> Callable[..., Any]:
    """The backend with validated options; ``watch`` has an eye on what the rewritten graph computes, or is None."""
    opts = _settled(opts)
    devices = graph_devices(gm).intersection(supported_devices())
    ambient = ambient_regions({d: opts.low_dtype(d) for d in devices})
    call = Call(gm, example_inputs, ambient, opts, watch)
    if call.training:
        refuse_training(gm, example_inputs)
    reason = not_ours(gm, devices)
    if reason:
        logger.debug("graph passed through to Inductor: %s", reason)
    ways = _WAYS_THROUGH if reason else _WAYS
    return first_that_works([partial(way, call) for way in ways], partial(is_raised, opts))


def _as_asked(call: Call, _reason: str) -> Taken:
    """Everything that the options say."""
    opts = call.opts
    rewritten, plan = rewrite(call.gm, call.ambient, opts, training=call.training)
    if call.training:
        _say_what_scales(call, plan)
    device = graph_device(call.gm, call.ambient)
    call.place = level_placement(opts, device, call.ambient[device].dtype, plan, rewritten)
    if call.watch is None:
        compiled = compile_rewritten(call, rewritten, plan)
    else:
        compiled = call.watch.bind(compile_rewritten(call.watched(rewritten, plan), rewritten, plan))
    if call.place is not None:
        add_choices(plan, call.place)
    if call.training:
        compiled = counting(compiled)
    plan.graph, plan.graph_break = compile_id(), graph_break(call.gm)
    if is_heard():
        add_autocast(plan, call.gm, call.ambient, training=call.training)
    # last: Inductor may ask Dynamo to trace again, and then this graph never runs
    _say(plan)
    return "as its options say", compiled


def _plainly(call: Call, reason: str) -> Taken | None:
    """Without what amp_fx adds to a rewritten graph; None where the options ask for nothing of that."""
    opts, left_out = call.opts, list[str]()
    if opts.weights != "cast":
        opts, left_out = replace(opts, weights="cast"), ["with weights cast in each call"]
    if levels_of(opts.policy.base):
        left_out.append(f"without {opts.policy.base}")
        opts = replace(opts, policy=replace(opts.policy, base="autocast"), level=AUTO)
    if opts.scaler is not None:
        opts = replace(opts, scaler=None)
        left_out.append("with gradients that the scaler scales from outside")
    if not left_out:
        return None
    _, compiled = _as_asked(Call(call.gm, call.example_inputs, call.ambient, opts), reason)
    return " and ".join(left_out), compiled


def _under_autocast(call: Call, reason: str) -> Taken:
    """With torch.autocast's semantics; where that fails on the graph, too, in fp32."""
    how, graph = _autocast_graph(call)
    compiled = lower(graph, call.example_inputs, call.opts, call.scaler)
    return _not_rewritten(call, reason, how), compiled


def _without_passes(call: Call, reason: str) -> Taken:
    """The same, and nothing of amp_fx runs in Inductor."""
    how, graph = _autocast_graph(call)
    compiled = lower_as_it_is(graph, call.example_inputs, call.opts)
    return _not_rewritten(call, reason, how), compiled


def _by_inductor_alone(call: Call, reason: str) -> Taken | None:
    """As stock torch.compile has it; None inside the program's own autocast, which is not in the graph."""
    if any(region.by_user for region in call.ambient.values()):
        return None
    compiled = lower_as_it_is(call.gm, call.example_inputs, call.opts)
    return _not_rewritten(call, reason, "in the precision that the program has"), compiled


def _passed_through(call: Call, _reason: str) -> Taken:
    """A graph that is none of mixed precision's business."""
    return "as it is", lower(call.gm, call.example_inputs, call.opts)


#: how a graph is compiled: the first that does not fail. The last is Inductor's alone
_WAYS = (_as_asked, _plainly, _under_autocast, _without_passes, _by_inductor_alone)
_WAYS_THROUGH = (_passed_through, _by_inductor_alone)


def _autocast_graph(call: Call) -> tuple[str, fx.GraphModule]:
    """The graph with torch.autocast's semantics, and how that is said."""
    graph = under_autocast(call.gm, call.ambient)
    if graph is call.gm:
        return "in fp32, since torch.autocast fails on it too", graph
    return "with torch.autocast's semantics", graph


def _not_rewritten(call: Call, reason: str, how: str) -> str:
    """Tells how a graph is compiled instead."""
    plan = Plan(compile_id(), str(call.opts.policy), graph_break=graph_break(call.gm))
    plan.fallback = f"{reason}; compiled {how}"
    _say(plan)
    return how


def _settled(opts: Options) -> Options:
    """With ``weights`` settled where it means "cast": Dynamo compiles for each mode by itself."""
    if torch.is_grad_enabled() and opts.weights in ("cache", "freeze"):
        _say_cast(opts.weights)
    is_cast = torch.is_grad_enabled() or (opts.weights == "auto" and not in_inference_mode())
    return replace(opts, weights="cast") if is_cast else opts


@cache_results()
def _say_cast(weights: str) -> None:
    """Once in a process."""
    logger.info("weights=%r means 'cast' in graphs with gradients", weights)


def _say(plan: Plan) -> None:
    """One line in the log for each graph and each rule that is about nothing, and the plan to whoever listens."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("graph %s: %s", plan.graph, summary(plan))
    # after a break there are other graphs, which may have what the rule is about
    level = logging.INFO if plan.graph_break else logging.WARNING
    for text in unused_rules([plan]):
        logger.log(level, "%s", text)
    publish(plan)


def _say_what_scales(call: Call, plan: Plan) -> None:
    """Warns where no scaler of amp_fx scales the gradients of an fp16 graph, or nobody asks the one that does."""
    if not is_scaled(call.ambient):
        if call.opts.scaler is not None:
            warn_ignored(call.opts.scaler, call.ambient)
    elif call.opts.scaler is None or call.opts.scaler == call.scaler:
        expect_scaler(plan, call.example_inputs, call.scaler)
    else:
        warn_taken_inside(call.opts.scaler)


def listen() -> None:
    """From now on Dynamo tells in which mode a program calls, and what it gives up; may be called again."""
    UNTRACED.install()
    note_inference_mode()
    watch(amp_fx)


# torch.compile loads this file when it is first given the name; `import amp_fx` does not
listen()
