"""Graphs may be frozen in several threads at a time."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.weights.graphs import FrozenGraph


class Compiler:
    """Stands for Inductor: constants stay part of the code, and the first graph takes until another is compiled."""

    def __init__(self) -> None:
        self.began, self.another = threading.Event(), threading.Event()
        self.waited = list[bool]()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        if self.began.is_set():
            self.another.set()
        else:
            self.began.set()
            self.waited.append(self.another.wait(20))
        return gm


def test_a_graph_is_compiled_for_one_model_while_it_is_for_another() -> None:
    compiler, graph = Compiler(), fx.Graph()
    weight = graph.placeholder("weight")
    with FakeTensorMode():
        weight.meta = {"val": torch.empty(4), "example_value": nn.Parameter(torch.empty(4))}
    graph.output(graph.call_function(torch.ops.aten.neg.default, (weight,)))
    frozen = FrozenGraph(fx.GraphModule({}, graph), compiler, may_change=True, wide=True)
    got, models = dict[int, Tensor](), [nn.Parameter(torch.full((4,), float(at))) for at in range(2)]

    def call(model: int) -> None:
        args = [models[model]]
        got[model] = frozen.run(args, frozen.derived(args))

    first, second = (threading.Thread(target=call, args=(model,), daemon=True) for model in range(2))
    first.start()
    compiler.began.wait(20)
    second.start()
    for thread in (first, second):
        thread.join(30)
    assert compiler.waited == [True]
    assert all(torch.equal(got[at], -weights) for at, weights in enumerate(models))
