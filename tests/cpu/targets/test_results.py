"""Rules that have the result of a low product in fp32, for a GPU that is not there: code, counts and plans."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.targets.tracing import TracedGraph
from generated import Code
from small_models import Parts
from targets import OFF, needs_a_target, process, traced

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]

#: a matmul of low operands that returns fp32
_WIDE_CALL = re.compile(r"extern_kernels\.b?mm_dtype\(|extern_kernels\.b?mm\(.*out_dtype=torch\.float32")


def logits_and_loss(m: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """With a bias and two batch dimensions."""
    logits = m.head(m.up(x))
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def graphs() -> list[TracedGraph]:
    model = Parts(logits_and_loss, up=nn.Linear(128, 128), head=nn.Linear(128, 256))
    return traced(model, torch.randn(4, 32, 128), torch.randint(256, (4, 32)))


def options(precision: str = "low", **more: str) -> dict[str, Any]:
    rule = {"module": "head", "precision": precision, **more}
    return {**OFF, "policy": {"rules": [rule]}}


@pytest.fixture(scope="module")
def head() -> list[TracedGraph]:
    return graphs()


def sources(traced_graphs: list[TracedGraph], given: dict[str, Any]) -> list[Code]:
    return process().call("generated:sources", traced_graphs, given)


def test_the_forward_multiplies_low_operands_and_returns_fp32(head: list[TracedGraph]) -> None:
    forward, backward = (code.text for code in sources(head, options(result="fp32")))
    assert len(_WIDE_CALL.findall(forward)) == 1
    # gradients are those of a low product: of the weights in fp32, of the input low
    assert len(_WIDE_CALL.findall(backward)) == 2


def test_without_gradients_it_returns_fp32_too() -> None:
    with torch.no_grad():
        [code] = sources(graphs(), options(result="fp32"))
    assert len(_WIDE_CALL.findall(code.text)) == 1


def test_it_moves_more_than_a_rounded_result_and_less_than_fp32(head: list[TracedGraph]) -> None:
    low, wide, fp32 = (
        process().call("targets:compiled", head, given)
        for given in (options(), options(result="fp32"), options("fp32"))
    )
    assert low.wide == ("gradient", "gradient")
    assert low.counts.bytes_moved < wide.counts.bytes_moved < fp32.counts.bytes_moved
    assert wide.counts.extern_kernels == low.counts.extern_kernels
    assert len(wide.wide) == 3
    assert "activation" not in wide.casts


def test_batched_products_return_fp32() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b).exp().sum()

    args = [torch.randn(4, 64, 64, requires_grad=True) for _ in range(2)]
    given = {**OFF, "policy": {"rules": [{"op": "bmm", "precision": "low", "result": "fp32"}]}}
    forward, _ = (code.text for code in sources(traced(program, *args), given))
    assert len(_WIDE_CALL.findall(forward)) == 1
