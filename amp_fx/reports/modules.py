"""Casts by module, of amp_fx and of torch.autocast: what a picture shows side by side.

Everything is read off the graphs that Inductor gets, so both columns count the same way: what is left of a cast after
fusion, and what it moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import Lowered
from amp_fx.graphs.calls import module_path
from amp_fx.graphs.values import cast_bytes
from amp_fx.plans.plan import CastSum, ModuleCasts, Plan
from amp_fx.reports.advice import starred
from amp_fx.reports.kernels import calls, cast_kernels, conversion, is_move

__all__ = ["casts_by_module"]


def casts_by_module(
    graphs: Mapping[str, Sequence[tuple[str, Lowered]]], plans: Sequence[Plan]
) -> list[ModuleCasts]:
    """Casts by module, in the order of the program.

    Args:
        graphs: name of who made them -> phase and graph, in the order of compilation.
        plans: of the program's forward; they tell parameters from other inputs, which lowered graphs do not, and what
            a module computes in: lowered graphs say what is in a kernel's registers.
    """
    weights = {given.shape for plan in plans for given in plan.inputs if given.parameter}
    casts = [
        found
        for name, lowered in graphs.items()
        for phase, graph in lowered
        for found in _casts(name, phase, graph, weights)
    ]
    dtypes: dict[str, dict[str, str]] = {"torch.autocast": {}, "amp_fx": {}}
    for plan in plans:
        if plan.phase == "forward":
            dtypes["torch.autocast"] |= plan.autocast_dtypes
            dtypes["amp_fx"] |= plan.module_dtypes
    known = {path for found in dtypes.values() for path in found}
    order = dict.fromkeys(path for lowered in graphs.values() for path in _modules(lowered) if path in known)
    order |= dict.fromkeys(path for path, _ in casts)
    paths: dict[str, list[str]] = {}
    for path in order:
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


def _modules(graphs: Sequence[tuple[str, Lowered]]) -> Iterator[str]:
    """Paths of the modules of the forward, in the order in which they compute."""
    for phase, lowered in graphs:
        if phase == "forward":
            yield from map(module_path, calls(lowered.after))


def _summed(casts: Sequence[CastSum]) -> list[CastSum]:
    """One row for each kind of cast, in the order in which kinds occur."""
    kinds: dict[tuple[Any, ...], list[CastSum]] = {}
    for cast in casts:
        kinds.setdefault((cast.name, cast.phase, cast.what, cast.before, cast.after), []).append(cast)
    return [
        CastSum(
            *kind,
            casts=len(same),
            bytes=sum(cast.bytes for cast in same),
            kernels=sum(cast.kernels for cast in same),
            kernel_bytes=sum(cast.kernel_bytes for cast in same),
        )
        for kind, same in kinds.items()
    ]


def _casts(
    name: str, phase: str, lowered: Lowered, weights: set[tuple[int, ...]]
) -> Iterator[tuple[str, CastSum]]:
    """Every cast of a graph with its module's path."""
    alone = _kernel_bytes(lowered)
    for node in calls(lowered.after):
        if (values := conversion(node)) is not None:
            before, after = (value.dtype for value in values)
            yield (
                _module(node),
                CastSum(
                    name=name,
                    phase=phase,
                    what=_what(node, phase, weights),
                    before=before,
                    after=after,
                    casts=1,
                    bytes=cast_bytes(values[0], after),
                    kernels=int(node in alone),
                    kernel_bytes=alone.get(node, 0),
                ),
            )


def _kernel_bytes(lowered: Lowered) -> dict[fx.Node, int]:
    """What each cast that is a kernel moves; several in one kernel share what it moves."""
    found: dict[fx.Node, int] = {}
    for casts, size in cast_kernels(lowered):
        for place, node in enumerate(sorted(casts, key=lambda node: node.name)):
            found[node] = size * (place + 1) // len(casts) - size * place // len(casts)
    return found


def _what(node: fx.Node, phase: str, weights: set[tuple[int, ...]]) -> str:
    """What is cast, by where it comes from and where it goes, through views and copies."""
    source = node.all_input_nodes[0]
    while is_move(source):
        source = source.all_input_nodes[0]
    shape = tuple(source.meta["val"].shape) if isinstance(source.meta.get("val"), torch.Tensor) else ()
    if source.op == "placeholder" and not source.name.startswith("tangents") and shape in weights:
        return "weight"
    if phase == "forward":
        return "activation"
    reader = node
    while len(reader.users) == 1 and is_move(next(iter(reader.users))):
        reader = next(iter(reader.users))
    leaves = any(user.op == "output" for user in reader.users)
    is_weight = leaves and tuple(reader.meta["val"].shape) in weights
    return "weight gradient" if is_weight else "gradient"


def _module(node: fx.Node) -> str:
    """The module of a cast: of a graph input, its reader's; else its own, or that of a neighbour."""
    users, inputs = tuple(node.users), tuple(node.all_input_nodes)
    while is_move(inputs[0]):
        inputs = tuple(inputs[0].all_input_nodes)
    readers = [next(iter(user.users), user) if is_move(user) else user for user in users]
    neighbours = (*readers, node) if inputs[0].op == "placeholder" else (node, *readers, *inputs)
    return next((path for path in map(module_path, neighbours) if path), "")
