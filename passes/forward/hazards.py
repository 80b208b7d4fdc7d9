"""Hazards that op lists cannot see, each a function with its failing example.

What a call reads is followed through storages (:func:`amp_fx.graphs.values.sources_in`), so that a write in place
counts as the call that it spells; through which calls, their traits and rows say, for values of every dtype.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor, OpOverload
from amp_fx.graphs.calls import (
    argument_value,
    arguments,
    base_name,
    behind,
    functional,
    readers,
    tensor_arguments,
)
from amp_fx.graphs.keys import TIED
from amp_fx.graphs.traits import Trait, has_trait, op_row
from amp_fx.graphs.values import numel, sources_in, tensors, written_arguments
from amp_fx.passes.forward.refusals import refusal
from amp_fx.precision.plans.label import Label, Reason, ReasonKind, label_of
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.table import lookup

aten = torch.ops.aten

Hazards = Iterator[tuple[fx.Node, Reason]]


def scalar_range(graph: fx.Graph) -> Hazards:
    """A finite constant that is infinite in the low dtype.

    ``scores.masked_fill(mask, torch.finfo(torch.float32).min)`` raises in both 16-bit dtypes; ``where``
    silently writes -inf, and a fully masked row then gives NaN in softmax.
    """
    lows = _possible_lows(graph)
    for node, _ in _ours(graph):
        beyond = (
            (constant, low)
            for constant in constants(node)
            for low in lows[node]
            if math.isfinite(constant) and abs(constant) > torch.finfo(low).max
        )
        for constant, low in itertools.islice(beyond, 1):
            yield node, Reason.of(ReasonKind.SCALAR_RANGE, constant=constant, low=low)


def written_range(graph: fx.Graph) -> Hazards:
    """A constant beyond the low dtype's range in a tensor that is written in place.

    ``scores += mask * -1e6`` and ``y.copy_(torch.full_like(y, 1e6))`` are infinite where a product has left a storage
    in fp16.
    """
    lows = _possible_lows(graph)
    held = _held_constants(graph)
    for node, label in _ours(graph):
        if label.traced is not torch.float32:
            continue
        for constant, low in itertools.product(_written_constants(node, held), lows[node]):
            if abs(constant) > torch.finfo(low).max:
                yield node, Reason.of(ReasonKind.SCALAR_RANGE, constant=constant, low=low)
                break


def tiny_eps(graph: fx.Graph) -> Hazards:
    """An eps that the low dtype flushes to zero on its way to a division.

    ``x / (x.norm() + 1e-8)`` is 0/0 in fp16, whose smallest normal number is 6.1e-5.
    """
    lows = _possible_lows(graph)
    held = _held_constants(graph)
    reads = _reads(graph)
    for node, _ in _ours(graph):
        if not has_trait(node, Trait.ADDS_EPS) or not lows[node]:
            continue
        low = max(lows[node], key=lambda dtype: torch.finfo(dtype).smallest_normal)
        smallest = torch.finfo(low).smallest_normal
        added = itertools.chain(constants(node), _written_constants(node, held))
        eps = next((c for c in added if 0 < abs(c) < smallest), None)
        if eps is not None and any(
            has_trait(user, Trait.DIVIDES) for user in readers(node, _passes_on, reads)
        ):
            yield node, Reason.of(ReasonKind.TINY_EPS, eps=eps, low=low)


def exp_sum(graph: fx.Graph) -> Hazards:
    """Exponentials that are summed: a hand-written softmax or logsumexp.

    ``x.exp().sum()`` over 4,096 low values has lost the small ones before the sum begins.
    """
    reads = _reads(graph)
    for node, _ in _ours(graph):
        if base_name(node) != "exp":
            continue
        if sums := [user for user in readers(node, _masks, reads) if has_trait(user, Trait.SUMS)]:
            for reached in (node, *sums):
                yield reached, Reason(ReasonKind.EXP_SUM)


class _Numbers(enum.IntEnum):
    """The numbers in a value; what joins several has those of the largest."""

    CONSTANTS = 0  # fills, masks, and what fits into 8 bits
    INTEGERS = 1  # given to the graph, or picked in it: positions if a sine or cosine reads their product
    POSITIONS = 2  # counted in the graph
    VALUES = 3


def positions(graph: fx.Graph) -> Hazards:
    """Integer positions in a matmul: RoPE angles as ``inv_freq @ positions``.

    bf16 holds integers exactly up to 256, so every later token gets a wrong angle. A mask of integers, or a matrix of
    counts, is as likely an input as positions are: these are known by the sine that their product goes to.
    """
    reads = _reads(graph)
    numbers: dict[fx.Node, _Numbers] = {}
    for node, inputs in sources_in(graph).items():
        held = {source: max(numbers[each] for each in behind) for source, behind in inputs.items()}
        numbers[node] = _numbers(node, held)
        label = label_of(node)
        if label is None or label.op_class is not OpClass.LOW:
            continue
        # what is added to a product is no factor
        addends = ("bias", "attn_mask", op_row(node).addend)
        factors = {held[source] for name, source in tensor_arguments(node) if name not in addends}
        if _Numbers.POSITIONS in factors or (
            _Numbers.INTEGERS in factors and any(map(_is_periodic, readers(node, _computes_on, reads)))
        ):
            yield node, Reason(ReasonKind.POSITIONS)


def _numbers(node: fx.Node, held: Mapping[fx.Node, _Numbers]) -> _Numbers:
    value = next(iter(tensors(node.meta.get("val"))), None)
    if value is None or (value.dtype.itemsize < 2) or has_trait(node, Trait.FILLS):
        return _Numbers.CONSTANTS
    unknown = _Numbers.VALUES if value.is_floating_point() or value.is_complex() else _Numbers.INTEGERS
    if node.op != "call_function":
        return unknown
    computes, label = has_trait(node, Trait.POSITIONS), label_of(node)
    if label is not None and label.op_class is OpClass.LOW:
        return unknown
    if has_trait(node, Trait.COUNTS):
        return max([_Numbers.POSITIONS, *held.values()])
    if not (computes or _passes_on(node)):
        return unknown if held else _Numbers.CONSTANTS
    found = [
        held[source]
        for name, source in tensor_arguments(node)
        # picked by, raised to, or overwritten
        if name not in ("index", "indices", "exponent", "out")
        and (name != "self" or base_name(node) != "copy")
        # positions beside a vector of frequencies are still positions; activations with a mask are values
        if not (computes and held[source] is _Numbers.VALUES and numel(source.meta["val"]) < numel(value))
    ]
    return max(found, default=unknown)


def no_kernel(graph: fx.Graph) -> Hazards:
    """A call in a 16-bit dtype that its kernel refuses.

    ``nn.LSTM`` under ``torch.autocast("cpu")`` raises "could not create a primitive descriptor" on CPUs for which
    oneDNN has none; ``torch.linalg.matrix_norm(x, 2)``, "Low precision dtypes not supported". ``F.grouped_mm`` with 12
    columns runs in fp32, and raises "strides should be multiple of 16 bytes" in bf16; its gradient reads rows as long
    as the result's. And one that takes it and is wrong: convolutions with AMX.
    """
    for node, label in _ours(graph):
        if label.low is not None and (why := refusal(node, label, label.low)):
            yield node, Reason.of(ReasonKind.NO_KERNEL, low=label.low, why=why)


def adds_low(graph: fx.Graph) -> Hazards:
    """Numbers that a kernel counts or adds up in the dtype that it is given.

    ``(x @ w).histc()`` in bf16 stops at 256, where adding 1 changes nothing.
    """
    for node, label in _ours(graph):
        picks = argument_value(node, "reduce") in ("amax", "amin", "max", "min")
        adds = has_trait(node, Trait.ADDS_LOW) and not picks
        adds |= has_trait(node, Trait.MAY_ADD_LOW) and argument_value(node, "accumulate") is True
        # of what the program has in a low dtype, the storage stays
        if adds and label.low is not None and (label.traced is torch.float32 or TIED not in node.meta):
            yield (
                node,
                Reason.of(ReasonKind.ADDS_LOW, low=label.low, limit=round(2 / torch.finfo(label.low).eps)),
            )


def bits(graph: fx.Graph) -> Hazards:
    """A value whose bits are read, computed in the low dtype: the lower half of fp32's bits would be zeros.

    Hashes of ``(x @ w).view(torch.int32)`` would fall together, and the mean of its bytes would be half as large.
    """
    for node in graph.nodes:
        stack = list(node.all_input_nodes) if has_trait(node, Trait.READS_BITS) else []
        while stack:
            label = label_of(source := stack.pop())
            # what the program rounds itself has other bits
            if _passes_on(source) and any(v.dtype is torch.float32 for v in tensors(source.meta.get("val"))):
                stack += source.all_input_nodes
            elif label is not None and label.op_class is not OpClass.KEEP and label.traced is torch.float32:
                yield source, Reason.of(ReasonKind.BITS, low=label.low)


#: (pattern, True where eager autocast would raise rather than round, so that it holds under numerics="eager" too)
HAZARDS: tuple[tuple[Callable[[fx.Graph], Hazards], bool], ...] = (
    (scalar_range, True),
    (no_kernel, True),
    (written_range, False),
    (tiny_eps, False),
    (adds_low, False),
    (bits, False),
    (exp_sum, False),
    (positions, False),
)


def _ours(graph: fx.Graph) -> Iterator[tuple[fx.Node, Label]]:
    for node in graph.nodes:
        label = label_of(node)
        if label is not None and label.op_class not in (OpClass.KEEP, OpClass.FP32):
            yield node, label


def _possible_lows(graph: fx.Graph) -> dict[fx.Node, list[torch.dtype]]:
    """The low dtypes that each call may run in: its region's, and those in which what it promotes or moves may come.

    In a region of ``torch.autocast("cpu", torch.bfloat16)``, what was computed in fp16 outside stays fp16.
    """
    lows: dict[fx.Node, list[torch.dtype]] = {}
    for node, label in _ours(graph):
        sources = [] if label.op_class is OpClass.LOW else node.all_input_nodes
        own = [] if label.low is None else [label.low]
        lows[node] = list(dict.fromkeys(itertools.chain(own, *(lows.get(n, []) for n in sources))))
    return lows


def constants(node: fx.Node) -> Iterator[float]:
    """Numbers that the op computes with: Python scalars and 0-d constants, no sizes and indices."""
    if not isinstance(node.target, OpOverload):
        return
    sizes = {a.name for a in node.target._schema.arguments if str(a.type) in ("int", "Optional[int]")}
    for name, value in arguments(node):
        constant = _constant(value) if isinstance(value, fx.Node) else value
        if name not in sizes and isinstance(constant, (int, float)) and not isinstance(constant, bool):
            yield float(constant)


def _constant(node: fx.Node) -> object:
    """The number in a 0-d constant tensor: ``torch.full((), -1e9)``, ``torch.tensor(-1e9)``; else None."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or node.meta["val"].ndim > 0:
        return None
    node = behind(node, Trait.UNCHANGED, Trait.CAST)
    if node.target in (aten.full.default, aten.scalar_tensor.default):
        return node.args[-1]
    value = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return value.item() if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else None


