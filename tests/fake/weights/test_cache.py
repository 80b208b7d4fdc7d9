"""What is made of weights: once for all graphs and threads, again for what has changed, gone with the weights."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fx.compiler import compiling
from amp_fx.graphs.calls import is_cast
from amp_fx.runtime.weights.cache import WeightCache, keep
from amp_fx.runtime.weights.lift import Part, Prepare
from support.checks.held_memory import Held
from support.checks.weight_writes import are_current, copies_for, new_weights
from support.tracing.captured_graphs import DEFAULTS

#: seconds; more than any of this takes
LONG = 20.0


@pytest.mark.parametrize("asked", ["cache", "freeze"])
def test_graphs_with_gradients_cast_their_weights_and_the_log_says_so(
    asked: str, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lower = Mock(side_effect=lambda gm, *_: gm)
    monkeypatch.setattr(compiling, "lower", lower)
    options = {"weights": asked, **DEFAULTS}
    with caplog.at_level(logging.INFO, logger="amp_fx.compiler.backend"):
        for width in (16, 32):
            torch.compile(nn.Linear(width, 8), backend="amp_fx", options=options)(torch.randn(4, width))
    inputs = [call.args[0].graph.find_nodes(op="placeholder") for call in lower.call_args_list]
    assert [*map(len, inputs)] == [3, 3]
    assert all(map(is_cast, (user for found in inputs for node in found for user in node.users)))
    assert held.bytes() == 0
    assert [record.levelname for record in caplog.records if "'cast'" in record.getMessage()] == ["INFO"] * 2


@pytest.mark.parametrize("norm", [False, True])
def test_a_graph_is_not_given_the_weights_that_it_reads_copies_of_alone(
    norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = Mock(side_effect=lambda gm, *_: gm)
    monkeypatch.setattr(compiling, "lower", lower)
    model, x = nn.Sequential(nn.LayerNorm(64) if norm else nn.Tanh(), nn.Linear(64, 48)), torch.randn(4, 64)
    with torch.no_grad():
        found = torch.compile(model, backend="amp_fx", options={"weights": "cache", **DEFAULTS})(x)
        torch.testing.assert_close(found, model(x), rtol=2e-2, atol=2e-2)
    (call,) = lower.call_args_list
    # the value, and weight and bias of the norm; copies of those of the linear
    inputs = call.args[0].graph.find_nodes(op="placeholder")
    assert len(inputs) == len(call.args[1]) == 1 + 2 * norm + 2
    assert all(node.users for node in inputs)


def test_a_copy_that_failed_half_way_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, copies = nn.Parameter(torch.randn(64, 64)), copies_for(1)
    assert are_current(copies, [parameter])
    original, make = parameter.detach().clone(), Part.make

    def fail(self_: Part, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        make(self_, weights, before)
        raise MemoryError

    parameter.data.mul_(2.0)
    with monkeypatch.context() as patch:
        patch.setattr(Part, "make", fail)
        with pytest.raises(MemoryError):
            copies.of([parameter])
    # the weight is again what its copy was made from
    parameter.data.copy_(original)
    assert are_current(copies, [parameter])


# ---- what is shared ----


def test_graphs_and_models_that_read_the_same_weights_share_copies() -> None:
    shared, own = nn.Parameter(torch.randn(64, 64)), new_weights()
    models = [[shared, own[0]], [shared, nn.Parameter(torch.randn(64, 48))]]
    graphs = [copies_for(2), copies_for(2)]
    first = [graph.of(model) for graph in graphs for model in models]
    assert len({id(copies[0]) for copies in first}) == 1
    versions = [copies[0]._version for copies in first]
    shared.data.mul_(2.0)
    assert all(are_current(graph, model) for graph in graphs for model in models)
    # cast once for all of them, where it lies
    assert [graph.of(model)[0]._version for graph in graphs for model in models] == [versions[0] + 1] * 4


def test_a_weight_in_another_order_of_memory_gets_a_copy_in_that_order() -> None:
    parameter = nn.Parameter(torch.randn(8, 4, 3, 3))
    copies = copies_for(1)
    assert are_current(copies, [parameter])
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    assert are_current(copies, [parameter])
    assert copies.of([parameter])[0].stride() == parameter.stride()


def test_inference_tensors_are_weights_too_and_copies_that_were_made_there_are_renewed_outside() -> None:
    with torch.inference_mode():
        made_there, copies = [nn.Parameter(torch.randn(64, 64))], copies_for(1)
        assert are_current(copies, made_there)
        made_there[0].mul_(2.0)
        assert are_current(copies, made_there)
    parameters, copies = new_weights(), copies_for(4)
    with torch.inference_mode():
        copies.of(parameters)
    parameters[0].data.mul_(2.0)
    with torch.no_grad():
        assert are_current(copies, parameters)


# ---- lives ----


def test_copies_die_with_their_weights(held: Held) -> None:
    parameters = new_weights()
    copies = copies_for(4)
    low = weakref.ref(copies.of(parameters)[0])
    storage = weakref.ref(parameters[0].untyped_storage())
    gc.disable()
    try:
        del parameters
        assert (low(), storage(), held.bytes()) == (None, None, 0)
    finally:
        gc.enable()


def test_memory_that_outlives_its_weight_keeps_one_copy_for_whoever_is_there(held: Held) -> None:
    flat = torch.randn(64 * 48)
    copies = copies_for(1)
    for size in (64, 48, 64):
        # a new object each time, perhaps with the id of the one before
        parameter = nn.Parameter(flat[: size * 48].view(size, 48))
        assert are_current(copies, [parameter])
        assert copies.of([parameter])[0].shape == parameter.shape
        flat.mul_(2.0)
        assert are_current(copies, [parameter])
    assert held.bytes() <= 2 * (64 + 48) * 48
    del flat, parameter
    assert held.bytes() == 0


def test_weights_that_change_between_two_pieces_of_memory_have_one_copy(held: Held) -> None:
    moved, stays = nn.Parameter(torch.randn(64, 48)), nn.Parameter(torch.randn(8))
    # as moving averages are put in the place of what is trained, and taken out again
    values = [moved.data, torch.randn(64, 48)]
    graphs = [copies_for(2), copies_for(2)]
    kept = graphs[0].of([moved, stays])[1]
    version = kept._version
    for step in range(4):
        moved.data = values[step % 2]
        assert are_current(graphs[step % 2], [moved, stays])
        # the other graph has no copy of what lies in memory that the weight has left
        assert held.bytes() == 2 * (64 * 48 + 8)
        assert graphs[step % 2].of([moved, stays])[1] is kept
    assert kept._version == version


def test_what_is_derived_during_a_write_counts_for_one_call_even_if_the_write_is_undone() -> None:
    weight, writes = torch.ones(4), list[float]()
    graph = kept(Doubled("written to", lambda: weight.data.mul_(writes.pop()) if writes else None))
    for value in (1.0, 3.0):
        writes.append(2.0)
        weight.data.fill_(value)
        assert torch.equal(graph.of([weight])[0], torch.full((4,), 4 * value))
        # as it was before that call, or before the one before
        for undone in (value, 1.0):
            weight.data.fill_(undone)
            assert torch.equal(graph.of([weight])[0], torch.full((4,), 2 * undone))


# ---- threads ----


@dataclass(frozen=True)
class Doubled:
    """A part by name: twice the weight, in place; ``meanwhile`` is called before that is made."""

    name: str
    meanwhile: Callable[[], object] = field(default=lambda: None, compare=False)
    form: None = None

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.meanwhile()
        made = before or (torch.empty_like(weights[0]),)
        made[0].copy_(weights[0] * 2)
        return made


def kept(part: Any) -> WeightCache[list[Tensor]]:
    return WeightCache(functools.partial(keep, Prepare([(part, [0])], [(0, 0)])))


def in_threads(*functions: Callable[[], object]) -> list[bool]:
    """Whether each ends in time."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return [not thread.is_alive() for thread in threads]


