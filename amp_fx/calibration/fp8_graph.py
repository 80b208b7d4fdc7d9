"""What a graph multiplies, forward and backward, that may run in fp8: read off its joint graph, as the backend does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from amp_fx._torch import autocast_shield, compile_with_inductor, graph_pass, replace_inner_compile
from amp_fx.graphs.devices import graph_device
from amp_fx.graphs.regions import Region
from amp_fx.options import Options
from amp_fx.passes import PlaceFp8
from amp_fx.placement.cut import Var
from amp_fx.placement.fp8 import Fp8Cost
from amp_fx.placement.fp8_choice import BYTES, Fp8Problem, PricedFp8
from amp_fx.plans.harm import CallHarm
from amp_fx.policy.fp8 import RECIPES
from amp_fx.rewriting import rewrite

__all__ = ["Fp8Graph", "read_fp8"]


@dataclass(frozen=True)
class Fp8Graph:
    """The matmuls of one graph that may run in fp8, where autocast's list is low.

    Attributes:
        problem: what the second cut minimises; variables are (name of the call, role).
        by_bytes: the same, of bytes moved.
    """

    problem: Fp8Problem
    by_bytes: Fp8Problem

    def priced(self, rows: Mapping[str, CallHarm], low: Collection[str]) -> PricedFp8:
        """The cut with measured harm.

        Args:
            rows: what was measured, by the call's name.
            low: the calls that run in the low dtype.
        """
        harms: dict[Var, float] = {
            (name, role): row.in_fp8(role) for name, row in rows.items() for role in row.fp8
        }
        return PricedFp8(self.problem.only(_of(self.problem, low)), harms)

    def moved(self, chosen: Collection[Var], low: Collection[str]) -> int:
        """Bytes that are moved more than if nothing ran in fp8."""
        problem = self.by_bytes.only(_of(self.by_bytes, low))
        return problem.time(chosen) - problem.time(())


def _of(problem: Fp8Problem, calls: Collection[str]) -> set[Var]:
    return {(name, role) for name, role in problem.matmuls if name in calls}  # type: ignore[misc]  # as PlaceFp8 names them


def read_fp8(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    ambient: Mapping[str, Region],
    opts: Options,
    cost: Fp8Cost,
    names: Mapping[str, str],
) -> Fp8Graph | None:
    """Traces forward and backward of a graph under the policy; no code is generated.

    Args:
        gm: Dynamo's graph, in a call of a backend; not changed.
        inputs: real ones.
        ambient: autocast state at its entry, per device type.
        opts: policy fp8, with its recipe.
        cost: of the device that is planned for.
        names: call in this graph -> its name in the result.

    Returns:
        None where AOTAutograd makes no joint graph of it.
    """
    rewritten, _ = rewrite(gm, ambient, replace(opts, profile="off", plan=None, harm=None), training=True)
    placed = PlaceFp8(RECIPES[opts.fp8], graph_device(gm, ambient), cost)
    found: list[Fp8Graph] = []

    def look(joint: fx.GraphModule) -> None:
        found.append(Fp8Graph(*(_renamed(placed.problem(joint, each), names) for each in (cost, BYTES))))

    with replace_inner_compile(_as_it_is), autocast_shield():
        compile_with_inductor(rewritten, inputs, graph_pass("joint", "amp_fx.calibrate", look, {}))
    return found[0] if found else None


def _as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Stands in for Inductor's code, which nobody runs."""
    return gm.forward


def _renamed(problem: Fp8Problem, names: Mapping[str, str]) -> Fp8Problem:
    """The same with other names of calls."""

    def rename(var: Any) -> Var:
        return names[var[0]], var[1]

    values = [
        replace(
            value,
            readers=tuple(map(rename, value.readers)),
            copies=tuple(replace(copy, readers=tuple(map(rename, copy.readers))) for copy in value.copies),
        )
        for value in problem.values
    ]
    return Fp8Problem({rename(var): times for var, times in problem.matmuls.items()}, tuple(values))
