"""What a forward graph keeps for its backward, in fewer bits."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import kept_positions, size_hint, unchanged_inputs
from amp_fx.errors import PassError
from amp_fx.graphs.calls import CAST, base_name
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import AGAIN, SAVED, Saved
from amp_fx.graphs.partition import kept_storages
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import PLACED_DTYPES, numel, tensors
from amp_fx.passes.base import Note, Pass, PassContext, PassResult
from amp_fx.passes.inductor.grouped_rounding import (
    BITS,
    GROUPS,
    from_bits,
    from_int4,
    from_int8,
    to_bits,
    to_int4,
    to_int8,
)
from amp_fx.precision.placement.kept import OPERAND, OTHER, KeptValue, choose

aten = torch.ops.aten

#: bytes of a value from which fewer bits pay
_LEAST = 4096
#: of a group, bytes of its scale, and in 4 bits of its least element
_SCALE, _RANGE = 2, 6
#: how many times as many elements a call reads as it returns where its result is a statistic
_STATISTIC = 4
# why a value is kept as it is
_SMALL = f"smaller than {_LEAST / 1e3:.0f} kB"
_EXACT = "its dtype is not rounded"
_NOT_DENSE = "its elements do not lie side by side"
_UNEVEN = "its innermost dimension is not fixed, or no multiple of {}"
_STATISTICS = f"made of {_STATISTIC} times as many elements or more, as statistics of norms are"
_EXPONENT = "the argument of an exponential, or a mask"
_NO_LESS = "its views take as much in 8 bits"
_ENOUGH = "the budget holds without"
_LAYOUT = (aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten.reshape.default)
_ADDS = (aten.add.Tensor, aten.sub.Tensor, aten.where.self, aten.expand.default, CAST, *_LAYOUT)
_EXPONENTIALS = (aten.exp.default, aten.exp2.default, aten._softmax.default, aten._log_softmax.default)


@dataclass(frozen=True)
class Groups:
    """How a value is read in groups: its dimensions from the outermost to the innermost, and elements of a group."""

    order: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class KeepLess(Pass):
    """Runs on a forward graph, once the joint graph is partitioned, before Inductor lowers it.

    ``weights`` are the positions of parameters among the program's inputs, ``most`` is how many bytes the forward may
    keep; None: each value is in 8 bits where that pays. What is chosen is said at
    :func:`amp_fx.precision.placement.kept.choose`. Never rounded are integers, statistics of norms and of a softmax,
    what is added to the argument of an exponential (masks, logits), values of less than 4 kB, and what the program
    returns or is given. Bools are kept in one bit. A low copy of a weight is cast again in the backward.

    Before, and after, for a low copy of a weight; what is marked is computed in the backward
    (:meth:`amp_fx.graphs.partition.Partition.hand_over`)::

        x: bf16[64, 64]; w: f32[64, 64]
        low = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        turned = torch.ops.aten.permute.default(low, [1, 0])
        y = torch.ops.aten.mm.default(x, low)
        return [y, turned]
        # after
        low = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        turned = torch.ops.aten.permute.default(low, [1, 0])
        low_again = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)   # bf16[64, 64]; again
        turned_again = torch.ops.aten.permute.default(low_again, [1, 0])              # bf16[64, 64]; again
        y = torch.ops.aten.mm.default(x, low)
        return [y, turned_again]
    """

    weights: tuple[int, ...] = ()
    most: int | None = None

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        kept, masters = kept_storages(gm), masters_of(gm, self.weights)
        values = described(kept, masters)
        bits = choose(values, self.most)
        if bits is None:
            raise PassError(f"what a step keeps takes more than {self.most} bytes in 4 bits, too")
        instead = {
            node: _smaller(node, masters, views[0].name, bits[views[0].name])
            for views in kept
            if views[0].name in bits
            for node in views
        }
        for views, value in zip(kept, values, strict=True):
            if value.name not in bits:
                for node in views:
                    node.meta[SAVED] = Saved(value.name, None, value.why or _ENOUGH)
        output: Any = gm.graph.output_node()
        positions, returned = set(kept_positions(gm)), enumerate(output.args[0])
        if instead:
            output.args = ([instead.get(node, node) if at in positions else node for at, node in returned],)
        chosen = [(value, bits.get(value.name)) for value in values]
        return PassResult(f"{len(instead)} values are kept in fewer bits", len(instead), {Note.KEPT: chosen})


def masters_of(gm: fx.GraphModule, weights: Sequence[int]) -> set[fx.Node]:
    """The inputs at these positions that are parameters, and stay what they are until the backward."""
    unchanged = unchanged_inputs(gm)
    return {unchanged[at] for at in weights if at in unchanged}


def described(kept: Sequence[Sequence[fx.Node]], masters: Collection[fx.Node]) -> list[KeptValue]:
    """Each storage that is kept, by the name of its first value, with the bytes that it takes in each form."""
    found = []
    for views in kept:
        size = size_hint(views[0].meta["val"].untyped_storage().nbytes())
        forms = [_forms(node, masters) for node in views]
        known = [form for form in forms if not isinstance(form, str)]
        if len(known) < len(forms) or sum(eight for eight, *_ in known) >= size:
            why = next((form for form in forms if isinstance(form, str)), _NO_LESS)
            found.append(KeptValue(views[0].name, size, size, size, why=why))
            continue
        eight, four, error = (sum(column) for column in zip(*known, strict=True))
        found.append(KeptValue(views[0].name, size, int(eight), int(four), error))
    return found


def _forms(node: fx.Node, masters: Collection[fx.Node]) -> tuple[int, int, float] | str:
    """The bytes of a value in 8 and in 4 bits, and what that adds to the error; or why it stays as it is."""
    if _weight_behind(node, masters):
        return 0, 0, 0.0
    value = node.meta["val"]
    if numel(value) * value.dtype.itemsize < _LEAST:
        return _SMALL
    groups = _groups(node)
    if isinstance(groups, str):
        return groups
    elements, count = numel(value), numel(value) // groups.size
    if value.dtype is torch.bool:
        return count, count, 0.0
    read = {reader for each in (node, *_behind_layouts(node)) for reader in each.users}
    error = OPERAND if any(map(is_matmul, read)) else OTHER
    return elements + _SCALE * count, elements // 2 + _RANGE * count, error


def _groups(node: fx.Node) -> Groups | str:
    """How a value is read in groups; or why it is not to be rounded, or cannot be."""
    value = node.meta["val"]
    if value.dtype not in (*PLACED_DTYPES, torch.bool):
        return _EXACT
    if value.dtype is not torch.bool and _is_statistic(node):
        return _STATISTICS
    if value.dtype is not torch.bool and _is_exponent(node):
        return _EXPONENT
    order = _by_strides(value)
    strides = [size_hint(value.stride(dim)) for dim in order if size_hint(value.shape[dim]) != 1]
    if not strides or strides[-1] != 1 or 0 in strides:
        return _NOT_DENSE
    last = value.shape[order[-1]]
    sizes = (BITS,) if value.dtype is torch.bool else GROUPS
    size = next((size for size in sizes if isinstance(last, int) and last % size == 0), None)
    if size is None:
        return _UNEVEN.format(sizes[-1])
    return Groups(order, size)


def _by_strides(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost to the innermost; of one that has one element, the stride says nothing."""
    sizes, strides = [*map(size_hint, value.shape)], [*map(size_hint, value.stride())]
    return tuple(sorted(range(value.dim()), key=lambda dim: (sizes[dim] != 1, -strides[dim], dim)))


