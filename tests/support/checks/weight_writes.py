"""The ways to write to a weight, and whether the next call sees each: the rule of ``docs/inference.md`` as a table."""

# what is called here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from amp_fx.graphs.keys import KEPT_META, Kept
from amp_fx.precision.policy.forms import ScaledRows
from amp_fx.runtime.weights.cache import WeightCache, keep
from amp_fx.runtime.weights.lift import Prepare, prepare_of

_flat = functools.partial(torch.randn, 3 * 65536)


class Layer(nn.Linear):
    """A linear whose weight lies in a flat vector, as after ``vector_to_parameters``."""

    def __init__(self) -> None:
        super().__init__(64, 1024, bias=False)
        self.flat = _flat()
        self.weight.data = self.flat[65536:131072].view(1024, 64)


def new_layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def _new() -> Tensor:
    return torch.randn(1024, 64)


def _without_gradients(write: Callable[[Tensor], object]) -> Callable[[Layer], object]:
    def run(layer: Layer) -> None:
        with torch.no_grad():
            write(layer.weight)

    return run


def _step(layer: Layer, gradient: Tensor, **options: bool) -> None:
    layer.weight.grad = gradient
    torch.optim.SGD(layer.parameters(), lr=0.1, **options).step()
    layer.weight.grad = None


def _two_rows_change_places(layer: Layer) -> None:
    data = layer.weight.data
    data[3], data[5] = data[5].clone(), data[3].clone()


_ONE_ROW = torch.zeros(1024, 64).index_fill_(0, torch.tensor(33), 1.0)

#: the ways to write to the weight of ``new_layer()`` that the next call sees
SEEN: dict[str, Callable[[Layer], object]] = {
    # autograd counts these
    "an in-place operation": _without_gradients(lambda p: p.mul_(2.0)),
    "an in-place operation on one element": _without_gradients(lambda p: p[33, 3].add_(1.0)),
    "an assignment to a row": _without_gradients(lambda p: p.__setitem__(33, 1.0)),
    "in place, detached": lambda layer: layer.weight.detach()[33].zero_(),
    "nn.init": lambda layer: nn.init.normal_(layer.weight),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": _new()}),
    # the parameter is another, or elsewhere
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict({"weight": _new()}, assign=True),
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(_new())),
    "p.data = q": lambda layer: setattr(layer.weight, "data", _new()),
    "p.data = f(p.data)": lambda layer: setattr(layer.weight, "data", layer.weight.data * 1.5),
    "swap_tensors": lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(_new())),
    "vector_to_parameters": lambda layer: vector_to_parameters(
        2 * parameters_to_vector(layer.parameters()), layer.parameters()
    ),
    "half(), double(), float()": lambda layer: layer.half().double().float(),
    # optimizers; more of them in test_changes.py
    "a step": lambda layer: _step(layer, _new()),
    "a fused step": lambda layer: _step(layer, _new(), fused=True),
    "a fused step that changes one row": lambda layer: _step(layer, _ONE_ROW, fused=True),
    # in silence, to at least half of the elements
    "p.data.copy_": lambda layer: layer.weight.data.copy_(_new()),
    "p.data.mul_().add_(), as a moving average": lambda layer: layer.weight.data.mul_(0.999).add_(
        _new(), alpha=0.001
    ),
    "p.data.zero_": lambda layer: layer.weight.data.zero_(),
    "p.data.addmm_, as an adapter is merged": lambda layer: layer.weight.data.addmm_(
        torch.randn(1024, 4), torch.randn(4, 64)
    ),
    "torch._foreach_mul_": lambda layer: torch._foreach_mul_([layer.weight.data], 0.5),
    "in inference_mode": torch.inference_mode()(lambda layer: layer.weight.data.mul_(0.5)),
    "numpy": lambda layer: layer.weight.detach().numpy().__iadd__(1.0),
    "DLPack": lambda layer: torch.from_dlpack(layer.weight.detach()).neg_(),
    "its storage": lambda layer: layer.weight.untyped_storage().copy_(_flat().untyped_storage()),
    "a flat vector": lambda layer: layer.flat.mul_(2.0),
    "a slice of a flat vector, all of the view": lambda layer: layer.flat[65536:131072].mul_(2.0),
    "a slice of a flat vector, half of the view": lambda layer: layer.flat[:98304].mul_(2.0),
    "half of the rows": lambda layer: layer.weight.data[512:].mul_(2.0),
    "every second column": lambda layer: layer.weight.data[:, 1::2].mul_(2.0),
    "the left half": lambda layer: layer.weight.data[:, :32].mul_(2.0),
    "the upper halves of its experts": lambda layer: layer.weight.data.view(8, 2, 64, 64)[:, 1].mul_(2.0),
}

#: those that it sees after ``amp_fx.weights.touch`` only: in silence, to a smaller part
MISSED: dict[str, Callable[[Layer], object]] = {
    "a row": lambda layer: layer.weight.data[33].mul_(300.0),
    "an element": lambda layer: layer.weight.data[57, 3].add_(1.0),
    "a row by numpy": lambda layer: layer.weight.detach().numpy()[99].fill(0.0),
    "two rows that change places": _two_rows_change_places,
    "a row in a flat vector": lambda layer: layer.flat[65536 + 33 * 64 : 65536 + 34 * 64].zero_(),
    "another slice of a flat vector": lambda layer: layer.flat[:65536].mul_(2.0),
}

#: way -> how to write, and whether the next call sees it
WRITES = {way: (write, way in SEEN) for way, write in {**SEEN, **MISSED}.items()}


# ---- weights, and low copies of them as a graph has them ----


def new_weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((64, 48), (48,), (3,), (8, 4, 3, 3))]


def copies_in(weights: Sequence[Tensor | None], *forms: torch.dtype | ScaledRows) -> Prepare:
    """What a graph makes of weights: copies in one form, or in one for each. A dtype needs no value of its weight."""
    graph, made = fx.Graph(), list[fx.Node]()
    inputs = [graph.placeholder(f"weight{at}") for at in range(len(weights))]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(target, args, kwargs)

    for at, (node, weight) in enumerate(zip(inputs, weights, strict=True)):
        form, node.meta["val"] = forms[at % len(forms)], weight
        is_cast = isinstance(form, torch.dtype)
        copies = (call(torch.ops.aten.to.dtype, node, form),) if is_cast else form.steps(node, call)
        for copy in copies:
            copy.meta[KEPT_META] = Kept(node.name, "", form)
        made += copies
    return prepare_of(fx.GraphModule({}, graph), inputs, [(copy, None) for copy in made])


def copies_for(count: int, dtype: torch.dtype = torch.bfloat16) -> WeightCache[list[Tensor]]:
    """The copies of so many weights in a graph."""
    return WeightCache(functools.partial(keep, copies_in([None] * count, dtype)))


def are_current(copies: WeightCache[list[Tensor]], parameters: Sequence[Tensor]) -> bool:
    return all(torch.equal(c, p.to(c.dtype)) for c, p in zip(copies.of(parameters), parameters, strict=True))
