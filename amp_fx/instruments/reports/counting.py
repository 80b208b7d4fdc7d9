"""Values counted by exponent, and what a floating format would lose of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

#: exponents counted, first and last: all of fp32, subnormals included
_FIRST, _LAST = -150, 128
#: loss scales beyond this are no use in fp32 either
_LARGEST_SCALE = 64


@dataclass(frozen=True)
class Format:
    """A floating format: what is at most half of ``2**smallest`` becomes zero, below ``2**normal`` digits are lost."""

    smallest: int
    normal: int
    largest: float


#: IEEE 754 binary16; bfloat16; OCP 8-bit floating point specification 1.0
FORMATS = {
    "float16": Format(-24, -14, 65504.0),
    "bfloat16": Format(-133, -126, torch.finfo(torch.bfloat16).max),
    "float8_e4m3": Format(-9, -6, 448.0),
    "float8_e5m2": Format(-16, -14, 57344.0),
}


@dataclass
class Counts:
    """How many values there are at each exponent."""

    #: e -> number of values with ``2**e < abs(value) <= 2**(e + 1)``: with the upper end included, exactly the values
    #: below an exponent are those that round to zero
    exponents: Counter[int] = field(default_factory=Counter)
    zeros: int = 0
    #: infinities and NaN
    nonfinite: int = 0
    #: finite magnitude
    largest: float = 0.0

    @property
    def nonzero(self) -> int:
        """Number of finite values that are not zero."""
        return self.exponents.total()

    @property
    def total(self) -> int:
        """Number of values of any kind."""
        return self.nonzero + self.zeros + self.nonfinite

    def add(self, values: torch.Tensor) -> None:
        """Counts a tensor: fp32, bf16, fp16 or fp64, any shape."""
        flat = (values.coalesce().values() if values.is_sparse else values).detach().float().flatten()
        finite = flat.isfinite()
        magnitude = flat[finite].abs()
        self.nonfinite += int((~finite).sum())
        self.zeros += int((magnitude == 0).sum())
        magnitude = magnitude[magnitude > 0]
        if not magnitude.numel():
            return
        self.largest = max(self.largest, float(magnitude.max()))
        # magnitude = mantissa * 2**exponent, 0.5 <= mantissa < 1; a power of two is the upper end of its bin
        mantissa, exponent = torch.frexp(magnitude)
        bins = exponent.long() - 1 - (mantissa == 0.5).long()
        found = torch.bincount(bins - _FIRST, minlength=_LAST - _FIRST).tolist()
        self.exponents.update({exponent: count for exponent, count in enumerate(found, _FIRST) if count})

    def __add__(self, other: Counts) -> Counts:
        """The values of both."""
        return Counts(
            self.exponents + other.exponents,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            max(self.largest, other.largest),
        )

    def lost(self, dtype: str = "float16", scale: int = 0) -> float:
        """Share of the nonzero values that become zero in a format, multiplied by ``2**scale`` first."""
        edge = FORMATS[dtype].smallest - 1 - scale
        return sum(n for e, n in self.exponents.items() if e < edge) / max(self.nonzero, 1)

    def subnormal(self, dtype: str = "float16", scale: int = 0) -> float:
        """Share of the nonzero values that are subnormal in a format: they keep fewer significant bits."""
        row = FORMATS[dtype]
        edges = range(row.smallest - 1 - scale, row.normal - scale)
        return sum(n for e, n in self.exponents.items() if e in edges) / max(self.nonzero, 1)

    def overflows(self, dtype: str = "float16", scale: int = 0) -> bool:
        """True if the largest value, multiplied by ``2**scale``, is beyond the format."""
        return self.largest * 2.0**scale > FORMATS[dtype].largest

    def loss_scale(self, dtype: str = "float16") -> int | None:
        """Exponent of the loss scale: of those that do not overflow, the smallest that loses least; or None."""
        fitting = [s for s in range(_LARGEST_SCALE + 1) if not self.overflows(dtype, s)]
        return min(fitting, key=lambda s: (self.lost(dtype, s), s), default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form, with the shares in every format."""
        return {
            "exponents": {str(e): count for e, count in sorted(self.exponents.items())},
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            "lost": {dtype: self.lost(dtype) for dtype in FORMATS},
            "subnormal": {dtype: self.subnormal(dtype) for dtype in FORMATS},
            "overflows": {dtype: self.overflows(dtype) for dtype in FORMATS},
        }
