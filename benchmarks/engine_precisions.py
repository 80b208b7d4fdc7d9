"""What engines on a CPU compute of the files that ``amp_fx.export_onnx`` writes, by what they say of a run themselves.

    python -m benchmarks.engine_precisions --json benchmarks/results/precisions_NAME.jsonl
    python -m benchmarks.page  # writes the table of docs/engines.md from it

OpenVINO is asked for its compiled model, onnxruntime for its profile. A file is of a small network: a convolution, a
linear, a LayerNorm that files in 16 bits have in fp32, and a linear. Its error is that of its outputs against fp64.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import amp_fx
from benchmarks.results import arguments, describe, write

#: what is asked of OpenVINO -> its settings
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "hint f32": {"INFERENCE_PRECISION_HINT": "f32"},
    "hint f16": {"INFERENCE_PRECISION_HINT": "f16"},
    "hint bf16": {"INFERENCE_PRECISION_HINT": "bf16"},
    "mode ACCURACY": {"EXECUTION_MODE_HINT": "ACCURACY"},
}
#: operators of the engines' own graphs -> what they are in the model
_KINDS = {
    "Convolution": "convolution", "Conv": "convolution", "FusedConv": "convolution", "QLinearConv": "convolution",
    "FullyConnected": "linear", "MatMul": "linear", "Gemm": "linear", "FusedGemm": "linear", "FusedMatMul": "linear",
    "MatMulInteger": "linear", "MatMulIntegerToFloat": "linear", "DynamicQuantizeMatMul": "linear",
    "QLinearMatMul": "linear", "QGemm": "linear",
    "MVN": "norm", "LayerNormalization": "norm", "SkipLayerNormalization": "norm",
}  # fmt: skip
#: what onnxruntime and OpenVINO call dtypes
_DTYPES = {
    "float": "fp32", "f32": "fp32", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16",
    "uint8": "uint8", "u8": "uint8", "i8": "int8",
}  # fmt: skip


@dataclass(frozen=True)
class PrecisionRow:
    """What one engine computed of one file. Dtypes are those of the first operand of the first call of a kind."""

    engine: str
    version: str
    file: str
    setting: str
    convolution: str = ""
    linear: str = ""
    norm: str = ""
    #: relative L2 error of the outputs against fp64; None where the engine refuses the file
    error: float | None = None
    #: of the exported program itself
    program_error: float | None = None


class Net(nn.Module):
    """A convolution, linears, and a norm between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.first = nn.Conv2d(16, 64, 3), nn.Linear(64, 128)
        self.norm, self.last = nn.LayerNorm(128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x).relu().flatten(2).transpose(1, 2)
        return self.last(self.norm(self.first(x)))


def options_of(model: nn.Module, x: Tensor) -> dict[str, dict[str, Any]]:
    """File -> options of the export."""
    found: dict[str, dict[str, Any]] = {}
    for dtype in ("float16", "bfloat16"):
        calibrated = amp_fx.calibrate(model, [x], of="outputs", policy="int8", dtype=dtype, profile="off")
        found[dtype] = {"dtype": dtype}
        found[f"int8, {dtype}"] = {"policy": "int8", "dtype": dtype}
        found[f"int8 by measured scales, {dtype}"] = {
            "plan": calibrated.plan(budget=100, verify=False),
            "dtype": dtype,
        }
    return found


def openvino(path: Path, x: Tensor, settings: Mapping[str, str]) -> tuple[Tensor, dict[str, str]]:
    """Outputs, and dtypes by kind, of the compiled model that OpenVINO reports."""
    from openvino import Core

    compiled = Core().compile_model(path, "CPU", dict(settings))
    found: dict[str, str] = {}
    for op in compiled.get_runtime_model().get_ordered_ops():
        info = op.get_rt_info()
        if kind := _KINDS.get(info["layerType"].astype(str)):
            dtype = str(info["runtimePrecision"].astype(str))
            found.setdefault(kind, _DTYPES.get(dtype, dtype))
    return torch.from_numpy(compiled([x.numpy()])[0]), found


def onnxruntime(path: Path, x: Tensor, _: Mapping[str, str]) -> tuple[Tensor, dict[str, str]]:
    """Outputs, and dtypes by kind, of onnxruntime's profile of one run."""
    import onnxruntime as engine

    options = engine.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(path.with_suffix(""))
    session = engine.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for event in events:
        details = event.get("args", {})
        kind = _KINDS.get(details.get("op_name", ""))
        if kind and "input_type_shape" in details:
            dtype = str(next(iter(details["input_type_shape"][0])))
            found.setdefault(kind, _DTYPES.get(dtype, dtype))
    return torch.from_numpy(result), found


def _versions() -> Iterator[tuple[str, str, Callable[..., Any], Sequence[str]]]:
    import onnxruntime as runtime
    import openvino as vino

    yield "onnxruntime", runtime.__version__, onnxruntime, ("default",)
    yield "OpenVINO", vino.__version__.partition("-")[0], openvino, tuple(SETTINGS)


def rows() -> Iterator[PrecisionRow]:
    """Every engine on every file by every setting."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 16, 18, 18)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())

    def error(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for file, options in options_of(model, x).items():
            with torch.no_grad():
                program = amp_fx.export_onnx(model, (x,), path, **options)
                own = error(program.module()(x))
            for engine, version, run, settings in _versions():
                for setting in settings:
                    row = PrecisionRow(engine, version, file, setting, program_error=own)
                    try:
                        result, dtypes = run(path, x, SETTINGS[setting])
                    except Exception as refused:  # engines have classes of their own
                        print(f"{engine} refuses {file}: {refused}", file=sys.stderr)
                        yield row
                        continue
                    yield PrecisionRow(**{**asdict(row), **dtypes, "error": error(result)})


def table(head: Mapping[str, Any], found: Sequence[PrecisionRow]) -> str:
    """A line for each engine, file and what is asked of it; settings that change nothing share a line."""
    lines = [
        "| engine | file | setting | convolution | linear | LayerNorm | error, of the program's |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[Any, ...], list[PrecisionRow]] = {}
    for row in found:
        groups.setdefault((row.file, row.engine, row.convolution, row.linear, row.norm), []).append(row)
    for (file, engine, *dtypes), same in groups.items():
        settings = ", ".join(row.setting for row in same)
        if same[0].error is None:
            cells = ["refused", "", "", ""]
        else:
            ratios = sorted(row.error / row.program_error for row in same if row.error and row.program_error)
            ends = [*dict.fromkeys((f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"))]
            cells = [*dtypes, " to ".join(ends)]
        lines.append(f"| {engine} | {file} | {settings} | " + " | ".join(cells) + " |")
    versions = ", ".join(dict.fromkeys(f"{row.engine} {row.version}" for row in found))
    where = (
        f"{head['processor']}, torch {head['torch']}, {versions}; `python -m benchmarks.engine_precisions`"
    )
    return "\n".join([*lines, "", f"({where})"])


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("benchmarks.engine_precisions", __doc__).parse_args(argv)
    header, found = describe("cpu"), [*rows()]
    print(table(header, found))
    if args.json:
        write(args.json, header, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
