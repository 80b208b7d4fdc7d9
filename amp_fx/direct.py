"""``amp_fx.options(...)`` and ``amp_fx.compile(...)``: the options as typed keywords, checked where they are written.

What comes out is the plain dictionary that ``torch.compile`` and every trainer takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import nn

from amp_fx.errors import OptionsError
from amp_fx.plans import Plan
from amp_fx.policy import Policy
from amp_fx.settings import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["OptionNames", "compile", "options"]


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
        strict: raise what fails, where the backend would take a plainer way.
        inductor: options of ``torch._inductor.config`` by their names.
    """

    dtype: str | torch.dtype
    policy: str | Mapping[str, Any] | Policy
    fp8: Literal["auto", "rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8"]
    int8: Literal["auto", "int8_packed", "int8_unpacked", "int8"]
    numerics: Literal["compiled", "eager"]
    profile: str
    plan: str | os.PathLike[str] | Plan | Sequence[Plan] | Any
    scaler: str | None
    weights: Literal["auto", "cast", "cache", "freeze"]
    strict: bool
    inductor: Mapping[str, Any]


def options(**given: Unpack[OptionNames]) -> dict[str, Any]:
    """The ``options=`` of ``torch.compile(model, backend="amp_fx")``, checked.

        model = torch.compile(model, backend="amp_fx", options=amp_fx.options(weights="freeze"))

    Args:
        given: see :class:`OptionNames`; what is not given has its default.

    Raises:
        OptionsError: an unknown name, a bad value or a contradiction.
        PlanError: the file of a plan cannot be read.
    """
    own: dict[str, Any] = {name: value for name, value in given.items() if name != "inductor"}
    inductor = given.get("inductor", {})
    if not isinstance(inductor, Mapping):
        raise OptionsError(f"inductor must be a mapping of options of Inductor; got {inductor!r}.")
    if twice := OptionNames.__annotations__.keys() & inductor.keys():
        raise OptionsError(
            f"{min(twice)!r} is an option of amp_fx; take it out of inductor={dict(inductor)!r}."
        )
    found = {**own, **inductor}
    Options.parse(None, found)
    return found


@overload
def compile(
    model: nn.Module,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **given: Unpack[OptionNames],
) -> nn.Module: ...


@overload
def compile(
    model: Callable[..., Any],
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **given: Unpack[OptionNames],
) -> Callable[..., Any]: ...


def compile(
    model: Callable[..., Any],
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **given: Unpack[OptionNames],
) -> Callable[..., Any]:
    """``torch.compile(model, backend="amp_fx")`` with options as keywords; errors come now, not at the first call.

        model = amp_fx.compile(model, policy="int8", weights="freeze")

    Args:
        model: a module or a function.
        mode: of Inductor, as in ``torch.compile``.
        dynamic: as in ``torch.compile``.
        fullgraph: as in ``torch.compile``.
        given: see :class:`OptionNames`.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        OptionsError: as :func:`options`, or an unknown mode.
        PlanError: the file of a plan cannot be read.
    """
    # an option by its name wins over the mode, as in the backend
    checked = {**Options.parse(mode).inductor, **options(**given)}
    return torch.compile(model, backend="amp_fx", options=checked, dynamic=dynamic, fullgraph=fullgraph)
