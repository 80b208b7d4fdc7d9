"""How a graph goes to Inductor: as Dynamo made it, with its casts, with copies of weights, or frozen.

With it go the passes on Inductor's graphs, and loss scaling.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    autocast_shield,
    compile_with_inductor,
    convert_op,
    copy_of,
    fuse_quantised,
    graph_pass,
    multiplies_int8,
    raised_by_backend,
    source_hash,
    traced_anew,
    tunes_kernels,
)
from amp_fx.compiler.keeping import keeping_hook, told_of_hooks
from amp_fx.compiler.settings import Options
from amp_fx.errors import PassError
from amp_fx.graphs.calls import add_input, convolves, dotted_path
from amp_fx.graphs.fallback import is_for_the_caller, reason_of, warn_fallback
from amp_fx.graphs.inputs import differentiates
from amp_fx.graphs.keys import ATTENTION_MARK, LEVEL, RESULT_MARK
from amp_fx.graphs.regions import Region, is_autocast_call, takes_own_gradients
from amp_fx.graphs.values import graph_devices, raises, writes_to_shared_inputs
from amp_fx.passes import (
    PARTITIONED,
    Notes,
    Pass,
    PassContext,
    PlaceLevels,
    ReadScales,
    ScaleBackward,
    joint_passes,
    run_in_order,
)
from amp_fx.passes.base import mark_where
from amp_fx.passes.forward.choose_attention import keep_whole
from amp_fx.precision.placement.attention import SCORES_AT_ONCE
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.reading import is_heard
from amp_fx.precision.policy.levels import Level, is_narrow
from amp_fx.runtime.scaling import find_scaler
from amp_fx.runtime.state import cache_results
from amp_fx.runtime.weights.calling import WeightsGraph, with_weights
from amp_fx.runtime.weights.lift import kept_copies
from amp_fx.runtime.weights.mode import Facts, Mode, weights_mode
from amp_fx.runtime.weights.products import write_out_int8
from amp_fx.runtime.widened import widenings

logger = logging.getLogger(__name__)

#: rooms whose sources are in the keys of the compile caches: all that passes on Inductor's graphs import from
KEYED_ROOMS = ("_torch", "graphs", "passes", "precision")


class Watch(Protocol):
    """Observes what one rewritten graph computes."""

    def add(self, invocation: Invocation, rewritten: fx.GraphModule, plan: Plan) -> Sequence[torch.Tensor]:
        """Adds inputs and results to the rewritten graph; returns example values of the inputs."""
        ...

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function, with the signature of the program's own graph."""
        ...


@dataclass(eq=False)
class Invocation:
    """The arguments of one call of the backend, and all that follows from them.

    Attributes:
        ambient: autocast at entry per device type.
        why_cast: why weights are cast in each call, where ``opts`` says that they are.
        notes: what passes on Inductor's joint graph have noted.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    ambient: Mapping[str, Region]
    opts: Options
    watch: Watch | None = None
    why_cast: str = "weights='cast'"
    notes: Notes = field(default_factory=dict)

    def __post_init__(self) -> None:
        # the graph will be differentiated; fake values do not say whether they require a gradient
        self.training = differentiates(self.example_inputs)
        regions = self.ambient.values()
        # under the user's own autocast in fp16 the user owns the scaling, too
        self.is_scaled_by_user = not any(r.dtype is torch.float16 and not r.by_user for r in regions)
        # what takes its gradients itself has no backward
        is_scaled = self.training and not self.is_scaled_by_user and not takes_own_gradients(self.gm)
        self.scaler = self.opts.scaler if is_scaled else None
        # where the user's own autocast is on somewhere, the graph as Dynamo made it would return other dtypes
        self.in_autocast = any(r.by_user for r in regions) or any(map(is_autocast_call, self.gm.graph.nodes))


def is_raised(opts: Options, error: Exception) -> bool:
    """True for errors after which nothing else is tried."""
    # a plan that cannot be followed is the user's to know: what fell back when it was made, still does
    is_of_plan = opts.plan is not None and isinstance(raised_by_backend(error), PassError)
    return opts.strict or is_of_plan or is_for_the_caller(error)


def compile_rewritten(
    invocation: Invocation, rewritten: fx.GraphModule, plan: Plan, place: PlaceLevels | None
) -> Callable[..., Any]:
    """Compiles what the passes have made of a graph; ``place`` chooses what runs below 16 bits, if anything may."""
    if invocation.watch is not None:
        more = invocation.watch.add(invocation, rewritten, plan)
        inputs = [*invocation.example_inputs, *more]
        observed = replace(invocation, gm=rewritten, example_inputs=inputs, watch=None)
        return invocation.watch.bind(compile_rewritten(observed, rewritten, plan, place))
    in_int8 = any(level.dtype is torch.int8 for level in _levels(rewritten))
    if in_int8 and graph_devices(invocation.gm) == {"cpu"} and not multiplies_int8():
        write_out_int8(rewritten.graph)
    mode = _mode(invocation, rewritten)
    kept = None if mode.name == "cast" else _with_weights(invocation, rewritten, mode)
    # nothing is said where nothing is made of weights
    plan.weights = "" if kept is None and mode.name != "cast" else str(mode)
    if kept is not None:
        return _WithPrepared(kept, invocation.opts)
    if place is None and not plan.changed and not invocation.in_autocast:
        logger.debug("nothing to cast: the graph is compiled as Dynamo made it")
        rewritten = invocation.gm
    return lower(
        rewritten, invocation.example_inputs, invocation.opts, invocation.scaler, place, invocation.notes
    )


def _levels(rewritten: fx.GraphModule) -> list[Level]:
    """The levels of all calls that run below 16 bits."""
    return [node.meta[LEVEL][0] for node in rewritten.graph.nodes if node.meta.get(LEVEL)]


def _mode(invocation: Invocation, rewritten: fx.GraphModule) -> Mode:
    """The lifetime of the graph's weights."""
    opts, graph = invocation.opts, rewritten.graph
    if opts.weights == "cast":
        return Mode("cast", invocation.why_cast)
    kept = kept_copies(graph)
    facts = Facts(
        on_cpu=graph_devices(invocation.gm) == {"cpu"},
        writes_to_shared=torch.__version__ < "2.13" and writes_to_shared_inputs(graph),
        in_eager_numerics=opts.numerics == "eager",
        has_fp8=any(is_narrow(node.meta["val"]) for node in (*graph.find_nodes(op="placeholder"), *kept)),
        gains=any((_levels(rewritten), kept, widenings(invocation.gm), *map(convolves, graph.nodes))),
        tunes_kernels=tunes_kernels(opts.inductor),
    )
    return weights_mode(opts.weights, facts, strict=opts.strict)


