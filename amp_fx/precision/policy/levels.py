"""The precisions that a matmul may run in, and how a product in each is computed: rows of one table.

A level has the facts of a precision: dtypes, scales, rate. A kernel has the facts of one computation in it: the calls
that it takes, its cost, its code. A new one of either is a row, with arithmetic in
``scaled.py``. Scales come from the values at hand, in every call.

rowwise: torchao's ``Float8LinearRecipeName.ROWWISE``, rowwise_gw_hp: its ``ROWWISE_WITH_GW_HP``, tensorwise: its
``TENSORWISE``. Which element types: FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433. mxfp8: Recipes for
Pre-training LLMs with MXFP8, https://arxiv.org/abs/2506.08027; torchao's ``MXFP8_RCEIL``. int8: torchao's
``Int8DynamicActivationInt8WeightConfig``, a scale for each row of a value and for each column of a weight.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from amp_fx.precision.policy.scaled import int8_mm, measured_int8_mm, packed_int8_mm, scaled_mm

#: what a matmul is to a call of the forward: itself, or what gives the gradient of its first or second operand
ROLES = FORWARD, INPUT, WEIGHT = "forward", "gradient of its input", "gradient of its weight"
#: the option that leaves the choice to the device and to costs
AUTO = "auto"


class Scale(enum.Enum):
    """The part of a tensor that shares one scale."""

    NONE = "nothing: values are cast"
    WHOLE = "a value"
    ROW = "a row that the matmul contracts"
    BLOCK = "so many elements of such a row, in one byte (e8m0)"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One computation of a product in a level. Kernels without measured scales differ in the order of roundings."""

    name: str  # what an option and the reason in a plan call it
    about: str = ""  # one line for whoever chooses
    # an address would change the keys of caches
    multiply: Callable[..., Any] = field(default=scaled_mm, repr=False)
    value: torch.dtype | None = None  # of what is multiplied by a weight, where that is not the level's
    device: str | None = None  # the only type of device that has it
    # CUDA devices that have it; None: all with the rate
    capabilities: tuple[tuple[int, int], ...] | None = None
    keeps_weights: bool = False  # it takes only weights of which copies live across calls
    grain: int = 16  # what divides the sizes that are contracted, and the columns
    fewest: int = 1  # rows that a kernel of CUDA takes at least
    most: int | None = None  # elements that are contracted, where a sum of more products may overflow
    measured: bool = False  # values have one scale, which a plan has
    packs: bool = False  # the weight is laid out anew in each call of more than one row
    one_row: float = 0.0  # seconds that a call of a single row gains on the low dtype, beside the arithmetic


