"""Capture: a Dynamo graph becomes pre-dispatch ATen, the IR that torch.export and the op lists speak.

The Dynamo graph is interpreted once on its own fake tensors under ``make_fx(pre_dispatch=True)``. User
autocast is left on while tracing: pre-dispatch recording happens above autocast, so the graph has no casts
that the user did not write, while ``meta["val"]`` carries the dtypes of the eager program. These *traced
dtypes* are the
contract: outputs, aliases and mutations of the rewritten graph have exactly them.

What make_fx cannot take is kept as it stands: higher-order ops (their bodies are captured by recursion), functorch
regions (vmap, grad), whose nodes are copied unchanged, and ``torch.autograd.grad``: AOTAutograd traces its backward
later, from the graph as it then is.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves, tree_map

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    disable_proxy_modes_tracing,
    enable_autocast,
    get_proxy_mode,
    has_autocast_rule,
    ignore_fresh_symbols,
    is_functorch_wrapped,
    is_hooks_switch,
    let_go,
    make_fx,
    nesting_change,
    track_tensor_tree,
)
from amp_fx.errors import CaptureError
from amp_fx.graphs.calls import is_gradient_call, is_leaf_call, output_nodes
from amp_fx.graphs.composites import COMPOSITES
from amp_fx.graphs.distributed import changes_layout, fake_mode_of, stand_in
from amp_fx.graphs.regions import Region, is_autocast_call, node_regions
from amp_fx.graphs.source_lines import where
from amp_fx.graphs.values import tensors

__all__ = ["OPAQUE_BODIES", "OUTPUT_META", "REGION_META", "capture"]

logger = logging.getLogger(__name__)

#: node.meta key: device type -> Region
REGION_META = "amp_fx_region"

#: meta key of the output node: dtypes of each returned value, as traced
OUTPUT_META = "amp_fx_traced"

#: Higher-order ops whose bodies are left as they are, and why. A body that stays is traced at eager dtypes.
OPAQUE_BODIES = {
    "flex_attention": "score_mod bodies are scalar programs that Inductor inlines into the attention kernel",
    "flex_attention_backward": "as flex_attention",
    "triton_kernel_wrapper_mutation": "the body is a Triton kernel",
    "triton_kernel_wrapper_functional": "the body is a Triton kernel",
    "autograd_function_apply": "the forward and backward bodies share saved tensors, whose dtypes must agree",
}


#: A plain call of its body. AOTAutograd differentiates a body that was traced again with no tangents, and fails.
_INLINED = "invoke_subgraph"


@dataclass(frozen=True)
class _Raw:
    """A value that only exists inside a functorch region: a proxy for the graph, no fake tensor to run on."""

    proxy: fx.Proxy
    example: Any


def capture(gm: fx.GraphModule, ambient: Mapping[str, Region]) -> fx.GraphModule:
    """Captures a Dynamo graph as pre-dispatch ATen. ``gm`` is not changed.

    Args:
        gm: the graph Dynamo hands to a backend; placeholders carry ``meta["example_value"]``.
        ambient: autocast state at graph entry per device type.

    Returns:
        A new GraphModule with the same placeholders, in order and with their metadata. Every node has
        ``meta["val"]`` (fake tensors, traced dtypes), ``meta[REGION_META]``, ``nn_module_stack`` and
        ``stack_trace``. Bodies of higher-order ops are child GraphModules of the same kind.

    Raises:
        CaptureError: the graph cannot be traced; the cause is chained and the source line named.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    try:
        fakes = [node.meta["example_value"] for node in placeholders]
    except KeyError as error:
        raise CaptureError("a graph input has no fake value; was the graph made by Dynamo?") from error
    # a graph may make all its tensors itself
    values = (value for node in gm.graph.nodes for value in tensors(node.meta.get("example_value")))
    fake_mode = next((mode for value in values if (mode := fake_mode_of(value)) is not None), None)
    if fake_mode is None:
        raise CaptureError("the graph has no tensor to take a fake tensor mode from")

    regions = node_regions(gm.graph.nodes, ambient)
    bodies = _capture_bodies(gm, regions)
    interpreter = _Capture(gm, regions, bodies)
    try:
        with (
            fake_mode,
            ignore_fresh_symbols(fake_mode),
            preserve_node_meta(),
            contextlib.ExitStack() as states,
        ):
            for device_type, region in ambient.items():
                states.enter_context(enable_autocast(device_type, region.by_user, region.dtype))
            inputs = [stand_in(fake) for fake in fakes]
            traced = make_fx(
                interpreter.run,
                decomposition_table=COMPOSITES,
                pre_dispatch=True,
                _allow_non_fake_inputs=True,
            )(*inputs)
    except CaptureError:
        raise
    except Exception as error:
        # make_fx runs the user's program: whatever it raises is a fact about this graph, chained for the
        # reader
        raise CaptureError(
            f"cannot trace {interpreter.where} to pre-dispatch ATen: {type(error).__name__}: {error}"
        ) from error
    _inline_constants(traced, fake_mode)
    _restore_placeholders(traced, placeholders)
    traced.graph.output_node().meta[OUTPUT_META] = [
        [value.dtype for value in tensors(node.meta.get("val"))] for node in output_nodes(traced)
    ]
    traced.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        # AOTAutograd recognises a Dynamo graph, and dedups its guards, by this attribute
        traced._param_name_to_source = gm._param_name_to_source
    logger.debug("captured %d Dynamo nodes as %d ATen nodes", len(gm.graph.nodes), len(traced.graph.nodes))
    return traced


