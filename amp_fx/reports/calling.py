"""Calls of a user's program that leave no trace, and what Dynamo made no graph of in them."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from amp_fx._torch import breaks_since_reset, given_up, is_left_out_in_place
from amp_fx.plans.plan import Plan
from amp_fx.reports.advice import NOT_COMPILED, Advice

__all__ = ["NotCompiled", "entry_of", "left_out_advice", "plain", "untouched"]

#: What Dynamo cannot take, by the beginning of its message, and what to do. Its own hint for recurrent layers is
#: torch._dynamo.config.allow_rnn, with which Inductor fails on an LSTM in training (torch 2.13, CPU).
_REMEDIES = {
    "Attempted to wrap RNN, GRU, or LSTM": (
        "Call the layer in a method of its own with @torch.compiler.disable: what is around it is compiled then"
    ),
}

#: one line of the first screen, whole
_IN_PLACE_REMEDY = (
    "Use torch.compile(module, backend='amp_fx') instead, or a subclass with a forward of your own"
)

_NO_REASON = (
    "Dynamo makes no graph of it and gives no reason: look for torch.compiler.disable, torch.compiler.set_stance and"
    " TORCHDYNAMO_DISABLE"
)


@contextlib.contextmanager
def untouched(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields copies of the arguments; afterwards the model and the random generators are as they were."""
    modules = list(program.modules()) if isinstance(program, nn.Module) else []
    attributes = [
        (module, dict(vars(module)), dict(module._buffers), dict(module._parameters)) for module in modules
    ]
    held = [value for _, _, *tables in attributes for table in tables for value in table.values()]
    # parameters too: spectral norm and the like write to them
    values = [(value, value.detach().clone()) for value in dict.fromkeys(v for v in held if v is not None)]
    gradients = [(value, value.grad) for value, _ in values]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    for module in modules:
        # what Module.compile() made runs elsewhere: here every module is as it was before
        vars(module).pop("_compiled_call_impl", None)
    # a reducer that waits for gradients would refuse the next step
    alone = program.no_sync() if isinstance(program, DistributedDataParallel) else contextlib.nullcontext()
    try:
        with torch.random.fork_rng(devices), _other_generators(), alone:
            yield tree_map(_copy, (args, dict(kwargs)))
    finally:
        for module, attributes_before, buffers, parameters in attributes:
            vars(module).clear()
            vars(module).update(attributes_before)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.clear()
            module._parameters.update(parameters)
        with torch.no_grad():
            for value, before in values:
                # a value that is not equal to itself is not a number: written back, it is what it was
                if not torch.equal(value, before):
                    value.copy_(before)
        for value, gradient in gradients:
            value.grad = gradient


@contextlib.contextmanager
def _other_generators() -> Iterator[None]:
    """Python's and NumPy's random numbers go on afterwards where they were."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def plain(value: Any) -> Any:
    """Model outputs of transformers and data classes are mappings that pytree does not know."""
    return dict(value) if isinstance(value, Mapping) else value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    # caches of transformers and other objects that a call may write to
    return copy.deepcopy(value)


# --- what never becomes a graph: why, in Dynamo's words where it gives any, and what to do ---


def entry_of(program: Callable[..., Any]) -> Callable[..., Any]:
    """What to give to ``torch.compile`` so that a module is compiled as its own ``compile`` method does it."""
    return program._call_impl if _is_compiled_in_place(program) else program  # pyright: ignore[reportFunctionMemberAccess]


def _is_compiled_in_place(program: Callable[..., Any]) -> bool:
    return getattr(program, "_compiled_call_impl", None) is not None


@dataclass
class NotCompiled:
    """What Dynamo says of what it does not compile, while it traces one call."""

    #: why it gave up functions as a whole, or from some line on
    given_up: list[str] = field(default_factory=list)
    #: every graph break, also where there was no graph yet
    breaks: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Inside, Dynamo compiles everything anew, and forgets it afterwards."""
        torch.compiler.reset()
        before = given_up()
        try:
            yield
            self.breaks.extend(breaks_since_reset())
            self.given_up.extend(text for text, times in given_up().items() if times > before.get(text, 0))
        finally:
            torch.compiler.reset()


def left_out_advice(
    program: Callable[..., Any], plans: Sequence[Plan], not_compiled: NotCompiled
) -> list[Advice]:
    """A note for everything that runs eagerly although it was to be compiled; ``program`` as the user has it."""
    found = [*_in_place(program), *map(_given_up, dict.fromkeys(not_compiled.given_up))]
    # before a break without a graph there was nothing to compile; it counts where it is all that is known
    early = [] if plans or not_compiled.given_up else dict.fromkeys(not_compiled.breaks)
    if not plans and not found and not early:
        found.append(Advice(NOT_COMPILED, _NO_REASON))
    return [*found, *(Advice("graph break", text) for text in early)]


def _given_up(message: str) -> Advice:
    """Reads a message of Dynamo's: the cause is its first line, hints have lines of their own."""
    lines = [line.strip() for line in message.strip().splitlines()]
    cause = lines[0].rstrip(".")
    known = [text for start, text in _REMEDIES.items() if cause.startswith(start)]
    hints = [line.removeprefix("Hint: ").rstrip(".") for line in lines if line.startswith("Hint: ")]
    return Advice(NOT_COMPILED, cause, remedy=[*known, *hints, ""][0])


def _in_place(program: Callable[..., Any]) -> list[Advice]:
    """Modules of torch's own that were compiled in place, by class."""
    modules = dict(program.named_modules()) if isinstance(program, nn.Module) else {}
    names: dict[str, list[str]] = {}
    for name, module in modules.items():
        if _is_compiled_in_place(module) and is_left_out_in_place(module):
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
