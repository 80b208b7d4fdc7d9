"""Commands that look at one model: explain, draw, diff, histogram, bench, compare."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import amp_fx
from amp_fx.cli.inputs import (
    Loaded,
    figure_writable,
    import_callable,
    literal,
    load_model,
    load_program,
    paint,
    say,
    users,
    writable,
)
from amp_fx.errors import AmpFxError
from amp_fx.instruments.benching import WAYS
from amp_fx.instruments.comparison.comparing import AGAINST
from amp_fx.instruments.reports.report import SUFFIXES, Report, check_suffix
from amp_fx.viz.graph import check_depth

#: what stands for itself in the text of a command
_WORDS = {
    "{model}": "MODEL is package.module:callable, where the callable takes nothing and returns (model, args) or\n"
    "(model, args, kwargs)",
    "{options}": 'OPTIONS are those of torch.compile(model, backend="amp_fx", options=...), as JSON or as '
    "reports print them.",
    "{against}": ", ".join(AGAINST),
}

#: arguments that several commands have
_FILES: dict[str, Any] = {"action": "append", "default": [], "metavar": "FILE"}
_OPTION: dict[str, Any] = {"type": literal, "default": {}, "metavar": "OPTIONS"}
_SHARED: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "help": "package.module:callable that makes the model"},
    "--loss": {
        "metavar": "package.module:callable",
        "help": "takes what the model returns, and returns the loss",
    },
    "--options": {**_OPTION, "help": "options of the backend"},
    "--target": {"metavar": "NAME", "help": "a GPU that need not be here; see the command targets"},
    "--json": {"action": "store_true", "help": "print JSON instead of text"},
}


def add_command(commands: Any, run: Callable[[argparse.Namespace], None], *shared: str) -> Callable[..., Any]:
    """Adds the command of a function, whose docstring is what ``--help`` says; returns what adds further arguments."""
    summary, _, text = (inspect.getdoc(run) or run.__name__).partition("\n\n")
    for name, words in _WORDS.items():
        text = text.replace(name, words)
    parser = commands.add_parser(
        run.__name__,
        help=summary[0].lower() + summary[1:].rstrip("."),
        description=summary,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    for name in shared:
        parser.add_argument(name, **_SHARED[name])
    return parser.add_argument


def add_to(commands: Any) -> None:
    """Adds the commands of this file."""
    add = add_command(commands, explain, "model", "--options", "--target", "--json")
    add("--table", action="store_true", help="also print calls by op and dtype")
    add("-o", "--output", **_FILES, help=f"also write: {', '.join(SUFFIXES)}")

    add = add_command(commands, draw, "model", "--options", "--target", "--json")
    suffixes = ".html, .svg, .beside.svg, .png or .dot (default: %(default)s)"
    add("-o", "--output", default="amp_fx.html", metavar="FILE", help=suffixes)
    add("--against", metavar="REPORT", help="an earlier report (.json): mark what changed since")
    depth = "levels of modules to show, or all (default: as many as can be read)"
    add("--depth", type=_depth, metavar="N", help=depth)

    add = add_command(commands, histogram, "model", "--loss", "--json")
    add("-o", "--output", metavar="FILE", help="also write .json, .png, .svg or .pdf")

    add = add_command(commands, diff, "--json")
    add("before", metavar="BEFORE", help="a report (.json), a program (.pt2) or package.module:callable")
    add("after", metavar="AFTER", help="likewise")
    add("--before-options", **_OPTION, help="options of the backend for BEFORE")
    add("--after-options", **_OPTION, help="options of the backend for AFTER")

    add = add_command(commands, bench, "model", "--options", "--json")
    add("--ways", metavar="NAMES", help=f"some of {','.join(WAYS)} (default: what is here)")
    calibrated = "callable that returns the batches int8 is calibrated on (default: the inputs of MODEL)"
    add("--batches", metavar="package.module:callable", help=calibrated)
    add("--seconds", type=float, default=10.0, metavar="S", help="time of all calls (default: %(default)s)")
    add("-o", "--output", **_FILES, help="also write: .json, or the chart as .png, .svg or .pdf")

    add = add_command(commands, compare, "model", "--loss", "--options", "--json")
    against = f"{', '.join(AGAINST)}, or OPTIONS of another run (default: %(default)s)"
    add("--against", type=_against, default="fp32", metavar="WHAT", help=against)
    add("--scale", type=float, metavar="S", help="loss scale of fp16")
    add("--calls", action="store_true", help="also compare the result of every call (in --json)")
    add("-o", "--output", **_FILES, help="also write: .json, or the picture as .html, .svg, .png, .dot")


def explain(args: argparse.Namespace) -> None:
    """Say what runs in which precision, what the casts cost, and what to change.

    {model}, or a .pt2 file of torch.export.save, or a report that explain wrote as .json.
    {options}

    Examples:
      %(prog)s train:build
      %(prog)s train:build --options '{"dtype": "float16"}' --table
      %(prog)s train:build -o before.json -o report.md
      %(prog)s model.pt2 --json | jq .summary.shares
      %(prog)s train:build --target cuda:h100
    """
    _check_files(args.output)
    report = _report(args.model, args.options, args.target)
    text = f"{report}\n\n{report.table()}" if args.table else str(report)
    _print(text, report.to_dict(), args.json)
    for path in args.output:
        say(f"wrote {report.save(path)}")


def draw(args: argparse.Namespace) -> None:
    """Draw where the casts are: a page for the browser, or SVG, PNG and dot through Graphviz.

    {model}, or a .pt2 file of torch.export.save, or a report that explain wrote as .json.
    {options}

    Examples:
      %(prog)s train:build -o picture.html
      %(prog)s report.json -o picture.svg
      %(prog)s report.json -o whole.svg --depth all
      %(prog)s train:build --against before.json -o changed.html
    """
    _check_files([args.output])
    earlier = Report.load(args.against) if args.against else None
    path = _report(args.model, args.options, args.target).save(args.output, against=earlier, depth=args.depth)
    _print(f"wrote {path}", {"path": str(path)}, args.json)


def histogram(args: argparse.Namespace) -> None:
    """Count gradients and activations by exponent, and find the loss scale.

    {model}, or a .pt2 file of torch.export.save.
    It is run once, forward and backward, without amp_fx. The model returns its loss, or has it in .loss;
    otherwise --loss names a callable that takes what the model returns.

    Examples:
      %(prog)s train:build
      %(prog)s train:build --loss train:loss -o histogram.png
      %(prog)s train:build --json | jq .loss_scale
    """
    figure_writable(args.output, ".json")
    loaded = _load(args.model)
    loss = import_callable(args.loss) if args.loss else None
    found = amp_fx.histogram(loaded.model, loaded.batch("histogram"), loss)
    _print(str(found), found.to_dict(), args.json)
    if args.output:
        say(f"wrote {found.save(args.output)}")


def diff(args: argparse.Namespace) -> None:
    """Say what changed between two reports.

    BEFORE and AFTER are each a MODEL. {model}, or a .pt2 file of torch.export.save, or a report
    that explain wrote as .json.
    {options}

    Examples:
      %(prog)s before.json train:build
      %(prog)s before.json after.json --json
      %(prog)s train:build train:build --after-options '{"policy": "fast"}'
    """
    before = _report(args.before, args.before_options)
    found = before.diff(_report(args.after, args.after_options))
    _print(str(found), found.to_dict(), args.json)


def bench(args: argparse.Namespace) -> None:
    """Time inference of a model: eager, autocast, amp_fx, a package, int8, OpenVINO where it is installed.

    {model}; it is put into evaluation mode, and called in turn in each way.
    {options}
    Leave the machine idle meanwhile.

    Examples:
      %(prog)s serve:build
      %(prog)s serve:build --ways autocast,amp_fx,int8 --batches serve:batches --seconds 30
      %(prog)s serve:build -o bench.png -o bench.json
    """
    for path in args.output:
        figure_writable(path, ".json")
    loaded = load_model(args.model)
    batches: Any = None
    if args.batches:
        with users(args.batches):
            batches = import_callable(args.batches)()
    found = amp_fx.bench(
        loaded.model.eval(),
        loaded.args,
        loaded.kwargs,
        ways=args.ways.split(",") if args.ways else None,
        batches=batches,
        seconds=args.seconds,
        options=args.options,
        say=say,
    )
    _print(str(found), found.to_dict(), args.json)
    for path in args.output:
        say(f"wrote {found.save(path)}")


def compare(args: argparse.Namespace) -> None:
    """Name the module where a compiled run departs from fp32, and what would mend it.

    {model}. With a loss, gradients are compared, too: the model returns it or has it in .loss,
    otherwise --loss names a callable that takes what the model returns.
    {options}
    --against is {against}, or other OPTIONS.

    Examples:
      %(prog)s train:build
      %(prog)s train:build --loss train:loss --options '{"dtype": "float16"}' -o compared.html
      %(prog)s train:build --against '{"policy": "fast"}' --calls
      %(prog)s train:build --json | jq .first_nonfinite
    """
    _check_files(args.output)
    loaded = load_model(args.model)
    given, named = loaded.call
    found = amp_fx.compare(
        loaded.model,
        *given,
        loss=import_callable(args.loss) if args.loss else None,
        against=args.against,
        options=args.options,
        calls=args.calls,
        scale=args.scale,
        **named,
    )
    _print(str(found), found.to_dict(), args.json)
    for path in args.output:
        say(f"wrote {found.save(path)}")


def _depth(text: str) -> int | str:
    depth = int(text) if text.isdecimal() else text
    try:
        check_depth(depth)
    except AmpFxError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return depth


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
    given, named = loaded.call
    return amp_fx.explain(loaded.model, *given, options=options, target=target, **named)


def _print(text: str, data: Any, as_json: bool) -> None:
    print(json.dumps(data) if as_json else paint(text, sys.stdout))
