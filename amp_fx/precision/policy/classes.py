"""The vocabulary of the op lists: precision classes, and the rows that assign them.

A row (:class:`OpGroup`) is data: which ATen overloads, which class, and why. The lists are in ``common.py``, ``cpu.py``
and ``cuda.py`` beside this file; ``table.py`` joins them into one lookup per device.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace
from typing import Any


class OpClass(str, enum.Enum):
    """The class of an op in mixed precision. Values are the names used in plans, reports and user rules.

    A tensor is *eligible* when it is floating point, not fp64, and on the device being autocast: the rule of
    ``is_eligible`` in ``ATen/autocast_mode.h``.
    """

    #: every eligible tensor argument is cast to the low dtype (matmul, convolution, attention)
    LOW = "low"
    #: every eligible tensor argument is cast to fp32 (the ops whose range or sums need it)
    FP32 = "fp32"
    #: runs in the widest dtype among its eligible arguments, as native type promotion does
    PROMOTE = "promote"
    #: as PROMOTE, and the op commutes with rounding: it only moves, selects or compares values
    FOLLOW = "follow"
    #: not ours: arguments and results have exactly the dtypes the program was traced with
    KEEP = "keep"

    def __str__(self) -> str:
        return self.value


class Origin(enum.Enum):
    """Where a row's class comes from, which decides how the test suite checks it."""

    AUTOCAST = "registered under AutocastCPU / AutocastCUDA in the installed torch"
    COMPOSITE = "composite, not listed by autocast; its inner ops are (``cross_entropy_loss`` on CUDA)"
    UNLISTED = "not listed by autocast: runs in the dtype of its inputs"


@dataclass(frozen=True)
class OpGroup:
    """One group of ATen overloads that share a class and the reason for it."""

    op_class: OpClass
    #: why, in a few words; shown to users beside each decision
    reason: str
    #: names as the dispatcher prints them without the ``aten::``: ``"linear"`` is ``aten.linear.default``
    ops: tuple[str, ...]
    origin: Origin = Origin.UNLISTED
    #: tensor arguments that are never cast: the kernel takes them in a dtype of their own (``running_mean``)
    own_dtype_slots: tuple[str, ...] = ()
    #: the kernel accepts mixed floating dtypes and widens inside, so no cast node is needed
    mixes: bool = False
    #: arguments that switch the row off when the program passes them: ``softmax(x, -1, dtype=...)`` chooses its dtype
    unless_given: tuple[str, ...] = ()
    #: the first torch version that the row holds for, and the first that it no longer holds for: ``"2.12"``
    since: str | None = None
    until: str | None = None


def _row(op_class: OpClass, reason: str, ops: str, **settings: Any) -> OpGroup:
    """A row whose names stand in one string, with spaces between."""
    for names in settings.keys() & {"own_dtype_slots", "unless_given"}:
        settings[names] = tuple(settings[names].split())
    return OpGroup(op_class, reason, tuple(ops.split()), **settings)


low = functools.partial(_row, OpClass.LOW)
fp32 = functools.partial(_row, OpClass.FP32)
promote = functools.partial(_row, OpClass.PROMOTE)
follow = functools.partial(_row, OpClass.FOLLOW)
keep = functools.partial(_row, OpClass.KEEP)


def listed(*rows: OpGroup) -> tuple[OpGroup, ...]:
    """Rows that the autocast of a device registers. ``{autocast}`` in a reason becomes its name."""
    return tuple(
        replace(row, origin=Origin.AUTOCAST, reason=f"{row.reason}, listed by {{autocast}}") for row in rows
    )


def composite(*rows: OpGroup) -> tuple[OpGroup, ...]:
    """Rows of composite ops, whose class follows from ops inside that autocast registers."""
    return tuple(replace(row, origin=Origin.COMPOSITE) for row in rows)


def unlisted(*rows: OpGroup) -> tuple[OpGroup, ...]:
    """Rows of ops that run in the dtype of their inputs on a device, though other devices list them."""
    return tuple(replace(row, reason=f"{row.reason}, not listed by {{autocast}}") for row in rows)
