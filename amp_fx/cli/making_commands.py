"""Commands that make a file: calibrate, export."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import amp_fx
from amp_fx.cli.inputs import (
    Loaded,
    figure_writable,
    import_callable,
    load_model,
    paint,
    say,
    users,
    writable,
)
from amp_fx.cli.report_commands import add_command
from amp_fx.compiler.settings import DTYPES, LEVEL_OPTIONS, NUMERICS
from amp_fx.errors import AmpFxError, install_hint
from amp_fx.exporting.converting import CHOICES
from amp_fx.exporting.onnx_check import check_onnx
from amp_fx.exporting.onnx_file import need_onnx, write_onnx
from amp_fx.graphs.values import tensors
from amp_fx.precision.placement.tradeoff import MINIMISED, TIME
from amp_fx.precision.plans.sensitivity import GRADIENTS, OF

#: help of the options that export has and the backend has not
_CHOICES = {
    "weights_beyond_range": "weights beyond the range of the low dtype: an error, the largest value, or fp32",
    "tables": "embedding tables to round: those that are a matmul's weight as well, all, or none",
    "int8_range": "weights in int8: all values, or -64 to 64 for CPUs without VNNI",
    "engine": "what serves the file: its default dtype, and the forms of int8 that it multiplies in integers",
}


def add_to(commands: Any) -> None:
    """Adds the commands of this file."""
    default = "default: %(default)s"

    add = add_command(commands, calibrate, "model", "--loss")
    batches = "callable that returns one batch or several (default: the inputs of MODEL)"
    add("--batches", metavar="package.module:callable", help=batches)
    add("--of", default=GRADIENTS, metavar="WHAT", help=f"gradients, outputs or a callable ({default})")
    add("--dtype", default="auto", help=f"the low dtype ({default})")
    add("--scale", type=float, metavar="S", help="loss scale of fp16")
    add("--profile", default="auto", metavar="PROFILE", help=f"auto, off or a file ({default})")
    add("--target", metavar="DEVICE", help="count the time of another device: cuda:h100")
    add("--policy", default="autocast", help=f"autocast, fp8 or int8 ({default})")
    add("--fp8", default="auto", metavar="RECIPE", help="how policy fp8 scales")
    add("-o", "--output", metavar="FILE", help="write the sensitivity as .json")
    add("--figure", metavar="FILE", help="write the frontier as .png, .svg or .html")
    add("--budget", default="autocast", type=_budget, help=f"of --plan ({default})")
    add("--plan", metavar="FILE", help="write the cheapest plan within the budget")
    add("--minimise", choices=MINIMISED, default=TIME, help=f"what --plan minimises ({default})")
    add("--no-verify", action="store_true", help="do not check the plan by a compiled step")

    add = add_command(commands, export, "model")
    add("-o", "--output", metavar="FILE", default="model.pt2", help=f"{default}; ends in .pt2")
    add("--aoti", action="store_true", help="also compile: FILE with .aoti.pt2")
    onnx = f"also FILE with .onnx; needs the onnx extra: {install_hint('onnx')}"
    add("--onnx", action="store_true", help=onnx)
    add("--dtype", choices=sorted(DTYPES), default="auto", help=f"the low dtype; {default}")
    policy = """a name, or JSON: '{"base": "autocast", "rules": [{"module": "head", "precision": "fp32"}]}'"""
    add("--policy", default="autocast", help=f"{policy}; {default}")
    add(
        "--plan", metavar="FILE", help="follow the plan that calibrate --plan or explain -o report.json wrote"
    )
    for base, what in (("fp8", "scales"), ("int8", "multiplies")):
        levels = sorted(LEVEL_OPTIONS[base])
        add(f"--{base}", choices=levels, default="auto", help=f"how policy {base} {what}; {default}")
    numerics = f"eager: round exactly where eager autocast rounds; {default}"
    add("--numerics", choices=NUMERICS, default=NUMERICS[0], help=numerics)
    rates = "'off' (default), 'auto' for the rates of this machine, or a file of the profile command"
    add("--profile", default="off", help=rates)
    add("--dynamic-batch", action="store_true", help="dimension 0 of every tensor input may change")
    add("--low-io", action="store_true", help="fp32 inputs and outputs in the low dtype, too")
    for name, values in CHOICES.items():
        add(
            f"--{name.replace('_', '-')}",
            choices=values,
            default=values[0],
            help=f"{_CHOICES[name]}; {default}",
        )


def calibrate(args: argparse.Namespace) -> None:
    """Measure which roundings spoil a model's gradient or outputs, and make a plan within an error budget.

    {model}; the model returns its loss or has it in .loss, otherwise --loss names
    a callable that takes what the model returns. Give a checkpoint that has been trained for a while.
    With --of outputs, the model is called without gradients, and the error of what it returns is judged; with a
    callable, that of what the callable picks.
    --batches names a callable that returns one batch (a tuple or a dictionary) or several; default: the model's
    inputs. --budget is "autocast", or a number: times torch.autocast's error. With --policy fp8, or with outputs
    --policy int8, matmuls are measured in that, too, and a budget above 1 is spent on them. With --plan, the plan is
    checked by one compiled step, unless --no-verify is given.

    Examples:
      %(prog)s train:build
      %(prog)s train:build --batches train:batches -o sensitivity.json
      %(prog)s train:build --budget 0.5 --plan plan.json --figure frontier.png
      %(prog)s train:build --dtype float16 --scale 4096
      %(prog)s train:build --policy fp8 --target cuda:h100 --budget 8 --plan plan.json
      %(prog)s serve:build --of outputs --policy int8 --budget 2 --plan plan.json
    """
    figure_writable(args.output, ".json", ".html")
    figure_writable(args.figure, ".json", ".html")
    writable(args.plan)
    loaded = load_model(args.model)
    batches: Any = None
    if args.batches:
        with users(args.batches):
            batches = import_callable(args.batches)()
    passed_on = ("dtype", "profile", "target", "scale", "policy", "fp8")
    found = amp_fx.calibrate(
        loaded.model,
        loaded.batch("calibrate") if batches is None else batches,
        import_callable(args.loss) if args.loss else None,
        of=args.of if args.of in OF else import_callable(args.of),
        **{name: getattr(args, name) for name in passed_on},
    )
    print(paint(str(found), sys.stdout))
    for path in (args.output, args.figure):
        if path:
            say(f"wrote {found.save(path)}")
    if args.plan:
        plan = found.plan(args.budget, minimise=args.minimise, verify=not args.no_verify)
        plan.save(args.plan)
        print(f"\n{plan}")
        say(f'wrote {args.plan}; use it with options={{"plan": "{args.plan}"}}')


def _budget(text: str) -> str | float:
    if text == "autocast":
        return text
    return number(text, 0.0, "autocast, or a number from 0 on")


def export(args: argparse.Namespace) -> None:
    """Write a model in mixed precision as a .pt2 file, an AOTInductor package, an ONNX file.

    {model}. The model is put into evaluation mode.
    Nothing that loads the files needs amp_fx.

    Examples:
      %(prog)s mypackage.models:make_gpt -o gpt.pt2 --dynamic-batch
      %(prog)s mypackage.models:make_gpt -o gpt.pt2 --dtype float16 --onnx
      %(prog)s mypackage.models:make_gpt -o gpt.pt2 --aoti
      %(prog)s serve:build -o int8.pt2 --plan plan.json --onnx --dtype float16
    """
    output = Path(args.output)
    onnx_file = output.with_suffix(".onnx")
    if args.onnx:
        need_onnx(onnx_file)
    if output.suffix != ".pt2":
        raise AmpFxError(f"the output must end in .pt2, as torch.export.load wants; got {args.output!r}.")
    writable(args.output)
    loaded = load_model(args.model)
    passed_on = ("dtype", "policy", "plan", "fp8", "int8", "numerics", "profile", *CHOICES)
    ep = amp_fx.export(
        loaded.model.eval(),
        loaded.args,
        loaded.kwargs,
        dynamic_shapes=_batch_shapes(loaded) if args.dynamic_batch else None,
        keep_io_dtypes=not args.low_io,
        **{name: getattr(args, name) for name in passed_on},
    )
    torch.export.save(ep, output, extra_files=amp_fx.extra_files(ep))
    ratio = _stored_bytes(ep.state_dict.values()) / max(1, _stored_bytes(loaded.model.state_dict().values()))
    size = output.stat().st_size / 1e6
    print(f"wrote {output}, {size:.1f} MB: its weights take {ratio:.2f} of the bytes of the model's")
    if args.onnx:
        write_onnx(ep, onnx_file)
        print(f"wrote {onnx_file}")
        check_onnx(ep, onnx_file, loaded.model, loaded.args, loaded.kwargs, args.engine)
    if args.aoti:
        package = output.with_suffix(".aoti.pt2")
        amp_fx.package(ep, package)
        print(f"wrote {package}: load it with torch._inductor.aoti_load_package")


def _batch_shapes(loaded: Loaded) -> torch.export.ShapesCollection:
    """Dimension 0 of every tensor input is dynamic; inputs that are equal there stay so."""
    shapes = torch.export.ShapesCollection()
    for value in (each for each in tensors((loaded.args, loaded.kwargs)) if each.ndim):
        shapes[value] = {0: torch.export.Dim.DYNAMIC}
    return shapes


def _stored_bytes(values: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, those of tied ones once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in values}.values())


def number(text: str, least: float, valid: str) -> float:
    """A finite number from ``least`` on, for argparse, whose message says what is ``valid``."""
    with contextlib.suppress(ValueError):
        if least <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {valid}")
