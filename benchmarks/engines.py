"""Engines for inference on a CPU that a user would pick instead of ``torch.compile``, each on the exported model.

In int8 all have static scales but ONNX Runtime, which finds them in each call. They are measured on the workload's
batches for calibration; where it has none, on the one that is timed. What is not in int8 is bf16 in OpenVINO, fp32 in
the others.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import amp_fx
from benchmarks.workloads import Batch

Call = Callable[[Batch], Tensor]

#: every linear, as torchao has it; amp_fx by itself leaves the last one
ALL_INT8 = {"base": "int8", "rules": [{"op": "linear", "precision": "int8"}]}


def measured_plan(model: nn.Module, *batches: Batch) -> amp_fx.CalibratedPlan:
    """int8 with scales that are measured on the batches, whatever the error."""
    return amp_fx.calibrate(model, list(batches), of="outputs", policy=ALL_INT8).plan(
        budget=100, verify=False
    )


def documented_plan(model: nn.Module, *batches: Batch) -> amp_fx.CalibratedPlan:
    """int8 as ``docs/quantised.md`` has it: within twice the error of torch.autocast, and verified."""
    return amp_fx.calibrate(model, list(batches), of="outputs", policy="int8").plan(budget=2)


def package(model: nn.Module, batch: Batch, *_: Batch, **options: Any) -> Call:
    """amp_fx, exported and compiled ahead of time; bf16 without options."""
    with torch.no_grad():
        program = amp_fx.export(model, (), batch, **options)
    with tempfile.TemporaryDirectory() as folder:
        run = torch._inductor.aoti_load_package(amp_fx.package(program, Path(folder) / "package.pt2"))
    return lambda batch: run(**batch)


def package_int8(model: nn.Module, batch: Batch, *calibration: Batch) -> Call:
    """The same, with measured scales."""
    return package(model, batch, plan=measured_plan(model, *calibration or (batch,)))


def package_calibrated(model: nn.Module, batch: Batch, *calibration: Batch) -> Call:
    """The same, by the documented plan."""
    return package(model, batch, plan=documented_plan(model, *calibration or (batch,)))


def _converted(model: nn.Module, batch: Batch) -> Any:
    """OpenVINO's model, at the sizes of the batch, as an engine has them that compiles for what it is given."""
    from openvino import convert_model

    with torch.no_grad():
        converted = convert_model(torch.export.export(model, (), batch))
    converted.reshape({name: list(value.shape) for name, value in batch.items()})
    return converted


def _compiled(converted: Any) -> Call:
    from openvino import compile_model

    settings = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = compile_model(converted, "CPU", settings)
    return lambda batch: torch.from_numpy(compiled(_arrays(batch))[0])


def _arrays(batch: Batch) -> dict[str, Any]:
    return {name: value.numpy() for name, value in batch.items()}


def openvino(model: nn.Module, batch: Batch, *_: Batch) -> Call:
    """bf16."""
    return _compiled(_converted(model, batch))


def openvino_int8(model: nn.Module, batch: Batch, *calibration: Batch) -> Call:
    """Quantised by NNCF; the batches have one size."""
    import nncf  # pyright: ignore[reportMissingImports]

    nncf.set_log_level(logging.ERROR)
    batches = calibration or (batch,)
    converted = _converted(model, batch)
    attends = any(op.get_type_name() == "ScaledDotProductAttention" for op in converted.get_ops())
    kind = nncf.ModelType.TRANSFORMER if attends else None
    data = nncf.Dataset([*map(_arrays, batches)])
    return _compiled(nncf.quantize(converted, data, model_type=kind, subset_size=len(batches)))


def onnxruntime_int8(model: nn.Module, batch: Batch, *_: Batch) -> Call:
    """Dynamically quantised."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    written = torch.onnx.export(model, (), kwargs=batch, dynamo=True, verbose=False)
    assert written is not None
    graph = written.model_proto
    # shapes inside, which the quantizer infers again and finds to differ
    del graph.graph.value_info[:]
    with tempfile.TemporaryDirectory() as folder:
        low = Path(folder) / "low.onnx"
        quantize_dynamic(graph, low, weight_type=QuantType.QUInt8)
        session = onnxruntime.InferenceSession(low, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, _arrays(batch))[0])


def x86_int8(model: nn.Module, batch: Batch, *calibration: Batch) -> Call:
    """torchao's quantizer for x86, compiled by Inductor, which reads its setting ``freezing`` from the environment."""
    pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.prepare_pt2e(torch.export.export(model, (), batch).module(), quantizer)
    for each in calibration or (batch,):
        prepared(**each)
    compiled = torch.compile(pt2e.convert_pt2e(prepared), dynamic=False, fullgraph=True)
    return lambda batch: compiled(**batch)