def _with_weights(invocation: Invocation, rewritten: fx.GraphModule, mode: Mode) -> WeightsGraph | None:
    """Compiles a graph to be called with values made of its weights; None for a graph that needs no such values."""
    changes: dict[str, Any] = {}
    if mode.name == "code":
        # a constant that is part of the code could not change
        changes = {"freezing": True, "always_keep_tensor_constants": mode.may_change}
    elif mode.name == "packed":
        # what is packed has no strides
        changes = {"size_asserts": False}
    own = replace(invocation.opts, inductor={**invocation.opts.inductor, **changes})
    return with_weights(rewritten, invocation.example_inputs, lambda g, inputs: lower(g, inputs, own), mode)


class _WithPrepared:
    """A compiled graph with what is made of its weights; if keeping that fails, it is made in each call."""

    def __init__(self, graph: WeightsGraph, opts: Options) -> None:
        self._graph, self._opts = graph, opts
        self._gave_up = False

    def __call__(self, *args: Any) -> Any:
        if self._gave_up:
            return self._graph.run(args, self._graph.once(args))
        try:
            prepared = self._graph.prepared(args)
        except Exception as error:
            if is_raised(self._opts, error):
                raise
            logger.info("what is kept of weights fails", exc_info=True)
            prepared, reason = self._graph.once(args), reason_of(error)
            self._gave_up = True
            warn_fallback("makes what a graph needs of its weights in each call", reason)
        return self._graph.run(args, prepared)


