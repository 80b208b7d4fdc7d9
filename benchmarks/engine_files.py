"""Times the files of ``amp_fx.export_onnx`` in the engines that they are written for, on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks engines_files [--only bert_1x128 ...] [--files FOLDER] [--json FILE]

All files of a model are written first, and then run in turn, round by round. Scales of values are measured on the batch
that is timed; the error is that of the outputs against fp64. In a folder that is named files are kept, so that a second
run only times them. A row is a :class:`benchmarks.results.TimingRow`, whose measures are the size of the file and the
error of the exported program.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import amp_fx
from benchmarks.cases import CASES
from benchmarks.results import TimingRow, arguments, describe, relative, write
from benchmarks.workloads import Batch, build_workload

#: models by default, see ``engines_`` in :mod:`benchmarks.cases`
_MODELS = ("bert_1x128", "vit", "resnet18")


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


def made(name: str, folder: Path) -> dict[str, Any]:
    """Writes every file of a model to a folder, or finds them there: name of the file -> engine, arm and error."""
    known = folder / f"{name}.json"
    if known.exists():
        return dict(json.loads(known.read_text(encoding="utf-8")))
    model, batch, exact = model_of(name)
    found: dict[str, Any] = {}
    for number, (engine, file, options) in enumerate(files_of(model, batch)):
        path = folder / f"{name}_{number}.onnx"
        with torch.no_grad():
            program = amp_fx.export_onnx(model, (), path, batch, **options)
            found[path.name] = engine, file, _error(program.module()(**batch), exact)
    known.write_text(json.dumps(found), encoding="utf-8")
    return found


def rows(name: str, rounds: int, folder: Path) -> list[TimingRow]:
    """Every file of a model, in its engine."""
    files = made(name, folder)
    _, batch, exact = model_of(name)
    calls = {file: runner(engine, folder / file, batch) for file, (engine, *_) in files.items()}
    errors = {file: _error(torch.from_numpy(call()), exact) for file, call in calls.items()}
    times: dict[str, list[float]] = {file: [] for file in calls}
    for _ in range(rounds):
        for file, call in calls.items():
            start = time.perf_counter()
            call()
            times[file].append(time.perf_counter() - start)
    sizes = dict(CASES[f"engines_{name}"].cpu or {})
    return [
        TimingRow(
            workload=name,
            family="engines_files",
            mode="inference",
            arm=f"{engine}: {kind}",
            sizes=sizes,
            times=tuple(times[file]),
            error=errors[file],
            measures={"bytes": (folder / file).stat().st_size, "program_error": program_error},
        )
        for file, (engine, kind, program_error) in files.items()
    ]


def model_of(name: str) -> tuple[nn.Module, Batch, Tensor]:
    """A model with its batch, and its results in fp64."""
    case = CASES[f"engines_{name}"]
    workload = build_workload(name, case.build, **dict(case.cpu or {}))
    model, batch = workload.model.eval(), workload.batch
    with torch.no_grad():
        wide = {key: v.double() if v.is_floating_point() else v for key, v in batch.items()}
        return model, batch, copy.deepcopy(model).double()(**wide)


def _error(found: Tensor, exact: Tensor) -> float:
    """The relative L2 distance of results from those in fp64."""
    return float((found.double() - exact).norm() / exact.norm())


def table(found: Sequence[TimingRow]) -> str:
    """Milliseconds, time and size of the 16-bit file's in the same engine, and errors."""
    lines = [
        "| model | engine | file | ms | of the 16-bit file | size, of the 16-bit file's | error | of the program's |",
        "|---" * 8 + "|",
    ]
    for row in found:
        (engine, file), same = row.arm.split(": "), [o for o in found if o.workload == row.workload]
        base = next(o for o in same if o.arm.startswith(f"{engine}: ") and "int8" not in o.arm)
        size = row.measures["bytes"] / base.measures["bytes"]
        own, error = row.measures["program_error"], row.error or math.nan
        cells = [
            f"{1e3 * row.time.median:.1f}",
            f"{relative(same, row.arm, base.arm).median:.2f}",
            f"{size:.2f}",
        ]
        cells += [f"{error:.1e}", f"{error / own:.2f}" if own else "-"]
        lines.append(f"| {row.workload} | {engine} | {file} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks engines_files", __doc__, device=False)
    known = [name.removeprefix("engines_") for name in CASES if name.startswith("engines_")]
    parser.add_argument("--only", nargs="+", choices=known, default=[*_MODELS], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    parser.add_argument(
        "--files", metavar="FOLDER", help="where files are kept; default: a folder of this run"
    )
    args = parser.parse_args(argv)
    versions = {name: metadata.version(name) for name in ("onnxruntime", "openvino")}
    header, found = {**describe("cpu"), "rounds": args.rounds, **versions}, list[TimingRow]()
    print(", ".join(f"{key} {value}" for key, value in header.items()), flush=True)
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(args.files or folder)
            kept.mkdir(parents=True, exist_ok=True)
            measured = rows(name, args.rounds, kept)
        found += measured
        print(table(measured) + "\n", flush=True)
        if args.json:
            write(args.json, header, found)
    return 0
