"""The Triton kernel of `amp_fx.weights.renewal`, without a GPU: interpreted, and compiled for GPUs.

Builds of torch for a CPU bring no Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# one worker interprets the program
pytestmark = pytest.mark.xdist_group("renewal")

triton = pytest.importorskip("triton", reason="needs Triton, which builds of torch for GPUs bring")

PROGRAM = Path(__file__).parents[2] / "renewed.py"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the program says, with all of Triton interpreted: that is decided when it is imported."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_on_a_gpu_writes_are_seen_as_on_a_cpu(interpreted: dict[str, Any]) -> None:
    assert interpreted["ways that break the rule"] == []


@pytest.mark.parametrize(
    ("what", "looks"),
    [
        ("only what was written to is made again", 14),
        ("copies stay where they are", 14),
        ("matrices in fp8", 15),
    ],
)
def test_copies_follow_their_weights(interpreted: dict[str, Any], what: str, looks: int) -> None:
    assert interpreted[what] == [True] * looks


def compiled_for(capability: int, weight: torch.dtype, copy: torch.dtype) -> str:
    """The assembly of the kernel."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from amp_fx.weights import renewal

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
