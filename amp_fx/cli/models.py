"""What a command works on: ``package.module:callable``, a function that returns a model and its inputs."""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amp_fx.errors import AmpFxError, did_you_mean

__all__ = ["Loaded", "import_callable", "load_model", "load_program"]


@dataclass(frozen=True)
class Loaded:
    """A model and the inputs to call it with.

    Attributes:
        model: as the function made it.
        args: positional inputs.
        kwargs: keyword inputs.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_model(text: str) -> Loaded:
    """Imports and calls ``package.module:callable``. The working directory is searched, too.

    Args:
        text: the callable takes no arguments and returns ``(model, args)`` or ``(model, args, kwargs)``, where
            ``args`` is a tuple, or one tensor.

    Raises:
        AmpFxError: there is no such module or callable, or it returns something else.
    """
    return _target(import_callable(text)(), text)


def load_program(path: str) -> Loaded:
    """Loads a ``.pt2`` file of ``torch.export.save`` with the example inputs that it holds.

    Raises:
        AmpFxError: no such file, not an exported program, or one without example inputs.
    """
    if not os.path.isfile(path):
        raise AmpFxError(f"there is no file {path!r}.")
    if not zipfile.is_zipfile(path):
        # torch would say so, too, after pages of log
        raise AmpFxError(f"{path!r} is no program that torch.export.save wrote: not a ZIP file.")
    try:
        program = torch.export.load(path)
    except (RuntimeError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise AmpFxError(f"{path!r} is no program that torch.export.save wrote: {error}") from error
    if program.example_inputs is None:
        raise AmpFxError(f"{path!r} holds no example inputs; export it again with some.")
    args, kwargs = program.example_inputs
    return Loaded(program.module(), tuple(args), dict(kwargs))


def import_callable(text: str) -> Callable[..., Any]:
    """Imports what ``package.module:callable`` names. The working directory is searched, too.

    Raises:
        AmpFxError: there is no such module or callable.
    """
    module_name, _, name = text.partition(":")
    if module_name.endswith(".py"):
        # a path, as a shell completes it
        module_name = ".".join(Path(module_name[:-3]).parts)
    if not module_name or not name:
        raise AmpFxError(
            f"{text!r} is not of the form package.module:callable, as in mypackage.models:make_gpt."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise AmpFxError(
            f"there is no module {error.name!r}; give one that can be imported from here."
        ) from error
    make = getattr(module, name, None)
    if not callable(make):
        hint = did_you_mean(name, vars(module))
        raise AmpFxError(f"module {module_name!r} has no callable {name!r}.{hint}")
    return make


def _target(made: Any, text: str) -> Loaded:
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module):
        model, args, *rest = made
        args = (args,) if isinstance(args, torch.Tensor) else args
        kwargs = rest[0] if rest else {}
        if isinstance(args, (tuple, list)) and isinstance(kwargs, dict):
            return Loaded(model, tuple(args), kwargs)
    raise AmpFxError(
        f"{text} must return (model, args) or (model, args, kwargs), an nn.Module, a tuple and a dict; got "
        f"{_describe(made)}."
    )


def _describe(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__
