"""FLOPs outside of compiled graphs: operations of matmuls that a program computes eagerly, by dtype."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from amp_fx._torch import OpOverload, TorchDispatchMode, compile_id
from amp_fx.graphs.fake_runs import known_flops
from amp_fx.graphs.values import tensors
from amp_fx.precision.plans.plan import dtype_name


class OutsideFlops(TorchDispatchMode):
    """Counts, while it is entered, the operations of matmuls that are in no graph: dtype of the operands -> FLOPs."""

    # torch refuses them in a mode that does not say so; of their bodies nothing is counted
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self._graphs = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: Dynamo compiles all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Dynamo, too, runs calls on fake values
        if not self._graphs and isinstance(func, OpOverload) and compile_id() == "graph":
            flops = _flops(func, args, kwargs or {}, result)
            if flops:
                self.flops[dtype_name(tensors(args)[0].dtype)] += flops
        return result

    def leave_out(self, graph: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph in which nothing is counted."""

        @functools.wraps(graph)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in_graph():
                return graph(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _in_graph(self) -> Iterator[None]:
        self._graphs += 1
        try:
            yield
        finally:
            self._graphs -= 1


def _flops(op: OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """Operations of a call that multiplies matrices, else 0; of a fused recurrent layer those of its matrices."""
    name = op.__name__
    if "rnn" in name and op.namespace == "aten":
        given, *others = tensors(args[:3])
        steps = given.numel() // max(1, given.shape[-1])
        # gradients of inputs and of weights
        times = 2 if "backward" in name else 1
        return 2 * times * steps * sum(each.numel() for each in others if each.ndim == 2)
    if (known := known_flops(name, args, result)) is not None:
        return known
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(op.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)
