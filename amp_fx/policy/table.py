"""One lookup over the op lists: which row holds an op on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from amp_fx._torch import op_name
from amp_fx.state import cache_results

from .classes import OpClass, OpGroup, Origin
from .common import COMMON_GROUPS
from .cpu import CPU_GROUPS
from .cuda import CUDA_GROUPS
from .mps import MPS_GROUPS

__all__ = ["all_names", "lookup", "supported_devices"]

#: xpu, mtia and maia autocast register what CUDA autocast registers, without cudnn's ops; hpu's registrations are in
#: a package of its own, and taken to be the same.
_DEVICE_GROUPS: Mapping[str, tuple[OpGroup, ...]] = {
    "cpu": CPU_GROUPS,
    "cuda": CUDA_GROUPS,
    "hpu": CUDA_GROUPS,
    "maia": CUDA_GROUPS,
    "mps": MPS_GROUPS,
    "mtia": CUDA_GROUPS,
    "xpu": CUDA_GROUPS,
}

#: What a pointwise op gets that no list names: new and rare ops behave as native type promotion does.
_POINTWISE = OpGroup(
    op_class=OpClass.PROMOTE,
    reason="pointwise, not listed: runs in the dtype of its inputs",
    origin=Origin.UNLISTED,
    mixes=True,
    ops=(),
)


def supported_devices() -> tuple[str, ...]:
    """Returns the device types that have op lists, sorted."""
    return tuple(sorted(_DEVICE_GROUPS))


def lookup(op: torch._ops.OpOverload, device_type: str) -> OpGroup | None:
    """Finds the row of an op: the device's own list, then the common one, then a default.

    Args:
        op: the overload a graph node calls.
        device_type: ``torch.device.type`` of the tensors it computes on.

    Returns:
        The row; the default row for a functional pointwise ATen op that no list names; None for any other op
        and for devices without lists (see :func:`supported_devices`).
    """
    table = _table(device_type)
    if not table:
        return None
    group = table.get(op_name(op))
    if group is None and _is_functional_pointwise(op):
        return _POINTWISE
    return group


def all_names(device_type: str) -> tuple[str, ...]:
    """Returns every op name the lists of a device hold, sorted; for suggestions beside an unknown name."""
    return tuple(sorted(_table(device_type)))


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
def _table(device_type: str) -> Mapping[str, OpGroup]:
    groups = _DEVICE_GROUPS.get(device_type)
    if groups is None:
        return {}
    return {**_rows(COMMON_GROUPS), **_rows(groups)}


def _rows(groups: Iterable[OpGroup]) -> dict[str, OpGroup]:
    """Maps each op to its row among those that hold for the running torch."""
    rows: dict[str, OpGroup] = {}
    for group in groups:
        if not _holds(group):
            continue
        for name in group.ops:
            if name in rows:
                raise ValueError(f"op {name!r} stands twice: {rows[name].reason!r} and {group.reason!r}")
            rows[name] = group
    return rows


def _holds(group: OpGroup) -> bool:
    running = _release(torch.__version__)
    return (group.since is None or _release(group.since) <= running) and (
        group.until is None or running < _release(group.until)
    )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
