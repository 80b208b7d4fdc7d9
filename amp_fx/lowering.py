"""Hands a rewritten graph to Inductor, with the passes that run on its graphs, and with loss scaling."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.fx as fx

from amp_fx._torch import (
    autocast_shield,
    compile_with_inductor,
    graph_pass,
    source_hash,
    traced_anew,
)
from amp_fx.graphs.values import graph_devices
from amp_fx.passes import (
    JOINT,
    PARTITIONED,
    Pass,
    PlaceLevels,
    joint_passes,
    partitioned_passes,
    run_keyed,
)
from amp_fx.passes.joint.wide_results import mark_results
from amp_fx.placement.layout import convert_op
from amp_fx.plans.reading import is_heard
from amp_fx.scaling.scaled_graph import ScaledGraph
from amp_fx.settings import Options
from amp_fx.state import cache_results

__all__ = ["KEYED_ROOMS", "lower", "lower_as_it_is"]

#: rooms whose sources are in the keys of the compile caches: all that passes on Inductor's graphs import from
KEYED_ROOMS = ("_torch", "graphs", "passes", "placement", "plans", "policy")


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    opts: Options,
    scaler: str | None = None,
    place: PlaceLevels | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with Inductor.

    Args:
        gm: a graph of Dynamo's, captured and rewritten or as it was.
        example_inputs: one per placeholder.
        opts: validated options.
        scaler: name of the :class:`amp_fx.GradScaler` of the graph's backward, or None.
        place: the pass that chooses what runs below 16 bits, or None. It says afterwards what it chose.

    Returns:
        A callable with the graph's signature.
    """
    scaled = None if scaler is None else ScaledGraph.of(gm, example_inputs, scaler)
    wide_results = mark_results(gm)
    if scaled is not None:
        gm, example_inputs = scaled.extend(gm, example_inputs)
    devices = graph_devices(gm)
    scale = None if scaled is None else scaled.rewriting
    joint = joint_passes(devices, opts.numerics, scale=scale, levels=place, wide_results=wide_results)
    own = {**_hook(JOINT, joint, opts), **_hook(PARTITIONED, partitioned_passes(devices), opts)}
    if "cpu" in devices:
        # what the caches hand out may call it
        convert_op()
    # the cache does not tell a listener what the pass chose
    anew = traced_anew() if place is not None and is_heard() else contextlib.nullcontext()
    with autocast_shield(), anew:
        compiled = compile_with_inductor(gm, example_inputs, {**opts.inductor, **own})
    return compiled if scaled is None else scaled.bind(compiled)


def lower_as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options) -> Callable[..., Any]:
    """Compiles a graph with Inductor, and runs none of amp_fx's passes on it."""
    with autocast_shield():
        return compile_with_inductor(gm, example_inputs, dict(opts.inductor))


def _hook(graph: str, passes: tuple[Pass, ...], opts: Options) -> dict[str, Any]:
    """The Inductor option that runs the passes on one of its graphs."""
    if not passes:
        return {}
    # what they depend on: their source, their options, and the one setting of torch that is in no key by itself
    uuid = f"{_sources()} {passes} mkldnn={torch.backends.mkldnn.enabled}"
    stage: Literal["joint", "post_grad"] = "joint" if graph == JOINT else "post_grad"
    return graph_pass(stage, uuid, lambda gm: run_keyed(gm, passes, graph), opts.inductor)


@cache_results()
def _sources() -> str:
    """A hash of the rooms that passes are made of, constants included."""
    return source_hash(*(path for room in KEYED_ROOMS for path in sys.modules[f"amp_fx.{room}"].__path__))