def test_while_a_tensor_is_derived_others_are_in_other_threads() -> None:
    weight, began, other_is_made = torch.ones(4), threading.Event(), threading.Event()
    waited: list[bool] = []

    def wait() -> None:
        began.set()
        waited.append(other_is_made.wait(LONG))

    slow, quick = kept(Doubled("slow", wait)), kept(Doubled("quick"))

    def make_quick() -> None:
        began.wait(LONG)
        quick.of([weight])
        other_is_made.set()

    assert all(in_threads(lambda: slow.of([weight]), make_quick))
    assert waited == [True]


def test_what_several_threads_want_is_made_once() -> None:
    weight, made, all_want = torch.ones(4), list[int](), threading.Barrier(4)
    part = Doubled("once", lambda: made.append(1))
    graphs, got = [kept(part) for _ in range(4)], list[Tensor]()

    def want(graph: WeightCache[list[Tensor]]) -> None:
        all_want.wait(LONG)
        got.append(graph.of([weight])[0])

    assert all(in_threads(*(lambda graph=graph: want(graph) for graph in graphs)))
    assert made == [1]
    assert len({id(tensor) for tensor in got}) == 1


def test_what_is_derived_while_it_is_derived_ends() -> None:
    weight, inner = torch.ones(4), list[Tensor]()

    def want() -> None:
        if not inner:
            inner.append(torch.empty(0))
            inner.append(graph.of([weight])[0])

    graph = kept(Doubled("recursive", want))
    assert all(in_threads(lambda: graph.of([weight])))
    assert torch.equal(inner[1], weight * 2)
    assert torch.equal(graph.of([weight])[0], weight * 2)


def test_modes_of_the_program_do_not_run_while_others_may_wait() -> None:
    ops = list[str]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.ones(4)
    with Seen():
        kept(Doubled("in a mode")).of([weight])
    assert not [op for op in ops if "mul" in op]
