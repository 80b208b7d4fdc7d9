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
    compile_id,
    for_the_caller,
    graph_break,
    in_disabled_autocast,
    in_inference_mode,
    install_all,
    note_inference_mode,
    noting_faults,
    refusing_second_derivatives,
)
from amp_fx.compiler.compiling import Invocation, Watch, compile_rewritten, is_raised, lower, lower_as_it_is
from amp_fx.compiler.keeping import saved_for_backward
from amp_fx.compiler.level_passes import add_choices, level_placement
from amp_fx.compiler.notices import (
    expect_graph,
    graph_arrived,
    say_disabled,
    say_eager,
    say_none_below,
    say_rounded,
    say_wide,
    warn_unscaled,
)
from amp_fx.compiler.predicting import add_times
from amp_fx.compiler.rewriting import add_autocast, rewrite
from amp_fx.compiler.settings import Options
from amp_fx.errors import InputError, OptionsError, PlanError, SecondDerivativeError
from amp_fx.graphs.fallback import reason_of, under_autocast, warn_fallback
from amp_fx.graphs.inputs import weights_rounded
from amp_fx.graphs.regions import ambient_regions, is_autocast_call, not_ours
from amp_fx.graphs.values import graph_device, listed_devices
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.reading import is_heard, publish, unused_rules
from amp_fx.precision.policy.levels import AUTO, levels_of
from amp_fx.runtime.weights.changes import counting
from amp_fx.runtime.weights.mode import casts_in_each_call
from amp_fx.runtime.widened import refuse_training
from amp_fx.viz.words import summary, why_none_below, without_budget

logger = logging.getLogger(__name__)

#: compiles a graph in one way, given the reasons why other ways failed; returns words for the way, and the function
Attempt = Callable[[Invocation, str], tuple[str, Callable[..., Any]]]