def _capture_bodies(
    gm: fx.GraphModule, regions: Mapping[fx.Node, Mapping[str, Region]]
) -> dict[str, fx.GraphModule]:
    """Captures the bodies of higher-order ops, each under the autocast state of its call."""
    bodies: dict[str, fx.GraphModule] = {}
    for node in gm.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator):
            continue
        if node.target.name() in (*OPAQUE_BODIES, _INLINED):
            continue
        for arg in node.all_input_nodes:
            body = _body(gm, arg)
            if body is not None and arg.target not in bodies:
                bodies[str(arg.target)] = capture(body, regions[node])
    return bodies


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    if node.op != "get_attr":
        return None
    value = getattr(gm, str(node.target), None)
    return value if isinstance(value, fx.GraphModule) else None


class _Capture(fx.Interpreter):
    """Runs a Dynamo graph under make_fx, keeping what make_fx cannot take."""

    def __init__(
        self,
        gm: fx.GraphModule,
        regions: Mapping[fx.Node, Mapping[str, Region]],
        bodies: Mapping[str, fx.GraphModule],
    ) -> None:
        super().__init__(gm)
        self._at: fx.Node | None = None
        self._has_raw = False
        self._regions = regions
        self._bodies = bodies
        self._open: dict[fx.Node, contextlib.ExitStack] = {}
        self._level = 0

    @property
    def where(self) -> str:
        """The node that is run, with its source line."""
        return f"{self._at.name} ({where(self._at)})" if self._at else "the graph"

    @property
    def _tracer(self) -> Any:
        mode = get_proxy_mode()
        if mode is None:
            raise CaptureError("capture ran outside make_fx")
        return mode.tracer

    def run_node(self, n: fx.Node) -> Any:
        self._at = n
        graph = self._tracer.graph
        # Node.prev of the graph's root is the newest node
        last = graph._root.prev
        result = self._run(n)
        new = last.next
        while new.op != "root":
            # those of an inlined body have one already
            new.meta.setdefault(REGION_META, self._regions[n])
            new = new.next
        return result

    def _run(self, n: fx.Node) -> Any:
        if is_autocast_call(n):
            return self._switch_autocast(n)
        step = nesting_change(n.target)
        if self._level or step or is_hooks_switch(n.target):
            self._level += step
            return self._copy_raw(n)
        if isinstance(n.target, HigherOrderOperator):
            return self._inline(n) if n.target.name() == _INLINED else self._keep_higher_order(n)
        if is_gradient_call(n) or is_leaf_call(n) or changes_layout(n):
            return self._leave_raw(self._copy_raw(n))
        _check_rule(n, self._regions[n])
        with self._set_current_node(n):
            args, kwargs = self._arguments(n)
            given = (
                {id(t): (t, self._tracer.unwrap_proxy(t)) for t in tensors((args, kwargs))} if n.args else {}
            )
            result = getattr(self, n.op)(n.target, args, kwargs)
        before = {key: proxy for key, (_, proxy) in given.items()}
        if type(result) in (list, tuple):
            result = type(result)(self._separate(value, before.get(id(value))) for value in result)
        else:
            result = self._separate(result, before.get(id(result)))
        for value, proxy in given.values():
            # F.mse_loss broadcasts inside, and returns something else
            self._separate(value, proxy)
        return result

    def _arguments(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = self.fetch_args_kwargs_from_env(n)
        return tree_map(self._leave_raw, found) if self._has_raw else found

    def _switch_autocast(self, n: fx.Node) -> Any:
        if n.target is torch.amp.autocast_mode._exit_autocast:
            self._open.pop(n.args[0]).close()  # type: ignore[index]  # the node that entered
            return None
        device_type = str(n.args[0])
        region = self._regions[n][device_type]
        stack = self._open[n] = contextlib.ExitStack()
        stack.enter_context(enable_autocast(device_type, region.enabled, region.dtype))
        return None

    def _inline(self, n: fx.Node) -> Any:
        """Case: ``y = invoke_subgraph(body, name, x)`` becomes what the body does."""
        body, _, *operands = self._arguments(n)[0]
        regions = node_regions(body.graph.nodes, self._regions[n])
        return _Capture(body, regions, _capture_bodies(body, regions)).run(*operands)

    def _keep_higher_order(self, n: fx.Node) -> Any:
        """Case: ``y = hop(body, x)`` stays ``y = hop(body', x)`` with the body captured."""
        name = n.target.name()  # type: ignore[union-attr]  # a higher-order op
        captured = [str(a.target) for a in n.all_input_nodes if str(a.target) in self._bodies]
        by_user = any(region.by_user and region.enabled for region in self._regions[n].values())
        if by_user and not captured:
            raise CaptureError(
                f"higher-order op {name} inside torch.autocast cannot be rewritten"
                f" ({OPAQUE_BODIES.get(name, 'it has no body')})"
            )
        args, kwargs = self._arguments(n)
        proxy_args, proxy_kwargs = tree_map(self._to_proxy, (args, kwargs))
        proxy = self._tracer.create_proxy("call_function", n.target, proxy_args, proxy_kwargs, name=n.name)
        proxy.node.meta.update({k: n.meta[k] for k in ("stack_trace", "nn_module_stack") if k in n.meta})
        return track_tensor_tree(_example(n), proxy, constant=None, tracer=self._tracer)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, fx.GraphModule):
            value = self._bodies.get(str(target), value)
            if getattr(self._tracer.root, str(target), value) is not value:
                raise CaptureError(
                    f"two bodies of higher-order ops, one inside the other, are named {target}"
                )
            self._tracer.root.add_module(str(target), value)
        return value

    def _copy_raw(self, n: fx.Node) -> _Raw:
        """Case: a node inside a functorch region, or a switch around one, is copied as Dynamo wrote it.

        So are ``torch.autograd.grad``, ``requires_grad_``, and what changes the layout of a DTensor.
        """
        args, kwargs = tree_map(self._to_proxy, self.fetch_args_kwargs_from_env(n))
        proxy = self._tracer.create_proxy(n.op, n.target, args, kwargs, name=n.name)
        example = n.meta.get("example_value")
        proxy.node.meta.update({k: n.meta[k] for k in ("stack_trace", "nn_module_stack") if k in n.meta})
        if not any(is_functorch_wrapped(leaf) for leaf in tree_leaves(example)):
            with disable_proxy_modes_tracing():
                proxy.node.meta["val"] = tree_map(stand_in, example)
        self._has_raw = True
        return _Raw(proxy, example)

    def _leave_raw(self, value: Any) -> Any:
        """Turns a functorch region's result into a fake tensor that make_fx can go on with."""
        if not isinstance(value, _Raw):
            return value
        with disable_proxy_modes_tracing():
            example = tree_map(stand_in, value.example)
        return track_tensor_tree(example, value.proxy, constant=None, tracer=self._tracer)

    def _to_proxy(self, value: Any) -> Any:
        return value.proxy if isinstance(value, _Raw) else self._tracer.unwrap_proxy(value)

    def _separate(self, result: Any, argument: Any) -> Any:
        """Gives a no-op that returned its own argument a value of its own.

        ``y = x.to(torch.float32)`` on an fp32 ``x`` returns ``x`` itself; make_fx would then call every later
        use of ``x`` a use of ``y``. So do ``broadcast_tensors`` and with it ``F.mse_loss``: under ``no_grad``, later
        uses of ``x`` would lose their gradient. In-place calls do return their argument, and stay.

        Args:
            result: what the call returned.
            argument: proxy, from before the call, of the argument that ``result`` is; None if it is none.
        """
        proxy = self._tracer.unwrap_proxy(result) if isinstance(argument, fx.Proxy) else None
        if proxy is None or proxy.node is argument.node:
            return result
        call = proxy.node.args[0] if proxy.node.target is operator.getitem else proxy.node
        if not isinstance(call.target, OpOverload) or call.target._schema.is_mutable:
            return result
        with disable_proxy_modes_tracing():
            alias = torch.ops.aten.alias.default(result)
        track_tensor_tree(alias, proxy, constant=None, tracer=self._tracer)
        track_tensor_tree(result, argument, constant=None, tracer=self._tracer)
        return alias


