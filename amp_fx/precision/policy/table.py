"""One row for each type of device that autocast knows, and the lookup of an op in its lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from amp_fx._torch import op_name, registered_ops
from amp_fx.errors import OptionsError, did_you_mean
from amp_fx.runtime.state import cache_results

from .classes import OpClass, OpGroup
from .common import COMMON_GROUPS
from .cpu import CPU_GROUPS
from .cuda import CUDA_ALONE, CUDA_GROUPS, MPS_GROUPS


@dataclass(frozen=True)
class Device:
    """A type of device."""

    name: str
    #: of its autocast; a later one wins over an earlier one, and all of them over the common list
    lists: tuple[tuple[OpGroup, ...], ...]
    #: there are profiles of its devices, so that casts are weighed against faster arithmetic; else all listed runs low
    has_rates: bool = False
    #: its library returns the product of low operands in fp32, gradients of weights among them
    wide_results: bool = False
    #: casts of a convolution's bias, of sums of gradients and in front of views are part of kernels that run
    #: anyway, and so is what scales the rows that a kernel adds up
    fuses_casts: bool = False
    #: its norms take a low input with fp32 weights
    mixes_norms: bool = False
    #: its library copies the weight of a matmul or convolution in fp32 before it multiplies
    packs_weights: bool = False


#: xpu, mtia and maia autocast register what CUDA autocast registers, but for CUDA_ALONE; hpu's registrations are in a
#: package of its own, and taken to be the same.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("cpu", (CPU_GROUPS,), has_rates=True, mixes_norms=True, packs_weights=True),
        Device("cuda", (CUDA_GROUPS, CUDA_ALONE), has_rates=True, wide_results=True, fuses_casts=True),
        Device("mps", (CUDA_GROUPS, MPS_GROUPS)),
        *(Device(name, (CUDA_GROUPS,)) for name in ("hpu", "maia", "mtia", "xpu")),
    )
}

_UNKNOWN = Device("", ())

#: What a pointwise op gets that no list names: new and rare ops behave as native type promotion does.
_POINTWISE = OpGroup(
    OpClass.PROMOTE, "pointwise, not listed: runs in the dtype of its inputs", (), mixes=True
)


def device_row(device_type: str) -> Device:
    """The row of a device type; an empty one for a type that autocast does not know."""
    return DEVICES.get(device_type, _UNKNOWN)


def lookup(op: torch._ops.OpOverload, device_type: str) -> OpGroup | None:
    """The row of an op: of the device's own lists, the common one, or a default for what is pointwise.

    None for any other op, and for devices without lists.
    """
    if device_type not in DEVICES:
        return None
    group = rows_of(device_type).get(op_name(op))
    return _POINTWISE if group is None and _is_functional_pointwise(op) else group


def _is_functional_pointwise(op: torch._ops.OpOverload) -> bool:
    # aten only: elsewhere the tag says nothing about dtypes (prims.convert_element_type carries it);
    # no backward formulas: theirs are the dtypes that their forward was traced with
    return (
        op.namespace == "aten"
        and torch.Tag.pointwise in op.tags
        and not op._schema.is_mutable
        and not op._schema.name.endswith("_backward")
    )


@cache_results()
def rows_of(device_type: str) -> Mapping[str, OpGroup]:
    """The lists of a device type that has some: op name -> its row."""
    rows: dict[str, OpGroup] = {}
    for groups in (COMMON_GROUPS, *DEVICES[device_type].lists):
        rows.update(rows_that_hold(groups, f"{device_type.upper()} autocast"))
    return rows


def rows_that_hold(groups: Iterable[OpGroup], autocast: str) -> dict[str, OpGroup]:
    """Maps each op to its row among those that hold for the running torch."""
    rows: dict[str, OpGroup] = {}
    for group in groups:
        if not _holds(group):
            continue
        named = replace(group, reason=group.reason.format(autocast=autocast))
        for name in group.ops:
            if name in rows:
                raise ValueError(f"op {name!r} stands twice: {rows[name].reason!r} and {named.reason!r}")
            rows[name] = named
    return rows


def _holds(group: OpGroup) -> bool:
    versions = group.since or "0.0", torch.__version__, group.until or "99.0"
    since, running, until = ([int(part) for part in version.split(".")[:2]] for version in versions)
    return since <= running < until


def check_op(op: str, rule: object) -> None:
    """Refuses an op in a rule, ``"softmax"``, ``"softmax.int"`` or ``"mylib::op"``, that nobody has registered.

    The exception is OptionsError, with the valid names.
    """
    if op in _listed():
        return
    names = {name.removeprefix("aten::") for name in registered_ops()}
    packets = {name.partition(".")[0] for name in names}
    namespace, separator, _ = op.rpartition("::")
    # nobody knows yet what a library that is imported later will register
    is_later = separator and not any(name.startswith(f"{namespace}::") for name in names)
    if op in names or op in packets or is_later:
        return
    packet = op.partition(".")[0]
    if packet in packets:
        of_packet = (name for name in names if name.partition(".")[0] == packet)
        overloads = sorted(name for name in of_packet if not name.endswith("out"))
        raise OptionsError(
            f"Unknown overload {op!r} in policy rule {rule!r}; valid: {', '.join(map(repr, overloads))}, or {packet!r} "
            "for every overload."
        )
    raise OptionsError(
        f"Unknown op {op!r} in policy rule {rule!r}; valid: names of ATen ops, as amp_fx.explain(model, "
        "*args).table() has them, such as 'linear', and of registered ops of other libraries, such as 'mylib::op'."
        # what a rule is likelier to be about comes first
        + (did_you_mean(op, sorted(_listed())) or did_you_mean(op, sorted(packets)))
    )


@cache_results()
def _listed() -> frozenset[str]:
    """The names that are on some list, with overloads and without."""
    names = {name for device in DEVICES for name in rows_of(device)}
    return frozenset({*names, *(name.partition(".")[0] for name in names)})
