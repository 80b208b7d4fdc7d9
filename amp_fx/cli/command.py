"""What a command of the command line is, and what commands share."""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from amp_fx.errors import AmpFxError

__all__ = ["MODULE", "Command", "literal", "paint", "program", "writable"]

#: how the program is started without its script
MODULE = "python -m amp_fx"

#: the script that pip installs
_SCRIPT = "amp-fx"


@dataclass(frozen=True)
class Command:
    """One row of the table of commands.

    Attributes:
        summary: one line for the list of commands.
        text: what ``COMMAND --help`` says below that line; ends with examples, in which ``%(prog)s`` stands for the
            program and the command.
        arguments: adds the command's arguments to its parser.
        run: does it; returns the exit code.
    """

    summary: str
    text: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def program() -> str:
    """The name that the program was started by."""
    return _SCRIPT if Path(sys.argv[0]).stem == _SCRIPT else MODULE


def literal(text: str) -> dict[str, Any]:
    """Options as reports print them, or as JSON.

    Raises:
        ArgumentTypeError: neither, or no mapping.
    """
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
    """Refuses a file that cannot be written, before the work.

    Raises:
        AmpFxError: its folder is missing or cannot be written, or it is a folder itself.
    """
    for path in map(Path, filter(None, paths)):
        folder = path.absolute().parent
        if path.is_dir():
            raise AmpFxError(f"{str(path)!r} cannot be written: it is a folder.")
        if not folder.is_dir():
            raise AmpFxError(f"{str(path)!r} cannot be written: there is no folder '{Path(path).parent}'.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise AmpFxError(f"{str(path)!r} cannot be written: permission denied.")


def paint(text: str, stream: TextIO) -> str:
    """Headings in bold, on a terminal that wants it."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    if plain:
        return text
    lines = (f"\033[1m{line}\033[0m" if line[:1].strip() else line for line in text.split("\n"))
    return "\n".join(lines)
