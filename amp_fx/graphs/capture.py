"""Capture: a Dynamo graph becomes pre-dispatch ATen, the IR that torch.export and the op lists speak.

The Dynamo graph is interpreted once on its own fake tensors under ``make_fx(pre_dispatch=True)``. User
autocast is left on while tracing: pre-dispatch recording happens above autocast, so the graph has no casts
that the user did not write, while ``meta["val"]`` carries the dtypes of the eager program. These *traced
dtypes* are the contract: outputs, aliases and mutations of the rewritten graph have exactly them.

What make_fx cannot take is kept as it stands: higher-order ops (their bodies are captured by recursion), functorch
regions (vmap, grad), whose nodes are copied unchanged, and ``torch.autograd.grad``: AOTAutograd traces its backward
later, from the graph as it then is.

Pre-dispatch tracing records a composite op as one node. A recurrent cell or layer that autocast does not list on a
device is recorded as its parts instead, because autocast lists the linears inside, and rounds what they read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.traceback import preserve_node_meta

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    copy_of,
    enable_autocast,
    functorch_levels_closed,
    ignore_fresh_symbols,
    is_functorch_wrapped,
    is_hooks_switch,
    make_fx,
    take_over,
)
from amp_fx.errors import CaptureError
from amp_fx.graphs.calls import (
    argument_value,
    changes_shape,
    convolution_settings,
    grad_modes,
    output_nodes,
    target_name,
)
from amp_fx.graphs.capturing import (
    INLINED,
    OPAQUE_BODIES,
    CapturingInterpreter,
    fake_mode_of,
    reads_example,
    stand_in,
)
from amp_fx.graphs.keys import TRACED_META
from amp_fx.graphs.regions import Regions, enclose, node_regions, of_user
from amp_fx.graphs.values import dtypes_and_sizes, tensors
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.table import lookup

logger = logging.getLogger(__name__)

aten = torch.ops.aten


def _parts(op: OpOverload) -> Callable[..., Any]:
    """A rule of ``make_fx``'s ``decomposition_table`` for an op that the lists of some devices have as low."""

    def decompose(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        row = lookup(op, x.device.type)
        is_low = row is None or row.op_class is OpClass.LOW
        return NotImplemented if is_low else op.decompose(x, *args, **kwargs)

    return decompose


_COMPOSITES = {op: _parts(op) for op in (aten.lstm_cell.default, aten.gru_cell.default, aten.gru.input)}


def capture(gm: fx.GraphModule, ambient: Regions) -> fx.GraphModule:
    """A Dynamo graph as pre-dispatch ATen, given the autocast state at graph entry; ``gm`` is not changed.

    Placeholders keep their metadata. Every node has ``meta["val"]`` (fake, traced dtypes), ``meta[REGION_META]``,
    ``nn_module_stack`` and ``stack_trace``; so have bodies of higher-order ops, which are child GraphModules.
    CaptureError, with cause and source line, for a graph that cannot be traced.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if any("example_value" not in node.meta for node in placeholders):
        raise CaptureError("a graph input has no fake value; was the graph made by Dynamo?")
    values = [value for node in gm.graph.nodes for value in tensors(node.meta.get("example_value"))]
    if any(value.is_nested for value in values):
        raise CaptureError("the graph has nested tensors, and no casts are placed on ragged sizes")
    # Dynamo's; a graph may make all its tensors itself
    fake_mode = next((mode for value in values if (mode := fake_mode_of(value)) is not None), None)
    if fake_mode is None:
        raise CaptureError("the graph has no tensor to take a fake tensor mode from")
    traced = _trace(gm, placeholders, ambient, fake_mode)
    _inline_constants(traced, fake_mode)
    pad_by_numbers(traced.graph)
    for node, original in zip(traced.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        # names and metadata of Dynamo's, which AOTAutograd reads
        node.meta, node.target = {**original.meta, **node.meta}, original.target
        node._rename(original.name)
    traced.recompile()
    traced.graph.output_node().meta[TRACED_META] = [dtypes_and_sizes(node) for node in output_nodes(traced)]
    take_over(traced, gm)
    logger.debug("captured %d Dynamo nodes as %d ATen nodes", len(gm.graph.nodes), len(traced.graph.nodes))
    return traced


def _trace(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], ambient: Regions, mode: FakeTensorMode
) -> fx.GraphModule:
    """The graph as make_fx sees it, bodies included."""
    interpreter = CapturingInterpreter(gm, node_regions(gm.graph.nodes, ambient), _capture_bodies)
    try:
        with mode, ignore_fresh_symbols(mode), preserve_node_meta(), contextlib.ExitStack() as states:
            for device_type, region in ambient.items():
                states.enter_context(enable_autocast(device_type, region.by_user, region.dtype))
            _lay_as_made(gm, inputs)
            traced = make_fx(
                interpreter.run,
                decomposition_table=_COMPOSITES,
                pre_dispatch=True,
                _allow_non_fake_inputs=True,
            )
            return traced(*(stand_in(node.meta["example_value"]) for node in inputs))
    except CaptureError:
        raise
    except Exception as error:
        # make_fx runs the user's program: whatever it raises is a fact about this graph
        raise CaptureError(
            f"cannot trace {interpreter.where} to pre-dispatch ATen: {type(error).__name__}: {error}"
        ) from error


class _Laid(fx.Interpreter):
    """Runs a Dynamo graph on its fake tensors, and notes how values of ``changed`` lie where they are made."""

    def __init__(self, gm: fx.GraphModule, changed: Mapping[int, torch.Tensor]) -> None:
        super().__init__(gm)
        self._changed = changed
        self.found: dict[int, tuple[Any, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        # amp_fx compiles with hooks of its own, with which such a switch fails
        result = None if is_hooks_switch(n.target) else super().run_node(n)
        if reads_example(n):
            for value, made in zip(tensors(n.meta.get("example_value")), tensors(result), strict=False):
                if id(value) in self._changed:
                    layout = made.shape, made.stride(), made.storage_offset()
                    self.found.setdefault(id(value), layout)
        return result


def _lay_as_made(gm: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
    """Lays what capture reads of Dynamo as it was made, where the program changes its shape later.

    Case: ``y = vmap(f)(x); z = b + y; y.unsqueeze_(0)``. Dynamo has one fake tensor for ``y``, in its last shape.
    """
    changed = {
        id(value): value
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method") and changes_shape(target_name(node))
        for value in tensors(node.all_input_nodes[0].meta.get("example_value"))
        if not is_functorch_wrapped(value)
    }
    read = [node.meta.get("example_value") for node in gm.graph.nodes if changed and reads_example(node)]
    if not any(id(value) in changed for value in tensors(read)):
        return
    laid = _Laid(gm, changed)
    with functorch_levels_closed():
        laid.run(*(node.meta["example_value"] for node in inputs))
    with torch.no_grad():
        for key, layout in laid.found.items():
            changed[key].as_strided_(*layout)


def _capture_bodies(gm: fx.GraphModule, regions: Mapping[fx.Node, Regions]) -> dict[str, fx.GraphModule]:
    """Captures the bodies of higher-order ops, each under the autocast state and the grad mode of its call.

    A body that stays switches the user's autocast on itself: the backward of a function is traced later.
    """
    bodies: dict[str, fx.GraphModule] = {}
    modes = grad_modes(gm.graph)
    for node in gm.graph.nodes:
        is_kept = isinstance(node.target, HigherOrderOperator)
        if not is_kept or node.target.name() == INLINED:
            continue
        for name in (str(given.target) for given in node.all_input_nodes if given.op == "get_attr"):
            body = getattr(gm, name, None)
            if not isinstance(body, fx.GraphModule) or name in bodies:
                continue
            if node.target.name() in OPAQUE_BODIES:
                if state := of_user(regions[node]):
                    bodies[name] = copy_of(body)
                    enclose(bodies[name].graph, state)
                    bodies[name].recompile()
            else:
                # without gradients a body may write to a parameter
                with torch.set_grad_enabled(torch.is_grad_enabled() and modes[node]):
                    bodies[name] = capture(body, regions[node])
    return bodies


def _inline_constants(traced: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Makes tensors that make_fx kept as attributes again what they were: literals of the program.

    ``ids[..., 0] = 5`` leaves ``_tensor_constant0`` behind, which AOTAutograd would look up among Dynamo's
    parameters and not find. CaptureError for a parameter that Dynamo did not make an input.
    """
    for node in list(traced.graph.find_nodes(op="get_attr")):
        value = getattr(traced, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, (FakeTensor, torch.nn.Parameter)):
            raise CaptureError(
                f"{node.target} is a tensor attribute of the graph, neither an input nor a literal"
            )
        with traced.graph.inserting_before(node):
            if value.ndim == 0:
                call: tuple[Any, Any] = aten.full.default, ([], value.item())
            else:
                call = torch.tensor, (value.tolist(),)
            literal = traced.graph.call_function(*call, {"dtype": value.dtype, "device": value.device})
        literal.meta = {**next(iter(node.users)).meta, **node.meta, "val": fake_mode.from_tensor(value)}
        node.replace_all_uses_with(literal)
        traced.graph.erase_node(node)
        delattr(traced, str(node.target))


_BY_WORD = {(op := getattr(torch.ops.aten, f"conv{dims}d")).padding: op.default for dims in (1, 2, 3)}


def pad_by_numbers(graph: fx.Graph) -> None:
    """Convolutions whose padding is a word get numbers, as oneDNN packs those; not where one side has more of it."""
    for node in (node for node in graph.nodes if node.target in _BY_WORD):
        given, tensors = (
            convolution_settings(node),
            [argument_value(node, name) for name in ("input", "weight", "bias")],
        )
        steps = zip(given["dilation"], tensors[1].meta["val"].shape[2:], given["padding"], strict=True)
        wide = [by * (size - 1) * (word == "same") for by, size, word in steps]
        if not any(each % 2 for each in wide):
            settings = given["stride"], [each // 2 for each in wide], given["dilation"], given["groups"]
            node.target, node.args, node.kwargs = _BY_WORD[node.target], (*tensors, *settings), {}
