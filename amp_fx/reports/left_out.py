"""What never became a graph: why, in Dynamo's words where it gives any, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import (
    DynamoWatch,
    LeftOut,
    breaks_without_graph,
    is_left_out_in_place,
    rest_left_out,
)
from amp_fx.graphs.uncompiled import remedy
from amp_fx.plans.plan import Plan
from amp_fx.reports.advice import NOT_COMPILED, Advice

__all__ = ["NotCompiled", "entry_of", "is_compiled_in_place", "left_out_advice"]

#: one line of the first screen, whole
_IN_PLACE_REMEDY = (
    "Use torch.compile(module, backend='amp_fx') instead, or a subclass with a forward of your own"
)

_NO_REASON = (
    "Dynamo makes no graph of it and gives no reason: look for torch.compiler.disable, torch.compiler.set_stance and"
    " TORCHDYNAMO_DISABLE"
)


def is_compiled_in_place(program: Callable[..., Any]) -> bool:
    """True after ``module.compile()``."""
    return getattr(program, "_compiled_call_impl", None) is not None


def entry_of(program: Callable[..., Any]) -> Callable[..., Any]:
    """What to give to ``torch.compile`` so that a module is compiled as its own ``compile`` method does it."""
    return program._call_impl if is_compiled_in_place(program) else program  # pyright: ignore[reportFunctionMemberAccess]


@dataclass
class NotCompiled:
    """What Dynamo says of what it does not compile, while it traces one call.

    Attributes:
        left_out: functions that it gave up.
        breaks: every graph break, also where there was no graph yet.
    """

    left_out: list[LeftOut] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Inside, Dynamo compiles everything anew, and forgets it afterwards."""
        torch.compiler.reset()
        watch = DynamoWatch(self.left_out.append)
        watch.start()
        try:
            yield
            self.breaks.extend(breaks_without_graph())
        finally:
            watch.stop()
            torch.compiler.reset()

    def graph(self, gm: fx.GraphModule) -> None:
        """Notes what a graph says of code after it."""
        if (rest := rest_left_out(gm)) is not None:
            self.left_out.append(rest)


def left_out_advice(
    program: Callable[..., Any], plans: Sequence[Plan], not_compiled: NotCompiled
) -> list[Advice]:
    """A note for everything that runs eagerly although it was to be compiled.

    Args:
        program: a module or function, as the user has it.
        plans: of its graphs.
        not_compiled: what Dynamo said of it.
    """
    left_out, breaks = not_compiled.left_out, not_compiled.breaks
    found = _in_place(program)
    found += [
        Advice(NOT_COMPILED, f"{_what(row)}: {row.reason}", remedy=remedy(row))
        for row in dict.fromkeys(left_out)
    ]
    # before a break without a graph there was nothing to compile; it counts where it is all that is known
    known = {row.reason for row in left_out}
    early = [] if plans else [text for text in breaks if text not in known]
    if not plans and not found and not early:
        found.append(Advice(NOT_COMPILED, _NO_REASON))
    return [*found, *(Advice("graph break", text) for text in early)]


def _what(row: LeftOut) -> str:
    return row.function if row.whole else f"the rest of {row.function}"


def _in_place(program: Callable[..., Any]) -> list[Advice]:
    """Modules of torch's own that were compiled in place, by class."""
    modules = dict(program.named_modules()) if isinstance(program, nn.Module) else {}
    names: dict[str, list[str]] = {}
    for name, module in modules.items():
        if is_compiled_in_place(module) and is_left_out_in_place(module):
            names.setdefault(type(module).__name__, []).append(name)
    return [
        Advice(
            NOT_COMPILED,
            f"{kind}.compile(){_where(paths)} compiles nothing: Dynamo skips functions of torch's own modules",
            remedy=_IN_PLACE_REMEDY,
        )
        for kind, paths in names.items()
    ]


def _where(paths: Sequence[str]) -> str:
    first = next(filter(None, paths), "")
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f" ({first}{more})" if first else ""
