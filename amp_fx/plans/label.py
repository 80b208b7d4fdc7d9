"""What passes decide about a call: the label that they write on its node, and the reasons, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from amp_fx.errors import PlanError
from amp_fx.graphs.keys import LABEL
from amp_fx.plans.files import as_data
from amp_fx.policy import OpClass
from amp_fx.policy.levels import FORWARD, LEVELS, ROLES, Level, level_named

__all__ = ["HAZARDS", "SENSITIVITY", "Kind", "Label", "Reason", "Takes", "label_of"]


class Kind(str, enum.Enum):
    """What a reason is about. ``amp_fx/viz/words.py`` has a sentence for each, with the names of its values."""

    # what the call is
    ELEMENT = "element"
    NOT_ATEN = "not-aten"
    NOT_FLOATING = "not-floating"
    SUBCLASS = "tensor-subclass"
    CAST = "cast"
    NAMES_DTYPE = "names-dtype"
    OWN_DTYPES = "own-dtypes"
    REGION = "autocast-disabled"
    LOW_ALREADY = "low-already"
    WRITES = "writes-in-place"
    GRADIENT = "gradient"
    # lists and rules
    RULE = "user-rule"
    WIDE_RESULT = "wide-result"
    NO_WIDE_RESULT = "no-wide-result"
    # implementations of a call
    PRODUCTS = "attention-products"
    FLASH = "attention-flash"
    LISTED = "listed"
    UNLISTED = "unlisted"
    NO_MATMUL = "no-matmul"
    LOW_IO = "fast-low-io"
    # hazards
    SCALAR_RANGE = "scalar-range"
    TINY_EPS = "tiny-eps"
    EXP_SUM = "exp-sum"
    POSITIONS = "positions"
    NO_KERNEL = "no-kernel"
    SHARED_STORAGE = "shared-storage"
    WEIGHT_RANGE = "weight-range"
    # the cut
    CASTS_COST_MORE = "casts-cost-more"
    CHEAPER = "cheaper"
    NO_DEARER = "no-dearer"
    STORED_LOW = "fast-stored-low"
    ROUNDED_AT_ONCE = "fast-rounded-at-once"
    # measured sensitivity
    ROUNDING_ADDS = "rounding-adds"
    ROUNDING_WOULD_ADD = "rounding-would-add"
    ROUNDING_ADDS_UP_TO = "rounding-adds-up-to"
    ROUNDING_OVERFLOWS = "rounding-overflows"
    # levels below 16 bits; the value "role" says of which matmul of the call
    LEVEL = "level"
    LEVEL_PLANNED = "level-planned"
    LEVEL_ADDS = "level-adds"
    LEVEL_WOULD_ADD = "level-would-add"
    LEVEL_DEARER = "level-dearer"
    LEVEL_OVER_BUDGET = "level-over-budget"
    PLANNED_LOW = "planned-low"
    OTHER_DEVICE = "other-device"
    UNKNOWN_ROWS = "unknown-rows"
    NO_COPY = "no-copy"
    NO_SCALE = "no-scale"
    NOT_A_PRODUCT = "not-a-product"
    NOT_A_WEIGHT = "not-a-weight"
    NO_ROWS = "no-rows"
    FEW_ROWS = "few-rows"
    INDIVISIBLE = "indivisible"
    UNEVEN_BLOCKS = "uneven-blocks"
    LAST_LINEAR = "last-linear"
    WEIGHT_GRADIENT = "weight-gradient"
    # export
    STORED_TABLE = "stored-table"


#: what :mod:`amp_fx.passes.forward.constrain` finds
HAZARDS = frozenset({Kind.SCALAR_RANGE, Kind.TINY_EPS, Kind.EXP_SUM, Kind.POSITIONS, Kind.NO_KERNEL})

#: what rounding a call costs in accuracy
SENSITIVITY = frozenset(
    {Kind.ROUNDING_ADDS, Kind.ROUNDING_WOULD_ADD, Kind.ROUNDING_ADDS_UP_TO, Kind.ROUNDING_OVERFLOWS}
)


@dataclass(frozen=True)
class Reason:
    """One fact that has decided about a call, with values as JSON has them: texts and numbers."""

    kind: Kind
    values: dict[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, kind: Kind, **values: Any) -> Reason:
        """A reason whose values may be dtypes."""
        return cls(kind, as_data(values))


class Takes:
    """How a call takes its floating tensor arguments."""

    DTYPE = "dtype"  #: all in the call's own dtype
    MIXED = "mixed"  #: narrower ones as they are: the kernel widens inside
    ANY = "any"  #: as they are: the result's dtype does not depend on them
    TRACED = "traced"  #: in the dtypes the program was traced with
    SELF = "self"  #: in the dtype of the tensor the call writes to


@dataclass(kw_only=True)
class Label:
    """What passes know of one call and decide about it; ``dtype`` is None before ``place``.

    Attributes as in :class:`amp_fx.plans.plan.NodePlan`, the row of a finished plan.
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
    scales: dict[str, tuple[float, int]] = field(default_factory=dict)

    def is_because(self, *kinds: Kind) -> bool:
        """True where a reason of one of these kinds is given."""
        return any(reason.kind in kinds for reason in self.reasons)

    @property
    def levels_below(self) -> dict[str, Level]:
        """Role -> level below 16 bits in which the call multiplies. Raises PlanError for names that are none."""
        found: dict[str, Level] = {}
        for role, name in self.levels.items():
            # plans of before have the name of an implementation
            level = level_named(name)
            if level is None or role not in ROLES:
                what, given, valid = ("level", name, LEVELS) if level is None else ("role", role, ROLES)
                raise PlanError(
                    f"{self.name} has {what} {given!r} in the plan; valid: {', '.join(map(repr, valid))}."
                )
            if level.policy:
                found[role] = level
        return found

    @property
    def computed(self) -> torch.dtype | None:
        """The dtype of the arithmetic: of what is multiplied, else of the computation and its result."""
        level = self.levels_below.get(FORWARD)
        return self.dtype if level is None else level.dtype


def label_of(node: fx.Node) -> Label | None:
    """The call's label; None for nodes that are not calls."""
    return node.meta.get(LABEL)
