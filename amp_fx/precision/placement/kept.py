"""Which of the values that a forward keeps for its backward are kept in fewer bits: a budget in bytes picks them.

Each value has the bytes that it takes as it is, in 8 and in 4 bits, and what rounding it adds to the squared error of
the gradients, in units of one operand of a matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: squared error of an operand of a matmul, where a sum averages what is rounded, and of any other value
OPERAND, OTHER = 1, 2


@dataclass(frozen=True)
class KeptValue:
    """One storage that is kept, and the choices for it.

    Attributes:
        name: of its first value.
        size: bytes as it is.
        eight: bytes in 8 bits, scales included; ``size`` where it is not rounded.
        four: bytes in 4 bits; ``eight`` where it is not rounded further.
        error: see above; 0 where fewer bits lose nothing.
        why: where it is not rounded, the reason, in words.
    """

    name: str
    size: int
    eight: int
    four: int
    error: float = OPERAND
    why: str = ""


def choose(values: Sequence[KeptValue], most: int | None) -> dict[str, int] | None:
    """Name -> bits, 8 or 4, of the values that are rounded; None where no choice takes at most so many bytes.

    Without ``most`` every value that can be is in 8 bits. Else the error is the least: exactly, as long as 8 bits are
    enough; below that the values in 4 bits are the best that 8 bits everywhere else leave to choose, and values may
    then be rounded that need not be.
    """
    can = [value for value in values if value.eight < value.size]
    free = [value.name for value in can if not value.error]
    priced = [value for value in can if value.error]
    if most is None:
        return dict.fromkeys(map(_name, can), 8)
    as_is = sum(value.size for value in values) - sum(
        value.size - value.eight for value in can if not value.error
    )
    chosen = _least_error([(value, value.size - value.eight) for value in priced], as_is - most)
    if chosen is not None:
        return {**dict.fromkeys(free, 8), **dict.fromkeys(chosen, 8)}
    in_eight = as_is - sum(value.size - value.eight for value in priced)
    narrow = _least_error([(value, value.eight - value.four) for value in priced], in_eight - most)
    if narrow is None:
        return None
    return {**dict.fromkeys(map(_name, can), 8), **dict.fromkeys(narrow, 4)}


def least_bytes(values: Sequence[KeptValue], bits: int) -> int:
    """The fewest bytes that the values take in 8 or in 4 bits."""
    return sum(value.eight if bits == 8 else value.four for value in values)


def _name(value: KeptValue) -> str:
    return value.name


def _least_error(savings: Sequence[tuple[KeptValue, int]], needed: int) -> list[str] | None:
    """The values with the least error in sum that save so many bytes; None where all of them together do not.

    Values of one error are taken by size, so that a choice is how many of each: all pairs of counts are tried.
    """
    kinds: dict[float, list[tuple[KeptValue, int]]] = {}
    for value, saved in savings:
        if saved > 0:
            kinds.setdefault(value.error, []).append((value, saved))
    best: tuple[float, list[str]] | None = (0.0, []) if needed <= 0 else None
    partial: list[tuple[float, int, list[str]]] = [(0.0, 0, [])]
    for error, group in sorted(kinds.items()):
        group.sort(key=lambda each: (-each[1], each[0].name))
        grown = []
        for cost, saved, names in partial:
            for value, more in [(None, 0), *group]:
                if value is not None:
                    cost, saved, names = cost + error, saved + more, [*names, value.name]
                if saved >= needed:
                    if best is None or cost < best[0]:
                        best = (cost, names)
                    break
                grown.append((cost, saved, names))
        partial = grown
    return None if best is None else best[1]
