"""The cost of roundings in accuracy, as terms of the cut: those that happen in compiled code, and the error they add.

A fused kernel computes in fp32, whatever the dtypes of its graph say. So a value is rounded where it is written to
memory low, or where a library kernel (matmul, convolution, attention) reads it low:

1. the result of a library kernel that runs low, unless it returns its fp32 sum, and a fused value that is written low:
   for all who read it, as the backward of those that are fused with it reads it from memory;
2. an operand of such a kernel that is kept in fp32 elsewhere;
3. a fused value that is kept in fp32, and written low for one reader.

The gradient of a value is rounded where it is handed back by a library kernel that runs low (4), where such a kernel
takes it as the gradient of its result (5), and where it is kept in memory between two kernels in the dtype of a value
that is stored low (6). A gradient that arrives rounded is not rounded again.

A result whose elements are those of an operand, as of a relu or a pool, is not rounded again where that was (8).

Kernels of attention round operands of the matmuls inside them, those of LSTMs their states (7;
``operands.py`` and ``recurrent.py`` in ``amp_fx/instruments/calibration/``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value, is_parameter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import numel
from amp_fx.passes.forward.network import Network, converts_alone, is_stored_value, is_summed, named_arguments
from amp_fx.precision.placement.cost import CostModel
from amp_fx.precision.placement.cut import HIGH, LOW, Var
from amp_fx.precision.placement.priced import SensitivityTerm
from amp_fx.precision.plans.label import Label, label_of
from amp_fx.precision.plans.sensitivity import INSIDE, CallSensitivity, as_number, slots
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.table import device_row


def sensitivity_terms(
    graph: fx.Graph, network: Network, cost: CostModel, rows: Mapping[str, CallSensitivity]
) -> list[SensitivityTerm]:
    """The terms of a classified graph that cost something, given what was measured, by the call's name."""
    charges = _Charges(network, cost, rows, _Memory(graph, cost, rows))
    values = [node for node in graph.nodes if is_stored_value(node)]
    return [term for value in values for term in charges.of(value) if term.sensitivity]


class _Charges:
    """Which roundings of a value and of its gradient happen, and when."""

    def __init__(
        self, network: Network, cost: CostModel, rows: Mapping[str, CallSensitivity], memory: _Memory
    ) -> None:
        self._network, self._cost, self._rows, self._memory = network, cost, rows, memory

    def of(self, value: fx.Node) -> Iterator[SensitivityTerm]:
        """All of one value: on the way into each reader, and its own."""
        stored = self._network.stored(value)
        for reader in value.users:
            if (row := _row_of(reader, self._rows)) is not None:
                yield from self._of_read(value, reader, row, stored)
        if (row := _row_of(value, self._rows)) is not None:
            yield from self._of_result(value, row, stored)

    def _of_read(
        self, value: fx.Node, reader: fx.Node, row: CallSensitivity, stored: Var
    ) -> Iterator[SensitivityTerm]:
        """Cases 2, 3 and 4."""
        slot, argument = next(((slot, name) for slot, name, read in slots(reader) if read is value), ("", ""))
        want = self._network.demand(reader, argument, value)
        if slot not in row.reads or want is None:
            return
        sensitivity, label, cost = row.reads[slot], label_of(reader), self._cost
        is_read = converts_alone(cost, reader) if cost.is_stored(value) else cost.reads_memory(reader, value)
        if is_read:
            yield SensitivityTerm(as_number(sensitivity.value), LOW, want, stored, row.name, slot)
        if label is None or label.op_class is not OpClass.LOW or is_summed(label, argument):
            return
        if not self._leaves_wide(value, label):
            yield SensitivityTerm(as_number(sensitivity.gradient), LOW, want, None, row.name, slot, True)

    def _of_result(self, value: fx.Node, row: CallSensitivity, stored: Var) -> Iterator[SensitivityTerm]:
        """Cases 1, 5, 6, 7 and 8."""
        for slot in INSIDE:
            if inside := row.reads.get(slot):
                yield SensitivityTerm(as_number(inside.value), LOW, value, None, row.name, slot)
                yield SensitivityTerm(as_number(inside.gradient), LOW, value, None, row.name, slot, True)
        label = label_of(value)
        is_library = label is not None and label.op_class is OpClass.LOW
        if is_library or value in self._memory.written:
            yield from self._of_rounding(value, row, stored)
        if not self._memory.writes_gradient(value):
            return
        # matmuls round what they read, whatever the dtype of the result
        rounds = value if is_library else stored
        before = self._rounded_by(value)
        side, var, against = (LOW, rounds, None) if before is None else (HIGH, before, rounds)
        yield SensitivityTerm(as_number(row.gradient), side, var, against, row.name, "", True)

    def _of_rounding(self, value: fx.Node, row: CallSensitivity, stored: Var) -> Iterator[SensitivityTerm]:
        """Cases 1 and 8: a share of the whole for each operand that hands elements on."""
        left, label, operands = as_number(row.value), label_of(value), slots(value)
        shares = {slot: row.kept for slot, _, _ in operands[:1]}
        if label is not None and label.op_class is OpClass.FOLLOW:
            shares = {slot: row.reads[slot].value for slot, _, _ in operands if slot in row.reads}
            shares = dict.fromkeys(shares, row.value) if len(operands) == 1 else shares
        for slot, _, source in operands:
            before, share = self._written_before(source), as_number(shares.get(slot, 0.0))
            if before is not None and math.isfinite(share):
                share = min(share, left)
                yield SensitivityTerm(share, LOW, stored, before, row.name)
                left -= share
        yield SensitivityTerm(left, LOW, stored, None, row.name)

    def _written_before(self, value: fx.Node) -> Var | None:
        """The variable of the value in memory that has the same elements; None where they were computed since."""
        while not self._cost.is_stored(value) and value not in self._memory.written:
            label = label_of(value)
            if label is None or label.op_class is not OpClass.FOLLOW or len(slots(value)) != 1:
                return None
            [(_, _, value)] = slots(value)
        return self._network.stored(value)

    def _rounded_by(self, value: fx.Node) -> Var | None:
        """The variable of the call behind a value from which its gradient comes rounded, if that call is low."""
        if len(value.users) != 1:
            return None
        (reader,) = value.users
        label = label_of(reader)
        if label is None or label.dtype is None:
            return None
        if label.op_class is OpClass.LOW:
            names = [name for name, given in named_arguments(reader) if given is value]
            return None if any(is_summed(label, name) for name in names) else reader
        if not self._memory.passes_gradient(reader, value):
            return None
        if self._memory.writes_gradient(reader):
            return self._network.stored(reader)
        return self._rounded_by(reader)

    def _leaves_wide(self, value: fx.Node, label: Label) -> bool:
        """On CUDA the gradient of a matmul's weight leaves its kernel in fp32 (``gemm_epilogue``).

        That of a weight with several readers is a sum of gradients, which another kernel reads.
        """
        if "conv" in label.op or "attention" in label.op or len(value.users) > 1:
            return False
        if self._cost.is_view(value):
            return self._leaves_wide(value.all_input_nodes[0], label)
        return is_parameter(value) and device_row(value.meta["val"].device.type).wide_results


