"""The Triton kernel of `amp_fx.runtime.weights.renewal`, without a GPU: interpreted, and compiled for GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.checks.held_memory import run_python
from support.torch_versions import fails_in

triton = pytest.importorskip("triton", reason="needs Triton, which builds of torch for GPUs bring")


@pytest.mark.slow
@fails_in("2.11", fault="its Triton 3.6 interprets no loop with NumPy 2.4")
def test_on_a_gpu_copies_follow_their_weights_and_writes_are_seen_as_on_a_cpu() -> None:
    program = Path(__file__).parents[2] / "support" / "programs" / "renewed_copies.py"
    # all of Triton is interpreted: that is decided when it is imported
    assert json.loads(run_python(str(program), TRITON_INTERPRET="1").stdout) == {
        "ways that break the rule": [],
        "only what was written to is made again": [True] * 14,
        "copies stay where they are": [True] * 14,
        "matrices in fp8": [True] * 15,
    }


def compiled_for(capability: int, weight: torch.dtype, copy: torch.dtype) -> str:
    """The assembly of the kernel."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from amp_fx.runtime.weights import renewal

    constants = renewal.constants(weight, copy)
    pointers = {"table": "*i64", "sampled": "*i64", "seen": f"*i{8 * weight.itemsize}"}
    source = ASTSource(
        fn=renewal.renew_kernel,
        signature={**pointers, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=renewal.OPTIONS)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_for_casts_compiles_and_rounds_to_nearest(dtype: torch.dtype, capability: int) -> None:
    assembly = compiled_for(capability, dtype, torch.bfloat16)
    if dtype is not torch.bfloat16:
        assert "cvt.rn.bf16" in assembly


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_the_kernel_for_scales_of_rows_compiles(capability: int) -> None:
    # to the nearest, in hardware
    assert "cvt.rn.satfinite.e4m3" in compiled_for(capability, torch.float32, torch.float8_e4m3fn)
