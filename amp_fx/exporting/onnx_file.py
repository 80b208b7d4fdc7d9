"""ONNX files of exported programs: written, checked as onnx does, and run beside the model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from amp_fx.errors import ExportError, MissingLibraryError, install_hint
from amp_fx.exporting.converting import export
from amp_fx.exporting.onnx_check import REMEDY, check_onnx, has_bfloat16
from amp_fx.exporting.onnx_forms import as_strided, write_fast_forms
from amp_fx.instruments.batches import inputs_of, uncompiled
from amp_fx.instruments.progress import progress
from amp_fx.precision.policy.engines import ANY

#: the first opset in which a convolution takes bf16
_OPSET_OF_BFLOAT16 = 22


def export_onnx(
    model: torch.nn.Module,
    args: Any,
    path: str | os.PathLike[str],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    keep_io_dtypes: bool = True,
    **options: Any,
) -> torch.export.ExportedProgram:
    """Writes a model in mixed precision as an ONNX file, with all casts in it; returns the program, once it is checked.

    ``onnx.checker`` goes through it in full, types of all values included. Where onnxruntime is installed, the file is
    run on the CPU beside the model: as it is, but for bf16, and with each result rounded where the file rounds it.
    Weights beyond 2 GB are in a file beside it, with ``.data`` behind its name. All other arguments are those of
    :func:`amp_fx.export`.

    Raises:
        MissingLibraryError: onnx or onnxscript is not installed.
        ExportError: the path does not end in ``.onnx``, or the file cannot be written, or is refused, or computes
            something else; names the node.
        OptionsError, CaptureError, PassError: as :func:`amp_fx.export`.
    """
    need_onnx(path)
    # what checks the file compares with the model itself
    model = uncompiled(model)
    given, named = inputs_of(model, args, kwargs)
    ep = export(model, given, named, dynamic_shapes=dynamic_shapes, keep_io_dtypes=keep_io_dtypes, **options)
    write_onnx(ep, path)
    check_onnx(ep, path, model, given, named, options.get("engine", ANY))
    return ep


def need_onnx(path: str | os.PathLike[str]) -> None:
    """Refuses what would fail after the work: a library that is missing, a folder that cannot be written.

    MissingLibraryError names the library, ExportError the folder or another suffix than ``.onnx``.
    """
    if Path(path).suffix != ".onnx":
        raise ExportError(f"an ONNX file ends in .onnx; got {os.fspath(path)!r}.")
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise MissingLibraryError(f"ONNX files take {' and '.join(missing)}: {install_hint('onnx')}.")
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK):
        raise ExportError(f"cannot write {os.fspath(path)!r}: {str(folder)!r} is no folder to write to.")


@progress("export: writes ONNX, and checks the file")
def write_onnx(ep: torch.export.ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Writes a program and checks the file; ExportError where torch does not write it, or onnx refuses it."""
    import onnx

    opset = _OPSET_OF_BFLOAT16 if has_bfloat16(ep) else None
    own = {
        torch.ops.aten._int_mm.default: _int_mm,
        torch.ops.aten.as_strided.default: as_strided,
        torch.ops.aten.linear.default: _linear,
        torch.ops.aten.scaled_dot_product_attention.default: _attention,
    }
    try:
        program = torch.onnx.export(
            ep, dynamo=True, verbose=False, opset_version=opset, custom_translation_table=own
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(f"torch.onnx.export fails: {str(error).strip()}") from error
    if program is None:
        raise ExportError("torch.onnx.export returned no program.")
    write_fast_forms(program.model)
    program.save(os.fspath(path))
    try:
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(
            f"{os.fspath(path)} was written, and no runtime will load it: {error}. {REMEDY}"
        ) from error


def _int_mm(first: Any, second: Any) -> Any:
    """ONNX's product of two matrices of 8-bit integers, which torch.onnx does not know.

    With a dimension more, as onnxruntime makes one call of two dimensions with factors and a bias behind it, and there
    multiplies the bias by the factors of rows, too.
    """
    from onnxscript import opset18

    ops: Any = opset18
    return ops.Squeeze(ops.MatMulInteger(ops.Unsqueeze(first, [0]), second), [0])


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A linear; where its weight is in int8, the bias is added so that onnxruntime does not join it to the product.

    It multiplies in integers only what has no bias in fp32.
    """
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.nn import aten_linear

    if (producer := weight.producer()) is None or producer.op_type != "DequantizeLinear" or bias is None:
        return aten_linear(x, weight, bias)
    ops: Any = opset18
    # what has two dimensions is joined where the bias has one or two
    return ops.Add(aten_linear(x, weight, None), bias if len(x.shape) < 3 else ops.Unsqueeze(bias, [0, 1]))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of which rows that are masked whole are zeros, as in torch.

    As torch.onnx writes it they are the mean of all values (boolean masks), or NaN (-inf in masks that are added). Here
    no score is infinite, so that no engine makes a NaN on the way, and what such rows give is replaced at the end.
    """
    import onnx_ir
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    ops: Any = opset18

    def number(what: float, dtype: Any) -> Any:
        return ops.Constant(value=onnx_ir.tensor(what, dtype=dtype))

    more = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if attn_mask is None:
        return aten_scaled_dot_product_attention(query, key, value, None, is_causal=is_causal, **more)
    # half of the lowest value, so that a score may be added to it
    low, least = query.dtype, float(query.dtype.min) / 2

    def has(flags: Any) -> Any:
        # of flags, as the largest of a row of -inf is finite in OpenVINO
        return ops.ReduceMax(ops.Cast(flags, to=low), ops.Constant(value_ints=[-1]), keepdims=1)

    if attn_mask.dtype == onnx_ir.DataType.BOOL:
        is_read, added = attn_mask, ops.Where(attn_mask, number(0.0, low), number(least, low))
    else:
        # finfo(float32).min is infinite in 16 bits
        cast = attn_mask.producer()
        if cast is not None and cast.op_type == "Cast" and cast.inputs[0].dtype == onnx_ir.DataType.FLOAT:
            attn_mask = cast.inputs[0]
        bound = number(least, attn_mask.dtype)
        is_read = ops.Greater(attn_mask, number(float("-inf"), attn_mask.dtype))
        added = ops.Cast(ops.Max(attn_mask, bound), to=low)
        # scores vanish beside finfo(float32).min in fp32, so that a row of it reads all alike
        read = ops.Mul(query, has(ops.Greater(attn_mask, bound)))
        read.shape, read.dtype = query.shape, low
        query = read
    found = aten_scaled_dot_product_attention(query, key, value, added, **more)
    return ops.Mul(found, has(is_read))
