"""Why a call computes as it does, as data: a kind and its values. ``amp_fx/viz/words.py`` makes sentences of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from amp_fx.plans.schema import named_dtypes

__all__ = ["HAZARDS", "SENSITIVITY", "Kind", "Reason"]


class Kind(str, enum.Enum):
    """What a reason is about; the names of its values are those in its sentence."""

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
    NOT_A_WEIGHT = "not-a-weight"
    NO_ROWS = "no-rows"
    FEW_ROWS = "few-rows"
    INDIVISIBLE = "indivisible"
    UNEVEN_BLOCKS = "uneven-blocks"
    LAST_LINEAR = "last-linear"
    WEIGHT_GRADIENT = "weight-gradient"
    # export
    STORED_TABLE = "stored-table"


#: kinds of :mod:`amp_fx.passes.forward.hazards`
HAZARDS = frozenset({Kind.SCALAR_RANGE, Kind.TINY_EPS, Kind.EXP_SUM, Kind.POSITIONS, Kind.NO_KERNEL})

#: kinds that say what rounding a call costs in accuracy
SENSITIVITY = frozenset(
    {Kind.ROUNDING_ADDS, Kind.ROUNDING_WOULD_ADD, Kind.ROUNDING_ADDS_UP_TO, Kind.ROUNDING_OVERFLOWS}
)


@dataclass(frozen=True)
class Reason:
    """One fact that has decided about a call.

    Attributes:
        kind: which.
        values: by name, as JSON has them: texts and numbers.
    """

    kind: Kind
    values: dict[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, kind: Kind, **values: Any) -> Reason:
        """A reason whose values may be dtypes."""
        return cls(kind, named_dtypes(values))
