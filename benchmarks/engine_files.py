"""Times the files of ``amp_fx.export_onnx`` in the engines that they are written for, on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.engine_files [--only bert_1x128 ...] [--rounds 11] [--json FILE]

All files of a model are written first, and then run in turn, round by round. Scales of values are measured on the batch
that is timed; the error is that of the outputs against fp64.
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import amp_fx
from benchmarks.cases import CASES
from benchmarks.results import arguments, describe, spread, write
from benchmarks.workloads import Batch, build_workload

#: models by default, see ``engines_`` in :mod:`benchmarks.cases`
_MODELS = ("bert_1x128", "vit", "resnet18")


@dataclass(frozen=True)
class FileRow:
    """One file in one engine. ``times``: seconds of a call, one for each round; errors are relative, of the outputs."""

    model: str
    engine: str
    file: str
    bytes: int
    times: tuple[float, ...]
    error: float
    program_error: float


def files_of(model: nn.Module, batch: Batch) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Engine, name of the file, and options of its export."""
    yield "onnxruntime", "fp16", {"dtype": "float16"}
    yield "openvino", "bf16", {"dtype": "bfloat16"}
    for engine, dtype in (("onnxruntime", "float16"), ("openvino", "bfloat16")):
        found = amp_fx.calibrate(model, [batch], of="outputs", policy="int8", dtype=dtype, profile="off")
        plan = found.plan(budget=100, verify=False, engine=engine)
        yield engine, "int8, scales of each call", {"engine": engine, "policy": "int8"}
        yield engine, "int8, a plan", {"engine": engine, "plan": plan}


def runner(engine: str, path: Path, batch: Batch) -> Callable[[], Any]:
    """A call of the file, with the threads that torch has."""
    given = {name: value.numpy() for name, value in batch.items()}
    if engine == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, given)[0]
    from openvino import Core

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = Core().compile_model(path, "CPU", settings)
    return lambda: compiled(given)[0]


def rows(name: str, rounds: int, folder: Path) -> list[FileRow]:
    """Every file of a model, in its engine; they are written to ``folder``."""
    case = CASES[f"engines_{name}"]
    workload = build_workload(name, case.build, **dict(case.cpu or {}))
    model, batch = workload.model.eval(), workload.batch
    with torch.no_grad():
        wide = {key: v.double() if v.is_floating_point() else v for key, v in batch.items()}
        exact = copy.deepcopy(model).double()(**wide)

    def error(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    own: dict[Path, tuple[str, str, float]] = {}
    for number, (engine, file, options) in enumerate(files_of(model, batch)):
        path = folder / f"{name}_{number}.onnx"
        with torch.no_grad():
            program = amp_fx.export_onnx(model, (), path, batch, **options)
            own[path] = engine, file, error(program.module()(**batch))
    calls = {path: runner(engine, path, batch) for path, (engine, *_) in own.items()}
    errors = {path: error(torch.from_numpy(call())) for path, call in calls.items()}
    times: dict[Path, list[float]] = {path: [] for path in calls}
    for _ in range(rounds):
        for path, call in calls.items():
            start = time.perf_counter()
            call()
            times[path].append(time.perf_counter() - start)
    return [
        FileRow(name, engine, file, path.stat().st_size, tuple(times[path]), errors[path], program_error)
        for path, (engine, file, program_error) in own.items()
    ]


def table(found: Sequence[FileRow]) -> str:
    """Milliseconds, time of the 16-bit file in the same engine, and errors."""
    lines = [
        "| model | engine | file | ms | of the 16-bit file | MB | error | of the program's |",
        "|---" * 8 + "|",
    ]
    for row in found:
        base = next(
            (o for o in found if (o.model, o.engine) == (row.model, row.engine) and "int8" not in o.file), row
        )
        ratio = spread([mine / other for mine, other in zip(row.times, base.times, strict=True)]).median
        of_program = row.error / row.program_error if row.program_error else math.nan
        cells = [f"{1e3 * spread(row.times).median:.1f}", f"{ratio:.2f}", f"{row.bytes / 1e6:.1f}"]
        cells += [f"{row.error:.1e}", f"{of_program:.2f}"]
        lines.append(f"| {row.model} | {row.engine} | {row.file} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks.engine_files", __doc__, device=False)
    known = [name.removeprefix("engines_") for name in CASES if name.startswith("engines_")]
    parser.add_argument("--only", nargs="+", choices=known, default=[*_MODELS], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    args = parser.parse_args(argv)
    header, found = describe("cpu"), list[FileRow]()
    print(", ".join(f"{key} {value}" for key, value in header.items()), flush=True)
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            measured = rows(name, args.rounds, Path(folder))
        found += measured
        print(table(measured) + "\n", flush=True)
        if args.json:
            write(args.json, header, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
