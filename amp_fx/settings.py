"""The options of ``torch.compile(model, backend="amp_fx", options={...})``: plain data, validated.

Values are JSON-like, because trainers deep-copy and pickle them and Dynamo compares them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from amp_fx._torch import inductor_mode_options, inductor_option_names
from amp_fx.errors import OptionsError, did_you_mean
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.plan import Plan, dtype_name
from amp_fx.plans.plan_files import load_plans
from amp_fx.plans.sensitivity import Sensitivity
from amp_fx.policy import Policy
from amp_fx.policy.levels import AUTO, levels_of
from amp_fx.policy.rules import BASES

__all__ = ["DTYPES", "LEVEL_OPTIONS", "NUMERICS", "WEIGHTS", "Options"]

#: accepted spellings of the low dtype
DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}

#: name -> what it promises
NUMERICS = {
    "compiled": "Inductor's default: a value inside a fused kernel is not rounded to the low dtype",
    "eager": "rounds exactly where eager torch.autocast rounds (Inductor's emulate_precision_casts)",
}

#: name -> where the low copies of weights live
WEIGHTS = {
    "auto": "'cache' under torch.inference_mode, 'cast' under torch.no_grad and with gradients",
    "cast": "within the call: the graph casts them",
    "cache": "across calls, on a CPU folded and packed by Inductor's freezing; with gradients as 'cast'",
    "freeze": "across calls, folded and packed by Inductor's freezing; with gradients as 'cast'",
}

#: options that are gone -> what takes their place
_REMOVED = {
    "accumulation": "autograd adds the gradients of micro-batches, on every device; drop the option. Where that is "
    "slow on a CPU, it is the allocator: docs/profiling.md has the remedy.",
}

#: policy below 16 bits, which has an option of its name -> values of that, and what a scale stands for in each
LEVEL_OPTIONS = {
    base: {AUTO: "as suits the device", **{name: level.about for name, level in levels_of(base).items()}}
    for base in BASES
    if levels_of(base)
}


@dataclass(frozen=True)
class Options:
    """Validated options; see docs/options.md for the user's view.

    Attributes:
        dtype: the low dtype, or None for "auto": bfloat16 where the device has it, else float16. A policy such as
            "mixed_float16" names its own.
        policy: op lists and user rules.
        numerics: a key of :data:`NUMERICS`.
        profile: ``"auto"`` for the built-in rates of the device, ``"off"`` to send every listed op low as
            autocast would, or a file that ``python -m amp_fx profile`` wrote. ``amp_fx.calibrate`` puts the rates
            themselves here.
        plan: plans that graphs follow, whatever policy and profile say; see :mod:`amp_fx.plans.plan_files`. Given as
            the path of a plan file or of a report, an :class:`amp_fx.Plan`, a list of them, or what has ``.plans``: a
            :class:`amp_fx.CalibratedPlan`, a :class:`amp_fx.Report`. None: amp_fx plans.
        scaler: name of the :class:`amp_fx.GradScaler` of fp16 graphs, or None. It may be given with dtype "auto",
            and then counts where that is fp16.
        weights: a key of :data:`WEIGHTS`; where low copies of weights live.
        strict: raise what fails, where the backend would take a plainer way.
        inductor: options handed to Inductor, from ``mode=`` and by their own names.
        sensitivity: what the file that the policy names holds, or None.
        level: what the option of a policy below 16 bits is, see :data:`LEVEL_OPTIONS`.
    """

    dtype: torch.dtype | None = None
    policy: Policy = Policy()
    numerics: str = "compiled"
    profile: str | DeviceProfile = "auto"
    plan: tuple[Plan, ...] | None = None
    scaler: str | None = None
    weights: str = "auto"
    strict: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)
    sensitivity: Sensitivity | None = None
    level: str = AUTO

    @classmethod
    def parse(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
        """Builds options from what ``torch.compile`` passes to a backend.

        Args:
            mode: a ``torch.compile`` mode, or None.
            options: keys are fields of this class, or of :data:`LEVEL_OPTIONS`, or Inductor options.

        Raises:
            OptionsError: unknown key, one that was removed, bad value, or a contradiction.
            PlanError: the plan or sensitivity file cannot be read, or holds no plan or sensitivity.
        """
        own = {f.name for f in fields(cls)} - {"inductor", "sensitivity", "level"} | LEVEL_OPTIONS.keys()
        given = options or {}
        values = {key: value for key, value in given.items() if key in own}
        others = {_inductor_name(key, own): value for key, value in given.items() if key not in own}
        dtype = _parse_dtype(values.get("dtype", "auto"))
        numerics = _one_of("numerics", NUMERICS, values.get("numerics", "compiled"))
        policy = Policy.parse(values.get("policy", "autocast"))
        level = _parse_level(values, policy, numerics)
        dtype = _with_policy(dtype, policy)
        return cls(
            dtype=dtype,
            policy=policy,
            numerics=numerics,
            profile=_parse_profile(values.get("profile", "auto")),
            plan=_parse_plan(values.get("plan")),
            scaler=_parse_scaler(values.get("scaler"), dtype),
            weights=_parse_weights(values.get("weights", "auto"), numerics),
            strict=_parse_strict(values.get("strict", False)),
            inductor=_with_numerics({**_mode_options(mode), **others}, numerics),
            sensitivity=_load_sensitivity(policy, dtype, numerics, level),
            level=level,
        )

    def low_dtype(self, device_type: str) -> torch.dtype:
        """The low dtype on a device type: the one asked for, or what "auto" means there."""
        if self.dtype is not None:
            return self.dtype
        if self.sensitivity is not None:
            return self.sensitivity.dtype
        if device_type == "cuda" and torch.cuda.is_available():
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if native else torch.float16
        return torch.bfloat16


def _parse_dtype(value: object) -> torch.dtype | None:
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return value
    if isinstance(value, str) and value.removeprefix("torch.") in DTYPES:
        return DTYPES[value.removeprefix("torch.")]
    raise OptionsError(
        f"Unknown dtype {value!r}; valid: 'auto', 'bfloat16', 'float16', torch.bfloat16, torch.float16."
        + did_you_mean(str(value), DTYPES)
    )


def _with_policy(dtype: torch.dtype | None, policy: Policy) -> torch.dtype | None:
    """The low dtype: of the options, or of the policy where that names one."""
    if policy.dtype is None:
        return dtype
    named = DTYPES[policy.dtype]
    if dtype not in (None, named):
        raise OptionsError(
            f"dtype={str(dtype).removeprefix('torch.')!r} contradicts policy {str(policy)!r}, which means "
            f"{policy.dtype}; drop one of the two."
        )
    return named


def _parse_profile(value: object) -> str:
    if not isinstance(value, str):
        raise OptionsError(f"profile must be 'auto', 'off' or the path of a file; got {value!r}.")
    return value


def _parse_strict(value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionsError(f"strict must be True or False; got {value!r}.")
    return value


def _parse_plan(value: object) -> tuple[Plan, ...] | None:
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


def _load_sensitivity(
    policy: Policy, dtype: torch.dtype | None, numerics: str, level: str
) -> Sensitivity | None:
    if policy.sensitivity is None:
        return None
    if numerics == "eager":
        raise OptionsError(
            f"policy sensitivity {policy.sensitivity!r} is about rounding in compiled code, numerics='eager' "
            f"rounds as eager "
            "autocast does; drop one of the two."
        )
    sensitivity = Sensitivity.load(policy.sensitivity)
    if dtype not in (None, sensitivity.dtype):
        raise OptionsError(
            f"policy sensitivity {policy.sensitivity!r} was measured for {dtype_name(sensitivity.dtype)}, dtype "
            f"is {dtype_name(dtype)}; "
            f"calibrate with dtype={dtype_name(dtype)!r}, or change one of the two."
        )
    base = policy.base
    if base in LEVEL_OPTIONS and sensitivity.level not in LEVEL_OPTIONS[base]:
        raise OptionsError(
            f"policy sensitivity {policy.sensitivity!r} has nothing of {base}; calibrate with policy={base!r}, "
            f"or take another base."
        )
    if level not in (AUTO, sensitivity.level):
        raise OptionsError(
            f"policy sensitivity {policy.sensitivity!r} was measured for {base}={sensitivity.level!r}, {base} "
            f"is {level!r}; drop the "
            "option, or calibrate for it."
        )
    return sensitivity


def _parse_level(values: Mapping[str, object], policy: Policy, numerics: str) -> str:
    """The level below 16 bits by name.

    Raises:
        OptionsError: no such level, or one of another policy; or numerics that such a policy cannot have.
    """
    asked = {base: _one_of(base, valid, values.get(base, AUTO)) for base, valid in LEVEL_OPTIONS.items()}
    for base, level in asked.items():
        if base != policy.base and level != AUTO:
            raise OptionsError(
                f"{base}={level!r} is about policy {base!r}, policy is {str(policy)!r}; add policy={base!r}, or "
                "drop it."
            )
    if policy.base in asked and numerics == "eager":
        raise OptionsError(
            f"policy {policy.base!r} contradicts numerics='eager', which rounds where eager torch.autocast rounds; "
            "drop one of the two."
        )
    return asked.get(policy.base, AUTO)


def _one_of(option: str, valid: Mapping[str, str], value: object) -> str:
    if isinstance(value, str) and value in valid:
        return value
    raise OptionsError(
        f"Unknown {option} {value!r}; valid: {', '.join(map(repr, valid))}." + did_you_mean(str(value), valid)
    )


def _parse_weights(value: object, numerics: str) -> str:
    """Where low weights live.

    Raises:
        OptionsError: no such place, or one that rounds otherwise than numerics ask.
    """
    weights = _one_of("weights", WEIGHTS, value)
    if weights == "freeze" and numerics == "eager":
        raise OptionsError(
            "weights='freeze' contradicts numerics='eager': what is folded and packed does not round where eager "
            "torch.autocast rounds; use weights='cache', or drop one of the two."
        )
    return weights


def _parse_scaler(value: object, dtype: torch.dtype | None) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise OptionsError(
            f"scaler must be the name of an amp_fx.GradScaler, such as 'default', or None; got {value!r}."
        )
    if value is not None and dtype is torch.bfloat16:
        raise OptionsError(
            f"scaler={value!r} contradicts dtype='bfloat16', which has the range of float32 and needs no loss "
            "scaling; drop one of the two."
        )
    return value


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    try:
        return dict(inductor_mode_options(mode))
    except RuntimeError as error:
        raise OptionsError(f"Unknown mode {mode!r}: {error}") from error


def _with_numerics(inductor: dict[str, Any], numerics: str) -> dict[str, Any]:
    """Inductor's options, and what makes it round as the numerics promise."""
    if numerics != "eager":
        return inductor
    if inductor.get("emulate_precision_casts", True) is not True:
        raise OptionsError(
            "numerics='eager' needs Inductor's emulate_precision_casts, which is switched off; drop one of the two."
        )
    return {**inductor, "emulate_precision_casts": True}


def _inductor_name(key: str, own: set[str]) -> str:
    name = str(key).replace("-", "_")
    if name in _REMOVED:
        raise OptionsError(f"Option {key!r} was removed: {_REMOVED[name]}")
    valid = inductor_option_names()
    if name not in valid:
        # our own names first: a typo is likelier in them than in the 600 of Inductor
        hint = did_you_mean(name, own) or did_you_mean(name, valid)
        raise OptionsError(
            f"Unknown option {key!r} for backend 'amp_fx'; valid: {', '.join(sorted(own))}, "
            f"or any option of torch._inductor.config.{hint}"
        )
    return name
