"""The precisions that a matmul may run in, as rows of one table. A new one is a row, with arithmetic in ``scaled.py``.

Scales come from the values at hand, in every call. rowwise: torchao's ``Float8LinearRecipeName.ROWWISE``,
rowwise_gw_hp: its ``ROWWISE_WITH_GW_HP``, tensorwise: its ``TENSORWISE``. Which element types: FP8 Formats for Deep
Learning, https://arxiv.org/abs/2209.05433. mxfp8: Recipes for Pre-training LLMs with MXFP8,
https://arxiv.org/abs/2506.08027; torchao's ``MXFP8_RCEIL``. int8: torchao's ``Int8DynamicActivationInt8WeightConfig``,
a scale for each row of a value and for each column of a weight.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from amp_fx.policy.scaled import int8_mm, packed_int8_mm, scaled_mm

__all__ = [
    "AUTO",
    "FORWARD",
    "GRAIN",
    "INPUT",
    "LEVELS",
    "NARROW_DTYPES",
    "ROLES",
    "WEIGHT",
    "Level",
    "Scale",
    "is_narrow",
    "levels_of",
]

#: what a matmul is to a call of the forward: itself, or what gives the gradient of its first or second operand
ROLES = FORWARD, INPUT, WEIGHT = "forward", "gradient of its input", "gradient of its weight"

#: library kernels that multiply with scales take sizes that are multiples of it
GRAIN = 16

#: the option that leaves the level to the device
AUTO = "auto"


class Scale(enum.Enum):
    """What has one scale."""

    NONE = "nothing: values are cast"
    WHOLE = "a value"
    ROW = "a row that the matmul contracts"
    BLOCK = "so many elements of such a row, in one byte (e8m0)"


@dataclass(frozen=True, kw_only=True)
class Level:
    """A precision.

    Attributes:
        name: the key in :data:`LEVELS`, which plans have.
        dtype: of operands.
        rate: the rate of a device profile at which it multiplies.
        policy: base of the policy that chooses it; empty for those that op lists choose.
        about: one line for whoever chooses.
        gradient: dtype of gradients, where that is another.
        value: dtype of what is multiplied by a weight, where that is another.
        scale: what has one scale.
        block: elements that share a scale, where blocks have scales.
        powers: scales are powers of two, so that scaling itself rounds nothing.
        trains: False where the policy means autocast in graphs with gradients.
        keeps_weights: what a value is multiplied by has to be a weight of which copies live across calls.
        grain: what divides the sizes that are contracted, and the columns.
        fewest: rows that a library kernel of CUDA takes at least.
        weight_gradients: False where the matmuls that give gradients of weights stay in the low dtype.
        device: type of the only device that multiplies in it; None: any.
        capabilities: CUDA devices whose libraries multiply in it; None: all that have the rate.
        auto: CUDA devices that :data:`AUTO` means it for; empty: all devices that no row above is for; None: none.
        evaluated: name of the level that stands for it where nothing is differentiated; empty: itself.
        stored: name of the level in which weights are brought there; empty: itself.
        one_row: name of the level that multiplies where there is only one row; empty: itself.
        multiply: makes the product of operands with scales, see :func:`amp_fx.policy.scaled.scaled_mm`.
    """

    name: str
    dtype: torch.dtype
    rate: str
    policy: str = ""
    about: str = ""
    gradient: torch.dtype | None = None
    value: torch.dtype | None = None
    scale: Scale = Scale.NONE
    block: int | None = None
    powers: bool = False
    trains: bool = True
    keeps_weights: bool = False
    grain: int = GRAIN
    fewest: int = 1
    weight_gradients: bool = True
    device: str | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None
    auto: tuple[tuple[int, int], ...] | None = None
    evaluated: str = ""
    stored: str = ""
    one_row: str = ""
    # an address would change the keys of caches
    multiply: Callable[..., Any] = field(default=scaled_mm, repr=False)

    @property
    def by_row(self) -> bool:
        """True where scales stand for rows, or parts of rows, as a matmul contracts them."""
        return self.scale in (Scale.ROW, Scale.BLOCK)

    def dtype_of(self, *, is_gradient: bool = False, is_weight: bool = False) -> torch.dtype:
        """The dtype of an operand."""
        other = self.gradient if is_gradient else None if is_weight else self.value
        return other or self.dtype


_INT8 = functools.partial(Level, dtype=torch.int8, rate="int8", policy="int8", scale=Scale.ROW, trains=False)
_FP8 = functools.partial(Level, dtype=torch.float8_e4m3fn, rate="float8_e4m3fn", policy="fp8")

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
            stored="rowwise",
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
            # B200 and GB200, B300 and GB300: cuBLAS takes such scales; torch._scaled_mm hands them on from torch 2.7 on
            capabilities=((10, 0), (10, 3)),
            evaluated="rowwise",
        ),
        _INT8(
            name="int8_packed",
            about="as int8; values are unsigned, which oneDNN has fast kernels for on all CPUs, and weights packed",
            value=torch.uint8,
            stored="int8",
            # a call of oneDNN takes 20 us before it multiplies, 512 x 512 with one row takes 5
            one_row="int8_unpacked",
            device="cpu",
            auto=(),
            keeps_weights=True,
            grain=1,
            multiply=packed_int8_mm,
        ),
        _INT8(
            name="int8_unpacked",
            about="as int8_packed, without oneDNN: for a single row",
            value=torch.uint8,
            stored="int8",
            device="cpu",
            keeps_weights=True,
            grain=8,
            multiply=int8_mm,
        ),
        _INT8(
            name="int8",
            about="a row that a matmul contracts; both operands are signed",
            auto=(),
            # aten._int_mm
            grain=8,
            fewest=17,
            multiply=int8_mm,
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
    """The levels that a policy of this base chooses among, by name; none for those that only have op lists.

    Args:
        base: of the policy.
        training: only those of graphs that will be differentiated.
    """
    rows = [level for level in LEVELS.values() if base and level.policy == base]
    return {level.name: level for level in rows if level.trains or not training}


def is_narrow(value: Any) -> TypeGuard[torch.Tensor]:
    """True for a tensor of a floating dtype in which operands with scales are."""
    return isinstance(value, torch.Tensor) and value.dtype in NARROW_DTYPES
