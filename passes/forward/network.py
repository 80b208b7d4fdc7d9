"""The cut's problem: autocast's placement, what may move from it, and what each placement costs."""

from __future__ import annotations

import functools
from collections.abc import Set as AbstractSet

import torch
import torch.fx as fx

from amp_fx.graphs.calls import arguments, is_cast, tensor_arguments, tensor_nodes
from amp_fx.graphs.keys import MAY_ROUND
from amp_fx.graphs.traits import op_row
from amp_fx.graphs.values import in_place_target, is_eligible, written_arguments
from amp_fx.passes.forward.classify import may_return_wide
from amp_fx.precision.placement.cost import CostModel
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Shared, Var
from amp_fx.precision.plans.label import Label, Takes, label_of
from amp_fx.precision.policy import OpClass

#: variables of the cut whose side is known
ALWAYS = {HIGH: ("always fp32",), LOW: ("always low",)}


def place_as_autocast(graph: fx.Graph) -> tuple[list[tuple[fx.Node, Label]], torch.dtype | None]:
    """Labels all calls as eager autocast would; returns them, and the low dtype if there is a single one."""
    placed = [(node, label) for node in graph.nodes if (label := label_of(node)) is not None]
    for node, label in placed:
        label.dtype = dtype_as_autocast(node, label)
    lows = {label.low for _, label in placed if label.low is not None and label.op_class is not OpClass.KEEP}
    return placed, lows.pop() if len(lows) == 1 else None


def dtype_as_autocast(node: fx.Node, label: Label) -> torch.dtype | None:
    """The dtype that eager autocast computes a call in, where those of what it reads are known."""
    if label.op_class is OpClass.LOW:
        return label.low
    if label.op_class is OpClass.FP32:
        return torch.float32
    return label.dtype if label.op_class is OpClass.KEEP else _widest(node, label)


def placed_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype a value is stored in; None for values that are not floating tensors."""
    label = label_of(node)
    if label is not None and (label.pinned or label.dtype) is not None:
        return label.pinned or label.dtype
    value = node.meta.get("val")
    return value.dtype if is_eligible(value) else None


def _widest(node: fx.Node, label: Label) -> torch.dtype | None:
    """Native type promotion over the inputs: 0-d tensors count only where there is no other."""
    if (target := in_place_target(node)) is not None:
        return placed_dtype(target)
    placed = [(each, dtype) for each in _sources(node, label) if (dtype := placed_dtype(each)) is not None]
    if not placed:
        return label.traced
    shaped = [dtype for source, dtype in placed if _is_shaped(source)] or [dtype for _, dtype in placed]
    return functools.reduce(torch.promote_types, shaped)


def _sources(node: fx.Node, label: Label) -> list[fx.Node]:
    """Every tensor argument whose dtype the node cares about."""
    return [source for name, source in tensor_arguments(node) if name not in label.own_dtype_slots]


def _is_shaped(node: fx.Node) -> bool:
    """False for 0-d tensors, which promote nothing."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.ndim > 0


def rounded(node: fx.Node) -> Var:
    """The variable of a result that is computed in fp32 and may be rounded at once."""
    return ("rounded", node)


