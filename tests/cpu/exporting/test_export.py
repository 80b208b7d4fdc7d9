"""Exported models where they are used: a process without amp_fx, AOTInductor in Python and C++, onnxruntime.

Each model is exported once; all tests share that on one worker.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import cpp_extension

import amp_fx
from amp_fx.cli import main
from examples import hugging_face
from graphs import rewrite
from small_models import Beyond, Parts

pytestmark = [
    pytest.mark.xdist_group("export"),
    # torch.export copies its own call graph by deepcopy, which warns
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

EXAMPLES = Path(__file__).parents[3] / "examples"

#: packages are built for these
COMPILED = ("gpt2",)

#: error allowed beyond 1.1 times that of the run it is compared with
NOISE = 1e-3


def _tokens(batch: int) -> Tensor:
    return torch.randint(256, (batch, 32), generator=torch.Generator().manual_seed(batch))


def _images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))


SIZES: dict[str, Any] = {"layers": 1, "width": 256, "heads": 2, "vocab": 256, "length": 32}
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "gpt2": (lambda: hugging_face.gpt2(**SIZES), _tokens),
    "bert": (lambda: hugging_face.bert(**SIZES, hidden=1024), _tokens),
    "resnet": (lambda: hugging_face.resnet(width=64, hidden=[192], depths=[1]), _images),
}


@dataclass(frozen=True)
class Exported:
    """One model, exported by torch and by amp_fx with a dynamic batch."""

    model: nn.Module  # fp32, in evaluation mode
    x: Tensor  # of another batch size than that of the export
    stock: ExportedProgram  # as torch exports it
    program: ExportedProgram  # in bf16
    exact: Tensor  # outputs in fp64
    outputs: Tensor  # of program


@pytest.fixture(scope="module")
def exported() -> dict[str, Exported]:
    return {name: _export(name) for name in MODELS}


def _export(name: str) -> Exported:
    build, inputs = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Parts(lambda m, x: m.model(x).logits, model=build()).eval()
    # of one argument that takes any number
    shapes = (({0: Dim("batch", min=1, max=64)},),)
    stock = torch.export.export(model, (inputs(2),), dynamic_shapes=shapes)
    program = amp_fx.convert(stock, profile="off")
    x = inputs(5)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x)
        outputs = program.module()(x)
    return Exported(model, x, stock, program, exact, outputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, exported: dict[str, Exported]) -> Path:
    """The files: NAME.pt2, NAME.stock.pt2, NAME.x.pt, and NAME.aoti.pt2 of those in COMPILED."""
    path = tmp_path_factory.mktemp("export")
    for name, case in exported.items():
        torch.export.save(case.program, path / f"{name}.pt2", extra_files=amp_fx.extra_files(case.program))
        torch.export.save(case.stock, path / f"{name}.stock.pt2")
        torch.save(case.x, path / f"{name}.x.pt")
    for name in COMPILED:
        torch._inductor.aoti_compile_and_package(
            exported[name].program,
            package_path=str(path / f"{name}.aoti.pt2"),
            # the code around the kernels takes longer to optimise than it gains here
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
    return path


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def _allowed(error: float) -> float:
    return 1.1 * error + NOISE


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_as_accurate_as_those_of_the_backend_and_of_autocast(
    exported: dict[str, Exported], name: str
) -> None:
    case = exported[name]
    with torch.no_grad():
        backend = rewrite(case.model, case.x, options={"weights": "cast"}).outputs
        with torch.autocast("cpu", torch.bfloat16):
            autocast = case.model(case.x)
        fp32 = case.model(case.x)
    error = _error(case.outputs, case.exact)
    assert case.outputs.dtype is torch.float32
    assert error <= _allowed(_error(backend, case.exact))
    assert error <= _allowed(_error(autocast, case.exact))
    assert error > 10 * _error(fp32, case.exact), "it really computes in bf16"


@pytest.mark.parametrize("name", MODELS)
def test_files_are_about_half_as_large(exported: dict[str, Exported], folder: Path, name: str) -> None:
    ours, stock = (folder / f"{name}.pt2").stat().st_size, (folder / f"{name}.stock.pt2").stat().st_size
    assert ours < 0.62 * stock, f"{ours} and {stock} bytes"


#: what a machine without amp_fx runs
WITHOUT_AMP_FX = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "amp_fx":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
import torch
folder, *names = sys.argv[1:]
results = {}
with torch.no_grad():
    for name in names:
        x = torch.load(f"{folder}/{name.partition('.')[0]}.x.pt")
        if name.endswith(".aoti"):
            run = torch._inductor.aoti_load_package(f"{folder}/{name}.pt2")
        else:
            run = torch.export.load(f"{folder}/{name}.pt2").module()
        results[name] = run(x)
assert not any(module.partition(".")[0] == "amp_fx" for module in sys.modules)
torch.save(results, f"{folder}/results.pt")
"""


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> dict[str, Tensor]:
    """Outputs of a fresh process that cannot import amp_fx, by file."""
    names = [*MODELS, *(f"{name}.aoti" for name in COMPILED)]
    run = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", WITHOUT_AMP_FX, str(folder), *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", MODELS)
