"""A batch as the arguments of a call: every function that runs a user's model takes it in one way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from amp_fx.errors import InputError

__all__ = ["arguments_of", "call_of", "inputs_of"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call_of(program: Callable[..., Any], batch: Any) -> Arguments:
    """The call that a batch stands for: ``(x, y)`` is ``program(x, y)``, ``{"x": x}`` is ``program(x=x)``.

    What the program does not take apart is its only argument as it is: ``forward(self, pair)`` takes a pair. InputError
    for what it takes in no way.
    """
    whole: Arguments = ((batch,), {})
    if isinstance(batch, Mapping):
        apart: Arguments = ((), {str(name): value for name, value in batch.items()})
    elif isinstance(batch, (tuple, list)):
        apart = (tuple(batch), {})
    else:
        apart = whole
    for call in (apart, whole):
        if _refusal(program, call) is None:
            return call
    raise _not_taken(program, apart)


def arguments_of(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The call that arguments stand for: as they are given, or the one batch among them, see :func:`call_of`."""
    if len(args) == 1 and not kwargs:
        return call_of(program, args[0])
    if _refusal(program, (args, kwargs)) is not None:
        raise _not_taken(program, (args, kwargs))
    return args, kwargs


def inputs_of(program: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None) -> Arguments:
    """The call of ``torch.export.export(program, args, kwargs)``, where ``args`` may also be one batch."""
    return arguments_of(program, tuple(args), dict(kwargs)) if kwargs else call_of(program, args)


def _signature(program: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(program.forward if isinstance(program, nn.Module) else program)


def _refusal(program: Callable[..., Any], call: Arguments) -> str | None:
    """Why a signature does not take a call; None if it does, or where there is no signature."""
    try:
        signature = _signature(program)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*call[0], **call[1])
    except TypeError as error:
        return str(error)
    return None


def _not_taken(program: Callable[..., Any], call: Arguments) -> InputError:
    args, kwargs = call
    given = ", ".join([*(type(value).__name__ for value in args), *(f"{name}=" for name in kwargs)])
    name = getattr(program, "__name__", type(program).__name__)
    return InputError(
        f"{name} takes {_signature(program)}, not ({given}): {_refusal(program, call)}. A batch is a "
        "tuple of positional arguments, a mapping of keyword arguments, or the only argument."
    )
