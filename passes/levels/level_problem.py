"""The second cut's problem for the matmuls of a graph: what each takes in the low dtype and in the level below."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch.fx as fx

from amp_fx.graphs.fake_runs import is_matmul, matmul_flops
from amp_fx.graphs.values import cast_bytes, numel
from amp_fx.passes.levels.matmuls import Matmul, Operand
from amp_fx.placement.cut import HIGH, LOW, Problem, Shared, Var
from amp_fx.placement.level_cost import NARROW, LevelCost, copy_traffic
from amp_fx.policy.levels import LEVELS, Level

__all__ = ["level_of", "level_problem"]


def level_of(operand: Operand, level: Level) -> Level:
    """The level by which an operand is scaled."""
    return LEVELS[level.stored] if operand.is_weight and level.stored else level


def level_problem(matmuls: Sequence[Matmul], level: Level, cost: LevelCost) -> Problem:
    """What to minimise; variables are (name in the plan, role), LOW is the level below.

    Args:
        matmuls: those that may run in the level.
        level: below the low dtype.
        cost: of the device.
    """
    problem, nodes = Problem(), {matmul.node for matmul in matmuls}
    readings: dict[fx.Node, list[tuple[Var, Operand]]] = {}
    for matmul in matmuls:
        problem.add_unary(matmul.variable, *_times(matmul, level, cost))
        for operand in matmul.operands:
            if not operand.is_folded:
                readings.setdefault(operand.source, []).append((matmul.variable, operand))
    for read in readings.values():
        low = _low_copy(read[0][1], nodes, cost)
        problem.shared.append(Shared(low, HIGH, tuple(reader for reader, _ in read)))
        copies: dict[str, tuple[int, list[Var]]] = {}
        for reader, operand in read:
            for key, time in _copies(operand, level, cost).items():
                copies.setdefault(key, (time, []))[1].append(reader)
        problem.shared += [Shared(time, LOW, tuple(by)) for time, by in copies.values()]
    return problem


def _times(matmul: Matmul, level: Level, cost: LevelCost) -> tuple[int, int]:
    result = matmul.node.meta["val"]
    elements = sum(numel(operand.base.meta["val"]) for operand in matmul.operands)
    low, below = cost.matmul(matmul_flops(matmul.node), elements, result.dtype.itemsize)
    if len({level_of(operand, level).by_row for operand in matmul.operands}) > 1:
        # factors of columns are multiplied afterwards
        below += cost.moving(2 * numel(result) * result.dtype.itemsize, 1)
    if not level.dtype.is_floating_point:
        # the product is in 32 bits, which the kernel behind it reads
        below += cost.moving(2 * numel(result) * (4 - result.dtype.itemsize))
    return low, below


def _low_copy(operand: Operand, nodes: set[fx.Node], cost: LevelCost) -> int:
    """What the low copy takes; nothing where it is there anyway."""
    value, base = operand.base.meta["val"], operand.base
    # inputs, and results of library calls, are in memory whoever reads them
    is_stored = base.op == "placeholder" or base.target is operator.getitem or is_matmul(base)
    if is_stored or not operand.readers <= nodes:
        return 0
    if operand.source is base:
        # by the kernel that computes it
        return cost.moving(numel(value) * value.dtype.itemsize)
    return cost.moving(cast_bytes(operand.source.meta["val"], value.dtype), 1)


def _copies(operand: Operand, level: Level, cost: LevelCost) -> Mapping[str, int]:
    """What has to be made of a value before a matmul reads it, by what makes two readers share it."""
    level = level_of(operand, level)
    value = operand.source.meta["val"]
    elements, itemsize = numel(value), value.dtype.itemsize
    if level.by_row:
        traffic = copy_traffic(elements, itemsize, in_rows=operand.lies_in_rows, block=level.block)
        return {operand.layout: cost.moving(*traffic)}
    whole = {"": cost.moving(*copy_traffic(elements, itemsize, in_rows=False))}
    if operand.lies_in_rows:
        return whole
    if operand.is_gradient:
        # is read both ways in one graph: one kernel writes both
        return {**whole, operand.layout: cost.moving(elements * NARROW)}
    return {**whole, operand.layout: cost.moving(elements * (NARROW + itemsize), 1)}
