"""The command line, ``python -m amp_fx COMMAND`` or ``amp-fx COMMAND``: commands are rows of one table.

Results go to stdout, progress and errors to stderr. Colours on a terminal only, and not with NO_COLOR.
Exit codes: 0 done, 1 an error (told in one line), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import amp_fx
from amp_fx.cli.command import PROG
from amp_fx.cli.export_command import EXPORT
from amp_fx.cli.profile_command import PROFILE
from amp_fx.cli.report_commands import REPORT_COMMANDS
from amp_fx.errors import AmpFxError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: arguments without the program's name; None: those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: for ``--help``, ``--version`` and wrong usage, as argparse does.
    """
    args = _parser().parse_args(argv)
    try:
        return _COMMANDS[args.command].run(args)
    except (AmpFxError, OSError) as error:
        # one line, whatever an error of the operating system or of another library holds
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Tools for the amp_fx backend of torch.compile.")
    parser.add_argument("--version", action="version", version=f"amp_fx {amp_fx.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=command.text.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(sub)
    return parser


_COMMANDS = {
    **REPORT_COMMANDS,
    "profile": PROFILE,
    "export": EXPORT,
}
