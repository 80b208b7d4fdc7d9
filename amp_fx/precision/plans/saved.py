"""What a step keeps between forward and backward, as plain data of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from amp_fx.graphs.calls import starred

#: rows of a report
_ROWS = 10
#: a module's place in a list, inside a sentence
_BLOCK = re.compile(r"(?<=\.)\d+(?!\w)")


@dataclass(frozen=True)
class SavedValue:
    """One storage that a forward graph keeps for its backward, and was not given.

    Attributes:
        name: node in the graph that Inductor is given; of several views of the storage, the first.
        call: name of the call in the plan of the forward; empty where it has none.
        op: ATen name.
        module_path: dotted path of the user's module.
        dtype: of the value in the program.
        bits: of an element as it is kept: fewer than those of ``dtype`` with the option ``activation_memory``.
        bytes: as it is kept, scales included; symbolic sizes by their hint.
        reason: which gradients read it, and with the option the form that it has, or why it is kept as it is.
        times: how many equal values of repeated blocks, whose path has ``*``, it stands for; ``bytes`` is of all.
    """

    name: str
    call: str
    op: str
    module_path: str
    dtype: torch.dtype
    bits: int
    bytes: int
    reason: str
    times: int = 1

    @property
    def is_smaller(self) -> bool:
        """True where an element is kept in fewer bits than it has."""
        return self.bits < 8 * self.dtype.itemsize


def largest(found: Iterable[SavedValue]) -> list[SavedValue]:
    """What takes most of what is kept: equal values of repeated blocks together, ten rows at most."""
    groups: dict[tuple[Any, ...], list[SavedValue]] = {}
    for value in found:
        where, reason = starred(value.module_path), _BLOCK.sub("*", value.reason)
        equal = where, reason, value.op, value.dtype, value.bits, value.bytes
        groups.setdefault(equal, []).append(value)
    rows = []
    for (where, reason, *_), values in groups.items():
        row = values[0]
        if len(values) > 1:
            size = sum(value.bytes for value in values)
            row = replace(row, module_path=where, reason=reason, bytes=size, times=len(values))
        rows.append(row)
    return sorted(rows, key=lambda row: -row.bytes)[:_ROWS]
