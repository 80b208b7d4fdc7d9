"""The floor: the matmuls, convolutions and attention of a step alone, on the operands of a real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

__all__ = ["only_matmuls"]


def only_matmuls(step: Callable[[], object]) -> Callable[[], None]:
    """Runs a step once, eagerly, and returns what repeats its matmul-like calls and nothing else.

    No compiled step that computes the same can be faster, but for what its kernels fuse into such calls.
    """
    recorder = _Recorder()
    with recorder:
        step()
    calls = recorder.calls

    def repeat() -> None:
        with torch.no_grad():
            for function, args, kwargs in calls:
                function(*args, **kwargs)

    return repeat


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket in flop_registry:
            self.calls.append((func, *tree_map(_detached, (args, kwargs))))
        return func(*args, **kwargs)


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value
