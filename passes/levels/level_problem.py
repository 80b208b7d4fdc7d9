"""The costs of levels below 16 bits: what each matmul gains, and what the copies cost that several of them share."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
import torch.fx as fx

from amp_fx.graphs.calls import convolution_settings, readers
from amp_fx.graphs.fake_runs import is_matmul, matmul_flops
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import cast_bytes, numel
from amp_fx.passes.levels.matmuls import Matmul, Operand
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Shared, Var
from amp_fx.precision.placement.level_cost import NARROW, LevelCost
from amp_fx.precision.policy.levels import LEVELS, Kernel, Level

aten = torch.ops.aten


def level_of(operand: Operand, level: Level) -> Level:
    """The level of an operand: a weight has another one where the level names it."""
    return LEVELS[level.of_weights] if operand.is_weight and level.of_weights else level


def level_problem(matmuls: Mapping[Matmul, Kernel], level: Level, cost: LevelCost) -> Problem:
    """The function to minimise over matmuls that may run in a level; LOW of a variable (name, role) is that level."""
    problem, nodes = Problem(), {matmul.node for matmul in matmuls}
    variables = {matmul.node: matmul.variable for matmul in matmuls}
    readings: dict[fx.Node, list[tuple[Var, Operand, bool, tuple[int, ...]]]] = {}
    for matmul, kernel in matmuls.items():
        problem.add_unary(matmul.variable, *_times(matmul, kernel, level, cost))
        for operand in matmul.operands:
            if not operand.is_folded:
                reading = matmul.variable, operand, kernel.measured, matmul.operands[1].equalisation
                readings.setdefault(operand.source, []).append(reading)
    for read in readings.values():
        low = _low_copy(read[0][1], nodes, cost)
        problem.shared.append(Shared(low, HIGH, tuple(reader for reader, *_ in read)))
        copies: dict[object, tuple[int, list[Var]]] = {}
        for reader, operand, measured, exponents in read:
            waits = measured and bool(exponents) and product_before(operand.source) is not None
            for key, time in _copies(operand, level, cost, measured=measured, waits=waits).items():
                copies.setdefault((key, exponents), (time, []))[1].append(reader)
        problem.shared += [Shared(time, LOW, tuple(by)) for time, by in copies.values()]
        by = tuple(reader for reader, _, measured, exponents in read if measured and not exponents)
        if by and (product := product_before(read[0][1].source)) is not None:
            # it writes bytes, or the low dtype if it runs in that: who reads the other waits for a kernel
            value, written = read[0][1].source.meta["val"], ("written", read[0][1].source.name)
            extra = cost.moving(numel(value) * value.dtype.itemsize, 1) + cost.rounding(numel(value))
            problem.shared.append(Shared(extra, LOW, by, written))
            problem.shared.append(Shared(extra, HIGH, tuple(reader for reader, *_ in read), written))
            if product in variables:
                problem.implies.append((variables[product], written))
            else:
                problem.pins[written] = HIGH
    return problem


def product_before(node: fx.Node, *, through_adds: bool = True) -> fx.Node | None:
    """The product that writes a value, with activations and a residual applied; None of what other kernels compute."""
    while not is_matmul(node):
        given = node.all_input_nodes
        if through_adds and node.target in (aten.add.Tensor, aten.add_.Tensor) and len(given) == 2:
            found = (product_before(each, through_adds=False) for each in given)
            return next((product for product in found if product is not None), None)
        passes = has_trait(node, Trait.RESHAPES, Trait.UNCHANGED, Trait.CAST, Trait.BATCH_NORM)
        single = len(given) == 1 and torch.Tag.pointwise in getattr(node.target, "tags", ())
        if node.op != "call_function" or not (passes or single):
            return None
        node = given[0]
    return node


def _times(matmul: Matmul, kernel: Kernel, level: Level, cost: LevelCost) -> tuple[int, int]:
    result = matmul.node.meta["val"]
    sizes = [(numel(operand.base.meta["val"]), operand.is_weight) for operand in matmul.operands]
    elements = sum(
        size for size, is_weight in sizes if is_weight or size * result.dtype.itemsize > cost.cache
    )
    grouped = matmul.is_convolution and convolution_settings(matmul.node)["groups"] > 1
    low, below = cost.matmul(matmul_flops(matmul.node), elements, result.dtype.itemsize, grouped=grouped)
    below += cost.calling(kernel, matmul.sizes, convolves=matmul.is_convolution)
    if matmul.is_convolution:
        behind = readers(matmul.node, lambda node: has_trait(node, Trait.CAST, Trait.BATCH_NORM))
        # oneDNN applies a gelu in 16 bits only
        epilogue = cost.moving(numel(result) * (2 * result.dtype.itemsize + cost.arithmetic))
        below += any(node.target is aten.gelu.default for node in behind) * epilogue
    if len({level_of(operand, level).by_row for operand in matmul.operands}) > 1:
        # factors of columns are multiplied afterwards
        below += cost.moving(2 * numel(result) * result.dtype.itemsize, 1)
    if not level.dtype.is_floating_point and not kernel.measured:
        # the product is in 32 bits, which the kernel behind it reads
        below += cost.moving(2 * numel(result) * (4 - result.dtype.itemsize))
    return low, below


def _low_copy(operand: Operand, nodes: set[fx.Node], cost: LevelCost) -> int:
    """The cost of the low copy; nothing where it is there anyway."""
    value, base = operand.base.meta["val"], operand.base
    # inputs, and results of library calls, are in memory whoever reads them
    is_stored = base.op == "placeholder" or base.target is operator.getitem or is_matmul(base)
    if is_stored or not operand.readers <= nodes:
        return 0
    if operand.source is base:
        # by the kernel that computes it
        return cost.moving(numel(value) * value.dtype.itemsize)
    return cost.moving(cast_bytes(operand.source.meta["val"], value.dtype), 1)


def _copies(
    operand: Operand, level: Level, cost: LevelCost, *, measured: bool, waits: bool = False
) -> Mapping[str, int]:
    """The costs of the copies that a matmul reads of an operand, by the key under which two readers share one.

    ``waits``: a product writes the value, and a kernel of its own divides and rounds it.
    """
    level = level_of(operand, level)
    value = operand.source.meta["val"]
    elements, itemsize = numel(value), value.dtype.itemsize
    if measured:
        # written by the kernel that computes the value
        own = cost.moving(elements * (itemsize + NARROW), 1) if waits else 0
        return {"measured": cost.rounding(elements) + own}
    if level.by_row:
        copy = cost.copying(elements, itemsize, in_rows=operand.lies_in_rows, block=level.block)
        return {operand.layout: copy}
    whole = {"": cost.copying(elements, itemsize)}
    if operand.lies_in_rows:
        return whole
    if operand.is_gradient:
        # is read both ways in one graph: one kernel writes both
        return {**whole, operand.layout: cost.moving(elements * NARROW)}
    return {**whole, operand.layout: cost.moving(elements * (NARROW + itemsize), 1)}
