"""The precisions that a matmul may run in, as rows of one table. A new one is a row, with arithmetic in ``scaled.py``.

Scales come from the values at hand, in every call. rowwise: torchao's ``Float8LinearRecipeName.ROWWISE``,
rowwise_gw_hp: its ``ROWWISE_WITH_GW_HP``, tensorwise: its ``TENSORWISE``. Which element types: FP8 Formats for Deep
Learning, https://arxiv.org/abs/2209.05433. mxfp8: Recipes for Pre-training LLMs with MXFP8,
https://arxiv.org/abs/2506.08027; torchao's ``MXFP8_RCEIL``.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from amp_fx.policy.scaled import scaled_mm

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
        scale: what has one scale.
        block: elements that share a scale, where blocks have scales.
        powers: scales are powers of two, so that scaling itself rounds nothing.
        weight_gradients: False where the matmuls that give gradients of weights stay in the low dtype.
        capabilities: CUDA devices whose libraries multiply in it; None: all that have the rate.
        auto: CUDA devices that :data:`AUTO` means it for; empty: all that no row above is meant for; None: none.
        evaluated: name of the level that stands for it where nothing is differentiated; empty: itself.
        stored: name of the level in which weights are brought there; empty: itself.
        multiply: makes the product of operands with scales, see :func:`amp_fx.policy.scaled.scaled_mm`.
    """

    name: str
    dtype: torch.dtype
    rate: str
    policy: str = ""
    about: str = ""
    gradient: torch.dtype | None = None
    scale: Scale = Scale.NONE
    block: int | None = None
    powers: bool = False
    weight_gradients: bool = True
    capabilities: tuple[tuple[int, int], ...] | None = None
    auto: tuple[tuple[int, int], ...] | None = None
    evaluated: str = ""
    stored: str = ""
    # an address would change the keys of caches
    multiply: Callable[..., Any] = field(default=scaled_mm, repr=False)

    @property
    def by_row(self) -> bool:
        """True where scales stand for rows, or parts of rows, as a matmul contracts them."""
        return self.scale in (Scale.ROW, Scale.BLOCK)

    def dtype_of(self, *, is_gradient: bool) -> torch.dtype:
        """The dtype of an operand."""
        return self.gradient or self.dtype if is_gradient else self.dtype


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
    )
}

#: dtypes of operands with scales
NARROW_DTYPES = frozenset(
    dtype
    for level in LEVELS.values()
    if level.policy
    for dtype in (level.dtype, level.gradient or level.dtype)
)


def levels_of(base: str) -> dict[str, Level]:
    """The levels that a policy of this base chooses among, by name; none for those that only have op lists."""
    return {level.name: level for level in LEVELS.values() if base and level.policy == base}


def is_narrow(value: Any) -> TypeGuard[torch.Tensor]:
    """True for a tensor of a dtype in which operands with scales are."""
    return isinstance(value, torch.Tensor) and value.dtype in NARROW_DTYPES
