"""The command ``calibrate``: measures what each rounding does to a model's gradient or outputs, and makes a plan."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import amp_fx
from amp_fx.cli.command import Command, paint, writable
from amp_fx.cli.models import import_callable, load_model
from amp_fx.errors import AmpFxError
from amp_fx.placement.tradeoff import MINIMISED, TIME
from amp_fx.plans.sensitivity import GRADIENTS, OF

__all__ = ["CALIBRATE"]

_SUMMARY = (
    "measure which roundings spoil a model's gradient or outputs, and make a plan within an error budget"
)

_TEXT = """
MODEL is package.module:callable, where the callable takes nothing and returns (model, args) or
(model, args, kwargs); the model returns its loss or has it in .loss, otherwise --loss names a callable that
takes what the model returns. Give a checkpoint that has been trained for a while.
With --of outputs, what the model returns is judged itself, as it is called without gradients; a callable picks what
counts of that.
--batches names a callable that returns one batch (a tuple or a dictionary) or several; default: the model's inputs.
--budget is "autocast", or a number: times torch.autocast's error. With --policy fp8, or with outputs --policy int8,
matmuls are measured in that, too, and a budget above 1 is spent on them. With --plan, the plan is checked by one
compiled step, unless --no-verify is given.

examples:
  %(prog)s train:build
  %(prog)s train:build --batches train:batches -o sensitivity.json
  %(prog)s train:build --budget 0.5 --plan plan.json --figure frontier.png
  %(prog)s train:build --dtype float16 --scale 4096
  %(prog)s train:build --policy fp8 --target cuda:h100 --budget 8 --plan plan.json
  %(prog)s serve:build --of outputs --policy int8 --budget 2 --plan plan.json
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="see below")
    parser.add_argument("--batches", metavar="package.module:callable", help="see below")
    parser.add_argument("--loss", metavar="package.module:callable", help="outputs -> loss")
    parser.add_argument(
        "--of",
        default=GRADIENTS,
        metavar="WHAT",
        help="gradients, outputs or a callable (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="the low dtype (default: %(default)s)")
    parser.add_argument("--scale", type=float, metavar="S", help="loss scale of fp16")
    parser.add_argument(
        "--profile", default="auto", metavar="PROFILE", help="auto, off or a file (default: %(default)s)"
    )
    parser.add_argument("--target", metavar="DEVICE", help="count the time of another device: cuda:h100")
    parser.add_argument("--policy", default="autocast", help="autocast, fp8 or int8 (default: %(default)s)")
    parser.add_argument("--fp8", default="auto", metavar="RECIPE", help="how policy fp8 scales")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the sensitivity as .json")
    parser.add_argument("--figure", metavar="FILE", help="write the frontier as .png, .svg or .html")
    parser.add_argument("--budget", default="autocast", type=_budget, help="of --plan (default: %(default)s)")
    parser.add_argument("--plan", metavar="FILE", help="write the cheapest plan within the budget")
    parser.add_argument(
        "--minimise",
        choices=MINIMISED,
        default=TIME,
        help="what --plan is the cheapest in (default: %(default)s)",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not check the plan by a compiled step")


def _budget(text: str) -> str | float:
    return text if text == "autocast" else float(text)


def _run(args: argparse.Namespace) -> int:
    writable(args.output, args.figure, args.plan)
    target = load_model(args.model)
    batches: Any = import_callable(args.batches)() if args.batches else None
    if batches is None:
        if target.args and target.kwargs:
            raise AmpFxError(
                "calibrate takes a model called with positional or with keyword arguments, not both."
            )
        batches = target.kwargs or target.args
    found = amp_fx.calibrate(
        target.model,
        batches,
        import_callable(args.loss) if args.loss else None,
        of=args.of if args.of in OF else import_callable(args.of),
        dtype=args.dtype,
        profile=args.profile,
        target=args.target,
        scale=args.scale,
        policy=args.policy,
        fp8=args.fp8,
    )
    print(paint(str(found), sys.stdout))
    for path in (args.output, args.figure):
        if path:
            _say(f"wrote {found.save(path)}")
    if args.plan:
        plan = found.plan(args.budget, minimise=args.minimise, verify=not args.no_verify)
        plan.save(args.plan)
        print(f"\n{plan}")
        _say(f'wrote {args.plan}; use it with options={{"plan": "{args.plan}"}}')
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)


CALIBRATE = Command(_SUMMARY, _TEXT, _arguments, _run)
