"""The step of capture for each node of a Dynamo graph: it runs under make_fx, or stays as it stands.

DTensors of tensor parallelism are captured as plain fake tensors of their global shapes, which compute and cast alike.
Calls that change a layout (``from_local``, ``redistribute``, ``to_local``) stay as Dynamo wrote them. So do all calls
of other tensor subclasses that wrap tensors, as a quantised weight does: an attribute of one has no node.

What stays in a region of the user's autocast takes that along: AOTAutograd traces the graph with autocast off.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
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
    is_functorch_wrapped,
    is_hidden_call,
    is_hooks_switch,
    is_wrapper,
    nesting_change,
    track_tensor_tree,
    wrapped_tensors,
)
from amp_fx.errors import CaptureError
from amp_fx.graphs.calls import (
    LAYOUTS,
    is_gradient_call,
    is_leaf_call,
    origin,
    target_name,
    where,
)
from amp_fx.graphs.keys import REGION_META, STEP_META
from amp_fx.graphs.regions import (
    EXIT,
    Regions,
    enter_autocast,
    is_autocast_call,
    leave_autocast,
    node_regions,
    of_user,
)
from amp_fx.graphs.values import tensors

#: Higher-order ops whose bodies are left as they are, and why. A body that stays is traced at eager dtypes, under the
#: user's autocast where the call is.
OPAQUE_BODIES = {
    "flex_attention": "score_mod bodies are scalar programs that Inductor inlines into the attention kernel",
    "flex_attention_backward": "as flex_attention",
    "triton_kernel_wrapper_mutation": "the body is a Triton kernel",
    "triton_kernel_wrapper_functional": "the body is a Triton kernel",
    "autograd_function_apply": "the forward and backward bodies share saved tensors, whose dtypes must agree",
}

#: A plain call of its body. AOTAutograd differentiates a body that was traced again with no tangents, and fails.
INLINED = "invoke_subgraph"
#: graph, autocast state per node -> captured bodies of its higher-order ops, by attribute name
CaptureBodies = Callable[[fx.GraphModule, Mapping[fx.Node, Regions]], dict[str, fx.GraphModule]]


@dataclass
class _Raw:
    """A value that only exists inside a functorch region: a proxy for the graph, no fake tensor to run on."""

    proxy: fx.Proxy
    example: Any
    left: Any = None  # what the first call outside was given; a later one may have changed its shape


class CapturingInterpreter(fx.Interpreter):
    """Runs a Dynamo graph under make_fx, keeping what make_fx cannot take."""

    def __init__(
        self, gm: fx.GraphModule, regions: Mapping[fx.Node, Regions], capture_bodies: CaptureBodies
    ) -> None:
        super().__init__(gm)
        self._at: fx.Node | None = None
        self._has_raw = False
        self._regions = regions
        self._capture_bodies = capture_bodies
        self._bodies = capture_bodies(gm, regions)
        self._open: dict[fx.Node, contextlib.ExitStack] = {}
        #: the autocast that is on in the new graph, and the nodes that have entered it
        self._entered: tuple[Regions, list[fx.Node]] = {}, []
        self._level = 0

    @property
    def where(self) -> str:
        """The node that is run, with its source line."""
        return f"{self._at.name} ({where(self._at)})" if self._at else "the graph"

    @property
    def _tracer(self) -> Any:
        if (mode := get_proxy_mode()) is None:
            raise CaptureError("capture ran outside make_fx")
        return mode.tracer

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, and notes the autocast state on what that adds to the new graph."""
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
        # the function that vjp returns reads values of a level that has ended
        given = tensors([each.meta.get("example_value") for each in n.all_input_nodes])
        is_inside = self._level or step or any(map(is_functorch_wrapped, given))
        is_raw = bool(is_inside or is_hooks_switch(n.target))
        self._keep_autocast(self._regions[n] if is_raw or takes_wrapped(n) else {})
        if is_raw:
            self._level += step
            return self._copy_raw(n)
        if isinstance(n.target, HigherOrderOperator):
            return self._inline(n) if n.target.name() == INLINED else self._keep_higher_order(n)
        if is_call_left(n):
            return self._leave_raw(self._copy_raw(n))
        if is_hidden_call(n.target):
            return self._keep_hidden(n)
        _check_rule(n, self._regions[n])
        with self._set_current_node(n):
            args, kwargs = self._arguments(n)
            given = [(t, self._tracer.unwrap_proxy(t)) for t in (tensors((args, kwargs)) if n.args else ())]
            result = getattr(self, n.op)(n.target, args, kwargs)
        before = {id(value): proxy for value, proxy in given}
        if type(result) in (list, tuple):
            result = type(result)(self._separate(value, before.get(id(value))) for value in result)
        else:
            result = self._separate(result, before.get(id(result)))
        for value, proxy in given:
            # F.mse_loss broadcasts inside, and returns something else
            self._separate(value, proxy)
        return result

    def _arguments(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = self.fetch_args_kwargs_from_env(n)
        return tree_map(self._leave_raw, found) if self._has_raw else found

    def _switch_autocast(self, n: fx.Node) -> Any:
        if n.target is EXIT:
            self._open.pop(n.args[0]).close()  # type: ignore[index]  # the node that entered
            return None
        device_type = str(n.args[0])
        region = self._regions[n][device_type]
        stack = self._open[n] = contextlib.ExitStack()
        stack.enter_context(enable_autocast(device_type, region.enabled, region.dtype))
        return None

    def _keep_autocast(self, wanted: Regions) -> None:
        """Has the new graph enter the user's autocast for what stays as it is, and leave it for all else."""
        state, entered = self._entered
        if of_user(wanted) == state:
            return
        left = leave_autocast(self._tracer.graph, entered)
        entered = enter_autocast(self._tracer.graph, of_user(wanted))
        self._entered = of_user(wanted), entered
        for switch in (*left, *entered):
            # no call of the program's
            switch.meta[STEP_META] = True

    def _keep_hidden(self, n: fx.Node) -> Any:
        """Case: ``y = x.data`` is a view of ``x`` that make_fx does not see, and that autograd is not to see."""
        args, kwargs = self._arguments(n)
        with disable_proxy_modes_tracing():
            result = n.target(*args, **kwargs)  # type: ignore[operator]  # a function
        proxy = self._tracer.create_proxy(
            n.op, n.target, *tree_map(self._to_proxy, (args, kwargs)), name=n.name
        )
        proxy.node.meta.update(origin(n))
        is_given = any(result is value for value in args)
        return result if is_given else track_tensor_tree(result, proxy, constant=None, tracer=self._tracer)

    def _inline(self, n: fx.Node) -> Any:
        """Case: ``y = invoke_subgraph(body, name, x)`` becomes what the body does."""
        body, _, *operands = self._arguments(n)[0]
        regions = node_regions(body.graph.nodes, self._regions[n])
        return CapturingInterpreter(body, regions, self._capture_bodies).run(*operands)

    def _keep_higher_order(self, n: fx.Node) -> Any:
        """Case: ``y = hop(body, x)`` stays ``y = hop(body', x)`` with the body captured."""
        if "example_value" not in n.meta:
            raise CaptureError(f"{n.name} ({where(n)}) has no fake value")
        args, kwargs = tree_map(self._to_proxy, self._arguments(n))
        proxy = self._tracer.create_proxy("call_function", n.target, args, kwargs, name=n.name)
        proxy.node.meta.update(origin(n))
        return track_tensor_tree(n.meta["example_value"], proxy, constant=None, tracer=self._tracer)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An attribute, or the captured body in its place.

        CaptureError where two bodies, one in the other, have one name.
        """
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, fx.GraphModule):
            value = self._bodies.get(str(target), value)
            if getattr(self._tracer.root, str(target), value) is not value:
                raise CaptureError(f"two bodies of higher-order ops, one in the other, are named {target}")
            self._tracer.root.add_module(str(target), value)
        return value

    def _copy_raw(self, n: fx.Node) -> _Raw:
        """Case: a node inside a functorch region, or a switch around one, is copied as Dynamo wrote it.

        So are ``torch.autograd.grad``, ``requires_grad_``, and what changes the layout of a DTensor.
        """
        args, kwargs = tree_map(self._to_proxy, self.fetch_args_kwargs_from_env(n))
        proxy = self._tracer.create_proxy(n.op, n.target, args, kwargs, name=n.name)
        example = n.meta.get("example_value")
        proxy.node.meta.update(origin(n))
        if not any(is_functorch_wrapped(leaf) for leaf in tree_leaves(example)):
            with disable_proxy_modes_tracing():
                proxy.node.meta["val"] = tree_map(stand_in, example)
        self._has_raw = True
        return _Raw(proxy, example)

    def _leave_raw(self, value: Any) -> Any:
        """Turns a functorch region's result into a fake tensor that make_fx can go on with."""
        if not isinstance(value, _Raw):
            return value
        if value.left is None:
            with disable_proxy_modes_tracing():
                example = tree_map(stand_in, value.example)
            value.left = track_tensor_tree(example, value.proxy, constant=None, tracer=self._tracer)
        return value.left

    def _to_proxy(self, value: Any) -> Any:
        return value.proxy if isinstance(value, _Raw) else self._tracer.unwrap_proxy(value)

    def _separate(self, result: Any, argument: Any) -> Any:
        """Gives a no-op that returned its own argument a value of its own.

        ``y = x.to(torch.float32)`` on an fp32 ``x`` returns ``x`` itself; make_fx would then call every later
        use of ``x`` a use of ``y``. So do ``broadcast_tensors`` and with it ``F.mse_loss``: under ``no_grad``, later
        uses of ``x`` would lose their gradient. In-place calls do return their argument, and stay. ``argument`` is the
        proxy, from before the call, of the argument that the result is, or None.
        """
        proxy = self._tracer.unwrap_proxy(result) if isinstance(argument, fx.Proxy) else None
        if proxy is None or proxy.node is argument.node:
            return result
        call = proxy.node.args[0] if proxy.node.target is operator.getitem else proxy.node
        if not isinstance(call.target, OpOverload) or call.target._schema.is_mutable:
            return result
        # a view made without gradients may not be written to where gradients are; the argument may
        with disable_proxy_modes_tracing(), torch.enable_grad():
            alias = torch.ops.aten.alias.default(result)
        track_tensor_tree(alias, proxy, constant=None, tracer=self._tracer)
        track_tensor_tree(result, argument, constant=None, tracer=self._tracer)
        return alias


def reads_example(node: fx.Node) -> bool:
    """True for a node whose value capture takes from Dynamo, and does not compute."""
    given = tensors([each.meta.get("example_value") for each in node.all_input_nodes])
    is_kept = isinstance(node.target, HigherOrderOperator) or is_call_left(node)
    return is_kept or any(map(is_functorch_wrapped, given))


def is_call_left(node: fx.Node) -> bool:
    """True for a call, outside of functorch regions, that is copied as Dynamo wrote it."""
    return is_gradient_call(node) or is_leaf_call(node) or changes_layout(node) or takes_wrapped(node)


def takes_wrapped(node: fx.Node) -> bool:
    """True for a call that takes or returns a tensor that wraps others, and is no DTensor."""
    if node.op not in ("call_function", "call_method"):
        return False
    found = tensors([each.meta.get("example_value") for each in (node, *node.all_input_nodes)])
    return any(is_wrapper(value) and not is_distributed(value) for value in found)


def _check_rule(n: fx.Node, regions: Regions) -> None:
    """Refuses a custom op with an autocast rule of its own in a user's region: its fake tensors do not show it."""
    if not isinstance(n.target, OpOverload) or n.target.namespace in ("aten", "prims"):
        return
    by_user = [device for device, region in regions.items() if region.by_user and region.enabled]
    if any(has_autocast_rule(n.target, device) for device in by_user):
        raise CaptureError(f"{n.target} has an autocast rule of its own, inside torch.autocast ({where(n)})")


def is_distributed(value: object) -> bool:
    """True for a DTensor. Nobody has one who has not imported the module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def fake_mode_of(value: torch.Tensor) -> FakeTensorMode | None:
    """The mode that a fake tensor belongs to, or the one of what a tensor wraps."""
    while is_wrapper(value):
        value = wrapped_tensors(value)[0]
    return value.fake_mode if isinstance(value, FakeTensor) else None


def stand_in(value: Any) -> Any:
    """A plain fake tensor for one that wraps others, to be made under its fake mode; other values as they are."""
    if not isinstance(value, torch.Tensor) or not is_wrapper(value):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def changes_layout(node: fx.Node) -> bool:
    """True for a call that makes a DTensor of something else, or the reverse, or places it in another way."""
    if node.op not in ("call_function", "call_method"):
        return False
    made, *given = (
        any(map(is_distributed, tensors(each.meta.get("example_value"))))
        for each in (node, *node.all_input_nodes)
    )
    return any(given) != made or (made and target_name(node) in LAYOUTS)
