"""Policy fp8 on one graph: which pass chooses, with which recipe and costs, and what it chose."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch

from amp_fx.graphs.regions import Region
from amp_fx.options import Options
from amp_fx.passes import PlaceFp8
from amp_fx.passes.joint.fp8_matmuls import FORWARD
from amp_fx.placement.devices import builtin, resolve
from amp_fx.placement.fp8 import Fp8Cost
from amp_fx.placement.profile import DEVICE_TYPES, FLOAT8, DeviceProfile
from amp_fx.plans.plan import Plan
from amp_fx.plans.summary import matmuls
from amp_fx.policy.fp8 import AUTO, RECIPES

__all__ = ["add_choices", "fp8_placement"]

logger = logging.getLogger(__name__)

_HOPPER = (9, 0)


def fp8_placement(opts: Options, ambient: Mapping[str, Region], plan: Plan) -> PlaceFp8 | None:
    """The pass that chooses what runs in fp8, for a graph that will be differentiated.

    Args:
        opts: validated options.
        ambient: autocast state at graph entry per device type.
        plan: of the forward; what the policy means on this device is written into it.

    Returns:
        None where the policy is another one, or the device has no fp8: then policy fp8 means autocast, and the log says
        so once.
    """
    if opts.policy.base != "fp8" or not plan.training:
        return None
    device = "cuda" if "cuda" in ambient else next(iter(sorted(ambient)))
    profile = resolve(opts.profile, device)
    hardware = profile
    if opts.profile == "off" and device in DEVICE_TYPES:
        hardware = builtin(device)
    if hardware is None or FLOAT8 not in hardware.peak:
        plan.fp8 = f"as autocast: {_name(hardware, device)} has no fp8 rate"
        _say_once(f"policy 'fp8' means 'autocast' here: {_name(hardware, device)} has no fp8 rate")
        return None
    recipe = RECIPES[_recipe(device) if opts.fp8 == AUTO else opts.fp8]
    plan.fp8 = recipe.name
    cost = None if profile is None else Fp8Cost.of(profile, ambient[device].dtype)
    return PlaceFp8(recipe, device, cost)


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


def _recipe(device: str) -> str:
    """What ``"auto"`` means: torchao measured rowwise scaling on Hopper, and its kernels are most mature there."""
    is_hopper = (
        device == "cuda"
        and torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability() == _HOPPER
    )
    return "rowwise" if is_hopper else "tensorwise"


def _name(profile: DeviceProfile | None, device: str) -> str:
    return device if profile is None else f"{device} {profile.name}"


@functools.cache
def _say_once(text: str) -> None:
    logger.warning("%s", text)