def _written_constants(node: fx.Node, held: Mapping[fx.Node, frozenset[float]]) -> Iterator[float]:
    """Constants in the tensors that a call writes over another one in place."""
    targets = {target for _, target in written_arguments(node)}
    for source in node.all_input_nodes if targets else ():
        if source not in targets:
            yield from held[source]


def _held_constants(graph: fx.Graph) -> dict[fx.Node, frozenset[float]]:
    """The finite constants that a value may hold or was computed with, of those that fp16 does not hold."""
    limits = torch.finfo(torch.float16)
    held: dict[fx.Node, frozenset[float]] = {}
    for node, inputs in sources_in(graph).items():
        own = [abs(c) for c in constants(node) if math.isfinite(c)]
        beyond = frozenset(c for c in own if c > limits.max or 0 < c < limits.smallest_normal)
        goes_on = _computes_on(node)
        held[node] = beyond.union(*(held[each] for behind in inputs.values() for each in behind if goes_on))
    return held


def _reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> all that reads what it returns or writes."""
    found: dict[fx.Node, list[fx.Node]] = {node: [] for node in graph.nodes}
    for node, inputs in sources_in(graph).items():
        for source in dict.fromkeys(itertools.chain(*inputs.values())):
            found[source].append(node)
    return found


def _is_periodic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    turns = base_name(node) == "exp" and isinstance(value, torch.Tensor) and value.is_complex()
    return turns or has_trait(node, Trait.PERIODIC)


def _computes_on(node: fx.Node) -> bool:
    """True for an op that moves or converts values, or computes with them as with numbers."""
    return has_trait(node, Trait.POSITIONS) or _passes_on(node)


def _passes_on(node: fx.Node) -> bool:
    """True for an op that only moves or converts values, of whichever dtype and class: labels say less of integers."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__name__", "") == "getitem"
    if has_trait(node, Trait.CAST, Trait.IMPLIED_CAST) or base_name(node) in ("to", "copy"):
        return True
    value = next(iter(tensors(node.meta.get("val"))), None)
    row = None if value is None else lookup(functional(node.target) or node.target, value.device.type)
    return row is not None and row.op_class is OpClass.FOLLOW


def _masks(node: fx.Node) -> bool:
    """Likewise, or takes some of them away by a mask."""
    return _passes_on(node) or base_name(node) in ("mul", "masked_fill", "where")
