"""How a rewritten graph goes to Inductor: as Dynamo made it, with its casts, with copies of weights, or frozen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.fx as fx

from amp_fx._torch import raised_by_backend
from amp_fx.errors import PassError
from amp_fx.graphs.fallback import is_for_the_caller, reason_of, warn_fallback
from amp_fx.graphs.regions import Region, is_autocast_call, takes_own_gradients
from amp_fx.graphs.values import graph_devices
from amp_fx.lowering import lower
from amp_fx.passes import PlaceLevels
from amp_fx.plans.plan import Plan
from amp_fx.policy.levels import is_narrow
from amp_fx.settings import Options
from amp_fx.weights.freezing import freeze
from amp_fx.weights.inference import KeptWeights, cached, copied_weights
from amp_fx.widened import widenings

__all__ = ["Call", "Watch", "compile_rewritten", "is_raised"]

logger = logging.getLogger(__name__)


class Watch(Protocol):
    """Observes what one rewritten graph computes."""

    def add(self, call: Call, rewritten: fx.GraphModule, plan: Plan) -> Sequence[torch.Tensor]:
        """Adds inputs and results to the rewritten graph; returns example values of the inputs."""
        ...

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What was compiled of that, with the signature of the program's own graph."""
        ...


class Call:
    """What the backend was called with, and what follows from it.

    Attributes:
        ambient: autocast state at graph entry per device type.
        training: True if the graph will be differentiated.
        is_scaled_by_user: False if some gradient is in fp16 by amp_fx's doing: under the user's own autocast the user
            owns the scaling, too.
        scaler: name of the scaler of the graph's backward, or None. A graph that takes its gradients itself has no
            backward.
        in_autocast: True if the user's own autocast is on somewhere: as Dynamo made it, with autocast off, the graph
            would return other dtypes.
        watch: observes the rewritten graph, or is None.
    """

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
        # read off the real inputs: fake values do not say whether they require a gradient
        self.training = torch.is_grad_enabled() and any(
            value.requires_grad for value in example_inputs if isinstance(value, torch.Tensor)
        )
        regions = ambient.values()
        self.is_scaled_by_user = not any(r.dtype is torch.float16 and not r.by_user for r in regions)
        is_scaled = self.training and not self.is_scaled_by_user and not takes_own_gradients(gm)
        self.scaler = opts.scaler if is_scaled else None
        self.in_autocast = any(r.by_user for r in regions) or any(map(is_autocast_call, gm.graph.nodes))


def is_raised(opts: Options, error: Exception) -> bool:
    """True for errors after which nothing else is tried."""
    # a plan that cannot be followed is the user's to know: what fell back when it was made, still does
    is_of_plan = opts.plan is not None and isinstance(raised_by_backend(error), PassError)
    return opts.strict or is_of_plan or is_for_the_caller(error)


def compile_rewritten(
    call: Call, rewritten: fx.GraphModule, plan: Plan, place: PlaceLevels | None
) -> Callable[..., Any]:
    """Compiles what the passes have made of a graph.

    Args:
        call: what the backend was called with.
        rewritten: the graph, perhaps with inputs for low copies of weights.
        plan: says if anything was changed.
        place: the pass that chooses what runs below 16 bits, or None.
    """
    if call.watch is not None:
        more = call.watch.add(call, rewritten, plan)
        observed = Call(rewritten, [*call.example_inputs, *more], call.ambient, call.opts)
        return call.watch.bind(compile_rewritten(observed, rewritten, plan, place))
    if _is_frozen(call, rewritten):
        return _frozen(call, rewritten)
    if copied_weights(rewritten):
        return _copies(call, rewritten)
    if place is None and not plan.changed and not call.in_autocast:
        logger.debug("nothing to cast: the graph is compiled as Dynamo made it")
        return lower(call.gm, call.example_inputs, call.opts, call.scaler)
    return lower(rewritten, call.example_inputs, call.opts, call.scaler, place)


def _is_frozen(call: Call, rewritten: fx.GraphModule) -> bool:
    """True if weights become constants, which Inductor folds and packs."""
    opts = call.opts
    if torch.is_grad_enabled():
        return False
    # folding BatchNorm does not round where eager autocast rounds
    packs = graph_devices(call.gm) == {"cpu"} and opts.numerics != "eager" and not _has_narrow(rewritten)
    # by default only what takes the place of a low copy, or of a weight that is stored low
    low = copied_weights(rewritten) or widenings(call.gm)
    asked = opts.weights == "cache" or (opts.weights == "auto" and bool(low))
    return opts.weights == "freeze" or (packs and asked)


def _has_narrow(rewritten: fx.GraphModule) -> bool:
    """True if weights in fp8 are inputs: there is nothing to pack, as oneDNN has no fp8."""
    return any(is_narrow(node.meta["val"]) for node in rewritten.graph.find_nodes(op="placeholder"))


def _copies(call: Call, rewritten: fx.GraphModule) -> Callable[..., Any]:
    compiled = cached(rewritten, call.example_inputs, lambda graph, inputs: lower(graph, inputs, call.opts))
    return _WithKept(compiled, call.opts)


def _frozen(call: Call, rewritten: fx.GraphModule) -> Callable[..., Any]:
    opts = call.opts
    may_change = opts.weights != "freeze" or not opts.strict
    # a constant that is part of the code could not change
    inductor = {**opts.inductor, "freezing": True, "always_keep_tensor_constants": may_change}
    frozen = replace(opts, inductor=inductor)
    graph = freeze(
        rewritten,
        call.example_inputs,
        lambda g, inputs: lower(g, inputs, frozen),
        may_change=may_change,
        packs_wide=opts.weights != "auto",
    )
    return lower(rewritten, call.example_inputs, opts) if graph is None else _WithKept(graph, opts)


class _WithKept:
    """A graph with what is kept of its weights; if that fails, what it needs of them is made in each call.

    Args:
        graph: compiled.
        opts: if they are strict, what fails is raised.
    """

    def __init__(self, graph: KeptWeights, opts: Options) -> None:
        self._graph, self._opts = graph, opts
        self._gave_up = False

    def __call__(self, *args: Any) -> Any:
        if self._gave_up:
            return self._graph.run(args, self._graph.anew(args))
        try:
            made = self._graph.kept(args)
        except Exception as error:
            if is_raised(self._opts, error):
                raise
            logger.info("what is kept of weights fails", exc_info=True)
            made, reason = self._graph.anew(args), reason_of(error)
            self._gave_up = True
            warn_fallback("makes what a graph needs of its weights in each call", reason)
        return self._graph.run(args, made)
