"""What a step keeps between forward and backward: each value, who reads it, and why it takes what it takes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch.fx as fx

from amp_fx._torch import OpOverload, op_name, program_outputs
from amp_fx.graphs.calls import module_path, target_name
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import AGAIN, SAVED
from amp_fx.graphs.partition import kept_storages
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import is_view, storage_of
from amp_fx.instruments.reports.lowered import (
    LoweredGraphs,
    is_move,
    origin_of,
    shape_of,
    storage_bytes,
)
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.saved import SavedValue

#: readers that a row names
_READERS = 2
_RETURNED = "the program returns it"


def add_saved(graphs: LoweredGraphs, plans: Sequence[Plan]) -> None:
    """Adds to the plans of forward graphs what they keep for their backward."""
    weights = {given.shape for plan in plans for given in plan.inputs if given.parameter}
    steps = {name: (forward, backward) for name, forward, backward in graphs.steps}
    for plan in plans:
        if plan.phase == "forward" and plan.graph in steps:
            ops = {row.name: row.op for row in plan.nodes}
            plan.saved_values = _saved_values(*steps[plan.graph], ops, weights)


def _saved_values(
    forward: fx.GraphModule, backward: fx.GraphModule, ops: Mapping[str, str], weights: set[tuple[int, ...]]
) -> list[SavedValue]:
    """What a forward keeps for its backward, largest first.

    ``ops`` are those of the calls in the plan, by name, ``weights`` the shapes of parameters.
    """
    nodes = {node.name: node for node in forward.graph.nodes}
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    returned = {storage_of(node) for node in program_outputs(forward)} - {None}
    # numbers and scales of one value together
    parts: dict[str, list[list[fx.Node]]] = {}
    for views in kept_storages(forward, returned=True):
        note = views[0].meta.get(SAVED)
        parts.setdefault(views[0].name if note is None else note.value, []).append(views)
    found = []
    for name, storages in parts.items():
        value, note = nodes[name], storages[0][0].meta.get(SAVED)
        source = _producer(value)
        is_copy = source.op == "placeholder" and shape_of(source) in weights
        read = [given[node.name] for views in storages for node in views if node.name in given]
        form = _RETURNED if storage_of(value) in returned else ""
        if note is not None:
            form = note.how if note.bits else f"as it is: {note.how}"
        origin, whole = source.meta.get("from_node"), value.meta["val"].dtype
        call = origin[-1].name if origin and origin[-1].name in ops else ""
        module = module_path(value if source.op == "placeholder" else source)
        readers = _read_by(_readers(read), module, weights, is_copy=is_copy)
        row = SavedValue(
            name=name,
            call=call,
            op="weight" if is_copy else ops.get(call) or _op(source),
            module_path=module,
            dtype=whole,
            bits=(note and note.bits) or 8 * whole.itemsize,
            bytes=sum(map(storage_bytes, storages)),
            reason="; ".join(filter(None, (form, readers))),
        )
        found.append(row)
    return sorted(found, key=lambda row: -row.bytes)


def _readers(given: Iterable[fx.Node]) -> list[fx.Node]:
    """The gradients that read values, through views and what is computed again in the backward."""
    found, seen, stack = list[fx.Node](), set[fx.Node](), [*given]
    while stack:
        for reader in stack.pop().users:
            if reader in seen or reader.op == "output":
                continue
            seen.add(reader)
            is_same = is_view(reader) or is_move(reader) or has_trait(reader, Trait.CAST)
            if is_same or AGAIN in reader.meta or reader.meta.get("partitioner_tag") == "is_forward":
                stack.append(reader)
            else:
                found.append(reader)
    # in the order of the graph
    return sorted(found)


def _read_by(readers: Sequence[fx.Node], module: str, weights: set[tuple[int, ...]], *, is_copy: bool) -> str:
    """``"read by the weight gradient of layers.0.fc1, its gradient and 2 more"``: of what is in ``module``."""
    names: dict[str, None] = {}
    for node in readers:
        kind, where = "gradient", module_path(node)
        if is_matmul(node) and is_copy:
            kind = "input gradient"
        elif is_matmul(node) and _is_weight_gradient(node, weights):
            kind = "weight gradient"
        own = where and where == module
        names[f"its {kind}" if own else f"the {kind} of {where or origin_of(node) or _op(node)}"] = None
    more = f" and {len(names) - _READERS} more" if len(names) > _READERS else ""
    return f"read by {', '.join([*names][:_READERS])}{more}" if names else ""


def _op(node: fx.Node) -> str:
    """ATen name; of an element of a result, that of the call; of an input ``"input"``."""
    if node.op == "placeholder":
        return "input"
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    return op_name(call.target) if isinstance(call.target, OpOverload) else target_name(call)


def _producer(node: fx.Node) -> fx.Node:
    """What computes a value, without views and casts behind it; an input for a low copy of it."""
    while is_view(node) or has_trait(node, Trait.CAST):
        node = node.all_input_nodes[0]
    return node


def _is_weight_gradient(node: fx.Node, weights: set[tuple[int, ...]]) -> bool:
    """True for a matmul whose result leaves the graph, in the shape of a parameter."""
    while len(node.users) == 1 and node.op == "call_function":
        (reader,) = node.users
        if reader.op == "output":
            return shape_of(node) in weights
        # of a weight that several calls share, gradients are added
        if not (is_move(reader) or has_trait(reader, Trait.CAST) or reader.meta.get("is_gradient_acc")):
            return False
        node = reader
    return False