class Network:
    """Builds the cut's problem from a graph whose labels hold autocast's placement.

    ``measured`` are the calls of which measured sensitivity decides, not the op lists; None: op lists decide of all.
    """

    def __init__(
        self, graph: fx.Graph, cost: CostModel, low: torch.dtype, measured: AbstractSet[fx.Node] | None = None
    ) -> None:
        self._graph = graph
        self._cost = cost
        self._low = low
        self._by_lists = measured is None
        #: low products whose results may be rounded or not
        self._wide = {node for node in measured or () if cost.is_external(node) and may_return_wide(node)}
        self._problem = Problem(pins={var: side for side, var in ALWAYS.items()})
        self._itemsize = {HIGH: torch.float32.itemsize, LOW: low.itemsize}
        values = (node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
        sizes = [cost.cast_bytes(value, low) for value in values]
        # one unit of cost outweighs a cast of every value, and one cast outweighs all their bytes;
        # the scale: units of the problem that are one unit of cost
        self._per_cast = 2 * sum(sizes) + 1
        self.scale = self._per_cast * (2 * len(graph.nodes) + 1)

    def build(self) -> Problem:
        """The whole problem."""
        for node in self._graph.nodes:
            if (label := label_of(node)) is not None:
                self._add_label(node, label)
        for node in self._graph.nodes:
            if is_stored_value(node):
                self._add_value(node)
        return self._problem

    def _add_label(self, node: fx.Node, label: Label) -> None:
        """Adds the terms of the node itself: the dtypes that it may have."""
        if node in self._wide:
            self._problem.implies.append((node, rounded(node)))
        if label.dtype is None:
            return
        follows = label.takes == Takes.ANY and label.op_class is OpClass.FOLLOW
        low_already = label.op_class is OpClass.PROMOTE and label.dtype is self._low
        if (target := node.all_input_nodes[0] if follows else in_place_target(node)) is not None:
            # equal sides
            self._problem.implies += [(node, self.stored(target)), (self.stored(target), node)]
        elif label.op_class is OpClass.LOW and (times := self._cost.arithmetic(node, self._low)):
            self._add_cost(node, *times)
        elif label.dtype is torch.float32 and self._cost.accumulates_backward(node):
            self._problem.pins[node] = HIGH
        elif not (label.op_class is OpClass.FOLLOW or node.meta.get(MAY_ROUND) or low_already):
            # the policy does not allow both dtypes
            self._problem.pins[node] = label.dtype is not self._low
        elif self._cost.is_view(node):
            self._problem.preferred[node] = label.dtype is not self._low

    def stored(self, node: fx.Node) -> Var:
        """The variable of the dtype a value is stored in: a pinned or given one, or its node's."""
        if node in self._wide:
            # what is computed in fp32 is stored so; what is multiplied low may be
            return rounded(node)
        label = label_of(node)
        if label is None or label.pinned is not None or label.dtype is None:
            return ALWAYS[placed_dtype(node) is not self._low]
        may_round = node.meta.get(MAY_ROUND) and self._cost.accumulates_backward(node)
        return rounded(node) if may_round else node

    def demand(self, reader: fx.Node, name: str, value: fx.Node) -> Var | None:
        """The variable whose side is the dtype in which ``reader`` wants ``value``; None: as it is."""
        label = label_of(reader)
        if label is not None and reader in self._wide and is_summed(label, name):
            # added to the sum as it is stored
            return rounded(reader)
        if label is None or label.takes == Takes.TRACED:
            traced = value.meta.get("val")
            return ALWAYS[traced.dtype is not self._low] if is_eligible(traced) else None
        is_written = any(target is value for _, target in written_arguments(reader))
        if name in label.own_dtype_slots or label.takes == Takes.ANY or is_written:
            return None
        if label.takes == Takes.MIXED and self._widens(reader, label, value):
            return None
        return reader if label.dtype is not None else None

    def _widens(self, reader: fx.Node, label: Label, value: fx.Node) -> bool:
        """True where another input makes the kernel compute in fp32, so that ``value`` needs no cast."""
        if in_place_target(reader) is not None or not _is_shaped(value):
            return True
        if not self._by_lists:
            # what the other inputs are is not known before the cut
            return False
        others = [each for each in _sources(reader, label) if each is not value and _is_shaped(each)]
        return placed_dtype(value) is self._low and any(placed_dtype(o) is torch.float32 for o in others)

    def _add_value(self, value: fx.Node) -> None:
        """Adds the cost of storing and converting one value."""
        stored = self.stored(value)
        read = [(user, *pair) for user in value.users for pair in named_arguments(user)]
        slots = [(user, name) for user, name, arg in read if value in tensor_nodes(arg)]
        demands = [(reader, self.demand(reader, name, value)) for reader, name in slots]
        self._add_exactness(value, demands)
        folded = value.name in self._cost.folded
        is_tensor = isinstance(value.meta.get("val"), torch.Tensor)
        # the tie-break: fewer casts, then fewer bytes cast
        size = self._per_cast + (self._cost.cast_bytes(value, self._low) if is_tensor else 0)
        wants = tuple(want for _, want in demands if want is not None)
        for side in () if folded else (HIGH, LOW):
            self._add_shared(Shared(size, side, wants, stored))
        if not is_tensor:
            return
        in_memory = [(reader, want) for reader, want in demands if self._cost.reads_memory(reader, value)]
        cost = self._cost
        for reader, want in in_memory:
            if not cost.is_view(reader):
                converts_in_register = not cost.is_external(reader) or want is None
                times = [cost.read(reader, value, self._itemsize[side]) for side in (HIGH, LOW)]
                self._add_cost(stored if converts_in_register else want, *times)
        if cost.is_stored(value):
            if cost.is_external(value):
                self._add_cost(stored, *(cost.traffic(value, self._itemsize[side]) for side in (HIGH, LOW)))
            external = [want for n, want in in_memory if want is not None and converts_alone(cost, n)]
            kernel = cost.cast_kernel(value, self._low) * self.scale
            for side in () if folded else (HIGH, LOW):
                self._add_shared(Shared(kernel, side, tuple(external), stored))
        else:
            if in_memory:
                # what is in memory anyway is what the backward reads: a second precision would be saved
                # beside it
                in_memory += [(reader, want) for reader, want in demands if cost.saves_input(reader)]
            self._add_rounding(value, stored, demands)
            copies = [stored if want is None else want for _, want in in_memory]
            for side in (HIGH, LOW):
                write = cost.traffic(value, self._itemsize[side]) * self.scale
                self._add_shared(Shared(write, side, tuple(copies)))

    def _add_rounding(self, value: fx.Node, stored: Var, demands: list[tuple[fx.Node, Var | None]]) -> None:
        """Case 4: rounding what a reader in the same kernel wants in fp32 saves nothing there.

        Its gradient is rounded as well, which splits kernels of the backward: counted as one pass over it.
        """
        if value.meta.get(MAY_ROUND):
            in_memory = self._cost.reads_memory
            fused = [want for n, want in demands if want is not None and not in_memory(n, value)]
            passed = self._cost.traffic(value, self._low.itemsize)
            self._add_shared(Shared(passed * self.scale, HIGH, tuple(fused), stored))

    def _add_exactness(self, value: fx.Node, demands: list[tuple[fx.Node, Var | None]]) -> None:
        """Case 2: where autocast stores fp32, only readers that round anyway may get a rounded value."""
        label = label_of(value)
        if label is None or placed_dtype(value) is not torch.float32 or value.meta.get(MAY_ROUND):
            return
        for reader, want in demands:
            if want is None and is_cast(reader) and reader.meta["val"].dtype is self._low:
                continue
            if want is None and (other := label_of(reader)) and other.op_class is OpClass.FOLLOW:
                continue
            self._problem.implies.append((ALWAYS[HIGH] if want is None else want, self.stored(value)))

    def _add_cost(self, var: Var, high: int, low: int) -> None:
        self._problem.add_unary(var, high * self.scale, low * self.scale)

    def _add_shared(self, term: Shared) -> None:
        if term.readers:
            self._problem.shared.append(term)


def is_stored_value(node: fx.Node) -> bool:
    """True for floating values that somebody reads."""
    return placed_dtype(node) is not None and bool(node.users)


def converts_alone(cost: CostModel, reader: fx.Node) -> bool:
    """True where a conversion in front of the reader is a kernel: nothing around it fuses with it."""
    return cost.is_external(reader) or cost.is_view(reader)


def is_summed(label: Label, argument: str) -> bool:
    """True for the bias of a matmul, and what it is added to."""
    return argument in ("bias", op_row(label.op).addend)


def named_arguments(node: fx.Node) -> list[tuple[str, object]]:
    """The values that a node reads, by name; a graph's results are read as ``"output"``."""
    return [("output", node.args[0])] if node.op == "output" else list(arguments(node))
