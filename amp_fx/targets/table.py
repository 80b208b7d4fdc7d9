"""Targets by name: ``"cuda:h100"`` is a row of published numbers."""

from __future__ import annotations

from dataclasses import dataclass

from amp_fx.errors import TargetError, did_you_mean
from amp_fx.placement.devices import cuda_profile
from amp_fx.placement.gpus import GPUS, LIMITS, Gpu, Limits
from amp_fx.placement.profile import DeviceProfile

__all__ = ["TARGETS", "Target", "find_target"]


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        gpu: its published numbers.
        limits: what code may use on one multiprocessor.
    """

    gpu: Gpu
    limits: Limits

    @property
    def name(self) -> str:
        """As users write it: ``"cuda:h100"``."""
        return f"cuda:{self.gpu.key}"

    @property
    def architecture(self) -> str:
        """What NVIDIA's compilers call it: ``"sm_90"``."""
        return "sm_{}{}".format(*self.gpu.capability)

    @property
    def profile(self) -> DeviceProfile:
        """The rates that the cost model weighs with."""
        return cuda_profile(self.architecture, self.gpu)


#: by name. Triton compiles for capability 8.0 and later ones
TARGETS = {
    target.name: target
    for target in (Target(gpu, LIMITS[gpu.capability]) for gpu in GPUS if gpu.capability in LIMITS)
}


def find_target(name: str) -> Target:
    """The target of a name such as ``"cuda:h100"``.

    Raises:
        TargetError: there is none; names the nearest one.
    """
    found = TARGETS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise TargetError(
            f"Unknown target {name!r}; valid: {', '.join(TARGETS)}."
            + (did_you_mean(str(name).lower(), TARGETS) or did_you_mean(f"cuda:{name}".lower(), TARGETS))
        )
    return found
