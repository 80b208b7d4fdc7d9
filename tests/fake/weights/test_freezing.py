"""Graphs may be frozen in several threads at a time, and inside one another."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx._torch import observe_freezing
from amp_fx.weights.graphs import FrozenGraph


class Nothing:
    """Lifts nothing."""

    def note_given(self, gm: fx.GraphModule) -> None: ...

    def note(self, gm: fx.GraphModule, node: fx.Node, constant: Tensor) -> None: ...

    def choose(self, gm: fx.GraphModule) -> Sequence[Sequence[fx.Node]]:
        return ()

    @property
    def values(self) -> Callable[[], Sequence[Tensor]]:
        return tuple


def test_what_is_replaced_in_inductor_is_put_back_after_the_last_of_several_threads() -> None:
    import torch._inductor.freezing as freezing

    original, both, errors = freezing.constant_fold, threading.Barrier(2), []

    def freeze() -> None:
        try:
            # who is second gets here only if it does not wait for the first
            with observe_freezing(Nothing()), observe_freezing(Nothing()):
                both.wait(20)
        except threading.BrokenBarrierError as error:
            errors.append(error)

    threads = [threading.Thread(target=freeze) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert freezing.constant_fold is original


def test_graphs_of_other_threads_are_folded_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.freezing as freezing

    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.neg.default, (graph.get_attr("value"),)))
    root = torch.nn.Module()
    root.register_buffer("value", torch.ones(2))
    gm, folded = fx.GraphModule(root, graph), list[bool]()
    monkeypatch.setattr(Nothing, "note", lambda *_: folded.append(True))
    with observe_freezing(Nothing()):
        other = threading.Thread(target=lambda: freezing.constant_fold(gm))
        other.start()
        other.join()
    assert [node.op for node in gm.graph.nodes] == ["get_attr", "output"]
    assert not folded


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
    frozen = FrozenGraph(fx.GraphModule({}, graph), compiler, may_change=True, packs_wide=True)
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
