"""Gradient accumulation by a compiled backward, beside autograd's own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from amp_fx.accumulation.second import Second
from graphs import DEFAULTS

#: just worth adding, see the pass
WIDTH = 128

#: gets the model as compiled, the model itself and the micro-batches
Loop = Callable[[Callable[..., Tensor], Any, list[Tensor]], object]


class Net(nn.Module):
    """All tests that do not care about the model share it, and so what is compiled for it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def batches(count: int) -> list[Tensor]:
    return [torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(count)]


def loss_of(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclass
class Added:
    """How many backward graphs added to gradients themselves."""

    count: int = 0


@contextlib.contextmanager
def watching() -> Iterator[Added]:
    """Counts inside the block."""
    added = Added()
    run = Second.run

    def counted(self: Any, args: list[Any], grads: list[Tensor]) -> Any:
        added.count += 1
        return run(self, args, grads)

    with mock.patch.object(Second, "run", counted):
        yield added


def compiled(model: nn.Module, accumulation: str, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(
        model, backend="amp_fx", options={**DEFAULTS, "accumulation": accumulation, **options}
    )


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def run_both(
    loop: Loop, count: int = 4, make: Callable[[], nn.Module] = Net, **options: Any
) -> tuple[int, nn.Module, nn.Module]:
    """Runs a loop with each way to add; the gradients must have the same bits.

    Returns:
        How many backward graphs added, and the models: added to by the graph, and by autograd.
    """
    model = make()
    twin = copy.deepcopy(model)
    # code that was compiled for one is not to be run with the other
    torch._dynamo.reset()
    reference = loop(compiled(twin, "autograd", **options), twin, batches(count))
    torch._dynamo.reset()
    with watching() as added:
        result = loop(compiled(model, "graph", **options), model, batches(count))
    assert_same(result, reference)
    for grad, other in zip(gradients(model), gradients(twin), strict=True):
        assert_same(grad, other)
    return added.count, model, twin


def assert_same(value: object, other: object) -> None:
    """The same bits, as far as there are tensors in it."""
    if isinstance(value, Tensor):
        assert isinstance(other, Tensor)
        assert value.dtype is other.dtype
        assert value.layout is other.layout
        dense, others = value.detach().to_dense(), other.detach().to_dense()
        assert torch.equal(dense, others)
        # a zero has a sign
        assert torch.equal(dense.signbit(), others.signbit())
    elif isinstance(value, (list, tuple)):
        assert isinstance(other, (list, tuple))
        for one, two in zip(value, other, strict=True):
            assert_same(one, two)
    else:
        assert (value is None) == (other is None)