@dataclass(frozen=True, eq=False)
class ScaledGraph:
    """A graph that scales its own gradients has the scale as one more input, see :class:`ScaleBackward`.

    No constant, so that it may change at every step without another compile; and the graph knows its scaler by name
    only, so that caches hit.
    """

    scaler: str  # its name
    inputs: int  # number of the program's inputs; the scale comes after them
    leaves: tuple[int, ...]  # positions of the parameters among them
    source: int  # position of an input that gradients are taken by
    names: tuple[str, ...]  # of the parameters, "encoder.0.weight"
    device: torch.device  # where the scale is needed

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], scaler: str) -> ScaledGraph:
        """The facts about a graph that Dynamo made, with the inputs that it came with."""
        placeholders, inputs = gm.graph.find_nodes(op="placeholder"), list(enumerate(example_inputs))
        differentiated = [at for at, x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        # Dynamo guards on the type: what is a parameter now is one in every call, and a leaf
        leaves = [at for at in differentiated if isinstance(example_inputs[at], nn.Parameter)]
        source = (leaves or differentiated)[0]
        names = tuple(_parameter_name(placeholders[at]) for at in leaves)
        device = example_inputs[source].device
        return cls(scaler, len(placeholders), tuple(leaves), source, names, device)

    def extend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
        """A copy of the graph with the scale as its last input, and values for all of its inputs."""
        extended = copy_of(gm)
        inputs = extended.graph.find_nodes(op="placeholder")
        examples = (node.meta.get("example_value", node.meta.get("val")) for node in inputs)
        scale = self._fake_scale(next(value.fake_mode for value in examples if isinstance(value, FakeTensor)))
        add_input(inputs[-1], "amp_fx_scale", scale)
        extended.recompile()
        return extended, [*example_inputs, scale]

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph with the program's own signature; a call raises ScalerError if no scaler has the name."""

        def run(*args: Any) -> Any:
            if isinstance(source := args[self.source], FakeTensor):
                # DDPOptimizer asks for the dtypes of what a graph returns
                return compiled(*args, self._fake_scale(source.fake_mode))
            leaves = [args[position] for position in self.leaves]
            return compiled(*args, find_scaler(self.scaler).enter_graph(self.names, leaves, self.device))

        return run

    def _fake_scale(self, mode: FakeTensorMode) -> torch.Tensor:
        with mode:
            return torch.empty((), dtype=torch.float32, device=self.device)


def _parameter_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    return node.name if source is None else dotted_path(str(source.name)) or node.name


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    opts: Options,
    scaler: str | None = None,
    place: PlaceLevels | None = None,
    notes: Notes | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with Inductor, rewritten or as Dynamo made it; what passes note is added to ``notes``."""
    scaled = None if scaler is None else ScaledGraph.of(gm, example_inputs, scaler)
    wide_results = mark_where(gm, RESULT_MARK, lambda label: label.result_dtype)
    attention = mark_where(gm, ATTENTION_MARK, lambda label: label.computed_by)
    if differentiates(example_inputs):
        keep_whole(gm, dict(attention))
    if scaled is not None:
        gm, example_inputs = scaled.extend(gm, example_inputs)
    devices = graph_devices(gm)
    joint = joint_passes(
        devices,
        opts.numerics,
        scale=None if scaled is None else ScaleBackward(scaled.inputs),
        levels=place,
        wide_results=tuple(name for name, _ in wide_results),
        attention=attention,
        scores_at_once=SCORES_AT_ONCE * torch.get_num_threads(),
    )
    own = hook("joint", joint, opts.inductor, notes, opts.disable_passes)
    own |= keeping_hook(_sources(), example_inputs, opts, notes)
    own |= hook("post_grad", PARTITIONED, opts.inductor, notes, opts.disable_passes)
    # calls from Python take up to a seventh of a small model's time, in training less; apart, C++ compiles as fast
    # A call from C++ makes a RuntimeError of whatever an op raises, with other words. Small models with such an op
    # would gain up to a tenth by it, less where the op itself takes its time
    graphs = [each for each in gm.modules() if isinstance(each, fx.GraphModule)]
    in_python = any(raises(node) for each in graphs for node in each.graph.nodes)
    in_cpp = devices == {"cpu"} and not torch.is_grad_enabled() and not in_python
    inductor = dict(opts.inductor)
    if in_cpp and "cpp_wrapper" not in inductor:
        calls = dict.fromkeys(("cpp_wrapper", "cpp_wrapper_build_separate"), True)
        # a CPU has no CUDA graphs, and torch warns where it cannot have both
        inductor = {**calls, **inductor, "triton.cudagraphs": False}
    if "cpu" in devices:
        # what the caches hand out may call it
        convert_op()
    # caches do not tell a listener what the passes chose, and which of torch's faults are met
    with autocast_shield(), traced_anew() if is_heard() else contextlib.nullcontext({}) as anew:
        compiled = compile_with_inductor(gm, example_inputs, {**inductor, **own, **anew})
    compiled = told_of_hooks(compiled, opts)
    return compiled if scaled is None else scaled.bind(compiled)


def lower_as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options) -> Callable[..., Any]:
    """Compiles a graph with Inductor, and runs none of amp_fx's passes on it."""
    # a pass that does nothing: kernels that stock torch.compile has left in a cache do not wait for their threads
    alone = graph_pass("post_grad", _sources(), lambda _: None, opts.inductor)
    with autocast_shield():
        return compile_with_inductor(gm, example_inputs, {**opts.inductor, **alone})


def hook(
    stage: Literal["joint", "post_grad"],
    passes: tuple[Pass, ...],
    inductor: Mapping[str, Any],
    notes: Notes | None = None,
    disabled: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The Inductor option that runs the passes on its joint graphs, or on what becomes of them.

    ``inductor`` are the program's options, ``disabled`` are names of passes; what passes note is added to ``notes``.
    """
    context = PassContext(disabled=disabled)
    # what they depend on: their source, their options, and the one setting of torch that is in no key by itself
    uuid = f"{_sources()} {passes} {sorted(disabled)} mkldnn={torch.backends.mkldnn.enabled}"

    def run(gm: fx.GraphModule) -> None:
        run_in_order(gm, passes, context, notes)
        if stage == "post_grad" and fuse_quantised(gm.graph):
            run_in_order(gm, (ReadScales(),), context)

    return graph_pass(stage, uuid, run, inductor)


@cache_results()
def _sources() -> str:
    """A hash of the rooms that passes are made of, constants included."""
    return source_hash(*(path for room in KEYED_ROOMS for path in sys.modules[f"amp_fx.{room}"].__path__))
