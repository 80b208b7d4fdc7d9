"""What is computed from weights is computed once, shared, and follows those weights that have changed."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_fx
from amp_fx._torch import Packing, packing
from amp_fx.runtime.weights.cache import keep
from amp_fx.runtime.weights.calling import FrozenGraph
from amp_fx.runtime.weights.lift import Prepare, prepare_of, weights_of
from support.checks.held_memory import Held
from support.tracing.captured_graphs import rewrite, without_inductor

aten = torch.ops.aten

FP32 = {"rules": [{"op": "linear", "precision": "fp32"}]}


def derived(program: Callable[..., Sequence[fx.Node]], *names: str, how: Packing | None = None) -> Prepare:
    """What a program makes of inputs of these names; it gets the function that adds a call, and the inputs."""
    graph = fx.Graph()
    nodes = program(lambda target, *args: graph.call_function(target, args), *map(graph.placeholder, names))
    return prepare_of(fx.GraphModule(nn.Module(), graph), weights_of(nodes), [(node, how) for node in nodes])


def doubled_and_summed() -> Prepare:
    return derived(lambda call, a, b: [call(aten.mul.Tensor, a, 2), call(aten.add.Tensor, a, b)], "a", "b")


def packed(batch: int) -> Prepare:
    """A matrix, packed for a batch size."""
    how = packing("linear", torch.Size((64, 64)), torch.float32, batch)
    return derived(lambda call, weight: [call(aten.mul.Tensor, weight, 2)], "weight", how=how)


def values(*numbers: float) -> list[Tensor]:
    return [torch.full((4,), number) for number in numbers]


def tensors_of(constants: Prepare, weights: Sequence[Tensor]) -> list[Tensor]:
    return keep(constants, weights).value


def test_only_what_depends_on_a_changed_weight_is_computed_again() -> None:
    constants, weights = doubled_and_summed(), values(1.0, 10.0)
    made = keep(constants, weights)
    versions = [value._version for value in made.value]
    assert [value[0].item() for value in made.value] == [2.0, 11.0]
    assert all(map(operator.is_, tensors_of(constants, weights), made.value))
    weights[1].fill_(20.0)
    # who holds the values has the new ones
    assert all(map(operator.is_, tensors_of(constants, weights), made.value))
    assert [value[0].item() for value in made.value] == [2.0, 21.0]
    assert made.value[0]._version == versions[0]
    assert made.value[1]._version > versions[1]


def test_graphs_that_compute_the_same_share_it(held: Held) -> None:
    one, other, weights = doubled_and_summed(), doubled_and_summed(), values(1.0, 10.0)
    kept = keep(one, weights), keep(other, weights)
    assert all(map(operator.is_, kept[0].value, kept[1].value))
    assert held.bytes() == 32
    # other weights have constants of their own, and do not disturb these
    others = keep(one, values(3.0, 3.0))
    assert held.bytes() == 64
    assert [value[0].item() for value in kept[0].value] == [2.0, 11.0]
    del kept, others
    assert held.bytes() == 0


def test_the_order_of_the_inputs_does_not_matter_their_roles_do() -> None:
    # weights are taken in the order in which they are read
    swapped = derived(lambda call, b, a: [call(aten.sub.Tensor, a, b)], "b", "a")
    straight = derived(lambda call, a, b: [call(aten.sub.Tensor, a, b)], "a", "b")
    kept = keep(straight, given := values(5.0, 3.0))
    assert tensors_of(swapped, given)[0] is kept.value[0]
    assert kept.value[0][0].item() == 2.0


def test_what_is_packed_alike_for_two_batch_sizes_is_one_tensor(held: Held) -> None:
    weight = torch.randn(64, 64)
    one, other = keep(packed(16), [weight]), keep(packed(128), [weight])
    assert one.value[0] is other.value[0]
    assert held.bytes() == 4 * 64 * 64


def test_autocast_and_inference_mode_of_the_caller_do_not_matter() -> None:
    weights = [torch.randn(4, 4), torch.randn(4, 4)]
    constants = derived(lambda call, a, b: [call(aten.mm.default, a, b)], "a", "b")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        [value] = tensors_of(constants, weights)
    assert torch.equal(value, weights[0] @ weights[1])
    assert not value.is_inference()


def test_a_graph_is_compiled_for_one_model_while_it_is_for_another() -> None:
    began, another, waited = threading.Event(), threading.Event(), list[bool]()

    def compiler(gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        """Stands for Inductor: the first graph takes until another is compiled."""
        if began.is_set():
            another.set()
        else:
            began.set()
            waited.append(another.wait(20))
        return gm

    graph = fx.Graph()
    weight = graph.placeholder("weight")
    with FakeTensorMode():
        weight.meta = {"val": torch.empty(4), "example_value": nn.Parameter(torch.empty(4))}
    graph.output(graph.call_function(aten.neg.default, (weight,)))
    frozen = FrozenGraph(fx.GraphModule({}, graph), compiler, may_change=True, wide=True)
    got, models = dict[int, Tensor](), [nn.Parameter(torch.full((4,), float(at))) for at in range(2)]

    def call(model: int) -> None:
        args = [models[model]]
        got[model] = frozen.run(args, frozen.prepared(args))

    first, second = (threading.Thread(target=call, args=(model,), daemon=True) for model in range(2))
    first.start()
    began.wait(20)
    second.start()
    for thread in (first, second):
        thread.join(30)
    assert waited == [True]
    assert all(torch.equal(got[at], -weights) for at, weights in enumerate(models))


@pytest.mark.parametrize(("options", "is_kept"), [({"profile": "off"}, True), ({"policy": FP32}, False)])
def test_a_program_that_follows_a_plan_keeps_copies_and_one_that_needs_none_says_nothing(
    options: dict[str, Any], is_kept: bool, held: Held
) -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(4, 16)
    followed: dict[str, Any] = {"plan": rewrite(model, x, options=options).plan}
    with without_inductor(), amp_fx.record() as recording, torch.inference_mode():
        run = torch.compile(lambda x: model(x), backend="amp_fx", options=followed)
        torch.testing.assert_close(run(x), run(x))
    assert [bool(held.bytes()), bool(recording.plans[0].weights)] == [is_kept, is_kept]
