"""Every graph of a call as Inductor would compile it: plans of the backward, which casts are kernels, what they cost.

The graphs of amp_fx and of torch.autocast are counted in the same way: what Inductor is given, and what is left of it
after fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import (
    Lowered,
    OpOverload,
    autocast_shield,
    compile_id,
    compile_with_inductor,
    is_convert,
    lower_with_inductor,
    op_name,
    size_hint,
)
from amp_fx.compiler.settings import Options
from amp_fx.graphs.calls import module_path, source_line, starred, target_name, values_read
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.fallback import under_autocast
from amp_fx.graphs.partition import kept_storages
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import cast_bytes, is_eligible, is_view, listed_devices, tensors
from amp_fx.instruments.reports.outside import OutsideFlops
from amp_fx.precision.plans.label import Label, Reason, ReasonKind
from amp_fx.precision.plans.plan import CastSum, Cost, ModuleCasts, Plan, dtype_name
from amp_fx.precision.plans.reading import cast_plan, conversion, input_plan, node_plan
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.levels import FORWARD, LEVELS, Level, is_narrow

#: what a kernel may do beside converting and still be a cast
_MOVES = Trait.MOVES, Trait.RESHAPES, Trait.UNCHANGED


def autocast_backend(
    options: Mapping[str, Any] | None, failed: dict[str, None] | None = None, *, fails: bool = False
) -> Callable[..., Callable[..., Any]]:
    """A backend for ``torch.compile`` to compare with: torch.autocast with the results that amp_fx has.

    Graphs on which autocast fails are in fp32, all of them if it is known that it ``fails``; their names are added to
    ``failed``.

    Autocast itself leaves some outputs in the low dtype, and stock ``torch.compile`` traces the backward under
    autocast, which rounds more than eager autocast does (pytorch#153044): both would move fewer bytes for other
    results. Here outputs have the dtypes of the program, and the backward is traced without autocast.
    """
    opts = Options.parse(None, options)

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        ambient = ambient_regions({device: opts.low_dtype(device) for device in listed_devices(gm)})
        lowered = gm if fails else under_autocast(gm, ambient)
        if lowered is gm and failed is not None:
            failed[compile_id()] = None
        with autocast_shield():
            return compile_with_inductor(lowered, example_inputs, {})

    return compile_graph


@dataclass(frozen=True)
class _Graph:
    """One graph with Dynamo's id."""

    name: str
    phase: str
    lowered: Lowered

    @property
    def kernels(self) -> set[fx.Node]:
        """The casts that are kernels of their own."""
        return {node for casts, _ in cast_kernels(self.lowered) for node in casts}


@dataclass
class LoweredGraphs:
    """Forward and backward graphs in the order of compilation, and what runs beside them; no code is generated."""

    graphs: list[_Graph] = field(default_factory=list)
    outside: OutsideFlops = field(default_factory=OutsideFlops)

    def inner_compile(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Stands in for Inductor's; see :func:`amp_fx._torch.replace_inner_compile`."""
        lowered = lower_with_inductor(gm, inputs, **options)
        phase = "backward" if options.get("is_backward") else "forward"
        self.graphs.append(_Graph(compile_id(), phase, lowered))
        return self.outside.leave_out(lowered.call)

    def complete(self, plans: list[Plan]) -> None:
        """Adds the plans of the backward graphs; says of casts, but in bodies, whether they are kernels."""
        backward = [_backward_plan(graph, plans) for graph in self.graphs if graph.phase == "backward"]
        for graph in self.graphs:
            # the plan has the names of what AOTAutograd traced
            names = {(node.meta.get("from_node") or [node])[-1].name for node in graph.kernels}
            for plan in plans:
                if (graph.name, graph.phase) == (plan.graph, plan.phase):
                    plan.casts = [replace(cast, kernel=cast.name in names) for cast in plan.casts]
        plans += backward

    @property
    def cost(self) -> Cost:
        """The cost of all graphs together."""
        kept = (views for _, forward, _ in self.steps for views in kept_storages(forward, returned=True))
        saved = sum(map(storage_bytes, kept))
        return replace(cost_of(graph.lowered for graph in self.graphs), saved=saved)

    @property
    def steps(self) -> list[tuple[str, fx.GraphModule, fx.GraphModule]]:
        """Dynamo's id, forward and backward of the graphs that have both, as Inductor is given them."""
        forward, backward = (
            {graph.name: graph.lowered.before for graph in self.graphs if graph.phase == phase}
            for phase in ("forward", "backward")
        )
        return [(name, forward[name], backward[name]) for name in forward if name in backward]


def storage_bytes(views: Sequence[fx.Node]) -> int:
    """Bytes of the storage that values share; symbolic sizes by their hint."""
    return size_hint(views[0].meta["val"].untyped_storage().nbytes())


def _backward_plan(graph: _Graph, forward: Sequence[Plan]) -> Plan:
    """The plan of the backward: nothing is decided there, it mirrors the forward."""
    origin = next((plan for plan in forward if plan.graph == graph.name), Plan(graph.name))
    low = next((node.low for node in origin.nodes if node.low is not None), None)
    levels = [level for node in origin.nodes for level in node.levels_below.values()]
    plan = Plan(graph.name, origin.policy, phase="backward")
    kernels = {node.name for node in graph.kernels}
    flops: dict[Any, int] = {}
    for node in graph.lowered.before.graph.nodes:
        # what AOTAutograd calls the forward's own inputs
        is_parameter = node.name.startswith("primals")
        if node.op == "placeholder" and (given := input_plan(node, "", is_parameter)) is not None:
            plan.inputs.append(given)
        elif node.op == "call_function" and conversion(node) is not None:
            plan.casts.append(cast_plan(node, inserted=True, kernel=node.name in kernels))
        elif node.op == "call_function":
            plan.nodes.append(node_plan(_backward_label(node, low, levels), node, flops))
    return plan


def _backward_label(node: fx.Node, low: torch.dtype | None, levels: Sequence[Level]) -> Label:
    """The label of a call of the backward, read off its arguments; no list has decided about it."""
    results = [value for value in tensors(node.meta.get("val")) if is_eligible(value)]
    values = [source.meta.get("val") for source in node.all_input_nodes]
    dtypes = {value.dtype for value in values if is_eligible(value)}
    dtype, level, op_class = results[0].dtype if results else None, None, OpClass.PROMOTE
    if is_matmul(node):
        narrow = {value.dtype for value in values if is_narrow(value)}
        level = next((level for level in (*levels, *LEVELS.values()) if level.dtype in narrow), None)
        if level is not None:
            # the others are scales
            dtypes = {level.dtype}
        elif len(dtypes) == 1:
            # a weight's gradient leaves a 16-bit matmul in fp32
            (dtype,) = dtypes
        op_class = OpClass.LOW if dtype is low else OpClass.FP32
    elif is_view(node) or is_move(node):
        op_class = OpClass.FOLLOW
    origin = origin_of(node)
    what = f"gradient of {origin}" if origin else "gradient"
    read = ", ".join(sorted(map(dtype_name, dtypes))) or "nothing floating"
    return Label(
        name=node.name,
        op=op_name(node.target) if isinstance(node.target, OpOverload) else target_name(node),
        module_path=module_path(node),
        op_class=OpClass.KEEP if dtype is None else op_class,
        reasons=(Reason.of(ReasonKind.GRADIENT, of=what, dtypes=read),),
        source=source_line(node),
        traced=dtype,
        low=low,
        dtype=dtype,
        levels={} if level is None else {FORWARD: level.name},
    )


def origin_of(node: fx.Node) -> str:
    """The function or class whose call a node of a backward is a gradient of, ``"layer_norm"``; empty: not known."""
    origin = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    return str(getattr(origin[-1][1], "__name__", origin[-1][1])) if origin else ""


# --- casts of lowered graphs ---


def is_move(node: fx.Node) -> bool:
    """True for calls whose result has the values of their only tensor in another order or shape."""
    return has_trait(node, *_MOVES) and len(values_read(node)) == 1


def cast_kernels(lowered: Lowered) -> list[tuple[frozenset[fx.Node], int]]:
    """Kernels that convert and move values and compute nothing: the conversions in each, and the bytes it moves."""
    generated = []
    for origins, size in lowered.generated:
        calls = [node for node in origins if node.op == "call_function"]
        casts = frozenset(node for node in calls if conversion(node) is not None)
        if casts and all(has_trait(node, Trait.CAST, *_MOVES) for node in calls):
            generated.append((casts, size))
    called = [
        (frozenset({node}), cast_bytes(before, after.dtype))
        for node, before, after in _conversions(lowered.after)
        if is_convert(node)
    ]
    return generated + called


def cost_of(graphs: Iterable[Lowered]) -> Cost:
    """The cost of the casts of some graphs."""
    graphs = list(graphs)
    rows = [row for graph in graphs for row in _conversions(graph.after)]
    casts = [cast_bytes(before, after.dtype) for _, before, after in rows]
    kernels = [size for graph in graphs for _, size in cast_kernels(graph)]
    moved = sum(graph.bytes_moved for graph in graphs)
    return Cost(len(casts), sum(casts), len(kernels), sum(kernels), moved)


def casts_by_module(graphs: Mapping[str, Sequence[_Graph]], plans: Sequence[Plan]) -> list[ModuleCasts]:
    """Casts by module, in the order of the program; ``graphs`` are those of ``"amp_fx"`` and ``"torch.autocast"``.

    The plans of the forward tell parameters from other inputs, which lowered graphs do not, and what a module computes
    in: lowered graphs say what is in a kernel's registers.
    """
    weights = {given.shape for plan in plans for given in plan.inputs if given.parameter}
    dtypes: dict[str, dict[str, str]] = {"torch.autocast": {}, "amp_fx": {}}
    for plan in plans:
        if plan.phase == "forward":
            dtypes["torch.autocast"] |= plan.autocast_dtypes
            dtypes["amp_fx"] |= plan.module_dtypes
    order = [path for found in dtypes.values() for path in found]
    # module -> kind of cast -> casts, bytes, kernels, and what these move
    sums: dict[str, dict[tuple[Any, ...], tuple[int, ...]]] = {}
    for name, found in graphs.items():
        for graph in found:
            for path, kind, counts in _casts(graph, weights):
                order.append(path)
                rows = sums.setdefault(starred(path), {})
                kind = name, graph.phase, *kind
                rows[kind] = tuple(map(add, rows.get(kind, (0, 0, 0, 0)), counts))
    paths: dict[str, list[str]] = {}
    for path in dict.fromkeys(order):
        paths.setdefault(starred(path), []).append(path)
    return [
        ModuleCasts(
            module=module,
            times=len(same),
            dtypes={name: found[path] for name, found in dtypes.items() for path in same if path in found},
            casts=[CastSum(*kind, *counts) for kind, counts in sums.get(module, {}).items()],
        )
        for module, same in paths.items()
    ]


def _casts(
    graph: _Graph, weights: set[tuple[int, ...]]
) -> Iterator[tuple[str, tuple[Any, ...], tuple[int, ...]]]:
    """Every cast of a graph: its module's path, what is cast from and to which dtype, and its counts."""
    moved: dict[fx.Node, int] = {}
    for nodes, size in cast_kernels(graph.lowered):
        # several casts in one kernel share what it moves
        for place, node in enumerate(sorted(nodes, key=lambda node: node.name)):
            moved[node] = size * (place + 1) // len(nodes) - size * place // len(nodes)
    for node, before, after in _conversions(graph.lowered.after):
        kind = _what(node, graph.phase, weights), before.dtype, after.dtype
        counts = 1, cast_bytes(before, after.dtype), int(node in moved), moved.get(node, 0)
        yield _module(node), kind, counts


def _what(node: fx.Node, phase: str, weights: set[tuple[int, ...]]) -> str:
    """The kind of value that is cast, by its origin and its readers, through views and copies."""
    source = behind_moves(node)
    is_input = source.op == "placeholder" and not source.name.startswith("tangents")
    if is_input and shape_of(source) in weights:
        return "weight"
    if phase == "forward":
        return "activation"
    reader = node
    while len(reader.users) == 1 and is_move(next(iter(reader.users))):
        reader = next(iter(reader.users))
    leaves = any(user.op == "output" for user in reader.users)
    return "weight gradient" if leaves and shape_of(reader) in weights else "gradient"


def behind_moves(cast: fx.Node) -> fx.Node:
    """The value that a cast reads, without views and copies."""
    source = cast.all_input_nodes[0]
    while is_move(source):
        source = source.all_input_nodes[0]
    return source


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a tensor, symbolic sizes by their hint; of anything else, that of a number."""
    value = node.meta.get("val")
    return tuple(map(size_hint, value.shape)) if isinstance(value, Tensor) else ()


def _module(node: fx.Node) -> str:
    """The module of a cast: of a graph input, its reader's; else its own, or that of a neighbour."""
    source = behind_moves(node)
    readers = [next(iter(user.users), user) if is_move(user) else user for user in node.users]
    neighbours = (*readers, node) if source.op == "placeholder" else (node, *readers, source)
    return next((path for path in map(module_path, neighbours) if path), "")


def _conversions(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Tensor, Tensor]]:
    """The conversions in a graph, bodies of higher-order ops included, with the values before and after."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and (values := conversion(node)) is not None:
                yield node, *values
