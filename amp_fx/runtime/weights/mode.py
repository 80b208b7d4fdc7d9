"""The lifetime of a graph's weights, and its reason: tables of rows, of which the first that holds decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Facts:
    """The facts of a graph and its options that :func:`weights_mode` reads, besides ``weights``."""

    on_cpu: bool  # and nowhere else
    writes_to_shared: bool  # before torch 2.13, which asks packed weights for their memory then
    in_eager_numerics: bool
    has_fp8: bool  # among its inputs
    #: something is low or below, or convolves: packing takes no memory that nothing else takes
    gains: bool
    tunes_kernels: bool  # Inductor is to choose kernels by their time, for which it wants constants


class Mode(NamedTuple):
    """The lifetime of a graph's weights.

    Attributes:
        name: ``"cast"``: in each call. ``"copies"``: low copies are kept. ``"packed"``: all that follows from weights
            alone is kept, folded and packed. ``"code"``: weights are constants of the code.
        reason: why; a half sentence.
        wide: linears in fp32 are packed, too.
        may_change: False: a changed weight is an error.
    """

    name: str
    reason: str
    wide: bool = False
    may_change: bool = True

    def __str__(self) -> str:
        return f"{_WORDS[self.name]}: {self.reason}"


_WORDS = {
    "cast": "cast in each call",
    "copies": "low copies are kept",
    "packed": "packed copies are kept",
    "code": "part of the code",
}


def casts_in_each_call(option: str, *, with_gradients: bool, in_inference_mode: bool) -> str:
    """Why nothing that is made of weights lives across calls, whatever the graph; empty where it may.

    Args:
        option: ``weights``.
        with_gradients: gradients are on.
        in_inference_mode: the program has called the compiled code under ``torch.inference_mode``.
    """
    if with_gradients:
        return "gradients are on, and steps change weights"
    if option == "cast":
        return "weights='cast'"
    if option == "auto" and not in_inference_mode:
        return "weights='auto' keeps copies under torch.inference_mode alone"
    return ""


_Row = tuple[str, str, Callable[[str, Facts], bool]]

_ROWS: tuple[_Row, ...] = (
    (
        "code",
        "weights='freeze', and Inductor tunes kernels",
        lambda option, f: option == "freeze" and f.tunes_kernels,
    ),
    (
        "code",
        "weights='freeze', where oneDNN packs nothing",
        lambda option, f: option == "freeze" and (not f.on_cpu or f.writes_to_shared),
    ),
    ("packed", "weights='freeze'", lambda option, _: option == "freeze"),
    ("copies", "nothing but a CPU takes packed weights", lambda _, f: not f.on_cpu),
    ("copies", "the graph writes to inputs that share memory", lambda _, f: f.writes_to_shared),
    ("copies", "numerics='eager' rounds where folded norms do not", lambda _, f: f.in_eager_numerics),
    ("copies", "oneDNN packs no fp8", lambda _, f: f.has_fp8),
    (
        "copies",
        "packed weights of linears in fp32 would take their memory once more",
        lambda option, f: option == "auto" and not f.gains,
    ),
    ("code", "Inductor tunes kernels", lambda _, f: f.tunes_kernels),
    ("packed", "oneDNN multiplies packed weights faster", lambda _, f: True),
)


def weights_mode(option: str, facts: Facts, *, strict: bool) -> Mode:
    """The lifetime of a graph's weights where they may live across calls.

    Args:
        option: ``weights``.
        facts: of the graph.
        strict: weights that are frozen must not change.
    """
    name, reason = next((name, reason) for name, reason, holds in _ROWS if holds(option, facts))
    return Mode(name, reason, wide=option != "auto", may_change=option != "freeze" or not strict)
