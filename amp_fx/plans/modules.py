"""What the modules of a program compute in, by a plan of it: pictures and reports say of each what this says."""

from __future__ import annotations

from collections.abc import Sequence

from amp_fx.plans.plan import NodePlan, dtype_name
from amp_fx.policy import OpClass

__all__ = ["is_passage", "module_dtypes"]


def is_passage(row: NodePlan) -> bool:
    """True for what hands on the bytes of its only input: views, and elements of results."""
    if len(row.inputs) != 1 or row.dtype is None:
        return False
    return row.op == "getitem" or (row.op_class is OpClass.FOLLOW and not row.bytes and not row.flops)


def module_dtypes(rows: Sequence[NodePlan]) -> dict[str, str]:
    """Path of a module -> what it computes in: its first matmul, else its last floating call."""
    found: dict[str, NodePlan] = {}
    for row in rows:
        before = found.get(row.module_path)
        if row.module_path and row.computed is not None and not is_passage(row):
            found[row.module_path] = before if before is not None and before.flops else row
    return {path: dtype_name(row.computed) for path, row in found.items() if row.computed is not None}
