"""The values of single options: each is checked without another option."""

from __future__ import annotations

import os
from typing import Any

from amp_fx.errors import OptionsError
from amp_fx.precision.placement.devices import load
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.plan_files import load_plans

ACTIVATION_MEMORY = ("keep", "int8")


def of_kind(option: str, kind: type, valid: str, value: Any) -> Any:
    """A value of the kind that an option has; ``valid`` says which."""
    if not isinstance(value, kind):
        raise OptionsError(f"{option} must be {valid}; got {value!r}.")
    return value


def parse_profile(value: object) -> str:
    """A word or a path; the file is read again for the device of each graph."""
    spec: str = of_kind("profile", str, "'auto', 'off' or a file's path", value)
    if spec not in ("auto", "off"):
        load(spec)
    return spec


def parse_plan(value: object) -> tuple[Plan, ...] | None:
    """Plans of forwards: of a file, of objects that have some, or none."""
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)):
        return load_plans(value)
    plans = [value] if isinstance(value, Plan) else getattr(value, "plans", value)
    if not isinstance(plans, (list, tuple)) or not all(isinstance(plan, Plan) for plan in plans):
        raise OptionsError(
            "plan must be the path of a plan file, an amp_fx.Plan, a list of them, or what amp_fx.explain(...) or "
            f"amp_fx.calibrate(...).plan() returned; got {value!r}."
        )
    return tuple(plan for plan in plans if plan.phase == "forward")


def parse_memory(value: object) -> str | float:
    """A word, or a share."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 <= value <= 1:
            return float(value)
    elif value in ACTIVATION_MEMORY:
        return str(value)
    raise OptionsError(f"activation_memory must be 'keep', 'int8' or a number from 0 to 1; got {value!r}.")
