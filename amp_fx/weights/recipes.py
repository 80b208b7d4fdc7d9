"""Recipes: how tensors are derived from weights. They are cast, scaled, or computed and packed in any other way."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from amp_fx._torch import Packing, autocast_disabled
from amp_fx.graphs.keys import RECIPE_META
from amp_fx.policy.levels import LEVELS
from amp_fx.policy.scaled import Emit, run, scale_of, scaled

aten = torch.ops.aten


class Recipe(Protocol):
    """How tensors are derived from weights. Recipes that do the same are equal."""

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The derived tensors. ``before``: those of these weights before, written to if possible; else empty."""
        ...


@dataclass(frozen=True)
class Cast:
    """The weight in a low dtype, laid out as it is. One tensor."""

    dtype: torch.dtype

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See :class:`Recipe`."""
        [weight] = weights
        tensors = before or (torch.empty_like(weight, dtype=self.dtype, requires_grad=False),)
        tensors[0].copy_(weight)
        return tensors

    def steps(self, weight: fx.Node, call: Emit) -> tuple[fx.Node]:
        """The copy as a node of a graph, made with ``call``."""
        return (call(aten.to.dtype, weight, self.dtype),)


@dataclass(frozen=True)
class Scaled:
    """A matrix with one factor for each column of what it is multiplied to. Two tensors.

    The first is (columns, contracted), contiguous, in the dtype of the level; the second fp32 (columns, 1): ``data *
    factors`` is the matrix. Where factors are powers of two, scaling itself rounds nothing, so that every runtime
    computes the same copy.

    Attributes:
        level: name of the level, which has a scale for each row.
        in_rows: True if the weight is (columns, contracted), else it is the other way round.
        bits: of int8 that are used.
    """

    level: str
    in_rows: bool
    bits: int = 8

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See :class:`Recipe`."""
        [weight] = weights
        made = self.made(weight)
        for tensor, value in zip(before, made, strict=bool(before)):
            tensor.copy_(value)
        return before or made

    def made(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a weight."""
        return self._made(weight, weight.dtype, run)

    def steps(self, weight: fx.Node, call: Emit) -> tuple[fx.Node, fx.Node]:
        """The copy as nodes of a graph, each made with ``call``."""
        return self._made(weight, weight.meta["val"].dtype, call)

    def _made(self, weight: Any, dtype: torch.dtype, call: Emit) -> tuple[Any, Any]:
        level, is_wide = LEVELS[self.level], dtype is torch.float32
        rows = weight if self.in_rows else call(aten.permute.default, weight, [1, 0])
        scale = scale_of(rows, level.dtype, [[-1]], call, powers=level.powers, is_wide=is_wide)
        if level.dtype is torch.int8 and self.bits < 8:
            scale = call(aten.mul.Tensor, scale, 2.0 ** (self.bits - 8))
        data, factors = scaled(rows, scale, level.dtype, call)
        return call(aten.clone.default, data, memory_format=torch.contiguous_format), factors


def with_norm(
    weight: Any, bias: Any, norm: Sequence[Any], sizes: Sequence[int], call: Emit
) -> tuple[Any, Any]:
    """Weight and bias of a convolution or a product, in fp32, with a norm behind it folded in.

    Args:
        weight: in fp32 or low.
        bias: or None.
        norm: scale or None, shift or None, mean, variance and epsilon of a BatchNorm in inference.
        sizes: -1 for the dimension of the weight that is the result's channels, else 1.
        call: runs each op, or adds it to a graph.
    """
    scale, shift, mean, variance, epsilon = norm
    factor = call(aten.rsqrt.default, call(aten.add.Tensor, variance, epsilon))
    if scale is not None:
        factor = call(aten.mul.Tensor, factor, scale)
    moved = call(aten.neg.default, mean) if bias is None else call(aten.sub.Tensor, bias, mean)
    moved = call(aten.mul.Tensor, moved, factor)
    if shift is not None:
        moved = call(aten.add.Tensor, moved, shift)
    return call(aten.mul.Tensor, weight, call(aten.reshape.default, factor, list(sizes))), moved


class _Place(int):
    """In the arguments of a :class:`_Step`: a weight by its position, or behind all weights the result of a step."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


class _Step(NamedTuple):
    """A call; as text, all that its result depends on."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.target}{self.args}{self.kwargs or ''}"


@dataclass(frozen=True)
class _Computed:
    """What a graph computes from weights alone: a tensor for each of its results."""

    expression: str  # the steps as text
    results: tuple[tuple[_Place, Packing | None], ...]  # the step of each tensor, and how oneDNN packs that
    steps: tuple[_Step, ...] = field(compare=False, repr=False)

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See :class:`Recipe`."""
        values: list[Any] = [weight.detach() for weight in weights]
        with autocast_disabled():
            for step in self.steps:
                args, kwargs = tree_map_only(_Place, values.__getitem__, (step.args, step.kwargs))
                values.append(step.target(*args, **kwargs))
            made = [values[at] if pack is None else pack(values[at]) for at, pack in self.results]
        for tensor, value in zip(before, made, strict=bool(before)):
            tensor.copy_(value)
        return before or (*made,)


#: what is derived: a node that is computed from weights alone, and how it is packed, or None
Derived = tuple[fx.Node, Packing | None]


def computed(gm: fx.GraphModule, weights: Sequence[fx.Node], wanted: Sequence[Derived]) -> Recipe:
    """The recipe of values that a graph computes from weights."""
    places = {weight: _Place(at) for at, weight in enumerate(weights)}
    steps: list[_Step] = []

    def place(node: fx.Node) -> _Place:
        if node not in places:
            if node.op == "get_attr":
                steps.append(_Step(_Fixed(operator.attrgetter(str(node.target))(gm)), (), {}))
            else:
                for arg in node.all_input_nodes:
                    place(arg)
                steps.append(_Step(node.target, *map_arg((node.args, node.kwargs), places.__getitem__)))
            places[node] = _Place(len(places))
        return places[node]

    results = tuple((place(node), how) for node, how in wanted)
    if len(steps) == len(results) == 1 and steps[0].target is aten.to.dtype and wanted[0][1] is None:
        # graphs that pack nothing have the same
        return Cast(steps[0].args[1])
    return _Computed("; ".join(map(repr, steps)), results, tuple(steps))


class _Fixed:
    """A step that gives a constant of the graph."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def __call__(self) -> torch.Tensor:
        return self._value

    def __repr__(self) -> str:
        value = self._value
        return f"{value.tolist()} {value.dtype}" if value.numel() == 1 else f"constant {id(value)}"


#: recipes of copies that graphs read as inputs
CopyRecipe = Cast | Scaled


def recipe_of(node: fx.Node) -> tuple[CopyRecipe, int]:
    """The recipe of an input that is a copy of a weight, and which of its tensors the input is."""
    return node.meta.get(RECIPE_META) or (Cast(node.meta["val"].dtype), 0)
