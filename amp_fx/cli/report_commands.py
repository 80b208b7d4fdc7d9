"""Commands about one model: explain, draw, histogram, diff."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import amp_fx
from amp_fx.cli.command import Command, literal, paint, writable
from amp_fx.cli.models import Loaded, import_callable, load_model, load_program
from amp_fx.errors import AmpFxError
from amp_fx.reports.histograms import NoLossError
from amp_fx.reports.report import SUFFIXES, Report, check_suffix

__all__ = ["REPORT_COMMANDS"]

_MODEL = """
MODEL is package.module:callable, where the callable takes nothing and returns (model, args) or
(model, args, kwargs), or a .pt2 file of torch.export.save"""

_REPORT = f"""{_MODEL}, or a report that explain wrote as .json.
OPTIONS are those of torch.compile(model, backend="amp_fx", options=...), as JSON or as reports print them."""


def _add_model(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name, metavar=name.upper(), help="see below")


def _add_options(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    parser.add_argument(name, type=literal, default={}, metavar="OPTIONS", help=help)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _load(spec: str) -> Loaded:
    return load_program(spec) if spec.endswith(".pt2") else load_model(spec)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="NAME", help="a GPU that need not be in this machine; see the command targets"
    )


def _report(spec: str, options: dict[str, Any], target: str | None = None) -> Report:
    if spec.endswith(".json"):
        if options or target:
            raise AmpFxError(f"{spec!r} is a report already: options are for a MODEL, and so is a target.")
        return Report.load(spec)
    loaded = _load(spec)
    return amp_fx.explain(loaded.model, *loaded.args, options=options, target=target, **loaded.kwargs)


def _print(text: str, data: Any, as_json: bool) -> None:
    print(json.dumps(data) if as_json else paint(text, sys.stdout))


def _say(line: str) -> None:
    print(line, file=sys.stderr)


_EXPLAIN_TEXT = f"""{_REPORT}

examples:
  %(prog)s train:build
  %(prog)s train:build --options '{{"dtype": "float16"}}' --table
  %(prog)s train:build -o before.json -o report.md
  %(prog)s model.pt2 --json | jq .summary.shares
  %(prog)s train:build --target cuda:h100
"""


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, "model")
    _add_options(parser, "--options", "options of the backend")
    _add_target(parser)
    parser.add_argument("--table", action="store_true", help="also print calls by op and dtype")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help=f"also write: {', '.join(SUFFIXES)}",
    )
    _add_json(parser)


def _explain(args: argparse.Namespace) -> int:
    writable(*args.output)
    for path in args.output:
        check_suffix(path)
    report = _report(args.model, args.options, args.target)
    table = f"\n\n{report.table()}" if args.table else ""
    _print(f"{report}{table}", report.to_dict(), args.json)
    for path in args.output:
        _say(f"wrote {report.save(path)}")
    return 0


_DRAW_TEXT = f"""{_REPORT}

examples:
  %(prog)s train:build -o picture.html
  %(prog)s report.json -o picture.svg
  %(prog)s train:build --against before.json -o changed.html
"""


def _draw_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, "model")
    _add_options(parser, "--options", "options of the backend")
    _add_target(parser)
    parser.add_argument(
        "-o", "--output", default="amp_fx.html", metavar="FILE",
        help=".html, .svg, .beside.svg, .png or .dot (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--against", metavar="REPORT", help="an earlier report (.json): mark what changed since"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def _draw(args: argparse.Namespace) -> int:
    writable(args.output)
    check_suffix(args.output)
    earlier = Report.load(args.against) if args.against else None
    path = _report(args.model, args.options, args.target).save(args.output, against=earlier)
    _print(f"wrote {path}", {"path": str(path)}, args.json)
    return 0


_HISTOGRAM_TEXT = f"""{_MODEL}.
It is run once, forward and backward, without amp_fx. The model returns its loss, or has it in .loss;
otherwise --loss names a callable that takes what the model returns.

examples:
  %(prog)s train:build
  %(prog)s train:build --loss train:loss -o histogram.png
  %(prog)s train:build --json | jq .loss_scale
"""


def _histogram_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, "model")
    parser.add_argument("--loss", metavar="package.module:callable", help="outputs -> loss")
    parser.add_argument("-o", "--output", metavar="FILE", help="also write .json, .png, .svg or .pdf")
    _add_json(parser)


def _histogram(args: argparse.Namespace) -> int:
    writable(args.output)
    loaded = _load(args.model)
    if loaded.args and loaded.kwargs:
        raise AmpFxError(
            "histogram takes a model called with positional or with keyword arguments, not both."
        )
    loss = import_callable(args.loss) if args.loss else None
    try:
        found = amp_fx.histogram(loaded.model, loaded.kwargs or loaded.args, loss)
    except NoLossError as error:
        raise AmpFxError(_no_loss(error, args)) from error
    _print(str(found), found.to_dict(), args.json)
    if args.output:
        _say(f"wrote {found.save(args.output)}")
    return 0


def _no_loss(error: NoLossError, args: argparse.Namespace) -> str:
    if args.loss:
        return f"--loss {args.loss} must return a tensor with one element; got {error.found}."
    return (
        f"no loss: {args.model} returns {error.found}. Name a function that makes a tensor with one element of it:"
        " --loss package.module:callable."
    )


_DIFF_TEXT = f"""{_REPORT}

examples:
  %(prog)s before.json train:build
  %(prog)s before.json after.json --json
  %(prog)s train:build train:build --after-options '{{"policy": "fast"}}'
"""


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, "before", "after")
    _add_options(parser, "--before-options", "options of the backend for BEFORE")
    _add_options(parser, "--after-options", "options of the backend for AFTER")
    _add_json(parser)


def _diff(args: argparse.Namespace) -> int:
    before = _report(args.before, args.before_options)
    found = before.diff(_report(args.after, args.after_options))
    _print(str(found), found.to_dict(), args.json)
    return 0


REPORT_COMMANDS = {
    "explain": Command(
        "say what runs in which precision, what the casts cost, and what to change",
        _EXPLAIN_TEXT,
        _explain_arguments,
        _explain,
    ),
    "draw": Command(
        "draw where the casts are: a page for the browser, or SVG, PNG and dot through Graphviz",
        _DRAW_TEXT,
        _draw_arguments,
        _draw,
    ),
    "histogram": Command(
        "count gradients and activations by exponent, and find the loss scale",
        _HISTOGRAM_TEXT,
        _histogram_arguments,
        _histogram,
    ),
    "diff": Command("say what changed between two reports", _DIFF_TEXT, _diff_arguments, _diff),
}
