"""What a graph multiplies that may run below 16 bits: read off the graph on which the backend chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from amp_fx._torch import autocast_shield, compile_with_inductor, graph_pass, replace_inner_compile
from amp_fx.graphs.regions import Region
from amp_fx.graphs.values import graph_device
from amp_fx.passes import PassContext, PlaceLevels
from amp_fx.passes.levels.place_levels import level_problem
from amp_fx.placement.cut import LOW, Problem, Var
from amp_fx.placement.level_cost import BYTES, LevelCost
from amp_fx.placement.priced import Priced, SensitivityTerm
from amp_fx.plans.sensitivity import CallSensitivity, as_number
from amp_fx.policy.levels import AUTO, LEVELS
from amp_fx.rewriting import rewrite
from amp_fx.settings import Options
from amp_fx.weights.inference import weight_inputs

__all__ = ["MatmulsBelow", "PricedMatmuls", "read_matmuls"]


@dataclass(frozen=True)
class PricedMatmuls:
    """The second cut of one graph.

    Attributes:
        priced: time and sensitivity of any placement; times are those that the level takes more, so negative where it
        gains. by_bytes: the same, of bytes moved.
    """

    priced: Priced
    by_bytes: Priced


@dataclass(frozen=True)
class MatmulsBelow:
    """The matmuls of one graph that may run below 16 bits, where autocast's list is low.

    Attributes:
        problem: of the second cut; variables are (name of the call, role).
        by_bytes: the same, of bytes moved.
    """

    problem: Problem = field(default_factory=Problem)
    by_bytes: Problem = field(default_factory=Problem)

    def priced(self, rows: Mapping[str, CallSensitivity], low: Collection[str]) -> PricedMatmuls:
        """The cut with measured sensitivity; what was not measured is never placed below.

        Args:
            rows: what was measured, by the call's name.
            low: the calls that run in the low dtype.
        """
        problem = _only(self.problem, low)
        terms = [
            SensitivityTerm(as_number(sensitivity), LOW, (name, role), call=name, slot=f"{role}: {operand}")
            for name, row in rows.items()
            for role, operands in row.roles.items()
            for operand, sensitivity in operands.items()
        ]
        unknown = problem.unary.keys() - {term.var for term in terms}
        terms += [SensitivityTerm(math.inf, LOW, var) for var in unknown]
        by_bytes = Priced(_only(self.by_bytes, low), terms, relative=True)
        return PricedMatmuls(Priced(problem, terms, relative=True), by_bytes)


def _only(problem: Problem, calls: Collection[str]) -> Problem:
    """The problem where all other calls run in fp32, and read no copies."""

    def is_kept(var: Var) -> bool:
        name, _ = var  # type: ignore[misc]  # as PlaceLevels names them
        return name in calls

    kept = Problem({var: times for var, times in problem.unary.items() if is_kept(var)})
    for term in problem.shared:
        if readers := tuple(filter(is_kept, term.readers)):
            kept.shared.append(replace(term, readers=readers))
    return kept


def read_matmuls(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    ambient: Mapping[str, Region],
    opts: Options,
    cost: LevelCost,
    names: Mapping[str, str],
    *,
    training: bool,
) -> MatmulsBelow:
    """Rewrites a graph as the policy has it without the level, and reads what may run in that; no code is generated.

    Args:
        gm: Dynamo's graph, in a call of a backend; not changed.
        inputs: real ones.
        ambient: autocast state at its entry, per device type.
        opts: a policy below 16 bits, with its level.
        cost: of the device that is planned for.
        names: call in this graph -> its name in the result.
        training: forward and backward are traced together; else it is the graph without gradients.

    Returns:
        Nothing where AOTAutograd makes no joint graph of it.
    """
    plain = replace(opts, profile="off", plan=None, sensitivity=None)
    level = LEVELS[opts.level]
    placed = PlaceLevels(level, graph_device(gm, ambient), cost, joint=training, keeps_weights=not training)
    found: list[MatmulsBelow] = []

    def look(graph: fx.GraphModule, context: PassContext) -> None:
        matmuls = {
            replace(matmul, name=names[matmul.name]): way
            for matmul, way in placed.allowed(graph, context).items()
        }
        found.append(MatmulsBelow(*(level_problem(matmuls, level, each) for each in (cost, BYTES))))

    if not training:
        # policies below 16 bits differ from autocast in the level alone
        base = replace(opts.policy, base="autocast")
        captured, _ = rewrite(gm, ambient, replace(plain, policy=base, level=AUTO, weights="cast"))
        look(captured, PassContext(opts.policy, opts.numerics, folded=weight_inputs(captured)))
        return found[0]
    rewritten, _ = rewrite(gm, ambient, plain, training=True)

    def look_at_joint(joint: fx.GraphModule) -> None:
        look(joint, PassContext())

    with replace_inner_compile(_as_it_is), autocast_shield():
        compile_with_inductor(rewritten, inputs, graph_pass("joint", "amp_fx.calibrate", look_at_joint, {}))
    return found[0] if found else MatmulsBelow()


def _as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Stands in for Inductor's code, which nobody runs."""
    return gm.forward
