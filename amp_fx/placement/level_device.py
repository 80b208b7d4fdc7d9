"""What a policy below 16 bits means on a device: which level, at which costs, or that there is none."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from amp_fx.placement.devices import builtin
from amp_fx.placement.level_cost import LevelCost
from amp_fx.placement.profile import DEVICE_TYPES, DeviceProfile
from amp_fx.policy.levels import AUTO, LEVELS, Level, levels_of
from amp_fx.state import cache_results

__all__ = ["Meaning", "level_name", "meaning", "multiplies"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meaning:
    """What a policy means on a device.

    Attributes:
        text: for the reader of a plan: the level's name, or why there is none.
        level: None: the policy means autocast.
        cost: of matmuls and copies; None: everything that may run in the level does.
    """

    text: str
    level: Level | None = None
    cost: LevelCost | None = None


def meaning(
    base: str,
    wanted: str,
    profile: DeviceProfile | None,
    device: str,
    low: torch.dtype,
    *,
    training: bool,
    keeps_weights: bool = False,
) -> Meaning:
    """What a policy below 16 bits means on a device; the log says once if it means autocast.

    Args:
        base: of the policy.
        wanted: a level's name, or ``"auto"``.
        profile: rates that count; None where all that may run in the level is to.
        device: type of the device.
        low: the low dtype there.
        training: False where nothing is differentiated.
        keeps_weights: copies of weights live across calls.
    """
    if not levels_of(base, training=training):
        return _as_autocast("it is about graphs without gradients", base)
    hardware = profile
    if hardware is None and device in DEVICE_TYPES:
        hardware = builtin(device)
    name = device if hardware is None else f"{device} {hardware.name}"
    level = LEVELS[level_name(base, wanted, device, keeps_weights=keeps_weights)]
    if hardware is None or level.rate not in hardware.peak:
        return _as_autocast(f"{name} has no {level.policy} rate", level.policy)
    if not multiplies(level, device):
        return _as_autocast(f"{name} does not multiply in {level.name}", level.policy)
    if not training and level.evaluated:
        level = LEVELS[level.evaluated]
    return Meaning(level.name, level, None if profile is None else LevelCost.of(profile, low, level))


def _as_autocast(why: str, policy: str) -> Meaning:
    _say_once(f"policy {policy!r} means 'autocast' here: {why}")
    return Meaning(f"as autocast: {why}")


def level_name(
    base: str,
    wanted: str,
    device: str,
    capability: tuple[int, int] | None = None,
    *,
    keeps_weights: bool = False,
) -> str:
    """The level that is meant.

    Args:
        base: of the policy.
        wanted: a level's name, or ``"auto"``.
        device: type of the device.
        capability: of a GPU; None: of the one in this machine, if there is one.
        keeps_weights: copies of weights live across calls.
    """
    if wanted != AUTO:
        return wanted
    found = capability or _capability(device)
    rows = [level for level in levels_of(base).values() if level.auto is not None]
    return next(
        level.name
        for level in rows
        if (not level.auto or found in level.auto)
        and level.device in (None, device)
        and (keeps_weights or not level.keeps_weights)
    )


def multiplies(level: Level, device: str) -> bool:
    """True where a device that has the rate multiplies in the level."""
    if level.device not in (None, device):
        return False
    return level.capabilities is None or _capability(device) in level.capabilities


def _capability(device: str) -> tuple[int, int] | None:
    """Of a device by NVIDIA; None of others."""
    if device != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


@cache_results()
def _say_once(text: str) -> None:
    logger.warning("%s", text)
