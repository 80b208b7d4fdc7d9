"""The label that passes write on each call of a graph while they work; :mod:`.reading` makes a plan of all labels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx as fx

from amp_fx.errors import PlanError
from amp_fx.graphs.keys import LABEL
from amp_fx.plans.reasons import Kind, Reason
from amp_fx.policy import OpClass
from amp_fx.policy.levels import FORWARD, LEVELS, ROLES, Level

__all__ = ["Decided", "Label", "Takes", "label_of"]


class Takes:
    """How a call takes its floating tensor arguments."""

    DTYPE = "dtype"  #: all in the call's own dtype
    MIXED = "mixed"  #: narrower ones as they are: the kernel widens inside
    ANY = "any"  #: as they are: the result's dtype does not depend on them
    TRACED = "traced"  #: in the dtypes the program was traced with
    SELF = "self"  #: in the dtype of the tensor the call writes to


class Decided:
    """What follows from the decisions about a call, on a label and in a plan alike."""

    name: str
    reasons: tuple[Reason, ...]
    dtype: torch.dtype | None
    levels: dict[str, str]

    def is_because(self, *kinds: Kind) -> bool:
        """True where a reason of one of these kinds is given."""
        return any(reason.kind in kinds for reason in self.reasons)

    @property
    def levels_below(self) -> dict[str, Level]:
        """The roles in which a level below 16 bits is multiplied, with the level.

        Raises:
            PlanError: no such role or level.
        """
        for what, valid, found in (("role", ROLES, self.levels), ("level", LEVELS, self.levels.values())):
            if unknown := [name for name in found if name not in valid]:
                raise PlanError(
                    f"{self.name} has {what} {unknown[0]!r} in the plan; valid: {', '.join(map(repr, valid))}."
                )
        return {role: level for role, name in self.levels.items() if (level := LEVELS[name]).policy}

    @property
    def computed(self) -> torch.dtype | None:
        """The dtype of the arithmetic: of what is multiplied, else of the computation and its result."""
        level = self.levels_below.get(FORWARD)
        return self.dtype if level is None else level.dtype


@dataclass(kw_only=True)
class Label(Decided):
    """What passes know of one call, and decide about it.

    Attributes:
        name: node name, with the path of the body it is in: ``"wrap_body_0.linear"``.
        op: ATen name as the op lists write it, or the target's name.
        module_path: dotted path of the user's module.
        source: the user's source line.
        traced: floating dtype of the result in the program as traced; None where it is not floating.
        low: the low dtype in force here.
        op_class: what mixed precision does with the op.
        reasons: why, in the order in which they were found: the last overrules those before.
        dtype: floating dtype chosen for the computation and its result; None before ``place`` and for calls without
            floating tensors.
        takes: how arguments are taken, a value of :class:`Takes`.
        own_dtype_slots: arguments that keep a dtype of their own.
        pinned: dtype that the result must have at once, because others share its storage or a rule says so; else None.
        levels: of a matmul where a policy below 16 bits has chosen: role (:data:`amp_fx.policy.levels.ROLES`) -> name
            of the level (:data:`amp_fx.policy.levels.LEVELS`) in which it multiplies, ``{"forward": "rowwise",
            "gradient of its input": "bfloat16", ...}``; else empty. A plan of training is followed in these, too.
    """

    name: str
    op: str
    module_path: str
    source: str
    traced: torch.dtype | None
    low: torch.dtype | None
    op_class: OpClass
    reasons: tuple[Reason, ...] = ()
    dtype: torch.dtype | None = None
    takes: str = Takes.TRACED
    own_dtype_slots: tuple[str, ...] = ()
    pinned: torch.dtype | None = None
    levels: dict[str, str] = field(default_factory=dict)


def label_of(node: fx.Node) -> Label | None:
    """The call's label; None for nodes that are not calls."""
    return node.meta.get(LABEL)