def _check_rule(n: fx.Node, regions: Mapping[str, Region]) -> None:
    """A custom op may have an autocast rule of its own, which Dynamo's fake tensors and op lists do not show.

    Raises:
        CaptureError: it has one, and stands in a region of the user's.
    """
    if not isinstance(n.target, OpOverload) or n.target.namespace in ("aten", "prims"):
        return
    by_user = [device for device, region in regions.items() if region.by_user and region.enabled]
    if any(has_autocast_rule(n.target, device) for device in by_user if device in ("cpu", "cuda", "xpu")):
        raise CaptureError(f"{n.target} has an autocast rule of its own, inside torch.autocast ({where(n)})")


def _example(n: fx.Node) -> Any:
    if "example_value" not in n.meta:
        raise CaptureError(f"{n.name} ({where(n)}) has no fake value")
    return n.meta["example_value"]


def _inline_constants(traced: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Makes tensors that make_fx kept as attributes again what they were: literals of the program.

    ``ids[..., 0] = 5`` leaves ``_tensor_constant0`` behind, which AOTAutograd would look up among Dynamo's
    parameters and not find.

    Raises:
        CaptureError: the attribute is no literal, but a parameter that Dynamo did not make an input.
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
                call: tuple[Any, Any] = torch.ops.aten.full.default, ([], value.item())
            else:
                call = torch.tensor, (value.tolist(),)
            literal = traced.graph.call_function(*call, {"dtype": value.dtype, "device": value.device})
        literal.meta = {**next(iter(node.users)).meta, **node.meta, "val": fake_mode.from_tensor(value)}
        node.replace_all_uses_with(literal)
        traced.graph.erase_node(node)
        delattr(traced, str(node.target))


def _restore_placeholders(traced: fx.GraphModule, originals: list[fx.Node]) -> None:
    """Gives the new placeholders the names and metadata that AOTAutograd reads from Dynamo's."""
    for node, original in zip(traced.graph.find_nodes(op="placeholder"), originals, strict=True):
        node.meta = {**original.meta, **node.meta}
        node.target = original.target
        node._rename(original.name)
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source  # type: ignore[attr-defined]  # Dynamo's own
    let_go(traced.graph)
    traced.recompile()