def _is_statistic(node: fx.Node) -> bool:
    """True for what was computed, element by element, of sums over many elements: a norm's mean, a row's log-sum."""
    elements, seen, stack = numel(node.meta["val"]), {node}, [node]
    while stack:
        call = stack.pop()
        made = call.all_input_nodes[0] if call.target is operator.getitem else call
        if (
            getattr(made.target, "is_view", False)
            or has_trait(made, Trait.LOOKUP)
            or has_trait(made, Trait.MOVES)
        ):
            continue
        beside = [*tensors(made.meta["val"])]
        # what a matmul reads says nothing of what it returns; attention returns a row's log-sum beside its result
        read = (
            []
            if has_trait(made, Trait.MATMUL)
            else [v for n in made.all_input_nodes for v in tensors(n.meta["val"])]
        )
        if any(numel(each) >= _STATISTIC * elements for each in (*beside, *read)):
            return True
        for source in call.all_input_nodes:
            value = source.meta.get("val")
            is_alike = isinstance(value, torch.Tensor) and numel(value) == elements
            if source.op == "call_function" and is_alike and source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def _is_exponent(node: fx.Node) -> bool:
    """True for what an exponential takes its argument from by sums alone, or a call of attention as its mask.

    An error there is one of a factor, and a mask has numbers beside which all others would be zero.
    """
    seen, stack = {node}, [node]
    while stack:
        for reader in stack.pop().users:
            if reader.target in _EXPONENTIALS or _masks(reader, seen):
                return True
            if reader.target in _ADDS and reader not in seen:
                seen.add(reader)
                stack.append(reader)
    return False


def _masks(reader: fx.Node, values: set[fx.Node]) -> bool:
    """True for a call of attention that has one of the values behind queries, keys and values."""
    is_attention = has_trait(reader, Trait.MATMUL) and "scaled_dot_product" in base_name(reader)
    return is_attention and any(source in values for source in reader.all_input_nodes[3:])


def _behind_layouts(node: fx.Node) -> Iterator[fx.Node]:
    """The views and casts that are made of a value, in any number of steps."""
    for reader in node.users:
        if reader.target in (CAST, *_LAYOUT):
            yield reader
            yield from _behind_layouts(reader)


def _weight_behind(node: fx.Node, masters: Collection[fx.Node]) -> list[fx.Node]:
    """The calls that make a low copy of a parameter, in order; none: the value is something else."""
    calls: list[fx.Node] = []
    while node.target in (CAST, *_LAYOUT):
        calls.insert(0, node)
        node = node.all_input_nodes[0]
    is_cast = any(call.target is CAST for call in calls)
    return calls if is_cast and node in masters else []


def _smaller(node: fx.Node, masters: Collection[fx.Node], name: str, bits: int) -> fx.Node:
    """The value as the backward is to compute it, of what is kept in its place; ``name`` is that of its storage."""
    write, value = Rewriter(node.graph, captured=False), node.meta["val"]
    with write.before(node.next):
        if calls := _weight_behind(node, masters):
            again = calls[0].all_input_nodes[0]
            for call in calls:
                settings: Any = call.args[1:], call.kwargs
                again = write.call(call.target, again, *settings[0], **settings[1])
            steps = write.added
        else:
            groups = _groups(node)
            assert isinstance(groups, Groups)
            form = {"order": groups.order, "group": groups.size}
            if value.dtype is torch.bool:
                round_, widen, bits = to_bits, from_bits, 1
            else:
                round_, widen = (to_int8, from_int8) if bits == 8 else (to_int4, from_int4)
            result = write.trace(round_, node, **form)
            parts, made = result if isinstance(result, (list, tuple)) else (result,), len(write.added)
            how = f"groups of {groups.size}" if bits > 1 else ""
            for part in parts:
                part.meta[SAVED] = Saved(name, bits, how)
            again = write.trace(widen, *parts, **form, dtype=value.dtype)
            steps = write.added[made:]
    for step in steps:
        step.meta[AGAIN] = True
    return again
