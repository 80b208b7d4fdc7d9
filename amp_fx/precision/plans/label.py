"""The decision of passes about a call: the label that they write on its node, and the reasons, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from amp_fx.errors import PlanError
from amp_fx.graphs.keys import LABEL
from amp_fx.precision.plans.files import as_data, dtype_name
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.levels import FORWARD, LEVELS, ROLES, Level, level_named


class ReasonKind(str, enum.Enum):
    """The kind of a reason, as plans name it, and its sentence with the names of its values."""

    sentence: str

    def __new__(cls, value: str, sentence: str) -> Any:
        """A member, which equals its value."""
        kind = str.__new__(cls, value)
        kind._value_, kind.sentence = value, sentence
        return kind

    # what the call is
    ELEMENT = "element", "an element of its producer's result"
    LAYOUT = "layout", "hands on shards of a DTensor"
    NOT_ATEN = "not-aten", "not an ATen op: left as traced"
    NOT_FLOATING = "not-floating", "no floating tensor that autocast may re-type"
    TRANSFORMED = "transformed", "inside vmap or torch.func: torch.autocast is on"
    SUBCLASS = "tensor-subclass", "takes a tensor subclass, which has its own dtype"
    CAST = "cast", "the program's own cast"
    NAMES_DTYPE = "names-dtype", "the program names the dtype of the result"
    DEPENDS_ON_DTYPE = "depends-on-dtype", "its result depends on the dtype that it is given: as traced"
    COMPLEX = "makes-complex", "complex numbers of real ones: half complex numbers have few kernels"
    OWN_DTYPES = "own-dtypes", "returns each argument in its own dtype"
    REGION = "autocast-disabled", "inside torch.autocast(enabled=False)"
    LOW_ALREADY = "low-already", "already low as the program wrote it"
    WRITES = "writes-in-place", "writes in place: runs in the dtype of what it writes to"
    GRADIENT = "gradient", "{of}: reads {dtypes}, as the forward left it"
    # lists and rules
    RULE = "user-rule", "user rule {rule}"
    WIDE_RESULT = "wide-result", "the fp32 sum is its result, not rounded to {low}"
    NO_WIDE_RESULT = "no-wide-result", "in fp32: {device} has no {op} that reads {low} and writes fp32"
    # implementations of a call
    PRODUCTS = "attention-products", "two products around a softmax in fp32"
    LOW_PRODUCTS = "attention-low-products", "two products around a softmax, its scores in 16 bits"
    FLASH = "attention-flash", "flash kernel"
    PRODUCTS_TAKE = "products-take", "products take {share:.2f} of the flash kernel's time for {scores}"
    NO_HEADS = "no-heads", "no heads in a dimension of their own"
    QUERY_IN_TRAINING = "query-in-training", "a single query in training"
    UNKNOWN_SIZES = "unknown-sizes", "its sizes are not known"
    EMPTY = "empty", "it is empty"
    DROPOUT = "dropout", "it drops probabilities"
    LEARNED_MASK = "learned-mask", "its mask has a gradient"
    UNEQUAL_WIDTHS = "unequal-widths", "keys and values of different widths"
    AS_EAGER = "as-eager", "as eager PyTorch has it"
    NO_RATES = "no-rates", "no profile, which would say what products take"
    NO_FLASH_TIMES = "no-flash-times", "the profile has no times of the flash kernel"
    LISTED = "listed", "{why}"
    UNLISTED = "unlisted", "not on the op lists: left as traced"
    NO_MATMUL = "no-matmul", "no matrix product in these shapes: autocast casts nothing"
    LOW_IO = "fast-low-io", "policy fast: fp32 inside the kernel, low in and out"
    # hazards
    SCALAR_RANGE = "scalar-range", "scalar-range: {constant:g} is beyond {low}"
    TINY_EPS = "tiny-eps", "tiny-eps: {eps:g} is below {low}'s smallest normal number"
    EXP_SUM = "exp-sum", "exp-sum: exponentials that are summed need fp32's range and digits"
    POSITIONS = "positions", "positions: integers beyond 256 are not exact in a 16-bit dtype"
    NO_KERNEL = "no-kernel", "no-kernel in {low}: {why}"
    ADDS_LOW = "adds-low", "adds-low: its kernel adds up in {low}, which stops at {limit}"
    BITS = "bits", "bits: its bits are read, and those of {low} would be zeros"
    SHARED_STORAGE = "shared-storage", "a view of a storage that is written to or visible outside"
    WEIGHT_RANGE = "weight-range", "{weight} has values beyond the range of {low}"
    # the cut
    CASTS_COST_MORE = "casts-cost-more", "in fp32: its casts would cost more than {low} saves on this device"
    SLOWER_LOW = "slower-low", "in fp32: {wide} ms, and {narrow} in {low}, timed on this machine"
    CHEAPER = "cheaper", "cut: cheaper in {dtype}, same values"
    IDLE = "idle", "in fp32: no matmul beside it runs in {low}"
    NO_DEARER = "no-dearer", "cut: no dearer in fp32"
    STORED_LOW = "fast-stored-low", "policy fast: stored in {low}"
    ROUNDED_AT_ONCE = "fast-rounded-at-once", "policy fast: rounded at once to {low}"
    # measured sensitivity
    ROUNDING_ADDS = "rounding-adds", "sensitivity: rounding adds {error:.1e} to the error"
    ROUNDING_WOULD_ADD = "rounding-would-add", "sensitivity: rounding would add {error:.1e} to the error"
    ROUNDING_ADDS_UP_TO = "rounding-adds-up-to", "sensitivity: rounding adds up to {error:.1e} to the error"
    ROUNDING_OVERFLOWS = "rounding-overflows", "sensitivity: rounding overflows: the error is infinite"
    # levels below 16 bits; the value "role" says of which matmul of the call
    LEVEL = "level", "{policy}, {level}"
    LEVEL_PLANNED = "level-planned", "{policy}, {level}, as the plan has it"
    LEVEL_ADDS = "level-adds", "{policy}, {level}, adds {error:.1e} to the error"
    LEVEL_WOULD_ADD = "level-would-add", "{low}, {policy} would add {error:.1e} to the error"
    LEVEL_DEARER = "level-dearer", "converting would cost more than {policy} saves on this device"
    LEVEL_OVER_BUDGET = "level-over-budget", "{policy} would cost more time or error than the budget allows"
    PLANNED_LOW = "planned-low", "low, as the plan has it"
    OTHER_DEVICE = "other-device", "it does not run on {device}"
    UNKNOWN_ROWS = "unknown-rows", "{level} has no scales for a number of rows that is not known"
    NO_COPY = "no-copy", "{level} multiplies by weights of which copies are kept"
    NO_SCALE = "no-scale", "its scale was not measured"
    NOT_A_PRODUCT = "not-a-product", "{level} has no convolutions"
    NOT_A_WEIGHT = "not-a-weight", "{policy} multiplies by weights"
    NO_ROWS = "no-rows", "it has no rows"
    FEW_ROWS = "few-rows", "{level} multiplies {fewest} rows or more"
    LONG_SUM = "long-sum", "a sum in {level} has {most} products at most, not {contracted}"
    INDIVISIBLE = "indivisible", "{grain} does not divide its sizes {sizes}"
    UNEVEN_BLOCKS = "uneven-blocks", "{block} does not divide the {contracted} that it contracts"
    LAST_LINEAR = "last-linear", "the last linear stays as it is"
    WEIGHT_GRADIENT = "weight-gradient", "{level} leaves gradients of weights in the low dtype"
    # export
    STORED_TABLE = "stored-table", "the table is stored in {dtype}, its rows are widened"


#: what rounding a call costs in accuracy
SENSITIVITY = frozenset(
    {
        ReasonKind.ROUNDING_ADDS,
        ReasonKind.ROUNDING_WOULD_ADD,
        ReasonKind.ROUNDING_ADDS_UP_TO,
        ReasonKind.ROUNDING_OVERFLOWS,
    }
)


@dataclass(frozen=True)
class Reason:
    """One fact that has decided about a call, with values as JSON has them: texts and numbers."""

    kind: ReasonKind
    values: dict[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, kind: ReasonKind, **values: Any) -> Reason:
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
    """The facts and the decision of passes about one call; ``dtype`` is None before ``place``.

    Attributes as in :class:`amp_fx.precision.plans.plan.NodePlan`, the row of a finished plan.
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
    result_dtype: torch.dtype | None = None
    computed_by: str = ""
    hazard: bool = False
    levels: dict[str, str] = field(default_factory=dict)
    scales: dict[str, tuple[float, int]] = field(default_factory=dict)
    equalisation: tuple[int, ...] = ()

    def is_because(self, *kinds: ReasonKind) -> bool:
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

    @property
    def precision(self) -> str:
        """The name of the dtype of the arithmetic (``computed``); an empty string where there is none."""
        return "" if self.computed is None else dtype_name(self.computed)


def label_of(node: fx.Node) -> Label | None:
    """The call's label; None for nodes that are not calls."""
    return node.meta.get(LABEL)
