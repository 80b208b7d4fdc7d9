"""DTensors in a graph: captured as plain tensors, placed, and run as DTensors again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from amp_fx import record
from graphs import DEFAULTS, plans, without_inductor
from small_models import Parts

BF16 = torch.bfloat16


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """A process group whose other process is made up: what it sends is undefined."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_two")
def test_a_call_that_takes_dtensors_is_placed() -> None:
    torch._dynamo.reset()
    block = Parts(lambda m, x: x + m.down(F.gelu(m.up(x))), up=nn.Linear(64, 128), down=nn.Linear(128, 64))
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled = torch.compile(block, backend="amp_fx", options=dict(DEFAULTS))
    with without_inductor(), record() as recording:
        result = compiled(torch.randn(4, 64))
    assert result.dtype is torch.float32
    (plan,) = recording.plans
    assert [row.dtype for row in plans(plan, "linear")] == [BF16, BF16]
    assert {"from_local", "redistribute", "to_local"} <= {row.op for row in plan.nodes}
    result.sum().backward()
    for name, parameter in block.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.dtype is torch.float32
