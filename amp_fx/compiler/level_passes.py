"""Passes for levels below 16 bits: they run the levels of a plan, or choose levels where gradients are."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.fx as fx

from amp_fx._torch import size_hint
from amp_fx.compiler.settings import Options
from amp_fx.errors import PlanError
from amp_fx.graphs.keys import BUDGET
from amp_fx.passes import Note, Notes, PlaceLevels
from amp_fx.passes.base import marked
from amp_fx.precision.placement.devices import builtin, resolve
from amp_fx.precision.placement.level_cost import meaning, multiplies
from amp_fx.precision.placement.profile import DEVICE_TYPES, DeviceProfile
from amp_fx.precision.plans.label import Reason
from amp_fx.precision.plans.plan import NodePlan, Plan, with_choice
from amp_fx.precision.plans.sensitivity import ADDED, INPUT
from amp_fx.precision.policy.forms import MOST_EXPONENT
from amp_fx.precision.policy.levels import AUTO, FORWARD, LEVELS, Level, level_named, levels_of
from amp_fx.viz.words import sentence

logger = logging.getLogger(__name__)


def policy_levels(
    opts: Options,
    profile: DeviceProfile | None,
    device: str,
    low: torch.dtype,
    *,
    training: bool,
    keeps_weights: bool = False,
) -> tuple[PlaceLevels | None, str]:
    """The pass that chooses what runs below 16 bits, None where the policy means autocast; and what the policy means.

    The pass runs on the joint graph in training; ``keeps_weights``: copies of weights live across calls.
    """
    if PlaceLevels.name in opts.disable_passes:
        return None, f"as autocast: {PlaceLevels.name} is disabled"
    choice = opts.level if opts.sensitivity is None else opts.sensitivity.level
    means = meaning(opts.policy.base, choice, profile, device, low, training=training)
    if means.level is None:
        return None, means.text
    placed = PlaceLevels(
        means.level, device, means.cost, choice=choice, joint=training, keeps_weights=keeps_weights
    )
    return placed, means.text


def level_placement(
    opts: Options, device: str, low: torch.dtype, plan: Plan, rewritten: fx.GraphModule
) -> PlaceLevels | None:
    """The pass that decides what runs below 16 bits in a graph that will be differentiated; None where nothing may.

    What the policy means on the device is written into the plan. The calls of the graph are marked; with measured
    sensitivity it has the budget of its matmuls.

    Raises:
        PlanError: a plan that is followed has a level where that cannot be.
    """
    if not plan.training:
        return None
    if plan.decides_levels:
        placed = planned_levels(opts, device, {row.name: row for row in plan.nodes}, training=True)
        plan.meaning = ", ".join(dict.fromkeys(level for *_, level in placed.planned)) if placed else ""
    elif levels_of(opts.policy.base):
        profile = resolve(opts.profile, device)
        placed, plan.meaning = policy_levels(opts, profile, device, low, training=True)
    else:
        return None
    if placed is None:
        return None
    # what the pass reads besides the code of the graph
    graphs = [module.graph for module in rewritten.modules() if isinstance(module, fx.GraphModule)]
    marks = (marked(node) for graph in graphs for node in graph.nodes)
    inputs = (node.meta["val"] for node in rewritten.graph.find_nodes(op="placeholder"))
    return replace(
        placed,
        budget=None if placed.level is None else rewritten.meta.get(BUDGET),
        marks=tuple(name for name in marks if name is not None),
        hints=tuple(size_hint(value) for value in inputs if isinstance(value, torch.SymInt)),
    )


def planned_levels(
    opts: Options,
    device: str,
    rows: Mapping[str, NodePlan],
    *,
    training: bool,
    keeps_weights: bool = False,
    stored: bool = False,
) -> PlaceLevels | None:
    """The pass that does what a plan has of each call; None where that runs nothing below 16 bits.

    Raises:
        PlanError: a level that the device or the options do not allow.
    """
    planned = tuple(
        (name, role, level.name) for name, row in rows.items() for role, level in row.levels_below.items()
    )
    for name in dict.fromkeys(name for *_, name in planned):
        _check(LEVELS[name], opts, device, len(planned))
    if not planned:
        return None
    scales = tuple((name, _scale_in(row, INPUT)) for name, row in rows.items() if row.scales)
    results = tuple((name, _scale_in(row, ADDED)) for name, row in rows.items() if ADDED in row.scales)
    equalisations = tuple((name, _exponents_in(row)) for name, row in rows.items() if row.equalisation)
    return PlaceLevels(
        None,
        device,
        planned=planned,
        scales=() if training else scales,
        results=() if training else results,
        equalisations=() if training else equalisations,
        choice=opts.level,
        joint=training,
        keeps_weights=keeps_weights,
        stored=stored,
    )


def _scale_in(row: NodePlan, of: str) -> tuple[float, int]:
    """The measured scale and zero point of what a call reads, or of its result; PlanError where there is none."""
    scale, zero_point = found = row.scales.get(of, (math.nan, 0))
    if not 0 < scale < math.inf or not 0 <= zero_point <= 255:
        raise PlanError(
            f"the plan has scales {row.scales} for {row.name} ({row.op}); valid is {{{of!r}: (a positive number, "
            "a zero point from 0 to 255)}. Make a new plan with amp_fx.calibrate."
        )
    return found


def _exponents_in(row: NodePlan) -> tuple[int, ...]:
    """The exponents by which a call is equalised; PlanError for one whose power is no normal number in fp16."""
    if any(abs(each) > MOST_EXPONENT for each in row.equalisation):
        raise PlanError(
            f"the plan equalises {row.name} ({row.op}) by exponents from {min(row.equalisation)} to "
            f"{max(row.equalisation)}; valid are those from {-MOST_EXPONENT} to {MOST_EXPONENT}. Make a new plan with "
            "amp_fx.calibrate."
        )
    return row.equalisation


def _check(level: Level, opts: Options, device: str, matmuls: int) -> None:
    """Raises :class:`PlanError` for a level of a plan that the device or the options do not allow."""
    what = f"the plan runs matmuls in {level.policy} by recipe {level.name!r}"
    if opts.level != AUTO and level_named(opts.level) is not level:
        raise PlanError(
            f"{what}, {opts.policy.base} is {opts.level!r}; make a plan for that, or drop the option."
        )
    if opts.numerics == "eager":
        raise PlanError(f"{what}, which numerics='eager' contradicts; drop one of the two.")
    has_rate = device in DEVICE_TYPES and level.rate in builtin(device).peak
    if device == "cuda" and not has_rate:
        raise PlanError(f"{what}, which cuda {builtin(device).name} does not have; make a plan for it.")
    if not multiplies(level, device, opts.level):
        raise PlanError(f"{what}, which this {device} does not run; make a plan for this device.")
    if not has_rate:
        logger.info("the plan runs %d matmuls in %s, which a %s emulates", matmuls, level.policy, device)


def add_choices(plan: Plan, placed: PlaceLevels, notes: Notes) -> None:
    """Writes into the plan of a forward what the pass has chosen, as it noted while the graph was compiled.

    Raises:
        PlanError: a plan that is followed has a level for a call that is no product of two matrices any more.
    """
    if Note.CHOICES not in notes:
        # a cache had the code; what a plan has is known anyway
        if placed.level is not None:
            plan.meaning += f", compiled earlier: what runs in {placed.level.policy} is not known here"
        return
    chosen: dict[str, dict[str, tuple[Level | None, Reason]]] = {}
    for choices in notes[Note.CHOICES]:
        for (name, role), choice in choices.items():
            chosen.setdefault(name, {})[role] = choice
    for at, row in enumerate(plan.nodes):
        found = chosen.get(row.name, {})
        if FORWARD in row.levels_below and FORWARD not in found:
            raise PlanError(
                f"the plan runs {row.name} ({row.op}) in {row.levels[FORWARD]}, which is no product of two matrices "
                "here. Make a new plan, or drop the option."
            )
        row = replace(row, levels={})
        for role, (level, why) in found.items():
            levels, reasons = with_choice(row, role, level, why)
            row = replace(row, levels=levels, reasons=reasons)
            if "planned" in why.values:
                logger.warning("%s of %s stays low: %s", role, row.name, sentence(why))
        plan.nodes[at] = row
