"""Policy fp8 on a graph that will be differentiated: which pass chooses, and what it chose."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import size_hint
from amp_fx.errors import PlanError
from amp_fx.graphs.facts import FP8_DTYPES, LOW_DTYPES
from amp_fx.graphs.linears import LINEAR_OPS
from amp_fx.options import Options
from amp_fx.passes import PlaceFp8
from amp_fx.passes.joint.place_fp8 import Fp8Choice
from amp_fx.passes.keyed import marked
from amp_fx.placement.devices import builtin, resolve
from amp_fx.placement.fp8_choice import FP8_BUDGET
from amp_fx.placement.fp8_device import NoFp8, fp8_device, multiplies
from amp_fx.placement.profile import FLOAT8
from amp_fx.plans.plan import NodePlan, Plan
from amp_fx.policy.fp8 import AUTO, FORWARD, GRAIN, RECIPES, ROLES, WEIGHT, Recipe

__all__ = ["add_choices", "fp8_placement"]

logger = logging.getLogger(__name__)


def fp8_placement(
    opts: Options, device: str, low: torch.dtype, plan: Plan, rewritten: fx.GraphModule
) -> PlaceFp8 | None:
    """The pass that chooses what runs in fp8, for a graph that will be differentiated.

    Args:
        opts: validated options.
        device: type of the device that the graph is about.
        low: the low dtype there.
        plan: of the forward; what the policy means on this device is written into it.
        rewritten: the graph, whose calls are marked; with measured harm it has the budget of its matmuls.

    Returns:
        None where the policy is another one, or the device has no fp8: then policy fp8 means autocast.

    Raises:
        PlanError: a plan that is followed has fp8 where that cannot be.
    """
    if not plan.training:
        return None
    if plan.decides_fp8:
        placed = _planned(opts, device, plan)
        return placed and replace(placed, **_of_graph(rewritten))
    if opts.policy.base != "fp8":
        return None
    wanted = opts.fp8 if opts.harm is None else opts.harm.fp8
    here = fp8_device(wanted, resolve(opts.profile, device), device, low)
    plan.fp8 = here.meaning
    if isinstance(here, NoFp8):
        return None
    budget = rewritten.meta.get(FP8_BUDGET)
    return PlaceFp8(here.recipe, here.device, here.cost, budget, **_of_graph(rewritten))


def _of_graph(rewritten: fx.GraphModule) -> dict[str, Any]:
    """What the pass reads besides the code of the graph."""
    graphs = [module.graph for module in rewritten.modules() if isinstance(module, fx.GraphModule)]
    marks = (marked(node) for graph in graphs for node in graph.nodes)
    inputs = (node.meta["val"] for node in rewritten.graph.find_nodes(op="placeholder"))
    return {
        "marks": tuple(name for name in marks if name is not None),
        "hints": tuple(size_hint(value) for value in inputs if isinstance(value, torch.SymInt)),
    }


def _planned(opts: Options, device: str, plan: Plan) -> PlaceFp8 | None:
    """The pass that does what a plan has; None where that runs nothing in fp8."""
    planned = tuple((row.name, role) for row in plan.nodes for role in row.fp8_roles)
    if not planned:
        return None
    recipe = RECIPES.get(plan.fp8)
    if recipe is None:
        raise PlanError(
            f"the plan runs matmuls in fp8 by recipe {plan.fp8!r}; valid: {', '.join(map(repr, RECIPES))}. Make a new "
            "plan."
        )
    if opts.fp8 not in (AUTO, recipe.name):
        raise PlanError(
            f"the plan runs matmuls in fp8 by recipe {recipe.name!r}, fp8 is {opts.fp8!r}; make a plan for that, or "
            "drop the option."
        )
    if opts.numerics == "eager":
        raise PlanError(
            "the plan runs matmuls in fp8, which numerics='eager' contradicts; drop one of the two."
        )
    if device == "cuda" and FLOAT8 not in builtin(device).peak:
        raise PlanError(
            f"the plan runs matmuls in fp8, which cuda {builtin(device).name} does not have; make a plan for this "
            "device."
        )
    if not multiplies(recipe, device):
        raise PlanError(
            f"the plan runs matmuls in fp8 by recipe {recipe.name!r}, by which this {device} does not multiply; make a "
            "plan for another recipe."
        )
    if device != "cuda":
        logger.info("the plan runs %d matmuls in fp8, which a %s emulates", len(planned), device)
    _check(plan.nodes, recipe)
    return PlaceFp8(recipe, device, None, planned=planned)


def _check(rows: Iterable[NodePlan], recipe: Recipe) -> None:
    """Refuses what no batch could run in fp8. How many tokens there are is another matter: they may change.

    Raises:
        PlanError: names the call, the role and why.
    """
    for row in rows:
        unknown = next((role for role in row.roles if role not in ROLES), None)
        if unknown is not None:
            raise PlanError(
                f"{row.name} has role {unknown!r} in the plan; valid: {', '.join(map(repr, ROLES))}."
            )
        if (why := _refusal(row, recipe)) and row.fp8_roles:
            raise PlanError(
                f"the plan runs {row.name} ({row.op}) in fp8, {row.fp8_roles[0]}: {why}. Make a new plan, or drop the "
                "option."
            )


def _refusal(row: NodePlan, recipe: Recipe) -> str:
    position = LINEAR_OPS.get(row.op)
    if position is None:
        return f"only {', '.join(LINEAR_OPS)} with a matrix run in fp8"
    if row.dtype not in LOW_DTYPES:
        return "the call itself is not in the low dtype"
    weight = row.operands[position] if position < len(row.operands) else row.operands[-1]
    if len(weight) != 2 or any(size % GRAIN for size in weight):
        return f"{GRAIN} does not divide the sizes {' x '.join(map(str, weight))} of what it multiplies by"
    if WEIGHT in row.fp8_roles and not recipe.weight_gradients:
        return f"{recipe.name} leaves gradients of weights in the low dtype"
    return ""


def add_choices(plan: Plan, placed: PlaceFp8) -> None:
    """Writes into the plan what the pass has chosen; gradients are told where the forward is.

    Args:
        plan: of the forward, after the graph was compiled.
        placed: the pass, after it has run.

    Raises:
        PlanError: a plan that is followed has fp8 for a call that is no product of two matrices any more.
    """
    if not placed.sizes and placed.planned is None:
        plan.fp8 = f"{plan.fp8}, compiled earlier: what runs in fp8 is not known here"
    found: dict[str, dict[str, Fp8Choice]] = {row.name: {} for row in plan.nodes}
    for (name, role), choice in placed.choices.items():
        found[name][role] = choice
    for row in plan.nodes:
        if placed.sizes:
            if FORWARD in row.fp8_roles and FORWARD not in found[row.name]:
                raise PlanError(
                    f"the plan runs {row.name} ({row.op}) in fp8, which is no product of two matrices here. Make a new "
                    "plan, or drop the option."
                )
            row.roles.clear()
        for role, choice in found[row.name].items():
            if row.low is None:
                raise AssertionError(f"{row.name} multiplies, and has no low dtype")
            row.roles[role] = choice.dtype or row.low
            row.reason = f"{_without(row.reason, role)}; {role}: {choice.reason}"
        forward = row.roles.get(FORWARD)
        if forward in FP8_DTYPES:
            row.multiplied = forward


def _without(reason: str, role: str) -> str:
    """The reason without what a plan that was followed says of the role."""
    before, said, after = reason.partition(f"; {role}: ")
    return before + "".join(after.partition("; ")[1:]) if said else reason
