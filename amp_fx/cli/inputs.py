"""Arguments of commands: models by name or file, options as text, files to write; and how text is shown."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.instruments.batches import raised
from amp_fx.instruments.reports.figures import check_figure


@dataclass(frozen=True)
class Loaded:
    """A model and the inputs to call it with."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Any] | None:
        """All inputs by the names that ``forward`` has for them; None where it does not take them so."""
        try:
            signature = inspect.signature(self.model.forward)
            found = dict(signature.bind(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):
            return None
        kinds = {name: signature.parameters[name].kind for name in found}
        if {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL} & set(kinds.values()):
            return None
        for name in [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]:
            found |= found.pop(name)
        return found

    def batch(self, command: str) -> Any:
        """The inputs as one batch, for a function that takes no keyword arguments beside positional ones.

        AmpFxError where the function takes both, or an argument without a name.
        """
        if not (self.args and self.kwargs):
            return self.kwargs or self.args
        if self.named is None:
            raise AmpFxError(
                f"{command} takes a model called with positional or with keyword arguments, or whose forward has a "
                "name for each."
            )
        return self.named

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs for a function whose options have names of their own, which ``forward`` may have as well."""
        if self.kwargs and self.named is not None:
            return (self.named,), {}
        return self.args, self.kwargs


def load_model(text: str) -> Loaded:
    """Imports and calls ``package.module:callable``, which returns ``(model, args)`` or ``(model, args, kwargs)``.

    ``args`` is a tuple, or one tensor. The working directory is searched, too. AmpFxError for a result of another
    form.
    """
    with users(text):
        made = import_callable(text)()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module):
        model, args, *rest = made
        args = (args,) if isinstance(args, torch.Tensor) else args
        kwargs = rest[0] if rest else {}
        if isinstance(args, (tuple, list)) and isinstance(kwargs, dict):
            return Loaded(model, tuple(args), kwargs)
    found = type(made).__name__
    if isinstance(made, tuple):
        found = f"({', '.join(type(part).__name__ for part in made)})"
    raise AmpFxError(
        f"{text} must return (model, args) or (model, args, kwargs), an nn.Module, a tuple and a dict; got {found}."
    )


def load_program(path: str) -> Loaded:
    """Loads a ``.pt2`` file of ``torch.export.save`` with the example inputs that it holds.

    AmpFxError for a file that is missing, of another kind, or without example inputs.
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

    AmpFxError for a text of another form, and for a module or a callable that is not there.
    """
    module_name, _, name = text.partition(":")
    folder = os.getcwd()
    if module_name.endswith(".py"):
        # a path, as a shell completes it
        path = Path(os.path.relpath(module_name))
        if name and not path.is_file():
            raise AmpFxError(f"there is no file {module_name!r}.")
        if path.parts[0] == os.pardir:
            folder, path = str(path.parent.resolve()), Path(path.name)
        module_name = ".".join(path.with_suffix("").parts)
    if not module_name or not name:
        raise AmpFxError(f"{text!r} is not of the form package.module:callable, as in models.gpt:make_gpt.")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with users(f"the import of {module_name}"):
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
        hint = did_you_mean(name, [key for key, value in vars(module).items() if callable(value)])
        raise AmpFxError(f"module {module_name!r} has no callable {name!r}.{hint}")
    return make


@contextlib.contextmanager
def users(what: str) -> Iterator[None]:
    """Code of the user's own that prepares a model: what it raises is told in one line, with its place.

    Each of its exceptions becomes an AmpFxError.
    """
    try:
        yield
    except AmpFxError:
        raise
    except Exception as error:
        raise AmpFxError(f"{what} fails: {raised(error)}.") from error


def literal(text: str) -> dict[str, Any]:
    """Options as reports print them, or as JSON; anything else is an ArgumentTypeError."""
    text = text.strip().removeprefix("options=")
    value: Any = None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            break
        except (ValueError, SyntaxError, RecursionError):
            continue
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a JSON object nor a Python dictionary")
    return value


def writable(*paths: str | None) -> None:
    """Raises AmpFxError for a file that cannot be written, before the work."""
    for path in map(Path, filter(None, paths)):
        folder = path.absolute().parent
        if path.is_dir():
            raise AmpFxError(f"{str(path)!r} cannot be written: it is a folder.")
        if not folder.is_dir():
            raise AmpFxError(f"{str(path)!r} cannot be written: there is no folder '{path.parent}'.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise AmpFxError(f"{str(path)!r} cannot be written: permission denied.")


def figure_writable(path: str | None, *also: str) -> None:
    """Raises AmpFxError for a figure that cannot be written, or a file that is none nor of the suffixes ``also``."""
    writable(path)
    if path:
        check_figure(Path(path), *also)


def paint(text: str, stream: TextIO) -> str:
    """Headings in bold, on a terminal that wants it."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return "\n".join(f"\033[1m{line}\033[0m" if line[:1].strip() else line for line in text.split("\n"))


def say(line: str) -> None:
    """Progress, and what was written: on stderr, in place of a line of amp_fx.instruments.progress."""
    print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)
