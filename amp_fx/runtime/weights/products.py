"""How oneDNN is given products by weights: joined, or as convolutions (:func:`as_convolution`).

Products of one value by several weights become one: calls cost less, and more threads find work.

Before, for the queries, keys and values of attention::

    q = torch.ops.aten.linear.default(x, w_q, b_q)            # each (rows, 384)
    k = torch.ops.aten.linear.default(x, w_k, b_k)
    v = torch.ops.aten.linear.default(x, w_v, b_v)

After::

    w = torch.ops.aten.cat.default([w_q, w_k, w_v])           # of weights alone: computed once
    b = torch.ops.aten.cat.default([b_q, b_k, b_v])
    qkv = torch.ops.aten.linear.default(x, w, b)              # (rows, 1152)
    q = torch.ops.aten.slice.Tensor(qkv, -1, 0, 384)
    k = torch.ops.aten.slice.Tensor(qkv, -1, 384, 768)
    v = torch.ops.aten.slice.Tensor(qkv, -1, 768, 1152)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import quantised_ops
from amp_fx.graphs.calls import args_of, graph_inputs_of, is_alias, is_cast, is_returned, readers, start
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import numel, storage_of, storages_written_in
from amp_fx.precision.policy.scaled import ZERO_POINT
from amp_fx.precision.policy.scaled import dequantised as as_floating

aten = torch.ops.aten

#: whether oneDNN packs a weight for a value
Packs = Callable[[torch.Tensor, torch.Tensor], bool]
#: views that fail where they join dimensions that do not follow each other
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def join_linears(graph: fx.Graph, derived: set[fx.Node], packs: Packs) -> None:
    """Joins products by weights that are packed; what is multiplied by then joins what is ``derived`` from weights.

    ``packs``: whether oneDNN packs a weight that multiplies a value; it always packs one in int8.
    """
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    written = storages_written_in(graph)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        # what oneDNN does at the end of its call, or may, would be lost
        apart = (has_trait(u, Trait.RESHAPES, Trait.MOVES) or u.target is aten.mul.Tensor for u in node.users)
        # what weights alone give is computed once
        if node not in derived and node.users and all(apart) and _is_packed(node, derived, packs):
            key = _key(node)
            if storage_of(key[0]) not in written:
                groups.setdefault(key, []).append(node)
    found = [group for group in groups.values() if len(group) > 1]
    if not found:
        return
    with graph.inserting_before(start(graph)):
        # a place that stays, as the first call itself may be joined
        place = graph.call_function(aten.empty.memory_format, ([],))
    for node in list(graph.nodes):
        # what is computed from weights alone can be computed first
        if node.op == "get_attr" or (node.op == "call_function" and node in derived):
            place.prepend(node)
    for group in found:
        _join(group, derived, place, written)
    graph.erase_node(place)


def _is_packed(node: fx.Node, derived: set[fx.Node], packs: Packs) -> bool:
    x, weight, *bias = args_of(node)
    if not derived.issuperset(each for each in bias if each is not None):
        return False
    if (source := dequantised(weight, "channel")) is not None:
        return derived.issuperset(args_of(source)[:3])
    return weight in derived and weight.meta["val"].ndim == 2 and packs(x.meta["val"], weight.meta["val"])


def _key(node: fx.Node) -> tuple[fx.Node, Any, Any, Any, Any]:
    """Equal for products that can be one: what is multiplied, before it is rounded, and how."""
    x, weight, *bias = args_of(node)
    given, seen = x, []
    while is_cast(given) or dequantised(given, "tensor") is given:
        # each product has its own
        seen.append((given.target, given.args[1:]))
        given = given.args[0]
    biases = (*(each.meta["val"].dtype for each in bias if each is not None),)
    return given, (*seen,), biases, dequantised(weight, "channel") is not None, weight.meta["val"].dtype


def dequantised(factor: fx.Node, per: str) -> fx.Node | None:
    """The value that a factor of a product in int8 comes from, before a cast or none; None for others.

    ``per``: ``"tensor"`` for a value, ``"channel"`` for a weight.
    """
    source = factor.all_input_nodes[0] if is_cast(factor) else factor
    is_found = str(source.target) == f"quantized_decomposed.dequantize_per_{per}.default"
    return source if is_found and (per == "tensor" or _is_symmetric(source)) else None


def _is_symmetric(weight: fx.Node) -> bool:
    """True where zero stands for zero, and factors for the first dimension: oneDNN knows no other weights.

    So :mod:`amp_fx.precision.policy.scaled` writes them; a program may have others.
    """
    zeros, dim = args_of(weight)[2:4]
    return dim == 0 and isinstance(zeros, fx.Node) and _are_zeros(zeros)


def _are_zeros(node: fx.Node) -> bool:
    if node.target is aten.cat.default:
        return all(map(_are_zeros, node.all_input_nodes))
    # decomposed, they are filled with a number
    is_filled = node.target is aten.full.default and node.args[1:2] == (0,)
    return is_filled or node.target is aten.zeros_like.default


def compute_zeros(graph: fx.Graph, zeros: Collection[fx.Node]) -> None:
    """Zero points that a program holds, and that are zeros, become zeros that it computes, as amp_fx writes them."""
    call = Rewriter(graph)
    for weight in graph.find_nodes(op="call_function", target=quantised_ops().dequantize_per_channel.default):
        if (points := args_of(weight)[2]) in zeros:
            with call.before(weight):
                weight.update_arg(2, call(aten.zeros_like.default, points))


def write_out_int8(graph: fx.Graph) -> None:
    """Has bytes multiplied as floating point, for where oneDNN does not add up their products exactly.

    ``torch._int_mm`` calls oneDNN, too. Integers are exact in fp32 up to 2**24.
    """
    call = Rewriter(graph)
    for node in graph.find_nodes(op="call_function", target=quantised_ops().dequantize_per_channel.default):
        data, scales, *_ = args_of(node)
        if not _is_symmetric(node):
            continue
        with call.before(node):
            factors = call(aten.view.default, scales, [-1] + [1] * (data.meta["val"].ndim - 1))
            call.replace(node, call(aten.mul.Tensor, data, factors))
    for node in graph.find_nodes(op="call_function", target=aten._int_mm.default):
        with call.before(node):
            product = call(aten.mm.default, *(call.cast(arg, torch.float32) for arg in args_of(node)))
            call.replace(node, call.cast(product, torch.int32))


def write_in_int8(graph: fx.Graph, weights: Collection[fx.Node]) -> None:
    """Has oneDNN multiply by weights what ``torch._int_mm`` does; values become unsigned, which is fast on all CPUs."""
    call = Rewriter(graph)
    for node in graph.find_nodes(op="call_function", target=aten._int_mm.default):
        value, weight = args_of(node)
        # before it multiplies, oneDNN takes more time than a single row does
        is_row = numel(node.meta["val"]) == node.meta["val"].shape[1]
        is_read = all(is_cast(user) and user.meta["val"].dtype is torch.float32 for user in node.users)
        if is_row or not is_read or not {*graph_inputs_of(weight)}.issubset(weights):
            continue
        with call.before(node):
            zero = ZERO_POINT if value.meta["val"].dtype is torch.int8 else 0
            if zero:
                moved = call(aten.add.Tensor, call.cast(value, torch.int32), zero)
                value = call.cast(moved, torch.uint8)
            turned = call(aten.permute.default, weight, [1, 0])
            # of the weight alone, so that they are constants
            ones = call(aten.new_ones.default, turned, turned.meta["val"].shape[:1], dtype=torch.float32)
            pair = as_floating(value, (1.0, zero), turned, ones, torch.float32, call)
            call.replace(node, call(aten.linear.default, *pair))


def _join(
    group: list[fx.Node], derived: set[fx.Node], place: fx.Node, written: Collection[int | None]
) -> None:
    """Makes one product of several, in the place of the first."""
    work, [first, *_] = Rewriter(place.graph), group

    def once(target: Any, *args: Any) -> fx.Node:
        with work.before(place):
            derived.add(made := work.call(target, *args))
        return made

    weights, biases = [args_of(node)[1] for node in group], [args_of(node)[2:3] for node in group]
    sources = [source for weight in weights if (source := dequantised(weight, "channel")) is not None]
    if sources:
        columns = zip(*(args_of(source)[:3] for source in sources), strict=True)
        parts = [once(aten.cat.default, [*values]) for values in columns]
        whole = once(sources[0].target, *parts, *sources[0].args[3:])
        if sources[0] is not weights[0]:
            whole = once(aten.to.dtype, whole, weights[0].meta["val"].dtype)
    else:
        whole = once(aten.cat.default, weights)
    bias = [once(aten.cat.default, [*own]) for own in zip(*biases, strict=True) if own[0] is not None]
    with work.before(first):
        product = work.call(aten.linear.default, first.args[0], whole, *bias)
    end = 0
    for node in group:
        begin, end = end, end + node.meta["val"].shape[-1]
        with work.before(node):
            part = work.call(aten.slice.Tensor, product, -1, begin, end)
            if storage_of(node) in written or not _may_be_strided(node):
                part = work.call(aten.clone.default, part, memory_format=torch.contiguous_format)
        work.replace(node, part)


def as_convolution(node: fx.Node, x: fx.Node, kernel: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Has a convolution with a window of one compute a product; rows stand where pixels do."""
    call = Rewriter(node.graph)
    with call.before(node):
        rows = call(aten.reshape.default, x, [1, -1, 1, x.meta["val"].shape[-1]])
        image = call(aten.permute.default, rows, [0, 3, 1, 2])
        convolved = call(aten.conv2d.default, image, kernel, bias)
        rows = call(aten.permute.default, convolved, [0, 2, 3, 1])
        call.replace(node, call(aten.view.default, rows, [*node.meta["val"].shape]))
    return convolved


def _may_be_strided(node: fx.Node) -> bool:
    """True where nobody sees that rows do not follow each other in memory: all views split the last dimension."""
    if is_returned(node):
        return False
    for user in readers(node, is_alias):
        # kernels of other libraries, and bodies of control flow, may rely on what they were given
        if getattr(user.target, "namespace", "") not in ("aten", "prims"):
            return False
        if is_alias(user) and not has_trait(user, Trait.RESHAPES, Trait.MOVES):
            return False
        if user.target in _VIEWS:
            shape, last = user.meta["val"].shape, node.meta["val"].shape[-1]
            if args_of(user)[0] is not node or not _splits_last(shape, last):
                return False
    return True


def _splits_last(shape: Sequence[int], last: int) -> bool:
    """True if the last of these sizes multiply to ``last``."""
    elements = 1
    for size in reversed(shape):
        if isinstance(size, torch.SymInt) or elements >= last:
            break
        elements *= size
    return elements == last
