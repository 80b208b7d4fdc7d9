"""The command ``compare``: says where a compiled run leaves a reference."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import amp_fx
from amp_fx.cli.command import Command, literal, paint, writable
from amp_fx.cli.models import import_callable, load_model
from amp_fx.comparison.comparing import AGAINST
from amp_fx.reports.report import check_suffix

__all__ = ["COMPARE"]

_SUMMARY = "say in which module a compiled run leaves fp32, and what would mend it"

_TEXT = f"""
MODEL is package.module:callable, where the callable takes nothing and returns (model, args) or
(model, args, kwargs). With a loss, gradients are compared, too: the model returns it or has it in .loss,
otherwise --loss names a callable that takes what the model returns.
OPTIONS are those of torch.compile(model, backend="amp_fx", options=...), as JSON or as reports print them.
--against is {", ".join(AGAINST)}, or other OPTIONS.

examples:
  %(prog)s train:build
  %(prog)s train:build --loss train:loss --options '{{"dtype": "float16"}}' -o compared.html
  %(prog)s train:build --against '{{"policy": "fast"}}' --calls
  %(prog)s train:build --json | jq .first_nonfinite
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="see below")
    parser.add_argument("--loss", metavar="package.module:callable", help="outputs -> loss")
    parser.add_argument(
        "--against", type=_against, default="fp32", metavar="WHAT", help="see below (default: %(default)s)"
    )
    parser.add_argument(
        "--options", type=literal, default={}, metavar="OPTIONS", help="options of the backend"
    )
    parser.add_argument("--scale", type=float, metavar="S", help="loss scale of fp16")
    parser.add_argument(
        "--calls", action="store_true", help="also compare the result of every call (in --json)"
    )
    parser.add_argument(
        "-o", "--output", action="append", default=[], metavar="FILE",
        help="also write: .json, or the picture as .html, .svg, .png, .dot",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _against(text: str) -> str | dict[str, Any]:
    return literal(text) if text.strip().startswith(("{", "options=")) else text


def _run(args: argparse.Namespace) -> int:
    writable(*args.output)
    for path in args.output:
        check_suffix(path)
    target = load_model(args.model)
    found = amp_fx.compare(
        target.model,
        *target.args,
        loss=import_callable(args.loss) if args.loss else None,
        against=args.against,
        options=args.options,
        calls=args.calls,
        scale=args.scale,
        **target.kwargs,
    )
    print(json.dumps(found.to_dict()) if args.json else paint(str(found), sys.stdout))
    for path in args.output:
        print(f"wrote {found.save(path)}", file=sys.stderr)
    return 0


COMPARE = Command(_SUMMARY, _TEXT, _arguments, _run)
