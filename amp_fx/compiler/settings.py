"""The options of ``torch.compile(model, backend="amp_fx", options={...})``: plain data, validated.

Values are JSON-like, because trainers deep-copy and pickle them and Dynamo compares them. As typed keywords, checked
where they are written, they are those of :func:`amp_fx.options` and :func:`amp_fx.compile`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import torch

from amp_fx._torch import called_in, inductor_mode_options, inductor_option_names
from amp_fx.compiler.option_values import of_kind, parse_memory, parse_plan, parse_profile
from amp_fx.errors import OptionsError, did_you_mean, one_of
from amp_fx.graphs.values import program_device
from amp_fx.passes import check_disabled, parse_disabled
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.plan import Plan, dtype_name
from amp_fx.precision.plans.sensitivity import Sensitivity
from amp_fx.precision.policy import Policy
from amp_fx.precision.policy.levels import AUTO, choices_of, level_named, levels_of
from amp_fx.precision.policy.rules import BASES
from amp_fx.precision.policy.table import DEVICES

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: accepted spellings of the low dtype
DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
}

NUMERICS = ("compiled", "eager")
WEIGHTS = ("auto", "cast", "cache", "freeze")

#: policy below 16 bits, which has an option of its name -> values of that, and what a scale stands for in each
LEVEL_OPTIONS = {base: {AUTO: "as suits the device", **choices_of(base)} for base in BASES if levels_of(base)}


class OptionNames(TypedDict, total=False):
    """The options of amp_fx; docs/options.md says more about each.

    Attributes:
        dtype: the low dtype; "auto" is bf16 where the device has it, else fp16.
        policy: ``"autocast"``, ``"fast"``, ``"fp8"``, ``"int8"``, a name of another system (``"O1"``), or
            ``{"base": ..., "rules": [...]}``.
        fp8: how policy "fp8" scales.
        int8: how policy "int8" multiplies.
        numerics: ``"eager"`` rounds exactly where eager autocast rounds.
        profile: rates of the device: ``"auto"``, ``"off"``, or a file that ``amp-fx profile`` wrote.
        plan: plans that graphs follow: a file, a plan, plans, or what has ``.plans``.
        scaler: name of the :class:`amp_fx.GradScaler` of fp16 graphs.
        weights: where low copies of weights live.
        activation_memory: what a training step keeps for its backward: ``"keep"`` as it is, ``"int8"`` in 8 bits, or
            a share of what ``"keep"`` keeps, from 0 to 1.
        strict: raise what fails, where the backend would take a plainer way.
        disable_passes: names of passes that do not run, to find the one that makes a number wrong.
        inductor: options of ``torch._inductor.config`` by their names.
    """

    dtype: str | torch.dtype
    policy: str | Mapping[str, Any] | Policy
    fp8: Literal["auto", "rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8"]
    int8: Literal["auto", "int8", "int8_packed", "int8_unpacked", "int8_signed"]
    numerics: Literal["compiled", "eager"]
    profile: str
    plan: str | os.PathLike[str] | Plan | Sequence[Plan] | Any
    scaler: str | None
    weights: Literal["auto", "cast", "cache", "freeze"]
    activation_memory: Literal["keep", "int8"] | float
    strict: bool
    disable_passes: Sequence[str]
    inductor: Mapping[str, Any]


_Model = TypeVar("_Model", bound=Callable[..., Any])

_OWN = OptionNames.__annotations__.keys() - {"inductor"}


@dataclass(frozen=True)
class Options:
    """Validated options: those of :class:`OptionNames`, parsed, and what follows from them."""

    dtype: torch.dtype | None = None  # of the options or the policy; None: "auto"
    policy: Policy = Policy()
    numerics: str = "compiled"
    profile: str | DeviceProfile = "auto"  # or, as amp_fx.calibrate has it, the rates themselves
    plan: tuple[Plan, ...] | None = None
    scaler: str | None = None  # with dtype "auto", it counts where that is fp16
    weights: str = "auto"
    activation_memory: str | float = "keep"
    strict: bool = False
    disable_passes: frozenset[str] = frozenset()
    inductor: Mapping[str, Any] = field(default_factory=dict)  # from mode= and by their own names
    sensitivity: Sensitivity | None = None  # what the file that the policy names holds
    level: str = AUTO  # the option of a policy below 16 bits, see LEVEL_OPTIONS

    @classmethod
    def parse(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
        """Builds options from what ``torch.compile`` passes to a backend: those of Inductor have their own names.

        Raises:
            OptionsError: unknown key, bad value, or a contradiction.
            ProfileError: the file of a profile cannot be read, or is none.
            PlanError: the plan or sensitivity file cannot be read, or holds no plan or sensitivity.
        """
        given = options or {}
        values = {key: value for key, value in given.items() if key in _OWN}
        inductor = {_inductor_name(key): value for key, value in given.items() if key not in _OWN}
        policy = Policy.parse(values.get("policy", "autocast"))
        dtype, level = _parse_dtype(values.get("dtype", "auto"), policy), _parse_level(values, policy)
        try:
            of_mode = {} if mode is None else inductor_mode_options(mode)
        except RuntimeError as error:
            raise OptionsError(f"Unknown mode {mode!r}: {error}") from error
        parsed = cls(
            dtype=dtype,
            policy=policy,
            scaler=_parse_scaler(values.get("scaler"), dtype),
            inductor={**of_mode, **inductor},
            sensitivity=_load_sensitivity(policy, dtype, level),
            level=level,
            **{name: parse(values[name]) for name, parse in _PARSERS.items() if name in values},
        )
        check_disabled(parsed.disable_passes, policy, is_planned=parsed.plan is not None)
        return _as_eager(parsed) if parsed.numerics == "eager" else parsed

    def low_dtype(self, device_type: str) -> torch.dtype:
        """The low dtype on a device type: the one asked for, or what "auto" means there."""
        if known := self.dtype or (self.sensitivity and self.sensitivity.dtype):
            return known
        has_gpu = device_type == "cuda" and torch.cuda.is_available()
        is_native = not has_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if is_native else torch.float16

    def is_slower_low(self, device_type: str) -> bool:
        """True where matmuls take longer in the low dtype than in fp32, by the profile, and graphs stay in fp32."""
        profile = resolve(self.profile, device_type) if device_type in DEVICES else None
        return profile is not None and profile.is_slower_in(self.low_dtype(device_type))


def options(**given: Unpack[OptionNames]) -> dict[str, Any]:
    """The ``options=`` of ``torch.compile(model, backend="amp_fx")``, checked.

        model = torch.compile(model, backend="amp_fx", options=amp_fx.options(weights="freeze"))

    Args:
        given: see :class:`amp_fx.compiler.settings.OptionNames`; what is not given has its default.

    Raises:
        OptionsError: an unknown name, a bad value or a contradiction.
        ProfileError: the file of a profile cannot be read, or is none.
        PlanError: the file of a plan cannot be read.
    """
    inductor = of_kind("inductor", Mapping, "a mapping of options of Inductor", given.pop("inductor", {}))
    if ours := OptionNames.__annotations__.keys() & inductor.keys():
        raise OptionsError(
            f"{min(ours)!r} is an option of amp_fx; take it out of inductor={dict(inductor)!r}."
        )
    found = {**given, **inductor}
    Options.parse(None, found)
    return found


def compile(
    model: _Model,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    outside: Literal["autocast"] | None = None,
    **given: Unpack[OptionNames],
) -> _Model:
    """``torch.compile(model, backend="amp_fx")`` with options as keywords; errors come now, not at the first call.

        model = amp_fx.compile(model, policy="int8", weights="freeze")

    Args:
        model: a module or a function.
        mode: of Inductor, as in ``torch.compile``.
        dynamic: as in ``torch.compile``.
        fullgraph: as in ``torch.compile``.
        outside: ``"autocast"`` calls it inside ``torch.autocast``, in the low dtype, where graphs gain by that: code
            that Dynamo leaves to eager is lowered, too, and results have autocast's dtypes.
        given: see :class:`amp_fx.compiler.settings.OptionNames`.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        OptionsError, ProfileError, PlanError: as :func:`options`, an unknown mode, or a bad value of ``outside``.
    """
    # an option by its name wins over the mode, as in the backend
    checked = {**Options.parse(mode).inductor, **options(**given)}
    scaler = given.get("scaler")
    if outside is not None and one_of("outside", ("autocast",), outside) and scaler is not None:
        raise OptionsError(
            f"outside={outside!r} contradicts scaler={scaler!r}, which scales no gradients outside of graphs; "
            "drop one of the two: torch.amp.GradScaler scales the loss."
        )
    compiled: Any = torch.compile(
        model, backend="amp_fx", options=checked, dynamic=dynamic, fullgraph=fullgraph
    )
    if outside is None:
        return compiled
    return called_in(compiled, partial(_autocast, Options.parse(None, checked)))


def _autocast(opts: Options, model: Any, args: Any, kwargs: Any) -> AbstractContextManager[object]:
    """The context in which a compiled model is called."""
    device = program_device(model, (args, kwargs))
    is_lowered = device in DEVICES and not opts.is_slower_low(device)
    return torch.autocast(device, opts.low_dtype(device)) if is_lowered else nullcontext()


def _parse_dtype(value: object, policy: Policy) -> torch.dtype | None:
    """The low dtype: of the options, or of the policy where that names one."""
    spelling = str(value).removeprefix("torch.")
    if not isinstance(value, (str, torch.dtype)) or spelling not in DTYPES:
        # another dtype of torch's is no misspelling
        is_other = isinstance(getattr(torch, spelling, None), torch.dtype)
        raise OptionsError(
            f"Unknown low dtype {value!r}; valid: 'auto', 'bfloat16', 'float16', torch.bfloat16, torch.float16."
            + ("" if is_other else did_you_mean(str(value), DTYPES))
        )
    dtype, named = DTYPES[spelling], DTYPES[policy.dtype or "auto"]
    if dtype is not None and named is not None and dtype is not named:
        raise OptionsError(
            f"dtype={dtype_name(dtype)!r} contradicts policy {str(policy)!r}, which means {policy.dtype}; drop one of "
            "the two."
        )
    return named or dtype


#: option that is parsed without another -> its parser; the field of :class:`Options` has the default
_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "numerics": partial(one_of, "numerics", NUMERICS), "weights": partial(one_of, "weights", WEIGHTS),
    "profile": parse_profile, "plan": parse_plan, "disable_passes": parse_disabled,
    "activation_memory": parse_memory, "strict": partial(of_kind, "strict", bool, "True or False"),
}  # fmt: skip


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


def _parse_level(values: Mapping[str, object], policy: Policy) -> str:
    """The level below 16 bits by name; an error if there is none, or for one of another policy."""
    asked = {base: one_of(base, valid, values.get(base, AUTO)) for base, valid in LEVEL_OPTIONS.items()}
    for base, level in asked.items():
        if base != policy.base and level != AUTO:
            raise OptionsError(
                f"{base}={level!r} is about policy {base!r}, policy is {str(policy)!r}; add policy={base!r}, or "
                "drop it."
            )
    return asked.get(policy.base, AUTO)


def _load_sensitivity(policy: Policy, dtype: torch.dtype | None, level: str) -> Sensitivity | None:
    if policy.sensitivity is None:
        return None
    sensitivity, base = Sensitivity.load(policy.sensitivity), policy.base
    wrong = ""
    if dtype not in (None, sensitivity.dtype):
        wrong = (
            f"was measured for {dtype_name(sensitivity.dtype)}, dtype is {dtype_name(dtype)}; calibrate with "
            f"dtype={dtype_name(dtype)!r}, or change one of the two."
        )
    elif base in LEVEL_OPTIONS and sensitivity.level not in levels_of(base):
        wrong = f"has nothing of {base}; calibrate with policy={base!r}, or take another base."
    elif level != AUTO and level_named(level) is not level_named(sensitivity.level):
        wrong = f"was measured for {base}={sensitivity.level!r}, {base} is {level!r}; calibrate for it, or drop it."
    if wrong:
        raise OptionsError(f"policy sensitivity {policy.sensitivity!r} {wrong}")
    return sensitivity


def _as_eager(parsed: Options) -> Options:
    """With what makes Inductor round as eager autocast does; an error for what rounds otherwise."""
    wrong = ""
    if parsed.sensitivity is not None:
        wrong = f"policy sensitivity {parsed.policy.sensitivity!r} is about rounding in compiled code"
    elif levels_of(parsed.policy.base):
        wrong = f"policy {parsed.policy.base!r} multiplies below 16 bits"
    elif parsed.activation_memory != "keep":
        wrong = f"activation_memory={parsed.activation_memory!r} rounds what the backward reads"
    elif parsed.weights == "freeze":
        wrong = "weights='freeze', unlike 'cache', does not round what is folded and packed"
    elif parsed.inductor.get("emulate_precision_casts", True) is not True:
        wrong = "Inductor's emulate_precision_casts is switched off"
    if wrong:
        raise OptionsError(
            f"{wrong}, and numerics='eager' rounds where eager torch.autocast rounds; drop one of the two."
        )
    return replace(parsed, inductor={**parsed.inductor, "emulate_precision_casts": True})


def _inductor_name(key: str) -> str:
    name = str(key).replace("-", "_")
    valid = inductor_option_names()
    if name not in valid:
        # our own names first: a typo is likelier in them than in the 600 of Inductor
        hint = " It is an argument of amp_fx.compile." if name == "outside" else ""
        hint = hint or did_you_mean(name, _OWN) or did_you_mean(name, valid)
        raise OptionsError(
            f"Unknown option {key!r} for backend 'amp_fx'; valid: {', '.join(sorted(_OWN))}, "
            f"or any option of torch._inductor.config.{hint}"
        )
    return name