_SCALED_MM = Kernel(name="scaled_mm")
# B200 and GB200, B300 and GB300: cuBLAS takes scales of blocks; torch._scaled_mm passes them on from torch 2.7 on
_BLOCK_SCALED_MM = Kernel(name="scaled_mm", capabilities=((10, 0), (10, 3)))
_LARGEST_SUM = torch.iinfo(torch.int32).max
#: for oneDNN
_UNSIGNED = functools.partial(
    Kernel, value=torch.uint8, device="cpu", keeps_weights=True, most=_LARGEST_SUM // (255 * 127)
)
_INT8_MM = (
    _UNSIGNED(
        name="int8_measured",
        about="as int8_packed, with scales of values that were measured before",
        multiply=measured_int8_mm,
        grain=1,
        measured=True,
    ),
    _UNSIGNED(
        name="int8_packed",
        about="values are unsigned, which oneDNN has fast kernels for on all CPUs, and weights packed",
        multiply=packed_int8_mm,
        grain=1,
    ),
    _UNSIGNED(
        name="int8_unpacked",
        about="as int8_packed, without oneDNN: for a single row",
        multiply=int8_mm,
        # aten._int_mm of torch 2.11 takes signed values only
        value=torch.uint8 if torch.__version__ >= "2.12" else torch.int8,
        grain=8,
        packs=True,
        # a call of oneDNN takes 20 us before it multiplies, 512 x 512 with one row takes 5
        one_row=20e-6,
    ),
    # aten._int_mm
    Kernel(
        name="int8_signed",
        about="both operands are signed",
        multiply=int8_mm,
        grain=8,
        fewest=17,
        most=_LARGEST_SUM // (127 * 127),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Level:
    """A precision."""

    name: str  # the key in LEVELS, which plans have
    dtype: torch.dtype  # of operands
    rate: str  # of a device profile, at which it multiplies
    policy: str = ""  # base of the policy that chooses it; empty for those that op lists choose
    about: str = ""  # one line for whoever chooses
    gradient: torch.dtype | None = None  # dtype of gradients, where that is another
    scale: Scale = Scale.NONE
    block: int | None = None  # elements that share a scale, where blocks have scales
    powers: bool = False  # scales are powers of two, so that scaling itself rounds nothing
    trains: bool = True  # False: the policy means autocast in graphs with gradients
    weight_gradients: bool = True  # False: the matmuls that give gradients of weights stay in the low dtype
    #: CUDA devices that AUTO means it for; empty: all devices that no row above is for; None: none
    auto: tuple[tuple[int, int], ...] | None = None
    evaluated: str = ""  # the level that stands for it where nothing is differentiated; empty: itself
    of_weights: str = ""  # there, the level by which weights are scaled; empty: itself
    kernels: tuple[Kernel, ...] = ()  # of equal costs the first counts

    @property
    def by_row(self) -> bool:
        """True where scales stand for rows, or parts of rows, as a matmul contracts them."""
        return self.scale in (Scale.ROW, Scale.BLOCK)

    def dtype_of(self, *, is_gradient: bool) -> torch.dtype:
        """The dtype of an operand."""
        return self.gradient if is_gradient and self.gradient is not None else self.dtype

    def chosen(self, choice: str) -> tuple[Kernel, ...]:
        """The kernels that an option leaves: all, or the one of that name."""
        return tuple(each for each in self.kernels if each.name == choice) or self.kernels


_FP8 = functools.partial(
    Level, dtype=torch.float8_e4m3fn, rate="float8_e4m3fn", policy="fp8", kernels=(_SCALED_MM,)
)

LEVELS = {
    level.name: level
    for level in (
        Level(name="float32", dtype=torch.float32, rate="float32"),
        Level(name="bfloat16", dtype=torch.bfloat16, rate="bfloat16"),
        Level(name="float16", dtype=torch.float16, rate="float16"),
        _FP8(
            name="rowwise",
            about="a row that a matmul contracts; e4m3, scales are powers of two",
            scale=Scale.ROW,
            powers=True,
            # Hopper, where torchao measured it, and kernels for it are most mature
            auto=((9, 0),),
        ),
        _FP8(
            name="tensorwise",
            about="a whole tensor; gradients in e5m2",
            gradient=torch.float8_e5m2,
            scale=Scale.WHOLE,
            auto=(),
            # so it may be made once, and kept
            of_weights="rowwise",
        ),
        _FP8(
            name="rowwise_gw_hp",
            about="as rowwise; gradients of weights are multiplied in the low dtype",
            scale=Scale.ROW,
            powers=True,
            weight_gradients=False,
            evaluated="rowwise",
        ),
        _FP8(
            name="mxfp8",
            about="32 elements of a row that a matmul contracts; e4m3, scales are powers of two; on sm_100 and sm_103",
            scale=Scale.BLOCK,
            block=32,
            powers=True,
            evaluated="rowwise",
            kernels=(_BLOCK_SCALED_MM,),
        ),
        Level(
            name="int8",
            dtype=torch.int8,
            rate="int8",
            policy="int8",
            about="a row that a matmul contracts",
            scale=Scale.ROW,
            trains=False,
            auto=(),
            kernels=_INT8_MM,
        ),
    )
}

#: floating dtypes of operands with scales
NARROW_DTYPES = frozenset(
    dtype
    for level in LEVELS.values()
    if level.policy and level.dtype.is_floating_point
    for dtype in (level.dtype, level.gradient or level.dtype)
)


def levels_of(base: str, *, training: bool = False) -> dict[str, Level]:
    """The levels that a policy of this base chooses among, in training or not; none where it only has op lists."""
    rows = {name: level for name, level in LEVELS.items() if base and level.policy == base}
    return {name: level for name, level in rows.items() if level.trains or not training}


def choices_of(base: str) -> dict[str, str]:
    """The values of a policy's option, each with its meaning: levels, and kernels where there are several."""
    found: dict[str, str] = {}
    for level in levels_of(base).values():
        found[level.name] = level.about
        if len(level.kernels) > 1:
            # a plan has what is measured
            kernels = (each for each in level.kernels if not each.measured)
            found |= {each.name: f"as {level.name}: {each.about}" for each in kernels}
    return found


def level_named(name: str) -> Level | None:
    """The level of this name, or the one that has a kernel of this name; None where there is neither."""
    with_it = (row for row in LEVELS.values() if name in (each.name for each in row.kernels))
    return LEVELS.get(name) or next(with_it, None)


def is_narrow(value: Any) -> TypeGuard[torch.Tensor]:
    """True for a tensor of a floating dtype in which operands with scales are."""
    return isinstance(value, torch.Tensor) and value.dtype in NARROW_DTYPES
