"""Values of weights are made in any number of threads, and while others are made: nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from amp_fx.weights import derived
from amp_fx.weights.changes import state_of
from amp_fx.weights.derived import derived_of
from amp_fx.weights.kept import Kept
from amp_fx.weights.values import Input, Values

#: seconds; more than any of this takes
LONG = 20.0


@dataclass(frozen=True)
class Doubled:
    """Twice the weight, in a moment or later.

    Attributes:
        name: of the recipe.
        meanwhile: is called while the value is made.
    """

    name: str
    meanwhile: Callable[[], object] = field(default=lambda: None, compare=False)

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.meanwhile()
        return (weights[0] * 2,)


def kept(recipe: Doubled) -> Kept[list[Tensor]]:
    return Kept(Values([(recipe, (0,))], [Input(0)]).make)


def in_threads(*functions: Callable[[], object]) -> list[bool]:
    """Whether each ends in time."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return [not thread.is_alive() for thread in threads]


def test_while_a_value_is_made_others_are_made_in_other_threads() -> None:
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
    recipe = Doubled("once", lambda: made.append(1))
    graphs, got = [kept(recipe) for _ in range(4)], list[Tensor]()

    def want(graph: Kept[list[Tensor]]) -> None:
        all_want.wait(LONG)
        got.append(graph.of([weight])[0])

    assert all(in_threads(*(lambda graph=graph: want(graph) for graph in graphs)))
    assert made == [1]
    assert len({id(tensor) for tensor in got}) == 1


def test_a_value_that_is_wanted_while_it_is_made_is_made_for_that_call() -> None:
    weight, inner = torch.ones(4), list[Tensor]()

    def want() -> None:
        if not inner:
            inner.append(torch.empty(0))
            inner.append(graph.of([weight])[0])

    graph = kept(Doubled("recursive", want))
    assert all(in_threads(lambda: graph.of([weight])))
    assert torch.equal(inner[1], weight * 2)
    assert torch.equal(graph.of([weight])[0], weight * 2)


def test_two_threads_that_want_what_the_other_makes_do_not_wait_for_each_other() -> None:
    weight, both = torch.ones(4), threading.Barrier(2)
    # or both look at it first, and what is made from one of two states is made again
    state_of(weight)
    nested = threading.local()

    def want(other: str) -> None:
        if not getattr(nested, "is_on", False):
            nested.is_on = True
            both.wait(LONG)
            graphs[other].of([weight])

    graphs = {"a": kept(Doubled("a", lambda: want("b"))), "b": kept(Doubled("b", lambda: want("a")))}
    assert all(in_threads(lambda: graphs["a"].of([weight]), lambda: graphs["b"].of([weight])))
    assert all(torch.equal(graph.of([weight])[0], weight * 2) for graph in graphs.values())


def test_who_has_waited_long_makes_a_value_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "_PATIENCE", 0.01)
    weight, lock, began = torch.ones(4), threading.Lock(), threading.Event()

    def make() -> None:
        if not began.is_set():
            began.set()
            with lock:
                pass

    graph, got = kept(Doubled("held up", make)), list[Tensor]()

    def want() -> None:
        # has what the maker waits for, as Dynamo has a lock while it compiles
        with lock:
            maker.start()
            began.wait(LONG)
            got.append(graph.of([weight])[0])

    maker = threading.Thread(target=lambda: graph.of([weight]), daemon=True)
    assert all(in_threads(want))
    maker.join(LONG)
    assert torch.equal(got[0], weight * 2)


def test_after_an_error_a_value_is_made_again() -> None:
    weight, errors = torch.ones(4), [ValueError("no memory")]

    def fail() -> None:
        if errors:
            raise errors.pop()

    recipe = Doubled("fails", fail)
    of_weight = derived_of(recipe, [weight])
    with pytest.raises(ValueError, match="no memory"):
        of_weight.bring([weight])
    _, states = of_weight.bring([weight])
    assert of_weight.states == states
    assert torch.equal(of_weight.tensors[0], weight * 2)
