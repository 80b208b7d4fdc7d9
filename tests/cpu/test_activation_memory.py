"""What a step keeps in 8 bits, compiled: by itself, with sizes that vary, from caches, and beside checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import amp_fx


class Block(nn.Module):
    """A norm and two maps, within checkpointing where that is asked for."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        found: Any = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return (x + found).float().square().mean()

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def gradients(model: Block, call: Any, rows: int, scale: float = 1.0) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    (call(x.to(model.norm.weight.dtype)) * scale).backward()
    return [p.grad.double() / scale for p in model.parameters() if p.grad is not None]


def built(**given: Any) -> Block:
    torch.manual_seed(0)
    return Block(**given)


def is_near(found: list[Tensor], right: list[Tensor]) -> bool:
    return all((one - other).norm() < 2e-2 * other.norm() for one, other in zip(found, right, strict=True))


def test_steps_in_eight_bits_are_right_at_every_size_and_from_a_warm_cache() -> None:
    exact = built().to(torch.float64)
    runs = []
    for memory in ("int8", "keep", "int8"):
        torch._dynamo.reset()
        counters.clear()
        model = built()
        # no other option
        compiled: Any = torch.compile(model, backend="amp_fx", options={"activation_memory": memory})
        runs.append([gradients(model, compiled, rows) for rows in (128, 96, 160)])
        assert all(
            is_near(found, gradients(exact, exact, rows))
            for found, rows in zip(runs[-1], (128, 96, 160), strict=True)
        )
    # the third had the code of the first, and the second had not
    assert counters["aot_autograd"]["autograd_cache_saved"] == 0
    for first, kept, again in zip(*runs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(first, kept, strict=True))


def test_a_budget_goes_with_fp16_a_scaler_and_checkpointing() -> None:
    torch._dynamo.reset()
    model, exact = built(again=True), built().to(torch.float64)
    options = {"dtype": "float16", "activation_memory": 0.6, "profile": "off"}
    compiled: Any = torch.compile(model, backend="amp_fx", options=options)
    assert is_near(gradients(model, compiled, 128, scale=64.0), gradients(exact, exact, 128))


def test_a_scaler_sees_what_is_not_finite() -> None:
    torch._dynamo.reset()
    model = built()
    compiled: Any = torch.compile(model, backend="amp_fx", options={"activation_memory": "int8"})
    for bad in (float("inf"), float("nan")):
        x = torch.randn(128, 64)
        x[3, 5] = bad
        model.zero_grad()
        compiled(x).backward()
        assert any(not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.5, 0.2, 0.05])
def test_budgets_compiled_give_right_gradients(memory: float) -> None:
    torch._dynamo.reset()
    model, exact = built(), built().to(torch.float64)
    compiled = amp_fx.compile(model, activation_memory=memory)
    found, right = gradients(model, compiled, 512), gradients(exact, exact, 512)
    # 4 bits are off by as much as the noise of a step
    allowed = 2e-2 if memory > 0.1 else 0.3
    assert all((one - other).norm() < allowed * other.norm() for one, other in zip(found, right, strict=True))
