"""How a graph goes to Inductor: as Dynamo made it, with its casts, with copies of weights, or frozen.

With it go the passes on Inductor's graphs, and loss scaling.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
import torch.fx as fx

from amp_fx._torch import (
    autocast_shield,
    compile_with_inductor,
    fuse_quantised,
    graph_pass,
    raised_by_backend,
    source_hash,
    traced_anew,
    tunes_kernels,
)
from amp_fx.errors import PassError
from amp_fx.graphs.fallback import is_for_the_caller, reason_of, warn_fallback
from amp_fx.graphs.keys import LEVEL, PRODUCTS_MARK, RESULT_MARK
from amp_fx.graphs.regions import Region, is_autocast_call, takes_own_gradients
from amp_fx.graphs.values import graph_devices
from amp_fx.passes import (
    FUSED,
    PARTITIONED,
    Pass,
    PlaceLevels,
    joint_passes,
    run_keyed,
)
from amp_fx.passes.base import mark_because
from amp_fx.placement.layout import convert_op
from amp_fx.plans.label import Kind
from amp_fx.plans.plan import Plan
from amp_fx.plans.reading import is_heard
from amp_fx.policy.levels import is_narrow
from amp_fx.scaling.scaled_graph import ScaledGraph
from amp_fx.settings import Options
from amp_fx.state import cache_results
from amp_fx.weights.graphs import WeightsGraph, cached, copied_weights, freeze, packed
from amp_fx.widened import widenings

__all__ = ["KEYED_ROOMS", "Call", "Watch", "compile_rewritten", "is_raised", "lower", "lower_as_it_is"]

logger = logging.getLogger(__name__)

#: rooms whose sources are in the keys of the compile caches: all that passes on Inductor's graphs import from
KEYED_ROOMS = ("_torch", "graphs", "passes", "placement", "plans", "policy")


class Watch(Protocol):
    """Observes what one rewritten graph computes."""

    def add(self, call: Call, rewritten: fx.GraphModule, plan: Plan) -> Sequence[torch.Tensor]:
        """Adds inputs and results to the rewritten graph; returns example values of the inputs."""
        ...

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What was compiled of that, with the signature of the program's own graph."""
        ...


