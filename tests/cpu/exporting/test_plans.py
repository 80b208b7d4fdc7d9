"""Exports that follow a plan, of ``explain`` or of what was measured; and a package in fp8, which a CPU emulates."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import amp_fx
from levels import FP8_CPU, error
from small_models import Beyond, Parts, UpDown

pytestmark = [
    pytest.mark.xdist_group("export"),
    # torch.export copies its own call graph by deepcopy, which warns
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


def _dtypes(plan: amp_fx.Plan) -> list[tuple[str, torch.dtype | None]]:
    """Of all calls; in Dynamo's graph of attention, ``contiguous`` stands where a program has none."""
    return [(row.op, row.dtype) for row in plan.nodes if row.op != "contiguous"]


@pytest.mark.usefixtures("op_by_op")
def test_an_export_by_measurement_keeps_in_fp32_what_leaves_the_range_of_fp16() -> None:
    model = Beyond().eval()
    batches = [(torch.randn(16, 64),) for _ in range(3)]
    plan = amp_fx.calibrate(model, batches, of="outputs", dtype="float16", profile="off").plan(budget=1)
    x = torch.randn(16, 64)
    with torch.no_grad():
        program = amp_fx.export(model, (x,), plan=plan, dtype="float16")
        found, exact = program.module()(x), model.double()(x.double())
    rows = dict(_dtypes(plan.plans[0]))
    assert rows["linear"] is torch.float16
    assert rows["square"] is rows["mean.dim"] is torch.float32
    assert error([found], [exact]) < 2 * torch.finfo(torch.float16).eps


# what a program in fp8 stores and computes is in tests/fake/exporting, what a package is in test_export.py
@pytest.mark.slow
def test_a_package_in_fp8_computes_what_its_program_computes_and_takes_a_quarter_of_the_bytes(
    tmp_path: Path,
) -> None:
    net = Parts(lambda m, x: m.head(x + m.net(x)), net=UpDown(256, 1024), head=nn.Linear(256, 16))
    model, x = net.eval().requires_grad_(False), torch.randn(5, 256)
    FP8_CPU.save(tmp_path / "profile.json")
    program = amp_fx.export(
        model,
        (x,),
        dynamic_shapes=(({0: Dim("batch", min=1, max=64)},),),
        policy="fp8",
        fp8="rowwise",
        profile=str(tmp_path / "profile.json"),
    )
    torch.export.save(program, tmp_path / "program.pt2")
    wide = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (tmp_path / "program.pt2").stat().st_size < 0.3 * wide
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "package.pt2"),
        # the code around the kernels takes longer to optimise than it gains here
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    package, exact = torch._inductor.aoti_load_package(path), copy.deepcopy(model).double()
    for rows in (x, torch.randn(17, 256)):
        found = package(rows)
        assert 0.005 < error([found], [exact(rows.double())]) < 0.06
        assert error([found], [program.module()(rows).double()]) < 0.01