def test_a_program_runs_where_there_is_no_amp_fx(
    exported: dict[str, Exported], elsewhere: dict[str, Tensor], name: str
) -> None:
    assert torch.equal(elsewhere[name], exported[name].outputs)


@pytest.mark.parametrize("name", COMPILED)
def test_a_package_runs_where_there_is_no_amp_fx(
    exported: dict[str, Exported], elsewhere: dict[str, Tensor], name: str
) -> None:
    case, outputs = exported[name], elsewhere[f"{name}.aoti"]
    assert outputs.dtype is torch.float32
    assert _error(outputs, case.exact) <= _allowed(_error(case.outputs, case.exact))


@pytest.mark.parametrize("name", COMPILED)
def test_no_kernel_of_a_package_casts_a_weight(
    exported: dict[str, Exported], folder: Path, name: str
) -> None:
    """Read from the C++ code in the package. Only the table of positions, which is looked up, is fp32."""
    with zipfile.ZipFile(folder / f"{name}.aoti.pt2") as package:
        path = next(path for path in package.namelist() if path.endswith(".wrapper.cpp"))
        source = package.read(path).decode()
    names = re.findall(r'constants_info_\[\d+\]\.name = "(\w+)"', source)
    shapes = re.findall(r"constants_info_\[\d+\]\.shape = \{([\d, ]*)\}", source)
    matrices = {n for n, shape in zip(names, shapes, strict=True) if "," in shape} - {
        "model_transformer_wpe_weight"
    }
    calls = [line for line in source.splitlines() if re.match(r"\s+cpp_fused\w*\(\(", line)]
    read = re.findall(r"\(const (float|at::BFloat16)\*\)\((\w+)\.data_ptr\(\)\)", "\n".join(calls))
    assert {n for dtype, n in read if dtype == "float"} & set(names), (
        "norms are read in fp32, or nothing is seen"
    )
    assert not {n for dtype, n in read if dtype == "float"} & matrices
    stored = {str(value.dtype) for value in exported[name].program.state_dict.values() if value.ndim > 1}
    assert "torch.bfloat16" in stored


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program of the examples, built against the torch package."""
    program = tmp_path_factory.mktemp("runner") / "run_package"
    libraries = cpp_extension.library_paths()
    command = [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(EXAMPLES / "run_package.cpp"),
        "-o",
        str(program),
        *(f"-I{path}" for path in cpp_extension.include_paths()),
        *(flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *("-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr
    return program


# g++ reads torch's headers for 15 seconds
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_package_runs_in_a_program_in_cpp(
    exported: dict[str, Exported], elsewhere: dict[str, Tensor], folder: Path, runner: Path, name: str
) -> None:
    case = exported[name]
    source, target = folder / f"{name}.in.bin", folder / f"{name}.out.bin"
    case.x.numpy().tofile(source)
    dtype = "float32" if case.x.is_floating_point() else "int64"
    command = [str(runner), str(folder / f"{name}.aoti.pt2"), str(source), dtype, str(target)]
    run = subprocess.run(
        [*command, *(str(size) for size in case.x.shape)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    outputs = torch.frombuffer(bytearray(target.read_bytes()), dtype=torch.float32).view(case.exact.shape)
    assert torch.equal(outputs, elsewhere[f"{name}.aoti"])


def _onnx(ep: ExportedProgram, path: Path, **options: Any) -> Path:
    program = torch.onnx.export(ep, dynamo=True, verbose=False, **options)
    assert program is not None
    program.save(str(path))
    return path


def _ran(path: Path, x: Tensor) -> Tensor:
    """What onnxruntime computes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def test_onnxruntime_runs_a_program_in_fp16(exported: dict[str, Exported], tmp_path: Path) -> None:
    case = exported["bert"]
    ep = amp_fx.convert(case.stock, dtype="float16", profile="off")
    outputs = _ran(_onnx(ep, tmp_path / "model.onnx"), case.x)
    with torch.no_grad():
        fp16, fp32 = ep.module()(case.x), case.model(case.x)
    assert outputs.dtype is torch.float32
    assert _error(outputs, case.exact) <= _allowed(_error(fp16, case.exact))
    assert _error(outputs, case.exact) > 10 * _error(fp32, case.exact), "it really computes in fp16"