class _Memory:
    """The values that a compiled training step writes to memory between its kernels, as far as they are rounded.

    Inductor computes fused kernels in fp32. So of the values and gradients that a plan has low, only those are rounded
    that are written. Values: see :class:`amp_fx.precision.placement.cost.CostModel`; and those that are only kept for
    the backward. Gradients: the backward is the forward's mirror, so both are read off the forward graph.
    """

    def __init__(self, graph: fx.Graph, cost: CostModel, rows: Mapping[str, CallSensitivity]) -> None:
        self._cost = cost
        self._rows = rows
        #: how many kernels of the backward run before the gradient of a value is complete
        self._level: dict[fx.Node, int] = {}
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        #: fused values that a forward kernel, or the backward, finds in memory
        self.written: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            levels = [self._level[user] + cost.is_external(user) for user in node.users]
            self._level[node] = max(levels, default=0)
        for node in graph.nodes:
            self._sources[node] = self._read_from(node)
            is_read = any(cost.reads_memory(user, node) for user in node.users)
            if not cost.is_stored(node) and (is_read or self._is_kept(node)):
                self.written.add(node)

    def writes_gradient(self, value: fx.Node) -> bool:
        """True where the gradient of a value is in memory, in the dtype that the value has.

        1. Library kernels read the gradient of their result, and so do sums over repeated elements.
        2. A gradient that is part of another one, which a later kernel completes, waits for it: that of a residual add.
        """
        label = label_of(value)
        if label is None:
            return False
        if self._cost.is_view(value):
            return self.writes_gradient(value.all_input_nodes[0])
        if label.op_class is OpClass.LOW or self._cost.accumulates_backward(value):
            return True
        return any(self._level[source] > self._level[value] for source in self._differentiated(value))

    def passes_gradient(self, reader: fx.Node, value: fx.Node) -> bool:
        """True where the gradient of the reader's result is that of the value as it is."""
        if self._cost.is_view(reader):
            return True
        label = label_of(reader)
        given, result = value.meta.get("val"), reader.meta.get("val")
        if label is None or not isinstance(given, torch.Tensor) or not isinstance(result, torch.Tensor):
            return False
        # as text: comparing sizes that only the data know is an error
        if str(given.shape) != str(result.shape):
            return False
        if label.op == "dropout":
            return not argument_value(reader, "p") or not argument_value(reader, "train")
        return has_trait(label.op, Trait.PASSES_GRADIENT)

    def _differentiated(self, reader: fx.Node) -> Iterator[fx.Node]:
        """The operands to which a gradient goes; where that was not measured, it may."""
        row = _row_of(reader, self._rows)
        for slot, _, source in slots(reader):
            if row is None or slot not in row.reads or row.reads[slot].gradient != 0:
                yield source

    def _is_kept(self, value: fx.Node) -> bool:
        """True where the backward needs a fused value and has no cheaper way to it.

        What follows from a single value in memory is computed again from that. What joins two of them, as a residual
        add does, is kept in their place.
        """
        return len(self._sources[value]) > 1 and any(
            self._cost.saves_input(user) and any(True for _ in self._differentiated(user))
            for user in value.users
        )

    def _read_from(self, value: fx.Node) -> frozenset[fx.Node]:
        """The values that a fused one is computed from: large ones, in memory only because they are kept."""
        if label_of(value) is None:
            return frozenset()
        found: set[fx.Node] = set()
        for _, _, source in slots(value):
            base = source
            while self._cost.is_view(base):
                base = base.all_input_nodes[0]
            in_memory = base in self.written or self._cost.is_stored(base)
            if not in_memory and not self._cost.accumulates_backward(base):
                found |= self._sources[base]
            elif not self._cost.is_input(base):
                found.add(base)
        return frozenset(source for source in found if 2 * _size(source) >= _size(value))


def _row_of(node: fx.Node, rows: Mapping[str, CallSensitivity]) -> CallSensitivity | None:
    label = label_of(node)
    return None if label is None else rows.get(label.name)


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return numel(value) if isinstance(value, torch.Tensor) else 0
