"""The command ``export``: a model in mixed precision as files that need no amp_fx to run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from amp_fx._torch import compile_package
from amp_fx.cli.command import Command, writable
from amp_fx.cli.models import Loaded, load_model
from amp_fx.errors import AmpFxError
from amp_fx.exporting.converting import export, extra_files
from amp_fx.exporting.onnx_file import need_onnx, write_onnx
from amp_fx.settings import DTYPES, LEVEL_OPTIONS

__all__ = ["EXPORT"]

_SUMMARY = "write a model in mixed precision as a .pt2 file, an AOTInductor package, an ONNX file"

_EXAMPLES = """
The callable takes no arguments and returns (model, args) or (model, args, kwargs). The model is put into
evaluation mode. Nothing that loads the files needs amp_fx.

examples:
  %(prog)s mypackage.models:make_gpt -o gpt.pt2 --dynamic-batch
  %(prog)s mypackage.models:make_gpt -o gpt.pt2 --dtype float16 --onnx
  %(prog)s mypackage.models:make_gpt -o gpt.pt2 --aoti
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", metavar="MODULE:CALLABLE", help="what makes the model and its inputs")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="model.pt2", help="default: %(default)s; ends in .pt2"
    )
    parser.add_argument("--aoti", action="store_true", help="also compile: FILE with .aoti.pt2")
    parser.add_argument(
        "--onnx",
        action="store_true",
        help="also FILE with .onnx; needs the onnx extra: pip install 'amp_fx[onnx]'",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="auto", help="default: %(default)s")
    parser.add_argument("--policy", default="autocast", help="a base and rules, as in options=")
    parser.add_argument(
        "--fp8",
        choices=sorted(LEVEL_OPTIONS["fp8"]),
        default="auto",
        help="how policy fp8 scales; default: %(default)s",
    )
    parser.add_argument(
        "--profile",
        default="off",
        help="'off' (default), 'auto' for the rates of this machine, or a file of the profile command",
    )
    parser.add_argument(
        "--dynamic-batch", action="store_true", help="dimension 0 of every tensor input may change"
    )
    parser.add_argument("--low-io", action="store_true", help="fp32 inputs and outputs in the low dtype, too")
    parser.add_argument(
        "--weights-beyond-range",
        choices=("raise", "clamp", "keep"),
        default="raise",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--tables", choices=("tied", "low", "keep"), default="tied", help="default: %(default)s"
    )


def _run(args: argparse.Namespace) -> int:
    """Exports; returns the exit code."""
    output = Path(args.output)
    onnx_file = output.with_suffix(".onnx")
    if args.onnx:
        need_onnx(onnx_file)
    if output.suffix != ".pt2":
        raise AmpFxError(
            f"the output must end in .pt2, which torch.export.load asks for; got {args.output!r}."
        )
    writable(args.output)
    target = load_model(args.target)
    ep = export(
        target.model.eval(),
        target.args,
        target.kwargs,
        dynamic_shapes=_batch_shapes(target) if args.dynamic_batch else None,
        keep_io_dtypes=not args.low_io,
        dtype=args.dtype,
        policy=args.policy,
        fp8=args.fp8,
        profile=args.profile,
        weights_beyond_range=args.weights_beyond_range,
        tables=args.tables,
    )
    torch.export.save(ep, output, extra_files=extra_files(ep))
    ratio = _stored_bytes(ep.state_dict.values()) / max(1, _stored_bytes(target.model.state_dict().values()))
    size = output.stat().st_size / 1e6
    print(f"wrote {output}, {size:.1f} MB: its weights take {ratio:.2f} of the bytes of the model's")
    if args.onnx:
        write_onnx(ep, onnx_file)
        print(f"wrote {onnx_file}")
        if any(value.dtype is torch.bfloat16 for value in ep.state_dict.values()):
            print(
                "note: onnxruntime's CPU provider has no bfloat16 kernels and refuses the file (NOT_IMPLEMENTED); "
                "use --dtype float16 there."
            )
    if args.aoti:
        package = output.with_suffix(".aoti.pt2")
        compile_package(ep, str(package))
        print(f"wrote {package}: load it with torch._inductor.aoti_load_package")
    return 0


def _batch_shapes(target: Loaded) -> torch.export.ShapesCollection:
    """Dimension 0 of every tensor input is dynamic; inputs that are equal there stay so.

    Raises:
        AmpFxError: an example batch that torch.export would take for a constant.
    """
    shapes = torch.export.ShapesCollection()
    for value in tree_leaves((target.args, target.kwargs)):
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            continue
        if value.shape[0] < 2:
            raise AmpFxError(
                f"--dynamic-batch needs example inputs with a batch of at least 2; got shape {tuple(value.shape)}."
            )
        shapes[value] = {0: torch.export.Dim.DYNAMIC}
    return shapes


def _stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, those of tied ones once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


EXPORT = Command(_SUMMARY, _EXAMPLES, _add_arguments, _run)
