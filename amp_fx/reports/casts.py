"""The casts of lowered graphs: which of them are kernels, what they cost, and in which modules they are.

The graphs of amp_fx and of torch.autocast are counted in the same way: what Inductor is given, and what is left of it
after fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from amp_fx._torch import Lowered
from amp_fx.graphs.calls import module_path
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import cast_bytes
from amp_fx.placement.layout import is_convert
from amp_fx.plans.plan import CastSum, Cost, ModuleCasts, Plan
from amp_fx.plans.reading import conversion
from amp_fx.reports.advice import starred

__all__ = ["LoweredGraph", "cast_kernels", "casts_by_module", "cost_of", "is_move"]


#: what a kernel may do beside converting and still be a cast
_MOVES = Trait.MOVES, Trait.RESHAPES, Trait.UNCHANGED


@dataclass(frozen=True)
class LoweredGraph:
    """One graph with Dynamo's id."""

    name: str
    phase: str
    lowered: Lowered

    @property
    def kernels(self) -> set[fx.Node]:
        """The casts that are kernels of their own."""
        return {node for casts, _ in cast_kernels(self.lowered) for node in casts}


def is_move(node: fx.Node) -> bool:
    """True for calls whose result has the values of their only tensor in another order or shape."""
    return has_trait(node, *_MOVES) and len(node.all_input_nodes) == 1


def cast_kernels(lowered: Lowered) -> list[tuple[frozenset[fx.Node], int]]:
    """Kernels that convert and move values and compute nothing: the conversions in each, and the bytes it moves."""
    generated = []
    for origins, size in lowered.generated:
        calls = [node for node in origins if node.op == "call_function"]
        casts = frozenset(node for node in calls if has_trait(node, Trait.CAST))
        if casts and all(has_trait(node, Trait.CAST, *_MOVES) for node in calls):
            generated.append((casts, size))
    called = [
        (frozenset({node}), cast_bytes(before, after.dtype))
        for node, before, after in _conversions(lowered.after)
        if is_convert(node)
    ]
    return generated + called


def cost_of(graphs: Iterable[Lowered]) -> Cost:
    """What the casts of some graphs cost."""
    graphs = list(graphs)
    casts = [
        cast_bytes(before, after.dtype) for graph in graphs for _, before, after in _conversions(graph.after)
    ]
    kernels = [size for graph in graphs for _, size in cast_kernels(graph)]
    return Cost(
        len(casts), sum(casts), len(kernels), sum(kernels), sum(graph.bytes_moved for graph in graphs)
    )


def casts_by_module(graphs: Mapping[str, Sequence[LoweredGraph]], plans: Sequence[Plan]) -> list[ModuleCasts]:
    """Casts by module, in the order of the program.

    ``graphs`` are those of ``"amp_fx"`` and ``"torch.autocast"``. The plans of the forward tell
    parameters from other inputs, which lowered graphs do not, and what a module computes in: lowered graphs say what is
    in a kernel's registers.
    """
    weights = {given.shape for plan in plans for given in plan.inputs if given.parameter}
    casts = [
        cast for name, found in graphs.items() for graph in found for cast in _casts(name, graph, weights)
    ]
    dtypes: dict[str, dict[str, str]] = {"torch.autocast": {}, "amp_fx": {}}
    for plan in plans:
        if plan.phase == "forward":
            dtypes["torch.autocast"] |= plan.autocast_dtypes
            dtypes["amp_fx"] |= plan.module_dtypes
    known = {path for found in dtypes.values() for path in found}
    forward = [graph.lowered for found in graphs.values() for graph in found if graph.phase == "forward"]
    order = [path for graph in forward for path in map(module_path, _calls(graph.after)) if path in known]
    paths: dict[str, list[str]] = {}
    for path in dict.fromkeys([*order, *(path for path, _ in casts)]):
        paths.setdefault(starred(path), []).append(path)
    return [
        ModuleCasts(
            module=module,
            times=len(same),
            dtypes={name: found[path] for name, found in dtypes.items() for path in same if path in found},
            casts=_summed([cast for path, cast in casts if path in same]),
        )
        for module, same in paths.items()
    ]


def _summed(casts: Sequence[CastSum]) -> list[CastSum]:
    """One row for each kind of cast, in the order in which kinds occur."""
    kinds: dict[tuple[Any, ...], list[CastSum]] = {}
    for cast in casts:
        kinds.setdefault((cast.name, cast.phase, cast.what, cast.before, cast.after), []).append(cast)
    counts = [
        [(cast.casts, cast.bytes, cast.kernels, cast.kernel_bytes) for cast in same]
        for same in kinds.values()
    ]
    return [
        CastSum(*kind, *map(sum, zip(*rows, strict=True))) for kind, rows in zip(kinds, counts, strict=True)
    ]


def _casts(name: str, graph: LoweredGraph, weights: set[tuple[int, ...]]) -> Iterator[tuple[str, CastSum]]:
    """Every cast of a graph with its module's path."""
    moved: dict[fx.Node, int] = {}
    for nodes, size in cast_kernels(graph.lowered):
        # several casts in one kernel share what it moves
        for place, node in enumerate(sorted(nodes, key=lambda node: node.name)):
            moved[node] = size * (place + 1) // len(nodes) - size * place // len(nodes)
    for node, before, after in _conversions(graph.lowered.after):
        kind = name, graph.phase, _what(node, graph.phase, weights), before.dtype, after.dtype
        counts = 1, cast_bytes(before, after.dtype), int(node in moved), moved.get(node, 0)
        yield _module(node), CastSum(*kind, *counts)


def _what(node: fx.Node, phase: str, weights: set[tuple[int, ...]]) -> str:
    """What is cast, by where it comes from and where it goes, through views and copies."""
    source = _moved(node)
    is_input = source.op == "placeholder" and not source.name.startswith("tangents")
    if is_input and _shape(source) in weights:
        return "weight"
    if phase == "forward":
        return "activation"
    reader = node
    while len(reader.users) == 1 and is_move(next(iter(reader.users))):
        reader = next(iter(reader.users))
    leaves = any(user.op == "output" for user in reader.users)
    return "weight gradient" if leaves and _shape(reader) in weights else "gradient"


def _moved(cast: fx.Node) -> fx.Node:
    """What a cast reads, views and copies left out."""
    source = cast.all_input_nodes[0]
    while is_move(source):
        source = source.all_input_nodes[0]
    return source


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _module(node: fx.Node) -> str:
    """The module of a cast: of a graph input, its reader's; else its own, or that of a neighbour."""
    source = _moved(node)
    readers = [next(iter(user.users), user) if is_move(user) else user for user in node.users]
    neighbours = (*readers, node) if source.op == "placeholder" else (node, *readers, source)
    return next((path for path in map(module_path, neighbours) if path), "")


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of a graph, bodies of higher-order ops included."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _conversions(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Tensor, Tensor]]:
    for node in _calls(gm):
        if (values := conversion(node)) is not None:
            yield node, *values
