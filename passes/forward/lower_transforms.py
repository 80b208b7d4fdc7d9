"""Inside ``vmap`` and ``torch.func`` values exist in their levels only: there autocast itself places the casts."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import is_hooks_switch, nesting_change
from amp_fx.graphs.calls import PROGRAM_CAST
from amp_fx.graphs.fallback import runs
from amp_fx.graphs.keys import CAST_META, REGION_META, STEP_META
from amp_fx.graphs.regions import ENTER, EXIT
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import is_eligible
from amp_fx.passes.base import Note, Pass, PassContext, PassResult
from amp_fx.precision.plans.label import Reason, ReasonKind, label_of
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.rules import PRECISIONS, Rule

#: device types on which autocast is to be on, with its dtype
_State = tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True)
class LowerTransforms(Pass):
    """Has autocast on where a transform of ``torch.func`` is open, and casts back what leaves it.

    Not where a rule says fp32, nor on a device that is slower in 16 bits. A graph that does not run so stays.

    Before, and after::

        w: f32[4, 4]; x: f32[8, 4]
        opened = _vmap_increment_nesting(8, 'error')
        row = _add_batch_dim(x, 0, 1)
        y = linear(row, w)
        out = _remove_batch_dim(y, 1, 8, 0)                         # f32[8, 4]
        closed = _vmap_decrement_nesting()
        return (out,)
        # after
        opened = _vmap_increment_nesting(8, 'error')
        on = _enter_autocast('cpu', torch.bfloat16, True, False)
        row = _add_batch_dim(x, 0, 1)
        y = linear(row, w)
        out = _remove_batch_dim(y, 1, 8, 0)
        off = _exit_autocast(on)
        closed = _vmap_decrement_nesting()
        wide = torch.ops.aten.to.dtype(out, torch.float32)          # f32[8, 4]; inserted
        return (wide,)
    """

    replays: bool = False  # as a plan has it

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        matched = set[Rule]()
        states, notes = self._states(gm.graph, context, matched), {Note.MATCHED: matched}
        if not any(states.values()):
            return PassResult("no transform to lower", 0, notes)
        trial = copy.copy(gm)
        trial.graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        trial.graph.output(trial.graph.graph_copy(gm.graph, copies))
        _switch({copies[node]: state for node, state in states.items()})
        for node in filter(lambda node: is_hooks_switch(node.target), list(trial.graph.nodes)):
            # while a graph is rewritten there is a hook, which changes nothing
            trial.graph.erase_node(node)
        trial.recompile()
        if not runs(trial):
            return PassResult("autocast itself fails on the transforms", 0, notes)
        _switch(states)
        lowered = [node for node, state in states.items() if state]
        for node in lowered:
            label = label_of(node)
            if label is not None and label.computed_by != "autocast":
                label.computed_by, label.reasons = "autocast", (Reason(ReasonKind.TRANSFORMED),)
                if has_trait(label.op.strip("_"), Trait.MATMUL, Trait.UNCOUNTED_MATMUL):
                    label.dtype = label.low = dict.fromkeys(dtype for _, dtype in states[node]).popitem()[0]
        return PassResult(f"{len(lowered)} nodes inside transforms under autocast", len(lowered), notes)

    def _states(self, graph: fx.Graph, context: PassContext, matched: set[Rule]) -> dict[fx.Node, _State]:
        """Calls inside a transform, and those that take an element of its result; rules about them are ``matched``."""
        found, depth = dict[fx.Node, _State](), 0
        for node in graph.nodes:
            step = nesting_change(node.target)
            is_inside, depth = depth > 0 and depth + step > 0, depth + step
            if is_inside:
                regions = node.meta.get(REGION_META, {}).items()
                on = [
                    (d, r)
                    for d, r in regions
                    if r.enabled and (r.by_user or self._lowers(node, r.dtype, context, matched))
                ]
                found[node] = tuple((device, region.dtype) for device, region in on)
            elif node.target is operator.getitem and node.args[0] in found:
                found[node] = ()
        return found

    def _lowers(self, node: fx.Node, low: torch.dtype, context: PassContext, matched: set[Rule]) -> bool:
        label, profile = label_of(node), context.profile
        if label is None:
            return False
        if self.replays:
            return label.computed_by == "autocast"
        if rules := context.policy.matching(label.op, label.module_path):
            matched.update(rules)
            return PRECISIONS[rules[-1].precision] is OpClass.LOW
        # nothing was measured of it
        return context.policy.sensitivity is None and not (profile is not None and profile.is_slower_in(low))


def _switch(states: dict[fx.Node, _State]) -> None:
    """Switches autocast on and off around nodes, and casts back what others read."""
    graph = next(iter(states)).graph
    on: list[fx.Node] = []
    now: _State = ()
    last = None
    for node in list(graph.nodes):
        state = states.get(node, ())
        if state != now:
            with graph.inserting_before(node):
                for entered in reversed(on):
                    graph.call_function(EXIT, (entered,)).meta[STEP_META] = True
                on = [graph.call_function(ENTER, (device, dtype, True, False)) for device, dtype in state]
            for entered in on:
                entered.meta[STEP_META] = True
            now = state
    depth, leaving = 0, list[fx.Node]()
    for node in list(graph.nodes):
        depth += nesting_change(node.target)
        outside = [user for user in node.users if user not in states and STEP_META not in user.meta]
        if node in states and outside and is_eligible(node.meta.get("val")):
            leaving.append(node)
        if depth:
            continue
        last = node
        for value in leaving:
            work = Rewriter(graph, meta={STEP_META: True, CAST_META: True})
            with graph.inserting_after(last):
                last = work.call(PROGRAM_CAST, value, value.meta["val"].dtype)
            value.replace_all_uses_with(last, lambda user, cast=last: user not in states and user is not cast)
        leaving.clear()
