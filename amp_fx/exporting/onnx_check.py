"""Runs an ONNX file beside its model: as onnxruntime computes it, and as the file says."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from amp_fx._torch import multiplies_int8, quantised_ops
from amp_fx.errors import ExportError
from amp_fx.exporting.as_written import Watched, as_written
from amp_fx.exporting.converting import training_remedy
from amp_fx.graphs.values import tensors
from amp_fx.instruments.progress import progress
from amp_fx.precision.policy.engines import ANY

logger = logging.getLogger(__name__)

_RULE = 'Keep the call in fp32: policy={{"rules": [{{{}, "precision": "fp32"}}]}}.'
REMEDY = _RULE.format('"module": ...')
#: relative distance of an output from the model's own that no rounding explains: of bf16 three bits fewer are left
_FAR, _FAR_IN_BFLOAT16 = 0.1, 0.3
#: from here on the nearest value of the dtype is infinite
_BEYOND = {"FLOAT16": 65520.0, "BFLOAT16": 2.0**128 * (1 - 2.0**-9)}


def has_bfloat16(ep: torch.export.ExportedProgram) -> bool:
    """Whether a program computes anything in bf16."""
    values = (node.meta.get("val") for node in ep.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 for value in values)


@progress("export: runs the ONNX file and the model")
def check_onnx(
    ep: torch.export.ExportedProgram,
    path: str | os.PathLike[str],
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    engine: str = ANY,
) -> None:
    """Runs the file of a program beside the model, where onnxruntime is installed; the log says what was not run.

    It is run twice: as it is, and as it is written, by a copy of which onnxruntime rounds every result where the file
    does (:mod:`amp_fx.exporting.as_written`). Of another ``engine`` it is no warning that onnxruntime has no kernels in
    bf16.

    Raises:
        ExportError: onnxruntime refuses the file, or an output is not finite where the model's is, or far from it;
            names the node that overflows, and its module.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        logger.warning("%s was not run: onnxruntime is not installed", path)
        return
    # a model may write to its inputs
    given = [value.detach().cpu().clone() for value in tensors((args, kwargs))]
    with torch.no_grad():
        wanted = tensors(model(*args, **kwargs))
    is_bfloat16 = has_bfloat16(ep)
    far = _FAR_IN_BFLOAT16 if is_bfloat16 else _FAR
    drawn = training_remedy(model)
    if why := _why_not_by_itself(ep):
        level = logging.INFO if is_bfloat16 and engine not in (ANY, "onnxruntime") else logging.WARNING
        logger.log(level, "%s was run as it is written, and not as it is: %s", path, why)
    else:
        as_it_is = _run(path, os.fspath(path), given)
        _judge(as_it_is, wanted, far, "onnxruntime", drawn or REMEDY, lambda: drawn or REMEDY)
    found = _run(path, as_written(path).model, given)
    where = "the precision that it states"
    _judge(found, wanted, far, where, drawn or REMEDY, lambda: drawn or _culprit(path, given))


def _why_not_by_itself(ep: torch.export.ExportedProgram) -> str:
    """Why onnxruntime cannot run a file here as any CPU would; empty where it can."""
    if has_bfloat16(ep):
        return (
            "onnxruntime has kernels in float16 for a CPU, none in bfloat16. Give dtype='float16' (with a plan: "
            "calibrate(..., dtype='float16')), or run the file where bfloat16 is multiplied, as in OpenVINO"
        )
    unsigned = quantised_ops().quantize_per_tensor.default, torch.ops.aten._int_mm.default
    weights = [value for value in tensors((ep.state_dict, ep.constants)) if value.dtype is torch.int8]
    is_full = any(node.target in unsigned for node in ep.graph.nodes) and any(
        w.ne(w.clamp(-64, 64)).any() for w in weights
    )
    if is_full and not multiplies_int8():
        return (
            "without VNNI, as here, onnxruntime clamps sums of products in int8. It is right elsewhere; for CPUs like "
            "this one export with int8_range='reduced'"
        )
    return ""


def _run(
    path: str | os.PathLike[str], model: str | bytes, given: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Outputs of a file, or of the copy of one, with their names; ExportError where onnxruntime refuses it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # of errors, which it raises; it also warns of what it cannot fold
    options.log_severity_level = 3
    if isinstance(model, bytes):
        # of what it optimises it may compute otherwise
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        folder = os.fspath(Path(path).absolute().parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feeds = {}
        for each, value in zip(session.get_inputs(), given, strict=True):
            if value.is_floating_point() and each.type in _FLOATS:
                value = value.to(_FLOATS[each.type])
            feeds[each.name] = value.numpy()
        results = session.run(None, feeds)
    except Exception as error:  # onnxruntime has a class of its own for each kind
        raise ExportError(f"onnxruntime refuses {os.fspath(path)}: {error}. {REMEDY}") from error
    names = [output.name for output in session.get_outputs()]
    return [(name, torch.as_tensor(value)) for name, value in zip(names, results, strict=True)]


_FLOATS = {
    "tensor(float16)": torch.float16,
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
}


def _judge(
    found: Iterable[tuple[str, torch.Tensor]],
    wanted: Iterable[torch.Tensor],
    most: float,
    where: str,
    remedy: str,
    culprit: Callable[[], str],
) -> None:
    """ExportError where an output is far from what is wanted, or, by a ``culprit``, not finite."""
    for (name, value), exact in zip(found, wanted, strict=True):
        if not exact.is_floating_point():
            continue
        true, what = exact.detach().cpu().double(), f"output {name!r} of the file, run in {where},"
        far = (value.double() - true)[true.isfinite()]
        norm = true[true.isfinite()].norm() or torch.tensor(1.0)
        if not far.isfinite().all():
            raise ExportError(f"{what} is not finite where the model's is. {culprit()}")
        if far.norm() > most * norm:
            raise ExportError(
                f"{what} is {far.norm() / norm:.2g} from the model's, relative to its size. {remedy}"
            )


def _culprit(path: str | os.PathLike[str], given: Sequence[torch.Tensor]) -> str:
    """Which result of a file is the first that overflows, or else the first with a NaN, and what to do about it."""
    copy = as_written(path, watches=True)
    results = {name: value for name, value in _run(path, copy.model, given) if value.ndim == 0}
    largest = [float(results[each.largest]) for each in copy.watched]
    for each, size in zip(copy.watched, largest, strict=True):
        if size >= _BEYOND[each.dtype]:
            return f"{_named(each)} reaches {size:,.6g}, beyond {each.dtype.lower()}. {_remedy(each)}"
    for each in copy.watched:
        if results[each.has_nan]:
            return f"{_named(each)} is the first with a NaN. {_remedy(each)}"
    return f"No result in 16 bits outside of branches and loops is beyond its dtype. {REMEDY}"


def _named(result: Watched) -> str:
    of = f"module {result.module!r}" if result.module else "the model itself"
    return f"The result of {result.node} of {of}" + (f" [{result.line}]" if result.line else "")


def _remedy(result: Watched) -> str:
    return (
        _RULE.format(f'"module": {json.dumps(result.module)}') if result.module else _RULE.format('"op": ...')
    )
