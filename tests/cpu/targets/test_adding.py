"""What Inductor generates for an H100 of a backward that adds to gradients."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from amp_fx.targets.tracing import Tracer
from generated import Code
from targets import needs_a_target, process

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


class Net(nn.Module):
    """The gradient of a convolution leaves the library in 16 bits, that of a linear in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(64, 64, 3), nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3))).square().mean()


def backward(adds: bool) -> Code:
    torch._dynamo.reset()
    tracer = Tracer()
    torch.compile(Net(), backend=tracer)(torch.randn(4, 64, 8, 8))
    options = {"profile": "off", "strict": True}
    return process().call("generated:sources", tracer.graphs, options, torch.bfloat16, adds)[1]


def calls(code: Code, name: str) -> list[str]:
    """Calls of kernels that take an argument of the generated code."""
    body = code.text[code.text.index("def call(") :]
    made = [line.strip() for line in body.splitlines() if ".run(" in line or "torch.ops." in line]
    return [call for call in made if name in call]


def pointers(code: Code, kernel: str) -> list[str]:
    """Dtypes of what a kernel reads, and then of what it writes."""
    text = code.text[code.text.index(f"{kernel} = async_compile") :]
    signature = re.search(r"'signature': \{(.*?)\}", text)
    return re.findall(r"'\*(\w+)'", signature[1]) if signature else []


def test_a_16_bit_gradient_is_added_in_the_kernel_that_widens_it() -> None:
    code = backward(adds=True)
    conv, _ = (name for name in code.inputs if name.startswith("amp_fx_grad_"))
    (call,) = calls(code, conv)
    kernel, _, given = call.partition(".run(")
    # the gradient that is there, the one in 16 bits, and where the sum goes
    assert pointers(code, kernel) == ["fp32", "bf16", "fp32"]
    before, _, total = given.split(", ")[:3]
    assert before == total == conv


def test_a_matmul_that_returns_fp32_adds_in_its_last_step() -> None:
    code = backward(adds=True)
    _, head = (name for name in code.inputs if name.startswith("amp_fx_grad_"))
    (call,) = calls(code, head)
    assert call.startswith(f"torch.ops.amp_fx.add_product_.default({head}, ")


def test_nothing_is_added_in_a_kernel_of_its_own() -> None:
    first, second = (backward(adds).text.count("async_compile.triton(") for adds in (False, True))
    assert first == second
