"""What casts cost, as plain data that reports fill in and pictures show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CastSum", "Cost", "ModuleCasts"]


@dataclass(frozen=True)
class Cost:
    """What casts cost in all graphs of a report.

    Attributes:
        casts: conversions between floating dtypes in the graphs.
        cast_bytes: what they read and write if each is a kernel of its own.
        kernels: kernels that do nothing but cast, after Inductor's fusion; None where it was not asked.
        kernel_bytes: what these read and write.
        moved: what all kernels read and write.
    """

    casts: int
    cast_bytes: int
    kernels: int | None = None
    kernel_bytes: int | None = None
    moved: int | None = None


@dataclass(frozen=True)
class CastSum:
    """Casts of one kind in one module, or in several equal ones together.

    Attributes:
        name: whose they are, ``"amp_fx"`` or ``"torch.autocast"``.
        phase: ``"forward"`` or ``"backward"``.
        what: ``"weight"``, ``"activation"``, ``"gradient"``, or ``"weight gradient"``.
        before: dtype name.
        after: dtype name.
        casts: how many there are in the graphs.
        bytes: what they read and write if each is a kernel of its own.
        kernels: how many are kernels of their own; the others are fused.
        kernel_bytes: what these read and write.
    """

    name: str
    phase: str
    what: str
    before: str
    after: str
    casts: int
    bytes: int
    kernels: int
    kernel_bytes: int


@dataclass(frozen=True)
class ModuleCasts:
    """What is cast in one module, or in equal ones together.

    Attributes:
        module: path, with ``*`` for the numbers of repeated blocks; empty outside any module.
        times: how many modules have this path.
        dtypes: ``"amp_fx"`` or ``"torch.autocast"`` -> what it computes in.
        casts: those of both.
    """

    module: str
    times: int
    dtypes: dict[str, str]
    casts: list[CastSum]

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form."""
        return asdict(self)
