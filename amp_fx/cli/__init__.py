"""The command line: ``amp-fx COMMAND`` and ``python -m amp_fx COMMAND``.

Results go to stdout, progress and errors to stderr. Colours on a terminal only, and not with NO_COLOR.
Exit codes: 0 done, 1 an error (told in one line), 2 wrong usage.

Here: one file for each group of commands, and how a model is named on the command line.
Not here: anything that a Python user would miss; commands only call the public functions.
Open ``report_commands.py`` first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import amp_fx
from amp_fx.cli import machine_commands, making_commands, report_commands
from amp_fx.errors import AmpFxError, MissingLibraryError, did_you_mean, install_hint
from amp_fx.precision.plans.files import in_words

__all__ = ["main"]

#: how the program is started without its script, and the script that pip installs
_MODULE, _SCRIPT = "python -m amp_fx", "amp-fx"
#: what is called so in the help may be a file
_FILES = {"FILE", "REPORT", "MODEL", "BEFORE", "AFTER", "PROFILE"}


class _Completion(argparse.Action):
    """Prints what makes a shell complete commands, options, their choices and files."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: Any) -> None:
        try:
            import shtab
        except ModuleNotFoundError as error:
            raise MissingLibraryError(
                f"shell completion takes shtab: {install_hint('completion')}."
            ) from error
        (commands,) = (action for action in parser._actions if action.dest == "command")
        for command in dict(commands.choices or {}).values():
            for action in (row for row in command._actions if row.metavar in _FILES):
                action.complete = shtab.FILE
        parser.prog = _SCRIPT
        print(shtab.complete(parser, values))
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; help and wrong usage raise SystemExit, as argparse does."""
    argv = sys.argv[1:] if argv is None else argv
    name = _SCRIPT if Path(sys.argv[0]).stem == _SCRIPT else _MODULE
    parser = argparse.ArgumentParser(prog=name, description="Tools for the amp_fx backend of torch.compile.")
    parser.add_argument("--version", action="version", version=f"amp_fx {amp_fx.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    shells = "bash, zsh or tcsh: print what completes commands, for the file that the shell reads"
    completion: dict[str, Any] = {"action": _Completion, "choices": ("bash", "zsh", "tcsh"), "help": shells}
    parser.add_argument("--print-completion", metavar="SHELL", **completion)
    report_commands.add_to(commands)
    making_commands.add_to(commands)
    machine_commands.add_to(commands)
    if not argv:
        parser.print_help()
        return 0
    valid = commands.choices
    if argv and not argv[0].startswith("-") and argv[0] not in valid:
        parser.error(f"no command {argv[0]!r}; valid: {', '.join(valid)}.{did_you_mean(argv[0], valid)}")
    try:
        args = parser.parse_args(argv)
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever reads has seen enough, as in `| head`; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AmpFxError, OSError) as error:
        # one line, whatever an error of another library holds
        text = " ".join(in_words(error).split())
        print(f"error: {text.replace(_MODULE, name)}", file=sys.stderr)
        return 1
    return 0