def _norms() -> Parts:
    """Every norm between low calls."""

    def call(m: Any, x: Tensor) -> Tensor:
        x = m.linear(m.convolutions(x).mean((1, 2)))
        return m.last(m.layer(x) + m.flat(x))

    first, second = nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 8, 3)
    norms = nn.BatchNorm2d(16), nn.InstanceNorm2d(8, affine=True)
    return Parts(
        call,
        convolutions=nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1]),
        linear=nn.Linear(12, 16),
        layer=nn.LayerNorm(16),
        flat=nn.BatchNorm1d(16),
        last=nn.Linear(16, 8),
    )


def test_norms_between_low_calls_load_and_run_in_onnxruntime_as_they_were_exported(tmp_path: Path) -> None:
    import onnx

    model, x = _norms().eval(), torch.randn(4, 3, 12, 12)
    ep = amp_fx.export(model, (x,), dtype="float16", profile="off")
    path = _onnx(ep, tmp_path / "model.onnx", optimize=False)
    onnx.checker.check_model(str(path), full_check=True)
    _check(_ran(path, x), ep, model, x)


def _check(outputs: Tensor, ep: ExportedProgram, model: nn.Module, x: Tensor) -> None:
    exact = copy.deepcopy(model).double()(x.double()).detach()
    with torch.no_grad():
        assert _error(outputs, exact) <= _allowed(_error(ep.module()(x), exact))


@pytest.mark.parametrize(
    "options", [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"policy": "int8", "profile": "off"}], ids=str
)
def test_a_file_is_written_checked_and_runs_in_openvino(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    import openvino

    path, model, x = tmp_path / "model.onnx", _norms().eval(), torch.randn(8, 3, 12, 12)
    with caplog.at_level(logging.INFO, "amp_fx.exporting"):
        ep = amp_fx.export_onnx(model, (x,), path, **options)
    # onnxruntime has no kernels for bf16
    assert ("not run" in caplog.text) == (options.get("dtype") != "float16")
    # by itself OpenVINO rounds what the file has in fp32
    run = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    _check(torch.from_numpy(run([x.numpy()])[0]), ep, model, x)


def test_a_model_that_overflows_in_fp16_has_a_file_whose_results_are_right(tmp_path: Path) -> None:
    # or an error would say so
    amp_fx.export_onnx(Beyond().eval(), (torch.randn(4, 64),), tmp_path / "model.onnx", dtype="float16")


def test_a_file_that_computes_something_else_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args = nn.Linear(16, 4).eval(), (torch.randn(4, 16),)
    other = amp_fx.export(nn.Linear(16, 4).eval(), args, dtype="float16")
    monkeypatch.setattr("amp_fx.exporting.onnx_file.export", lambda *_, **__: other)
    with pytest.raises(amp_fx.ExportError, match="from the model's"):
        amp_fx.export_onnx(model, args, tmp_path / "model.onnx")
    with pytest.raises(amp_fx.ExportError, match="no folder"):
        amp_fx.export_onnx(model, args, tmp_path / "nowhere" / "model.onnx")


def test_the_command_line_names_what_no_runtime_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnx

    def refuse(*_: object, **__: object) -> None:
        raise onnx.checker.ValidationError("Scale has inconsistent type")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    (tmp_path / "one_linear.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(8, 8), (torch.ones(2, 8),)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["export", "one_linear:make", "-o", "model.pt2", "--dtype", "float16", "--onnx"]) == 1
    assert "Scale has inconsistent type" in capsys.readouterr().err


def test_onnxruntime_says_that_it_has_no_bf16_kernels_on_cpu(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    ep = amp_fx.export(nn.Linear(8, 8).eval(), (x,), profile="off")
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*Gemm"):
        _ran(_onnx(ep, tmp_path / "model.onnx"), x)
