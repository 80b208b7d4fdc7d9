"""Commands that look at one model: explain, draw, diff, histogram, compare."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import amp_fx
from amp_fx.cli.inputs import Loaded, import_callable, literal, load_model, load_program, paint, say, writable
from amp_fx.comparison.comparing import AGAINST
from amp_fx.errors import AmpFxError
from amp_fx.reports.histograms import NoLossError
from amp_fx.reports.report import SUFFIXES, Report, check_suffix

__all__ = ["MODEL", "add_command", "add_to"]

_CALLABLE = "package.module:callable"

#: what a model is in commands that take nothing else
MODEL = f"""MODEL is {_CALLABLE}, where the callable takes nothing and returns (model, args) or
(model, args, kwargs)"""

_PROGRAM = f"{MODEL}, or a .pt2 file of torch.export.save"

_OPTIONS = 'OPTIONS are those of torch.compile(model, backend="amp_fx", options=...), as JSON or as reports print them.'

_REPORT = f"{_PROGRAM}, or a report that explain wrote as .json.\n{_OPTIONS}"


#: arguments that several commands have
_FILES: dict[str, Any] = {"action": "append", "default": [], "metavar": "FILE"}
_OPTION: dict[str, Any] = {"type": literal, "default": {}, "metavar": "OPTIONS"}
_SHARED: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "help": "see below"},
    "loss": {"metavar": _CALLABLE, "help": "outputs -> loss"},
    "options": {**_OPTION, "help": "options of the backend"},
    "target": {
        "metavar": "NAME",
        "help": "a GPU that need not be in this machine; see the command targets",
    },
    "json": {"action": "store_true", "help": "print JSON instead of text"},
}


def add_command(
    commands: Any,
    run: Callable[[argparse.Namespace], None],
    summary: str,
    text: str,
    examples: str,
    shared: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Adds a command that has the name of a function: what ``--help`` says, and arguments that others have, too.

    ``%(prog)s`` is put before each line of the examples.
    """
    lines = (f"  %(prog)s {line}".rstrip() for line in examples.strip().splitlines())
    parser = commands.add_parser(
        run.__name__,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="\n".join((text, "", "examples:", *lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    for name in shared:
        parser.add_argument(name if name == "model" else f"--{name}", **_SHARED[name])
    return parser


def add_to(commands: Any) -> None:
    """Adds the commands of this file."""
    parser = add_command(
        commands,
        explain,
        "say what runs in which precision, what the casts cost, and what to change",
        _REPORT,
        """
train:build
train:build --options '{"dtype": "float16"}' --table
train:build -o before.json -o report.md
model.pt2 --json | jq .summary.shares
train:build --target cuda:h100""",
        ("model", "options", "target", "json"),
    )
    parser.add_argument("--table", action="store_true", help="also print calls by op and dtype")
    parser.add_argument("-o", "--output", **_FILES, help=f"also write: {', '.join(SUFFIXES)}")

    parser = add_command(
        commands,
        draw,
        "draw where the casts are: a page for the browser, or SVG, PNG and dot through Graphviz",
        _REPORT,
        """
train:build -o picture.html
report.json -o picture.svg
train:build --against before.json -o changed.html""",
        ("model", "options", "target", "json"),
    )
    suffixes = ".html, .svg, .beside.svg, .png or .dot (default: %(default)s)"
    parser.add_argument("-o", "--output", default="amp_fx.html", metavar="FILE", help=suffixes)
    earlier = "an earlier report (.json): mark what changed since"
    parser.add_argument("--against", metavar="REPORT", help=earlier)

    parser = add_command(
        commands,
        histogram,
        "count gradients and activations by exponent, and find the loss scale",
        f"{_PROGRAM}.\nIt is run once, forward and backward, without amp_fx. The model returns its loss, or has it in "
        ".loss;\notherwise --loss names a callable that takes what the model returns.",
        """
train:build
train:build --loss train:loss -o histogram.png
train:build --json | jq .loss_scale""",
        ("model", "loss", "json"),
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="also write .json, .png, .svg or .pdf")

    parser = add_command(
        commands,
        diff,
        "say what changed between two reports",
        _REPORT,
        """
before.json train:build
before.json after.json --json
train:build train:build --after-options '{"policy": "fast"}'""",
        ("json",),
    )
    parser.add_argument("before", metavar="BEFORE", help="see below")
    parser.add_argument("after", metavar="AFTER", help="see below")
    parser.add_argument("--before-options", **_OPTION, help="options of the backend for BEFORE")
    parser.add_argument("--after-options", **_OPTION, help="options of the backend for AFTER")

    parser = add_command(
        commands,
        compare,
        "say in which module a compiled run leaves fp32, and what would mend it",
        f"{MODEL}. With a loss, gradients are compared, too: the model returns it or has it in .loss,\n"
        f"otherwise --loss names a callable that takes what the model returns.\n{_OPTIONS}\n"
        f"--against is {', '.join(AGAINST)}, or other OPTIONS.",
        """
train:build
train:build --loss train:loss --options '{"dtype": "float16"}' -o compared.html
train:build --against '{"policy": "fast"}' --calls
train:build --json | jq .first_nonfinite""",
        ("model", "loss", "options", "json"),
    )
    against = "see below (default: %(default)s)"
    parser.add_argument("--against", type=_against, default="fp32", metavar="WHAT", help=against)
    parser.add_argument("--scale", type=float, metavar="S", help="loss scale of fp16")
    every = "also compare the result of every call (in --json)"
    parser.add_argument("--calls", action="store_true", help=every)
    written = "also write: .json, or the picture as .html, .svg, .png, .dot"
    parser.add_argument("-o", "--output", **_FILES, help=written)


def explain(args: argparse.Namespace) -> None:
    """Runs the command."""
    _check_files(args.output)
    report = _report(args.model, args.options, args.target)
    table = f"\n\n{report.table()}" if args.table else ""
    _print(f"{report}{table}", report.to_dict(), args.json)
    for path in args.output:
        say(f"wrote {report.save(path)}")


def draw(args: argparse.Namespace) -> None:
    """Runs the command."""
    _check_files([args.output])
    earlier = Report.load(args.against) if args.against else None
    path = _report(args.model, args.options, args.target).save(args.output, against=earlier)
    _print(f"wrote {path}", {"path": str(path)}, args.json)


def histogram(args: argparse.Namespace) -> None:
    """Runs the command."""
    writable(args.output)
    loaded = _load(args.model)
    loss = import_callable(args.loss) if args.loss else None
    try:
        found = amp_fx.histogram(loaded.model, loaded.batch("histogram"), loss)
    except NoLossError as error:
        if args.loss:
            text = f"--loss {args.loss} must return a tensor with one element; got {error.found}."
        else:
            text = (
                f"no loss: {args.model} returns {error.found}. Name a function that makes a tensor with one element "
                f"of it: --loss {_CALLABLE}."
            )
        raise AmpFxError(text) from error
    _print(str(found), found.to_dict(), args.json)
    if args.output:
        say(f"wrote {found.save(args.output)}")


def diff(args: argparse.Namespace) -> None:
    """Runs the command."""
    before = _report(args.before, args.before_options)
    found = before.diff(_report(args.after, args.after_options))
    _print(str(found), found.to_dict(), args.json)


def compare(args: argparse.Namespace) -> None:
    """Runs the command."""
    _check_files(args.output)
    loaded = load_model(args.model)
    found = amp_fx.compare(
        loaded.model,
        *loaded.args,
        loss=import_callable(args.loss) if args.loss else None,
        against=args.against,
        options=args.options,
        calls=args.calls,
        scale=args.scale,
        **loaded.kwargs,
    )
    _print(str(found), found.to_dict(), args.json)
    for path in args.output:
        say(f"wrote {found.save(path)}")


def _against(text: str) -> str | dict[str, Any]:
    return literal(text) if text.strip().startswith(("{", "options=")) else text


def _check_files(paths: list[str]) -> None:
    writable(*paths)
    for path in paths:
        check_suffix(path)


def _load(spec: str) -> Loaded:
    return load_program(spec) if spec.endswith(".pt2") else load_model(spec)


def _report(spec: str, options: dict[str, Any], target: str | None = None) -> Report:
    if spec.endswith(".json"):
        if options or target:
            raise AmpFxError(f"{spec!r} is a report already: options are for a MODEL, and so is a target.")
        return Report.load(spec)
    loaded = _load(spec)
    return amp_fx.explain(loaded.model, *loaded.args, options=options, target=target, **loaded.kwargs)


def _print(text: str, data: Any, as_json: bool) -> None:
    print(json.dumps(data) if as_json else paint(text, sys.stdout))
