"""The pass that has casts written before they are viewed, on fake CUDA tensors. End to end: tests/cpu/targets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx._torch import FakeTensorMode
from amp_fx.passes import PassContext, WriteCasts

aten = torch.ops.aten
STREAM, WEIGHT = (2, 4, 8), (8, 8)


def low(x: Tensor) -> Tensor:
    return torch.ops.prims.convert_element_type.default(x, torch.bfloat16)


def rows(x: Tensor) -> Tensor:
    return aten.view.default(x, [8, 8])


def changed(program: Callable[[Tensor, Tensor], object], dtype: torch.dtype = torch.float32) -> int:
    """How many casts the pass marks in ``program`` of a stream, in fp32 unless said, and a weight in bf16."""
    with FakeTensorMode():
        stream = torch.empty(STREAM, dtype=dtype, device="cuda")
        gm = make_fx(program)(stream, torch.empty(WEIGHT, dtype=torch.bfloat16, device="cuda"))
    targets = [node.target for node in gm.graph.nodes]
    before = {node: {*node.meta} for node in gm.graph.nodes}
    WriteCasts().call(gm, PassContext())
    assert [node.target for node in gm.graph.nodes] == targets
    return sum(node.meta.keys() != keys for node, keys in before.items())


def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A stream's gradient is multiplied by the weight and by what the forward saved, and goes on in fp32."""
    total = x + 1
    viewed = rows(low(total))
    return viewed @ w, aten.permute.default(viewed, [1, 0]) @ w, total * 2


def test_a_low_copy_of_what_goes_on_in_fp32_is_written_in_its_own_shape() -> None:
    assert changed(gradient) == 1


def test_what_is_repeated_is_narrowed_once() -> None:
    def keys(x: Tensor, w: Tensor) -> Tensor:
        return aten.clone.default(aten.expand.default(low(aten.unsqueeze.default(x + 1, 1)), [2, 3, 4, 8]))

    assert changed(keys) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: rows(low(x + 1)) @ w,
        lambda x, w: (rows(low(x)) @ w, x * 2),
        lambda x, w: (aten.bmm.default(low(total := x + 1), w.expand(2, 8, 8)), total * 2),
        lambda x, w: (rows(low(total := x + 1)) * 2, total * 2),
        lambda x, w: (rows(cast := low(total := x + 1)) @ w, cast * 2, total * 2),
        lambda x, w: (aten.reshape.default(low(total := x.mT + 1), [8, 8]) @ w, total * 2),
        lambda x, w: aten.expand.default(low(aten.slice.Tensor(x, 1, 0, 1) + 1), list(STREAM)) * 2,
        lambda x, w: aten.clone.default(aten.expand.default(low(aten.unsqueeze.default(x, 1)), [2, 3, 4, 8])),
    ],
    ids=[
        "not shared",
        "an input",
        "no view",
        "not multiplied",
        "also read as it is",
        "not contiguous",
        "repeated in registers",
        "a repeated input",
    ],
)
def test_other_casts_stay(program: Callable[[Tensor, Tensor], object]) -> None:
    assert changed(program) == 0


def test_a_widening_cast_stays() -> None:
    def wide(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        total = x + 1
        return rows(total.float()) @ w.float(), total * 2

    assert changed(wide, torch.bfloat16) == 0
