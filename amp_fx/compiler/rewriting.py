"""A Dynamo graph becomes a rewritten graph and its plan: capture, then the passes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.fx as fx

from amp_fx._torch import compile_id, log_artifact, saved_tensors_shield
from amp_fx.compiler.level_passes import planned_levels, policy_levels
from amp_fx.compiler.settings import Options
from amp_fx.errors import CaptureError, PassError, PlanError
from amp_fx.graphs.capture import capture
from amp_fx.graphs.inputs import refuse_inputs
from amp_fx.graphs.keys import BUDGET, STEP_META
from amp_fx.graphs.regions import Region
from amp_fx.graphs.values import graph_device
from amp_fx.passes import (
    OUTLINE,
    MarkMatmuls,
    Note,
    Notes,
    PassContext,
    PassSelection,
    PlaceBySensitivity,
    Replay,
    captured_passes,
    run_passes,
)
from amp_fx.passes.forward.place_by_sensitivity import Placement
from amp_fx.passes.levels.place_levels import Budget
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.placement.level_cost import as_autocast
from amp_fx.precision.plans.matching import choose_plan
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.sensitivity import CallSensitivity, Sensitivity
from amp_fx.precision.policy.levels import levels_of
from amp_fx.runtime.weights.lift import weight_inputs
from amp_fx.runtime.widened import widenings

logger = logging.getLogger(__name__)


def rewrite(
    gm: fx.GraphModule,
    ambient: Mapping[str, Region],
    opts: Options,
    *,
    training: bool = False,
    placement: Placement | None = None,
) -> tuple[fx.GraphModule, Plan]:
    """Captures a Dynamo graph, which is not changed, and runs the passes on the capture.

    ``ambient`` is the autocast state at graph entry per device type. With sensitivity in the options, ``placement``
    says where each call is; None: the policy's budget decides.

    Raises:
        CaptureError, PassError: the graph cannot be rewritten.
        InputError: an input has a dtype that no kernel takes beside the weights.
        PlanError: none of the plans, or no sensitivity, in the options is about this graph; or a plan of int8 is given
            for training.
    """
    log_artifact("amp_fx_dynamo", lambda: gm.print_readable(print_output=False))
    with saved_tensors_shield():
        captured = capture(gm, ambient)
        refuse_inputs(captured)
        log_artifact("amp_fx_captured", lambda: captured.print_readable(print_output=False))
        device = graph_device(gm, ambient)
        selection = PassSelection(caches_weights=opts.weights != "cast" and not torch.is_grad_enabled())
        folded = weight_inputs(captured) if selection.caches_weights else frozenset[str]()
        if not training:
            # what widens weights that are stored low gets no row in a plan: it is that of the weights in fp32
            for cast in widenings(captured):
                cast.meta[STEP_META] = True
                folded |= {cast.name}
        profile = resolve(opts.profile, device)
        context = PassContext(
            opts.policy,
            opts.numerics,
            profile,
            training,
            folded=folded,
            disabled=opts.disable_passes,
            times_calls=opts.profile == "auto",
        )
        if opts.plan is not None:
            plan = replay(captured, opts, device, selection, context)
        else:
            means = ""
            # whoever places calls writes their levels into the plan as well
            if placement is None:
                selection, means = _levels_given(selection, opts, context, device, ambient[device].dtype)
            if opts.sensitivity is None:
                plan = run_passes(captured, captured_passes(selection), context)
            else:
                plan = _place_by_sensitivity(captured, opts.sensitivity, placement, selection, context)
            plan.meaning = means
    plan.training, plan.profile = training, "" if profile is None else profile.name
    log_artifact("amp_fx_plan", plan.to_json)
    logger.debug("rewrote %d nodes, %d casts", len(gm.graph.nodes), len(plan.casts))
    return captured, plan


def _levels_given(
    selection: PassSelection, opts: Options, context: PassContext, device: str, low: torch.dtype
) -> tuple[PassSelection, str]:
    """With the pass of a policy below 16 bits; and what that means here.

    Without gradients the pass chooses what runs below. In training it marks what may: the joint graph decides.
    """
    base, keeps = opts.policy.base, selection.caches_weights
    if not levels_of(base, training=context.training):
        return selection, ""
    if context.training:
        return replace(selection, mark=MarkMatmuls(planned=False)), ""
    levels, means = policy_levels(opts, context.profile, device, low, training=False, keeps_weights=keeps)
    if levels is not None and opts.sensitivity is not None:
        return selection, as_autocast("with sensitivity only a plan places matmuls in it", base).text
    return replace(selection, levels=levels), means


def add_autocast(plan: Plan, gm: fx.GraphModule, ambient: Mapping[str, Region], *, training: bool) -> None:
    """Writes into a plan what torch.autocast itself would cast, and compute in; if that fails, a line of the report."""
    try:
        _, theirs = rewrite(gm, ambient, Options(numerics="eager", profile="off"), training=training)
    except (CaptureError, PassError) as error:
        plan.unknown.append(f"what torch.autocast would cast: {error}")
        return
    plan.autocast = {"casts": len(theirs.casts), "bytes": sum(cast.bytes for cast in theirs.casts)}
    plan.autocast_dtypes = theirs.module_dtypes


def replay(
    captured: fx.GraphModule, opts: Options, device: str, selection: PassSelection, context: PassContext
) -> Plan:
    """Runs the passes with the decisions of that plan in the options that was made for this graph, or PlanError."""
    outline = outline_of(captured, context)
    chosen, found = choose_plan(opts.plan or (), outline)
    # a step and a call without gradients multiply in levels of their own
    follows = chosen.training is context.training
    below = {level.policy for row in chosen.nodes for level in row.levels_below.values()}
    if context.training and below and not any(levels_of(base, training=True) for base in below):
        raise PlanError(
            f"plan {chosen.graph} runs matmuls in {', '.join(sorted(below))}, which have no gradients, and graph "
            f"{outline.graph} is trained. Call the model under torch.inference_mode() or torch.no_grad(), or make a "
            "plan for training: amp_fx.calibrate(model, batches, loss).plan()."
        )
    rows = {
        row.name: replace(saved, levels=dict(saved.levels) if follows else {}) for saved, row in found.pairs
    }
    mark = levels = None
    if not context.training:
        keeps = {"keeps_weights": selection.caches_weights, "stored": selection.store is not None}
        levels = planned_levels(opts, device, rows, training=False, **keeps)
    elif (planned := follows and chosen.decides_levels) or levels_of(context.policy.base, training=True):
        mark = MarkMatmuls(planned)
    selection = replace(selection, place=Replay(rows, selection.store is not None), levels=levels, mark=mark)
    plan = run_passes(captured, captured_passes(selection), context)
    plan.policy, plan.unused_rules, plan.meaning = chosen.policy, chosen.unused_rules, chosen.meaning
    return plan


def _place_by_sensitivity(
    captured: fx.GraphModule,
    sensitivity: Sensitivity,
    placement: Placement | None,
    selection: PassSelection,
    context: PassContext,
) -> Plan:
    """Runs the passes with what was measured of this graph."""
    outline = outline_of(captured, context)
    try:
        calls = sensitivity.graph(outline).renamed(outline)
    except PlanError:
        if context.training:
            raise
        # calibration is about gradients: what is only evaluated need not have been seen
        logger.info("graph %s was not calibrated: placed by the policy's base list", compile_id())
        return run_passes(captured, captured_passes(selection), context)
    budget = context.policy.budget
    # beyond autocast's error, the budget is for what runs below 16 bits
    below = levels_of(context.policy.base, training=True)
    first = min(budget, 1.0) if below else budget
    rows = {call.name: call for call in calls}
    step = PlaceBySensitivity(rows, first, placement=placement)
    notes: Notes = {}
    plan = run_passes(captured, captured_passes(replace(selection, place=step)), context, notes)
    if below:
        captured.meta[BUDGET] = _left_below(notes.get(Note.SENSITIVITY, []), rows, budget)
    return plan


def _left_below(
    placed: list[tuple[float, float]], rows: Mapping[str, CallSensitivity], budget: float
) -> Budget:
    """The error that matmuls below 16 bits may add to a graph and its bodies, placed with such sensitivities."""
    spent, autocast = (sum(column) for column in zip((0.0, 0.0), *placed, strict=True))
    sensitivities = tuple(((row.name, role), row.below(role)) for row in rows.values() for role in row.roles)
    return Budget(sensitivities, max(budget**2 * autocast - spent, 0.0))


def outline_of(captured: fx.GraphModule, context: PassContext) -> Plan:
    """The graph's calls with their classes: what plans and sensitivity are matched with."""
    outline = run_passes(captured, OUTLINE, context)
    outline.graph, outline.training = compile_id(), context.training
    return outline
