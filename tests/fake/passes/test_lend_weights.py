"""Low copies of weights in training: which come in as inputs, and who reads them. End to end: tests/cpu/weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import amp_fx.rewriting
from amp_fx._torch import FakeTensorMode
from amp_fx.graphs.facts import COPY_META
from amp_fx.graphs.regions import ambient_regions
from amp_fx.options import Options
from amp_fx.passes import PassContext, ReadCopies
from graphs import DEFAULTS, casts_of, dynamo_graph

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
WIDTH = 128


def rewritten(model: nn.Module, *args: Tensor, training: bool = True, **options: Any) -> fx.GraphModule:
    opts = Options.parse(None, {**DEFAULTS, "weights": "cache", **options})
    regions = ambient_regions({"cpu": opts.low_dtype("cpu")})
    return amp_fx.rewriting.rewrite(dynamo_graph(model, *args), regions, opts, training=training)[0]


def copies(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.find_nodes(op="placeholder") if COPY_META in node.meta]


class Net(nn.Module):
    """A linear with a bias, and one that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.small = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.wide(x).relu())


X = torch.randn(4, WIDTH)


def test_a_copy_comes_in_after_all_inputs_and_the_cast_stays() -> None:
    gm, plain = rewritten(Net(), X), rewritten(Net(), X, weights="cast")
    (copy,) = copies(gm)
    assert copy is gm.graph.find_nodes(op="placeholder")[-1]
    assert not copy.users
    value = copy.meta["val"]
    assert (value.dtype, tuple(value.shape), value.requires_grad) == (torch.bfloat16, (WIDTH, WIDTH), False)
    assert casts_of(gm) == casts_of(plain)


class Shared(nn.Module):
    """One weight, seen through a view and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ self.weight.t()


class Checkpointed(nn.Module):
    """The weight is cast in the body of a checkpoint, in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]


@pytest.mark.parametrize("make", [Shared, Checkpointed])
def test_a_weight_has_one_copy(make: Callable[[], nn.Module]) -> None:
    assert len(copies(rewritten(make(), X))) == 1


class Convolution(nn.Module):
    """Laid out where it is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.reshape(1, WIDTH, 2, 2).repeat(1, 1, 2, 2))


class Written(nn.Module):
    """The graph writes to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.scale) @ self.weight
        with torch.no_grad():
            self.weight.mul_(0.5)
        return y


class Given(nn.Module):
    """Multiplies with what is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x * self.scale) @ weight


@pytest.mark.parametrize(
    ("make", "args"),
    [(Convolution, (X[:1].repeat(1, 4),)), (Written, (X,)), (Given, (X, torch.randn(WIDTH, WIDTH)))],
)
def test_others_are_cast_in_each_call(make: Callable[[], nn.Module], args: tuple[Tensor, ...]) -> None:
    assert copies(rewritten(make(), *args)) == []


@pytest.mark.parametrize(
    "options",
    [{"weights": "auto"}, {"triton.cudagraphs": True}, {"cpp_wrapper": True}, {"policy": "fp8"}],
)
def test_copies_are_asked_for_and_not_with_fp8_cuda_graphs_or_the_cpp_wrapper(
    options: dict[str, Any],
) -> None:
    assert copies(rewritten(Net(), X, **options)) == []


def joint_graph(program: Callable[..., object], low: torch.dtype = torch.bfloat16) -> fx.GraphModule:
    """A program of an activation, a weight and its copy, with AOTAutograd's descriptors."""
    with FakeTensorMode():
        x, copy = torch.empty(4, WIDTH, dtype=low), torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)
        gm = make_fx(program)(x, torch.empty(WIDTH, WIDTH), copy)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.meta["desc"] = PlainAOTInput(position)
    return gm


def read(gm: fx.GraphModule) -> int:
    """Casts that have gone."""
    before = len(gm.graph.find_nodes(op="call_function", target=CONVERT))
    ReadCopies(((1, 2),)).call(gm, PassContext())
    gm.graph.lint()
    return before - len(gm.graph.find_nodes(op="call_function", target=CONVERT))


def cast(w: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return CONVERT(w, dtype)


def test_matmuls_read_the_copy() -> None:
    gm = joint_graph(lambda x, w, copy: aten.mm.default(x, aten.permute.default(cast(w), [1, 0])))
    assert read(gm) == 1
    _, weight, copy = gm.graph.find_nodes(op="placeholder")
    assert not weight.users
    (view,) = copy.users
    assert view.target is aten.permute.default


def test_a_cast_that_is_made_twice_goes_twice() -> None:
    gm = joint_graph(lambda x, w, copy: (aten.mm.default(x, cast(w)), aten.mm.default(x, cast(w))))
    assert read(gm) == 2


def read_otherwise_too(x: Tensor, w: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
    low = cast(w)
    # generated code need not round where the program casts
    return aten.mm.default(x, low), low + 1.0


@pytest.mark.parametrize(
    ("program", "low"),
    [
        (read_otherwise_too, torch.bfloat16),
        (lambda x, w, copy: aten.mm.default(x, cast(w, torch.float16)), torch.float16),
        (lambda x, w, copy: cast(w), torch.bfloat16),
    ],
)
def test_other_casts_stay(program: Callable[..., object], low: torch.dtype) -> None:
    assert read(joint_graph(program, low)) == 0


def test_an_input_that_aotautograd_has_changed_is_left_alone() -> None:
    gm = joint_graph(lambda x, w, copy: aten.mm.default(x, cast(w)))
    del gm.graph.find_nodes(op="placeholder")[2].meta["desc"]
    assert read(gm) == 0
