"""The command line, ``python -m amp_fx COMMAND`` or ``amp-fx COMMAND``: commands are rows of one table.

Results go to stdout, progress and errors to stderr. Colours on a terminal only, and not with NO_COLOR.
Exit codes: 0 done, 1 an error (told in one line), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import amp_fx
from amp_fx.cli.calibrate_command import CALIBRATE
from amp_fx.cli.command import MODULE, program
from amp_fx.cli.compare_command import COMPARE
from amp_fx.cli.export_command import EXPORT
from amp_fx.cli.profile_command import PROFILE
from amp_fx.cli.report_commands import REPORT_COMMANDS
from amp_fx.cli.targets_command import TARGETS_COMMAND
from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.plans.files import in_words

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
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        parser.error(
            f"no command {argv[0]!r}; valid: {', '.join(_COMMANDS)}.{did_you_mean(argv[0], _COMMANDS)}"
        )
    args = parser.parse_args(argv)
    try:
        code = _COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # whoever reads has seen enough, as in `| head`; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AmpFxError, OSError) as error:
        # one line, whatever an error of another library holds
        text = " ".join(in_words(error).split())
        print(f"error: {text.replace(MODULE, program())}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program(), description="Tools for the amp_fx backend of torch.compile."
    )
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
    "compare": COMPARE,
    "calibrate": CALIBRATE,
    "targets": TARGETS_COMMAND,
    "profile": PROFILE,
    "export": EXPORT,
}
