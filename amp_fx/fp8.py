"""Policy fp8 on a graph that will be differentiated: which pass chooses, and what it chose."""

from __future__ import annotations

from collections.abc import Mapping

from amp_fx.graphs.regions import Region
from amp_fx.options import Options
from amp_fx.passes import PlaceFp8
from amp_fx.passes.joint.fp8_matmuls import FORWARD
from amp_fx.placement.devices import resolve
from amp_fx.placement.fp8_device import NoFp8, fp8_device
from amp_fx.plans.plan import Plan
from amp_fx.plans.summary import matmuls

__all__ = ["add_choices", "fp8_placement"]


def fp8_placement(opts: Options, ambient: Mapping[str, Region], plan: Plan) -> PlaceFp8 | None:
    """The pass that chooses what runs in fp8, for a graph that will be differentiated.

    Args:
        opts: validated options.
        ambient: autocast state at graph entry per device type.
        plan: of the forward; what the policy means on this device is written into it.

    Returns:
        None where the policy is another one, or the device has no fp8: then policy fp8 means autocast.
    """
    if opts.policy.base != "fp8" or not plan.training:
        return None
    device = "cuda" if "cuda" in ambient else next(iter(sorted(ambient)))
    here = fp8_device(opts.fp8, resolve(opts.profile, device), device, ambient[device].dtype)
    plan.fp8 = here.meaning
    return None if isinstance(here, NoFp8) else PlaceFp8(here.recipe, here.device, here.cost)


def add_choices(plan: Plan, placed: PlaceFp8) -> None:
    """Writes into the plan what the pass has chosen; gradients are told where the forward is.

    Args:
        plan: of the forward, after the graph was compiled.
        placed: the pass, after it has run.
    """
    rows = {row.name: row for row in plan.nodes}
    if not placed.choices and matmuls(plan):
        plan.fp8 = f"{plan.fp8}, compiled earlier: what runs in fp8 is not known here"
    for (name, role), choice in placed.choices.items():
        row = rows[name]
        if role == FORWARD:
            row.multiplied = choice.dtype
        row.reason = f"{row.reason}; {role}: {choice.reason}"