class Call:
    """What the backend was called with, and what follows from it; ``ambient``: autocast at entry per device type."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        ambient: Mapping[str, Region],
        opts: Options,
        watch: Watch | None = None,
    ) -> None:
        self.gm, self.example_inputs, self.ambient, self.opts = gm, example_inputs, ambient, opts
        self.watch = watch
        # the graph will be differentiated; fake values do not say whether they require a gradient
        self.training = torch.is_grad_enabled() and any(
            value.requires_grad for value in example_inputs if isinstance(value, torch.Tensor)
        )
        regions = ambient.values()
        # under the user's own autocast in fp16 the user owns the scaling, too
        self.is_scaled_by_user = not any(r.dtype is torch.float16 and not r.by_user for r in regions)
        # what takes its gradients itself has no backward
        is_scaled = self.training and not self.is_scaled_by_user and not takes_own_gradients(gm)
        self.scaler = opts.scaler if is_scaled else None
        # where the user's own autocast is on somewhere, the graph as Dynamo made it would return other dtypes
        self.in_autocast = any(r.by_user for r in regions) or any(map(is_autocast_call, gm.graph.nodes))


def is_raised(opts: Options, error: Exception) -> bool:
    """True for errors after which nothing else is tried."""
    # a plan that cannot be followed is the user's to know: what fell back when it was made, still does
    is_of_plan = opts.plan is not None and isinstance(raised_by_backend(error), PassError)
    return opts.strict or is_of_plan or is_for_the_caller(error)


def compile_rewritten(
    call: Call, rewritten: fx.GraphModule, plan: Plan, place: PlaceLevels | None
) -> Callable[..., Any]:
    """Compiles what the passes have made of a graph; ``place`` chooses what runs below 16 bits, if anything may."""
    if call.watch is not None:
        more = call.watch.add(call, rewritten, plan)
        observed = Call(rewritten, [*call.example_inputs, *more], call.ambient, call.opts)
        return call.watch.bind(compile_rewritten(observed, rewritten, plan, place))
    kept = _with_kept_weights(call, rewritten)
    if kept is not None:
        return _WithDerived(kept, call.opts)
    if place is None and not plan.changed and not call.in_autocast:
        logger.debug("nothing to cast: the graph is compiled as Dynamo made it")
        return lower(call.gm, call.example_inputs, call.opts, call.scaler)
    return lower(rewritten, call.example_inputs, call.opts, call.scaler, place)


def _with_kept_weights(call: Call, rewritten: fx.GraphModule) -> WeightsGraph | None:
    """Compiles a graph that is called with what is derived from its weights; None for one that has none of that."""
    opts, is_frozen = call.opts, call.opts.weights == "freeze"
    if torch.is_grad_enabled():
        return None
    low = copied_weights(rewritten)
    # there is nothing to pack where weights are inputs in fp8: oneDNN has no fp8
    has_narrow = any(is_narrow(node.meta["val"]) for node in rewritten.graph.find_nodes(op="placeholder"))
    # folding BatchNorm does not round where eager autocast rounds
    packs = graph_devices(call.gm) == {"cpu"} and opts.numerics != "eager" and not has_narrow
    # by default only what takes the place of a low copy, or of a weight that is stored low
    below = any(LEVEL.of(node) for node in rewritten.graph.nodes)
    packs &= opts.weights == "cache" or (opts.weights == "auto" and bool(below or low or widenings(call.gm)))
    changes = {"may_change": not is_frozen or not opts.strict, "wide": opts.weights != "auto"}
    is_code = tunes_kernels(opts.inductor) or graph_devices(call.gm) != {"cpu"}
    if (is_frozen or packs) and is_code:
        # a constant that is part of the code could not change
        inductor = {**opts.inductor, "freezing": True, "always_keep_tensor_constants": changes["may_change"]}
        frozen = replace(opts, inductor=inductor)
        return freeze(rewritten, call.example_inputs, lambda g, inputs: lower(g, inputs, frozen), **changes)
    if is_frozen or packs:
        # what is packed has no strides
        unasserted = replace(opts, inductor={**opts.inductor, "size_asserts": False})
        return packed(
            rewritten, call.example_inputs, lambda g, inputs: lower(g, inputs, unasserted), **changes
        )
    if low:
        return cached(rewritten, call.example_inputs, lambda g, inputs: lower(g, inputs, opts))
    return None


class _WithDerived:
    """A compiled graph with what is derived from its weights; if that fails, it is derived for each call."""

    def __init__(self, graph: WeightsGraph, opts: Options) -> None:
        self._graph, self._opts = graph, opts
        self._gave_up = False

    def __call__(self, *args: Any) -> Any:
        if self._gave_up:
            return self._graph.run(args, self._graph.once(args))
        try:
            derived = self._graph.derived(args)
        except Exception as error:
            if is_raised(self._opts, error):
                raise
            logger.info("what is kept of weights fails", exc_info=True)
            derived, reason = self._graph.once(args), reason_of(error)
            self._gave_up = True
            warn_fallback("makes what a graph needs of its weights in each call", reason)
        return self._graph.run(args, derived)


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    opts: Options,
    scaler: str | None = None,
    place: PlaceLevels | None = None,
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo's, captured and rewritten or as it was, with Inductor.

    Args:
        gm: the graph.
        example_inputs: one per placeholder.
        opts: validated options.
        scaler: name of the scaler of the graph's backward.
        place: chooses what runs below 16 bits, and says afterwards what it chose.
    """
    scaled = None if scaler is None else ScaledGraph.of(gm, example_inputs, scaler)
    wide_results = mark_because(gm, Kind.WIDE_RESULT, RESULT_MARK)
    products = mark_because(gm, Kind.PRODUCTS, PRODUCTS_MARK)
    if scaled is not None:
        gm, example_inputs = scaled.extend(gm, example_inputs)
    devices = graph_devices(gm)
    scale = None if scaled is None else scaled.rewriting
    joint = joint_passes(
        devices,
        opts.numerics,
        scale=scale,
        levels=place,
        wide_results=wide_results,
        products=products,
        low_scores=opts.policy.base == "fast",
    )
    own = {**_hook("joint", joint, opts), **_hook("post_grad", PARTITIONED, opts)}
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


def _hook(stage: Literal["joint", "post_grad"], passes: tuple[Pass, ...], opts: Options) -> dict[str, Any]:
    """The Inductor option that runs the passes on its joint graphs, or on what becomes of them."""
    # what they depend on: their source, their options, and the one setting of torch that is in no key by itself
    uuid = f"{_sources()} {passes} mkldnn={torch.backends.mkldnn.enabled}"

    def run(gm: fx.GraphModule) -> None:
        run_keyed(gm, passes)
        if stage == "post_grad" and fuse_quantised(gm.graph):
            run_keyed(gm, FUSED)

    return graph_pass(stage, uuid, run, opts.inductor)


@cache_results()
def _sources() -> str:
    """A hash of the rooms that passes are made of, constants included."""
    return source_hash(*(path for room in KEYED_ROOMS for path in sys.modules[f"amp_fx.{room}"].__path__))
