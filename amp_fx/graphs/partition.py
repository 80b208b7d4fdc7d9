"""A forward graph and its backward, as AOTAutograd's partitioner makes them: what one keeps for the other.

Not here: what is worth keeping (``passes/inductor/keep_less.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.fx as fx

from amp_fx._torch import FakeTensor, OpOverload, kept_positions, program_outputs
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import AGAIN
from amp_fx.graphs.values import storage_of, tensors


class Partition:
    """A forward graph and its backward, before the forward is changed.

    The backward has an input for each value that the forward keeps, by the value's name; no other order is read.
    """

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self.forward, self.backward = forward, backward
        by_name = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        #: position among the forward's results -> input of the backward
        self._inputs = {at: by_name[node.name] for at, node in self._kept().items()}

    def _kept(self) -> dict[int, fx.Node]:
        """Position among the forward's results -> value that is kept."""
        results: Any = self.forward.graph.output_node().args[0]
        return {at: results[at] for at in kept_positions(self.forward)}

    def hand_over(self) -> None:
        """Has the backward compute the kept values that are marked (:data:`AGAIN`), from what these read.

        What they read is kept in their place. Passes have changed the forward since, and what it keeps, but not in how
        many results.
        """
        kept = self._kept()
        #: value of the forward -> that of the backward
        known = {node: self._inputs[at] for at, node in kept.items() if AGAIN not in node.meta}
        results: dict[int, list[fx.Node]] = {}
        for at, node in kept.items():
            if AGAIN not in node.meta:
                continue
            before, steps = self._inputs[at], _steps(node)
            read = dict.fromkeys(source for step in steps for source in step.all_input_nodes)
            results[at] = [source for source in read if source not in steps and source not in known]
            for source in results[at]:
                if source.op != "placeholder":
                    # one name in both graphs, by which others know what is kept
                    source._rename(f"saved_{source.name}")
                with self.backward.graph.inserting_before(before):
                    known[source] = self.backward.graph.placeholder(source.name)
                known[source].meta = {**source.meta}
            again = self._compute(steps, known, min(before.users))
            before.replace_all_uses_with(again)
            if _strides(again) != _strides(before):
                self._lay_out(again)
            self.backward.graph.erase_node(before)
        if results:
            self._return(results)
            for part in (self.forward, self.backward):
                part.graph.lint()
                part.recompile()

    def _compute(self, steps: list[fx.Node], known: Mapping[fx.Node, fx.Node], reader: fx.Node) -> fx.Node:
        """The last of some calls of the forward, computed in front of a reader in the backward."""
        copies, of_steps = dict(known), [value for step in steps for value in tensors(step.meta["val"])]
        mode = next(value.fake_mode for value in of_steps if isinstance(value, FakeTensor))
        with self.backward.graph.inserting_before(reader):
            for step in steps:
                copies[step] = self.backward.graph.node_copy(step, copies.__getitem__)
                value = run_fake(copies[step], None if step.all_input_nodes else mode)
                copies[step].meta = {**reader.meta, "val": value, AGAIN: True}
        return copies[steps[-1]]

    def _lay_out(self, again: fx.Node) -> None:
        """Gives what follows from a value, which is dense now and in the same order, the strides that it has then."""
        changed = {again}
        for node in self.backward.graph.nodes:
            if not isinstance(node.target, OpOverload) or changed.isdisjoint(node.all_input_nodes):
                continue
            strides, node.meta["val"] = _strides(node), run_fake(node)
            if _strides(node) != strides:
                changed.add(node)

    def _return(self, results: Mapping[int, list[fx.Node]]) -> None:
        """Puts values, or none, in the place of some results of the forward."""
        output: Any = self.forward.graph.output_node()
        all_of = [(at, node) for at, kept in enumerate(output.args[0]) for node in results.get(at, [kept])]
        output.args = ([node for _, node in all_of],)
        output.meta["desc"] = [output.meta["desc"][at] for at, _ in all_of]
        self.forward.graph.eliminate_dead_code()


def kept_storages(gm: fx.GraphModule, *, returned: bool = False) -> list[list[fx.Node]]:
    """The values that a forward keeps for its backward and was not given, those of one storage together.

    With ``returned`` also values that the program returns as well.
    """
    others = gm.graph.find_nodes(op="placeholder") + ([] if returned else program_outputs(gm))
    results: Any = gm.graph.output_node().args[0]
    taken = {None, *map(storage_of, others)}
    found: dict[Any, list[fx.Node]] = {}
    for node in dict.fromkeys(results[at] for at in kept_positions(gm)):
        if (storage := storage_of(node)) not in taken:
            found.setdefault(storage, []).append(node)
    return [*found.values()]


def _steps(node: fx.Node) -> list[fx.Node]:
    """A marked call and the marked ones that it reads, in order."""
    found, stack = {node}, [node]
    while stack:
        more = [
            source for source in stack.pop().all_input_nodes if AGAIN in source.meta and source not in found
        ]
        found.update(more)
        stack += more
    return [each for each in node.graph.nodes if each in found]


def _strides(node: fx.Node) -> list[tuple[Any, ...]]:
    return [tuple(value.stride()) for value in tensors(node.meta["val"])]