def amp_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph in mixed precision. Use it as ``torch.compile(model, backend="amp_fx")``.

    ``mode`` goes to Inductor; docs/options.md has the options. The result has the graph's signature, and returns the
    dtypes that Dynamo traced.

    Raises:
        InputError: an input has a dtype that no kernel takes beside the weights.
        OptionsError: bad options.
        Exception: with ``strict``, whatever fails, as CaptureError or PassError where the graph cannot be rewritten;
            else only what Inductor cannot compile by itself either.
        PlanError: none of the plans in the options is about this graph, or one of int8 is given for training.
        WeightsError: a gradient is asked for of weights that are stored low.
    """
    graph_arrived()
    try:
        return compile_graph(gm, example_inputs, Options.parse(mode, options))
    except (InputError, OptionsError, PlanError) as error:
        raise for_the_caller(error) from error.__cause__


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, watch: Watch | None = None
) -> Callable[..., Any]:
    """The backend with validated options; ``watch`` observes what the rewritten graph computes, or is None."""
    # Dynamo compiles for each mode by itself
    if torch.is_grad_enabled() and opts.weights in ("cache", "freeze"):
        logger.info("weights=%r means 'cast' in graphs with gradients", opts.weights)
    why_cast = casts_in_each_call(
        opts.weights, with_gradients=torch.is_grad_enabled(), in_inference_mode=in_inference_mode()
    )
    if why_cast:
        opts = replace(opts, weights="cast")
    ambient = ambient_regions({device: opts.low_dtype(device) for device in listed_devices(gm)})
    invocation = Invocation(gm, example_inputs, ambient, opts, watch, why_cast)
    if invocation.training:
        refuse_training(gm, example_inputs)
    if reason := not_ours(gm):
        logger.debug("graph passed through to Inductor: %s", reason)
        alone = "as it is, by Inductor alone"
        return _first_that_works(
            invocation,
            [
                lambda invocation, _: ("as it is", lower(gm, example_inputs, invocation.opts)),
                lambda invocation, _: (alone, lower_as_it_is(gm, example_inputs, invocation.opts)),
            ],
        )
    return _first_that_works(invocation, [_as_asked, *_plainer(invocation), _under_autocast])


def _first_that_works(invocation: Invocation, attempts: Sequence[Attempt]) -> Callable[..., Any]:
    """Compiles a graph in the first way that does not fail, and warns once if that is not the first."""
    reasons: dict[str, None] = {}
    refused = partial(SecondDerivativeError, compile_id())
    for attempt in attempts:
        reason = "; ".join(reasons)
        try:
            with refusing_second_derivatives(refused):
                how, compiled = attempt(invocation, reason)
        except Exception as error:
            if attempt is attempts[-1] or is_raised(invocation.opts, error):
                raise
            logger.info("a way to compile a graph fails", exc_info=True)
            reasons[reason_of(error)] = None
        else:
            if reasons:
                warn_fallback(f"compiles a graph {how}", reason)
            return compiled
    raise AssertionError("there is a last attempt")


def _as_asked(invocation: Invocation, _reason: str) -> tuple[str, Callable[..., Any]]:
    """Everything that the options say."""
    opts = invocation.opts
    rewritten, plan = rewrite(invocation.gm, invocation.ambient, opts, training=invocation.training)
    if (
        invocation.training
        and invocation.scaler is None
        and any(row.dtype is torch.float16 for row in plan.nodes)
    ):
        _say_unscaled(invocation)
    device = graph_device(invocation.gm, invocation.ambient)
    place = level_placement(opts, device, invocation.ambient[device].dtype, plan, rewritten)
    with noting_faults(plan.faults):
        compiled = compile_rewritten(invocation, rewritten, plan, place)
    if place is not None:
        add_choices(plan, place, invocation.notes)
    plan.saved = saved_for_backward(invocation.notes)
    if invocation.training:
        compiled = counting(compiled)
    plan.graph, plan.graph_break = compile_id(), graph_break(invocation.gm)
    # while Dynamo traces a region, it is in there itself
    is_off = in_disabled_autocast() and not any(map(is_autocast_call, invocation.gm.graph.nodes))
    if is_off and any(row.dtype is row.low is not None for row in plan.nodes):
        say_disabled(plan.graph)
    # the user's own autocast is around eager code, too
    is_alone = not (is_off or any(region.by_user for region in invocation.ambient.values()))
    if is_alone and not opts.is_slower_low(device) and any(i.dtype is torch.float32 for i in plan.inputs):
        say_eager(plan.graph, plan.graph_break, device, invocation.ambient[device].dtype)
    low = invocation.ambient[device].dtype
    if is_alone and (rounded := weights_rounded(invocation.example_inputs, low)):
        say_rounded(plan.graph, rounded, low, is_again=any(row.dtype is low for row in plan.nodes))
    listed = [row for row in plan.matmuls if row.low is torch.float16]
    if (
        opts.dtype is torch.float16
        and listed
        and all(row.is_because(ReasonKind.CASTS_COST_MORE) for row in listed)
    ):
        say_wide(plan.profile)
    if is_heard():
        add_autocast(plan, invocation.gm, invocation.ambient, training=invocation.training)
        add_times(plan, invocation.gm, invocation.ambient, opts, training=invocation.training)
    # last: Inductor may ask Dynamo to trace again, and then this graph never runs
    _say(plan)
    return "as its options say", compiled


def _plainer(invocation: Invocation) -> list[Attempt]:
    """Without what amp_fx adds to a rewritten graph; nothing where the options ask for none of that."""
    opts, policy = invocation.opts, invocation.opts.policy
    if levels_of(policy.base):
        policy = replace(policy, base="autocast")
    inductor = opts.inductor if invocation.training else {"cpp_wrapper": False, **opts.inductor}
    plain = replace(
        opts,
        weights="cast",
        policy=policy,
        level=AUTO,
        scaler=None,
        activation_memory="keep",
        inductor=inductor,
    )
    if plain == opts:
        return []
    how = "plainly, with weights cast in each call, in 16 bits, and scaled from outside"
    plain_call = Invocation(invocation.gm, invocation.example_inputs, invocation.ambient, plain)
    return [lambda _, reason: (how, _as_asked(plain_call, reason)[1])]


def _under_autocast(invocation: Invocation, reason: str) -> tuple[str, Callable[..., Any]]:
    """With torch.autocast's semantics, by Inductor alone; where autocast itself fails on the graph, in fp32."""
    graph = under_autocast(invocation.gm, invocation.ambient)
    how = "with torch.autocast's semantics"
    if graph is invocation.gm:
        how = "in fp32, since torch.autocast fails on it too"
    plan = Plan(compile_id(), str(invocation.opts.policy), graph_break=graph_break(invocation.gm))
    with noting_faults(plan.faults):
        compiled = lower_as_it_is(graph, invocation.example_inputs, invocation.opts)
    plan.fallback = f"{reason}; compiled {how}"
    _say(plan)
    return how, compiled


def _say(plan: Plan) -> None:
    """One line in the log for each graph and each rule that is about nothing, and the plan to whoever listens."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("graph %s: %s", plan.graph, summary(plan))
    # after a break there are other graphs, which may have what the rule is about, or run below 16 bits
    level = logging.INFO if plan.graph_break else logging.WARNING
    for text in unused_rules([plan]):
        logger.log(level, "%s", text)
    if not plan.graph_break and (why := why_none_below(plan)):
        say_none_below(plan.graph, plan.meaning, why, without_budget(plan))
    publish(plan)


def _say_unscaled(invocation: Invocation) -> None:
    """An fp16 graph has no scaler: a warning, or a line in the log where the program's own autocast is the cause."""
    scaler = invocation.opts.scaler
    if scaler is None and not invocation.is_scaled_by_user:
        warn_unscaled("the options name no scaler")
    elif scaler is not None and invocation.is_scaled_by_user:
        logger.info("scaler=%r is ignored under the program's own autocast in float16", scaler)
    elif scaler is not None:
        warn_unscaled(
            f"scaler={scaler!r} does not reach gradients that a compiled function takes inside itself: compile the "
            "model or the loss, and call backward() outside"
        )


def listen() -> None:
    """Hooks amp_fx into torch, and says so if no graph arrives; may be called again."""
    install_all()
    note_inference_mode()
    expect_graph()


# torch.compile loads this file when it is first given the name; `import amp_fx` does not
listen()
