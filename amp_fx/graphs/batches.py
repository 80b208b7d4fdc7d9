"""A batch as the arguments of a call: every function that runs a user's model takes it in one way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from amp_fx.errors import InputError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call_of(program: Callable[..., Any], batch: Any) -> Arguments:
    """The call that a batch stands for: ``(x, y)`` is ``program(x, y)``, ``{"x": x}`` is ``program(x=x)``.

    What the program does not take apart is its only argument as it is: ``forward(self, pair)`` takes a pair. InputError
    for what it takes in no way.
    """
    calls: list[Arguments] = [((batch,), {})]
    if isinstance(batch, Mapping):
        calls.insert(0, ((), {str(name): value for name, value in batch.items()}))
    elif isinstance(batch, (tuple, list)):
        calls.insert(0, (tuple(batch), {}))
    return _first_taken(program, calls)


def arguments_of(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The call that arguments stand for: as they are given, or the one batch among them, see :func:`call_of`."""
    is_batch = len(args) == 1 and not kwargs
    return call_of(program, args[0]) if is_batch else _first_taken(program, [(args, kwargs)])


def inputs_of(program: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None) -> Arguments:
    """The call of ``torch.export.export(program, args, kwargs)``, where ``args`` may also be one batch."""
    return arguments_of(program, tuple(args), dict(kwargs)) if kwargs else call_of(program, args)


def _first_taken(program: Callable[..., Any], calls: Sequence[Arguments]) -> Arguments:
    """The first call that the program's signature takes, or where it has none; else an error about the first."""
    errors: list[TypeError] = []
    for args, kwargs in calls:
        try:
            signature = inspect.signature(program.forward if isinstance(program, nn.Module) else program)
        except (TypeError, ValueError):
            return args, kwargs
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            errors.append(error)
        else:
            return args, kwargs
    args, kwargs = calls[0]
    given = ", ".join([*(type(value).__name__ for value in args), *(f"{name}=" for name in kwargs)])
    name = getattr(program, "__name__", type(program).__name__)
    raise InputError(
        f"{name} takes {signature}, not ({given}): {errors[0]}. A batch is a tuple of positional arguments, a mapping "
        "of keyword arguments, or the only argument."
    )
