"""No product of bytes returns fp16 on a CPU, whatever the option: oneDNN takes 1,400 times as long as for bf16."""

from __future__ import annotations

import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import amp_fx
from support.models.calibrated import PROFILE, calibrated, convnet, images
from support.models.small import Parts

pytestmark = pytest.mark.int8

#: calls of oneDNN on bytes, in code in Python, which names the dtype of the result, and in C++, by a variable of it
_PYTHON = re.compile(r"onednn\.(?:qconv|qlinear)\w*\.\w+\(.*?torch\.(\w+)")
_CPP = re.compile(r"aoti_torch_cpu__(?:qconv|qlinear)\w*pointwise\w*\(.*?&(var_\d+)")


def returned(code: str) -> list[str]:
    """The dtypes of the results of oneDNN's calls on bytes."""
    found = _PYTHON.findall(code)
    for call in _CPP.finditer(code):
        before = re.findall(rf"\b{call[1]} = cached_torch_dtype_(\w+)", code[: call.start()])
        found.append(before[-1])
    return found


def test_what_calls_return_is_read_off_code() -> None:
    python = "buf = torch.ops.onednn.qlinear_pointwise.default(x, 1.0, 3, w, s, z, b, 1.0, 0, torch.float16, 'none')"
    cpp = "int32_t var_0 = cached_torch_dtype_uint8; int32_t var_0 = cached_torch_dtype_float16; aoti_torch_cpu__qlin"
    cpp += "ear_pointwise_tensor(buf0, w, 0.008, 19L, &var_0, &buf1_handle)"
    assert returned(python) == ["float16"]
    assert returned(cpp) == ["float16"]


def linears() -> tuple[nn.Module, Tensor]:
    """Activations, an addition and a norm behind products, whose results may be asked for in any dtype."""

    def program(m: Any, x: Tensor) -> Tensor:
        return m.head(m.norm(x + m.down(nn.functional.gelu(m.up(x)))) + m.plain(x).relu())

    torch.manual_seed(0)
    parts = {"up": nn.Linear(64, 128), "down": nn.Linear(128, 64), "plain": nn.Linear(64, 64)}
    return Parts(program, **parts, norm=nn.LayerNorm(64), head=nn.Linear(64, 8)).eval(), torch.randn(24, 64)


def plan_of(model: nn.Module, x: Tensor) -> Any:
    return calibrated(model, [x], dtype="float16").plan(budget=1000, verify=False)


@pytest.mark.parametrize(
    ("form", "fewest"),
    [
        ("int8_packed", 2),
        pytest.param("auto", 2, marks=pytest.mark.slow),
        pytest.param("int8_unpacked", 0, marks=pytest.mark.slow),
        pytest.param("int8_signed", 0, marks=pytest.mark.slow),
        pytest.param("measured", 3, marks=pytest.mark.slow),
        pytest.param("convolutions", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "given",
    [{}, *(pytest.param({"weights": each}, marks=pytest.mark.slow) for each in ("freeze", "cast"))],
    ids=str,
)
def test_compiled_products_of_bytes_return_no_fp16(
    form: str, fewest: int, given: dict[str, Any], tmp_path: Path
) -> None:
    replace(PROFILE, launch=1e-9).save(profile := str(tmp_path / "profile.json"))
    model, x = (convnet(), images()) if form == "convolutions" else linears()
    options = {"dtype": "float16", "profile": profile, "strict": True, **given}
    if form in ("measured", "convolutions"):
        options["plan"] = plan_of(model, x)
    else:
        options |= {"policy": "int8", "int8": form}
    torch._dynamo.reset()
    run = torch.compile(model, backend="amp_fx", options={**options, "cpp_wrapper": False})
    with torch.inference_mode():
        _, codes = run_and_get_code(run, x)
    found = returned("\n".join(codes))
    # a weight that is made in each call is not packed
    assert len(found) >= (0 if given.get("weights") == "cast" else fewest)
    assert not {"float16", "half"} & {*found}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "measured", "convolutions"])
def test_packaged_products_of_bytes_return_no_fp16(form: str, tmp_path: Path) -> None:
    model, x = (convnet(), images()) if form == "convolutions" else linears()
    options: dict[str, Any] = {"policy": "int8"} if form == "auto" else {"plan": plan_of(model, x)}
    with torch.no_grad():
        program = amp_fx.export(model, (x,), dtype="float16", **options)
    path = amp_fx.package(program, tmp_path / "package.pt2")
    with zipfile.ZipFile(path) as packed:
        code = [packed.read(name).decode() for name in packed.namelist() if name.endswith((".cpp", ".h"))]
    found = returned("\n".join(code).replace("\n", " "))
    assert found
    assert not {"float16", "half"} & {*found}
