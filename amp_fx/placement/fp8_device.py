"""What policy fp8 means on a device: which recipe, at which costs, or that there is no fp8."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch

from amp_fx.placement.devices import builtin
from amp_fx.placement.fp8 import Fp8Cost
from amp_fx.placement.profile import DEVICE_TYPES, FLOAT8, DeviceProfile
from amp_fx.policy.fp8 import AUTO, RECIPES, Recipe

__all__ = ["Fp8Device", "NoFp8", "fp8_device", "multiplies", "recipe_name"]

logger = logging.getLogger(__name__)

_HOPPER = (9, 0)
#: B200 and GB200, B300 and GB300
_BLACKWELL = ((10, 0), (10, 3))


@dataclass(frozen=True)
class Fp8Device:
    """A device that multiplies in fp8.

    Attributes:
        recipe: how.
        device: its type.
        cost: of matmuls and copies; None: everything that may run in fp8 does.
    """

    recipe: Recipe
    device: str
    cost: Fp8Cost | None

    @property
    def meaning(self) -> str:
        """What the plan says of the policy."""
        return self.recipe.name

    def without_gradients(self) -> Fp8Device:
        """The same, where nothing is differentiated: there scales stand for rows or for all, not for blocks."""
        return replace(self, recipe=RECIPES["rowwise"]) if self.recipe.by_row else self


@dataclass(frozen=True)
class NoFp8:
    """A device on which policy fp8 means autocast.

    Attributes:
        meaning: what the plan says of the policy: why.
    """

    meaning: str

    def without_gradients(self) -> NoFp8:
        """The same."""
        return self


def fp8_device(
    wanted: str, profile: DeviceProfile | None, device: str, low: torch.dtype
) -> Fp8Device | NoFp8:
    """What policy fp8 means on a device; the log says once if there is no fp8.

    Args:
        wanted: a recipe's name, or ``"auto"``.
        profile: rates that count; None where all that may run in fp8 is to.
        device: type of the device.
        low: the low dtype there.
    """
    hardware = profile
    if hardware is None and device in DEVICE_TYPES:
        hardware = builtin(device)
    name = device if hardware is None else f"{device} {hardware.name}"
    if hardware is None or FLOAT8 not in hardware.peak:
        return _no_fp8(f"{name} has no fp8 rate")
    recipe = RECIPES[recipe_name(wanted, device)]
    if not multiplies(recipe, device):
        return _no_fp8(f"{name} does not multiply in {recipe.name}")
    return Fp8Device(recipe, device, None if profile is None else Fp8Cost.of(profile, low))


def _no_fp8(why: str) -> NoFp8:
    _say_once(f"policy 'fp8' means 'autocast' here: {why}")
    return NoFp8(f"as autocast: {why}")


def recipe_name(wanted: str, device: str, capability: tuple[int, int] | None = None) -> str:
    """The recipe that is meant: torchao measured ``"auto"``'s rowwise scaling on Hopper, where it is most mature.

    Args:
        wanted: a recipe's name, or ``"auto"``.
        device: type of the device.
        capability: of a GPU; None: of the one in this machine, if there is one.
    """
    if wanted != AUTO:
        return wanted
    return "rowwise" if (capability or _capability(device)) == _HOPPER else "tensorwise"


def multiplies(recipe: Recipe, device: str) -> bool:
    """True where a device that has fp8 multiplies by the recipe."""
    return recipe.block is None or _scales_blocks(device)


def _scales_blocks(device: str) -> bool:
    """True where cuBLAS takes a scale for each 32 elements; ``torch._scaled_mm`` hands them on from torch 2.7 on."""
    return _capability(device) in _BLACKWELL


def _capability(device: str) -> tuple[int, int] | None:
    """Of a device by NVIDIA; None of others."""
    if device != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


@functools.cache
def _say_once(text: str) -> None:
    logger.warning("%s", text)
