"""A batch as the arguments of a call: every function that runs a user's model takes it in one way."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from amp_fx._torch import GROUPS
from amp_fx.errors import AmpFxError, InputError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_WHAT_A_BATCH_IS = (
    "A batch is a tuple of positional arguments, a mapping of keyword arguments, or the only argument."
)
_IMPORTING = Path(importlib.__file__).parent, "<frozen"
#: folders whose lines say nothing about what is wrong in a user's program
_NOT_THE_USERS = tuple(
    str(path) for path in (Path(torch.__file__).parent, Path(__file__).parents[1], *_IMPORTING)
)


def uncompiled(model: Any) -> Any:
    """The program that ``torch.compile`` was given, where the model is what it returned; else the model."""
    return getattr(model, "_orig_mod", model)


def initialised(program: Callable[..., Any], call: Arguments) -> Callable[..., Any]:
    """The program; where lazy modules in it have no sizes yet, a copy that one call has given them."""
    own = [*program.parameters(), *program.buffers()] if isinstance(program, nn.Module) else []
    if not any(isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)) for value in own):
        return program
    found, (args, kwargs) = copy.deepcopy(program), _copies(call)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.no_grad(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        called(found, *args, **kwargs)
    return found


def call_of(program: Callable[..., Any], batch: Any) -> Arguments:
    """The call that a batch stands for: ``(x, y)`` is ``program(x, y)``, ``{"x": x}`` is ``program(x=x)``.

    What the program does not take apart is its only argument as it is: ``forward(self, pair)`` takes a pair. InputError
    for what it takes in no way.
    """
    calls: list[Arguments] = []
    if isinstance(batch, Mapping):
        calls.append(((), {str(name): value for name, value in batch.items()}))
    elif isinstance(batch, (tuple, list)):
        calls.append((tuple(batch), {}))
    # an empty one has no arguments, and is none
    if not calls or batch:
        calls.append(((batch,), {}))
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
    raise InputError(f"{name} takes {signature}, not ({given}): {errors[0]}. {_WHAT_A_BATCH_IS}")


def called(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a user's program; an error of the program becomes an InputError, which names the arguments."""
    try:
        return program(*args, **kwargs)
    except Exception as error:
        shapes = ", ".join([*map(_described, args), *(f"{k}={_described(v)}" for k, v in kwargs.items())])
        raise InputError(
            f"the model cannot be called with ({shapes}): {raised(error)}. {_WHAT_A_BATCH_IS}"
        ) from error


@contextlib.contextmanager
def compiling(program: Callable[..., Any], call: Arguments) -> Iterator[None]:
    """Where what is done to a program inside fails, and the program itself as well, that is an InputError."""
    GROUPS.install()
    try:
        yield
    except AmpFxError:
        raise
    except Exception:
        args, kwargs = _copies(call)
        run = functools.partial(_on_copies, program) if isinstance(program, nn.Module) else program
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            called(run, *args, **kwargs)
        raise


def _copies(call: Arguments) -> Arguments:
    """The call with tensors of its own."""
    found: Arguments = tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, call)
    return found


def _on_copies(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module; what it writes to its buffers goes to copies."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return functional_call(module, buffers, args, kwargs)


def raised(error: BaseException) -> str:
    """An error of a user's code in one line, with the place where it was raised, or torch was called."""
    # what torch adds from the second paragraph on is about its own logs
    text = " ".join(str(error).strip().partition("\n\n")[0].split()).rstrip(".")
    frames = [
        row
        for row in traceback.extract_tb(error.__traceback__)
        if not row.filename.startswith(_NOT_THE_USERS)
    ]
    place = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}{text and f': {text}'}{place}"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
