"""Exported models where they are used: a process without amp_fx, AOTInductor in Python and C++, ONNX runtimes.

Each model is exported once; all tests share that on one worker.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
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
from examples import hugging_face
from support.checks.below_16_bits import FP8_CPU, error_of, exact
from support.models.small import Parts, UpDown
from support.tracing.captured_graphs import rewrite

pytestmark = pytest.mark.xdist_group("export")

#: packages are built for these
COMPILED = ("gpt2",)

#: of one argument that takes any number
BATCHES = (({0: Dim("batch", min=1, max=64)},),)


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


def _export(build: Callable[[], nn.Module], inputs: Callable[[int], Tensor]) -> Exported:
    torch.manual_seed(0)
    model = Parts(lambda m, x: m.model(x).logits, model=build()).eval()
    stock = torch.export.export(model, (inputs(2),), dynamic_shapes=BATCHES)
    program = amp_fx.convert(stock, profile="off")
    x = inputs(5)
    with torch.no_grad():
        wide = copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x)
        outputs = program.module()(x)
    return Exported(model, x, stock, program, wide, outputs)


def _package(program: ExportedProgram, path: Path) -> str:
    # the code around the kernels takes longer to optimise than it gains here
    return amp_fx.package(program, path, inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"})


def _code(package: Path) -> str:
    """The C++ around the kernels."""
    with zipfile.ZipFile(package) as files:
        return files.read(next(name for name in files.namelist() if name.endswith(".wrapper.cpp"))).decode()


@pytest.fixture(scope="module")
def exported() -> dict[str, Exported]:
    return {name: _export(*row) for name, row in MODELS.items()}


@pytest.fixture
def case(exported: dict[str, Exported], name: str) -> Exported:
    return exported[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, exported: dict[str, Exported]) -> Path:
    """The files: NAME.pt2, NAME.stock.pt2, NAME.x.pt, and NAME.aoti.pt2 of those in COMPILED."""
    path = tmp_path_factory.mktemp("export")
    for name, case in exported.items():
        torch.export.save(case.program, path / f"{name}.pt2", extra_files=amp_fx.extra_files(case.program))
        torch.export.save(case.stock, path / f"{name}.stock.pt2")
        torch.save(case.x, path / f"{name}.x.pt")
    for name in COMPILED:
        _package(exported[name].program, path / f"{name}.aoti.pt2")
    return path


def _allowed(error: float) -> float:
    return 1.1 * error + 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_as_accurate_as_those_of_the_backend_and_of_autocast(case: Exported) -> None:
    with torch.no_grad():
        backend = rewrite(case.model, case.x, options={"weights": "cast"}).outputs
        with torch.autocast("cpu", torch.bfloat16):
            autocast = case.model(case.x)
        fp32 = case.model(case.x)
    found = error_of(case.outputs, case.exact)
    assert case.outputs.dtype is torch.float32
    assert found <= _allowed(error_of(backend, case.exact))
    assert found <= _allowed(error_of(autocast, case.exact))
    assert found > 10 * error_of(fp32, case.exact), "it really computes in bf16"


@pytest.mark.parametrize("name", MODELS)
def test_files_are_about_half_as_large(folder: Path, name: str) -> None:
    ours, stock = (folder / f"{name}.pt2").stat().st_size, (folder / f"{name}.stock.pt2").stat().st_size
    assert ours < 0.62 * stock, f"{ours} and {stock} bytes"


#: what a machine without amp_fx runs
WITHOUT_AMP_FX = """
import sys
sys.modules["amp_fx"] = None  # whoever imports it has an error
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
assert not any(module.startswith("amp_fx.") for module in sys.modules)
torch.save(results, f"{folder}/results.pt")
"""


Results = dict[str, Tensor]


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> Results:
    """Outputs of a fresh process that cannot import amp_fx, by file."""
    names = [*MODELS, *(f"{name}.aoti" for name in COMPILED)]
    _ran_command(sys.executable, "-I", "-W", "ignore", "-c", WITHOUT_AMP_FX, str(folder), *names)
    return torch.load(folder / "results.pt")


def _ran_command(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", MODELS)
def test_a_program_runs_where_there_is_no_amp_fx(case: Exported, elsewhere: Results, name: str) -> None:
    assert torch.equal(elsewhere[name], case.outputs)


@pytest.mark.parametrize("name", COMPILED)
def test_a_package_runs_where_there_is_no_amp_fx(case: Exported, elsewhere: Results, name: str) -> None:
    outputs = elsewhere[f"{name}.aoti"]
    assert outputs.dtype is torch.float32
    assert error_of(outputs, case.exact) <= _allowed(error_of(case.outputs, case.exact))


@pytest.mark.parametrize("name", COMPILED)
def test_a_package_refuses_what_it_was_not_made_for(case: Exported, folder: Path, name: str) -> None:
    run = torch._inductor.aoti_load_package(str(folder / f"{name}.aoti.pt2"))
    # a batch of one, too, which tracing takes for a constant
    for size in (len(case.x), 1):
        assert error_of(run(case.x[:size]), case.exact[:size]) < 0.1
    for other, told in (
        (case.x[:, :-1].contiguous(), "expected: 32, but got: 31"),
        (case.x.int(), "unmatched dtype"),
        (case.x.t().contiguous().t(), "unmatched stride"),
        (case.x[:1].expand(65, -1).contiguous(), "expected to be <= 64, but got: 65"),
    ):
        with pytest.raises(RuntimeError, match=told):
            run(other)


def test_a_package_compares_a_size_with_the_least_that_the_program_states_for_it(tmp_path: Path) -> None:
    """Read from C++ code that nobody compiles. Tracing takes 2 for the least of the batch, which states none."""
    model, x = Parts(lambda m, x: m.net(x).sum(1), net=nn.Linear(8, 8)).eval(), torch.randn(6, 9, 8)
    program = amp_fx.export(model, (x,), dynamic_shapes=(({0: Dim("batch"), 1: Dim("rows", min=4)},),))
    path = str(tmp_path / "package.pt2")
    amp_fx.package(program, path, inductor_configs={"aot_inductor.package_cpp_only": True})
    least = dict(re.findall(r"_size\[(\d)\] < (\d+)", _code(Path(path))))
    assert least == {"0": "0", "1": "4"}


@pytest.mark.parametrize("name", COMPILED)
def test_no_kernel_of_a_package_casts_a_weight(case: Exported, folder: Path, name: str) -> None:
    """Read from the C++ code in the package. Only the table of positions, which is looked up, is fp32."""
    source = _code(folder / f"{name}.aoti.pt2")
    names = re.findall(r'constants_info_\[\d+\]\.name = "(\w+)"', source)
    shapes = re.findall(r"constants_info_\[\d+\]\.shape = \{([\d, ]*)\}", source)
    matrices = {n for n, shape in zip(names, shapes, strict=True) if "," in shape}
    calls = [line for line in source.splitlines() if re.match(r"\s+cpp_fused\w*\(\(", line)]
    read = set(re.findall(r"\(const float\*\)\((\w+)\.data_ptr\(\)\)", "\n".join(calls)))
    assert read & set(names), "norms are read in fp32, or nothing is seen"
    assert read & matrices <= {"model_transformer_wpe_weight"}
    assert torch.bfloat16 in {value.dtype for value in case.program.state_dict.values() if value.ndim > 1}


@pytest.mark.bf16
def test_a_package_has_packed_weights_and_attention_by_products(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = hugging_face.bert(**SIZES, hidden=1024).eval(), _tokens(8)
    # which one is the cheaper depends on the CPU
    rule = {"op": "scaled_dot_product_attention", "precision": "low", "implementation": "products"}
    program = amp_fx.export(model, (tokens,), policy={"rules": [rule]})
    run = torch._inductor.aoti_load_package(_package(program, tmp_path / "package.pt2"))
    with torch.no_grad():
        wide = copy.deepcopy(model).double()(tokens).logits
        outputs, found = program.module()(tokens).logits, run(tokens).logits
    assert error_of(found, wide) <= _allowed(error_of(outputs, wide))
    called = Counter(re.findall(r"aoti_torch_cpu_(\w+)\(", _code(tmp_path / "package.pt2")))
    # query, key and value are one; three after them, and the two of the head
    assert (called["_linear_pointwise"], called["bmm_out"], called["baddbmm_out"]) == (6, 2, 1)


@torch.library.custom_op("amp_fx_export::address", mutates_args=())
def _address(weight: Tensor) -> Tensor:
    return torch.tensor([weight.data_ptr()])


@_address.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@pytest.mark.skipif(sys.platform != "linux", reason="not aligned where the C library may lack aligned_alloc")
def test_weights_of_a_package_begin_at_cache_lines(tmp_path: Path) -> None:
    """Behind one, oneDNN's AMX products take 1.5 times as long."""
    model = Parts(lambda m, x: (m.linear(x), _address(m.linear.weight)), linear=nn.Linear(512, 512)).eval()
    program = amp_fx.export(model, (torch.randn(2, 512),))
    path = _package(program, tmp_path / "package.pt2")
    # one of four blocks would begin at a cache line by chance
    loaded = [torch._inductor.aoti_load_package(path) for _ in range(3)]
    assert [int(run(torch.randn(2, 512))[1]) % 64 for run in loaded] == [0, 0, 0]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program of the examples, built against the torch package."""
    program, libraries = tmp_path_factory.mktemp("runner") / "run_package", cpp_extension.library_paths()
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    _ran_command(
        *(os.environ.get("CXX", "g++"), "-std=c++20", abi),
        *(str(Path(hugging_face.__file__).with_name("run_package.cpp")), "-o", str(program)),
        *(f"-I{path}" for path in cpp_extension.include_paths()),
        *(flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *("-ltorch", "-ltorch_cpu", "-lc10"),
    )
    return program


# g++ reads torch's headers for 15 seconds
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_package_runs_in_a_program_in_cpp(
    case: Exported, elsewhere: Results, folder: Path, runner: Path, name: str
) -> None:
    source, target = folder / f"{name}.in.bin", folder / f"{name}.out.bin"
    case.x.numpy().tofile(source)
    dtype = "float32" if case.x.is_floating_point() else "int64"
    files = str(folder / f"{name}.aoti.pt2"), str(source), dtype, str(target)
    _ran_command(str(runner), *files, *map(str, case.x.shape))
    outputs = torch.frombuffer(bytearray(target.read_bytes()), dtype=torch.float32).view(case.exact.shape)
    assert torch.equal(outputs, elsewhere[f"{name}.aoti"])


# what a program in fp8 stores and computes is in tests/fake/exporting
@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11: AOTInductor's C++ does not name e4m3")
def test_a_package_in_fp8_computes_what_its_program_does_in_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    net = Parts(lambda m, x: m.head(x + m.net(x)), net=UpDown(256, 1024), head=nn.Linear(256, 16))
    model, x = net.eval().requires_grad_(False), torch.randn(5, 256)
    FP8_CPU.save(tmp_path / "profile.json")
    given: Any = {"policy": "fp8", "fp8": "rowwise", "profile": str(tmp_path / "profile.json")}
    program = amp_fx.export(model, (x,), dynamic_shapes=BATCHES, **given)
    torch.export.save(program, tmp_path / "program.pt2")
    wide = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (tmp_path / "program.pt2").stat().st_size < 0.3 * wide
    package = torch._inductor.aoti_load_package(_package(program, tmp_path / "package.pt2"))
    for rows in (x, torch.randn(17, 256)):
        found = package(rows)
        assert 0.005 < error_of(found, exact(model, rows)) < 0.06
        assert error_of(found, program.module()(rows).double()) < 0.01
